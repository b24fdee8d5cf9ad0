//! Guest physical addresses of an x86_64 guest.
//!
//! ```text
//!  0x0000_0000 ┌──────────────────────────────┐
//!              │ RAM                          │ 640 KiB, for real-mode start-up of other processors
//!  0x000a_0000 ├──────────────────────────────┤
//!              │ legacy hole                  │ not mapped
//!  0x000c_0000 ├──────────────────────────────┤
//!              │ option ROMs                  │ mapped and empty: kernels search it, and each look would leave the guest
//!  0x000e_0000 ├──────────────────────────────┤
//!              │ firmware: RSDP, ACPI tables  │ 128 KiB, mapped, reserved in the memory map; RSDP is searched here
//!  0x0010_0000 ├──────────────────────────────┤
//!              │ RAM                          │ up to 3 GiB
//!  0xc000_0000 ├──────────────────────────────┤
//!              │ 32-bit PCI window            │ 512 MiB
//!  0xe000_0000 ├──────────────────────────────┤
//!              │ PCI configuration (ECAM)     │ up to 256 MiB, 1 MiB a bus
//!  0xf000_0000 ├──────────────────────────────┤
//!              │ 0xfec0_0000 I/O APIC         │ 4 KiB
//!              │ 0xfee0_0000 local APIC, MSI  │ 1 MiB
//!              │ 0xfffb_c000 KVM's own pages  │ 16 KiB
//! 0x1_0000_0000├──────────────────────────────┤
//!              │ RAM                          │ the rest, in node order
//!              ├──────────────────────────────┤
//!              │ EGM slices                   │ linear, aligned to 1 GiB (2 MiB when smaller than 1 GiB)
//!              ├──────────────────────────────┤
//!              │ 64-bit PCI window            │ naturally aligned; at least 64 GiB where the address bits allow
//!              └──────────────────────────────┘ 1 << address bits
//! ```
//!
//! RAM below 3 GiB and RAM above 4 GiB differ by exactly 1 GiB from their offset in the memory behind them, so a
//! 1 GiB page of the host stays one in the guest.

use egm_address::{Guest, Span};

use crate::arch::{FixedWindow, Layout, fixed};
use crate::config::Cpus;
use crate::plan::{IntxLines, POWER_BUTTON, WindowKind};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// End of a PC's conventional memory.
const LOW_RAM_END: u64 = 640 * KIB;
/// ACPI 6.5, 5.2.5.1: the RSDP is found in `0xe0000..0x100000` on a 16-byte boundary.
const FIRMWARE_START: u64 = MIB - 128 * KIB;
/// 128 KiB that a kernel searches for programs and tables (Linux: for an iBFT in steps of 16 bytes).
const ROM_START: u64 = FIRMWARE_START - 128 * KIB;
const PCI32_START: u64 = 3 * GIB;
const PCI32_END: u64 = PCI32_START + 512 * MIB;
/// 1 MiB a bus (PCI Express Base 7.2.2).
const ECAM_END: u64 = PCI32_END + 256 * MIB;
const IO_APIC: u64 = 0xfec0_0000;
/// Also where message-signalled interrupts are written to: nothing else may live in this mebibyte.
const LOCAL_APIC: u64 = 0xfee0_0000;
/// One page for the identity map that KVM needs without unrestricted guest support; KVM puts it here by default
/// (`KVM_SET_IDENTITY_MAP_ADDR`). Three more follow: [`KVM_TSS`].
const KVM_PAGES: u64 = 0xfffb_c000;
/// Where RAM starts again.
const HIGH_RAM: u64 = 4 * GIB;
/// Most address bits that the architecture defines (Intel SDM 3A, 4.1.4).
const END: u64 = 1 << 52;

/// Three pages for the task state segment that KVM needs on Intel hosts (`KVM_SET_TSS_ADDR`); the plan keeps them free.
pub const KVM_TSS: u64 = KVM_PAGES + 4 * KIB;

const FIRMWARE: Span<Guest> = fixed(FIRMWARE_START, MIB);

/// Address space, interrupt lines and I/O ports of an x86_64 guest.
pub const LAYOUT: Layout = Layout {
    name: "x86_64",
    ram: &[fixed(0, PCI32_START), fixed(HIGH_RAM, END)],
    ram_hole: fixed(LOW_RAM_END, MIB),
    firmware: FIRMWARE,
    page: 4 * KIB,
    most_regions: usize::MAX,
    min_memory: 2 * MIB,
    pci32: fixed(PCI32_START, PCI32_END),
    ecam: Some(fixed(PCI32_END, ECAM_END)),
    fixed: &[
        FixedWindow { kind: WindowKind::Reserved, label: "legacy hole", span: fixed(LOW_RAM_END, ROM_START) },
        FixedWindow {
            kind: WindowKind::OptionRoms,
            label: "option ROMs",
            span: fixed(ROM_START, FIRMWARE_START),
        },
        FixedWindow {
            kind: WindowKind::Interrupts,
            label: "I/O APIC",
            span: fixed(IO_APIC, IO_APIC + 4 * KIB),
        },
        FixedWindow {
            kind: WindowKind::Interrupts,
            label: "local APIC, MSI",
            span: fixed(LOCAL_APIC, LOCAL_APIC + MIB),
        },
        FixedWindow {
            kind: WindowKind::Reserved,
            label: "KVM identity map, TSS",
            span: fixed(KVM_PAGES, KVM_TSS + 12 * KIB),
        },
    ],
    lines: &[("serial", 4), (POWER_BUTTON, 5)],
    intx: Some(IntxLines { first: 16, count: 8 }),
    ports: &[("serial", 0x3f8, 8), ("pvpanic", 0x505, 1), ("sleep", 0x600, 2), ("reset", 0x604, 1)],
    hardware_id: x2apic_id,
    // 255 is the broadcast id of an I/O APIC entry, and more needs interrupt remapping in the guest.
    max_hardware_id: 254,
};

/// Socket, core and thread in bit fields just wide enough, as CPUID leaf 0xb describes them (Intel SDM 3A, 10.9.1).
fn x2apic_id(cpus: &Cpus, index: u32) -> u32 {
    let width = |count: u32| count.max(1).next_power_of_two().trailing_zeros();
    let (thread, rest) = (index % cpus.threads.max(1), index / cpus.threads.max(1));
    let (core, socket) = (rest % cpus.cores.max(1), rest / cpus.cores.max(1));
    let core_shift = width(cpus.threads);
    let socket_shift = core_shift.saturating_add(width(cpus.cores));
    thread | core << core_shift | socket << socket_shift
}
