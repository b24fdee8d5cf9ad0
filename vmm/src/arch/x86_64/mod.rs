//! 64-bit x86.

#[cfg(target_arch = "x86_64")]
pub mod boot;
#[cfg(target_arch = "x86_64")]
mod boot_layout;
#[cfg(target_arch = "x86_64")]
mod boot_tables;
#[cfg(target_arch = "x86_64")]
pub mod cpuid;
pub mod image;
#[cfg(target_arch = "x86_64")]
pub mod interrupts;
pub mod layout;
#[cfg(target_arch = "x86_64")]
pub mod machine_check;
#[cfg(target_arch = "x86_64")]
pub mod reset;
#[cfg(target_arch = "x86_64")]
pub mod state;
#[cfg(target_arch = "x86_64")]
pub mod system_call;
#[cfg(target_arch = "x86_64")]
pub mod vcpu;
#[cfg(target_arch = "x86_64")]
pub mod vm;

/// Description of a file that cannot be booted, for the message.
pub const NO_KERNEL: &str = "neither a bzImage nor an x86-64 ELF file";
/// Kernels that can be booted, for the message.
pub const KERNELS: &str = "a whole 64-bit bzImage or vmlinux, for instance Debian's";
