//! A window of a device file: EGM character device, `/dev/mem`, device-DAX.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use super::error::{BackingError, Holder};
use super::fsdax::rules;
use super::{Backing, OpenWait};
use crate::mapping::base_page;
use crate::region::{Region, RegionKind, Slice};

/// Interval of progress reports to a waiting caller.
const TICK: Duration = Duration::from_millis(200);

/// Holders that an error names at most.
const MAX_HOLDERS: usize = 4;

/// Bytes of a file: the slice of a region that is a device file, or another's backing once more.
#[derive(Debug)]
pub(crate) struct Window {
    file: File,
    offset: u64,
    size: u64,
    page_size: u64,
    invisible: bool,
    /// Whether the bytes outlive power.
    has_medium: bool,
}

impl Window {
    /// `slice`, which was checked, of the device `file`, which is checked here.
    pub(super) fn new(region: &Region, slice: &Slice, file: File) -> Result<Self, BackingError> {
        check_kind(region, &file, Path::new("/sys"))?;
        let offset = match region.kind {
            RegionKind::Reserved { .. } => {
                let no_base = || BackingError::NoBase { region: region.name.clone() };
                let base = region.base.ok_or_else(no_base)?;
                let shift = if egm_address::fault!("slice-off-by-64k") { 64 << 10 } else { 0 };
                base.checked_add(slice.offset).ok_or_else(no_base)?.get().saturating_add(shift)
            }
            _ if region.kind.has_slice_devices() || region.kind.has_slice_files() => 0,
            _ => slice.offset,
        };
        // Where the blocks of a file lie is the file system's choice.
        let page_size = if region.kind.has_slice_files() { base_page() } else { region.page_size.get() };
        let (size, invisible) = (slice.size.get(), region.kind.is_invisible());
        let has_medium = region.kind.has_slice_files();
        Ok(Self { file, offset, size, page_size, invisible, has_medium })
    }

    /// The bytes of `backing` by a duplicate descriptor, in pages of `page_size`.
    ///
    /// # Errors
    /// The kernel's, for the descriptor.
    pub(crate) fn again(backing: &dyn Backing, page_size: u64) -> io::Result<Self> {
        let (file, invisible) = (backing.file().try_clone()?, backing.is_invisible());
        let (offset, size) = (backing.offset(), backing.size());
        Ok(Self { file, offset, size, page_size, invisible, has_medium: backing.outlives_power() })
    }
}

impl Backing for Window {
    fn file(&self) -> &File {
        &self.file
    }
    fn offset(&self) -> u64 {
        self.offset
    }
    fn size(&self) -> u64 {
        self.size
    }
    fn page_size(&self) -> u64 {
        self.page_size
    }
    fn is_invisible(&self) -> bool {
        self.invisible
    }
    fn outlives_power(&self) -> bool {
        self.has_medium
    }
}

/// A device that was found, and is not open: opening a pipe, a tape or a file of FUSE in its place would have effects.
#[derive(Debug)]
pub(super) struct DeviceNode(File);

impl DeviceNode {
    /// The device file at `device`, of the kind that `region` is made of; a link is not followed.
    ///
    /// # Errors
    /// [`BackingError`]: it is not there, or something else.
    pub(super) fn find(region: &Region, device: &Path) -> Result<Self, BackingError> {
        let node = Self::at(device).map_err(|source| BackingError::open(region, device, source))?;
        check_kind(region, &node.0, Path::new("/sys"))?;
        Ok(node)
    }

