//! QEMU's command line for the emulated Grace host, and its additional device tree properties. Pure.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::engine::error::LabError;
use crate::engine::logs;
use crate::hosts::extent::Extent;
use crate::hosts::qemu::{self, L1, boot, words};

/// Memory of each NUMA node, in MiB, one behind the other from [`RAM`] on. As on Grace nodes 0 and 1 are sockets, and 4 and 5 are
/// their EGM, which Linux does not get; here it does not get 2, 3, 6 and 7 either, which are the memory of the GPUs.
const NODES: [u64; 8] = [3 << 10, 1 << 10, 2 << 10, 2 << 10, 1 << 10, 1 << 10, 2 << 10, 2 << 10];
/// Start address of the machine's memory, in MiB.
const RAM: u64 = 1 << 10;
/// MiB that Linux gets: nodes 0 and 1.
const LINUX: u64 = NODES[0] + NODES[1];
/// MiB of a GPU's memory: with 1664, as was measured, nvgrace-gpu shows 512 MiB of it cacheable and the rest not.
const GPU_MEMORY: u64 = 1664;
/// MiB of it that are cacheable, its first.
const USEMEM: u64 = 512;

/// The GPUs that QEMU emulates: bochs-display. Its BAR 0 is memory, so the lab can write the ready state into it.
const QEMU_GPUS: [Gpu; 4] = [
    Gpu { slot: 3, bus: 0, cacheable: USEMEM, socket: 0, memory: 2, egm: 4 },
    Gpu { slot: 4, bus: 0, cacheable: USEMEM, socket: 1, memory: 3, egm: 5 },
    Gpu { slot: 5, bus: 0, cacheable: USEMEM, socket: 0, memory: 6, egm: 4 },
    Gpu { slot: 6, bus: 0, cacheable: USEMEM, socket: 1, memory: 7, egm: 5 },
];

/// The GPUs of vfio-user servers (`vfio/fixtures`), behind ports of their own as real ones are. They have
/// NVIDIA's capability that none of their memory needs to be uncached.
const VFIO_USER_GPUS: [Gpu; 2] = [
    Gpu { slot: 0x17, bus: 8, cacheable: GPU_MEMORY, socket: 0, memory: 2, egm: 4 },
    Gpu { slot: 0x18, bus: 9, cacheable: GPU_MEMORY, socket: 1, memory: 3, egm: 5 },
];

/// Blocks that firmware found to be bad. The first is in the middle, so that a slice of more than half of its
/// region has it.
const RETIRED: [Retired; 3] = [
    Retired { node: 4, offset: 0x2000_0000 },
    Retired { node: 4, offset: 0x100_0000 },
    Retired { node: 5, offset: 0x300_0000 },
];
/// Bytes of such a block.
pub(crate) const BLOCK: u64 = 64 << 10;
/// The root bus in the device tree.
const ROOT: &str = "/pcie@10000000";

/// A bad block, at an offset in the memory of a node.
struct Retired {
    node: usize,
    offset: u64,
}

struct Gpu {
    /// The slot at the root bus, of itself or of its port.
    slot: u64,
    /// The bus behind its port, which Linux numbers in the order of slots, or 0 where it has none.
    bus: u64,
    /// MiB of its memory that are cacheable, its first.
    cacheable: u64,
    socket: u64,
    /// The node of its memory, and that of its socket's EGM.
    memory: usize,
    egm: usize,
}

impl Gpu {
    fn address(&self) -> String {
        match self.bus {
            0 => format!("0000:00:{:02x}.0", self.slot),
            bus => format!("0000:{bus:02x}:00.0"),
        }
    }

    /// Its node in the device tree.
    fn node(&self) -> String {
        match self.bus {
            0 => format!("{ROOT}/gpu@{:x},0", self.slot),
            _ => format!("{}/gpu@0,0", self.port()),
        }
    }

    /// The node of its port.
    fn port(&self) -> String {
        format!("{ROOT}/pcie@{:x},0", self.slot)
    }

    /// `reg` of its port, if any, and of itself (IEEE 1275 PCI binding: bus and device).
    fn positions(&self) -> Vec<Property> {
        let reg =
            |node, bus, slot| Property { node, name: "reg", cells: vec![bus << 16 | slot << 11, 0, 0, 0, 0] };
        match self.bus {
            0 => vec![reg(self.node(), 0, self.slot)],
            bus => vec![reg(self.port(), 0, self.slot), reg(self.node(), bus, 0)],
        }
    }
}

/// The machine's GPUs and IOMMU. QEMU does not report an SMMUv3's mappings to functions of other processes ("requires
/// iommu MAP notifier"); it does report a virtio-iommu's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// QEMU's own GPUs, behind an SMMUv3.
    Qemu,
    /// GPUs of other processes, behind a virtio-iommu.
    VfioUser,
}

