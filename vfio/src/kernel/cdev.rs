//! A function that is opened by its character device and attached to iommufd. vfio-ioctls opens, binds, attaches and
//! describes it. This module converts the crate's errors, and runs the crate's `Drop` only where that cannot panic.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use egm_address::{InBar, PciAddress, Span};
use vfio_ioctls::{VfioDevice, VfioError, VfioRegionDmaRange, VfioRegionInfoCap};

use super::answer::{self, Placed, RegionInfo};
use super::error::OpenError;
use super::query::{self, IDENTIFY, INTERRUPTS, REGIONS};
use super::{Iommufd, sys};
use crate::backend::{InterruptKind, Interrupts, RegionIndex};

/// Root folder of the host, as the crate assumes it.
const ROOT: &str = "/";

const CONFIG: u32 = RegionIndex::Config.number();
/// Offset of the command register in configuration space, and its bit that permits DMA.
const COMMAND: u64 = 4;
const BUS_MASTER: u16 = 1 << 2;

/// A function that is attached to an address space of iommufd.
pub(super) struct Cdev {
    /// `None` only during its drop.
    device: Option<VfioDevice>,
    /// A duplicate of its descriptor, for ioctls that the crate lacks, and for KVM: the crate closes its own on failure.
    file: File,
    iommufd: Arc<Iommufd>,
    /// Offset of configuration space in the file, by a request of our own.
    config: Option<u64>,
}

impl Cdev {
    /// Opens the function at `address` by its own character device and attaches it to `iommufd`.
    pub(super) fn open(address: PciAddress, iommufd: &Arc<Iommufd>) -> Result<Self, OpenError> {
        let file = VfioDevice::open_cdev(&folder(Path::new(ROOT), address));
        let file = file.map_err(|error| not_opened(Path::new(ROOT), address, error))?;
        Self::attach(file, address, iommufd)
    }

    /// Attaches a function by its newly opened file: until that is closed, the function reaches everything mapped there.
    pub(super) fn attach(file: File, address: PciAddress, iommufd: &Arc<Iommufd>) -> Result<Self, OpenError> {
        let refused = |source| not_attached(Path::new(ROOT), address, source);
        let copy = file.try_clone().map_err(refused)?;
        iommufd.notify_kvm(copy.as_fd(), true).map_err(refused)?;
        match VfioDevice::new_from_fd(file, Arc::clone(iommufd.space()), true) {
            Ok(device) => {
                let (device, iommufd) = (Some(device), Arc::clone(iommufd));
                let config = query::region(copy.as_fd(), CONFIG).ok().map(|info| info.at);
                Ok(Self { device, file: copy, iommufd, config })
            }
            Err(error) => {
                let _ = iommufd.notify_kvm(copy.as_fd(), false); // KVM holds the file too: it would stay open
                Err(not_described(Path::new(ROOT), address, error))
            }
        }
    }

    /// The function's open file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    fn device(&self) -> io::Result<&VfioDevice> {
        self.device.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The regions, by number.
    pub(super) fn regions(&self) -> io::Result<Vec<Placed>> {
        let device = self.device()?;
        // The crate leaves out a region if its query fails, and the numbers of all later regions shift.
        if self.config != Some(device.get_region_offset(CONFIG)) {
            return Err(incomplete());
        }
        Ok((0..REGIONS).map(|index| region(device, index).placed(query::page())).collect())
    }

    /// The interrupts, in the order of [`INTERRUPTS`].
    pub(super) fn interrupts(&self) -> io::Result<Vec<Interrupts>> {
        let device = self.device()?;
        let interrupts = |kind: InterruptKind| match (device.get_irq_info(kind.number()), kind) {
            (Some(irq), _) => Ok(answer::interrupts_of(irq.flags, irq.count)),
            // A conventional PCI function has no error interrupt, and old kernels do not request functions.
            (None, InterruptKind::Error | InterruptKind::Request) => Ok(Interrupts::default()),
            (None, _) => Err(incomplete()),
        };
        INTERRUPTS.into_iter().map(interrupts).collect()
    }

