//! Logic of the function: accesses to BAR 0 and events in, values and an [`Effect`] out. No lock, no descriptor, no
//! clock.

use egm_address::{InBar, Span, SpanSet};

use super::registers::{
    AccessTarget, CUT_SHORT, Doorbell, Event, MAGIC, QUIESCED, Register, SCRUB_AT_RESET, SCRUBS, VECTORS,
    VERSION,
};

/// Constants of the function's lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of the slice, retired ones included: whole pages, one at least.
    pub size: u64,
    /// Offset of the slice in its region.
    pub base: u64,
    /// Bytes in a page, a power of two.
    pub page: u64,
    /// Guest proximity domain, where the operator named one.
    pub pxm: Option<u32>,
    /// Whether every reset scrubs.
    pub scrub_at_reset: bool,
    /// Whether it has MSI-X; without it a guest looks at the registers now and then.
    pub msix: bool,
}

impl Facts {
    /// Bytes of BAR 2.
    #[must_use]
    pub fn bar(&self) -> u64 {
        self.size.checked_next_power_of_two().unwrap_or(1 << 63).max(0x1000)
    }

    pub(super) fn pxm(&self) -> u32 {
        self.pxm.unwrap_or(u32::MAX)
    }
}

/// An action for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// Nothing to do outside [`Core`].
    Nothing,
    /// Fire the vectors of these events.
    Fire(&'static [Event]),
    /// Make all real bytes zero; report it by [`Core::scrubbed`] and `Core::scrub_ended`.
    Scrub,
    /// The guest has stopped to use the memory.
    Quiesced,
}

/// Bytes of the MSI-X table.
const TABLE_BYTES: usize = VECTORS as usize * 16;

/// The function's state except configuration space.
#[derive(Debug, Clone)]
pub struct Core {
    facts: Facts,
    retired: SpanSet<InBar>,
    generation: u32,
    events: u32,
    mistakes: u32,
    /// The owner has asked for the slice.
    wanted: bool,
    state: ResettableState,
}

/// State that a reset clears.
#[derive(Debug, Clone)]
struct ResettableState {
    first: u32,
    pending: u32,
    control: u32,
    status: u32,
    /// The doorbell was rung while a scrub runs: one more follows, however often it was.
    scrub_again: bool,
    scrubbed: u64,
    /// The MSI-X table. It only keeps its values: clients keep one of their own.
    table: [u8; TABLE_BYTES],
}

impl ResettableState {
    fn after_reset(wanted: bool) -> Self {
        let mut table = [0; TABLE_BYTES];
        // Vector control: masked (PCI Express base specification 7.7.2.4).
        table.iter_mut().skip(12).step_by(16).for_each(|byte| *byte = 1);
        let pending = if wanted { Event::Wanted.bit() } else { 0 };
        Self { first: 0, pending, control: 0, status: 0, scrub_again: false, scrubbed: 0, table }
    }
}

impl Core {
    /// A function over a slice of which `retired` is bad.
    #[must_use]
    pub fn new(facts: Facts, retired: SpanSet<InBar>) -> Self {
        let (generation, events, mistakes) = (0, 0, 0);
        Self {
            facts,
            retired,
            generation,
            events,
            mistakes,
            wanted: false,
            state: ResettableState::after_reset(false),
        }
    }

    /// Constants of the function's lifetime.
    #[must_use]
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The bytes of the slice that are out of use.
    #[must_use]
    pub const fn retired(&self) -> &SpanSet<InBar> {
        &self.retired
    }

    /// The bytes of the slice that can be used.
    #[must_use]
    pub fn usable(&self) -> SpanSet<InBar> {
        let slice = Span::new(egm_address::BarOffset::new(0), self.facts.size);
        slice.ok().into_iter().collect::<SpanSet<_>>().minus(&self.retired)
    }

    /// Whether the guest has declared that it does not use the memory.
    #[must_use]
    pub(crate) const fn is_quiesced(&self) -> bool {
        self.state.status & QUIESCED != 0
    }

    /// Whether the owner has asked for the slice.
    #[must_use]
    pub const fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Its client has left: that guest's [`QUIESCED`] does not hold for the next one.
    pub fn left(&mut self) {
        self.state.status &= !QUIESCED;
    }

