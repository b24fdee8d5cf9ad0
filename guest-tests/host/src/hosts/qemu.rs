//! QEMU's command lines: the emulated host, and a reference machine to compare a guest with. Pure.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::hosts::capability::L1_MEMORY_MIB;
use crate::hosts::parts::{Part, Plan};

/// Memory of the reference machine without a plan.
const REFERENCE_MIB: u64 = 1024;

/// Keeps the emulated host's timers periodic: when the emulator loses a timer interrupt, the next one comes 4 ms later
/// instead of never. Also skips Linux's timer check: on a busy machine the emulator delivers the first ticks late, and
/// Linux with interrupt remapping panics ("timer doesn't work").
const PERIODIC: &str = "nohz=off highres=off no_timer_check";

/// Split of 8 of the emulated host's 9.25 GiB. `egm-device carve advise --hypervisor 5GiB --how memmap=1GiB,dax=1GiB,mem`
/// prints it: 1 GiB is reserved, 1 GiB persistent, 1 GiB hidden (named in `configs/host/lab-x86_64.json`). The next GiB
/// is reserved like EFI's "specific purpose" memory: a device-DAX region that can be split into devices. The last
/// 256 MiB are persistent memory for a DAX file system. With `iomem=relaxed` the lab can read memory that a driver
/// holds.
const SPLIT: &str = "mem=7G memmap=1G$7G memmap=1G!8G memmap=1G%10G+0xefffffff memmap=256M!11G \
                     dax_hmem.region_idle=1 iomem=relaxed";

/// Functions for guests, each in its own IOMMU group except the pair. edu is a DMA engine; ivshmem's BAR 2 is memory
/// that it can reach.
///
/// ```text
///  10.0 port ─ 01:00.0 nvme (egm0)          11.0 port ─ 02:00.0 igb
///  12.0 port ─ 03:00.0 switch ─ 04:00.0 port ─ 05:00.0 nvme (egm1)
///                             └ 04:01.0 port ─ 06:00.0 e1000e
///  13.0 port ─ 07:00.0 and 07:00.1, two e1000e in one group
///  14.0 edu      15.0 ivshmem      16.0 the host's own network card, at one hub with the others
/// ```
///
/// A hub holds packets back while no port receives them: the sink always receives, and has no IPv4 because it would
/// refuse connections to others. Ports have 5 GT/s: above that, Linux waits after a bus reset for a link state that
/// QEMU does not report, and logs a failure.
const FUNCTIONS: &str = "\
    -device pcie-root-port,id=port1,chassis=1,x-speed=5,addr=10.0 -device nvme,serial=egm0,drive=drive0,bus=port1 \
    -device pcie-root-port,id=port2,chassis=2,x-speed=5,addr=11.0 \
    -netdev hubport,id=igb,hubid=0 -device igb,netdev=igb,romfile=,mac=52:54:00:e9:00:02,bus=port2 \
    -device pcie-root-port,id=port3,chassis=3,x-speed=5,addr=12.0 -device x3130-upstream,id=switch,bus=port3 \
    -device xio3130-downstream,id=down1,chassis=4,slot=1,bus=switch,addr=0.0 \
    -device xio3130-downstream,id=down2,chassis=5,slot=2,bus=switch,addr=1.0 \
    -device nvme,serial=egm1,drive=drive1,bus=down1 \
    -netdev hubport,id=e1000e,hubid=0 -device e1000e,netdev=e1000e,romfile=,mac=52:54:00:e9:00:06,bus=down2 \
    -device pcie-root-port,id=port4,chassis=6,x-speed=5,addr=13.0 \
    -device e1000e,romfile=,mac=52:54:00:e9:00:07,bus=port4,addr=0.0,multifunction=on \
    -device e1000e,romfile=,mac=52:54:00:e9:00:08,bus=port4,addr=0.1 \
    -device edu,dma_mask=0xffffffffffffffff,addr=14.0 \
    -object memory-backend-ram,id=shm,size=16M,share=on -device ivshmem-plain,memdev=shm,addr=15.0 \
    -netdev user,id=sink,restrict=on,ipv4=off -netdev hubport,id=drain,hubid=0,netdev=sink \
    -netdev hubport,id=host,hubid=0 -device virtio-net-pci,netdev=host,romfile=,mac=52:54:00:e9:00:01,addr=16.0";

