//! Returns of slices: of one that leaves the guest, and of all at the end of the machine.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread;

use egm_device::broker::{ClientError, ReleasedSlice};
use egm_device::ledger::{Progress, Watch};

use super::error::ReserveError;
use super::leases::{LeaseTable, Leases, Named, SliceProgress, Taken};
use crate::lock::lock;

/// What became of a slice that left the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Return {
    /// The ledger or the broker has it back, scrubbed where the region keeps bytes.
    Done,
    /// It was memory of the machine itself.
    Freed,
    /// It is returned when the machine ends: the keeper has its lock, or the broker still finds it in use.
    AtEnd,
}

/// Called once with the outcome of a return, from any thread.
pub(crate) type Returned = Box<dyn FnOnce(Result<Return, ReserveError>) + Send>;

impl Leases {
    /// Scrubs and returns slice `id` on a thread of its own; nothing of the machine has its memory any more. `returned` is
    /// called with the outcome.
    pub(crate) fn return_one(&self, id: &str, returned: Returned) {
        let mut held = lock(&self.table);
        let position = held.named.iter().position(|named| named.id == id);
        let is_own = |named: &Named| !named.taken.is_of_broker();
        if held.keeper_has_locks && position.and_then(|position| held.named.get(position)).is_some_and(is_own)
        {
            drop(held);
            return returned(Ok(Return::AtEnd));
        }
        lock(&self.records).retain(|record| record.id != id);
        let Some(position) = position else {
            drop(held);
            return returned(Ok(Return::Freed));
        };
        // Where there is no thread, what it was to do is still here.
        let work = Arc::new(Mutex::new(Some((held.named.swap_remove(position), returned))));
        let (leases, task) = (self.clone(), Arc::clone(&work));
        let run = move || {
            let Some((named, returned)) = lock(&task).take() else { return };
            returned(leases.return_now(named));
        };
        held.returns.retain(|thread| !thread.is_finished());
        match thread::Builder::new().name("return".to_owned()).spawn(run) {
            Ok(thread) => held.returns.push(thread),
            Err(source) => {
                let Some((named, returned)) = lock(&work).take() else { return };
                let id = named.id.clone();
                held.named.push(named);
                drop(held);
                returned(Err(ReserveError::Thread { id, source }));
            }
        }
    }

    /// Returns `named`, which left the guest, and leaves it to the end of the machine where the broker refuses it now.
    fn return_now(&self, named: Named) -> Result<Return, ReserveError> {
        let done = |()| Return::Done;
        if !named.taken.is_of_broker() {
            return named.return_slice(&|_| (), &self.cancel).map(done);
        }
        let id = named.id.clone();
        let released = named.release()?;
        match released.return_slice(&self.cancel) {
            Err(ClientError::Refused { why, .. }) => {
                tracing::info!("the broker does not take slice \"{id}\" back before the machine ends: {why}");
                lock(&self.table).refused.push((id, released));
                Ok(Return::AtEnd)
            }
            given => given.map(done).map_err(|source| ReserveError::BrokerReturn { id, source }),
        }
    }

    /// Scrubs and returns all slices. A signal ends the scrub; the next owner's grant scrubs what is left. The result has
    /// the errors of slices that were not scrubbed or not returned.
    pub fn return_all(&self, progress: SliceProgress<'_>) -> Vec<ReserveError> {
        let returns = std::mem::take(&mut lock(&self.table).returns);
        if !returns.is_empty() || !lock(&self.table).named.is_empty() {
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                // Without it no signal ends the scrub in order: no reason to keep a dirty slice.
                let _ = signal_hook::flag::register(signal, Arc::clone(&self.cancel));
            }
        }
        for thread in returns {
            let _ = thread.join(); // it has reported its outcome
        }
        let LeaseTable { named, refused, keeper_has_locks, .. } = std::mem::take(&mut *lock(&self.table));
        let mine = named.into_iter().filter(|named| !keeper_has_locks || named.taken.is_of_broker());
        let given = mine.map(|named| {
            let id = named.id.clone();
            named.return_slice(&|step| progress(&id, step), &self.cancel)
        });
        let refused = refused.into_iter().map(|(id, released)| {
            released.return_slice(&self.cancel).map_err(|source| ReserveError::BrokerReturn { id, source })
        });
        given.chain(refused).filter_map(Result::err).collect()
    }
}

impl Named {
    /// The slice of a broker, without its memory.
    fn release(self) -> Result<ReleasedSlice, ReserveError> {
        match Arc::into_inner(self.taken) {
            Some(Taken::Broker(lease, memory)) => {
                drop(memory);
                Ok(lease.release())
            }
            _ => Err(ReserveError::InUse { id: self.id }),
        }
    }

    fn return_slice(
        self,
        progress: &(dyn Fn(Progress) + Sync),
        cancel: &AtomicBool,
    ) -> Result<(), ReserveError> {
        if self.taken.is_of_broker() {
            let id = self.id.clone();
            let given = self.release()?.return_slice(cancel);
            return given.map_err(|source| ReserveError::BrokerReturn { id, source });
        }
        let Self { id, taken, near } = self;
        match Arc::into_inner(taken) {
            Some(Taken::Own(lease)) => {
                let watch = Watch { progress, cancel, near: near.as_ref(), pace: None };
                let given = lease.return_slice(&watch);
                given.map_err(|source| ReserveError::GiveBack { id, source })
            }
            _ => Err(ReserveError::InUse { id }),
        }
    }
}