    /// Fills `data` from BAR 0; an invalid access is counted and reads ones.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let (value, bit) = match AccessTarget::decode(offset, data.len()) {
            Some(AccessTarget::Register(register, bit)) => (self.register(register), bit),
            Some(AccessTarget::Window { index, size, bit }) => (self.span(index, size), bit),
            Some(AccessTarget::Vectors(at)) => {
                data.fill(0);
                let from = self.state.table.get(at..).unwrap_or_default();
                data.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
                return;
            }
            None => return self.mistake(),
        };
        let value = value.checked_shr(bit).unwrap_or(0).to_le_bytes();
        data.iter_mut().zip(value).for_each(|(to, from)| *to = from);
    }

    /// Takes a write to BAR 0; an invalid one is counted and ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        match AccessTarget::decode(offset, data.len()) {
            Some(AccessTarget::Register(register, _)) if register.bytes() == 4 => {
                let word = data.iter().rev().fold(0_u32, |word, byte| word << 8 | u32::from(*byte));
                return self.set(register, word);
            }
            Some(AccessTarget::Vectors(at)) => {
                let into = self.state.table.get_mut(at..).unwrap_or_default();
                into.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
            }
            _ => self.mistake(),
        }
        Effect::Nothing
    }

    fn register(&self, register: Register) -> u64 {
        let narrow = match register {
            Register::Size => return self.facts.size,
            Register::Base => return self.facts.base,
            Register::Page => return self.facts.page,
            Register::RetiredBytes => return self.retired.size(),
            Register::Scrubbed => return self.state.scrubbed,
            Register::Magic => MAGIC,
            Register::Version => VERSION,
            Register::Pxm => self.facts.pxm(),
            Register::Generation => self.generation,
            Register::Spans => u32::try_from(self.retired.iter().count()).unwrap_or(u32::MAX),
            Register::First => self.state.first,
            Register::Events => self.events,
            Register::Pending => self.state.pending,
            Register::Doorbell => 0,
            Register::Status => self.state.status,
            Register::Control => self.state.control,
            Register::Mistakes => self.mistakes,
        };
        narrow.into()
    }

    fn set(&mut self, register: Register, word: u32) -> Effect {
        match register {
            Register::First => self.state.first = word,
            Register::Pending => self.state.pending &= !word,
            Register::Control => self.state.control = word & SCRUB_AT_RESET,
            Register::Doorbell => return self.ring(word),
            _ => self.mistake(),
        }
        Effect::Nothing
    }

    fn ring(&mut self, word: u32) -> Effect {
        match Doorbell::decode(word) {
            Some(Doorbell::Scrub) if !self.is_scrubbing() || egm_address::fault!("scrubs-at-once") => {
                self.begin_scrub();
                return Effect::Scrub;
            }
            Some(Doorbell::Scrub) => self.state.scrub_again = true,
            Some(Doorbell::Quiesce) => {
                self.state.status |= QUIESCED;
                return Effect::Quiesced;
            }
            Some(Doorbell::Resume) => self.state.status &= !QUIESCED,
            None => self.mistake(),
        }
        Effect::Nothing
    }

    /// A number of the window.
    fn span(&self, index: u32, size: bool) -> u64 {
        let index = usize::try_from(self.state.first).ok().zip(usize::try_from(index).ok());
        let index = index.and_then(|(first, more)| first.checked_add(more));
        let span = index.and_then(|index| self.retired.iter().nth(index));
        span.map_or(0, |span| if size { span.size() } else { span.start().get() })
    }

    fn mistake(&mut self) {
        self.mistakes = self.mistakes.saturating_add(1);
    }

    fn begin_scrub(&mut self) {
        self.state.status = self.state.status & !CUT_SHORT | SCRUBS;
        self.state.scrubbed = 0;
    }

    fn raise(&mut self, events: &'static [Event]) -> Effect {
        for event in events {
            self.events = self.events.wrapping_add(1);
            self.state.pending |= event.bit();
        }
        Effect::Fire(events)
    }

    /// `bad` went bad: the guest gets an event for the part that lies in the slice and is new.
    pub fn retire(&mut self, bad: &SpanSet<InBar>) -> Effect {
        let usable = self.usable();
        let new = usable.minus(&usable.minus(bad));
        if new.is_empty() {
            return Effect::Nothing;
        }
        self.retired = self.retired.iter().chain(new.iter()).collect();
        self.generation = self.generation.wrapping_add(1);
        self.raise(&[Event::Retired, Event::Resized])
    }

    /// The owner requests the slice back.
    pub fn request_return(&mut self) -> Effect {
        self.wanted = true;
        self.raise(&[Event::Wanted])
    }

    /// As many bytes are zero so far.
    pub fn scrubbed(&mut self, bytes: u64) {
        self.state.scrubbed = bytes.min(self.facts.size);
    }

    /// Whether a scrub runs.
    #[must_use]
    pub(crate) const fn is_scrubbing(&self) -> bool {
        self.state.status & SCRUBS != 0
    }

    /// The scrub has ended, with all bytes zero or not. [`Effect::Scrub`] when the next one begins, which the guest asked
    /// for meanwhile; none follows one that failed.
    pub(crate) fn scrub_ended(&mut self, well: bool) -> Effect {
        self.state.status = self.state.status & !SCRUBS | if well { 0 } else { CUT_SHORT };
        if std::mem::take(&mut self.state.scrub_again) && well {
            self.begin_scrub();
            return Effect::Scrub;
        }
        Effect::Nothing
    }

    /// Resets it, while no scrub runs; [`Effect::Scrub`] when that was asked for.
    pub fn reset(&mut self) -> Effect {
        let scrub = self.facts.scrub_at_reset || self.state.control & SCRUB_AT_RESET != 0;
        self.state = ResettableState::after_reset(self.wanted);
        if scrub {
            self.begin_scrub();
            return Effect::Scrub;
        }
        Effect::Nothing
    }
}

#[cfg(test)]
mod tests;
