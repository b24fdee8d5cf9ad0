//! A monitor that is not ours.

use std::time::Duration;

use super::{PLAIN, Scenario};
use crate::peer;

/// Debian's QEMU has a slice by vfio-user.
pub(super) const QEMU: Scenario = Scenario {
    name: "peer-qemu",
    story: "stock QEMU has a slice by vfio-user: checked, kept through a reset, plugged, given back, its server killed",
    outside: true,
    tell: Some(peer::run),
    deadline: Duration::from_secs(300),
    ..PLAIN
};
