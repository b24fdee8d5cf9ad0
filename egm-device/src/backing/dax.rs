//! A device per slice of device-DAX memory, so that a slice's file reaches no other slice.
//!
//! ```text
//!  /sys/bus/dax/devices/dax0.0 ──► …/hmem.0/dax0.0       the first device, without memory: `resource` is the region's address
//!                       dax0.1 ──► …/hmem.0/dax0.1       a slice: mapping0/{start,end}, size, dev, driver
//!                                  …/hmem.0/dax_region   create, delete
//! ```
//! The kernel revokes a slice when its device is unbound: mappings fault from then on. It revives them when the same device is
//! bound again, so a revoked device is always deleted, and the next owner of its bytes gets a new one.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use egm_address::{Address, Host, InRegion, Span};
use rustix::fs::{FlockOperation, flock, major, minor};

use super::device::{DeviceNode, Window};
use super::{BackingError, DaxError, OpenResult, boxed};
use crate::region::{Region, RegionKind, Slice};

/// Time limit of an unbind: it waits for all pins of the memory, DMA mappings for instance.
const UNBIND_TIMEOUT: Duration = Duration::from_secs(30);

/// Devices that this process unbinds. An unbind that waits for a pin cannot be interrupted, and a second one would wait as well.
static UNBINDING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The devices of all regions.
const DEVICES: &str = "/sys/bus/dax/devices";

/// The driver of devices that programs can map.
const DRIVER: &str = "device_dax";

/// A dynamic device-DAX region of this host.
#[derive(Debug)]
pub(crate) struct DaxRegion {
    /// The folder of its first device, which no grant uses.
    first: PathBuf,
    /// The name of its first device without the number: `dax0.`.
    prefix: String,
    root: PathBuf,
}

/// The device of a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DaxDevice {
    name: String,
    /// `None` while it has no memory.
    pub(crate) span: Option<Span<Host>>,
    driver: Option<String>,
}

/// The sysfs attribute that creates devices in the region of `device`, for processes that may write it.
pub(crate) fn create_attribute(device: &Path) -> PathBuf {
    Path::new(DEVICES).join(device.file_name().unwrap_or_default()).join("../dax_region/create")
}

/// Host addresses of `slice`.
pub(crate) fn span_of(region: &Region, slice: &Slice) -> Option<Span<Host>> {
    Span::new(region.base?.checked_add(slice.offset)?, slice.size.get()).ok()
}

/// The part of `span` that lies in `region`, as offsets.
pub(crate) fn offset_of(region: &Region, span: Span<Host>) -> Option<Span<InRegion>> {
    let whole = region.span()?;
    let span = span.intersection(whole)?;
    Span::new(Address::new(span.start().offset_from(whole.start())?), span.size()).ok()
}

/// The memory of `slice` as a new device. No other device may have any of its bytes.
pub(super) fn create(region: &Region, slice: &Slice) -> OpenResult {
    let span = span_of(region, slice).ok_or_else(|| BackingError::NoBase { region: region.name.clone() })?;
    let parent = DaxRegion::of(region, Path::new("/")).map_err(|source| failed(region, source))?;
    let child = parent.create(span).map_err(|source| failed(region, source))?;
    window(region, slice, &parent, &child)
}

/// The error of a step with the device of a slice of `region`.
pub(crate) fn failed(region: &Region, source: DaxError) -> BackingError {
    BackingError::SliceDevice { region: region.name.clone(), source }
}

/// The bytes of `slice` by its device `child`.
pub(crate) fn window(region: &Region, slice: &Slice, parent: &DaxRegion, child: &DaxDevice) -> OpenResult {
    let file = parent.open(child).map_err(|source| failed(region, source))?;
    Window::new(region, slice, file).map(boxed)
}

impl DaxRegion {
    /// The region of the device that `region` names, below `root`.
    pub(crate) fn of(region: &Region, root: &Path) -> Result<Self, DaxError> {
        let name = match &region.kind {
            RegionKind::Devdax { device, .. } => device.file_name().and_then(|name| name.to_str()),
            _ => None,
        };
        let name = name.unwrap_or_default();
        let first = root.join("sys/bus/dax/devices").join(name);
        let prefix = name.strip_suffix('0').filter(|prefix| prefix.ends_with('.'));
        let unknown = || DaxError::at("find a region of", &first)(io::ErrorKind::InvalidInput.into());
        let prefix = prefix.ok_or_else(unknown)?.to_owned();
        Ok(Self { first, prefix, root: root.to_owned() })
    }

