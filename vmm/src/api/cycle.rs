//! Life cycle of the machines of `egm-vmm serve` within one execution of the program. Pure.
//!
//! ```text
//!          create           boot            end of the machine
//!  empty ─────────► created ─────► booted ──────────────────────► over
//!    ▲                │                                             │ the program executes itself
//!    └──── delete ────┘            next execution: empty, created, or booted at once
//! ```
//! One execution starts one machine at most: each machine begins in an address space of its own.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::shown::ShownConfig;
use crate::machine::ExitReason;
use crate::passed::Passed;

/// Language of a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Language {
    /// egm-vmm's own.
    Own,
    /// cloud-hypervisor's `VmConfig`.
    CloudHypervisor,
}

/// A configuration that a client has created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Created {
    pub(super) language: Language,
    pub(super) text: String,
    /// Name of the machine where the text has none.
    pub(super) default_name: String,
    pub(super) name: String,
    /// Its values in cloud-hypervisor's `VmConfig`, for answers.
    pub(super) shown: ShownConfig,
    /// Descriptors of taps that came with requests; the text names them by their places here. They pass executions beside
    /// this.
    #[serde(skip)]
    pub(super) taps: Passed,
}

/// A snapshot that a machine begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RestoreOrder {
    pub(crate) folder: std::path::PathBuf,
    /// Whether its memory is copied in before the guest runs.
    pub(crate) copy: bool,
    /// Whether the guest runs at once.
    pub(crate) resume: bool,
}

/// Step after the end of a machine. Of several requests the greatest counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Next {
    /// The machine starts again.
    Boot,
    /// Its configuration stays created.
    Stay,
    /// Its configuration is removed.
    Delete,
    /// The program ends.
    End,
}

impl Next {
    /// The step after an end for `reason` without a client's request.
    const fn after(reason: &ExitReason, ends_with_guest: bool) -> Self {
        match reason {
            ExitReason::NotInPlace(_) => Self::Boot,
            ExitReason::Signal(_) => Self::End,
            // A machine that did not start is no guest that ends.
            ExitReason::Requested | ExitReason::NoThread { .. } | ExitReason::Sandbox(_) => Self::Stay,
            _ if ends_with_guest => Self::End,
            _ => Self::Stay,
        }
    }
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LastEnd {
    pub(super) reason: String,
    pub(super) text: String,
}

/// The part of a life cycle that one execution leaves to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedCycle {
    pub(super) created: Option<Created>,
    /// Whether the machine starts at once.
    pub(super) boots: bool,
    last: Option<LastEnd>,
    /// Events so far.
    pub(super) events: u64,
}

impl SavedCycle {
    /// Descriptors of taps that the configuration names.
    pub(crate) fn taps(&self) -> impl Iterator<Item = &Arc<OwnedFd>> {
        self.created.iter().flat_map(|created| created.taps.iter())
    }

    /// The same with `taps`, which the execution before this one passed.
    pub(crate) fn with_taps(mut self, taps: Passed) -> Self {
        if let Some(created) = &mut self.created {
            created.taps = taps;
        }
        self
    }

    /// The configuration that it has created, if any.
    pub(crate) fn into_created(self) -> Option<Created> {
        self.created
    }
}

/// Why a request does not fit the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CycleError {
    Exists,
    NotCreated,
    NotBooted,
    Booted,
    Ending,
}

/// Effect of an accepted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// It is carried out.
    Done,
    /// The machine has to stop first.
    Stop,
}

/// Instruction to the main thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Order {
    Wait,
    Boot(Arc<Created>),
    Restore(Arc<Created>, Arc<RestoreOrder>),
    End,
}

/// State of this execution.
#[derive(Debug, Clone, Default)]
pub(super) struct Cycle {
    created: Option<Arc<Created>>,
    is_booted: bool,
    /// The snapshot that this execution's machine begins with.
    restore: Option<Arc<RestoreOrder>>,
    /// Whether the execution before this one ordered the start of this one's machine.
    is_restart: bool,
    /// Whether the program ends with a guest that ends by itself.
    ends_with_guest: bool,
    requested: Option<Next>,
    /// Step after the end of this execution's machine without a request; `None` until its end.
    own: Option<Next>,
    last: Option<LastEnd>,
}

