//! Scenarios with peers.

use std::time::Duration;

use super::{PLAIN, Runs, Scenario};
use crate::engine::peer_program::PeerName;

/// Debian's QEMU has a slice by vfio-user.
pub(super) const QEMU: Scenario = Scenario {
    name: "peer-qemu",
    summary: "stock QEMU has a slice by vfio-user: checked, kept through a reset, plugged, given back, its server killed",
    runs: Runs::Steps,
    on_this_machine: true,
    deadline: Duration::from_secs(300),
    ..PLAIN
};

/// cloud-hypervisor has one, if the user provides its program.
pub(super) const CLOUD_HYPERVISOR: Scenario = Scenario {
    name: "peer-cloud-hypervisor",
    summary: "stock cloud-hypervisor (--peer) has a slice by vfio-user: checked, kept through a reset, plugged, given back, its server killed",
    runs: Runs::Steps,
    peer: Some(PeerName::CloudHypervisor),
    deadline: Duration::from_secs(400),
    ..PLAIN
};
