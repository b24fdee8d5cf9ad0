//! Slices that are PCI functions, in the lists of their machine.

use std::io;
use std::sync::{Arc, Mutex, Weak};

use egm_device::device::Function;

use super::poison::{Poison, SliceDevice};
use crate::api::{Journal, MachineEvent};
use crate::error::Chain;
use crate::hotplug::{Member, Slot};
use crate::lock::lock;
use crate::pci::Plugged;
use crate::reserve::{Leases, ReserveError, Return};

/// What the machine keeps of each slice: its lease, the watch of its memory, and the journal.
#[derive(Clone)]
pub(super) struct SliceLists {
    pub(super) leases: Leases,
    poison: Arc<Mutex<Poison>>,
    journal: Arc<Journal>,
}

impl SliceLists {
    /// The lists of `leases`. Each of `slices` that occupies a slot is returned when it leaves the guest.
    pub(super) fn of(
        leases: Leases,
        poison: &Arc<Mutex<Poison>>,
        journal: &Arc<Journal>,
        slices: &[SliceDevice],
        slots: &mut [Slot],
    ) -> Self {
        let lists = Self { leases, poison: Arc::clone(poison), journal: Arc::clone(journal) };
        for occupant in slots.iter_mut().filter_map(|slot| slot.occupant.as_mut()) {
            if slices.iter().any(|slice| slice.id == occupant.id) {
                occupant.new.member = Some(Box::new(lists.listed(&occupant.id, &occupant.new.function)));
            }
        }
        lists
    }

    /// Watches the memory of slice `id`, which came while the guest runs as the function `plugged`.
    pub(super) fn add(&self, id: &str, function: &Function, plugged: &Arc<dyn Plugged>) -> Listed {
        lock(&self.poison).add(id, self.leases.get(id), function);
        self.listed(id, plugged)
    }

    /// Slice `id`; its memory is watched already.
    fn listed(&self, id: &str, plugged: &Arc<dyn Plugged>) -> Listed {
        Listed { id: id.to_owned(), function: Arc::downgrade(plugged), lists: self.clone() }
    }
}

/// A slice in a slot. Its unplug returns it; the end of the machine returns those that are still plugged in.
pub(super) struct Listed {
    id: String,
    function: Weak<dyn Plugged>,
    lists: SliceLists,
}

impl Member for Listed {
    fn has_left(&mut self) -> bool {
        lock(&self.lists.poison).remove(&self.id);
        // A vCPU can be inside an access still; the controller has the last reference.
        self.function.strong_count() <= 1
    }

    fn take_loss(&mut self) -> Option<io::Error> {
        None
    }

    fn end(self: Box<Self>) -> Option<Box<dyn FnOnce()>> {
        Some(Box::new(move || {
            let Self { id, lists: SliceLists { leases, journal, .. }, .. } = *self;
            let named = id.clone();
            leases.return_one(&id, Box::new(move |outcome| report(&named, outcome, &journal)));
        }))
    }
}

/// Reports the return of slice `id` to the operator.
fn report(id: &str, outcome: Result<Return, ReserveError>, journal: &Journal) {
    let (change, text) = match outcome {
        Ok(Return::Done) => ("returned", format!("slice \"{id}\" is returned")),
        Ok(Return::Freed) => ("returned", format!("slice \"{id}\" was memory of this process: it is free")),
        Ok(Return::AtEnd) => ("return-pending", format!("slice \"{id}\" is returned when the machine ends")),
        Err(error) => ("not-returned", Chain(&error).one_line()),
    };
    tracing::info!("{text}");
    journal.publish(&MachineEvent::Device { device: id.to_owned(), change, text });
}
