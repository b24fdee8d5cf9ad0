//! Guests of a Grace host, which is emulated unless this machine is one: see [`crate::grace`].

use std::time::Duration;

use super::{GraceKernel, PLAIN, Runs, Scenario, SliceTest, button, demo};
use crate::engine::disk::Proof;
use crate::engine::judge::Expected;

/// One boot of an emulated guest in an emulated host.
const DEADLINE: Duration = Duration::from_secs(400);

/// Common values of all. Each takes minutes, and their host's kernel is built first.
pub(super) const GRACE: Scenario =
    Scenario { config: "grace-lab-smoke.json", grace: true, long: true, deadline: DEADLINE, ..PLAIN };

/// The scenario on Debian's kernel, without a build: short enough for every run of the tests.
pub(super) const STOCK: Scenario = Scenario {
    name: "grace-stock",
    summary: "Debian's kernel as host, too: ACPI, a slice of host memory, an assigned NVMe drive, the power button; twice",
    press_on: Some(button::LISTENS),
    grace_kernel: GraceKernel::Debian,
    region: Some("local"),
    words: "egm.checks=cpus,memory_map,numa,acpi_tables,acpi_numa,pci,power_button,nvme,egm_pattern egm.arg.nvme.serial=egm0 \
            quiet",
    expected: Expected::power_off(&[
        "cpus",
        "memory_map",
        "numa",
        "acpi_tables",
        "acpi_numa",
        "pci",
        "power_button",
        "nvme",
        "egm_pattern",
    ]),
    long: false,
    ..NVME
};

/// A guest that resets itself and does not end its machine.
pub(super) const REBOOT: Scenario = Scenario {
    name: "grace-reboot",
    summary: "a guest with an assigned NVMe drive and a slice of host memory resets itself twice in place",
    press_on: None,
    reboots: true,
    words: "egm.checks=restarts,cpus,memory_map,numa,pci,nvme,egm_pattern egm.arg.nvme.serial=egm0 quiet",
    expected: Expected::power_off(&["restarts", "cpus", "memory_map", "numa", "pci", "nvme", "egm_pattern"]),
    disk: None,
    long: true,
    ..STOCK
};

/// Pages of 16 KiB, with Debian's kernel for them: sizes and alignments differ again.
pub(super) const MEDIUM_PAGES: Scenario = Scenario {
    name: "grace-medium-pages",
    summary: "under Debian's kernel with pages of 16 KiB: ACPI, a slice of host memory, an assigned NVMe drive; twice",
    grace_kernel: GraceKernel::Debian16k,
    long: true,
    ..STOCK
};

/// The smallest scenario of a guest with EGM.
pub(super) const DEMO: Scenario = Scenario {
    name: "grace-demo",
    summary: "an arm64 guest of Debian's newest kernel, by ACPI, with EGM of /dev/egm4, a disk and a network",
    config: "grace-lab-demo.json",
    words: demo::SCENARIO.words,
    expected: demo::SCENARIO.expected,
    disk: Some(Proof::Signature),
    ..GRACE
};

/// EGM from the driver's device to the guest and back.
pub(super) const EGM: Scenario = Scenario {
    name: "grace-egm",
    summary: "a slice of /dev/egm4: used, exclusive, scrubbed, returned, its retired pages neither seen nor touched",
    runs: Runs::Steps,
    region: Some("egm4"),
    slice_test: SliceTest::Owned,
    ..GRACE
};

/// A small model of a guest with a whole tray.
pub(super) const NODES: Scenario = Scenario {
    name: "grace-nodes",
    summary: "two sockets with EGM as memory, four GPUs: 34 nodes, their initiators and distances as planned",
    runs: Runs::Steps,
    config: "grace-lab-nodes.json",
    assigned: &["0000:00:03.0", "0000:00:05.0", "0000:00:04.0", "0000:00:06.0"],
    words: "egm.checks=cpus,memory_map,numa,acpi_tables,acpi_numa,hmat,pci egm.arg.numa.room=16",
    expected: Expected::power_off(&["cpus", "memory_map", "numa", "acpi_tables", "acpi_numa", "hmat", "pci"]),
    ..GRACE
};

/// The drive behind the first root port, behind an SMMUv3. Its guest is quiet, like Debian's: each byte on the console
/// is two exits, which take half of a start under emulation.
pub(super) const NVME: Scenario = Scenario {
    name: "grace-nvme",
    summary: "an assigned NVMe drive: written, found in its image, survives the guest's reset, free afterwards",
    runs: Runs::Steps,
    assigned: &["0000:01:00.0"],
    words: "egm.checks=pci,nvme egm.arg.nvme.serial=egm0 quiet",
    expected: Expected::power_off(&["pci", "nvme"]),
    disk: Some(Proof::Signature),
    ..GRACE
};

/// The same drive with a guest that uses no message-signalled interrupts.
pub(super) const INTX: Scenario = Scenario {
    name: "grace-intx",
    summary: "an assigned NVMe drive with interrupts by a line",
    words: "pci=nomsi egm.checks=pci,nvme egm.arg.nvme.serial=egm0 egm.arg.nvme.intx=1",
    ..NVME
};

/// A server's function, with the host's engine and memory. A machine with such a function is refused a slice of
/// `/dev/egm4`: its driver permits no second process to map it.
pub(super) const USER: Scenario = Scenario {
    name: "grace-user",
    summary: "a vfio-user function reaches memory and a slice, and a host function's engine reaches it; then its server dies",
    runs: Runs::Steps,
    region: Some("local"),
    assigned: &["0000:00:14.0", "0000:00:15.0"],
    servers: &["/run/gpu.sock"],
    words: "egm.checks=pci,functions quiet",
    expected: Expected::power_off(&["pci", "functions"]),
    ..GRACE
};