    /// The devices of slices, those without memory included.
    pub(crate) fn children(&self) -> Result<Vec<DaxDevice>, DaxError> {
        let folder = self.root.join("sys/bus/dax/devices");
        let entries = fs::read_dir(&folder).map_err(DaxError::at("list", &folder))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_child = |name: &String| name.starts_with(&self.prefix) && !self.first.ends_with(name);
        // Another process may delete one meanwhile.
        let stays = |name: &String, child: &Result<_, _>| child.is_ok() || self.device(name).exists();
        let found = names.filter(is_child).map(|name| (self.child(name.clone()), name));
        found.filter(|(child, name)| stays(name, child)).map(|(child, _)| child).collect()
    }

    /// The devices that have any of `span`.
    pub(crate) fn overlapping(&self, span: Span<Host>) -> Result<Vec<DaxDevice>, DaxError> {
        let mut children = self.children()?;
        children.retain(|child| child.span.is_some_and(|of| of.overlaps(span)));
        Ok(children)
    }

    fn child(&self, name: String) -> Result<DaxDevice, DaxError> {
        let folder = self.device(&name);
        let driver = fs::read_link(folder.join("driver")).ok();
        let driver = driver.and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
        let size = || self.number(&folder.join("size"));
        let span = match size()? {
            0 => None,
            bytes => match self.mapping(&folder, bytes) {
                // Another process takes its memory away.
                Err(_) if size()? == 0 => None,
                span => Some(span?),
            },
        };
        Ok(DaxDevice { name, span, driver })
    }

    /// Addresses of the device of `folder`, which has `size` bytes.
    fn mapping(&self, folder: &Path, size: u64) -> Result<Span<Host>, DaxError> {
        let mapping = folder.join("mapping0");
        let (first, last) = (self.number(&mapping.join("start"))?, self.number(&mapping.join("end"))?);
        let span = last.checked_sub(first).and_then(|size| size.checked_add(1));
        // A device of several spans is none of ours, and no span of it is left out by mistake.
        let invalid = || DaxError::at("understand", &mapping)(io::ErrorKind::InvalidData.into());
        let span = span.filter(|of| *of == size).and_then(|of| Span::new(Address::new(first), of).ok());
        span.ok_or_else(invalid)
    }

    /// A device that has exactly `span`, bound to its driver.
    fn create(&self, span: Span<Host>) -> Result<DaxDevice, DaxError> {
        let name = self.allocate(span)?;
        let made = self.bind(&name).and_then(|()| self.child(name.clone()));
        if made.is_err() {
            // The first error is the reason; what is left of the device is removed before the next grant of these bytes.
            drop(self.child(name).and_then(|child| self.remove(&child)));
        }
        made
    }

