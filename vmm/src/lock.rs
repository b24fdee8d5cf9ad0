//! Locks whose poison is ignored.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock. What a panic left half way is still reset, finished and given back, so poison is ignored.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
