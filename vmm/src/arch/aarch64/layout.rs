//! Guest physical addresses of an aarch64 guest.
//!
//! ```text
//!  0x0800_0000 ┌──────────────────────────────┐
//!              │ GIC distributor              │ 64 KiB
//!  0x0808_0000 │ GIC translation (ITS)        │ 128 KiB
//!  0x0810_0000 │ GIC redistributors           │ 128 KiB a vCPU, 256 of them
//!  0x0b00_0000 │ PL011 serial port            │ 4 KiB
//!  0x1000_0000 ├──────────────────────────────┤
//!              │ 32-bit PCI window            │ 768 MiB
//!  0x4000_0000 ├──────────────────────────────┤
//!              │ firmware: stub device tree,  │ 2 MiB, mapped, reserved
//!              │ EFI, ACPI, SMBIOS tables     │
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

use crate::arch::{FixedWindow, Layout, fixed};
use crate::config::Cpus;
use crate::plan::WindowKind;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const DISTRIBUTOR: u64 = 128 * MIB;
const ITS: u64 = DISTRIBUTOR + 512 * KIB;
const REDISTRIBUTORS: u64 = DISTRIBUTOR + MIB;
/// Two 64 KiB frames for each vCPU (GICv3 12.10).
const REDISTRIBUTORS_END: u64 = REDISTRIBUTORS + 256 * 128 * KIB;
const SERIAL: u64 = 176 * MIB;
const PCI32_START: u64 = 256 * MIB;
const RAM: u64 = GIB;
/// Kernels want to start on a 2 MiB boundary (Documentation/arch/arm64/booting.rst), and every table in 64 KiB units.
const FIRMWARE_END: u64 = RAM + 2 * MIB;
/// Most intermediate physical address bits that the architecture defines.
const END: u64 = 1 << 52;

/// The layout.
pub const LAYOUT: Layout = Layout {
    name: "aarch64",
    ram: &[fixed(RAM, END)],
    ram_hole: fixed(RAM, FIRMWARE_END),
    firmware: fixed(RAM, FIRMWARE_END),
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
    ],
    lines: &[("serial", 33)], // SPI 1; ACPI's global system interrupts are GIC interrupt ids
    intx: None,               // no machine of this architecture runs yet
    ports: &[],
    hardware_id: mpidr,
    max_hardware_id: u32::MAX,
};

/// Affinity 0 to 2 as KVM gives them: a software-generated interrupt reaches 16 vCPUs of one affinity 0 group.
fn mpidr(_cpus: &Cpus, index: u32) -> u32 {
    index & 0xf | (index >> 4 & 0xff) << 8 | (index >> 12 & 0xff) << 16
}