    /// Exports part of a BAR as a dma-buf; `None` if the kernel cannot.
    pub(super) fn dma_buf(&self, region: RegionIndex, part: Span<InBar>) -> Option<OwnedFd> {
        let range = VfioRegionDmaRange { offset: part.start().get(), length: part.size() };
        let flags = u32::try_from(libc::O_RDWR | libc::O_CLOEXEC).ok()?;
        let exported = self.device().ok()?.export_dma_buf(region.number(), &[range], flags);
        exported.ok().flatten().map(OwnedFd::from)
    }

    /// Clears the bus master bit. Closing the file would stop DMA before it detaches the function, but the crate detaches
    /// first, and a device that still runs would then fault in the IOMMU.
    fn stop_dma(&self) -> io::Result<()> {
        let Some(at) = self.config.and_then(|config| config.checked_add(COMMAND)) else { return Ok(()) };
        let mut command = [0; 2];
        self.file.read_exact_at(&mut command, at)?;
        let stopped = u16::from_le_bytes(command) & !BUS_MASTER;
        self.file.write_all_at(&stopped.to_le_bytes(), at)
    }
}

impl Drop for Cdev {
    fn drop(&mut self) {
        let _ = self.stop_dma(); // a function that was pulled out refuses, and does no DMA
        let _ = self.iommufd.notify_kvm(self.file.as_fd(), false); // KVM holds the file too: it would stay open
        let Some(device) = self.device.take() else { return };
        // The crate's `Drop` detaches again, which the kernel accepts from a function that is detached, and panics if it
        // is refused. Closing the file detaches the function as well.
        match device.detach_hwpt() {
            Ok(()) => drop(device),
            Err(_) => sys::close_attached(device),
        }
    }
}

fn region(device: &VfioDevice, index: u32) -> RegionInfo {
    let mut info = RegionInfo {
        flags: device.get_region_flags(index),
        size: device.get_region_size(index),
        at: device.get_region_offset(index),
        ..RegionInfo::default()
    };
    for capability in device.get_region_caps(index) {
        match capability {
            VfioRegionInfoCap::SparseMmap(sparse) => {
                info.areas = Some(sparse.areas.iter().map(|area| (area.offset, area.size)).collect());
            }
            VfioRegionInfoCap::MsixMappable => info.msix_mappable = true,
            _ => {}
        }
    }
    info
}

/// Error for a function that the kernel describes only in part.
fn incomplete() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the kernel does not describe all of them")
}

/// Folder of the function at `address` in sysfs.
fn folder(root: &Path, address: PciAddress) -> PathBuf {
    root.join("sys/bus/pci/devices").join(address.to_string())
}

/// The function's own character device, which `vfio-dev/vfioN` in its sysfs folder names.
fn path(root: &Path, address: PciAddress) -> Result<PathBuf, OpenError> {
    let folder = folder(root, address).join("vfio-dev");
    let name = fs::read_dir(&folder).and_then(|mut entries| {
        entries.next().ok_or(io::ErrorKind::NotFound)?.map(|entry| entry.file_name())
    });
    let name = name.map_err(OpenError::file(&folder, &address.to_string(), NO_CDEV))?;
    Ok(root.join("dev/vfio/devices").join(name))
}

const NO_CDEV: &str =
    "the kernel has no character devices of VFIO (CONFIG_VFIO_DEVICE_CDEV); set \"backend\": \"legacy\"";

/// Error for a function with a file that could not be opened. The crate does not name the file.
fn not_opened(root: &Path, address: PciAddress, error: VfioError) -> OpenError {
    let path = match path(root, address) {
        Ok(path) => path,
        Err(error) => return error,
    };
    let source = match error {
        VfioError::OpenDeviceCdev(source) => source,
        other => io::Error::other(other),
    };
    OpenError::file(&path, &address.to_string(), NO_CDEV)(source)
}

/// Error for a function that KVM or iommufd did not accept.
fn not_attached(root: &Path, address: PciAddress, source: io::Error) -> OpenError {
    match source.raw_os_error() {
        // The kernel returns EINVAL to the second descriptor of an open function.
        Some(libc::EBUSY | libc::EPERM | libc::EINVAL) => path(root, address)
            .map_or_else(|error| error, |path| OpenError::busy(&path, &address.to_string())),
        _ => OpenError::refused(format!("give {address} to iommufd"))(source),
    }
}

