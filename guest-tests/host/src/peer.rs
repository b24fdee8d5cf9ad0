//! The story of a slice in a monitor that is not ours: Debian's newest QEMU, as it is, with the machine that `egm-device export`
//! writes.
//!
//! ```text
//!  server 1 ── QEMU 1   a guest checks the slice, is reset, checks it again; a second slice is plugged in and out
//!           └─ QEMU 2   finds the bytes of the first; the owner asks, the guest gives, the server ends well
//!  server 2 ── QEMU 3   finds zeros; the server is killed, the guest goes on
//!  server 3 ── QEMU 4   finds zeros; the owner takes the slice, which the guest does not give: QEMU stops the guest
//!  server 4 ── QEMU 5   finds zeros, at the socket that the dead one left; then `egm-guest list` and `test`
//! ```
//! The guest counts the checks that its slice has seen in the slice itself, and the host reads them there.

use std::time::Instant;

use egm_report::{Check, Line, MAX_LINES};
use serde_json::json;

use crate::boot::Boot;
use crate::error::LabError;
use crate::frame::{Fault, Frame, Step, timed};
use crate::judge::{Collected, Expected};
use crate::peer_parts::{Parts, SIZE};
use crate::process::{Limit, Reaction, watch};
use crate::qmp::Monitor;
use crate::run::millis;

/// How the guest's words of its checks begin.
const SAID: &str = "egm-device ";
/// The check whose value is how many there were before.
const CHECK: &str = "egm_device";
/// The first word of the slice, above the number of checks; the words after it are further by this each.
const MARK: u64 = u64::from_le_bytes(*b"\0\0egm-ok");
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// The function that is plugged in.
const SPARE: &str = "spare-slice";

/// A machine of the story.
struct Machine {
    name: &'static str,
    /// What its guest is asked.
    checks: &'static [&'static str],
    /// How many checks its slice has seen.
    before: u32,
    /// Which of them it comes to say, and whether it ends by itself.
    expected: Expected,
}

impl Machine {
    /// One that does all it is asked.
    const fn whole(name: &'static str, checks: &'static [&'static str], before: u32) -> Self {
        Self { name, checks, before, expected: Expected { exit: 0, summary: true, checks } }
    }
}

const FIRST: Machine = Machine::whole("first", &[CHECK, "egm_plugged"], 1);
const WANTED: Machine = Machine::whole("wanted", &[CHECK, "egm_wanted"], 2);
const LOST: Machine = Machine::whole("lost", &[CHECK, "egm_lost"], 0);
const TAKEN: Machine = Machine {
    expected: Expected { exit: 0, summary: false, checks: &[CHECK] },
    ..Machine::whole("taken", LOST.checks, 0)
};
const BACK: Machine = Machine::whole("back", &[CHECK, "egm_commands"], 0);

/// Tells it.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let runner = frame.runner;
    let Some(emulator) = &runner.tools.emulator else {
        frame.skip("Debian's QEMU is not to be had here");
        return Ok(());
    };
    let parts = Parts::make(runner, emulator, runner.work.join(frame.scenario.name))?;
    let mut server = parts.serve()?;
    let spare = parts.serve_spare()?;
    first(frame, &parts)?;
    frame.step("the host sees the guest's bytes", || holds_checks(&server.memory(SIZE)?, 2));
    drop(spare);
    boot(frame, &parts, &WANTED, |said, _| {
        (said == "want").then(|| timed("the owner asks", || Ok(server.ask()?))).into_iter().collect()
    })?;
    frame.step("the server ends well", || ended(server.wait()?));
    frame.step("the slice is given back", || nothing_granted(&parts));
    let mut killed = Some(parts.serve()?);
    boot(frame, &parts, &LOST, |said, _| {
        if said != "lost" {
            return Vec::new();
        }
        drop(killed.take());
        // By which the guest, which leaves the function alone meanwhile, knows that it happened.
        let device = json!({ "driver": "virtio-rng-pci", "bus": "spare" });
        vec![timed("the server is killed", || Ok(ask(&parts)?.execute("device_add", device)?))]
    })?;
    taken(frame, &parts)?;
    let mut server = parts.serve()?;
    boot(frame, &parts, &BACK, |_, _| Vec::new())?;
    frame.step("the last server ends well", || {
        server.ask()?;
        ended(server.wait()?)
    });
    Ok(())
}

