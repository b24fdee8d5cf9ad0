//! A machine of the API that another program can take over.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::handover::{InheritedMachine, Leaving};
use super::signals::Signals;
use crate::api::{Published, Server, with_causes};
use crate::console::restore_terminal;
use crate::error::Chain;
use crate::machine::{Hold, UpgradeError};

/// The API of a machine that another program can take over.
pub(super) struct Served<'a> {
    pub(super) server: &'a RefCell<Option<Server>>,
    pub(super) machine: &'a Arc<Published>,
    pub(super) signals: &'a Signals,
}

impl Served<'_> {
    /// Has the program at the path take over the machine that `hold` gives; returns when that fails.
    pub(super) fn hand_over(&self, program: &Path, hold: Hold<'_>) -> UpgradeError {
        let failed = |source| UpgradeError::Execute { program: program.to_owned(), source };
        let error = self.without_api(|leaving| match hold() {
            Ok(handed) => failed(self.execute(|| leaving.hand_over(program, handed))),
            Err(reason) => UpgradeError::Save(reason),
        });
        let error = error.unwrap_or_else(|| failed(io::ErrorKind::NotConnected.into()));
        self.machine.end_upgrade(Some(with_causes(&error)), None);
        error
    }

    /// Gives the machine `taken` back to the program that handed it over, for the reason `why`; returns when that fails.
    pub(super) fn give_back(&self, mut taken: InheritedMachine, why: String) {
        drop(taken.holder.take()); // a limit that it takes part of can be the reason
        if taken.failed.is_some() {
            return self.machine.end_upgrade(taken.failed, None); // it has it back already
        }
        taken.failed = Some(why.clone());
        let error = self.without_api(|leaving| self.execute(|| leaving.give_back(&taken)));
        let error = error.unwrap_or_else(|| io::ErrorKind::NotConnected.into());
        self.machine.end_upgrade(Some(format!("{why}; cannot execute the program before: {error}")), None);
    }

    /// Calls `act` while no request can come, and serves on after it; `None` where the API has ended.
    fn without_api<T>(&self, act: impl FnOnce(&Leaving<'_>) -> T) -> Option<T> {
        let listener = self.server.take().and_then(Server::into_listener)?;
        let result = act(&Leaving { listener: &listener, machine: self.machine });
        match Server::serve(listener, Arc::clone(self.machine)) {
            Ok(server) => drop(self.server.replace(Some(server))),
            Err(error) => tracing::error!("the API ends, and the machine goes on: {}", Chain(&error)),
        }
        Some(result)
    }

    /// Executes a program by `execute`; returns when that fails.
    fn execute(&self, execute: impl FnOnce() -> io::Error) -> io::Error {
        let blocked = self.signals.block();
        restore_terminal();
        // A request or a signal that came ends the machine, and would be lost with this execution.
        let error = match blocked {
            Err(error) => error,
            Ok(()) if self.machine.is_ending() || self.signals.is_received() => {
                io::ErrorKind::Interrupted.into()
            }
            Ok(()) => execute(),
        };
        let _ = self.signals.unblock(); // the kernel permits what it permitted before
        error
    }
}
