//! Tokens of events: the event loop keeps one beside each descriptor.

/// Token of an event, in the 32 bits that the event loop keeps beside a descriptor.
#[derive(Debug, Clone, Copy)]
pub(super) enum Token {
    Kick(usize),
    Tap(usize),
    WorkerError(usize),
}

impl Token {
    const PAIRS: u32 = 0x1_0000;

    pub(super) fn encode(self) -> u32 {
        let (kind, number) = match self {
            Self::Kick(queue) => (0, queue),
            Self::Tap(pair) => (1, pair),
            Self::WorkerError(pair) => (2, pair),
        };
        kind * Self::PAIRS + u32::from(u16::try_from(number).unwrap_or(u16::MAX)) // at most 33 queues
    }

    pub(super) fn decode(data: u32) -> Option<Self> {
        let number = usize::try_from(data % Self::PAIRS).ok()?;
        match data / Self::PAIRS {
            0 => Some(Self::Kick(number)),
            1 => Some(Self::Tap(number)),
            2 => Some(Self::WorkerError(number)),
            _ => None,
        }
    }
}
