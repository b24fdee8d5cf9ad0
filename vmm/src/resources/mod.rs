//! Opens every descriptor that the plan names: the last stage that can fail with "not permitted".
//!
//! Only slices, GPUs and connections to vfio-user servers are reserved before it ([`crate::reserve`]); nothing after it
//! makes decisions.

mod assigned;
mod devices;
mod reset;
mod slices;

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::thread::{self, Scope, ScopedJoinHandle};

use rustix::fs::{Mode, OFlags};

use self::assigned::AroundPrefault;
pub use self::assigned::{AddressSpaces, AssignedError};
pub(crate) use self::assigned::{pieces, share};
use self::devices::DeviceFailure;
pub use self::devices::{DeviceError, OpenDevice, OpenedDevice};
pub(crate) use self::devices::{open_disk, open_virtio};
pub(crate) use self::reset::left_behind;
use self::slices::Slices;
pub use self::slices::{OpenSlice, SliceError};
pub(crate) use self::slices::{SliceParts, open_slice};
use crate::arch::boot::BootFiles;
use crate::config::{Boot, OnReset};
use crate::console::{Console, ConsoleError};
use crate::error::{Blame, Remedy, Report};
use crate::facts::Facts;
use crate::kept::{KeptFiles, KeptPart};
use crate::kvm::{Hypervisor, KvmError, Vm};
use crate::memory::{Beginning, GuestRam, MemoryError, Present, Progress};
use crate::plan::Plan;
use crate::reserve::{Leases, Servers};

/// Open resources that a machine is built from.
pub struct Resources {
    /// `/dev/kvm`, open and checked for required capabilities.
    pub hypervisor: Hypervisor,
    /// The machine as the kernel has it, empty: host functions are opened for it.
    pub vm: Vm,
    /// Guest RAM, mapped for devices and KVM.
    pub ram: GuestRam,
    /// Kernel and initramfs, open for reading; `None` for a machine that is restored and does not start its kernel again.
    pub boot: Option<BootFiles>,
    /// Where the serial port's output goes, and its input comes from.
    pub console: Console,
    /// Resources of each device, in the order of the plan's endpoints.
    pub devices: Vec<OpenedDevice>,
    /// I/O address spaces of host functions.
    pub spaces: AddressSpaces,
    /// Guest memory that this program made present; `None` for kept memory, and without a prefault.
    pub present: Option<Present>,
    /// Slices, for changes to them while the guest runs.
    pub leases: Leases,
    /// Whether memory has the guest already.
    pub is_restored: bool,
}

