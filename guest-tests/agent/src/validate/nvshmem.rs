//! NVSHMEM between the GPUs of this machine.

use super::{Part, Validation};

/// The group's validations.
pub(super) static ALL: &[Validation] = &[];

/// What its validations start as processes of their own.
pub(super) static PARTS: &[Part] = &[];
