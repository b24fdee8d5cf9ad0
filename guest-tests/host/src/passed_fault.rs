//! The story of an access that no device may make: the host's IOMMU refuses it, and the check with which the stories of passed
//! functions end sees that. A check that never sees a fault proves nothing.
//!
//! The engine is QEMU's edu (`docs/specs/edu.rst`).

use std::time::Instant;

use crate::error::LabError;
use crate::frame::{Fault, Frame, Step};
use crate::hand::{self, DECODE, MASTER};
use crate::iommu::{self, no_faults_since};
use crate::slices::PATIENCE;

const COMMAND: u64 = 0x98;
const RUN: u64 = 1;
const TO_MEMORY: u64 = 2;
/// Source, destination, count and command of a transfer: a page of the engine's own buffer goes to where no guest of the lab
/// has anything, below 2^39, where the IOMMU could map something.
const TRANSFER: [(u64, u64); 4] =
    [(0x80, 0x4_0000), (0x88, 0x20_0000_0000), (0x90, 0x1000), (COMMAND, RUN | TO_MEMORY)];

/// Refused transfers in a row, each of its own: more than the kernel's log has room for, which takes ten messages in five seconds.
const FLOOD: u64 = 64;

/// Tells the story of the engine of `scenario`.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, report, .. } = *frame;
    let [engine] = scenario.passed else {
        return Err(LabError::Usage(format!("{} needs one function", scenario.name)));
    };
    let before = iommu::faults()?;
    frame.step("a fault is found", || {
        hand::with(runner, scenario, report, &[engine], || {
            transfer(engine)?;
            found(before)
        })
        .map(drop)
    });
    frame.step("every fault is counted", || {
        hand::with(runner, scenario, report, &[engine], || {
            let before = iommu::faults()?;
            (0..FLOOD).try_for_each(|_| transfer(engine))?;
            match iommu::faults()?.saturating_sub(before) {
                counted if counted >= FLOOD => Ok(()),
                counted => Err(Fault::Untrue(format!("{counted} of {FLOOD} refused transfers were counted"))),
            }
        })
        .map(drop)
    });
    frame.free();
    Ok(())
}

/// The engine does its transfer to the end.
pub(crate) fn transfer(engine: &str) -> Step {
    let registers = hand::page(engine, 0, 0, DECODE | MASTER)?;
    let begun = Instant::now();
    for (register, value) in TRANSFER {
        registers.set_word(register, value).ok_or("no such register")?;
    }
    while registers.word(COMMAND).is_some_and(|command| command & RUN != 0) {
        if begun.elapsed() > PATIENCE {
            return Err(Fault::Untrue("the engine does not end its transfer".to_owned()));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// The check for faults sees one.
pub(crate) fn found(before: u64) -> Step {
    match no_faults_since(before) {
        Err(Fault::Untrue(_)) => Ok(()),
        _ => Err(Fault::Untrue("a device wrote where nothing is mapped, and nobody told".to_owned())),
    }
}
