//! A guest of a peer: it checks its slice, counts its checks in the slice itself, and prints the event that it waits
//! for on its console. The host reads the counts in the memory of the server.

use std::process::Command;
use std::time::Instant;

use egm_guest::findings::{Check, Line, MAX_LINES};

use crate::engine::boot::Boot;
use crate::engine::error::LabError;
use crate::engine::judge::{Collected, Expected};
use crate::engine::process::{Limit, Reaction, watch};
use crate::engine::step::millis;
use crate::peers::parts::{Parts, SIZE};
use crate::runner::steps::{Fault, Step, Steps};

/// Prefix of the guest's lines about its checks.
const EVENT_PREFIX: &str = "egm-device ";
/// The check with the number of earlier checks as its value.
pub(crate) const CHECK: &str = "egm_device";
/// First word of the slice, without the number of checks in its low bits; each following word is larger by `STEP`.
const MARK: u64 = u64::from_le_bytes(*b"\0\0egm-ok");
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// One boot of a scenario.
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    /// The checks of its guest.
    pub(crate) checks: &'static [&'static str],
    /// Number of earlier checks of its slice.
    pub(crate) before: u32,
    /// The checks that it reports, and whether it ends by itself.
    pub(crate) expected: Expected,
}

impl Machine {
    /// A boot that completes all of its checks.
    pub(crate) const fn whole(name: &'static str, checks: &'static [&'static str], before: u32) -> Self {
        Self { name, checks, before, expected: Expected::power_off(checks) }
    }
}

/// Words of the guest's command line for the checks of `machine`.
pub(crate) fn words(machine: &Machine) -> String {
    let checks = machine.checks.join(",");
    format!("quiet egm.checks={checks} egm.arg.egm_device.size={SIZE} egm.arg.egm_device.functions=1")
}

/// Runs `command`, which starts `machine`, to its end; `react` gets the awaited event and the report's lines so far.
pub(crate) fn boot(
    steps: &mut Steps<'_>,
    machine: &Machine,
    command: Command,
    mut react: impl FnMut(&str, &mut Vec<Line>) -> Vec<Check>,
) -> Result<(), LabError> {
    let Machine { name, before, expected, .. } = *machine;
    let (mut lines, mut done, begun) = (Vec::new(), Vec::new(), Instant::now());
    let ending = watch(
        command,
        Limit::Total(steps.scenario.deadline),
        &steps.report.join(format!("{name}-console.log")),
        &steps.report.join(format!("{name}-vmm.log")),
        |text| {
            if let Some((_, event)) = text.split_once(EVENT_PREFIX) {
                done.extend(react(event.trim(), &mut lines));
            }
            lines.extend(Line::parse(text).filter(|_| lines.len() < MAX_LINES));
            Reaction::Go
        },
    )?;
    steps.cases.append(&mut done);
    steps.step(&format!("bytes, {name}"), || seen_before(&lines, before));
    let boot = Boot::of(Collected { lines, ending, millis: millis(begun) }, None);
    steps.judge(expected, &boot, &format!(", {name}"));
    Ok(())
}

/// The guest's check reports that its slice had `checks` earlier checks.
pub(crate) fn seen_before(lines: &[Line], checks: u32) -> Step {
    let value = lines.iter().find_map(|line| match line {
        Line::Check(check) if check.name == CHECK => check.value,
        _ => None,
    });
    if value == Some(checks.into()) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("the slice had seen {value:?} checks, and {checks} were expected")))
}

/// The memory has the bytes that a guest leaves after its check number `checks`.
pub(crate) fn holds_checks(memory: &[u8], checks: u64) -> Step {
    let mut expected = MARK.wrapping_add(checks);
    for (index, word) in memory.as_chunks::<8>().0.iter().enumerate() {
        let is = u64::from_le_bytes(*word);
        if is != expected {
            return Err(Fault::Untrue(format!("word {index} is {is:#x}, and the guest wrote {expected:#x}")));
        }
        expected = expected.wrapping_add(STEP);
    }
    Ok(())
}

pub(crate) fn ended(code: Option<i32>) -> Step {
    if code == Some(0) { Ok(()) } else { Err(Fault::Untrue(format!("its exit code is {code:?}"))) }
}

pub(crate) fn nothing_granted(parts: &Parts<'_>) -> Step {
    match parts.granted()? {
        0 => Ok(()),
        count => Err(Fault::Untrue(format!("the ledger still has {count} owners"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_reading_of_the_pattern_is_the_guests() {
        // egm-guest's src/pattern.rs: word i is the seed plus i steps.
        let words = (0..4_u64).map(|i| MARK.wrapping_add(7).wrapping_add(i.wrapping_mul(STEP)));
        let mut memory: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        assert!(holds_checks(&memory, 7).is_ok());
        assert!(holds_checks(&memory, 6).is_err());
        memory[31] ^= 1;
        assert!(holds_checks(&memory, 7).is_err());
    }

    #[test]
    fn a_slice_that_was_checked_more_or_not_at_all_is_reported() {
        let line = Line::parse(
            "{\"egm-check\":\"egm_device\",\"outcome\":\"passed\",\"value\":2.0,\"unit\":\"checks before\",\"millis\":1}",
        );
        let lines: Vec<Line> = line.into_iter().collect();
        assert_eq!(lines.len(), 1);
        assert!(seen_before(&lines, 2).is_ok());
        assert!(seen_before(&lines, 0).is_err() && seen_before(&[], 0).is_err());
    }
}
