//! Links, BARs and errors of PCI functions.

use super::Validation;

/// The group's validations.
pub(super) static ALL: &[Validation] = &[];