impl Profile {
    fn of(cards: &[PathBuf]) -> Self {
        if cards.is_empty() { Self::Qemu } else { Self::VfioUser }
    }

    fn gpus(self) -> &'static [Gpu] {
        match self {
            Self::Qemu => &QEMU_GPUS,
            Self::VfioUser => &VFIO_USER_GPUS,
        }
    }
}

/// A property of the device tree: the node, its name, and its cells.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Property {
    pub(super) node: String,
    pub(super) name: &'static str,
    /// 32-bit cells, big-endian in the tree.
    pub(super) cells: Vec<u64>,
}

/// The machine without its functions, for which QEMU makes the device tree.
pub(super) fn board(profile: Profile, share: &Path) -> Vec<OsString> {
    let mut args = words(
        "-nodefaults -nographic -no-reboot -nic none -serial stdio -accel tcg,thread=multi -cpu max \
         -smp 2,sockets=2,cores=1,threads=1",
    );
    args.extend(["-m".into(), format!("{}M", NODES.iter().sum::<u64>()).into()]);
    // Other processes map this memory, so it is in files.
    let (backend, iommu) = match profile {
        Profile::Qemu => ("memory-backend-ram", ""),
        Profile::VfioUser => ("memory-backend-memfd,share=on", "-device virtio-iommu-pci,addr=2.0"),
    };
    for (node, mib) in NODES.iter().enumerate() {
        let object = format!("{backend},id=ram{node},size={mib}M");
        let is_shared = profile == Profile::VfioUser && VFIO_USER_GPUS.iter().any(|gpu| gpu.egm == node);
        let object = if is_shared {
            let object = format!("memory-backend-file,share=on,id=ram{node},size={mib}M,mem-path=");
            qemu::option(&object, &share.join(egm_file(node)), "")
        } else {
            object.into()
        };
        args.extend(["-object".into(), object]);
        args.extend(words(&format!("-numa node,nodeid={node},memdev=ram{node}")));
    }
    args.extend(words("-numa cpu,node-id=0,socket-id=0 -numa cpu,node-id=1,socket-id=1"));
    args.extend(words(iommu));
    args
}

/// Name of the file that is the memory of EGM node `node`, for QEMU and for the GPUs that have an aperture on it.
fn egm_file(node: usize) -> String {
    format!("egm{node}.ram")
}

/// Makes these files in `share`: links to the returned memfds, because servers of DMA take memory files alone.
pub(crate) fn make_egm(share: &Path) -> Result<Vec<File>, LabError> {
    let make = |node: usize| {
        let path = share.join(egm_file(node));
        logs::remove(&path)?;
        let made = memfd_create("egm", MemfdFlags::CLOEXEC).map_err(io::Error::from).and_then(|file| {
            let file = File::from(file);
            file.set_len(NODES.get(node).copied().unwrap_or_default() << 20)?;
            symlink(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()), &path)?;
            Ok(file)
        });
        made.map_err(LabError::file("make", &path))
    };
    VFIO_USER_GPUS.iter().map(|gpu| make(gpu.egm)).collect()
}

/// The machine's kind, with `more` options.
pub(super) fn kind(profile: Profile, more: &str) -> [OsString; 2] {
    let iommu = match profile {
        Profile::Qemu => ",iommu=smmuv3",
        Profile::VfioUser => "",
    };
    ["-machine".into(), format!("virt,virtualization=on,gic-version=3{iommu}{more}").into()]
}

/// File in the share with the recorded traffic of the first network card (igb).
pub(crate) const WIRE: &str = "wire.pcap";

/// The emulated Grace host with the device tree `tree`. It has the GPUs of other processes when it is given their sockets.
pub(crate) fn l1(machine: &L1<'_>, tree: &Path) -> Vec<OsString> {
    let profile = Profile::of(machine.cards);
    let mut args = board(profile, machine.share);
    args.extend(kind(profile, ""));
    args.extend(["-dtb".into(), tree.into()]);
    args.extend(qemu::shared(machine));
    if machine.wire {
        let wire = qemu::option("filter-dump,id=wire,netdev=igb,file=", &machine.share.join(WIRE), "");
        args.extend(["-object".into(), wire]);
    }
    match profile {
        Profile::Qemu => {
            let display =
                |gpu: &Gpu| words(&format!("-device bochs-display,vgamem=16M,addr={:x}.0", gpu.slot));
            args.extend(QEMU_GPUS.iter().flat_map(display));
        }
        Profile::VfioUser => {
            args.extend(VFIO_USER_GPUS.iter().zip(machine.cards).flat_map(|(gpu, card)| plugged(gpu, card)))
        }
    }
    let retired = RETIRED.map(|Retired { node, offset }| format!("{node}:{offset:#x}")).join(",");
    let append = format!(
        "console=ttyAMA0 panic=-1 loglevel=4 mem={LINUX}M nvgrace_egm.retired={retired} {}",
        machine.words
    );
    args.extend(boot(machine.kernel, machine.initramfs, append.trim_end()));
    args
}

