//! 64-bit x86.

#[cfg(target_arch = "x86_64")]
pub mod boot;
#[cfg(target_arch = "x86_64")]
mod boot_layout;
#[cfg(target_arch = "x86_64")]
mod boot_tables;
#[cfg(target_arch = "x86_64")]
pub mod cpuid;
#[cfg(target_arch = "x86_64")]
pub mod interrupts;
pub mod layout;
#[cfg(target_arch = "x86_64")]
pub mod machine_check;
#[cfg(target_arch = "x86_64")]
pub mod vcpu;
