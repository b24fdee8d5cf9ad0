use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;
use crate::free::tests::{EGM, in_flight};

/// A scan that waits for each process as long as it takes.
fn scan(proc: &Path, asked: &BTreeSet<FileName>) -> ScanResult {
    super::scan(proc, asked, &mut Readers::new(Duration::MAX, Arc::default()))
}

/// A process maps `bytes` of `files`.
pub(in crate::free) fn mapped(files: &[FileName], bytes: Range<u64>) -> ScanResult {
    let process = Process { pid: 2, uid: 0, program: "p".to_owned(), parents: Vec::new() };
    let sighting = |file: &FileName| Sighting {
        process: process.clone(),
        what: KernelObject::Mapping(file.inode, bytes.clone()),
    };
    ScanResult { sightings: files.iter().map(sighting).collect(), ..ScanResult::default() }
}

fn objects(found: &ScanResult) -> Vec<&KernelObject> {
    found.sightings.iter().map(|seen| &seen.what).collect()
}

#[test]
fn a_line_names_a_file_and_its_bytes() {
    let line = "7f0000000000-7f0000200000 rw-s 00400000 00:06 1234                       /dev/egm4";
    assert_eq!(mapping(line), Some((Inode(0, 6, 1234), 0x40_0000..0x60_0000)));
    assert_eq!(
        mapping("00400000-00401000 r--p 00000000 103:1f 7 /a b (deleted)"),
        Some((Inode(0x103, 0x1f, 7), 0..0x1000))
    );
    for wrong in
        ["", "7f-8f", "8f-7f rw-s 0 00:06 1", "0-1000 rw-s fffffffffffffff0 00:06 1", "x-y r 0 0:0 0"]
    {
        assert_eq!(mapping(wrong), None, "{wrong}");
    }
}

#[test]
fn mappings_of_the_files_are_found_in_every_process_and_thread() {
    let proc = tempfile::tempdir().unwrap();
    let process = |pid: &str, maps: &[u8]| {
        fs::create_dir_all(proc.path().join(pid).join("fd")).unwrap();
        fs::write(proc.path().join(pid).join("maps"), maps).unwrap();
    };
    let asked = BTreeSet::from([EGM.clone()]);
    process("1", b"");
    process("self", b"0-1000 rw-s 00400000 00:06 1234 /dev/egm4\n");
    fs::create_dir(proc.path().join("2")).unwrap();
    process("30", b"0-1000 rw-p 0 00:00 0 \xff\n1000-3000 rw-s 00400000 00:06 1234 /dev/egm4\n");
    fs::write(proc.path().join("30/comm"), "a\x1bb\n").unwrap();
    fs::write(proc.path().join("30/status"), "Name:\ta\nPPid:\t50\nUid:\t7\t8\t9\t10\n").unwrap();
    let found = scan(proc.path(), &asked);
    assert!(!found.is_partial);
    assert_eq!(objects(&found), [&KernelObject::Mapping(EGM.inode, 0x40_0000..0x40_2000)]);
    let process_30 = Process { pid: 30, uid: 7, program: "a\\u{1b}b".to_owned(), parents: vec![50] };
    assert_eq!(found.sightings.iter().next().unwrap().process, process_30);
    assert!(scan(&proc.path().join("nothing"), &asked).is_partial);
    // The first thread of a process has ended, and others have not.
    process("50", b"");
    fs::create_dir_all(proc.path().join("50/task/51")).unwrap();
    fs::write(proc.path().join("50/task/51/maps"), b"0-1000 rw-s 0 00:06 77 /dev/egm5\n").unwrap();
    let thread = FileName { inode: Inode(0, 6, 77), ..EGM.clone() };
    assert_eq!(
        objects(&scan(proc.path(), &[thread].into())),
        [&KernelObject::Mapping(Inode(0, 6, 77), 0..0x1000)]
    );
    // A file that cannot be read may name anything.
    fs::create_dir_all(proc.path().join("4/maps")).unwrap();
    assert!(scan(proc.path(), &asked).is_partial);
}