/// The function that is served at `socket` as `gpu`, behind its port.
fn plugged(gpu: &Gpu, socket: &Path) -> Vec<OsString> {
    let Gpu { slot, bus, .. } = gpu;
    let mut args = words(&format!(
        "-device pcie-root-port,id=gpu{bus},chassis=3{bus},x-speed=5,addr={slot:x}.0 -device"
    ));
    let socket = serde_json::json!({ "type": "unix", "path": socket });
    let card = serde_json::json!({ "driver": "vfio-user-pci", "bus": format!("gpu{bus}"), "socket": socket });
    args.push(card.to_string().into());
    args
}

/// The properties that Grace's firmware has in ACPI for each GPU; drivers read a device tree's the same way.
pub(super) fn properties(profile: Profile) -> Vec<Property> {
    profile.gpus().iter().flat_map(properties_of).collect()
}

fn properties_of(gpu: &Gpu) -> Vec<Property> {
    let (node, mut all) = (gpu.node(), gpu.positions());
    let property = |name, cells| Property { node: node.clone(), name, cells };
    let long = |name, value: u64| property(name, vec![value >> 32, value & 0xffff_ffff]);
    all.extend([
        property("numa-node-id", vec![gpu.socket]),
        long("nvidia,gpu-mem-base-pa", base(gpu.memory)),
        long("nvidia,gpu-mem-size", GPU_MEMORY << 20),
        long("nvidia,egm-pxm", gpu.egm as u64),
        long("nvidia,egm-base-pa", base(gpu.egm)),
        long("nvidia,egm-size", NODES.get(gpu.egm).copied().unwrap_or_default() << 20),
    ]);
    all
}

/// Start addresses of the retired blocks in `slice`, at its host physical address.
pub(crate) fn retired_in(slice: Option<Extent>) -> Vec<u64> {
    let all = RETIRED.iter().map(|block| base(block.node) + block.offset);
    all.filter(|block| slice.is_some_and(|slice| slice.contains(*block))).collect()
}

/// The parts of GPU `function`'s memory, at their host physical addresses: the cacheable part, and the rest, if any.
pub(crate) fn memory_of(function: &str) -> Option<Vec<Extent>> {
    let gpu = QEMU_GPUS.iter().chain(&VFIO_USER_GPUS).find(|gpu| function == gpu.address())?;
    let cacheable = Extent { start: base(gpu.memory), size: gpu.cacheable << 20 };
    let rest = Extent { start: cacheable.end(), size: (GPU_MEMORY << 20) - cacheable.size };
    Some([cacheable, rest].into_iter().filter(|part| part.size > 0).collect())
}

