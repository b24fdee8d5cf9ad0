//! Locks that ignore poison.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock. A panic on any thread ends the program (see `cli`), so no caller sees poison.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
