//! Guest physical addresses of an aarch64 guest.
//!
//! ```text
//!  0x0800_0000 ┌──────────────────────────────┐
//!              │ GIC distributor              │ 64 KiB
//!  0x0808_0000 │ GIC translation (ITS)        │ 128 KiB
//!  0x0810_0000 │ GIC redistributors           │ 128 KiB a vCPU, 256 of them
//!  0x0b00_0000 │ PL011 serial port            │ 4 KiB
//!  0x0b01_0000 │ PL031 clock                  │ 4 KiB
//!  0x0b02_0000 │ pvpanic                      │ 4 KiB, of which the first byte counts
//!  0x1000_0000 ├──────────────────────────────┤
//!              │ 32-bit PCI window            │ 768 MiB
//!  0x4000_0000 ├──────────────────────────────┤
//!              │ firmware: EFI, ACPI, SMBIOS  │ 2 MiB, mapped, reserved
//!  0x401c_0000 │ device tree                  │ its last 256 KiB
//!  0x4020_0000 ├──────────────────────────────┤
//!              │ RAM                          │ in node order
//!              ├──────────────────────────────┤
//!              │ EGM slices                   │ linear, aligned to 1 GiB (2 MiB when smaller than 1 GiB)
//!              ├──────────────────────────────┤
//!              │ PCI configuration (ECAM)     │ 256 MiB: 256 buses
//!              ├──────────────────────────────┤
//!              │ 64-bit PCI window            │ naturally aligned; at least 64 GiB where the address bits allow
//!              └──────────────────────────────┘ 1 << address bits
//! ```
//!
//! Interrupt numbers are those of the GIC (INTID), which ACPI calls global system interrupts: private ones below 32, a
//! message's from 8192, and 32 shared ones between. Power off and reset are PSCI calls, so that there are no registers for
//! them.

use egm_address::{Guest, Span};

use crate::arch::{FixedWindow, Layout, fixed};
use crate::config::Cpus;
use crate::plan::{ERRORS, IntxLines, POWER_BUTTON, WindowKind};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Where the GIC's distributor is.
pub const DISTRIBUTOR: u64 = 128 * MIB;
/// Where its translation service is.
pub const ITS: u64 = DISTRIBUTOR + 512 * KIB;
/// Where its redistributors are.
pub const REDISTRIBUTORS: u64 = DISTRIBUTOR + MIB;
const REDISTRIBUTORS_END: u64 = REDISTRIBUTORS + 256 * REDISTRIBUTOR;
const SERIAL: u64 = 176 * MIB;
const CLOCK: u64 = SERIAL + 64 * KIB;
const PVPANIC: u64 = CLOCK + 64 * KIB;
const PCI32_START: u64 = 256 * MIB;
const RAM: u64 = GIB;
/// Kernels want to start on a 2 MiB boundary (Documentation/arch/arm64/booting.rst), and every table in 64 KiB units.
const FIRMWARE_END: u64 = RAM + 2 * MIB;
/// Most intermediate physical address bits that the architecture defines.
const END: u64 = 1 << 52;

/// Where the device tree is, at the end of the firmware window: on an 8-byte boundary, and in one piece of 2 MiB.
pub const TREE: Span<Guest> = fixed(FIRMWARE_END - 256 * KIB, FIRMWARE_END);
/// Two frames of 64 KiB for each vCPU (GICv3 12.10), in their order, from the start of the redistributors' window.
pub const REDISTRIBUTOR: u64 = 128 * KIB;
/// Private interrupt of the virtual timer, KVM's default.
pub const VIRTUAL_TIMER: u32 = 27;
/// Private interrupt of the (non-secure) physical timer, KVM's default.
pub const PHYSICAL_TIMER: u32 = 30;
/// Private interrupts that the architecture recommends for timers that a guest here has not (SBSA 3.8): secure, hypervisor.
pub const OTHER_TIMERS: [u32; 2] = [29, 26];
/// Private interrupt of the performance counters, where the vCPUs have them.
pub const PERFORMANCE: u32 = 23;
/// Number of the first shared interrupt.
pub const FIRST_SHARED: u32 = 32;
/// Shared interrupts: as few as a GIC can have.
pub const SHARED_INTERRUPTS: u32 = 32;

/// Pieces of memory: Linux keeps 1024 before it can allocate (`INIT_MEMBLOCK_MEMORY_REGIONS`), some of them for itself.
pub const MOST_REGIONS: usize = 900;

/// Address space and interrupt lines of an aarch64 guest.
pub const LAYOUT: Layout = Layout {
    name: "aarch64",
    ram: &[fixed(RAM, END)],
    ram_hole: fixed(RAM, FIRMWARE_END),
    firmware: fixed(RAM, FIRMWARE_END),
    page: 64 * KIB,
    most_regions: MOST_REGIONS,
    min_memory: 4 * MIB,
    pci32: fixed(PCI32_START, RAM),
    ecam: None,
    fixed: &[
        FixedWindow {
            kind: WindowKind::Interrupts,
            label: "GIC distributor",
            span: fixed(DISTRIBUTOR, DISTRIBUTOR + 64 * KIB),
        },
        FixedWindow { kind: WindowKind::Interrupts, label: "GIC ITS", span: fixed(ITS, ITS + 128 * KIB) },
        FixedWindow {
            kind: WindowKind::Interrupts,
            label: "GIC redistributors",
            span: fixed(REDISTRIBUTORS, REDISTRIBUTORS_END),
        },
        FixedWindow { kind: WindowKind::Device, label: "serial", span: fixed(SERIAL, SERIAL + 4 * KIB) },
        FixedWindow { kind: WindowKind::Device, label: "clock", span: fixed(CLOCK, CLOCK + 4 * KIB) },
        FixedWindow { kind: WindowKind::Device, label: "pvpanic", span: fixed(PVPANIC, PVPANIC + 4 * KIB) },
    ],
    lines: &[("serial", 33), (ERRORS, 34), (POWER_BUTTON, 35)],
    intx: Some(IntxLines { first: 40, count: 8 }),
    ports: &[],
    hardware_id: mpidr,
    max_hardware_id: u32::MAX,
};

/// Affinity 0 to 2 as KVM gives them: a software-generated interrupt reaches 16 vCPUs of one affinity 0 group.
fn mpidr(_cpus: &Cpus, index: u32) -> u32 {
    index & 0xf | (index >> 4 & 0xff) << 8 | (index >> 12 & 0xff) << 16
}
