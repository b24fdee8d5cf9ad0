//! A machine of the API that another program can take over.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;

use super::handover::{InheritedMachine, Leaving};
use super::signals::Signals;
use crate::api::{Published, Server};
use crate::console::restore_terminal;
use crate::error::Chain;
use crate::machine::{HandedMachine, UpgradeError};

/// The API of a machine that another program can take over.
pub(super) struct Served<'a> {
    pub(super) server: &'a RefCell<Option<Server>>,
    pub(super) machine: &'a Arc<Published>,
    pub(super) signals: &'a Signals,
}

impl Served<'_> {
    /// Has another program take the machine over; returns when that fails.
    pub(super) fn hand_over(&self, handed: HandedMachine) -> UpgradeError {
        let source = self.execute(|leaving| leaving.hand_over(&handed));
        let error = UpgradeError::Execute { program: handed.program, source };
        self.machine.end_upgrade(Some(error.to_string()), None);
        error
    }

    /// Gives the machine `taken` back to the program that handed it over, for the reason `why`; returns when that fails.
    pub(super) fn give_back(&self, taken: &InheritedMachine, why: String) {
        if taken.failed.is_some() {
            return self.machine.end_upgrade(taken.failed.clone(), None); // it has it back already
        }
        let error = self.execute(|leaving| leaving.give_back(taken, why.clone()));
        self.machine.end_upgrade(Some(format!("{why}; cannot execute the program before: {error}")), None);
    }

    /// Executes a program by `execute`, and serves on when that fails.
    fn execute(&self, execute: impl FnOnce(&Leaving<'_>) -> io::Error) -> io::Error {
        let Some(listener) = self.server.take().and_then(Server::into_listener) else {
            return io::ErrorKind::NotConnected.into();
        };
        let blocked = self.signals.block();
        restore_terminal();
        // From here on no request comes; one that came ends the machine, and would be lost with this execution.
        let error = match blocked {
            Err(error) => error,
            Ok(()) if self.machine.is_ending() || self.signals.is_received() => {
                io::ErrorKind::Interrupted.into()
            }
            Ok(()) => execute(&Leaving { listener: &listener, machine: self.machine }),
        };
        let _ = self.signals.unblock(); // the kernel permits what it permitted before
        match Server::serve(listener, Arc::clone(self.machine)) {
            Ok(server) => drop(self.server.replace(Some(server))),
            Err(error) => tracing::error!("the API ends, and the machine goes on: {}", Chain(&error)),
        }
        error
    }
}
