//! Scenario: the host's IOMMU refuses a forbidden access of a device, and the fault check at the end of scenarios with
//! assigned functions detects that. A check that never sees a fault proves nothing.
//!
//! The engine is QEMU's edu (`docs/specs/edu.rst`).

use std::time::Instant;

use crate::assigned::held::{self, DECODE, MASTER};
use crate::engine::error::LabError;
use crate::engine::step::{TIMEOUT, eventually};
use crate::hosts::iommu::{self, no_faults_since};
use crate::runner::steps::{Fault, Step, Steps};

const COMMAND: u64 = 0x98;
const RUN: u64 = 1;
const TO_MEMORY: u64 = 2;
/// Offsets of a transfer's registers.
const SOURCE: u64 = 0x80;
const DESTINATION: u64 = 0x88;
const COUNT: u64 = 0x90;
/// The engine's own buffer.
const BUFFER: u64 = 0x4_0000;
/// An address that no guest of the lab uses, below 2^39, so that the IOMMU could map it.
const UNMAPPED: u64 = 0x20_0000_0000;
const PAGE: u64 = 0x1000;

/// Separate refused transfers in a row: more than the kernel logs, which is ten messages in five seconds.
const FLOOD: u64 = 64;

/// Runs the scenario with its engine.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let [engine] = scenario.assigned else {
        return Err(LabError::Usage(format!("{} needs one function", scenario.name)));
    };
    let before = iommu::faults()?;
    steps.step("a fault is found", || {
        held::with(runner, scenario, report, &[engine], || {
            transfer(engine)?;
            found(before)
        })
        .map(drop)
    });
    steps.step("every fault is counted", || {
        held::with(runner, scenario, report, &[engine], || {
            let before = iommu::faults()?;
            (0..FLOOD).try_for_each(|_| transfer(engine))?;
            eventually(TIMEOUT, || match iommu::faults()?.saturating_sub(before) {
                counted if counted >= FLOOD => Ok(()),
                counted => Err(Fault::Untrue(format!("{counted} of {FLOOD} refused transfers were counted"))),
            })
        })
        .map(drop)
    });
    steps.free();
    Ok(())
}

/// Runs one transfer of a page from the engine's buffer to the unmapped address, to its end.
pub(crate) fn transfer(engine: &str) -> Step {
    let registers = held::page(engine, 0, 0, DECODE | MASTER)?;
    let begun = Instant::now();
    let set = |register, value| registers.set_word(register, value).ok_or("no such register");
    set(SOURCE, BUFFER)?;
    set(DESTINATION, UNMAPPED)?;
    set(COUNT, PAGE)?;
    set(COMMAND, RUN | TO_MEMORY)?;
    while registers.word(COMMAND).is_some_and(|command| command & RUN != 0) {
        if begun.elapsed() > TIMEOUT {
            return Err(Fault::Untrue("the engine does not end its transfer".to_owned()));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// The fault check finds a fault, once its interrupt has arrived.
pub(crate) fn found(before: u64) -> Step {
    eventually(TIMEOUT, || match no_faults_since(before) {
        Err(Fault::Untrue(_)) => Ok(()),
        _ => Err("a device wrote where nothing is mapped, and the IOMMU reported no fault".into()),
    })
}