/// Start address of the memory of `node`.
fn base(node: usize) -> u64 {
    let below: u64 = NODES.iter().take(node).sum();
    (RAM + below) << 20
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::qemu::Clock;
    use crate::hosts::served::{Kind, PLUGGED_GRACE};
    use crate::scenarios::select;

    const BOTH: [Profile; 2] = [Profile::Qemu, Profile::VfioUser];

    #[test]
    fn memory_of_gpus_and_egm_is_hidden_from_linux_and_has_one_owner() {
        for gpus in BOTH.map(Profile::gpus) {
            let of = |node: usize, size: u64| Extent { start: base(node), size };
            let mut extents: Vec<_> = gpus
                .iter()
                .flat_map(|gpu| [of(gpu.memory, GPU_MEMORY << 20), of(gpu.egm, NODES[gpu.egm] << 20)])
                .collect();
            extents.sort_unstable();
            extents.dedup(); // a socket's GPUs share its EGM
            assert!(extents[0].start >= (RAM + LINUX) << 20);
            assert!(extents.windows(2).all(|pair| pair[0].end() <= pair[1].start), "{extents:x?}");
            let end = extents.last().unwrap().end();
            assert!(end <= (RAM + NODES.iter().sum::<u64>()) << 20);
        }
    }

    #[test]
    fn a_slice_of_more_than_half_of_the_first_region_has_a_retired_block_wherever_it_lies() {
        let (region, size) = (base(4), 528 << 20);
        for start in [region, region + (NODES[4] << 20) - size] {
            assert!(!retired_in(Some(Extent { start, size })).is_empty(), "{start:#x}");
        }
        assert_eq!(retired_in(None), [] as [u64; 0]);
    }

    #[test]
    fn a_scenario_has_the_size_of_the_memory_of_each_bar() {
        let words = |name: &str| select(&[name.into()], true).unwrap().remove(0).words;
        let of_qemu = memory_of("0000:00:03.0").unwrap();
        assert_eq!((of_qemu.len(), of_qemu[0].end()), (2, of_qemu[1].start));
        assert!(words("grace-gpu").contains(&format!("egm.arg.gpu.bar4={}", of_qemu[0].size)));
        assert!(words("grace-gpu").contains(&format!("egm.arg.gpu.bar2={}", of_qemu[1].size)));
        assert_eq!(of_qemu[1].end(), base(2) + (GPU_MEMORY << 20));
        let vfio_user = memory_of("0000:08:00.0").unwrap();
        assert_eq!(vfio_user, [Extent { start: base(2), size: GPU_MEMORY << 20 }]);
        assert!(words("grace-vfio-user-gpu").contains(&format!("egm.arg.gpu.bar4={}", vfio_user[0].size)));
        assert_eq!(memory_of("0000:00:07.0"), None);
    }

    /// The cells of property `name` of `node`.
    fn cells(profile: Profile, node: &str, name: &str) -> Vec<u64> {
        let all = properties(profile);
        all.iter().find(|p| p.node == node && p.name == name).unwrap().cells.clone()
    }

    #[test]
    fn a_gpu_is_described_as_the_drivers_read_it() {
        let find = |name| cells(Profile::Qemu, "/pcie@10000000/gpu@3,0", name);
        assert_eq!(find("reg"), [0x1800, 0, 0, 0, 0]);
        assert_eq!(find("nvidia,egm-pxm"), [0, 4]);
        assert_eq!(find("nvidia,egm-base-pa"), [2, 0x4000_0000]);
        assert_eq!(find("nvidia,gpu-mem-size"), [0, 0x6800_0000]);
        let port = cells(Profile::VfioUser, "/pcie@10000000/pcie@17,0", "reg");
        assert_eq!(port, [0xb800, 0, 0, 0, 0]);
        let find = |name| cells(Profile::VfioUser, "/pcie@10000000/pcie@17,0/gpu@0,0", name);
        assert_eq!((find("reg"), find("numa-node-id")), (vec![0x8_0000, 0, 0, 0, 0], vec![0]));
        assert_eq!(find("nvidia,gpu-mem-base-pa"), [1, 0x4000_0000]);
    }

    #[test]
    fn a_gpu_has_the_file_of_its_sockets_egm() {
        let cards = PLUGGED_GRACE.iter().map(|plugged| plugged.card.kind);
        for (kind, gpu) in cards.zip(&VFIO_USER_GPUS) {
            assert!(matches!(kind, Kind::Grace { egm } if egm == egm_file(gpu.egm)), "{kind:?}");
        }
    }

    #[test]
    fn gpus_of_other_processes_share_memory_and_see_what_the_iommu_maps() {
        let path = Path::new("/k");
        let drives = [path.to_owned(), path.to_owned()];
        let line = |cards: &[PathBuf]| {
            let machine = L1 {
                kernel: path,
                initramfs: path,
                share: path,
                drives: &drives,
                cards,
                wire: cards.is_empty(),
                clock: Clock::Real,
                words: "",
            };
            let args = l1(&machine, path);
            args.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
        };
        let of_qemu = line(&[]);
        assert!(of_qemu.contains("iommu=smmuv3") && of_qemu.contains("bochs-display,vgamem=16M,addr=6.0"));
        assert!(of_qemu.contains("-object filter-dump,id=wire,netdev=igb,file=/k/wire.pcap"));
        assert!(
            of_qemu.contains("hubport,id=igb,hubid=0 -device igb,netdev=igb,romfile=,mac=52:54:00:e9:00:02")
        );
        assert!(of_qemu.contains("-device e1000e,netdev=e1000e,romfile=,mac=52:54:00:e9:00:06"));
        assert!(!of_qemu.contains("memfd") && !of_qemu.contains("virtio-iommu"));
        let vfio_user = line(&["/a".into(), "/b".into()]);
        assert!(!vfio_user.contains("filter-dump"));
        assert!(!vfio_user.contains("smmuv3") && !vfio_user.contains("bochs"), "{vfio_user}");
        for part in [
            "-object memory-backend-memfd,share=on,id=ram7,size=2048M",
            "-object memory-backend-file,share=on,id=ram4,size=1024M,mem-path=/k/egm4.ram -numa node,nodeid=4,memdev=ram4",
            "-device virtio-iommu-pci,addr=2.0",
            "pcie-root-port,id=gpu9,chassis=39,x-speed=5,addr=18.0 -device {\"bus\":\"gpu9\",",
            "\"socket\":{\"path\":\"/b\",\"type\":\"unix\"}",
        ] {
            assert!(vfio_user.contains(part), "{part} is not in {vfio_user}");
        }
    }
}
