//! Who is to blame, and what is printed: the same for every program of ours.

pub use egm_device::report::{Blame, Chain, Report};

use egm_vfio::kernel::{Fault, OpenError};

/// Whose turn it is when a function of the host cannot be opened.
pub(crate) fn opening(error: &OpenError) -> Blame {
    match error.fault() {
        Fault::Configuration => Blame::Configuration,
        Fault::Host => Blame::Host,
    }
}
