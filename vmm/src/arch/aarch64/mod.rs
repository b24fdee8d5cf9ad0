//! 64-bit Arm.

pub mod layout;
