//! The processor reaches GPU memory through its BAR.

use super::Validation;

/// The group's validations.
pub(super) static ALL: &[Validation] = &[];