/// The switch for the lab's own cards, with bus numbers after the others, and a window for the BARs of two GPUs.
///
/// ```text
///  17.0 port ─ 08:00.0 switch ─ 09:00.0 port ─ 0a:00.0      09:01.0 port ─ 0b:00.0      …
/// ```
const SWITCH: &str = "\
    -machine memory-backend=ram -global q35-pcihost.pci-hole64-size=512G \
    -device pcie-root-port,id=port7,chassis=7,x-speed=5,addr=17.0 -device x3130-upstream,id=cards,bus=port7";

/// The time of an emulated host, which is a PC's or a Grace host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    Real,
    /// One nanosecond for each instruction (QEMU's `-icount`): independent of this machine's load, of the speed of
    /// emulation, and of caches.
    Instructions,
}

/// Boot files, share and devices of the emulated host.
#[derive(Debug)]
pub(crate) struct L1<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    /// The directory that it mounts as `/share`.
    pub(crate) share: &'a Path,
    /// The images of its two NVMe drives.
    pub(crate) drives: &'a [PathBuf; 2],
    /// The sockets of cards of the lab's own, the first at 0a:00.0.
    pub(crate) cards: &'a [PathBuf],
    /// Whether the traffic of a Grace host's first network card is recorded.
    pub(crate) wire: bool,
    /// Source of its time.
    pub(crate) clock: Clock,
    /// More words on its command line.
    pub(crate) words: &'a str,
}

/// The emulated host. It has AMD's virtualisation, because QEMU emulates that one, and Intel's IOMMU with remapping:
/// caching mode reports its mappings to devices outside of QEMU. It has one processor: with two, every second guest
/// read page tables as zero right after a VMRUN and ended in a triple fault (QEMU 10.0 and 11.1); with one, none did.
pub(crate) fn l1(machine: &L1<'_>) -> Vec<OsString> {
    let mut args = words(
        "-nodefaults -nographic -no-reboot -nic none -serial stdio -machine q35,kernel-irqchip=split \
         -accel tcg -cpu max,+svm -smp 1 -device intel-iommu,intremap=on,caching-mode=on",
    );
    let append = format!(
        "console=ttyS0 panic=-1 loglevel=4 intel_iommu=on iommu=pt {PERIODIC} {SPLIT} {}",
        machine.words
    );
    args.extend(["-m".into(), format!("{L1_MEMORY_MIB}").into()]);
    if machine.clock == Clock::Instructions {
        args.extend(words("-icount shift=0,sleep=off"));
    }
    args.extend(shared(machine));
    args.extend(cards(machine.cards));
    args.extend(boot(machine.kernel, machine.initramfs, append.trim_end()));
    args
}

/// Options of every emulated host: the share, and functions for guests.
pub(crate) fn shared(machine: &L1<'_>) -> Vec<OsString> {
    let share = option("local,mount_tag=lab,security_model=none,multidevs=remap,path=", machine.share, "");
    let mut args = vec!["-virtfs".into(), share];
    for (number, drive) in machine.drives.iter().enumerate() {
        let drive = option(&format!("if=none,id=drive{number},format=raw,file="), drive, "");
        args.extend(["-drive".into(), drive]);
    }
    args.extend(words(FUNCTIONS));
    args
}

/// The lab's own cards, each at a port of a second switch, and host memory in a file that their servers can map.
fn cards(sockets: &[PathBuf]) -> Vec<OsString> {
    if sockets.is_empty() {
        return Vec::new();
    }
    let mut args =
        words(&format!("{SWITCH} -object memory-backend-memfd,id=ram,size={L1_MEMORY_MIB}M,share=on"));
    for (number, socket) in sockets.iter().enumerate() {
        let port = format!(
            "xio3130-downstream,id=card{number},chassis=2{number},slot={number},bus=cards,addr={number}.0"
        );
        let socket = serde_json::json!({ "type": "unix", "path": socket });
        let card = serde_json::json!({ "driver": "vfio-user-pci", "bus": format!("card{number}"), "socket": socket });
        args.extend(["-device".into(), port.into(), "-device".into(), card.to_string().into()]);
    }
    args
}

