//! Events of devices while the guest runs, for the operator.

use std::fmt;
use std::time::Duration;

/// How a device left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    /// The guest released it.
    Orderly,
    /// The guest was not requested to release it, or did not in time.
    Surprise,
}

/// An event of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    /// Its id in the machine.
    pub(crate) id: String,
    /// The host's name of it.
    pub(crate) function: String,
    /// Kind of the event, with its slot, timeout or count.
    pub(crate) what: EventKind,
}

/// Events of a device, from plugging in to removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EventKind {
    /// It was plugged into the slot of this number.
    Plugged(u16),
    /// The host requests it back; the guest is requested to release it within this time.
    Requested(Duration),
    /// The host requests it back, and the guest cannot release it: it is behind no hot-plug port.
    RequestedFixed,
    /// It reported an error that it cannot correct.
    Failed,
    /// The same, behind no hot-plug port.
    FailedFixed,
    /// Its device is gone, as the host or its server reports.
    Lost,
    /// The same, behind no hot-plug port.
    LostFixed,
    /// It left the guest, and the host has it back.
    Removed(Removal),
    /// The guest does not have it any more; the event loop still has it.
    Departing,
    /// It could not make the guest's last writes durable, with the error.
    Unflushed(String),
    /// One of its counters at removal: never zero.
    Counted(&'static str, u64),
}

impl EventKind {
    /// Kind in one word, for programs that read events.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Plugged(_) => "plugged",
            Self::Requested(_) | Self::RequestedFixed => "requested",
            Self::Failed | Self::FailedFixed => "failed",
            Self::Lost | Self::LostFixed => "lost",
            Self::Removed(_) => "removed",
            Self::Departing => "departing",
            Self::Unflushed(_) => "unflushed",
            Self::Counted(..) => "counted",
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, function, what } = self;
        write!(f, "device \"{id}\": ")?;
        match what {
            EventKind::Plugged(slot) => write!(f, "{function} is plugged into slot {slot}"),
            EventKind::Requested(timeout) => write!(
                f,
                "the host requests {function} back, because its driver is being unbound, it is being removed or its server \
                 returns it: the guest is requested to release it, and loses it after {} s",
                timeout.as_secs()
            ),
            EventKind::RequestedFixed => write!(
                f,
                "the host requests {function} back, because its driver is being unbound, it is being removed or its server \
                 returns it: a driver waits until this machine ends, a server takes it after its --timeout"
            ),
            EventKind::Failed => write!(
                f,
                "{function} reported an error that it cannot correct: it is taken from the guest; see dmesg on the \
                 host"
            ),
            EventKind::FailedFixed => write!(
                f,
                "{function} reported an error that it cannot correct: what the guest does with it may fail until it is \
                 reset; see dmesg on the host"
            ),
            EventKind::LostFixed => write!(
                f,
                "{function} is gone: the guest reads ones there and runs on; the device is back in the next start of this \
                 machine"
            ),
            EventKind::Lost => write!(f, "{function} is gone: it is taken from the guest"),
            EventKind::Removed(Removal::Orderly) => {
                write!(f, "the guest released {function}: the host has it back")
            }
            EventKind::Removed(Removal::Surprise) => {
                write!(f, "{function} was taken from the guest: the host has it back")
            }
            EventKind::Departing => write!(
                f,
                "the guest does not have {function} any more: the host has it back when no request uses it"
            ),
            EventKind::Unflushed(error) => write!(
                f,
                "cannot flush {function}: {error}; what the guest wrote since its last flush may be lost"
            ),
            EventKind::Counted(what, number) => write!(f, "counted: {number} {what} at {function}"),
        }
    }
}
