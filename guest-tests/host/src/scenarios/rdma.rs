//! RDMA in guests: see [`crate::rdma::guests`].

use std::time::Duration;

use super::{PLAIN, Runs, Scenario, SliceTest};
use crate::engine::judge::Expected;

/// Validations of one guest alone. Its kernel's rxe has no on-demand paging, so the group `odp` does not apply.
const ALONE: &[&str] = &[
    "numa",
    "rdma.device",
    "rdma.memory",
    "rdma.nodes",
    "rdma.hugepages",
    "rdma.relaxed",
    "rdma.atomics",
    "rdma.bandwidth",
    "rdma.latency",
    "rdma.perftest",
];

/// Two assigned cards and two slices.
pub(super) const CARDS: Scenario = Scenario {
    name: "rdma",
    summary: "RDMA over assigned network cards into EGM nodes: every byte right, in one guest and between two",
    runs: Runs::Steps,
    assigned: &["0000:02:00.0", "0000:06:00.0"],
    region: Some("mem"),
    slice_test: SliceTest::Granted,
    rdma: true,
    words: "egm.checks=numa egm.validate=rdma.device,rdma.memory,rdma.nodes,rdma.hugepages,rdma.relaxed,rdma.atomics,rdma.bandwidth,\
            rdma.latency,rdma.perftest egm.doctor egm.arg.json=1 egm.arg.rdma.rxe=192.168.101.12/24 egm.arg.size=65536 \
            egm.arg.rdma.requests=20 egm.arg.deadline=600 lapic=notscdeadline quiet \
            hugepages=0:8,1:8",
    expected: Expected::power_off(ALONE),
    deadline: Duration::from_secs(1500),
    long: true,
    ..PLAIN
};

/// The same over taps.
pub(super) const VIRTIO: Scenario = Scenario {
    name: "rdma-virtio",
    summary: "the same over virtio-net: in one guest, and between two",
    assigned: &[],
    taps: &["egmtap0", "egmtap1"],
    words: "egm.checks=numa egm.validate=rdma.device,rdma.memory,rdma.nodes,rdma.hugepages,rdma.relaxed,rdma.atomics,rdma.bandwidth,\
            rdma.latency,rdma.perftest egm.doctor egm.arg.json=1 egm.arg.rdma.rxe=192.168.100.2/24 egm.arg.size=65536 \
            egm.arg.rdma.requests=20 egm.arg.deadline=600 quiet \
            hugepages=0:8,1:8",
    ..CARDS
};