/// A machine like the plan's in processors, memory size and devices, for telling a guest's fault from the VMM's.
pub(crate) fn reference(
    plan: Option<&Plan>,
    kernel: &Path,
    initramfs: &Path,
    cmdline: &str,
) -> Vec<OsString> {
    let mut args = words(
        "-nodefaults -nographic -no-reboot -nic none -serial stdio -machine q35 -accel tcg,thread=multi -cpu max \
         -device pvpanic-pci -device virtio-rng-pci",
    );
    let vcpus = plan.map_or(2, |plan| plan.vcpus.len());
    let mib = plan.map_or(REFERENCE_MIB, |plan| plan.nodes.iter().map(|node| node.memory).sum::<u64>() >> 20);
    args.extend(words(&format!("-smp {vcpus} -m {mib}")));
    for (i, part) in plan.iter().flat_map(|plan| plan.parts()).enumerate() {
        match part {
            Part::VirtioBlk { path } => args.extend([
                "-drive".into(),
                option(&format!("if=none,id=d{i},format=raw,file="), path, ""),
                "-device".into(),
                format!("virtio-blk-pci,drive=d{i}").into(),
            ]),
            Part::VirtioNet { tap } => args.extend(words(&format!(
                "-netdev tap,id=n{i},ifname={tap},script=no,downscript=no -device virtio-net-pci,netdev=n{i}"
            ))),
            // QEMU has the kernel's form only, which the host may lack.
            Part::VirtioVsock { .. } | Part::Other => {}
        }
    }
    args.extend(boot(kernel, initramfs, cmdline));
    args
}

/// Kernel, initial root and kernel command line.
pub(crate) fn boot(kernel: &Path, initramfs: &Path, append: &str) -> [OsString; 6] {
    ["-kernel".into(), kernel.into(), "-initrd".into(), initramfs.into(), "-append".into(), append.into()]
}

/// Words of an option each.
pub(crate) fn words(text: &str) -> Vec<OsString> {
    text.split_whitespace().map(Into::into).collect()
}

/// An option with a path in it; QEMU requires a doubled comma.
pub(crate) fn option(before: &str, path: &Path, after: &str) -> OsString {
    format!("{before}{}{after}", path.to_string_lossy().replace(',', ",,")).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(args: &[OsString]) -> String {
        args.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_emulated_host_has_kvm_an_iommu_drives_and_the_share() {
        let path = Path::new("/a,b/x");
        let drives = ["/a,b/x".into(), "/a,b/y".into()];
        let machine = |clock| L1 {
            kernel: path,
            initramfs: path,
            share: path,
            drives: &drives,
            cards: &[],
            wire: false,
            clock,
            words: "quiet",
        };
        let line = joined(&l1(&machine(Clock::Real)));
        assert!(!line.contains("-icount"), "{line}");
        assert!(joined(&l1(&machine(Clock::Instructions))).contains(" -icount "));
        for part in
            ["+svm", "kernel-irqchip=split", "intel-iommu,intremap=on", "path=/a,,b/x", "file=/a,,b/y"]
        {
            assert!(line.contains(part), "{part}");
        }
        assert!(line.ends_with(&format!(" {PERIODIC} {SPLIT} quiet")), "{line}");
    }

    #[test]
    fn the_reference_machine_is_as_large_as_the_plan() {
        let json = br#"{"vcpus":[{},{},{}],"nodes":[{"id":0,"memory":536870912,"egm":false}],"pci":[]}"#;
        let plan = Plan::read(json).unwrap();
        let line = joined(&reference(Some(&plan), Path::new("k"), Path::new("i"), "c d"));
        assert!(line.contains("-smp 3 -m 512") && line.ends_with("-append c d"), "{line}");
    }
}
