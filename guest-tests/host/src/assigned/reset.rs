//! Scenario: one user of a function leaves no data in it for the next, whether it is reset by itself or with its bus. A
//! function that cannot be reset keeps the data, and the VMM reports that.

use std::path::Path;

use egm_guest::findings::Check;

use crate::assigned::held::{self, DECODE};
use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::hosts::physical::Physical;
use crate::runner::machine::Runner;
use crate::runner::steps::{Fault, Step, Steps, timed};

/// Value that is left behind.
const MARK: u64 = 0x5ca1_ab1e_0ddb_a115;

/// A register of a function that keeps its value until a reset.
#[derive(Debug, Clone, Copy)]
struct RegisterInFunction<'a> {
    function: &'a str,
    bar: u8,
    offset: u64,
}

/// Runs the scenario with its functions: two cards, two cards of one bus, and a memory.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let [card, switched, first, second, memory] = scenario.assigned else {
        return Err(LabError::Usage(format!("{} needs five functions", scenario.name)));
    };
    let machines = Machines { runner, scenario, report };
    // The multicast table of Intel's cards (82574 datasheet, 10.2.5.16).
    let [card, switched, first, second] = [card, switched, first, second]
        .map(|function| RegisterInFunction { function, bar: 0, offset: 0x5200 });
    let memory = RegisterInFunction { function: memory, bar: 2, offset: 0 };
    steps.cases.push(machines.leaves_nothing("its own reset", &[card], &[card], ""));
    steps.cases.push(machines.leaves_nothing("its own reset, behind a switch", &[switched], &[switched], ""));
    let both = [first, second];
    steps.cases.push(machines.leaves_nothing("one reset of the bus of both", &both, &both, ""));
    let note = format!("{} is reset with its bus, and so was {}", first.function, second.function);
    steps.cases.push(machines.leaves_nothing("the bus of one and another", &[first], &both, &note));
    steps.step("no reset", || machines.keeps(memory));
    steps.free();
    Ok(())
}

struct Machines<'a> {
    runner: &'a Runner,
    scenario: &'a Scenario,
    report: &'a Path,
}

impl Machines<'_> {
    /// A machine with the functions of `given` finds no value that the host left at `places`. The next machine finds
    /// none that the first left there when it was killed. The VMM prints `note`.
    fn leaves_nothing(
        &self,
        name: &str,
        given: &[RegisterInFunction<'_>],
        places: &[RegisterInFunction<'_>],
        note: &str,
    ) -> Check {
        timed(name, || {
            places.iter().try_for_each(RegisterInFunction::mark)?;
            for _ in 0..2 {
                self.with(given, note, || {
                    places.iter().try_for_each(|place| place.has(0))?;
                    places.iter().try_for_each(RegisterInFunction::mark)
                })?;
            }
            Ok(())
        })
    }

    /// A machine with `place` finds the value that was left there, and the VMM reports it.
    fn keeps(&self, place: RegisterInFunction<'_>) -> Step {
        let note = format!("{} cannot be reset: the guest finds what its last user left", place.function);
        place.mark()?;
        let kept = self.with(&[place], &note, || place.has(MARK));
        place.set(0)?;
        kept
    }

    /// As [`held::with`]; the VMM prints `note`, or, if that is empty, nothing about resets.
    fn with(&self, given: &[RegisterInFunction<'_>], note: &str, look: impl Fn() -> Step) -> Step {
        let functions: Vec<&str> = given.iter().map(|place| place.function).collect();
        let said = held::with(self.runner, self.scenario, self.report, &functions, look)?;
        if said.contains(note) && (!note.is_empty() || !said.contains("reset")) {
            return Ok(());
        }
        Err(Fault::Untrue(format!("not \"{note}\" is what it said, but: {said}")))
    }
}

impl RegisterInFunction<'_> {
    fn page(&self) -> Result<Physical, Fault> {
        held::page(self.function, self.bar, self.offset, DECODE)
    }

    fn set(&self, value: u64) -> Step {
        self.page()?.set_word(self.offset & 0xfff, value).ok_or("no such place")?;
        self.has(value)
    }

    fn mark(&self) -> Step {
        self.set(MARK)
    }

    fn has(&self, value: u64) -> Step {
        match self.page()?.word(self.offset & 0xfff) {
            Some(there) if there == value => Ok(()),
            there => Err(Fault::Untrue(format!("{self:?} has {there:x?}, not {value:#x}"))),
        }
    }
}
