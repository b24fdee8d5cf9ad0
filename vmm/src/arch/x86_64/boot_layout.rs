//! Guest physical addresses of what a kernel finds at its entry, and of the kernel itself.
//!
//! ```text
//!  0x0000_0500  GDT
//!  0x0000_6000  PVH start info, memory map, module list
//!  0x0000_7000  zero page (Linux boot parameters)
//!  0x0000_8ff0  stack of the first instructions
//!  0x0000_9000  page tables: one PML4, one PDPT, four page directories (identity, 4 GiB)
//!  0x0002_0000  command line
//!  0x000e_0000  RSDP and the other tables
//!  0x000f_fff0  reset vector
//!  0x0010_0000  kernel
//!  end of the RAM below 4 GiB, page aligned: initramfs
//! ```

use egm_address::Gpa;

pub(super) const GDT: Gpa = Gpa::new(0x500);
pub(super) const START_INFO: Gpa = Gpa::new(0x6000);
pub(super) const ZERO_PAGE: Gpa = Gpa::new(0x7000);
pub(super) const STACK: Gpa = Gpa::new(0x8ff0);
pub(super) const PAGE_TABLES: Gpa = Gpa::new(0x9000);
pub(super) const COMMAND_LINE: Gpa = Gpa::new(0x2_0000);
pub(super) const KERNEL: Gpa = Gpa::new(0x10_0000);
