//! The typed form of a tree, and every fault of its shape.
//!
//! serde ends at the first fault. So what is wrong is left out of a copy of the tree, and the rest is read again.

use std::borrow::Cow;

use serde::de::DeserializeOwned;

use super::decode::decode;
use super::faults::{self, Faults};
use super::tree::Node;

/// Lists of a [`File`](super::file::File) of which one entry can be left out: their typed form has room for it.
pub(super) const WITH_GAPS: &[&str] = &["devices", "egm", "memory.nodes"];

/// The `T` in `root`, without what is wrong; its faults are noted. `None` when nothing remains. An entry can be left out of
/// the lists `with_gaps`.
pub(super) fn shape<T: DeserializeOwned>(root: &Node, with_gaps: &[&str], faults: &mut Faults) -> Option<T> {
    let mut rest = Cow::Borrowed(root);
    while !faults.is_full() {
        let fault = match decode(&rest) {
            Ok(value) => return Some(value),
            Err(fault) => fault,
        };
        let key = fault.key.clone();
        let meant = faults::meant(&fault).filter(|meant| !rest.has(meant));
        faults.note(fault);
        faults.doubt(rest.to_mut().leave_out(&key, with_gaps)?);
        meant.into_iter().for_each(|meant| faults.doubt(meant));
    }
    None
}
