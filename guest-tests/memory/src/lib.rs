//! EGM memory that a guest has as a PCI function (`egm-device/DESIGN.md`, "The device").
//!
//! ```text
//!  find() ─► Function ─► map() ─► Memory      its bytes: an address and a file, for CUDA (as I/O memory) and programs
//!            facts    └► registers() ─► Registers    retired bytes, events, scrub
//! ```
//! A function is found by its vendor capability or, where the kernel does not show that to this user, by the magic of its
//! registers. It needs no driver: Linux gives BARs as files in sysfs. The memory may hold retired bytes, which read ones:
//! [`Registers::retired`] lists them.
//!
//! ```no_run
//! let found = egm_memory::find()?;
//! let function = found.functions.first().ok_or("no EGM memory")?;
//! let (memory, registers) = (function.map()?, function.registers()?);
//! let retired = registers.retired()?; // bytes that must not be used: offsets, ascending
//! println!("{} bytes at {:p}, {} retired spans", memory.size(), memory.address(), retired.len());
//! if !retired.iter().any(|span| span.contains(&0_u64)) {
//!     memory.write_word(0, 1).ok_or("no word at 0")?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! C programs use `include/egm_memory.h` and `libegm_memory.a`.

pub mod c;
mod capability;
mod error;
mod function;
mod mapping;
mod registers;
#[cfg(test)]
mod testing;

pub use capability::Facts;
pub use error::MemoryError;
pub use function::{Found, Function, find, find_in};
pub use mapping::Memory;
pub use registers::{Registers, Retired};
