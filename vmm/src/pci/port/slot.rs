//! The slot of a hot-plug port: registers in, effects out (PCI Express Base 6.0 §6.7, §7.5.3.9 to §7.5.3.11).
//!
//! It is a few facts, from which its status and its interrupt follow. The controller, which inserts and removes
//! functions, reads its [`Duty`]; nothing here waits for the controller.

use crate::pci::saved::SlotState;
use crate::snapshot::{Mismatch, ensure};

/// Slot Capabilities: attention button, power controller, power indicator, hot-plug surprise, hot-plug capable. Commands are
/// answered by Command Completed.
pub(super) const CAPABILITIES: u32 = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 6;

const BUTTON_PRESSED: u16 = 1 << 0;
const PRESENCE_CHANGED: u16 = 1 << 3;
const COMMAND_COMPLETED: u16 = 1 << 4;
const PRESENT: u16 = 1 << 6;
const LINK_CHANGED: u16 = 1 << 8;
/// Status bits that are cleared by writing ones; the power fault and latch bits are never set.
const EVENTS: u16 = BUTTON_PRESSED | PRESENCE_CHANGED | COMMAND_COMPLETED | LINK_CHANGED;

/// Slot Control: the enable bits that have the places of their status bits.
const ENABLES: u16 = 0x1f;
const INTERRUPT_ENABLE: u16 = 1 << 5;
const INDICATOR_ON: u16 = 1 << 8;
const INDICATOR_OFF: u16 = 3 << 8;
const POWER_OFF: u16 = 1 << 10;
const LINK_ENABLE: u16 = 1 << 12;
/// Bits that the guest may write: enables but that of the absent latch, power indicator, power.
const CONTROL: u16 = 0x1b | INTERRUPT_ENABLE | INDICATOR_OFF | POWER_OFF | LINK_ENABLE;

/// Most bridges above a slot: a root port and a switch.
const DEPTH: i32 = 3;

/// An event at a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// The guest writes Slot Control, which is a command (§6.7.3.2).
    Control(u16),
    /// The guest clears these events.
    Clear(u16),
    /// The host requests the function back: the attention button.
    Press,
    /// A function is inserted, freshly reset. This presses the button too: Linux enables no presence interrupt where
    /// there is a button.
    Insert,
    /// The function is removed.
    Pull,
    /// A secondary bus reset begins above, at one of the bridges.
    Hold,
    /// The secondary bus reset ends.
    Release,
    /// The function was reset for the [`Duty::Reset`] of this number.
    Fresh(u32),
}

/// Effects of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Effects {
    /// The port sends its interrupt.
    pub(super) interrupt: bool,
    /// The function answers, or does not answer any more.
    pub(super) link: bool,
    /// There is a [`Duty`].
    pub(super) duty: bool,
}

/// A task for the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Duty {
    /// Reset the function, and report that with this number.
    Reset(u32),
    /// Remove the function: the guest has released it.
    Pull,
}

#[derive(Debug)]
pub(super) struct Slot {
    control: u16,
    events: u16,
    present: bool,
    /// The host has requested the function back.
    wanted: bool,
    /// Secondary bus resets above that have begun and not ended; two vCPUs may report an end before its beginning.
    held: i32,
    /// The function must be reset before it answers again, and the number of that reset.
    stale: bool,
    times: u32,
    /// A command is not complete yet.
    busy: bool,
    /// The data link is up: the function answers.
    link: bool,
}

impl Slot {
    /// With a function in it, powered, or empty and off.
    pub(super) const fn new(occupied: bool) -> Self {
        let control = if occupied { INDICATOR_ON } else { INDICATOR_OFF | POWER_OFF };
        Self {
            control,
            events: 0,
            present: occupied,
            wanted: false,
            held: 0,
            stale: false,
            times: 0,
            busy: false,
            link: occupied,
        }
    }

    /// Its state in a snapshot. A machine with a function in a slot has none.
    pub(super) const fn saved(&self) -> SlotState {
        let Self { control, events, held, times, .. } = *self;
        SlotState { control, events, held, times, pending: false }
    }

    /// A slot in the state `saved`; `occupied` is what it must not be.
    ///
    /// # Errors
    /// [`Mismatch`].
    pub(super) fn restored(saved: &SlotState, occupied: bool) -> Result<Self, Mismatch> {
        let SlotState { control, events, held, times, pending: _ } = *saved;
        let fits = !occupied && control & !CONTROL == 0 && events & !EVENTS == 0;
        ensure(fits, || format!("no empty slot has control {control:#x} and events {events:#x}"))?;
        ensure((0..=DEPTH).contains(&held), || format!("{held} bridges above a slot are in reset"))?;
        Ok(Self { control, events, held, times, ..Self::new(false) })
    }

