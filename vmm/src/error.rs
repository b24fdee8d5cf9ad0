//! Causes of errors, and their printed form: the same for all our programs.

pub use egm_report::{Blame, Chain, Report};

use egm_vfio::kernel::{Fault, OpenError};

/// The cause, when a function of the host cannot be opened.
pub(crate) fn opening(error: &OpenError) -> Blame {
    match error.fault() {
        Fault::Configuration => Blame::Configuration,
        Fault::Host => Blame::Host,
    }
}
