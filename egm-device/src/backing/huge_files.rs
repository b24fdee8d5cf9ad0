//! Files in transparent huge pages, on a tmpfs that this process mounts for itself. This is an unsafe module.
//!
//! Stock distributions set `shmem_enabled` to `never`, so a memfd has base pages; a tmpfs with `huge=within_size` has huge ones
//! whatever that setting is (except `deny`). The mount is detached: it has no mount point, and the mount namespace of this
//! process does not change.
//!
//! ```text
//!  CAP_SYS_ADMIN ─► fsopen, fsconfig, fsmount ───────────────────────────────► mount
//!  without it ────► child in a user and mount namespace: the same there ─────► mount
//! ```
//! Why `unsafe`: a thread of this process may not enter a user namespace, so a child does. It shares memory and descriptors
//! with this process, which waits for its end.
//! Callers may rely on this: the process does not change, except for the one descriptor that it gains.
#![expect(unsafe_code, reason = "clone has no safe interface")]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::sched::{CloneFlags, clone};
use rustix::fs::{AtFlags, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};
use rustix::process::{DumpableBehavior, WaitOptions, dumpable_behavior, set_dumpable_behavior, waitpid};

use super::{Anonymous, AnonymousError};
use crate::mapping::base_page;

/// Stack of the child.
const STACK: usize = 256 << 10;
/// Name of each file until it is open, and afterwards in `/proc/PID/maps`.
const NAME: &CStr = c"egm-vmm";
/// Options of the mount: without `size=0` the files could not exceed half of the host's memory.
const OPTIONS: [(&CStr, &CStr); 3] = [(c"huge", c"within_size"), (c"size", c"0"), (c"mode", c"0700")];

/// The host does not mount a tmpfs with huge pages for this process.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}{}", if *user_namespace { " in a user namespace" } else { "" })]
pub struct HugeFilesError {
    /// The step that failed.
    pub step: &'static str,
    /// Whether it failed in a user namespace.
    pub user_namespace: bool,
    /// The kernel's error at that step.
    #[source]
    pub source: io::Error,
}

/// A step and the kernel's reason to refuse it.
type StepError = (&'static str, Errno);

/// A tmpfs of this process's own, which ends with its last file.
#[derive(Debug)]
pub struct HugeFiles {
    mount: OwnedFd,
    user_namespace: bool,
}

impl HugeFiles {
    /// Mounts one, in a user namespace of a child where this process lacks the right.
    ///
    /// # Errors
    /// [`HugeFilesError`] of the last way that was tried.
    pub fn mount() -> Result<Self, HugeFilesError> {
        let (user_namespace, mounted) = match mount() {
            Err((_, Errno::PERM)) => (true, in_user_namespace()),
            mounted => (false, mounted),
        };
        let error =
            |(step, source): StepError| HugeFilesError { step, user_namespace, source: source.into() };
        mounted.map(|mount| Self { mount, user_namespace }).map_err(error)
    }

    /// Whether a user namespace was necessary.
    pub const fn in_user_namespace(&self) -> bool {
        self.user_namespace
    }

    /// `size` bytes for `id`. The file has no seals: only holders of this descriptor can shrink it, so it is not for other
    /// processes.
    pub fn create(&self, id: &str, size: u64) -> Result<Anonymous, AnonymousError> {
        let page_size = base_page();
        let error =
            |source: io::Error| AnonymousError::Create { id: id.to_owned(), size, page: page_size, source };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&self.mount, NAME, flags, Mode::RUSR | Mode::WUSR).map_err(|e| error(e.into()))?;
        unlinkat(&self.mount, NAME, AtFlags::empty()).map_err(|e| error(e.into()))?;
        let file = File::from(file);
        file.set_len(size).map_err(error)?;
        Ok(Anonymous { file, size, page_size })
    }
}

/// Allocates nothing and cannot panic: [`in_user_namespace`] runs it in a child that shares this process's memory.
fn mount() -> Result<OwnedFd, StepError> {
    let at = |step| move |errno| (step, errno);
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(at("open a tmpfs"))?;
    for (key, value) in OPTIONS {
        let value =
            if egm_address::fault!("huge-pages-not-used") && key == c"huge" { c"never" } else { value };
        fsconfig_set_string(context.as_fd(), key, value).map_err(at("set the options of a tmpfs"))?;
    }
    fsconfig_create(context.as_fd()).map_err(at("create a tmpfs"))?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let attributes = attributes | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(at("mount a tmpfs"))
}

