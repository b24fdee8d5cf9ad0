//! Open host resources of the guest's devices.

use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use egm_vfio::backend::BackendError;
use egm_vfio::kernel::OpenError;

use super::ThreadError;
use super::assigned::AddressSpaces;
use super::slices::{OpenSlice, SliceError, Slices};
use crate::config::{Device, DeviceKind, Tap};
use crate::error::{Blame, Chain, Remedy, Report, opening};
use crate::kept::{KeptFiles, KeptPart};
use crate::plan::{FunctionRole, Plan};
use crate::virtio::blk::{Disk, DiskError};
use crate::virtio::net::Backend;
use crate::virtio::net::tap::{self, TapError};
use crate::virtio::vhost::{self, VhostError};
use crate::virtio::vsock::{self, HostSockets, SocketError, Vsock, VsockError};

/// A device of the configuration, and what was opened for it.
pub struct OpenedDevice {
    /// Id and kind, as the configuration has them.
    pub device: Device,
    /// Descriptors that were opened for it.
    pub opened: OpenDevice,
}

/// A device without its resources.
#[derive(Debug)]
pub(super) struct DeviceFailure {
    pub(super) id: String,
    pub(super) source: DeviceError,
}

/// Descriptors of a device.
pub enum OpenDevice {
    /// virtio-blk: its disk image or block device.
    Block(Disk),
    /// virtio-net: its tap and the packet path.
    Net {
        /// One descriptor a queue pair.
        taps: Vec<File>,
        /// Implementation of the packet path.
        backend: Backend,
    },
    /// virtio-vsock, made already: only the kernel can check that its context id is free.
    Vsock(Box<Vsock>),
    /// virtio-rng, which needs no descriptor.
    Rng,
    /// A host function, or the device of a vfio-user server.
    Assigned(Arc<dyn egm_vfio::backend::Backend>),
    /// A slice that is a PCI function.
    Slice(OpenSlice),
}

