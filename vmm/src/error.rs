//! Who is to blame, and what is printed: the same for every program of ours.

pub use egm_device::report::{Blame, Chain, Report};
