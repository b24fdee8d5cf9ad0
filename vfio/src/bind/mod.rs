//! Driver bindings of functions: taking a function from the host for a guest, and restoring its former driver.
//!
//! This uses `driver_override` and `drivers_probe` (`Documentation/ABI/testing/sysfs-bus-pci`), which name one
//! function, unlike `new_id`, which takes every function with the same ids. The former driver is recorded before
//! anything changes, so an interrupted bind can be undone.
#![forbid(unsafe_code)]

mod made_for;
mod protect;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use egm_address::PciAddress;

use crate::host::{self, HostError, HostFunction, MISSING_REMEDY};
use crate::topology::{self, GroupError, is_bridge, is_vfio_driver};

pub use protect::Use;

/// Folder of the records of former drivers; a reboot clears it, as it clears the bindings.
const STATE: &str = "run/egm-vmm/bind";

/// Why a function keeps its driver.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum BindError {
    /// The host could not be read.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The host depends on it.
    #[error("host function {function} is in use by this host: {what}")]
    Needed {
        function: PciAddress,
        /// Use by the host.
        what: Use,
    },
    /// No guest could have it: it is a bridge, in no group, or its group's other members would keep the host's drivers.
    #[error(transparent)]
    Group(GroupError),
    #[error("the kernel has no PCI driver \"{driver}\": {} is missing", path.display())]
    NoDriver {
        driver: String,
        /// Missing folder in sysfs.
        path: PathBuf,
    },
    /// Invalid name of a driver.
    #[error("{driver:?} cannot name a driver: write letters, digits, \"-\" and \"_\"")]
    Name { driver: String },
    /// The record of the former driver cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// sysfs or the state file refused.
    #[error("cannot write {text:?} to {}", path.display())]
    Write {
        path: PathBuf,
        /// Text that could not be written.
        text: String,
        source: io::Error,
    },
    /// The driver did not accept it.
    #[error(
        "host function {function} has {now} after it was offered to {driver}: the kernel's log has the reason"
    )]
    Refused {
        function: PciAddress,
        driver: String,
        /// Driver that it has now.
        now: String,
    },
}

impl BindError {
    /// Command or change that resolves the error, if one is known.
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Host(HostError::Missing { .. }) => Some(MISSING_REMEDY.to_owned()),
            Self::Group(error @ GroupError::InUse { members, .. })
                if members.iter().all(|member| !member.bridge) =>
            {
                Some(format!("take them too with --group, or: {}", error.help()))
            }
            Self::Group(error) => Some(error.help()),
            Self::NoDriver { driver, .. } => Some(format!(
                "look why the module is not loaded: modprobe {driver}; or take another one: --driver vfio-pci"
            )),
            Self::Write { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("run it as root".to_owned())
            }
            Self::Refused { .. } => Some("dmesg | tail".to_owned()),
            Self::Needed { .. } => Some("choose another function, or move the host off it first".to_owned()),
            _ => None,
        }
    }
}

/// Result of a bind or an undo for one function.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Change {
    pub function: PciAddress,
    /// Its driver before; `None` without one.
    pub before: Option<String>,
    pub now: Option<String>,
}

/// Binds the functions of one host to drivers.
#[derive(Debug)]
pub struct Binder {
    root: PathBuf,
    /// Whether a kernel acts on the writes; a copied tree only stores them.
    live: bool,
}