/// The first machine: it is reset when its first check is done, and gets another slice after the second.
fn first(frame: &mut Frame<'_>, parts: &Parts<'_>) -> Result<(), LabError> {
    let mut reset = false;
    boot(frame, parts, &FIRST, |said, lines| match said {
        "plug" if !std::mem::replace(&mut reset, true) => {
            let before = std::mem::take(lines);
            vec![
                timed("fresh from the server", || seen_before(&before, 0)),
                timed("reset", || Ok(ask(parts)?.execute("system_reset", json!({}))?)),
            ]
        }
        "plug" => vec![timed("plugged in", || {
            let socket = json!({ "type": "unix", "path": parts.spare() });
            let device = json!({ "driver": "vfio-user-pci", "id": SPARE, "bus": "spare", "socket": socket });
            Ok(ask(parts)?.execute("device_add", device)?)
        })],
        "unplug" => vec![timed("unplugged", || {
            let mut monitor = ask(parts)?;
            monitor.execute("device_del", json!({ "id": SPARE }))?;
            Ok(monitor.wait("DEVICE_DELETED")?)
        })],
        _ => Vec::new(),
    })
}

/// A guest that does not give its slice when the owner asks loses it: the server signals the function's error interrupt before it
/// hangs up, and QEMU stops a guest whose function fails so. (A request interrupt, at which it would unplug the function, it has
/// for functions of the host only.)
fn taken(frame: &mut Frame<'_>, parts: &Parts<'_>) -> Result<(), LabError> {
    let mut server = parts.serve_for(1)?;
    boot(frame, parts, &TAKEN, |said, _| {
        if said != "lost" {
            return Vec::new();
        }
        let stopped = timed("QEMU stops a guest whose slice is taken", || {
            let mut monitor = ask(parts)?;
            server.ask()?;
            monitor.wait("STOP")?;
            Ok(monitor.execute("quit", json!({}))?)
        });
        vec![stopped, timed("the server that took it ends well", || ended(server.wait()?))]
    })
}

fn ask(parts: &Parts<'_>) -> std::io::Result<Monitor> {
    Monitor::connect(&parts.monitor())
}

/// Runs a machine to its end; `hear` gets what the guest says of its checks, and the lines of its report so far.
fn boot(
    frame: &mut Frame<'_>,
    parts: &Parts<'_>,
    machine: &Machine,
    mut hear: impl FnMut(&str, &mut Vec<Line>) -> Vec<Check>,
) -> Result<(), LabError> {
    let Machine { name, checks, before, expected } = *machine;
    let words = format!(
        "quiet egm.checks={} egm.arg.egm_device.size={SIZE} egm.arg.egm_device.functions=1",
        checks.join(",")
    );
    let (mut lines, mut done, begun) = (Vec::new(), Vec::new(), Instant::now());
    let ending = watch(
        parts.qemu(&words)?,
        Limit::Total(frame.scenario.deadline),
        &frame.report.join(format!("{name}-console.log")),
        &frame.report.join(format!("{name}-qemu.log")),
        |text| {
            if let Some((_, said)) = text.split_once(SAID) {
                done.extend(hear(said.trim(), &mut lines));
            }
            lines.extend(Line::parse(text).filter(|_| lines.len() < MAX_LINES));
            Reaction::Go
        },
    )?;
    frame.cases.append(&mut done);
    frame.step(&format!("bytes, {name}"), || seen_before(&lines, before));
    let boot = Boot::of(Collected { lines, ending, millis: millis(begun) }, None);
    frame.judge(expected, &boot, &format!(", {name}"));
    Ok(())
}

/// The guest's check says that its slice has seen `checks`.
fn seen_before(lines: &[Line], checks: u32) -> Step {
    let value = lines.iter().find_map(|line| match line {
        Line::Check(check) if check.name == CHECK => check.value,
        _ => None,
    });
    if value == Some(checks.into()) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("the slice had seen {value:?} checks, and {checks} were expected")))
}

/// The memory is what a guest left after its check number `checks`.
fn holds_checks(memory: &[u8], checks: u64) -> Step {
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

fn ended(code: Option<i32>) -> Step {
    if code == Some(0) { Ok(()) } else { Err(Fault::Untrue(format!("its exit code is {code:?}"))) }
}

fn nothing_granted(parts: &Parts<'_>) -> Step {
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
    fn a_slice_that_was_checked_more_or_not_at_all_is_told() {
        let line = Line::parse(
            "{\"egm-check\":\"egm_device\",\"outcome\":\"passed\",\"value\":2.0,\"unit\":\"checks before\",\"millis\":1}",
        );
        let lines: Vec<Line> = line.into_iter().collect();
        assert_eq!(lines.len(), 1);
        assert!(seen_before(&lines, 2).is_ok());
        assert!(seen_before(&lines, 0).is_err() && seen_before(&[], 0).is_err());
    }
}
