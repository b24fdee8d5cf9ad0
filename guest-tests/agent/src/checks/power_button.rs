//! Claim: a press of the power button by the host reaches the guest (ACPI 6.5, clause 4.8.2.2.1.2): Linux's button
//! driver reports `KEY_POWER`, down and up, as for a real one.
//!
//! `egm-button` goes to the console once the check listens; the host presses then. Waits `button.seconds` (default 60).

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Context;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sysfs;

const INPUT: &str = "/sys/class/input";
/// The driver's name for it (`drivers/acpi/button.c`).
const NAME: &str = "Power Button";
/// `struct input_event` where a long has 64 bits: two of time, then type, code and value (`linux/input.h`).
const EVENT: usize = 24;
/// `EV_KEY` and `KEY_POWER` (`linux/input-event-codes.h`).
const POWER_KEY: (u16, u16) = (1, 116);

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let allowed = Duration::from_secs(context.args.get("button.seconds", 60)?);
    let Some(name) = button() else {
        return Ok(Finding::failed(format!(
            "Linux has no input device called \"{NAME}\" with events: load the modules button and evdev, or look for it in dmesg"
        )));
    };
    let path = Path::new("/dev/input").join(&name);
    let mut events = File::open(&path).map_err(Broken::file("open", &path))?;
    // Standard error is the console; standard output is the report.
    let _ = std::io::stderr().write_all(b"egm-button\n");
    let begun = Instant::now();
    let mut received = Vec::new();
    while received.len() < 2 {
        let left = Timespec::try_from(allowed.saturating_sub(begun.elapsed())).ok();
        let ready = poll(&mut [PollFd::new(&events, PollFlags::IN)], left.as_ref())
            .map_err(Broken::system("cannot wait for the power button"))?;
        if ready == 0 {
            break;
        }
        let mut event = [0; EVENT];
        events.read_exact(&mut event).map_err(Broken::file("read", &path))?;
        received.extend(power_key(&event));
    }
    let mut claim = Claim::default();
    claim.holds(received == [1, 0], || {
        format!("KEY_POWER was to go down and up (1, 0), and within {} s was {received:?}", allowed.as_secs())
    });
    claim.seen(format!("{name}: KEY_POWER {received:?}"));
    Ok(claim.finish())
}

/// The event device of the button.
fn button() -> Option<String> {
    sysfs::names(INPUT).into_iter().filter(|name| name.starts_with("event")).find(|name| {
        sysfs::text(Path::new(INPUT).join(name).join("device/name")).is_ok_and(|text| text.trim() == NAME)
    })
}

/// The value of an event of the power key: 1 down, 0 up, 2 held.
fn power_key(event: &[u8; EVENT]) -> Option<i32> {
    let [.., t0, t1, c0, c1, v0, v1, v2, v3] = *event;
    let key = (u16::from_ne_bytes([t0, t1]), u16::from_ne_bytes([c0, c1]));
    (key == POWER_KEY).then(|| i32::from_ne_bytes([v0, v1, v2, v3]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_power_key_counts() {
        let event = |kind: u16, code: u16, value: i32| {
            let mut bytes = [0xee; EVENT];
            bytes[16..18].copy_from_slice(&kind.to_ne_bytes());
            bytes[18..20].copy_from_slice(&code.to_ne_bytes());
            bytes[20..].copy_from_slice(&value.to_ne_bytes());
            power_key(&bytes)
        };
        assert_eq!((event(1, 116, 1), event(1, 116, 0)), (Some(1), Some(0)));
        assert_eq!((event(0, 0, 0), event(1, 142, 1), event(5, 116, 1)), (None, None, None));
    }
}
