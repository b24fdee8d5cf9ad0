//! Facts of a host's memory, as a value: a split is planned from it, on this machine or on another.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use egm_address::{ByteSize, CpuSet, Host, Hpa, Span, SpanSet};
use serde::{Deserialize, Serialize};

use crate::huge_page::HugePage;
use crate::region::iomem::{self, Resource};
use crate::region::read::{bytes, names, number, text};
use crate::region::srat::{self, Affinity};
use crate::sys;

/// A host's memory, as the kernel and the firmware report it. Facts that they do not report are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct HostFacts {
    /// Instruction set: `x86_64`, `aarch64`.
    pub arch: String,
    /// Product name of the machine.
    pub product: String,
    /// The kernel's command line.
    pub command_line: String,
    /// `/proc/iomem`; empty for a reader without privilege.
    pub iomem: Vec<Resource>,
    /// RAM according to the firmware, hidden memory included.
    pub firmware: Vec<Span<Host>>,
    /// Nodes of memory ranges.
    pub affinity: Vec<Affinity>,
    /// The kernel's nodes, by number.
    pub nodes: Vec<Node>,
    /// Whether its KVM has guest memory that the host can map (`KVM_CAP_GUEST_MEMFD_FLAGS`).
    pub guest_memfd: bool,
}

/// Addresses of a host's memory, as a record has them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryMap {
    /// `/proc/iomem`; empty for a reader without privilege.
    pub iomem: Vec<Resource>,
    /// RAM according to the firmware, hidden memory included.
    pub firmware: Vec<Span<Host>>,
    /// Nodes of memory ranges.
    pub affinity: Vec<Affinity>,
}

/// A node of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// The kernel's number of the node.
    pub id: u32,
    /// Processors of the node; empty for memory alone.
    pub cpus: CpuSet,
    /// Memory that the kernel manages: `MemTotal`.
    pub total: ByteSize,
    /// Its hugetlb pools, empty ones included.
    pub pools: Vec<Pool>,
}

/// A pool of hugetlb pages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Bytes in a page.
    pub page_size: ByteSize,
    /// Number of pages, used ones included.
    pub total: u64,
    /// Number of unused pages.
    pub free: u64,
}

impl HostFacts {
    /// The host with its `/proc` and `/sys` below `root`.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let string = |path: &str| text(&root.join(path)).unwrap_or_default();
        Self {
            arch: text(&root.join("proc/sys/kernel/arch"))
                .unwrap_or_else(|_| std::env::consts::ARCH.to_owned()),
            product: string("sys/class/dmi/id/product_name"),
            command_line: string("proc/cmdline"),
            iomem: iomem::parse(&string("proc/iomem")),
            firmware: firmware(root),
            affinity: srat::parse(&bytes(&root.join("sys/firmware/acpi/tables/SRAT")).unwrap_or_default()),
            nodes: nodes(root),
            guest_memfd: guest_memfd(&root.join("dev/kvm")).unwrap_or(false),
        }
    }

    /// Memory that the kernel manages, in all nodes.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.nodes.iter().fold(0, |sum, node| sum.saturating_add(node.total.get()))
    }

    /// Addresses of the memory that the kernel manages.
    #[must_use]
    pub(crate) fn system_ram(&self) -> SpanSet<Host> {
        self.iomem.iter().filter(|line| line.is_system_ram()).map(|line| line.span).collect()
    }

    /// The node that all of `span` lies at, where that is known. On a host of one node it is always that node.
    #[must_use]
    pub fn node_of(&self, span: Span<Host>) -> Option<u32> {
        match self.nodes.as_slice() {
            [only] => Some(only.id),
            _ => self.affinity.iter().find(|a| a.span.covers(span)).map(|a| a.node),
        }
    }
}

/// An error without KVM, or for a process that cannot open it.
fn guest_memfd(kvm: &Path) -> io::Result<bool> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let kvm = OpenOptions::new().read(true).custom_flags(flags).open(kvm)?;
    Ok(sys::can_map_guest_memfd(sys::guest_memfd_flags(kvm.as_fd())?))
}