impl Cycle {
    /// Continues from the state that the previous execution saved.
    pub(super) fn resumed(saved: SavedCycle) -> Self {
        let SavedCycle { created, boots, last, events: _ } = saved;
        let is_booted = boots && created.is_some();
        Self { created: created.map(Arc::new), is_booted, is_restart: is_booted, last, ..Self::default() }
    }

    pub(super) const fn created(&self) -> Option<&Arc<Created>> {
        self.created.as_ref()
    }

    /// The end of the last machine.
    pub(super) const fn last(&self) -> Option<&LastEnd> {
        self.last.as_ref()
    }

    /// Whether this execution starts, runs or has run its machine.
    pub(super) const fn is_booted(&self) -> bool {
        self.is_booted
    }

    pub(super) const fn set_ends_with_guest(&mut self, ends_with_guest: bool) {
        self.ends_with_guest = ends_with_guest;
    }

    pub(super) const fn is_restart(&self) -> bool {
        self.is_restart
    }

    /// # Errors
    /// [`CycleError::Exists`].
    pub(super) const fn check_create(&self) -> Result<(), CycleError> {
        if self.created.is_some() { Err(CycleError::Exists) } else { Ok(()) }
    }

    /// # Errors
    /// [`CycleError::Exists`].
    pub(super) fn create(&mut self, created: Created) -> Result<(), CycleError> {
        self.check_create()?;
        self.last = None; // another machine's
        self.created = Some(Arc::new(created));
        Ok(())
    }

    /// Replaces the configuration of a machine that is created and not started.
    ///
    /// # Errors
    /// [`CycleError::NotCreated`], [`CycleError::Booted`].
    pub(super) fn amend(&mut self, created: Created) -> Result<(), CycleError> {
        match (&self.created, self.is_booted) {
            (None, _) => Err(CycleError::NotCreated),
            (Some(_), true) => Err(CycleError::Booted),
            (Some(_), false) => {
                self.created = Some(Arc::new(created));
                Ok(())
            }
        }
    }

    /// # Errors
    /// [`CycleError`]: nothing is created, or this execution has its machine already.
    pub(super) fn boot(&mut self) -> Result<(), CycleError> {
        match (&self.created, self.is_booted) {
            (None, _) => Err(CycleError::NotCreated),
            (Some(_), true) if self.own.is_some() => Err(CycleError::Ending),
            (Some(_), true) => Err(CycleError::Booted),
            (Some(_), false) if self.requested == Some(Next::End) => Err(CycleError::Ending),
            (Some(_), false) => {
                self.is_booted = true;
                Ok(())
            }
        }
    }

    /// Creates the machine of a snapshot, and starts it.
    ///
    /// # Errors
    /// [`CycleError`]: a machine is created, or the program ends.
    pub(super) fn restore(&mut self, created: Created, order: RestoreOrder) -> Result<(), CycleError> {
        self.create(created)?;
        self.boot().inspect_err(|_| self.created = None)?;
        self.restore = Some(Arc::new(order));
        Ok(())
    }

    /// Checks that a machine was booted.
    ///
    /// # Errors
    /// [`CycleError::NotCreated`], [`CycleError::NotBooted`].
    pub(super) const fn check_booted(&self) -> Result<(), CycleError> {
        match (self.is_booted, &self.created) {
            (true, _) => Ok(()),
            (false, None) => Err(CycleError::NotCreated),
            (false, Some(_)) => Err(CycleError::NotBooted),
        }
    }

    /// Requests `next`, at once or after the machine's end.
    ///
    /// # Errors
    /// [`CycleError`]: no machine is booted, or `Next::Boot` comes after another request or the machine's end.
    pub(super) fn request(&mut self, next: Next) -> Result<Effect, CycleError> {
        match next {
            _ if self.is_booted => {
                if next == Next::Boot && (self.requested.is_some() || self.own.is_some()) {
                    return Err(CycleError::Ending);
                }
                self.requested = self.requested.max(Some(next));
                Ok(Effect::Stop)
            }
            Next::Boot | Next::Stay => self.check_booted().map(|()| Effect::Stop),
            Next::Delete => {
                self.created = None;
                self.last = None;
                Ok(Effect::Done)
            }
            Next::End => {
                self.requested = Some(Next::End);
                Ok(Effect::Done)
            }
        }
    }

    /// Records that the machine ended for `reason`.
    pub(super) fn ended(&mut self, reason: &ExitReason) {
        // A request that was accepted before decides.
        let ends_with_guest = self.ends_with_guest && self.requested.is_none();
        self.own = Some(Next::after(reason, ends_with_guest));
        self.last = Some(LastEnd { reason: reason.name().to_owned(), text: reason.to_string() });
    }