    pub(super) const fn control(&self) -> u16 {
        self.control
    }

    pub(super) const fn status(&self) -> u16 {
        self.events | if self.present { PRESENT } else { 0 }
    }

    /// Whether the function answers.
    pub(super) const fn is_up(&self) -> bool {
        self.link
    }

    const fn has_power(&self) -> bool {
        self.control & POWER_OFF == 0
    }

    /// The condition that sends an interrupt when it begins (§6.7.3.4).
    const fn interrupts(&self) -> bool {
        let link = if self.control & LINK_ENABLE != 0 { LINK_CHANGED } else { 0 };
        self.control & INTERRUPT_ENABLE != 0 && self.events & (self.control & ENABLES | link) != 0
    }

    pub(super) fn duty(&self) -> Option<Duty> {
        if !self.present {
            None
        } else if self.wanted && !self.has_power() {
            Some(Duty::Pull)
        } else {
            self.stale.then_some(Duty::Reset(self.times))
        }
    }

    /// Applies `change` and returns its effects.
    pub(super) fn change(&mut self, change: Change) -> Effects {
        let (interrupted, up) = (self.interrupts(), self.link);
        match change {
            Change::Control(value) => {
                self.control = value & CONTROL;
                self.busy = true;
            }
            Change::Clear(events) => self.events &= !(events & EVENTS),
            Change::Press if self.present && !self.wanted => {
                self.wanted = true;
                self.events |= BUTTON_PRESSED;
            }
            Change::Insert if !self.present => {
                self.set_present(true);
                self.events |= if egm_address::fault!("hotplug-event-lost") { 0 } else { BUTTON_PRESSED };
            }
            Change::Pull if self.present => self.set_present(false),
            Change::Hold => self.held = self.held.wrapping_add(1),
            Change::Release => self.held = self.held.wrapping_sub(1),
            Change::Fresh(times) => self.stale &= times != self.times,
            Change::Press | Change::Insert | Change::Pull => {}
        }
        self.settle();
        let (interrupt, link) = (self.interrupts() && !interrupted, self.link != up);
        Effects { interrupt, link, duty: self.duty().is_some() }
    }

    fn set_present(&mut self, present: bool) {
        (self.present, self.wanted, self.stale) = (present, false, false);
        self.events |= PRESENCE_CHANGED;
    }

