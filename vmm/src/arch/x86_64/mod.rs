//! 64-bit x86.

pub mod layout;
