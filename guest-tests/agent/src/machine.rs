//! Facts about a machine, for the head of a run.

use egm_guest::findings::{Gpu, Machine, Node};

use crate::tree::{self, NODES, Tree};
use crate::{smbios, sysfs};

/// The machine with these files; the kernel's name is this process' own.
pub(crate) fn machine(tree: &Tree) -> Machine {
    let uname = rustix::system::uname();
    let name = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    Machine {
        kernel: format!("{} {} {}", name(uname.sysname()), name(uname.release()), name(uname.version())),
        architecture: name(uname.machine()),
        hypervisor: hypervisor(tree),
        product: product(tree),
        cpu: cpu(tree),
        cpus: tree
            .list("/sys/devices/system/cpu/online")
            .map_or(0, |cpus| u32::try_from(cpus.len()).unwrap_or(u32::MAX)),
        memory: meminfo(tree, "MemTotal").unwrap_or(0),
        nodes: nodes(tree),
        gpus: gpus(tree),
        driver: driver(tree),
    }
}

/// Bytes that `/proc/meminfo` gives for `key`.
pub(crate) fn meminfo(tree: &Tree, key: &str) -> Option<u64> {
    let text = tree.text("/proc/meminfo")?;
    sysfs::field(&text, key)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Signs that this is a virtual machine.
pub(crate) fn hypervisor(tree: &Tree) -> Option<String> {
    let mut signs = Vec::new();
    if cpu_flag(tree) == Some(true) {
        signs.push("CPUID's hypervisor bit".to_owned());
    }
    if let Some(kind) = tree.word("/sys/hypervisor/type") {
        signs.push(format!("/sys/hypervisor/type {kind}"));
    }
    if virtual_machine_bit(tree) == Some(true) {
        signs.push("SMBIOS' virtual machine bit".to_owned());
    }
    (!signs.is_empty()).then(|| signs.join(", "))
}

/// Whether CPUID shows a hypervisor; `None` where processors have no such flags.
pub(crate) fn cpu_flag(tree: &Tree) -> Option<bool> {
    let text = tree.text("/proc/cpuinfo")?;
    Some(sysfs::field(&text, "flags")?.split(' ').any(|flag| flag == "hypervisor"))
}

/// Whether SMBIOS marks this as a virtual machine; `None` where it cannot be read.
pub(crate) fn virtual_machine_bit(tree: &Tree) -> Option<bool> {
    smbios::virtual_machine(&tree.bytes("/sys/firmware/dmi/tables/DMI")?)
}

fn product(tree: &Tree) -> Option<String> {
    let word = |name: &str| tree.word(&format!("/sys/class/dmi/id/{name}"));
    let words: Vec<String> = ["sys_vendor", "product_name"].into_iter().filter_map(word).collect();
    (!words.is_empty()).then(|| words.join(" "))
}

fn cpu(tree: &Tree) -> String {
    let text = tree.text("/proc/cpuinfo").unwrap_or_default();
    let field = |key: &str| sysfs::field(&text, key).map(str::to_owned);
    let arm = || Some(format!("implementer {} part {}", field("CPU implementer")?, field("CPU part")?));
    field("model name").or_else(arm).unwrap_or_else(|| "unknown".to_owned())
}

/// NUMA nodes, with or without memory.
pub(crate) fn nodes(tree: &Tree) -> Vec<Node> {
    let online = tree.list(&format!("{NODES}/online")).unwrap_or_default();
    let node = |number: u32| Node {
        number,
        cpus: tree.word(&tree::node(number, "cpulist")).unwrap_or_default(),
        memory: tree
            .text(&tree::node(number, "meminfo"))
            .and_then(|text| sysfs::node_meminfo(&text, number, "MemTotal"))
            .unwrap_or(0),
        egm: None,
    };
    online.iter().map(node).collect()
}

fn gpus(tree: &Tree) -> Vec<Gpu> {
    let is_gpu = |function: &String| tree.class(function).is_some_and(tree::is_display);
    let id = |function: &str, file: &str| tree.number(&tree::pci(function, file)).unwrap_or(0);
    let gpu = |function: String| Gpu {
        id: format!("{:04x}:{:04x}", id(&function, "vendor"), id(&function, "device")),
        name: gpu_name(tree, &function),
        address: function,
    };
    tree.functions().into_iter().filter(is_gpu).map(gpu).collect()
}

/// The name that NVIDIA's driver has for a GPU.
pub(crate) fn gpu_name(tree: &Tree, function: &str) -> Option<String> {
    let text = tree.text(&format!("/proc/driver/nvidia/gpus/{function}/information"))?;
    sysfs::field(&text, "Model").map(str::to_owned)
}

/// The driver's own first line.
fn driver(tree: &Tree) -> Option<String> {
    let text = tree.text("/proc/driver/nvidia/version")?;
    let line = text.lines().next()?.trim();
    Some(line.strip_prefix("NVRM version:").unwrap_or(line).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::recorded;

    const GUEST: &str = "\
== /proc/cpuinfo
model name\t: Some CPU
flags\t\t: fpu hypervisor lahf_lm
== /proc/meminfo
MemTotal:        8192 kB
MemAvailable:    4096 kB
== /sys/class/dmi/id/sys_vendor
QEMU
== /sys/class/dmi/id/product_name
Standard PC
== /sys/devices/system/cpu/online
0-3
== /sys/devices/system/node/online
0-1
== /sys/devices/system/node/node0/cpulist
0-3
== /sys/devices/system/node/node1/cpulist

== /sys/devices/system/node/node1/meminfo
Node 1 MemTotal:   4096 kB
== /sys/bus/pci/devices/0000:01:00.0/class
0x030200
== /sys/bus/pci/devices/0000:01:00.0/vendor
0x10de
== /sys/bus/pci/devices/0000:01:00.0/device
0x2335
== /proc/driver/nvidia/gpus/0000:01:00.0/information
Model: \t\t NVIDIA H200
== /proc/driver/nvidia/version
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159
GCC version: 12
";

    #[test]
    fn a_guest_states_what_it_is() {
        let (_folder, tree) = recorded(GUEST);
        let machine = machine(&tree);
        assert_eq!(machine.hypervisor.as_deref(), Some("CPUID's hypervisor bit"));
        assert_eq!(
            (machine.product.as_deref(), machine.cpu.as_str()),
            (Some("QEMU Standard PC"), "Some CPU")
        );
        assert_eq!((machine.cpus, machine.memory), (4, 8192 << 10));
        assert_eq!(
            (machine.nodes.len(), machine.nodes[1].memory, &*machine.nodes[1].cpus),
            (2, 4096 << 10, "")
        );
        let gpu = &machine.gpus[0];
        assert_eq!((&*gpu.id, gpu.name.as_deref()), ("10de:2335", Some("NVIDIA H200")));
        assert_eq!(machine.driver.as_deref(), Some("NVIDIA UNIX Open Kernel Module for x86_64  580.159"));
    }

    #[test]
    fn a_machine_without_any_file_is_unknown_and_no_error() {
        let (_folder, tree) = recorded("");
        let machine = machine(&tree);
        assert_eq!((machine.cpu.as_str(), machine.hypervisor, machine.nodes.len()), ("unknown", None, 0));
    }
}
