use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;

use egm_address::Offset;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};

use super::*;
use crate::free::{self, Verdict};

const MIB: u64 = 1 << 20;

fn span(start: u64, size: u64) -> Span<InRegion> {
    Span::new(Offset::new(start), size).unwrap()
}

/// Number of the file system of `path`.
fn number(path: &Path) -> Dev {
    path.metadata().unwrap().dev()
}

/// A folder of a file system with immutable files, on whatever medium; or a line with the reason for none.
fn folder() -> Option<(tempfile::TempDir, SliceFolder)> {
    let folder = tempfile::tempdir().unwrap();
    if !rustix::process::geteuid().is_root() {
        println!("skipped: the folder of a region is root's");
        return None;
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let at = SliceFolder::at(folder.path(), number(folder.path())).unwrap();
    at.probe().unwrap();
    let probe = tempfile::tempfile_in(folder.path()).unwrap();
    if seal(&probe, 0).is_err() {
        println!("skipped: this file system has no immutable files");
        return None;
    }
    Some((folder, at))
}

/// As [`SliceFolder::create`], without direct mapping.
fn make(folder: &SliceFolder, span: Span<InRegion>) -> (SliceFile, File) {
    let file = SliceFile::of(span);
    let made = File::create_new(folder.path.join(&file.name)).unwrap();
    allocate(&made, span.size()).unwrap();
    let made = folder.open(&file, OFlags::RDWR).unwrap();
    seal(&made, span.size()).unwrap();
    (file, made)
}

#[test]
fn a_name_is_the_place_of_a_slice_and_other_names_are_no_slices() {
    let file = SliceFile::of(span(0x20_0000, 0x40_0000));
    assert_eq!(file.name, "0000000000200000-0000000000400000");
    assert_eq!(SliceFile::parse(OsStr::new(&file.name)), Some(file));
    for name in ["", "-", "200000-400000", "lost+found", "000000000020000G-0000000000400000"] {
        assert_eq!(SliceFile::parse(OsStr::new(name)), None, "{name}");
    }
    for wrong in ["0000000000200000-0000000000000000", "ffffffffffffffff-ffffffffffffffff"] {
        assert_eq!(SliceFile::parse(OsStr::new(wrong)), None, "{wrong}");
    }
}

#[test]
fn a_file_in_the_page_cache_is_no_slice_and_leaves_no_name() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: the folder of a region is root's");
        return;
    }
    // A tmpfs has no medium to map.
    let keep = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::set_permissions(keep.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let folder = SliceFolder::at(keep.path(), number(keep.path())).unwrap();
    let error = folder.create(&SliceFile::of(span(0, 2 * MIB))).unwrap_err();
    assert!(error.to_string().starts_with("cannot map "), "{error}");
    assert_eq!(folder.files().unwrap(), []);
}

#[test]
fn a_holder_of_a_slices_descriptor_changes_neither_its_size_nor_its_blocks() {
    let Some((_keep, folder)) = folder() else { return };
    let (file, made) = make(&folder, span(2 * MIB, 4 * MIB));
    let before = made.metadata().unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let tries = [
        made.set_len(0),
        made.set_len(64 * MIB),
        fallocate(&made, punch, 0, MIB).map_err(io::Error::from),
        fallocate(&made, FallocateFlags::empty(), 4 * MIB, MIB).map_err(io::Error::from),
        fallocate(&made, FallocateFlags::KEEP_SIZE, 4 * MIB, MIB).map_err(io::Error::from),
        fallocate(&made, FallocateFlags::COLLAPSE_RANGE, 0, MIB).map_err(io::Error::from),
        made.write_all_at(b"x", 4 * MIB),
        folder.open(&file, OFlags::RDWR).map(drop).map_err(io::Error::other),
    ];
    assert!(tries.iter().all(Result::is_err), "{tries:?}");
    let after = made.metadata().unwrap();
    assert_eq!((before.len(), before.blocks()), (after.len(), after.blocks()));
    folder.remove(&file).unwrap();
}

/// Whether nothing but this process has `file`, and it without a description.
fn is_free(folder: &SliceFolder, file: &SliceFile) -> bool {
    free::look_at_file(&folder.name(file).unwrap(), 0..file.span.size(), Vec::new()) == Verdict::Free
}

#[test]
fn a_file_is_used_as_long_as_any_description_of_it_is_open() {
    let Some((_keep, folder)) = folder() else { return };
    let (file, made) = make(&folder, span(0, 2 * MIB));
    let duplicate = made.try_clone().unwrap();
    drop(made);
    assert!(!is_free(&folder, &file));
    drop(duplicate);
    let _name = folder.name(&file).unwrap();
    assert!(is_free(&folder, &file));
    let reclaimed = folder.reclaim(&file).unwrap();
    reclaimed.write_all_at(&[0; 16], 0).unwrap();
    assert_eq!(folder.find(file.span).unwrap(), Some(file.clone()));
    assert_eq!(folder.overlapping(span(MIB, 4 * MIB)).unwrap(), std::slice::from_ref(&file));
    folder.remove(&file).unwrap();
    assert_eq!(folder.files().unwrap(), []);
}

