//! RDMA on demand, over memory that moves.

use super::Validation;

/// The group's validations.
pub(super) static ALL: &[Validation] = &[];