/// Why something could not be opened.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum ResourceError {
    /// A file that the configuration names.
    #[error("cannot open {key} {}", path.display())]
    File {
        /// Key of the configuration.
        key: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot use KVM")]
    Kvm(#[from] KvmError),
    #[error("cannot provide the guest's memory")]
    Memory(#[from] MemoryError),
    #[error("cannot provide the guest's console")]
    Console(#[from] ConsoleError),
    /// A resource of host functions.
    #[error("cannot assign host functions to the guest")]
    Assigned(#[from] AssignedError),
    /// A thread to prepare the machine.
    #[error("cannot map the guest's memory for its devices")]
    Thread(#[from] ThreadError),
    /// A resource of a device.
    #[error("cannot provide device \"{id}\"")]
    Device {
        id: String,
        #[source]
        source: DeviceError,
    },
}

impl From<DeviceFailure> for ResourceError {
    fn from(DeviceFailure { id, source }: DeviceFailure) -> Self {
        Self::Device { id, source }
    }
}

/// The host gave no thread.
#[derive(Debug, thiserror::Error)]
#[error("cannot start a thread")]
pub struct ThreadError(#[from] io::Error);

impl ThreadError {
    pub(crate) const HELP: &str =
        "raise the limits of threads: ulimit -u 65536, and TasksMax= if a systemd unit starts it";
}

impl Report for ResourceError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::File { key, .. } => Blame::Configuration
                .help(format!("set \"{key}\" to a regular file that exists and that you may read")),
            Self::Console(error) => error.remedy(),
            Self::Kvm(error) => error.remedy(),
            Self::Memory(error) => error.remedy(),
            Self::Assigned(error) => error.remedy(),
            Self::Thread(_) => Blame::Host.help(ThreadError::HELP),
            Self::Device { source, .. } => source.remedy(),
        }
    }
}

impl Resources {
    /// Opens what `plan` names on the host of `facts`, with its slices from `leases` and its vfio-user servers from
    /// `servers`. `progress` is called as memory is prefaulted. Cheap things that are often wrong come first, so that a
    /// wrong path is reported before a terabyte is touched.
    ///
    /// # Errors
    /// [`ResourceError`]; everything opened until then is closed.
    pub fn open(
        plan: &Plan,
        facts: &Facts,
        leases: &Leases,
        servers: Servers,
        progress: Progress<'_>,
    ) -> Result<Self, ResourceError> {
        Self::open_with(plan, facts, leases, servers, Beginning::Kernel, progress)
    }

    /// As [`Resources::open`], for a machine that begins with `beginning`. Where that is no kernel, it is opened for a later
    /// reset only.
    ///
    /// # Errors
    /// As [`Resources::open`].
    pub(crate) fn open_with(
        plan: &Plan,
        facts: &Facts,
        leases: &Leases,
        servers: Servers,
        beginning: Beginning<'_>,
        progress: Progress<'_>,
    ) -> Result<Self, ResourceError> {
        let (kept, is_restored) = (beginning.kept(), !matches!(beginning, Beginning::Kernel));
        let needs_boot = !is_restored || plan.on_reset == OnReset::Reboot;
        let boot = || match kept.and_then(|kept| kept.part(KeptFiles::BOOT)) {
            Some(kept) => kept_boot(&plan.boot, kept),
            None => open_boot(&plan.boot),
        };
        let boot = needs_boot.then(boot).transpose()?;
        let hypervisor = Hypervisor::open()?;
        let vm = hypervisor.create_vm(plan.address_bits)?;
        let console = Console::open_with(&plan.console, kept.and_then(|kept| kept.part(KeptFiles::CONSOLE)))?;
        let spaces = AddressSpaces::open(plan, &vm, servers)?;
        let slices = Slices { plan, host: facts, leases, vm: &vm };
        let devices = devices::open(plan, &spaces, &slices, kept)?;
        let ram = GuestRam::open(plan, leases, &vm, beginning)?;
        let AroundPrefault { early, late } = spaces.maps(plan, &ram)?.around_prefault();
        let prefault = || ram.prefault(plan, spaces.pin(), |backing| backing.near(facts), progress);
        // Kept memory is present, but not yet in this program's page tables: only devices of the host need it there.
        if !spaces.is_empty() {
            at_once(|| early.make(facts), || reset::reset(&devices), prefault)?;
            late.make(facts)?;
        } else if kept.is_none() {
            prefault()?;
        }
        let present = if kept.is_none() { ram.present(plan, spaces.pin()) } else { None };
        let leases = leases.clone();
        Ok(Self { present, hypervisor, vm, ram, boot, console, devices, spaces, leases, is_restored })
    }
}

/// Prefaults memory with many threads, while the IOMMU maps it and the devices reset themselves. Memory that devices
/// reach stays in place, so all of it is made present.
fn at_once(
    map: impl FnOnce() -> Result<(), AssignedError> + Send,
    reset: impl FnOnce() -> Result<(), DeviceFailure> + Send,
    prefault: impl FnOnce() -> Result<(), MemoryError>,
) -> Result<(), ResourceError> {
    thread::scope(|scope| {
        let mapping = spawn(scope, map)?;
        let resetting = spawn(scope, reset)?;
        prefault()?;
        joined(mapping)?;
        Ok(joined(resetting)?)
    })
}

/// Starts a thread for slow work of the host.
fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, ThreadError> {
    Ok(thread::Builder::new().spawn_scoped(scope, work)?)
}

fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Opens the regular file that the configuration has at `key`, for reading.
pub(crate) fn open_file(key: &'static str, path: &Path) -> Result<File, ResourceError> {
    let error = |source| ResourceError::File { key, path: path.to_owned(), source };
    let not_regular = || error(io::Error::other("not a regular file"));
    match open_at_once(path, false) {
        Ok((file, kind)) if kind.is_file() => Ok(file),
        Ok((_, kind)) if kind.is_dir() => Err(error(io::ErrorKind::IsADirectory.into())),
        Ok(_) => Err(not_regular()),
        Err(source) => Err(error(source)),
    }
}

/// Opens `path` if it is a regular file or a block device. Of anything else this is only a reference (`O_PATH`): to open a
/// watchdog, a VFIO group or a pipe already has effects. No process can exchange the file in between.
fn open_at_once(path: &Path, write: bool) -> io::Result<(File, FileType)> {
    let reference = File::from(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    let kind = reference.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Ok((reference, kind));
    }
    let again = format!("/proc/self/fd/{}", reference.as_raw_fd());
    Ok((OpenOptions::new().read(true).write(write).open(again)?, kind))
}

/// Opens the kernel and the initramfs once, before slices are scrubbed for a machine that cannot boot.
///
/// # Errors
/// [`ResourceError::File`].
pub(crate) fn check_boot(boot: &Boot) -> Result<(), ResourceError> {
    open_boot(boot).map(drop)
}

fn open_boot(boot: &Boot) -> Result<BootFiles, ResourceError> {
    let kernel = open_file("boot.kernel", &boot.kernel)?;
    let initramfs = boot.initramfs.as_deref().map(|path| open_file("boot.initramfs", path)).transpose()?;
    Ok(BootFiles { kernel, initramfs })
}

/// The same of the execution before this one.
fn kept_boot(boot: &Boot, kept: &KeptPart) -> Result<BootFiles, ResourceError> {
    let error = |source| ResourceError::File { key: "boot.kernel", path: boot.kernel.clone(), source };
    let mut files = kept.duplicates().map_err(error)?.into_iter();
    let kernel = files.next().ok_or_else(|| error(io::ErrorKind::NotFound.into()))?;
    Ok(BootFiles { kernel, initramfs: files.next() })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_neither_file_nor_block_device_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        let (_reference, kind) = open_at_once(&pipe, false).unwrap();
        assert!(!kind.is_file() && !kind.is_block_device());
        // A writer that does not wait finds no reader.
        let writer = rustix::fs::open(&pipe, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty());
        assert_eq!(writer.unwrap_err(), rustix::io::Errno::NXIO);
    }

    fn meet<E>(all: &Barrier) -> Result<(), E> {
        all.wait();
        Ok(())
    }

    #[test]
    fn memory_is_filled_while_it_is_mapped_and_devices_reset() {
        let (sender, done) = mpsc::channel();
        thread::spawn(move || {
            let all = Barrier::new(3); // calls made one after another would wait for ever
            sender.send(at_once(|| meet(&all), || meet(&all), || meet(&all)).is_ok()).unwrap();
        });
        assert_eq!(done.recv_timeout(Duration::from_secs(60)), Ok(true));
    }
}