/// RAM according to the firmware: on x86 from `/sys/firmware/memmap`, with a device tree from its memory nodes.
fn firmware(root: &Path) -> Vec<Span<Host>> {
    let folder = root.join("sys/firmware/memmap");
    let entry = |name: &String| {
        let folder = folder.join(name);
        let end = number(&folder.join("end"))?.checked_add(1)?;
        let span = Span::between(Hpa::new(number(&folder.join("start"))?), Hpa::new(end));
        span.filter(|_| text(&folder.join("type")).is_ok_and(|kind| kind == "System RAM"))
    };
    let map: SpanSet<Host> = names(&folder).iter().filter_map(entry).collect();
    if map.is_empty() { device_tree(root).iter().collect() } else { map.iter().collect() }
}

/// Memory nodes of a device tree with 64-bit addresses and sizes, the only form that supported machines use.
fn device_tree(root: &Path) -> SpanSet<Host> {
    let folder = root.join("sys/firmware/devicetree/base");
    let two = |name: &str| bytes(&folder.join(name)).is_ok_and(|cells| cells == [0, 0, 0, 2]);
    if !two("#address-cells") || !two("#size-cells") {
        return SpanSet::default();
    }
    let nodes = names(&folder).into_iter().filter(|name| name.starts_with("memory"));
    let banks = nodes.flat_map(|name| bytes(&folder.join(name).join("reg")).unwrap_or_default());
    let banks: Vec<u8> = banks.collect();
    let (words, _) = banks.as_chunks::<8>();
    let (pairs, _) = words.as_chunks::<2>();
    let span = |[start, size]: &[[u8; 8]; 2]| {
        Span::new(Hpa::new(u64::from_be_bytes(*start)), u64::from_be_bytes(*size)).ok()
    };
    pairs.iter().filter_map(span).collect()
}

/// `/proc/meminfo` of the host below `root`; empty where it cannot be read.
pub(crate) fn meminfo(root: &Path) -> String {
    text(&root.join("proc/meminfo")).unwrap_or_default()
}

/// Every node that is online; a kernel without NUMA has one, node 0, with everything.
fn nodes(root: &Path) -> Vec<Node> {
    let folder = root.join("sys/devices/system/node");
    let Some(online) = set(&folder.join("online")) else {
        let one = Node {
            id: 0,
            cpus: set(&root.join("sys/devices/system/cpu/online")).unwrap_or_default(),
            total: total(&root.join("proc/meminfo")),
            pools: pools(&root.join("sys/kernel/mm/hugepages")),
        };
        return vec![one];
    };
    let node = |id| {
        let folder = folder.join(format!("node{id}"));
        Node {
            id,
            cpus: set(&folder.join("cpulist")).unwrap_or_default(),
            total: total(&folder.join("meminfo")),
            pools: pools(&folder.join("hugepages")),
        }
    };
    online.iter().map(node).collect()
}

/// The processors of this host's node `id`, where the kernel names any.
pub(crate) fn near_node(id: u32) -> Option<CpuSet> {
    let path = format!("/sys/devices/system/node/node{id}/cpulist");
    set(Path::new(&path)).filter(|processors| !processors.is_empty())
}

fn set(path: &Path) -> Option<CpuSet> {
    text(path).ok()?.parse().ok()
}

/// `MemTotal:  24684096 kB`, in a node's file after `Node 0 `; 0 when there is none.
fn total(path: &Path) -> ByteSize {
    let text = text(path).unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "MemTotal:").skip(1);
        words.next()?.parse::<u64>().ok()?.checked_mul(1024)
    });
    ByteSize::new(lines.next().unwrap_or(0))
}

/// The host's pools of huge pages, smaller pages first.
fn pools(folder: &Path) -> Vec<Pool> {
    let pool = |page: u64| {
        let folder = folder.join(format!("hugepages-{}kB", page >> 10));
        let total = number(&folder.join("nr_hugepages"))?;
        let free = number(&folder.join("free_hugepages")).unwrap_or(0).min(total);
        Some(Pool { page_size: ByteSize::new(page), total, free })
    };
    HugePage::ALL.into_iter().filter_map(|page| pool(page.bytes())).collect()
}
