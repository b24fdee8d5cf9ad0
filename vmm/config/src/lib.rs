//! From a JSON file to a checked specification.
//!
//! ```text
//!  vm.json ──source──► text with places ──tree, shape──► file ──cpus, memory, numa, devices, boot──► Spec
//! ```
//! [`load`] reads the file and those that it extends, and nothing else. `egm-vmm plan` checks whether a host can
//! provide the resources of a [`Spec`], and `egm-vmm export` writes it for another monitor.
//!
//! ```
//! # let configs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
//! let spec = egm_config::load(&configs.join("smoke.json"))?;
//! println!("{} vCPUs", spec.cpus.count);
//! # Ok::<(), egm_config::ConfigErrors>(())
//! ```
#![forbid(unsafe_code)]

mod added;
mod author;
mod boot;
mod cpus;
mod decode;
mod devices;
pub mod distance;
mod error;
mod faults;
mod file;
mod foreign;
mod forms;
mod memory;
mod new_slice;
mod numa;
mod on_reset;
mod pages;
mod resolve;
mod rules;
mod schema;
mod shape;
mod slot;
mod source;
mod spec;
mod tap;
mod tree;
mod written;

use std::path::Path;

pub use added::NewDevice;
pub use author::UnwritableSpec;
pub use boot::Overrides;
pub use devices::mac_text;
pub use error::{ConfigError, ConfigErrors, FilePosition, Rule, is_name, nearest};
pub use faults::MOST as MOST_FAULTS;
pub use file::*;
pub use foreign::{Refusal, load_foreign, parse_foreign};
pub use memory::{GUEST_MEMFD, LOCAL};
pub use new_slice::NewSlice;
pub use on_reset::OnReset;
pub use pages::PageSize;
pub use resolve::MAX_SPARE;
pub use rules::{BootRule, CpuRule, DeviceRule, MemoryRule, NumaRule};
pub use slot::Slot;
pub use spec::*;
pub use tap::{Tap, TapFile};

/// The configuration in the file `path` (`-` is standard input), together with the files that it extends.
///
/// # Errors
/// The rules that it breaks, and where; those that only follow from others are left out. The files are read; nothing that
/// they name is looked at.
pub fn load(path: &Path) -> Result<Spec, ConfigErrors> {
    load_with(path, &Overrides::default())
}

/// [`load`], with values of a command line in place of the file's.
///
/// # Errors
/// As [`load`].
pub fn load_with(path: &Path, overrides: &Overrides) -> Result<Spec, ConfigErrors> {
    resolve::resolve(source::Document::load(path)?, overrides)
}

/// Reads the file `path`, which must be a regular one, and no other that it extends; `-` is standard input. At most one
/// byte more than a configuration may have.
///
/// # Errors
/// [`ConfigErrors`]: the file cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>, ConfigErrors> {
    Ok(source::requested(path)?.1)
}

/// [`load_with`] of `text`, which did not come from a file: `path` is its name in messages. Paths in it, and the files
/// that it extends, are relative to the folder of `path`.
///
/// # Errors
/// As [`load`].
pub fn parse_with(path: &Path, text: Vec<u8>, overrides: &Overrides) -> Result<Spec, ConfigErrors> {
    resolve::resolve(source::Document::from_bytes(path, text)?, overrides)
}

/// The JSON Schema of a configuration file, as text that ends in a newline.
pub fn schema() -> String {
    let schema = schemars::schema_for!(File);
    format!("{:#}\n", schema.as_value())
}

#[cfg(test)]
mod tests;