/// Why a device cannot have what it needs.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum DeviceError {
    #[error("cannot open disk {}", path.display())]
    DiskFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Another machine or device has locked the disk, and would not expect our writes.
    #[error("disk {} is in use by another virtual machine, or by another device of this one", path.display())]
    DiskInUse { path: PathBuf },
    /// The file is no disk.
    #[error("cannot use {} as a disk", path.display())]
    Disk {
        path: PathBuf,
        #[source]
        source: DiskError,
    },
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The kernel's packet worker.
    #[error(transparent)]
    Vhost(#[from] VhostError),
    /// The socket device's Unix socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Vsock(#[from] VsockError),
    #[error("cannot open {path}")]
    VhostFile {
        path: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Assigned(#[from] OpenError),
    /// A host function that could not be reset: it would show the guest what its last user left.
    #[error(transparent)]
    Reset(#[from] BackendError),
    /// A thread for its reset.
    #[error(transparent)]
    Thread(ThreadError),
    #[error(transparent)]
    Slice(#[from] SliceError),
    /// A device that only the start of a machine opens.
    #[error("cannot open the device: it is no virtio device")]
    NotVirtio,
    /// The plan was made without its server.
    #[error("the vfio-user server {} is not connected", socket.display())]
    NotConnected { socket: PathBuf },
}

impl Report for DeviceError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::DiskFile { source, .. } if source.kind() == io::ErrorKind::NotFound => Blame::Configuration
                .help("set \"path\" to a file that exists, or make one, for instance: truncate -s 1G FILE"),
            Self::DiskFile { .. } => Blame::Configuration
                .help("set \"path\" to a file that you may read and write, or set \"read_only\": true"),
            Self::DiskInUse { .. } => {
                Blame::Configuration.help("give each its own disk, or share it with \"read_only\": true")
            }
            Self::Disk { source, .. } => source.remedy(),
            Self::Tap(error) => error.remedy(),
            Self::Vhost(error) => error.remedy(),
            Self::Socket(error) => error.remedy(),
            Self::Vsock(error) => error.remedy(),
            Self::VhostFile { path, source } if source.kind() == io::ErrorKind::PermissionDenied => {
                Blame::Host.help(format!("join the group that {path} belongs to (ls -l {path}), or be root"))
            }
            Self::VhostFile { path, .. } => Blame::Host.help(match *path {
                vhost::NET => "load it with modprobe vhost_net, or set \"vhost\": false",
                _ => "load it with modprobe vhost_vsock, or set \"socket\" to a path",
            }),
            Self::Assigned(error) => opening(error),
            Self::Thread(_) => Blame::Host.help(ThreadError::HELP),
            Self::Reset(_) => Blame::Host.help("look for its errors: dmesg, lspci -vv, or its server's log"),
            Self::Slice(error) => error.remedy(),
            Self::NotVirtio | Self::NotConnected { .. } => Blame::Internal.into(),
        }
    }
}

/// Opens what each device of `plan` needs, in the plan's order; what is `kept` is not opened again.
pub(super) fn open(
    plan: &Plan,
    spaces: &AddressSpaces,
    slices: &Slices<'_>,
    kept: Option<&KeptFiles>,
) -> Result<Vec<OpenedDevice>, DeviceFailure> {
    let mut all = Vec::new();
    for function in &plan.pci {
        let FunctionRole::Endpoint { device, .. } = &function.role else { continue };
        let kept = kept.and_then(|kept| kept.part(&KeptFiles::device(&device.id)));
        let opened = open_one(device, spaces, slices, kept);
        let opened = opened.map_err(|source| DeviceFailure { id: device.id.clone(), source })?;
        all.push(OpenedDevice { device: device.clone(), opened });
    }
    Ok(all)
}

fn open_one(
    device: &Device,
    spaces: &AddressSpaces,
    slices: &Slices<'_>,
    kept: Option<&KeptPart>,
) -> Result<OpenDevice, DeviceError> {
    match &device.kind {
        DeviceKind::Vfio { function, .. } => Ok(OpenDevice::Assigned(spaces.function(*function)?)),
        DeviceKind::VfioUser { socket } => {
            let missing = || DeviceError::NotConnected { socket: socket.clone() };
            spaces.served(socket).map(OpenDevice::Assigned).ok_or_else(missing)
        }
        DeviceKind::Egm { node, .. } => Ok(OpenDevice::Slice(slices.open(&device.id, *node)?)),
        virtio => open_virtio(virtio, kept),
    }
}

/// Opens what a virtio device of the kind `kind` needs, unless it is `kept`.
///
/// # Errors
/// [`DeviceError`]; for other kinds [`DeviceError::NotVirtio`].
pub(crate) fn open_virtio(kind: &DeviceKind, kept: Option<&KeptPart>) -> Result<OpenDevice, DeviceError> {
    match kind {
        DeviceKind::VirtioBlk { path, read_only } => disk(path, *read_only, kept).map(OpenDevice::Block),
        DeviceKind::VirtioNet { tap, queue_pairs, vhost, .. } => {
            let taps = match (tap, kept) {
                (_, Some(kept)) => return kept_net(kept, *queue_pairs),
                (Tap::Name(name), None) => tap::open(name, *queue_pairs)?,
                (Tap::Descriptors(numbers), None) => tap::adopt(numbers)?,
            };
            Ok(OpenDevice::Net { taps, backend: net_backend(*queue_pairs, *vhost)? })
        }
        DeviceKind::VirtioRng => Ok(OpenDevice::Rng),
        DeviceKind::VirtioVsock { cid, socket } => {
            Ok(OpenDevice::Vsock(Box::new(Vsock::new(*cid, vsock_backend(socket.as_deref(), kept)?)?)))
        }
        DeviceKind::Vfio { .. } | DeviceKind::VfioUser { .. } | DeviceKind::Egm { .. } => {
            Err(DeviceError::NotVirtio)
        }
    }
}

/// Opens a file or block device as a disk.
pub(crate) fn open_disk(path: &Path, write: bool) -> Result<File, DeviceError> {
    let unfit = |source| DeviceError::Disk { path: path.to_owned(), source };
    let opened = super::open_at_once(path, write);
    let (file, kind) = opened.map_err(|source| DeviceError::DiskFile { path: path.to_owned(), source })?;
    if Disk::can_be(kind) { Ok(file) } else { Err(unfit(DiskError::Kind)) }
}

/// The lock is the kernel's and goes with the descriptor: no stale lock file after a crash. A kept file has it.
fn disk(path: &Path, read_only: bool, kept: Option<&KeptPart>) -> Result<Disk, DeviceError> {
    let error = |source| DeviceError::DiskFile { path: path.to_owned(), source };
    let unfit = |source| DeviceError::Disk { path: path.to_owned(), source };
    if let Some(kept) = kept {
        return Disk::kept(kept.first().map_err(error)?, read_only, kept.sectors()).map_err(unfit);
    }
    // The kind is checked before locking: a lock on what is no disk may affect others.
    let file = open_disk(path, !read_only)?;
    let locked = if read_only { file.try_lock_shared() } else { file.try_lock() };
    match locked {
        Ok(()) => {}
        _ if egm_address::fault!("disk-lock-ignored") => {}
        Err(TryLockError::WouldBlock) => return Err(DeviceError::DiskInUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => return Err(error(source)),
    }
    Disk::new(file, read_only).map_err(unfit)
}

fn net_backend(queue_pairs: u16, vhost: Option<bool>) -> Result<Backend, DeviceError> {
    if vhost == Some(false) {
        return Ok(Backend::Userspace);
    }
    match (0..queue_pairs).map(|_| vhost::open(vhost::NET)).collect::<io::Result<Vec<File>>>() {
        Ok(files) => Ok(Backend::vhost(files)?),
        Err(source) if vhost == Some(true) => Err(DeviceError::VhostFile { path: vhost::NET, source }),
        Err(_) => Ok(Backend::Userspace), // not asked for: the host may not have it
    }
}

/// The network device of `kept`: its taps, and workers of vhost-net if it used that. This process has every feature of vhost, and
/// vhost may lack some: a guest that began without vhost stays without it, and one that began with it can go on without it.
fn kept_net(kept: &KeptPart, queue_pairs: u16) -> Result<OpenDevice, DeviceError> {
    let taps = tap::adopt(&kept.files().iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>())?;
    let backend = net_backend(queue_pairs, Some(kept.uses_vhost())).unwrap_or_else(|error| {
        tracing::warn!("{}; egm-vmm serve serves the queues itself", Chain(&error));
        Backend::Userspace
    });
    Ok(OpenDevice::Net { taps, backend })
}

fn vsock_backend(socket: Option<&Path>, kept: Option<&KeptPart>) -> Result<vsock::Backend, DeviceError> {
    match (socket, kept) {
        (Some(path), Some(kept)) => Ok(vsock::Backend::Userspace(HostSockets::adopt(path, kept)?)),
        (Some(path), None) => Ok(vsock::Backend::Userspace(HostSockets::bind(path)?)),
        (None, _) => {
            let file = vhost::open(vhost::VSOCK);
            let file = file.map_err(|source| DeviceError::VhostFile { path: vhost::VSOCK, source })?;
            Ok(vsock::Backend::vhost(file).map_err(VsockError::from)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writable_disk_belongs_to_one_machine_and_a_read_only_one_to_many() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let first = disk(file.path(), true, None).unwrap();
        let second = disk(file.path(), true, None).unwrap();
        assert!(matches!(disk(file.path(), false, None), Err(DeviceError::DiskInUse { .. })));
        drop((first, second));
        let writer = disk(file.path(), false, None).unwrap();
        assert!(matches!(disk(file.path(), true, None), Err(DeviceError::DiskInUse { .. })));
        drop(writer);
    }

    #[test]
    fn a_disk_that_is_missing_or_too_small_is_the_configurations_fault() {
        let missing = disk(Path::new("/nonexistent/disk"), false, None).unwrap_err();
        assert_eq!(missing.blame(), Blame::Configuration);
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(511).unwrap();
        let small = disk(file.path(), false, None).unwrap_err();
        assert!(matches!(&small, DeviceError::Disk { source: DiskError::TooSmall { bytes: 511, .. }, .. }));
        assert_eq!(small.blame(), Blame::Configuration);
    }

    /// Hangs when opening one waits.
    #[test]
    fn what_is_neither_file_nor_block_device_is_refused_by_its_kind() {
        let folder = tempfile::tempdir().unwrap();
        let (pipe, socket) = (folder.path().join("pipe"), folder.path().join("socket"));
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [&pipe, &socket, folder.path(), Path::new("/dev/zero")] {
            for read_only in [true, false] {
                let error = disk(path, read_only, None).unwrap_err();
                let is_kind = matches!(error, DeviceError::Disk { source: DiskError::Kind, .. });
                assert!(is_kind, "{}: {error:?}", path.display());
            }
            assert!(crate::resources::open_file("boot.kernel", path).is_err());
        }
    }

    #[test]
    fn a_disk_is_not_left_in_a_mode_in_which_nothing_waits() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(512).unwrap();
        let (opened, _) = crate::resources::open_at_once(file.path(), true).unwrap();
        let flags = rustix::fs::fcntl_getfl(&opened).unwrap();
        assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
    }
}
