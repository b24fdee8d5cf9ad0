//! The kernel's proof that a file has no other open description: it grants a write lease (`F_SETLEASE`).
//!
//! A description counts whatever refers to it: descriptors, mappings, messages in flight, io_uring. Two do not: the one that
//! `memfd_create` makes, and those of `O_PATH`. So a pool's memory is handed out by a description that [`reopen`] makes, and
//! the first one stays here; `/proc` shows descriptors of `O_PATH`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use crate::sys;

/// The path by which this process opens `file` once more.
pub(super) fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Another description of `file`, which the kernel counts.
pub(crate) fn reopen(file: &File) -> io::Result<File> {
    File::options().read(true).write(true).open(path_of(file))
}

/// The kernel's answer to a request for a lease.
#[derive(Debug)]
pub(super) enum Lease {
    /// There is no other counted description. The lease, and with it the proof, lasts as long as the file.
    Given(File),
    /// Another counted description exists.
    Refused,
    /// The file system has no leases: hugetlbfs of Linux 7.0 and later. Other memory files keep them (Linux 7.3).
    Unsupported,
}

/// Requests a write lease of `file`, which may be one of `O_PATH`, by a description of its own for reading: an immutable file
/// has no other. It does not wait for the lease of another process.
///
/// # Errors
/// The kernel's, for that description, or a lease that this process may not have.
pub(super) fn lease(file: &File) -> io::Result<Lease> {
    let again = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path_of(file))?;
    match sys::write_lease(&again) {
        Ok(()) => Ok(Lease::Given(again)),
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(Lease::Refused),
            Some(libc::EINVAL) => Ok(Lease::Unsupported),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::backing::tests::{region, slice};
    use crate::backing::{self, Anonymous, Backing};
    use crate::free::tests::in_flight;
    use crate::free::{Hold, Verdict, look_at_own_file};
    use crate::mapping::Mapping;
    use crate::owner::Owner;
    use crate::region::RegionKind;

    fn is_sole(file: &File) -> bool {
        match lease(file).unwrap() {
            Lease::Given(_) => true,
            Lease::Refused => false,
            Lease::Unsupported => panic!("this kernel has leases of memory files"),
        }
    }

    fn has_leases(file: &File) -> bool {
        let has = !matches!(lease(file), Ok(Lease::Unsupported));
        if !has {
            println!("skipped: this kernel has no leases of memory files");
        }
        has
    }

    /// Each way to keep memory that was handed out, and its end.
    fn every_way_is_counted(memory: &Anonymous) {
        let file = memory.file();
        assert!(is_sole(file), "the description that is kept here is not counted");
        let given = reopen(file).unwrap();
        assert!(!is_sole(file));
        let sockets = in_flight(given.as_fd());
        drop(given);
        assert!(!is_sole(file), "a descriptor in flight");
        drop(sockets);
        assert!(is_sole(file));
        let read_only = File::open(path_of(file)).unwrap();
        assert!(!is_sole(file), "a descriptor that only reads");
        drop(read_only);
        let pool = region(RegionKind::Memfd, memory.size(), memory.page_size());
        let given = backing::adopt(&pool, &slice(0, memory.size()), reopen(file).unwrap()).unwrap();
        let mapping = Mapping::new(given.as_ref(), 0, memory.size(), 0).unwrap();
        drop(given);
        assert!(!is_sole(file), "a mapping");
        drop(mapping);
        assert!(is_sole(file));
    }

    #[test]
    fn the_kernel_counts_every_description_of_a_memfd_that_was_handed_out() {
        let memory = Anonymous::new("test", 1 << 20, None).unwrap();
        if has_leases(memory.file()) {
            every_way_is_counted(&memory);
        }
    }

    /// The scan alone sees a mapping of memory on a file system without leases.
    fn the_scan_decides(memory: &Anonymous) {
        let is_mapped = || match look_at_own_file(memory, &Owner::this("vm")) {
            Verdict::Free => false,
            Verdict::InUse { evidence, .. } => evidence.iter().any(|found| found.hold == Hold::Mapping),
        };
        assert!(!is_mapped());
        let mapping = Mapping::new(memory, 0, memory.size(), 0).unwrap();
        assert!(is_mapped());
        drop(mapping);
        assert!(!is_mapped());
    }

    #[test]
    fn and_of_one_in_hugetlb_pages_where_those_have_leases() {
        use crate::huge_page::HugePage;
        let Ok(memory) = Anonymous::new("test", 2 << 20, Some(HugePage::Size2M)) else {
            return println!("skipped: this host has no free hugetlb page");
        };
        let has_leases = !matches!(lease(memory.file()), Ok(Lease::Unsupported));
        if has_leases { every_way_is_counted(&memory) } else { the_scan_decides(&memory) }
    }

    /// The kernel's notice to the holder of a lease is a signal that ends a process by default.
    #[test]
    fn an_open_that_breaks_a_lease_does_not_end_this_process() {
        let file = File::from(memfd_create(c"test", MemfdFlags::CLOEXEC).unwrap());
        if !has_leases(&file) {
            return;
        }
        let name = File::options().read(true).custom_flags(libc::O_PATH).open(path_of(&file)).unwrap();
        let Lease::Given(held) = lease(&file).unwrap() else { panic!("a name of O_PATH is not counted") };
        let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path_of(&name));
        assert_eq!(opened.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(held);
        assert!(File::open(path_of(&name)).is_ok());
    }
}
