//! The kernel modules that the lab needs, in load order.

use std::collections::{BTreeMap, BTreeSet};

/// Modules for a guest of ours; those built into the kernel are skipped.
pub(crate) const OF_GUEST: [&str; 11] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "vmw_vsock_virtio_transport",
    "virtio_rng",
    "nvme",
    "pvpanic_mmio",
    "pvpanic_pci",
    "button",
    "evdev",
    "ext4",
];

/// Modules for a guest with the kernel for every machine: most drivers are modules there, also those of network cards.
pub(crate) const OF_GENERIC: [&str; 7] =
    ["virtio_pci", "virtio_blk", "nvme", "igb", "e1000e", "pvpanic_mmio", "pvpanic_pci"];

/// Modules for a guest with RDMA: the same, a network of ours, and RDMA over any card. The checksum of its packets is a
/// module of its own, which older kernels (6.12) load by name.
pub(crate) const OF_RDMA: [&str; 12] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "nvme",
    "igb",
    "e1000e",
    "pvpanic_mmio",
    "pvpanic_pci",
    "crc32_generic",
    "rdma_rxe",
    "ib_uverbs",
];

/// Modules for a guest of the emulated Grace host: the same, and those for devices of ours.
pub(crate) const OF_ARM64: [&str; 12] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "vmw_vsock_virtio_transport",
    "virtio_rng",
    "nvme",
    "igb",
    "e1000e",
    "pvpanic_mmio",
    "pvpanic_pci",
    "button",
    "evdev",
];

/// Modules for the emulated host: its share, KVM on AMD, back ends of guests' devices, VFIO, injected errors,
/// device-DAX, and ext4 for fsdax. It has no drivers for the functions of guests, except one that binds any function it
/// is assigned.
pub(crate) const OF_L1: [&str; 21] = [
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "kvm_amd",
    "tun",
    "vhost_net",
    "vhost_vsock",
    "vsock_loopback",
    "virtio_net",
    "vfio_iommu_type1",
    "vfio_pci",
    "uio_pci_generic",
    "aer_inject",
    "nd_e820",
    "libnvdimm",
    "nd_pmem",
    "dax_pmem",
    "device_dax",
    "dax_hmem",
    "crc32c_generic",
    "ext4",
];

/// The paths of `wanted` and of all they depend on, each after its dependencies.
///
/// `dep` is the text of `modules.dep`: `path: path path …`, every module once. Its right-hand side is already
/// transitive, last needed first.
pub(crate) fn load_order(dep: &str, wanted: &[&str]) -> Vec<String> {
    let lines = dep.lines().filter_map(|line| line.split_once(':'));
    let table: BTreeMap<String, (&str, &str)> =
        lines.map(|(path, needs)| (name(path), (path, needs))).collect();
    let mut seen = BTreeSet::new();
    let mut order = Vec::new();
    for (path, needs) in wanted.iter().filter_map(|module| table.get(*module)) {
        for path in needs.split_whitespace().rev().chain([*path]) {
            if seen.insert(path) {
                order.push(path.to_owned());
            }
        }
    }
    order
}

/// A module's name from its path: `kernel/a/virtio-rng.ko.xz` is `virtio_rng`.
fn name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "k/vsock.ko.xz:
k/vmw_vsock_virtio_transport_common.ko.xz: k/vsock.ko.xz
k/vmw_vsock_virtio_transport.ko.xz: k/vmw_vsock_virtio_transport_common.ko.xz k/vsock.ko.xz
k/virtio-rng.ko.xz:
k/loop.ko.xz: k/vsock.ko.xz
";

    #[test]
    fn a_module_comes_after_all_that_it_needs() {
        let order = load_order(DEP, &["vmw_vsock_virtio_transport"]);
        assert_eq!(
            order,
            [
                "k/vsock.ko.xz",
                "k/vmw_vsock_virtio_transport_common.ko.xz",
                "k/vmw_vsock_virtio_transport.ko.xz"
            ]
        );
    }

    #[test]
    fn a_module_comes_once_and_a_built_in_one_not_at_all() {
        assert_eq!(load_order(DEP, &["vsock", "loop", "virtio_pci"]), ["k/vsock.ko.xz", "k/loop.ko.xz"]);
    }

    #[test]
    fn a_dash_in_a_file_name_is_an_underscore_in_the_module_name() {
        assert_eq!(load_order(DEP, &["virtio_rng"]), ["k/virtio-rng.ko.xz"]);
    }
}
