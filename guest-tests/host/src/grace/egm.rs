//! Scenario: EGM of a driver's device. The same as for every slice, and in addition pages that firmware retired.

use std::fs::File;

use egm_guest::findings::Line;

use crate::engine::error::LabError;
use crate::engine::judge::Expected;
use crate::engine::scenario::Scenario;
use crate::hosts::grace::machine::{BLOCK, retired_in};
use crate::hosts::parts::Plan;
use crate::hosts::physical::Physical;
use crate::runner::steps::{Fault, Step, Steps};
use crate::slices::owned;

/// Value that the lab leaves at the beginning and the end of a retired block, while a guest has the slice around it.
const MARK: u64 = 0x6465_7269_7465_7221;

/// Runs the scenario of a slice of an EGM device.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    owned::run(steps)?;
    let Steps { runner, scenario, .. } = *steps;
    let whole = Scenario { words: "egm.checks=memory_map,egm_pattern", ..*scenario };
    let folder = steps.folder("around")?;
    let machine = runner.machine(&whole, &folder)?;
    let blocks = retired_in(machine.plan.as_ref().and_then(Plan::slice));
    steps.step("holes", || holes(machine.plan.as_ref(), &blocks));
    let mut marked = None;
    let boot = runner.boot_by(runner.command(&machine), &whole, &machine, &folder, |line| {
        // The guest reports: the device is open by now, and will not be zeroed again.
        if marked.is_none() && Line::parse(line).is_some() {
            marked = Some(mark(&blocks));
        }
    })?;
    let expected = Expected::power_off(&["memory_map", "egm_pattern"]);
    steps.judge(expected, &boot, " around");
    steps.step("marked", || marked.unwrap_or_else(|| Err("the guest did not report".into())));
    steps.step("untouched", || untouched(&blocks));
    Ok(())
}

/// There are retired blocks, and the guest has no memory there.
fn holes(plan: Option<&Plan>, blocks: &[u64]) -> Step {
    let plan = plan.ok_or("there is no plan")?;
    if blocks.is_empty() {
        return Err(Fault::Untrue("the slice has no retired block: nothing is shown".into()));
    }
    let ends = blocks.iter().flat_map(|block| [*block, block + BLOCK - 1]);
    match ends.map(|address| (address, plan.has_ram_at(address))).find(|(_, has)| *has != Some(false)) {
        None => Ok(()),
        Some((address, _)) => Err(Fault::Untrue(format!("the guest has RAM at retired {address:#x}"))),
    }
}

/// Block and offset of the first and the last word of each block.
fn words(blocks: &[u64]) -> impl Iterator<Item = (u64, u64)> {
    blocks.iter().flat_map(|block| [(*block, 0), (*block, BLOCK - 8)])
}

fn mark(blocks: &[u64]) -> Step {
    let memory = File::options().read(true).write(true).open("/dev/mem")?;
    for (block, offset) in words(blocks) {
        let mapped = Physical::map_writable(&memory, block, BLOCK)?;
        mapped.set_word(offset, MARK).ok_or("a word outside of its block")?;
    }
    Ok(())
}

/// Neither the guest nor the scrub after it wrote to the blocks.
fn untouched(blocks: &[u64]) -> Step {
    let memory = File::open("/dev/mem")?;
    for (block, offset) in words(blocks) {
        let found = Physical::map(&memory, block, BLOCK)?.word(offset);
        if found != Some(MARK) {
            return Err(Fault::Untrue(format!("at retired {:#x} lies {found:x?}", block + offset)));
        }
    }
    Ok(())
}