#[test]
fn descriptors_are_found_in_tables_of_threads_too_and_rings_and_devices_by_what_the_kernel_prints() {
    // Numbers that no process of this host has: the kernel compares the tables of threads.
    let proc = tempfile::tempdir().unwrap();
    let memory = tempfile::NamedTempFile::new().unwrap();
    let [first, second] = ["4999997", "4999997/task/4999998"].map(|name| proc.path().join(name));
    for table in [&first, &second] {
        fs::create_dir_all(table.join("fd")).unwrap();
        fs::create_dir_all(table.join("fdinfo")).unwrap();
        fs::write(table.join("maps"), "0-1000 rw-p 0 00:00 0\n").unwrap();
    }
    symlink(memory.path(), second.join("fd/4")).unwrap();
    symlink("/dev/null", first.join("fd/0")).unwrap();
    let file = FileName::at(memory.path()).unwrap();
    let inode = file.inode;
    assert_eq!(inode.2, fs::metadata(memory.path()).unwrap().ino());
    let found = scan(proc.path(), &[file].into());
    assert_eq!(objects(&found), [&KernelObject::Descriptor(inode, None)]);
    let null = FileName::at(Path::new("/dev/null")).unwrap();
    let other_node = FileName { inode: Inode(9, 9, 9), ..null };
    assert!(matches!(
        *objects(&scan(proc.path(), &[other_node].into())),
        [KernelObject::Descriptor(_, Some((1, 3)))]
    ));
    let text =
        "SqMask:\t0x7\nUserFiles:\t2\n    0: /dev/egm4\n    1: /memfd:egm-vmm\\040(deleted)\nUserBufs:\t0\n";
    let paths = ["/dev/egm4", "/memfd:egm-vmm (deleted)"].map(|path| KernelObject::Registered(path.into()));
    assert_eq!(registered(text), paths);
    let buffers = |table: &str| registered(&format!("UserFiles:\t0\nUserBufs:\t1\n{table}PollList:\n"));
    assert_eq!(buffers("    0: 0x7f0000000000/8192\n"), [KernelObject::RingBuffers]);
    assert_eq!(buffers("    0: <none>\n"), []);
    assert_eq!(registered("pos:\t0\n"), [KernelObject::HiddenRing]);
}

fn fifo(path: &Path) {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
}

/// Result of a scan of `proc`; `change` is made while it reads the FIFO at `path`, which is then a plain file.
fn found_across(proc: &Path, file: &FileName, path: &Path, change: impl FnOnce()) -> ScanResult {
    std::thread::scope(|scope| {
        let scan = scope.spawn(|| scan(proc, &[file.clone()].into()));
        let is_read = File::options().write(true).open(path).unwrap();
        fs::remove_file(path).unwrap();
        fs::write(path, "").unwrap();
        change();
        drop(is_read);
        scan.join().unwrap()
    })
}

/// Process numbers wrap: a child has a lower number than the parent that ends.
#[test]
fn a_process_that_begins_while_all_are_looked_at_once_more_is_looked_at_too() {
    let proc = tempfile::tempdir().unwrap();
    let [parent, child] = ["4999997", "4999990"].map(|pid| proc.path().join(pid));
    fs::create_dir_all(parent.join("fd")).unwrap();
    fifo(&parent.join("maps"));
    let found = found_across(proc.path(), &EGM, &parent.join("maps"), || {
        // The second look is the one that the child begins in.
        fs::remove_file(parent.join("maps")).unwrap();
        fifo(&parent.join("maps"));
        let parent = parent.join("maps");
        std::thread::spawn(move || {
            let is_read = File::options().write(true).open(&parent).unwrap();
            fs::create_dir_all(child.join("fd")).unwrap();
            fs::write(child.join("maps"), b"0-1000 rw-s 00400000 00:06 1234 /dev/egm4\n").unwrap();
            drop(is_read);
        });
    });
    assert!(!found.is_partial, "{found:?}");
    assert_eq!(objects(&found), [&KernelObject::Mapping(EGM.inode, 0x40_0000..0x40_1000)]);
}

