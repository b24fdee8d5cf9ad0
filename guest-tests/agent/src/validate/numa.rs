//! Nodes are what they say.

use super::Validation;

/// The group's validations.
pub(super) static ALL: &[Validation] = &[];
