//! A machine that is saved and restored, or taken over: see [`crate::runner::snapshot`] and [`crate::runner::upgrade`].

use std::time::Duration;

use super::reset::and_then_all;
use super::{PLAIN, Runs, Scenario};
use crate::engine::judge::Expected;

const RESTORED: &[&str] = &and_then_all("restored");

/// The machine of the demo. All checks after `restored` run in the restored machine.
pub(super) const SNAPSHOT: Scenario = Scenario {
    name: "snapshot",
    summary: "a machine is saved while its guest uses the disk, and goes on in another process, with each of its devices",
    runs: Runs::Steps,
    config: "demo.json",
    vhost: Some(false),
    words: "egm.checks=restored,cpus,clock,memory_map,numa,pci,rng,virtio_blk,virtio_net,vsock,msix,egm_pattern \
            egm.arg.restored.text=egm-lab-restored",
    expected: Expected::power_off(RESTORED),
    deadline: Duration::from_secs(300),
    long: true,
    ..PLAIN
};

/// The checks after `restored` run in the last program.
pub(super) const UPGRADE: Scenario = Scenario {
    name: "upgrade",
    summary: "three upgrades and a snapshot under traffic of disk and network: no datagram is lost",
    vhost: Some(true),
    words: "egm.checks=restored,cpus,clock,memory_map,numa,pci,rng,virtio_blk,virtio_net,vsock,msix,egm_pattern \
            egm.arg.restored.text=egm-lab-restored egm.arg.restored.echo=yes",
    ..SNAPSHOT
};
