//! Folders of file systems that map their medium directly (fsdax): each slice is a file there.
//!
//! Only ext4 keeps a file as it is against holders of a writable descriptor: an immutable file refuses truncation and holes
//! there, and its DAX mappings stay writable. xfs and ext2 do not look at that flag of an open file. The file system must have a
//! journal: without one, its lists of free blocks can be stale after a loss of power, and two files get the same blocks.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use egm_address::{ByteSize, align_down};
use rustix::fs::{Mode, OFlags, fstatvfs, major, minor};

use crate::region::host_file::FsdaxFolder;
use crate::region::read::{node, text};
use crate::region::refused::{RegionRefusal, printable};
use crate::region::slice_file::SliceFile;
use crate::region::{Region, RegionKind, is_name};
use crate::retired::Retired;
use crate::trusted;

/// Alignment of slices: the largest page that a file's blocks are aligned for.
const PAGE: u64 = 2 << 20;

/// Attempts at a size during grants and returns of slices.
const TRIES: u32 = 16;

/// One of so many bytes stays with the file system, for the blocks that list blocks.
const SPARE: u64 = 1024;

/// The region that `wanted` names on the host below `root`. Its size is what the file system has free and what slices have.
///
/// # Errors
/// The first rule that it breaks.
pub(super) fn region(root: &Path, wanted: &FsdaxFolder) -> Result<Region, RegionRefusal> {
    if !is_name(&wanted.name) {
        return Err(RegionRefusal::Name);
    }
    let path = root.join(wanted.folder.strip_prefix("/").unwrap_or(&wanted.folder));
    let read = |source: io::Error| RegionRefusal::Read { path: path.clone(), source };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(&path, flags, Mode::empty()).map_err(|error| read(error.into()))?;
    let folder = fs::File::from(folder);
    let metadata = folder.metadata().map_err(read)?;
    let (uid, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if trusted::is_this_host(root) && (uid != 0 || mode & 0o077 != 0) {
        return Err(RegionRefusal::NotRootOwned { path, uid, mode });
    }
    let device = (major(metadata.dev()), minor(metadata.dev()));
    let number = format!("{}:{}", device.0, device.1);
    let mounts = root.join("proc/self/mountinfo");
    let mounts = text(&mounts).map_err(|source| RegionRefusal::Read { path: mounts, source })?;
    match mount(&mounts, &number) {
        Some(mount) if mount.kind == "ext4" && mount.is_dax => {}
        Some(Mount { kind, .. }) => {
            let found = if kind == "ext4" { "ext4 without \"dax\"".to_owned() } else { printable(kind) };
            return Err(RegionRefusal::NotFsdax { path, found });
        }
        None => return Err(RegionRefusal::NotFsdax { path, found: "an unknown file system".to_owned() }),
    }
    let disk = root.join("sys/dev/block").join(&number);
    if let Some(device) = without_journal(root, &disk)? {
        return Err(RegionRefusal::NoJournal { path, device });
    }
    let bytes = bytes(&folder, &path).map_err(read)?;
    let SliceFiles { end, .. } = named(&path);
    let size = align_down(bytes.saturating_sub(bytes / SPARE), PAGE).max(align_down(end, PAGE));
    if size == 0 {
        return Err(RegionRefusal::NoSpan { base: 0, size: bytes });
    }
    Ok(Region {
        name: wanted.name.clone(),
        kind: RegionKind::Fsdax { folder: wanted.folder.clone(), device },
        node: node_of(&disk),
        size: ByteSize::new(size),
        page_size: ByteSize::new(PAGE),
        base: None,
        functions: Vec::new(),
        retired: Retired::default(),
    })
}

/// A line of `/proc/self/mountinfo`, proc_pid_mountinfo(5).
struct Mount<'a> {
    kind: &'a str,
    is_dax: bool,
}