#[test]
fn a_descriptor_that_moves_to_what_was_looked_at_is_found() {
    let proc = tempfile::tempdir().unwrap();
    let memory = tempfile::NamedTempFile::new().unwrap();
    let table = proc.path().join("4999997");
    fs::create_dir_all(table.join("fd")).unwrap();
    fs::create_dir_all(table.join("fdinfo")).unwrap();
    fs::write(table.join("maps"), "0-1000 rw-p 0 00:00 0\n").unwrap();
    let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
    let socket = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&near));
    symlink(&socket, table.join("fd/3")).unwrap();
    fifo(&table.join("fdinfo/3"));
    let file = FileName::at(memory.path()).unwrap();
    let move_it = || symlink(memory.path(), table.join("fd/4")).unwrap();
    let found = found_across(proc.path(), &file, &table.join("fdinfo/3"), move_it);
    assert_eq!(objects(&found), [&KernelObject::Descriptor(file.inode, None)], "{found:?}");
}

/// Each process begins another when it is looked at, for longer than a scan follows.
#[test]
fn processes_that_begin_faster_than_a_scan_count_for_their_user_alone() {
    let proc = tempfile::tempdir().unwrap();
    let begin = |n: usize| {
        let process = proc.path().join((4_999_000 + n).to_string());
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::write(process.join("status"), "Name:\ta\nPPid:\t1\nUid:\t1000\t1000\t1000\t1000\n").unwrap();
        fifo(&process.join("maps"));
        process.join("maps")
    };
    let mut maps = begin(0);
    let found = std::thread::scope(|scope| {
        let scan = scope.spawn(|| scan(proc.path(), &[EGM.clone()].into()));
        for n in 1..=MAX_LOOKS + 1 {
            let is_read = File::options().write(true).open(&maps).unwrap();
            fs::remove_file(&maps).unwrap();
            fs::write(&maps, "").unwrap();
            if n <= MAX_LOOKS {
                maps = begin(n);
            }
            drop(is_read);
        }
        scan.join().unwrap()
    });
    assert!(!found.is_partial, "{found:?}");
    assert_eq!(objects(&found), [&KernelObject::Silent]);
    assert_eq!(found.sightings.iter().next().unwrap().process.uid, 1000);
}

/// The kernel's own words: a child that has a descriptor, and one that a socket has in flight.
#[test]
fn the_kernel_shows_a_descriptor_and_one_in_flight_that_way() {
    use std::os::fd::AsFd;

    let memory = tempfile::NamedTempFile::new().unwrap();
    let (_near, far) = in_flight(memory.as_file().as_fd());
    let mut child = Command::new("/bin/cat")
        .stdin(Stdio::piped())
        .stdout(memory.reopen().unwrap())
        .stderr(far)
        .spawn()
        .unwrap();
    let file = FileName::of(memory.as_file()).unwrap();
    let found = scan(Path::new("/proc"), &[file.clone()].into());
    let of_child = |what: &KernelObject| {
        found.sightings.iter().any(|seen| seen.process.pid == child.id() && seen.what == *what)
    };
    assert!(of_child(&KernelObject::Descriptor(file.inode, None)), "{found:?}");
    assert!(of_child(&KernelObject::InFlight), "{found:?}");
    drop(child.stdin.take());
    child.wait().unwrap();
}

/// (Root may look at all users, so the test runs itself once more as another user.)
#[test]
fn a_process_of_another_user_is_hidden_from_one_that_has_no_right_to_look() {
    if rustix::process::geteuid().is_root() {
        let mut child = Command::new("/proc/self/exe");
        child.args([
            "--exact",
            "free::scan::tests::a_process_of_another_user_is_hidden_from_one_that_has_no_right_to_look",
        ]);
        let output = child.uid(0x4000_0000).gid(0x4000_0000).output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
        return;
    }
    if fs::metadata("/proc/1").unwrap().uid() == rustix::process::geteuid().as_raw() {
        println!("skipped: here the first process is this user's");
        return;
    }
    let found = scan(Path::new("/proc"), &[EGM.clone()].into());
    assert!(found.hidden.contains(&1) && !found.hidden.contains(&std::process::id()), "{found:?}");
}
