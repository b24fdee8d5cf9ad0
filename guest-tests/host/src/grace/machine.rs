//! QEMU's command line for the emulated Grace host, and what its device tree says beside. Pure.

use std::ffi::OsString;
use std::path::Path;

use crate::qemu::{self, L1, boot, words};

/// Memory of each NUMA node, in MiB, one behind the other from [`RAM`] on. As on Grace nodes 0 and 1 are sockets, and 4 and 5 are
/// their EGM, which Linux does not get; here it does not get 2, 3, 6 and 7 either, which are the memory of the GPUs.
const NODES: [u64; 8] = [3 << 10, 1 << 10, 2 << 10, 2 << 10, 1 << 10, 1 << 10, 2 << 10, 2 << 10];
/// Where the machine's memory begins, in MiB.
const RAM: u64 = 1 << 10;
/// MiB that Linux gets: nodes 0 and 1.
const LINUX: u64 = NODES[0] + NODES[1];
/// MiB of a GPU's memory: with 1664, as was measured, nvgrace-gpu shows 512 MiB of it cacheable and the rest not.
const GPU_MEMORY: u64 = 1664;
/// MiB of it that are cacheable, its first.
const USEMEM: u64 = 512;

/// The GPUs: the slot at the root bus, the socket, the node of its memory and that of its socket's EGM.
const GPUS: [Gpu; 4] = [
    Gpu { slot: 3, socket: 0, memory: 2, egm: 4 },
    Gpu { slot: 4, socket: 1, memory: 3, egm: 5 },
    Gpu { slot: 5, socket: 0, memory: 6, egm: 4 },
    Gpu { slot: 6, socket: 1, memory: 7, egm: 5 },
];

/// Blocks that firmware found to be bad: node and offset. The first is in the middle, so that a slice of more than half of its
/// region has it.
const RETIRED: [(usize, u64); 3] = [(4, 0x2000_0000), (4, 0x100_0000), (5, 0x300_0000)];
/// Bytes of such a block.
pub(super) const BLOCK: u64 = 64 << 10;

/// An emulated GPU: QEMU's bochs-display, whose BAR 0 is memory, so that it can be made to look ready.
struct Gpu {
    slot: u64,
    socket: u64,
    memory: usize,
    egm: usize,
}

/// A property of the device tree: the node, its name, and its cells.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Property {
    /// The node's path.
    pub(super) node: String,
    /// The property.
    pub(super) name: &'static str,
    /// 32-bit cells, big-endian in the tree.
    pub(super) cells: Vec<u64>,
}

/// The machine without its functions: what its device tree is made for. SMMUv3 translates for all functions.
pub(super) fn board() -> Vec<OsString> {
    let mut args = words(
        "-nodefaults -nographic -no-reboot -nic none -serial stdio -accel tcg,thread=multi -cpu max \
         -smp 2,sockets=2,cores=1,threads=1",
    );
    args.extend(["-m".into(), format!("{}M", NODES.iter().sum::<u64>()).into()]);
    for (node, mib) in NODES.iter().enumerate() {
        args.extend(words(&format!(
            "-object memory-backend-ram,id=ram{node},size={mib}M -numa node,nodeid={node},memdev=ram{node}"
        )));
    }
    args.extend(words("-numa cpu,node-id=0,socket-id=0 -numa cpu,node-id=1,socket-id=1"));
    args
}

/// The machine's kind, with `more` options.
pub(super) fn kind(more: &str) -> [OsString; 2] {
    ["-machine".into(), format!("virt,virtualization=on,gic-version=3,iommu=smmuv3{more}").into()]
}

/// The emulated Grace host with the device tree `tree`.
pub(crate) fn l1(machine: &L1<'_>, tree: &Path) -> Vec<OsString> {
    let mut args = board();
    args.extend(kind(""));
    args.extend(["-dtb".into(), tree.into()]);
    args.extend(qemu::shared(machine));
    for gpu in &GPUS {
        args.extend(words(&format!("-device bochs-display,vgamem=16M,addr={:x}.0", gpu.slot)));
    }
    let retired = RETIRED.map(|(node, offset)| format!("{node}:{offset:#x}")).join(",");
    let append = format!(
        "console=ttyAMA0 panic=-1 loglevel=4 mem={LINUX}M nvgrace_egm.retired={retired} {}",
        machine.words
    );
    args.extend(boot(machine.kernel, machine.initramfs, append.trim_end()));
    args
}