    /// Updates link, events and pending reset from the facts.
    fn settle(&mut self) {
        let cut = !self.has_power() || self.held > 0;
        if self.link && self.present && cut {
            self.stale = true;
            self.times = self.times.wrapping_add(1);
        }
        let link = self.present && !cut && !self.stale;
        if link != self.link {
            self.link = link;
            self.events |= LINK_CHANGED;
        }
        // Power is off when the function is quiet, and on again when it is ready.
        if self.busy && !self.stale {
            self.busy = false;
            self.events |= COMMAND_COMPLETED;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ON: u16 = INTERRUPT_ENABLE | ENABLES | LINK_ENABLE | INDICATOR_ON;
    const OFF: u16 = ON | POWER_OFF;

    fn reset(slot: &mut Slot) -> Effects {
        let Some(Duty::Reset(times)) = slot.duty() else { panic!("{slot:?} has no reset due") };
        slot.change(Change::Fresh(times))
    }

    #[test]
    fn an_empty_slot_is_off_and_a_function_in_it_answers_once_the_guest_gives_power() {
        let mut slot = Slot::new(false);
        assert_eq!((slot.status(), slot.control() & POWER_OFF), (0, POWER_OFF));
        slot.change(Change::Control(OFF));
        slot.change(Change::Clear(EVENTS));
        let inserted = slot.change(Change::Insert);
        assert_eq!(inserted, Effects { interrupt: true, link: false, duty: false });
        assert_eq!(slot.status(), PRESENT | PRESENCE_CHANGED | BUTTON_PRESSED);
        slot.change(Change::Clear(EVENTS));
        assert_eq!(slot.change(Change::Control(ON)), Effects { interrupt: true, link: true, duty: false });
        assert_eq!(slot.status(), PRESENT | LINK_CHANGED | COMMAND_COMPLETED);
    }

    #[test]
    fn a_pressed_button_and_power_off_let_the_function_go() {
        let mut slot = Slot::new(true);
        slot.change(Change::Control(ON));
        slot.change(Change::Clear(EVENTS));
        assert!(slot.change(Change::Press).interrupt);
        assert_eq!(
            slot.change(Change::Press),
            Effects::default(),
            "a second press would take the first back"
        );
        assert_eq!((slot.status(), slot.duty()), (PRESENT | BUTTON_PRESSED, None));
        let off = slot.change(Change::Control(OFF));
        assert!(off.link && off.duty);
        assert_eq!((slot.is_up(), slot.duty()), (false, Some(Duty::Pull)));
        assert_eq!(slot.status() & COMMAND_COMPLETED, 0, "the function is not quiet yet");
        slot.change(Change::Pull);
        assert_eq!(slot.status() & (PRESENT | COMMAND_COMPLETED), COMMAND_COMPLETED);
        assert_eq!(slot.duty(), None);
    }

    #[test]
    fn a_function_that_the_guest_powers_off_stays_and_is_reset_before_it_answers_again() {
        let mut slot = Slot::new(true);
        slot.change(Change::Control(OFF));
        assert!(!slot.change(Change::Control(ON)).link, "its old state would show");
        assert!(reset(&mut slot).link);
        assert_eq!(slot.status() & (PRESENT | COMMAND_COMPLETED), PRESENT | COMMAND_COMPLETED);
    }

    #[test]
    fn a_bus_reset_holds_the_link_down_until_it_ends_and_the_function_is_reset() {
        let mut slot = Slot::new(true);
        assert!(slot.change(Change::Hold).link);
        assert!(!reset(&mut slot).link, "the bit is still set");
        assert!(slot.change(Change::Release).link);
    }

    #[test]
    fn a_reset_that_another_one_overtakes_does_not_count() {
        let mut slot = Slot::new(true);
        slot.change(Change::Hold);
        let Some(Duty::Reset(first)) = slot.duty() else { panic!() };
        slot.change(Change::Fresh(first));
        slot.change(Change::Release);
        slot.change(Change::Control(OFF));
        slot.change(Change::Fresh(first));
        assert!(matches!(slot.duty(), Some(Duty::Reset(times)) if times != first));
    }

    #[test]
    fn a_surprise_is_a_link_and_a_presence_that_go_together() {
        let mut slot = Slot::new(true);
        slot.change(Change::Control(ON));
        slot.change(Change::Clear(EVENTS));
        assert!(slot.change(Change::Pull).interrupt);
        assert_eq!(slot.status(), PRESENCE_CHANGED | LINK_CHANGED);
        assert_eq!(slot.duty(), None);
    }

    #[test]
    fn an_interrupt_is_sent_when_its_condition_begins_and_not_while_it_lasts() {
        let mut slot = Slot::new(true);
        assert!(slot.change(Change::Control(ON)).interrupt, "the command is complete");
        assert!(!slot.change(Change::Press).interrupt);
        slot.change(Change::Clear(COMMAND_COMPLETED));
        assert!(!slot.change(Change::Clear(BUTTON_PRESSED)).interrupt);
        assert!(slot.change(Change::Control(ON)).interrupt);
        let mut silent = Slot::new(true);
        assert!(!silent.change(Change::Control(ON & !INTERRUPT_ENABLE)).interrupt);
        assert!(silent.change(Change::Control(ON)).interrupt, "what waited is sent when it is enabled");
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            any::<u16>().prop_map(Change::Control),
            any::<u16>().prop_map(Change::Clear),
            Just(Change::Press),
            Just(Change::Insert),
            Just(Change::Pull),
            Just(Change::Hold),
            Just(Change::Release),
            (0..4u32).prop_map(Change::Fresh),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_a_function_answers_only_when_it_is_there_powered_and_reset(
            occupied: bool, changes in prop::collection::vec(change(), 0..64)
        ) {
            let mut slot = Slot::new(occupied);
            for change in changes {
                let effects = slot.change(change);
                let may = slot.present && slot.has_power() && slot.held <= 0 && !slot.stale;
                prop_assert_eq!(slot.is_up(), may);
                prop_assert_eq!(effects.duty, slot.duty().is_some());
                prop_assert_eq!(slot.status() & !(EVENTS | PRESENT), 0);
                prop_assert_eq!(slot.control() & !CONTROL, 0);
                prop_assert!(!slot.busy || slot.stale, "a command is complete unless there is work for it");
            }
            // Duties come to an end: the function is then present in full or not at all.
            while let Some(duty) = slot.duty() {
                slot.change(match duty {
                    Duty::Reset(times) => Change::Fresh(times),
                    Duty::Pull => Change::Pull,
                });
            }
            prop_assert!(!slot.stale && !slot.busy);
        }
    }
}