impl Binder {
    /// Binder for the host at `root`; `/` is this host.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), live: root == Path::new("/") }
    }

    /// Binds `functions` to `driver`. Without it, each keeps its VFIO driver, or gets the one that the kernel has for
    /// it, else `vfio-pci`. With `group`, binds the other members of their groups too, except bridges. A function that
    /// has the driver stays as it is. All are checked before the first module is loaded and the first function changes.
    ///
    /// # Errors
    /// [`BindError`]; functions before the one named may have changed.
    pub fn bind(
        &self,
        functions: &[PciAddress],
        driver: Option<&str>,
        group: bool,
    ) -> Result<Vec<Change>, BindError> {
        let wanted = self.checked(functions, driver, group)?;
        wanted.iter().map(|(function, driver)| self.change_driver(function, driver)).collect()
    }

    /// Restores the drivers that `functions` had before [`Binder::bind`]. A function without a record stays as it is.
    ///
    /// # Errors
    /// [`BindError`]; functions before the one named may have changed.
    pub fn undo(&self, functions: &[PciAddress]) -> Result<Vec<Change>, BindError> {
        functions.iter().map(|function| self.restore(*function)).collect()
    }

    /// Returns the functions to bind and their drivers, after a check that the host needs none of them.
    fn checked(
        &self,
        functions: &[PciAddress],
        driver: Option<&str>,
        group: bool,
    ) -> Result<Vec<(HostFunction, String)>, BindError> {
        if let Some(name) = driver.filter(|name| !is_name(name)) {
            return Err(BindError::Name { driver: name.to_owned() });
        }
        for function in functions {
            host::function(&self.root, *function)?; // a missing one is an error here
        }
        let mut all = host::around(&self.root, functions)?;
        let groups: Vec<u32> =
            all.iter().filter(|f| functions.contains(&f.address)).filter_map(|f| f.iommu_group).collect();
        let member =
            |f: &HostFunction| group && f.iommu_group.is_some_and(|of| groups.contains(&of)) && !is_bridge(f);
        let mut wanted = Vec::new();
        for function in all.iter().filter(|f| functions.contains(&f.address) || member(f)) {
            if is_bridge(function) {
                return Err(BindError::Group(GroupError::Bridge { function: function.address }));
            }
            if let Some(what) = protect::host_use(&self.root, function.address) {
                return Err(BindError::Needed { function: function.address, what });
            }
            // A function with a VFIO driver may have a guest: it keeps that driver unless the caller names one.
            let has = function.driver.clone().filter(|name| is_vfio_driver(name));
            let its = driver.map(str::to_owned).or(has);
            let its = its.unwrap_or_else(|| made_for::driver(&self.root, function.address));
            wanted.push((function.clone(), its));
        }
        for (function, driver) in wanted.iter().filter(|(_, driver)| is_vfio_driver(driver)) {
            // Check the state after the bind: each group must be free then.
            let ours = all.iter_mut().find(|one| one.address == function.address);
            ours.into_iter().for_each(|one| one.driver = Some(driver.clone()));
        }
        for (function, _) in wanted.iter().filter(|(_, driver)| is_vfio_driver(driver)) {
            topology::usable(&all, function.address).map_err(BindError::Group)?;
        }
        wanted.iter().try_for_each(|(_, driver)| self.load(driver))?;
        Ok(wanted)
    }

    /// Loads the module of `driver` if the kernel does not have the driver yet.
    fn load(&self, driver: &str) -> Result<(), BindError> {
        let path = self.root.join("sys/bus/pci/drivers").join(driver);
        if self.live && !path.is_dir() {
            // modprobe prints a better error for a missing module than this function could.
            let _ = Command::new("modprobe").arg("--").arg(driver).status();
        }
        if path.is_dir() { Ok(()) } else { Err(BindError::NoDriver { driver: driver.to_owned(), path }) }
    }

    fn change_driver(&self, function: &HostFunction, driver: &str) -> Result<Change, BindError> {
        let (address, before) = (function.address, function.driver.clone());
        if before.as_deref() != Some(driver) {
            let state = self.state(address);
            // Only the first bind records the former driver: a second one must not record vfio-pci.
            if !state.exists() {
                let text = before.as_deref().unwrap_or_default();
                write_whole(&state, text).map_err(|source| BindError::Write {
                    path: state,
                    text: text.to_owned(),
                    source,
                })?;
            }
            self.rebind(address, before.as_deref(), driver)?;
        }
        Ok(Change { function: address, before, now: Some(driver.to_owned()) })
    }

    fn restore(&self, address: PciAddress) -> Result<Change, BindError> {
        let state = self.state(address);
        let before = host::function(&self.root, address)?.driver;
        let former = match fs::read_to_string(&state) {
            Ok(former) => former,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Change { function: address, now: before.clone(), before });
            }
            Err(source) => return Err(BindError::Read { path: state, source }),
        };
        let former = former.trim();
        if former.is_empty() {
            self.release(address, before.as_deref())?;
        } else if before.as_deref() != Some(former) {
            self.rebind(address, before.as_deref(), former)?;
        }
        // An empty override lets any driver bind the function again, as after a reboot.
        write(&self.function(address).join("driver_override"), "\n")?;
        fs::remove_file(&state).map_err(|source| BindError::Write {
            path: state,
            text: String::new(),
            source,
        })?;
        let now = (!former.is_empty()).then(|| former.to_owned());
        Ok(Change { function: address, before, now })
    }

    /// Unbinds a function from its driver and offers it to `driver` alone.
    fn rebind(&self, address: PciAddress, from: Option<&str>, driver: &str) -> Result<(), BindError> {
        write(&self.function(address).join("driver_override"), driver)?;
        self.release(address, from)?;
        write(&self.root.join("sys/bus/pci/drivers_probe"), &address.to_string())?;
        let now =
            if self.live { host::function(&self.root, address)?.driver } else { Some(driver.to_owned()) };
        if now.as_deref() == Some(driver) {
            return Ok(());
        }
        let now = now.unwrap_or_else(|| "no driver".to_owned());
        Err(BindError::Refused { function: address, driver: driver.to_owned(), now })
    }

    fn release(&self, address: PciAddress, from: Option<&str>) -> Result<(), BindError> {
        let Some(from) = from else { return Ok(()) };
        write(&self.root.join("sys/bus/pci/drivers").join(from).join("unbind"), &address.to_string())
    }

    fn function(&self, address: PciAddress) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(address.to_string())
    }

    fn state(&self, address: PciAddress) -> PathBuf {
        self.root.join(STATE).join(address.to_string())
    }
}

fn is_name(driver: &str) -> bool {
    !driver.is_empty() && driver.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
}

fn write(path: &Path, text: &str) -> Result<(), BindError> {
    fs::write(path, text).map_err(|source| BindError::Write {
        path: path.to_owned(),
        text: text.trim().to_owned(),
        source,
    })
}

/// Creates `path`, and its folder, with all of `text` or not at all, even if this process is killed: a truncated file
/// would read as "had no driver".
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(folder)?;
    let mut hidden = OsString::from(".new-");
    hidden.push(name);
    let new = folder.join(hidden);
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests;