/// The mount of device `number` in `mounts`. All mounts of one device have its options.
fn mount<'a>(mounts: &'a str, number: &str) -> Option<Mount<'a>> {
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(number))?;
    let mut fields = line.split_once(" - ")?.1.split(' ');
    let (kind, options) = (fields.next()?, fields.nth(1)?);
    let is_dax = options.split(',').any(|option| option == "dax" || option == "dax=always");
    Some(Mount { kind, is_dax })
}

/// Bytes of the file system of `folder`, which lies at `path`, that are free or slices'. A slice that is granted or returned in
/// the meantime would count twice or not at all.
fn bytes(folder: &fs::File, path: &Path) -> io::Result<u64> {
    let free = || -> io::Result<u64> {
        let space = fstatvfs(folder)?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    };
    let (mut before, mut tries) = (free()?, TRIES);
    loop {
        let SliceFiles { blocks, .. } = named(path);
        let after = free()?;
        tries = tries.saturating_sub(1);
        if after == before || tries == 0 {
            return Ok(after.min(before).saturating_add(blocks));
        }
        before = after;
    }
}

/// The files of slices in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SliceFiles {
    /// Bytes that they and the folder have on the medium. Those of files with bad pages are not counted.
    blocks: u64,
    /// End of the last, counted in the region.
    end: u64,
}

/// Root sees the files in `folder`; other users see only what is free.
fn named(folder: &Path) -> SliceFiles {
    let blocks = |metadata: fs::Metadata| metadata.blocks().saturating_mul(512);
    let of_folder = folder.metadata().map_or(0, blocks);
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files =
        entries.filter_map(|entry| Some((SliceFile::parse(&entry.file_name())?, entry.metadata().ok()?)));
    files.fold(SliceFiles { blocks: of_folder, end: 0 }, |sum, (file, metadata)| SliceFiles {
        blocks: sum.blocks.saturating_add(blocks(metadata)),
        end: sum.end.max(file.span.end().get()),
    })
}

/// The name of the block device with the folder `disk` in sysfs, if its mounted ext4 uses no journal: the kernel shows
/// the process id of a journal's thread, and `<none>` without one.
fn without_journal(root: &Path, disk: &Path) -> Result<Option<String>, RegionRefusal> {
    let read = |path: PathBuf| move |source| RegionRefusal::Read { path, source };
    let disk = fs::canonicalize(disk).map_err(read(disk.to_owned()))?;
    let name = disk.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let thread = root.join("sys/fs/ext4").join(&name).join("journal_task");
    let thread = text(&thread).map_err(read(thread))?;
    Ok(thread.trim().parse::<u32>().is_err().then_some(name))
}

