//! A part of a snapshot that does not fit the machine.

use std::fmt::Display;

/// A saved value that the machine cannot have. Whatever wrote the file, it is refused before the guest runs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Mismatch {
    /// The value and the rule, in words.
    what: String,
}

impl Mismatch {
    /// A mismatch with this description.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into() }
    }

    /// The same as a part of `whole`.
    pub(crate) fn of(self, whole: impl Display) -> Self {
        Self { what: format!("{whole}: {}", self.what) }
    }
}

/// Refuses with `what` unless `fits`.
///
/// # Errors
/// [`Mismatch`].
pub(crate) fn ensure(fits: bool, what: impl FnOnce() -> String) -> Result<(), Mismatch> {
    if fits { Ok(()) } else { Err(Mismatch::new(what())) }
}
