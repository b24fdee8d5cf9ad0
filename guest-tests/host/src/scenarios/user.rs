//! Functions behind vfio-user in guests: see [`crate::assigned::vfio_user`] for the checks.

use std::time::Duration;

use super::{PLAIN, Runs, Scenario};
use crate::engine::judge::Expected;

/// A server's function, with the host's engine and memory.
pub(super) const SERVED: Scenario = Scenario {
    name: "vfio-user",
    summary: "a vfio-user function reaches memory and a slice, and a host function's engine reaches it; then its server dies",
    runs: Runs::Steps,
    region: Some("local"),
    assigned: &["0000:00:14.0", "0000:00:15.0"],
    servers: &["/run/gpu.sock"],
    words: "egm.checks=pci,functions quiet",
    expected: Expected::power_off(&["pci", "functions"]),
    deadline: Duration::from_secs(300),
    ..PLAIN
};

/// GPUs and a network card behind one switch of the emulated host, which QEMU plugs in.
pub(super) const PLUGGED: Scenario = Scenario {
    name: "vfio-gpus",
    own_kernel: true,
    summary: "two GPUs and a network card behind one switch: a clique, peer-to-peer each way, into a slice too",
    runs: Runs::Steps,
    region: Some("hugetlb"),
    assigned: &["0000:0a:00.0", "0000:0b:00.0", "0000:0c:00.0"],
    plugged: true,
    words: "egm.checks=pci,functions egm.arg.functions.count=3 quiet",
    expected: Expected::power_off(&["pci", "functions"]),
    deadline: Duration::from_secs(900),
    long: true,
    ..PLAIN
};
