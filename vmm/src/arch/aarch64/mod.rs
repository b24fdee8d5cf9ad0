//! 64-bit Arm.

#[cfg(target_arch = "aarch64")]
pub mod boot;
pub mod image;
#[cfg(target_arch = "aarch64")]
pub mod interrupts;
pub mod layout;
#[cfg(target_arch = "aarch64")]
pub mod machine_check;
pub mod rooms;
#[cfg(target_arch = "aarch64")]
pub mod vcpu;