#[test]
fn a_descriptor_of_a_process_that_opens_nothing_keeps_a_file_in_use() {
    let Some((_keep, folder)) = folder() else { return };
    let (file, made) = make(&folder, span(0, 2 * MIB));
    drop(made);
    let name = folder.name(&file).unwrap();
    let mut child = std::process::Command::new("/bin/cat")
        .stdin(std::process::Stdio::piped())
        .stdout(name.try_clone().unwrap())
        .spawn()
        .unwrap();
    assert!(!is_free(&folder, &file));
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(is_free(&folder, &file));
    folder.remove(&file).unwrap();
}

#[test]
fn a_removed_file_keeps_no_block_for_a_late_descriptor() {
    let Some((_keep, folder)) = folder() else { return };
    let (file, made) = make(&folder, span(0, 2 * MIB));
    drop(made);
    let late = folder.name(&file).unwrap();
    assert!(late.metadata().unwrap().blocks() > 0);
    folder.remove(&file).unwrap();
    let after = late.metadata().unwrap();
    assert_eq!((after.nlink(), after.len(), after.blocks()), (0, 0, 0));
}

#[test]
fn a_file_with_a_bad_page_keeps_its_blocks_under_a_name_that_is_no_slices() {
    let Some((_keep, folder)) = folder() else { return };
    for number in 1..=2 {
        let (file, made) = make(&folder, span(0, 2 * MIB));
        folder.set_aside(&file).unwrap();
        assert_eq!(folder.files().unwrap(), []);
        assert_eq!(folder.bad_bytes().unwrap(), number * 2 * MIB, "one never replaces another");
        assert!(made.metadata().unwrap().nlink() == 1 && made.metadata().unwrap().blocks() * 512 >= 2 * MIB);
    }
}

#[test]
fn a_file_of_a_full_file_system_is_not_set_aside() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: the folder of a region is root's");
        return;
    }
    let context = match fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC) {
        Err(error) if error == Errno::NOSYS => {
            println!("skipped: cannot open a tmpfs: {error}");
            return;
        }
        opened => opened.unwrap(),
    };
    fsconfig_set_string(context.as_fd(), c"size", c"64k").unwrap();
    fsconfig_create(context.as_fd()).unwrap();
    let mounted = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}/egm", mounted.as_raw_fd()));
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    let folder = SliceFolder::at(&path, number(&path)).unwrap();
    let file = SliceFile::of(span(0, 2 * MIB));
    let made = File::create_new(path.join(&file.name)).unwrap();
    // A page that is written to for the first time has no block then: SIGBUS, and no page is bad.
    assert_eq!(made.write_all_at(&[1; 128 << 10], 0).unwrap_err().kind(), io::ErrorKind::StorageFull);
    let error = folder.set_aside(&file).unwrap_err();
    assert!(error.to_string().starts_with("cannot write a file in "), "{error}");
    assert_eq!(folder.files().unwrap(), std::slice::from_ref(&file));
    made.set_len(4096).unwrap();
    folder.set_aside(&file).unwrap();
    assert_eq!(folder.files().unwrap(), []);
}

#[test]
fn a_folder_of_another_user_mode_or_file_system_is_refused_at_each_opening() {
    let Some((keep, _)) = folder() else { return };
    let path = keep.path();
    let why = |device| match SliceFolder::at(path, device) {
        Ok(_) => "opened".to_owned(),
        Err(error) => std::error::Error::source(&error).unwrap().to_string(),
    };
    let here = number(path);
    assert_eq!(why(here), "opened");
    assert!(why(here + 1).contains("another file system"));
    fs::set_permissions(path, fs::Permissions::from_mode(0o750)).unwrap();
    assert!(why(here).contains("mode"));
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(path, Some(4001), None).unwrap();
    assert!(why(here).contains("root"));
    let link = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(path, link.path().join("link")).unwrap();
    assert!(SliceFolder::at(&link.path().join("link"), here).is_err());
}

#[test]
fn a_file_that_no_ledger_made_is_refused_whatever_its_name_is() {
    let Some((keep, folder)) = folder() else { return };
    let file = SliceFile::of(span(0, 2 * MIB));
    let path = keep.path().join(&file.name);
    let refused = || {
        let opens = [OFlags::PATH, OFlags::RDONLY, OFlags::RDWR].map(|access| folder.open(&file, access));
        assert!(opens.iter().all(Result::is_err), "{opens:?}");
        assert!(folder.remove(&file).is_err());
        fs::remove_file(&path).unwrap();
    };
    // An open without O_NONBLOCK waits for the pipe's other end.
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
    refused();
    fs::write(&path, b"x").unwrap();
    fs::hard_link(&path, keep.path().join("other")).unwrap();
    refused();
    fs::write(&path, b"x").unwrap();
    std::os::unix::fs::chown(&path, Some(4001), None).unwrap();
    refused();
    std::os::unix::fs::symlink("other", &path).unwrap();
    refused();
}

#[test]
fn pages_of_2_mib_need_blocks_that_are_aligned_with_the_file() {
    let extent = |logical, physical, length| sys::Extent { logical, physical, length };
    assert_eq!(huge_bytes(&extent(0, 8 * MIB, 6 * MIB)), 6 * MIB);
    assert_eq!(huge_bytes(&extent(0, 8 * MIB + 4096, 6 * MIB)), 0);
    assert_eq!(huge_bytes(&extent(MIB, 9 * MIB, 6 * MIB)), 4 * MIB);
    assert_eq!(huge_bytes(&extent(MIB, 9 * MIB, MIB)), 0);
    assert_eq!(huge_bytes(&extent(u64::MAX - 4096, u64::MAX - 4096, u64::MAX)), 0);
}