    /// The file at `path`; a link is not followed.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let is_opened = egm_address::fault!("device-opened-before-its-check");
        let access = if is_opened { OFlags::RDWR | OFlags::NONBLOCK } else { OFlags::PATH };
        let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::open(path, flags, Mode::empty())?.into()))
    }

    pub(super) fn number(&self) -> io::Result<u64> {
        self.0.metadata().map(|metadata| metadata.rdev())
    }

    /// Opens the very file that was found, without `O_SYNC`, which would make `/dev/mem` uncached.
    pub(super) fn open(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

/// Whether `file` is what a region of this kind is made of, as the kernel identifies it, and not by its name.
fn check_kind(region: &Region, file: &File, sys: &Path) -> Result<(), BackingError> {
    if region.kind.has_slice_files() {
        return rules::check(region, file);
    }
    let wanted = match region.kind {
        RegionKind::Egm { .. } => "a character device of class egm",
        RegionKind::Devdax { .. } => "a character device of subsystem dax",
        _ => "the character device 1:1 (/dev/mem)",
    };
    let opened = Path::new("/proc/self/fd");
    let found = identify(file, sys).map_err(|source| BackingError::open(region, opened, source))?;
    let is_it = match (&region.kind, &found) {
        (RegionKind::Egm { .. }, FileKind::Device { class, .. }) => class == "egm",
        (RegionKind::Devdax { .. }, FileKind::Device { class, .. }) => class == "dax",
        (_, FileKind::Device { major: 1, minor: 1, .. }) => true,
        _ => false,
    };
    if is_it {
        return Ok(());
    }
    Err(BackingError::NotTheDevice { region: region.name.clone(), found: found.describe(), wanted })
}

enum FileKind {
    Device { major: u32, minor: u32, class: String },
    Other,
}

impl FileKind {
    fn describe(&self) -> String {
        match self {
            Self::Device { major, minor, class } => {
                format!("character device {major}:{minor} of subsystem \"{class}\"")
            }
            Self::Other => "no character device".to_owned(),
        }
    }
}

fn identify(file: &File, sys: &Path) -> io::Result<FileKind> {
    let metadata = file.metadata()?;
    if !metadata.file_type().is_char_device() {
        return Ok(FileKind::Other);
    }
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    let link = fs::read_link(sys.join(format!("dev/char/{major}:{minor}/subsystem")));
    let class = link.ok().and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
    Ok(FileKind::Device { major, minor, class: class.unwrap_or_default() })
}

/// A wait that ended without an open file.
#[derive(Debug)]
pub(super) enum OpenFailure {
    Cancelled(PathBuf),
    Refused(PathBuf, io::Error),
}

impl OpenFailure {
    pub(super) fn of(self, region: &Region) -> BackingError {
        let region = region.name.clone();
        match self {
            Self::Cancelled(device) => BackingError::Cancelled { region, device },
            Self::Refused(device, source) => match source.kind() {
                io::ErrorKind::ResourceBusy => {
                    let by = holders(&device, Path::new("/proc"));
                    BackingError::Busy { region, device, by }
                }
                io::ErrorKind::Interrupted => BackingError::Interrupted { region, device },
                _ => BackingError::Open { region, device, source },
            },
        }
    }
}

/// Runs `open` on a thread of its own, which outlives a caller that gives up: it then closes the file.
pub(super) fn wait_for(
    device: &Path,
    wait: &OpenWait<'_>,
    open: impl FnOnce() -> io::Result<File> + Send + 'static,
) -> Result<File, OpenFailure> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let refused = |source| OpenFailure::Refused(device.to_owned(), source);
    let begun = Instant::now();
    thread::Builder::new()
        .name("egm-open".into())
        .spawn(move || drop(sender.send(open())))
        .map_err(refused)?;
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(result) => return result.map_err(refused),
            Err(RecvTimeoutError::Disconnected) => return Err(refused(io::ErrorKind::Other.into())),
            Err(RecvTimeoutError::Timeout) if wait.cancel.load(Ordering::Relaxed) => {
                return Err(OpenFailure::Cancelled(device.to_owned()));
            }
            Err(RecvTimeoutError::Timeout) => (wait.progress)(begun.elapsed()),
        }
    }
}

/// Processes that have `device` open or, its descriptor closed, still mapped: an EGM device stays busy for both.
fn holders(device: &Path, proc: &Path) -> Vec<Holder> {
    let processes = fs::read_dir(proc).into_iter().flatten().flatten();
    let numbered =
        processes.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())));
    let holding = numbered.filter(|(_, process)| holds(process, device));
    holding
        .take(MAX_HOLDERS)
        .map(|(pid, process)| {
            let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
            Holder { pid, name: name.trim_end().escape_default().to_string() }
        })
        .collect()
}

