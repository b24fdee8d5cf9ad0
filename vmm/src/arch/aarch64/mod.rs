//! 64-bit Arm.

#[cfg(target_arch = "aarch64")]
pub mod boot;
pub mod boot_spans;
#[cfg(target_arch = "aarch64")]
mod gic;
pub mod image;
#[cfg(target_arch = "aarch64")]
pub mod interrupts;
pub mod layout;
#[cfg(target_arch = "aarch64")]
pub mod machine_check;
#[cfg(target_arch = "aarch64")]
pub mod reset;
#[cfg(target_arch = "aarch64")]
pub mod state;
#[cfg(target_arch = "aarch64")]
pub mod system_call;
#[cfg(target_arch = "aarch64")]
pub mod vcpu;
#[cfg(target_arch = "aarch64")]
pub mod vm;

/// Description of a file that cannot be booted, for the message.
pub const NO_KERNEL: &str = "not an arm64 Image";
/// Kernels that can be booted, for the message.
pub const KERNELS: &str = "an uncompressed arm64 Image, for instance Debian's vmlinuz";