/// Error for a function that the crate could not attach or describe.
fn not_described(root: &Path, address: PciAddress, error: VfioError) -> OpenError {
    let source = match error {
        VfioError::VfioDeviceBindIommufd(number) | VfioError::VfioDeviceAttachIommufdPt(number) => {
            return not_attached(root, address, number.into());
        }
        VfioError::VfioDeviceGetInfo(number) => number.into(),
        VfioError::VfioDeviceGetInfoOther => query::not_pci(),
        VfioError::VfioDeviceGetInfoPCI => io::Error::new(
            io::ErrorKind::InvalidData,
            "it has too few regions or interrupts for a PCI function",
        ),
        other => io::Error::other(other),
    };
    OpenError::refused(format!("{IDENTIFY} {address}"))(source)
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::errno::Error as Number;

    use super::*;

    /// A host with a function and the character device `vfio3` of it.
    fn host() -> (tempfile::TempDir, PciAddress) {
        let (root, address) = (tempfile::tempdir().unwrap(), "0000:41:00.0".parse().unwrap());
        fs::create_dir_all(folder(root.path(), address).join("vfio-dev/vfio3")).unwrap();
        (root, address)
    }

    #[test]
    fn a_function_that_is_in_use_names_its_file() {
        let (root, address) = host();
        for number in [libc::EBUSY, libc::EPERM, libc::EINVAL] {
            for error in [VfioError::VfioDeviceBindIommufd, VfioError::VfioDeviceAttachIommufdPt] {
                let error = not_described(root.path(), address, error(Number::new(number)));
                let OpenError::Busy { path, function, .. } = error else { panic!("{error}") };
                assert_eq!(path, root.path().join("dev/vfio/devices/vfio3"));
                assert_eq!(function, "0000:41:00.0");
            }
        }
    }

    #[test]
    fn a_function_without_a_character_device_names_its_folder() {
        let (root, address) = host();
        let folder = folder(root.path(), address).join("vfio-dev");
        fs::remove_dir(folder.join("vfio3")).unwrap();
        for step in [true, false] {
            let error = not_opened(root.path(), address, VfioError::InvalidVfioDev);
            let OpenError::NoFile { path, rule } = error else { panic!("{error}") };
            assert_eq!((path, rule), (folder.clone(), NO_CDEV));
            if step {
                fs::remove_dir(&folder).unwrap();
            }
        }
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_named_with_the_reason() {
        let (root, address) = host();
        let error = |kind: io::ErrorKind| {
            not_opened(root.path(), address, VfioError::OpenDeviceCdev(kind.into())).to_string()
        };
        let path = root.path().join("dev/vfio/devices/vfio3");
        assert_eq!(error(io::ErrorKind::NotFound), format!("{} does not exist: {NO_CDEV}", path.display()));
        assert_eq!(error(io::ErrorKind::PermissionDenied), format!("cannot open {}", path.display()));
    }

    #[test]
    fn other_errors_keep_the_kernels_number() {
        use std::error::Error;
        let (root, address) = host();
        let chain = |error| {
            let error = not_described(root.path(), address, error);
            (error.to_string(), error.source().map(ToString::to_string).unwrap_or_default())
        };
        let (what, why) = chain(VfioError::VfioDeviceBindIommufd(Number::new(libc::ENOMEM)));
        assert_eq!(what, "cannot give 0000:41:00.0 to iommufd");
        assert_eq!(why, io::Error::from_raw_os_error(libc::ENOMEM).to_string());
        let (what, why) = chain(VfioError::VfioDeviceGetInfo(Number::new(libc::EIO)));
        assert_eq!(what, "cannot identify 0000:41:00.0");
        assert_eq!(why, io::Error::from_raw_os_error(libc::EIO).to_string());
        assert_eq!(chain(VfioError::VfioDeviceGetInfoOther).1, query::not_pci().to_string());
        assert!(chain(VfioError::VfioDeviceGetInfoPCI).1.contains("too few regions"));
    }
}
