//! The story of a GPU whose memory processors share: not given before it is ready, used by a guest to its last byte and by
//! another function, found where its driver says that it lies, free afterwards.

use crate::error::LabError;
use crate::frame::{Fault, Frame, Step};
use crate::hand::{self, DECODE};
use crate::passed::refused;
use crate::slices::{HOST_LACKS, physical};

use super::machine::memory_of;

/// Offset in BAR 0 of the word that says whether the link is trained, and what it is then.
const LINK: u64 = 0x1498;
const TRAINED: u64 = 0xff;
/// What the agent's check `gpu_memory` leaves in the first and the last word of each BAR's memory.
const MARK: u64 = 0x6d65_6d20_7570_6721;
/// Bytes of a word.
const WORD: u64 = 8;

/// Tells the story of the first function of `scenario`, a GPU.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, report, .. } = *frame;
    let gpu = scenario.passed.first().copied().unwrap_or_default();
    let folder = frame.folder("waits")?;
    let machine = runner.machine(scenario, &folder)?;
    frame.step("not-ready", || {
        link(gpu, 0)?;
        let refused = refused(&mut runner.command(&machine), HOST_LACKS, &[gpu, "is not ready", "C2C link"]);
        link(gpu, TRAINED)?;
        refused
    });
    let boot = runner.boot(scenario, &machine, report)?;
    frame.judge(scenario.expected, &boot, "");
    frame.step("in-place", || in_place(gpu));
    frame.free();
    frame.no_faults("no-dma-faults");
    Ok(())
}

/// Has the GPU say that its link is trained, or not.
fn link(gpu: &str, value: u64) -> Step {
    hand::page(gpu, 0, LINK, DECODE)?.set_word(LINK & 0xfff, value).ok_or("no such word")?;
    Ok(())
}

/// What the guest left in the GPU's memory lies in each part of it, at the host's physical addresses.
pub(super) fn in_place(gpu: &str) -> Step {
    let parts = memory_of(gpu).ok_or("it is no GPU of the lab")?;
    let words = parts.iter().flat_map(|(start, size)| [*start, start + size - WORD]);
    for address in words {
        let page = physical(address & !0xfff, 0x1000)?;
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