/// The first socket's GPU, its EGM, and the DMA engine.
pub(super) const GPU: Scenario = Scenario {
    name: "grace-gpu",
    summary: "a GPU of nvgrace-gpu and a slice of /dev/egm4: its memory to the last byte, by the guest and by a DMA engine",
    runs: Runs::Steps,
    region: Some("egm4"),
    assigned: &["0000:00:03.0", "0000:00:14.0"],
    words: "egm.checks=pci,numa,acpi_tables,edu,gpu_memory egm.arg.edu.places=4 egm.arg.gpu.bar4=536870912 \
            egm.arg.gpu.bar2=1207959552",
    expected: Expected::power_off(&["pci", "numa", "acpi_tables", "edu", "gpu_memory"]),
    ..GRACE
};

/// The first socket's GPU of a vfio-user server, its EGM, and QEMU's DMA engine.
pub(super) const VFIO_USER_GPU: Scenario = Scenario {
    name: "grace-vfio-user-gpu",
    summary: "a GPU of NVIDIA's id behind a virtio-iommu: waited for after resets, its engine reaches all memory, it reports an error",
    runs: Runs::Steps,
    region: Some("egm4"),
    assigned: &["0000:08:00.0", "0000:00:14.0"],
    plugged: true,
    words: "egm.checks=pci,numa,functions,edu,gpu_memory egm.arg.functions.places=4 egm.arg.edu.places=3 \
            egm.arg.gpu.bar4=1744830464",
    expected: Expected::power_off(&["pci", "numa", "functions", "edu", "gpu_memory"]),
    deadline: Duration::from_secs(900),
    ..GRACE
};

/// The first socket's GPU of a vfio-user server, and a slice of the other socket's region.
pub(super) const TRUST: Scenario = Scenario {
    name: "grace-trust",
    summary: "a GPU is refused beside another owner's slice of egm4; in one trust domain its guest reads and writes that slice",
    runs: Runs::Steps,
    region: Some("egm4"),
    assigned: &["0000:08:00.0"],
    plugged: true,
    words: "egm.checks=egm_aperture quiet",
    expected: Expected::power_off(&["egm_aperture"]),
    ..GRACE
};

/// A network card and a slice of EGM each, for two guests; the second's is of the other socket.
pub(super) const RDMA: Scenario = Scenario {
    name: "grace-rdma",
    summary: "RDMA over assigned network cards from the EGM of one socket into that of the other, read off the wire, found in host memory",
    runs: Runs::Steps,
    region: Some("egm4"),
    slice_test: SliceTest::Granted,
    assigned: &["0000:02:00.0", "0000:06:00.0"],
    rdma: true,
    words: "egm.validate=rdma.device,rdma.nodes,rdma.hugepages,rdma.atomics,rdma.perftest,odp.page_starts \
            egm.checks=numa egm.doctor egm.arg.json=1 egm.arg.rdma.rxe=192.168.101.12/24 egm.arg.size=65536 egm.arg.rdma.requests=20 egm.arg.deadline=600 quiet \
            hugepages=0:8,1:8",
    expected: Expected::power_off(&[
        "numa",
        "rdma.device",
        "rdma.nodes",
        "rdma.hugepages",
        "rdma.atomics",
        "rdma.perftest",
        "odp.page_starts",
    ]),
    deadline: Duration::from_secs(900),
    ..GRACE
};

/// The page size that NVIDIA uses on its hosts: every size and alignment differs.
pub(super) const LARGE_PAGES: Scenario = Scenario {
    name: "grace-large-pages",
    summary: "under a host with pages of 64 KiB: a GPU, a slice of /dev/egm4, a DMA engine and a drive",
    grace_kernel: GraceKernel::LargePages,
    assigned: &["0000:00:03.0", "0000:00:14.0", "0000:01:00.0"],
    words: "egm.checks=pci,numa,acpi_tables,egm_pattern,nvme,edu,gpu_memory egm.arg.nvme.serial=egm0 egm.arg.edu.places=4 \
            egm.arg.gpu.bar4=536870912 egm.arg.gpu.bar2=1207959552",
    expected: Expected::power_off(&[
        "pci",
        "numa",
        "acpi_tables",
        "egm_pattern",
        "nvme",
        "edu",
        "gpu_memory",
    ]),
    ..GPU
};

/// The same machine, started again after each way to end.
pub(super) const AGAIN: Scenario = Scenario {
    name: "grace-again",
    summary: "a machine with a slice of /dev/egm4: refused while another program has the device, started again after reset and kill",
    runs: Runs::Steps,
    region: Some("egm4"),
    ..GRACE
};

/// The last scenario of this region: the page stays retired.
pub(super) const POISON: Scenario = Scenario {
    name: "grace-poison",
    summary: "a page of /dev/egm4 goes bad under a guest: reported by ACPI's tables, taken out of service, a hole of the next guest",
    runs: Runs::Steps,
    region: Some("egm4"),
    slice_test: SliceTest::BadPage,
    ..GRACE
};

/// Ordinary memory, from which the kernel removes a page.
pub(super) const READ: Scenario = Scenario {
    name: "grace-poison-read",
    summary: "a guest reads a page that went bad: it gets an external abort, ends the reading program, and lives",
    runs: Runs::Steps,
    region: Some("local"),
    slice_test: SliceTest::BadPage,
    ..GRACE
};
