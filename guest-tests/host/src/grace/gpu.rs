//! Scenario: a GPU with memory that processors share. The VMM refuses it before it is ready; a guest uses its memory to
//! the last byte, and so does another function; the memory lies at the driver's address; the GPU is free afterwards.

use crate::assigned::held::{self, DECODE};
use crate::engine::error::LabError;
use crate::hosts::extent::Extent;
use crate::hosts::grace::machine::memory_of;
use crate::runner::refusal::{HOST_LACKS, refused};
use crate::runner::steps::{Fault, Step, Steps};
use crate::slices::host_words::physical;

/// Offset in BAR 0 of the link's training word, and its value once the link is trained.
const LINK: u64 = 0x1498;
const TRAINED: u64 = 0xff;
/// Value that the agent's check `gpu_memory` leaves in the first and the last word of each BAR's memory.
const MARK: u64 = 0x6d65_6d20_7570_6721;
/// Bytes of a word.
const WORD: u64 = 8;

/// Runs the scenario with its first function, a GPU.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let gpu = scenario.assigned.first().copied().unwrap_or_default();
    let folder = steps.folder("waits")?;
    let machine = runner.machine(scenario, &folder)?;
    steps.step("not-ready", || {
        link(gpu, 0)?;
        let refused = refused(&mut runner.command(&machine), HOST_LACKS, &[gpu, "is not ready", "C2C link"]);
        link(gpu, TRAINED)?;
        refused
    });
    let boot = runner.boot(scenario, &machine, report)?;
    steps.judge(scenario.expected, &boot, "");
    steps.step("in-place", || in_place(gpu));
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// Sets the GPU's link word to trained or not trained.
fn link(gpu: &str, value: u64) -> Step {
    held::page(gpu, 0, LINK, DECODE)?.set_word(LINK & 0xfff, value).ok_or("no such word")?;
    Ok(())
}

/// The guest's marks lie in each part of the GPU's memory, at the host's physical addresses.
pub(super) fn in_place(gpu: &str) -> Step {
    let parts = memory_of(gpu).ok_or("it is no GPU of the lab")?;
    let words = parts.iter().flat_map(|part| [part.start, part.end() - WORD]);
    for address in words {
        let page = physical(Extent { start: address & !0xfff, size: 0x1000 })?;
        match page.word(address & 0xfff) {
            Some(MARK) => {}
            found => {
                return Err(Fault::Untrue(format!(
                    "at host address {address:#x} lies {found:x?}, not the mark"
                )));
            }
        }
    }
    Ok(())
}