fn holds(process: &Path, device: &Path) -> bool {
    let links = |folder| fs::read_dir(process.join(folder)).into_iter().flatten().flatten();
    links("fd").chain(links("map_files")).any(|link| fs::read_link(link.path()).is_ok_and(|to| to == device))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    use rustix::event::{PollFd, PollFlags, Timespec};
    use rustix::fs::{CWD, mknodat};

    use super::*;
    use crate::backing::tests::region;
    use crate::region::DaxFiles;

    const NULL: &str = "/dev/null";

    fn egm() -> RegionKind {
        RegionKind::Egm { device: NULL.into() }
    }

    #[test]
    fn a_device_is_known_by_what_the_kernel_states_of_it() {
        let sys = tempfile::tempdir().unwrap();
        let node = sys.path().join("dev/char/1:3"); // /dev/null
        fs::create_dir_all(&node).unwrap();
        let of_class = |class: &str| {
            let _ = fs::remove_file(node.join("subsystem"));
            symlink(format!("../../../class/{class}"), node.join("subsystem")).unwrap();
        };
        let node = DeviceNode::at(NULL.as_ref()).unwrap();
        let check = |kind| check_kind(&region(kind, 0x1000, 0x1000), &node.0, sys.path());
        of_class("egm");
        assert!(check(egm()).is_ok());
        assert!(check(RegionKind::Devdax { device: NULL.into(), files: DaxFiles::Static }).is_err());
        of_class("dax");
        assert!(check(egm()).is_err());
        assert!(check(RegionKind::Devdax { device: NULL.into(), files: DaxFiles::Static }).is_ok());
        let error = check(RegionKind::Reserved { device: NULL.into() }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot use the file of region \"r\": it is character device 1:3 of subsystem \"dax\", and must be \
             the character device 1:1 (/dev/mem)"
        );
    }

    #[test]
    fn what_is_no_device_is_refused_without_being_opened() {
        let folder = tempfile::tempdir().unwrap();
        let region = region(egm(), 0x1000, 0x1000);
        let at = |name: &str| folder.path().join(name);
        let missing = DeviceNode::find(&region, &at("egm4")).unwrap_err();
        assert!(matches!(missing, BackingError::Open { .. }) && !at("egm4").exists());
        fs::write(at("plain"), "x").unwrap();
        symlink(NULL, at("link")).unwrap();
        mknodat(CWD, at("pipe"), rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let reader = rustix::fs::open(at("pipe"), flags, Mode::empty()).unwrap();
        for name in ["plain", "link", "pipe"] {
            let refused = DeviceNode::find(&region, &at(name)).unwrap_err();
            assert!(matches!(refused, BackingError::NotTheDevice { .. }), "{name}: {refused}");
        }
        // A pipe hangs up once it had a writer.
        let mut poll = [PollFd::new(&reader, PollFlags::IN)];
        rustix::event::poll(&mut poll, Some(&Timespec::default())).unwrap();
        assert!(!poll[0].revents().contains(PollFlags::HUP), "the pipe was opened");
    }

    #[test]
    fn the_file_that_was_found_is_the_one_that_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node");
        fs::write(&path, "found").unwrap();
        let node = DeviceNode::at(&path).unwrap();
        fs::rename(&path, folder.path().join("other")).unwrap();
        fs::write(&path, "put there since").unwrap();
        assert_eq!(io::read_to_string(node.open().unwrap()).unwrap(), "found");
    }

    #[test]
    fn a_wait_for_a_slow_open_is_reported_and_can_be_given_up() {
        let (reports, cancel) = (AtomicUsize::new(0), AtomicBool::new(false));
        let (go, gone) = mpsc::channel::<()>();
        let wait = OpenWait {
            progress: &|_| {
                reports.fetch_add(1, Ordering::Relaxed);
                cancel.store(true, Ordering::Relaxed);
            },
            cancel: &cancel,
        };
        let result = wait_for(NULL.as_ref(), &wait, move || {
            let _ = gone.recv();
            File::open(NULL)
        });
        assert!(matches!(result, Err(OpenFailure::Cancelled(_))));
        assert_eq!(reports.into_inner(), 1);
        drop(go);
    }

    #[test]
    fn a_busy_device_is_named_with_its_user() {
        let folder = tempfile::tempdir().unwrap();
        let device = fs::canonicalize(folder.path()).unwrap().join("egm4");
        fs::write(&device, "x").unwrap();
        let held = File::open(&device).unwrap();
        let wait = OpenWait { progress: &|_| {}, cancel: &AtomicBool::new(false) };
        let busy = || Err(io::Error::from_raw_os_error(libc::EBUSY));
        let error = wait_for(&device, &wait, busy).unwrap_err().of(&region(egm(), 0x1000, 0x1000));
        match &error {
            BackingError::Busy { by, .. } => assert!(by.iter().any(|h| h.pid == std::process::id())),
            other => panic!("{other:?}"),
        }
        assert!(error.to_string().contains("it opens once, and it is open in"), "{error}");
        drop(held);
        assert!(holders(&device, Path::new("/proc")).is_empty());
    }

    #[test]
    fn a_fatal_signal_during_the_kernels_zeroing_is_named() {
        let wait = OpenWait { progress: &|_| {}, cancel: &AtomicBool::new(false) };
        let interrupted = || Err(io::Error::from_raw_os_error(libc::EINTR));
        let error = wait_for(NULL.as_ref(), &wait, interrupted).unwrap_err();
        assert!(matches!(error.of(&region(egm(), 1, 1)), BackingError::Interrupted { .. }));
    }
}
