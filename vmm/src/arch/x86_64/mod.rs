//! 64-bit x86.

pub mod boot;
mod boot_tables;
pub mod cpuid;
pub mod layout;
pub mod machine_check;
pub mod vcpu;