/// [`mount`] by a child of its own namespaces.
fn in_user_namespace() -> Result<OwnedFd, StepError> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let maps = [format!("{user} {user} 1"), format!("{group} {group} 1")];
    let mut mounted = Err(("run a child", Errno::CHILD));
    let mut stack = vec![0; STACK];
    let child = || {
        mounted = identify(&maps).and_then(|()| mount());
        0
    };
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK | CloneFlags::CLONE_FILES;
    let flags = flags | CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS;
    // The child's files in /proc belong to root where this process is not dumpable, and it could not write its maps.
    let dumpable = dumpable_behavior();
    if matches!(dumpable, Ok(DumpableBehavior::NotDumpable)) {
        let _ = set_dumpable_behavior(DumpableBehavior::Dumpable);
    }
    // SAFETY: CLONE_VFORK stops this thread until the child has ended, so `child`, what it borrows and `stack` outlive it, and
    // it may use this thread's local storage. It does system calls on values of its own and ends without unwinding.
    let pid = unsafe { clone(Box::new(child), &mut stack, flags, Some(libc::SIGCHLD)) };
    if matches!(dumpable, Ok(DumpableBehavior::NotDumpable)) {
        let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    }
    let pid = pid.map_err(|errno| ("create a process", Errno::from_raw_os_error(errno as i32)))?;
    let pid = rustix::process::Pid::from_raw(pid.as_raw());
    while matches!(waitpid(pid, WaitOptions::empty()), Err(Errno::INTR)) {}
    mounted
}

/// Maps this user and group into the user namespace of the calling process: the files then belong to them.
fn identify([user, group]: &[String; 2]) -> Result<(), StepError> {
    let write = |path: &CStr, text: &str| {
        let file = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(file, text.as_bytes())
    };
    let refused = |errno| ("map a user", errno);
    write(c"/proc/self/uid_map", user).map_err(refused)?;
    write(c"/proc/self/setgroups", "deny").map_err(refused)?;
    write(c"/proc/self/gid_map", group).map_err(refused)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::backing::Backing as _;
    use crate::mapping::Mapping;

    const SIZE: u64 = 8 << 20;

    /// Whether the kernel fills the files from huge pages. Whether it has any just now depends on the host's other memory: after
    /// a long build, base pages take their place. `stat` reports the size that it will try (`shmem_getattr`).
    fn is_in_huge_pages(files: &HugeFiles) {
        let memory = files.create("test", SIZE).unwrap();
        let mapping = Mapping::new(&memory, 0, SIZE, 0).unwrap();
        mapping.populate(0, mapping.size()).unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| line.starts_with(&format!("{:x}-", mapping.as_ptr().addr())));
        assert!(line.is_some_and(|line| line.ends_with("/egm-vmm (deleted)")), "{line:?}");
        let metadata = memory.file().metadata().unwrap();
        assert_eq!(metadata.len(), SIZE);
        let deny = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap();
        if deny.contains("[deny]") {
            return println!("skipped: shmem_enabled is deny");
        }
        let huge = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").unwrap();
        assert_eq!(metadata.blksize(), huge.trim().parse::<u64>().unwrap());
    }

    #[test]
    fn files_of_an_own_mount_are_in_huge_pages() {
        match HugeFiles::mount() {
            Ok(files) => is_in_huge_pages(&files),
            Err(error) => println!("skipped: {error}: {}", error.source),
        }
    }

    #[test]
    fn a_child_in_a_user_namespace_mounts_for_a_process_that_is_not_dumpable() {
        let namespaces = ["user", "mnt"].map(|kind| format!("/proc/self/ns/{kind}"));
        let here = || namespaces.each_ref().map(|path| fs::read_link(path).unwrap());
        let before = here();
        set_dumpable_behavior(DumpableBehavior::NotDumpable).unwrap();
        let mounted = in_user_namespace();
        assert!(matches!(dumpable_behavior(), Ok(DumpableBehavior::NotDumpable)));
        set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
        match mounted {
            Ok(mount) => is_in_huge_pages(&HugeFiles { mount, user_namespace: true }),
            Err((step, errno)) => println!("skipped: {step}: {errno}"),
        }
        assert_eq!(here(), before);
    }
}