/// What Grace's firmware says of each GPU in ACPI; drivers read a device tree's the same way.
pub(super) fn properties() -> Vec<Property> {
    GPUS.iter().flat_map(properties_of).collect()
}

fn properties_of(gpu: &Gpu) -> Vec<Property> {
    let node = format!("/pcie@10000000/gpu@{:x},0", gpu.slot);
    let property = |name, cells| Property { node: node.clone(), name, cells };
    let long = |name, value: u64| property(name, vec![value >> 32, value & 0xffff_ffff]);
    vec![
        property("reg", vec![gpu.slot << 11, 0, 0, 0, 0]),
        property("numa-node-id", vec![gpu.socket]),
        long("nvidia,gpu-mem-base-pa", base(gpu.memory)),
        long("nvidia,gpu-mem-size", GPU_MEMORY << 20),
        long("nvidia,egm-pxm", gpu.egm as u64),
        long("nvidia,egm-base-pa", base(gpu.egm)),
        long("nvidia,egm-size", NODES.get(gpu.egm).copied().unwrap_or_default() << 20),
    ]
}

/// Where the retired blocks in `slice`, an address and bytes, begin.
pub(super) fn retired_in(slice: Option<(u64, u64)>) -> Vec<u64> {
    let (start, size) = slice.unwrap_or_default();
    let all = RETIRED.iter().map(|(node, offset)| base(*node) + offset);
    all.filter(|block| *block >= start && *block - start < size).collect()
}

/// Host physical address and bytes of the memory of GPU `function`: what is cacheable, and the rest.
pub(super) fn memory_of(function: &str) -> Option<[(u64, u64); 2]> {
    let gpu = GPUS.iter().find(|gpu| function == format!("0000:00:{:02x}.0", gpu.slot))?;
    let (start, cacheable) = (base(gpu.memory), USEMEM << 20);
    Some([(start, cacheable), (start + cacheable, (GPU_MEMORY - USEMEM) << 20)])
}

/// Where the memory of `node` begins.
fn base(node: usize) -> u64 {
    let below: u64 = NODES.iter().take(node).sum();
    (RAM + below) << 20
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::select;

    #[test]
    fn what_gpus_and_egm_have_is_hidden_from_linux_and_nobody_elses() {
        let mut spans: Vec<_> = GPUS
            .iter()
            .flat_map(|gpu| [(base(gpu.memory), GPU_MEMORY << 20), (base(gpu.egm), NODES[gpu.egm] << 20)])
            .collect();
        spans.sort_unstable();
        spans.dedup(); // a socket's GPUs share its EGM
        assert!(spans[0].0 >= (RAM + LINUX) << 20);
        assert!(spans.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{spans:x?}");
        let end = spans.last().map(|(base, size)| base + size).unwrap();
        assert!(end <= (RAM + NODES.iter().sum::<u64>()) << 20);
    }

    #[test]
    fn a_slice_of_more_than_half_of_the_first_region_has_a_retired_block_wherever_it_lies() {
        let (region, size) = (base(4), 528 << 20);
        for start in [region, region + (NODES[4] << 20) - size] {
            assert!(!retired_in(Some((start, size))).is_empty(), "{start:#x}");
        }
        assert_eq!(retired_in(None), [] as [u64; 0]);
    }

    #[test]
    fn a_guest_is_told_how_much_of_each_bar_is_memory() {
        let [cacheable, rest] = memory_of("0000:00:03.0").unwrap();
        let words = select(&["grace-gpu".into()], true).unwrap().remove(0).words;
        assert!(words.contains(&format!("egm.arg.gpu.bar4={}", cacheable.1)));
        assert!(words.contains(&format!("egm.arg.gpu.bar2={}", rest.1)));
        assert_eq!((rest.0, rest.0 + rest.1), (cacheable.0 + cacheable.1, base(2) + (GPU_MEMORY << 20)));
        assert_eq!(memory_of("0000:00:07.0"), None);
    }

    #[test]
    fn a_gpu_is_described_as_the_drivers_read_it() {
        let all = properties();
        let find = |name| {
            let property = all.iter().find(|p| p.node == "/pcie@10000000/gpu@3,0" && p.name == name);
            property.unwrap().cells.clone()
        };
        assert_eq!(find("reg"), [0x1800, 0, 0, 0, 0]);
        assert_eq!(find("nvidia,egm-pxm"), [0, 4]);
        assert_eq!(find("nvidia,egm-base-pa"), [2, 0x4000_0000]);
        assert_eq!(find("nvidia,gpu-mem-size"), [0, 0x6800_0000]);
    }
}