    /// Excludes other processes and threads that create or delete devices of the region, until the file is closed.
    fn lock(&self) -> Result<File, DaxError> {
        let create = self.attribute("create");
        let lock = File::open(&create).map_err(DaxError::at("open", &create))?;
        flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| DaxError::at("lock", &create)(error.into()))?;
        Ok(lock)
    }

    /// Creates a device and gives it `span`, one process at a time: the kernel reports the youngest device only.
    fn allocate(&self, span: Span<Host>) -> Result<String, DaxError> {
        let _lock = self.lock()?;
        let create = self.attribute("create");
        // No process is between its two steps, so a device without memory is what a killed one left.
        for left in self.children()?.iter().filter(|child| child.span.is_none()) {
            self.delete(left)?;
        }
        write(&create, "1")?;
        let name = fs::read_to_string(&create).map_err(DaxError::at("read", &create))?;
        let name = name.trim().to_owned();
        let mapping = self.device(&name).join("mapping");
        write(&mapping, &format!("{:#x}-{:#x}", span.start().get(), span.last().get()))?;
        // The kernel ignores a span that is not aligned, without an error.
        if self.child(name.clone())?.span == Some(span) {
            return Ok(name);
        }
        Err(DaxError::at("set", &mapping)(io::ErrorKind::InvalidInput.into()))
    }

    fn bind(&self, name: &str) -> Result<(), DaxError> {
        let bound = write(&self.driver("bind"), name);
        match bound {
            // Regions that are meant for the kernel's own use bind only what the driver is asked for by name.
            Err(error) if error.source.raw_os_error() == Some(libc::ENODEV) => {
                write(&self.driver("new_id"), name)?;
            }
            bound => bound?,
        }
        if self.child(name.to_owned())?.driver.as_deref() == Some(DRIVER) {
            return Ok(());
        }
        Err(DaxError::at("bind", &self.device(name))(io::ErrorKind::Other.into()))
    }

    /// Opens the file of the device.
    pub(crate) fn open(&self, child: &DaxDevice) -> Result<File, DaxError> {
        let path = self.root.join("dev").join(&child.name);
        let node = DeviceNode::at(&path).map_err(DaxError::at("find", &path))?;
        let number = self.device(&child.name).join("dev");
        let expected = fs::read_to_string(&number).map_err(DaxError::at("read", &number))?;
        let rdev = node.number().map_err(DaxError::at("find", &path))?;
        if format!("{}:{}", major(rdev), minor(rdev)) == expected.trim() {
            return node.open().map_err(DaxError::at("open", &path));
        }
        Err(DaxError::at("identify", &path)(io::ErrorKind::InvalidData.into()))
    }

    /// Whether the device can be opened: an unbound one has no mapping that works.
    pub(crate) fn is_bound(child: &DaxDevice) -> bool {
        child.driver.is_some()
    }

    /// Revokes every mapping and descriptor of `child` and gives its memory back to the region.
    ///
    /// # Errors
    /// [`DaxError`]: one of [`DaxError::is_timeout`] while the kernel waits for a pin.
    pub(crate) fn remove(&self, child: &DaxDevice) -> Result<(), DaxError> {
        let folder = self.device(&child.name);
        match child.driver.as_deref() {
            None => {}
            Some(DRIVER) => self.unbind(&child.name)?,
            // The kernel uses the memory, or a file system: no owner of a slice did that.
            Some(_) => return Err(DaxError::at("unbind", &folder)(io::ErrorKind::ResourceBusy.into())),
        }
        // A device that only `bind` attached has no entry there.
        let _ = write(&self.driver("remove_id"), &child.name);
        let _lock = self.lock()?;
        // Another process may have deleted it, and its name may be another device's by now.
        let is_it = |now: &DaxDevice| now.name == child.name && now.span == child.span;
        if self.children()?.iter().any(is_it) { self.delete(child) } else { Ok(()) }
    }

    /// Deletes the unbound device `child` under [`lock`](Self::lock).
    fn delete(&self, child: &DaxDevice) -> Result<(), DaxError> {
        write(&self.device(&child.name).join("size"), "0")?;
        write(&self.attribute("delete"), &child.name)
    }

    /// Unbinds on a thread of its own, because a pin can keep the kernel waiting without end.
    fn unbind(&self, name: &str) -> Result<(), DaxError> {
        let path = self.driver("unbind");
        let timeout = || DaxError::at("unbind", &self.device(name))(io::ErrorKind::TimedOut.into());
        let unbinding = || UNBINDING.lock().unwrap_or_else(PoisonError::into_inner);
        if !unbinding().insert(name.to_owned()) {
            return Err(timeout());
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let (to, device) = (path.clone(), name.to_owned());
        let work = move || {
            let outcome = write(&to, &device);
            UNBINDING.lock().unwrap_or_else(PoisonError::into_inner).remove(&device);
            drop(sender.send(outcome));
        };
        if let Err(error) = thread::Builder::new().name("dax-unbind".into()).spawn(work) {
            unbinding().remove(name);
            return Err(DaxError::at("start a thread that writes to", &path)(error));
        }
        match receiver.recv_timeout(UNBIND_TIMEOUT) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Err(timeout()),
        }
    }

    fn device(&self, name: &str) -> PathBuf {
        self.root.join("sys/bus/dax/devices").join(name)
    }

    fn driver(&self, file: &str) -> PathBuf {
        self.root.join("sys/bus/dax/drivers").join(DRIVER).join(file)
    }

    fn attribute(&self, file: &str) -> PathBuf {
        self.first.join("../dax_region").join(file)
    }

    fn number(&self, path: &Path) -> Result<u64, DaxError> {
        let text = fs::read_to_string(path).map_err(DaxError::at("read", path))?;
        let invalid = || DaxError::at("understand", path)(io::ErrorKind::InvalidData.into());
        crate::region::parse_number(text.trim()).ok_or_else(invalid)
    }
}

/// One write of all of `text`, as attributes want it.
fn write(path: &Path, text: &str) -> Result<(), DaxError> {
    fs::OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()))
        .map_err(DaxError::at("write to", path))
}

#[cfg(test)]
mod tests;
