//! The devices of a guest that was reset.

use super::Controller;
use crate::hotplug::Removal;

impl Controller {
    /// Returns all functions and ports to their state at the start, because the guest was reset. A device that it was
    /// requested to release leaves: the request is lost with the guest's state.
    pub(super) fn warm_reset(&mut self) {
        for index in 0..self.slots.len() {
            let occupant = self.slots.get(index).and_then(|slot| slot.occupant.as_ref());
            if occupant.is_some_and(|occupant| occupant.leaving.is_some()) {
                self.take(index, Removal::Orderly);
            }
        }
        // The kernel would wait a minute for the answer of one that is gone.
        let functions = self.occupants().map(|occupant| &occupant.new.function);
        let present: Vec<_> = functions.filter(|function| !function.is_lost()).collect();
        let names: Vec<&str> = present.iter().map(|function| function.name()).collect();
        present.iter().for_each(|function| function.reset(&names));
        self.root.warm_reset();
    }
}
