//! Everything that differs between guest architectures.
//!
//! Layouts are data, so both are always compiled: a plan for either architecture can be made on any machine. The code
//! that drives KVM is the host's, [`native`]. Its modules have the same names and functions on both architectures:
//!
//! | module | content |
//! |---|---|
//! | `boot` | loads the kernel and its boot data into guest memory |
//! | `vm` | the kernel's VM |
//! | `vcpu` | vCPUs and interrupt controllers; registers at the first instruction |
//! | `reset` | state of vCPUs and interrupt controllers before the first instruction |
//! | `state` | state of vCPUs and interrupt controllers that KVM keeps, for a file |
//! | `interrupts` | numbers of lines and messages |
//! | `machine_check` | reports of bad memory to a vCPU |
//! | `system_call` | arguments of a system call, from a thread's registers |

pub mod aarch64;
pub mod boot;
pub mod x86_64;

use egm_address::{Gpa, Guest, Span};

#[cfg(target_arch = "aarch64")]
pub use self::aarch64 as native;
#[cfg(target_arch = "x86_64")]
pub use self::x86_64 as native;
use crate::config::{Architecture, Cpus};
use crate::plan::{IntxLines, WindowKind};

/// The part of a guest's address space, interrupt lines and I/O ports that its architecture fixes.
#[derive(Debug)]
pub struct Layout {
    /// As users write it: `x86_64`.
    pub name: &'static str,
    /// Where RAM may go, ascending; the last one ends where the guest's address bits do.
    pub ram: &'static [Span<Guest>],
    /// The part of the first `ram` that is no RAM although memory is allocated for it: keeping it makes a page's
    /// offset in that memory congruent to its guest address, so that huge pages stay huge in the guest.
    pub ram_hole: Span<Guest>,
    /// The part of `ram_hole` that is mapped all the same: tables that the VMM writes for the guest.
    pub firmware: Span<Guest>,
    /// Largest base page of a guest: memory, and holes in it, begin and end at multiples of it.
    pub page: u64,
    /// Most pieces of memory that a guest's kernel keeps.
    pub most_regions: usize,
    /// Least size of the first node that has memory, in bytes.
    pub min_memory: u64,
    /// 32-bit PCI memory window.
    pub pci32: Span<Guest>,
    /// PCI configuration space; `None` puts it above RAM.
    pub ecam: Option<Span<Guest>>,
    /// Everything else at a fixed place.
    pub fixed: &'static [FixedWindow],
    /// Interrupt lines: owner and global system interrupt.
    pub lines: &'static [(&'static str, u32)],
    /// Lines for the pins of PCI functions; without, functions have none.
    pub intx: Option<IntxLines>,
    /// I/O ports: owner, first port, number of ports.
    pub ports: &'static [(&'static str, u16, u16)],
    /// Identity of a vCPU, by index, as the interrupt controller knows it.
    pub hardware_id: fn(&Cpus, u32) -> u32,
    /// Hardware ids above this cannot be reached by interrupts.
    pub max_hardware_id: u32,
}

/// Something at a fixed place.
#[derive(Debug)]
pub struct FixedWindow {
    /// Use of the window.
    pub kind: WindowKind,
    /// Name of the window, for tables and messages.
    pub label: &'static str,
    /// Guest addresses of the window.
    pub span: Span<Guest>,
}

/// The layout of an architecture.
pub const fn layout_of(arch: Architecture) -> &'static Layout {
    match arch {
        Architecture::X86_64 => &x86_64::layout::LAYOUT,
        Architecture::Aarch64 => &aarch64::layout::LAYOUT,
    }
}

/// `start..end` for a constant; an empty one does not compile.
const fn fixed(start: u64, end: u64) -> Span<Guest> {
    match Span::new(Gpa::new(start), end.saturating_sub(start)) {
        Ok(span) => span,
        Err(_) => panic!("a fixed window is empty"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_windows_are_disjoint_and_outside_ram() {
        for arch in [Architecture::X86_64, Architecture::Aarch64] {
            let layout = layout_of(arch);
            let mut all: Vec<_> = layout.fixed.iter().map(|w| w.span).chain(layout.ecam).collect();
            all.extend([layout.pci32, layout.firmware]);
            for (i, a) in all.iter().enumerate() {
                assert!(all.iter().skip(i + 1).all(|b| !a.overlaps(*b)), "{} {a}", layout.name);
                let in_hole = layout.ram_hole.covers(*a);
                assert!(in_hole || layout.ram.iter().all(|ram| !a.overlaps(*ram)), "{} {a}", layout.name);
            }
            assert!(layout.ram_hole.covers(layout.firmware) && layout.ram[0].covers(layout.ram_hole));
        }
    }
}