    /// Records that the machine did not start, or that its end failed, because of `text`.
    pub(super) fn failed(&mut self, text: String) {
        let of_this_machine = self.own.is_some();
        let reason = self.last.take().filter(|_| of_this_machine).map(|last| last.reason);
        // No machine is left of a snapshot that cannot be restored.
        let next = if self.restore.is_some() { Next::Delete } else { Next::Stay };
        self.own.get_or_insert(next);
        self.last = Some(LastEnd { reason: reason.unwrap_or_else(|| "failed".to_owned()), text });
    }

    /// The main thread's instruction while no machine runs.
    pub(super) fn order(&self) -> Order {
        match (&self.created, self.is_booted, self.requested) {
            (Some(created), true, _) => match &self.restore {
                Some(restore) => Order::Restore(Arc::clone(created), Arc::clone(restore)),
                None => Order::Boot(Arc::clone(created)),
            },
            (_, _, Some(Next::End)) => Order::End,
            _ => Order::Wait,
        }
    }

    /// State for the execution that takes the running machine over, after `events` events.
    pub(super) fn running_cycle(&self, events: u64) -> SavedCycle {
        SavedCycle { created: self.created.as_deref().cloned(), boots: true, last: None, events }
    }

    /// State for the next execution, after `events` events; `None` if the program ends.
    pub(super) fn saved(&self, events: u64) -> Option<SavedCycle> {
        let own = self.own.unwrap_or(Next::Stay);
        let next = if own == Next::End { own } else { self.requested.unwrap_or(own) };
        let created = || self.created.as_deref().cloned();
        let last = self.last.clone();
        match next {
            Next::End => None,
            Next::Delete => Some(SavedCycle { created: None, boots: false, last: None, events }),
            Next::Stay => Some(SavedCycle { created: created(), boots: false, last, events }),
            Next::Boot => Some(SavedCycle { created: created(), boots: true, last, events }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration() -> Created {
        Created {
            language: Language::Own,
            text: "{}".to_owned(),
            default_name: "vm".to_owned(),
            name: "vm1".to_owned(),
            shown: ShownConfig::default(),
            taps: Passed::default(),
        }
    }

    fn created() -> Cycle {
        let mut cycle = Cycle::default();
        cycle.create(configuration()).unwrap();
        cycle
    }

    fn booted() -> Cycle {
        let mut cycle = created();
        cycle.boot().unwrap();
        cycle
    }

    /// What the next execution starts with when `cycle`'s machine ends for `reason`: created, and booted.
    fn next(mut cycle: Cycle, reason: &ExitReason) -> Option<[bool; 2]> {
        cycle.ended(reason);
        assert_eq!(cycle.boot(), Err(CycleError::Ending));
        cycle.saved(7).map(|saved| [saved.created.is_some(), saved.boots])
    }

    #[test]
    fn each_request_fits_its_states_and_is_refused_in_the_others() {
        let mut empty = Cycle::default();
        assert_eq!((empty.boot(), empty.order()), (Err(CycleError::NotCreated), Order::Wait));
        assert_eq!(empty.request(Next::Stay), Err(CycleError::NotCreated));
        assert_eq!(empty.request(Next::Boot), Err(CycleError::NotCreated));
        assert_eq!(empty.request(Next::Delete), Ok(Effect::Done), "as cloud-hypervisor has it");
        let mut created = created();
        assert_eq!(created.create(configuration()), Err(CycleError::Exists));
        assert_eq!(created.request(Next::Stay), Err(CycleError::NotBooted));
        assert_eq!(created.request(Next::Boot), Err(CycleError::NotBooted));
        assert_eq!((created.order(), created.boot()), (Order::Wait, Ok(())));
        assert_eq!(created.order(), Order::Boot(Arc::new(configuration())));
        assert_eq!(created.boot(), Err(CycleError::Booted));
        assert_eq!(created.create(configuration()), Err(CycleError::Exists));
        assert_eq!(created.request(Next::Boot), Ok(Effect::Stop));
        assert_eq!(created.request(Next::Boot), Err(CycleError::Ending));
    }

    #[test]
    fn a_configuration_is_deleted_and_the_program_ended_at_once_without_a_machine() {
        let mut cycle = created();
        assert_eq!(cycle.request(Next::Delete), Ok(Effect::Done));
        assert_eq!(cycle.created(), None);
        cycle.create(configuration()).unwrap();
        assert_eq!((cycle.request(Next::End), cycle.order()), (Ok(Effect::Done), Order::End));
    }

    #[test]
    fn a_machine_that_ends_by_itself_stays_created() {
        let fault = ExitReason::TripleFault { vcpu: 0 };
        for reason in [ExitReason::PoweredOff, ExitReason::Reset, ExitReason::Panicked, fault] {
            assert_eq!(next(booted(), &reason), Some([true, false]), "{reason}");
        }
        let not_in_place = ExitReason::NotInPlace("disk does not answer".to_owned());
        assert_eq!(next(booted(), &not_in_place), Some([true, true]), "it starts again all the same");
        assert_eq!(next(booted(), &ExitReason::Signal(15)), None);
    }

    #[test]
    fn a_request_decides_what_follows_and_of_two_the_greater_one() {
        for (requests, expected) in [
            (vec![Next::Stay], Some([true, false])),
            (vec![Next::Boot], Some([true, true])),
            (vec![Next::Boot, Next::Stay], Some([true, false])),
            (vec![Next::Delete, Next::Stay], Some([false, false])),
            (vec![Next::Stay, Next::End], None),
            (vec![Next::End, Next::Delete], None),
        ] {
            let mut cycle = booted();
            for request in &requests {
                assert_eq!(cycle.request(*request), Ok(Effect::Stop), "{requests:?}");
            }
            assert_eq!(next(cycle.clone(), &ExitReason::Requested), expected, "{requests:?}");
            assert_eq!(next(cycle, &ExitReason::Signal(2)), None, "{requests:?}: a signal ends the program");
        }
    }

    #[test]
    fn a_start_that_fails_leaves_the_configuration_and_its_reason() {
        let mut cycle = Cycle::resumed(SavedCycle {
            created: Some(configuration()),
            boots: true,
            ..SavedCycle::default()
        });
        assert!(matches!(cycle.order(), Order::Boot(_)));
        cycle.failed("no memory".to_owned());
        let saved = cycle.saved(3).unwrap();
        assert_eq!((saved.boots, saved.events, saved.created.as_ref()), (false, 3, Some(&configuration())));
        let text = serde_json::to_string(&saved).unwrap();
        assert_eq!(serde_json::from_str::<SavedCycle>(&text).unwrap(), saved);
        let resumed = Cycle::resumed(saved);
        let last = LastEnd { reason: "failed".to_owned(), text: "no memory".to_owned() };
        assert_eq!((resumed.last(), resumed.is_booted()), (Some(&last), false));
    }

    #[test]
    fn an_end_with_failed_disks_keeps_its_reason_with_the_text_of_the_failure() {
        let mut cycle = booted();
        cycle.ended(&ExitReason::PoweredOff);
        cycle.failed("disk is not flushed".to_owned());
        let last = LastEnd { reason: "powered-off".to_owned(), text: "disk is not flushed".to_owned() };
        assert_eq!(cycle.last(), Some(&last));
    }

    #[test]
    fn a_program_that_is_requested_to_end_boots_no_machine() {
        let mut cycle = created();
        assert_eq!(cycle.request(Next::End), Ok(Effect::Done));
        assert_eq!((cycle.boot(), cycle.order()), (Err(CycleError::Ending), Order::End));
    }

    #[test]
    fn a_program_ends_with_its_guest_unless_a_request_decides_otherwise() {
        let ending = |requested: Option<Next>, reason: &ExitReason| {
            let mut cycle = booted();
            cycle.set_ends_with_guest(true);
            if let Some(requested) = requested {
                cycle.request(requested).unwrap();
            }
            next(cycle, reason)
        };
        assert_eq!(ending(None, &ExitReason::PoweredOff), None);
        assert_eq!(ending(None, &ExitReason::Panicked), None);
        assert_eq!(ending(None, &ExitReason::Reset), None);
        assert_eq!(ending(Some(Next::Boot), &ExitReason::PoweredOff), Some([true, true]));
        assert_eq!(ending(Some(Next::Stay), &ExitReason::PoweredOff), Some([true, false]));
        let unstarted = ExitReason::NoThread { vcpu: 1, what: "no thread".to_owned() };
        assert_eq!(ending(None, &unstarted), Some([true, false]));
    }
}