/// The node of the block device with the folder `disk` in sysfs, or of the device that it is a partition of.
fn node_of(disk: &Path) -> Option<u32> {
    ["device", "../device"].into_iter().find_map(|device| {
        let device = disk.join(device);
        node(&device.join("target_node")).or_else(|| node(&device.join("numa_node")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The region or the refusal of a folder below a root with this `mountinfo`, `@` for the folder's device.
    fn found(mountinfo: &str) -> Result<Region, String> {
        found_with(mountinfo, Some("571\n"))
    }

    /// [`found`] on a device with this `journal_task`.
    fn found_with(mountinfo: &str, journal: Option<&str>) -> Result<Region, String> {
        let root = tempfile::tempdir().unwrap();
        let (folder, proc) = (root.path().join("mnt/egm"), root.path().join("proc/self"));
        for folder in [&folder, &proc] {
            fs::create_dir_all(folder).unwrap();
        }
        let number = folder.metadata().unwrap().dev();
        let number = format!("{}:{}", major(number), minor(number));
        fs::write(proc.join("mountinfo"), mountinfo.replace('@', &number)).unwrap();
        let (disks, ext4) = (root.path().join("sys/dev/block"), root.path().join("sys/fs/ext4/pmem0"));
        let device = root.path().join("sys/devices/block/pmem0/device");
        for folder in [&disks, &ext4, &device] {
            fs::create_dir_all(folder).unwrap();
        }
        std::os::unix::fs::symlink("../../devices/block/pmem0", disks.join(number)).unwrap();
        if let Some(journal) = journal {
            fs::write(ext4.join("journal_task"), journal).unwrap();
        }
        fs::write(device.join("target_node"), "-1\n").unwrap();
        fs::write(device.join("numa_node"), "1\n").unwrap();
        let wanted = FsdaxFolder { name: "pmem".to_owned(), folder: "/mnt/egm".into() };
        region(root.path(), &wanted).map_err(|reason| reason.to_string())
    }

    #[test]
    fn a_folder_on_ext4_with_dax_is_a_region_of_its_free_bytes() {
        let text = "21 1 0:5 / /dev rw - devtmpfs dev rw\n27 2 @ / /mnt rw,relatime shared:1 - ext4 /dev/pmem0 rw,dax=always\n";
        let region = found(text).unwrap();
        assert_eq!((region.kind.word(), region.node, region.base), ("fsdax", Some(1), None));
        assert!(region.size.get() > 0 && region.size.get().is_multiple_of(PAGE));
        assert!(!region.kind.shares_file() && region.kind.keeps_bytes());
        assert!(found("27 2 @ / /mnt rw - ext4 /dev/pmem0 rw,dax\n").is_ok());
    }

    #[test]
    fn a_region_ends_behind_its_last_file_and_counts_no_file_with_a_bad_page() {
        let folder = tempfile::tempdir().unwrap();
        let empty = named(folder.path());
        assert_eq!(empty.end, 0);
        for name in ["0000000000400000-0000000000200000", "0000000000000000-0000000000200000"] {
            fs::write(folder.path().join(name), vec![1; 1 << 20]).unwrap();
        }
        let two = named(folder.path());
        assert_eq!((two.end, two.blocks - empty.blocks), (6 * MIB, 2 * MIB));
        let bad = "bad-0000000000600000-0000000000200000-c";
        for other in [bad, "other", "ffffffffffffffff-ffffffffffffffff"] {
            fs::write(folder.path().join(other), vec![1; 1 << 20]).unwrap();
        }
        assert_eq!(named(folder.path()), two);
    }

    #[test]
    fn a_file_system_that_may_share_blocks_after_a_loss_of_power_is_refused_with_the_remedy() {
        let text = "27 2 @ / /mnt rw - ext4 /dev/pmem0 rw,dax=always\n";
        assert!(found_with(text, Some("0\n")).is_ok(), "a thread of another process namespace");
        let why = found_with(text, Some("<none>")).unwrap_err();
        assert!(why.contains("without a journal") && why.contains("tune2fs -j /dev/pmem0"), "{why}");
        let why = found_with(text, None).unwrap_err();
        assert!(why.starts_with("cannot read ") && why.contains("journal_task"), "{why}");
    }

    #[test]
    fn other_file_systems_and_mounts_are_refused_by_name() {
        for (text, what) in [
            ("27 2 @ / /mnt rw - ext4 /dev/vda rw,discard\n", "ext4 without \"dax\""),
            ("27 2 @ / /mnt rw,dax - ext4 /dev/vda rw\n", "ext4 without \"dax\""),
            ("27 2 @ / /mnt rw - ext4 /dev/vda rw,dax=never\n", "ext4 without \"dax\""),
            ("27 2 @ / /mnt rw - xfs /dev/pmem0 rw,dax=always\n", "lies on xfs"),
            ("27 2 9:99 / /mnt rw - ext4 /dev/pmem0 rw,dax=always\n", "an unknown file system"),
            ("27 2 @\n", "an unknown file system"),
        ] {
            let why = found(text).unwrap_err();
            assert!(why.contains(what) && why.contains("mount -o dax"), "{why}");
        }
    }
}
