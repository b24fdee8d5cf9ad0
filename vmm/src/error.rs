//! Causes of errors, and their printed form: the same for all our programs.

pub use egm_report::{Blame, Chain, Remedy, Report};

use egm_vfio::kernel::{Fault, OpenError};

/// The remedy, when a function of the host cannot be opened.
pub(crate) fn opening(error: &OpenError) -> Remedy {
    let blame = match error.fault() {
        Fault::Configuration => Blame::Configuration,
        Fault::Host => Blame::Host,
    };
    Remedy { blame, help: error.remedy() }
}
