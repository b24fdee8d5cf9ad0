//! Memory of this process as a file: memfd, or hugetlb pages by memfd.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::path::Path;

use egm_report::show::{counted, size};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::Backing;
use crate::huge_page::HugePage;
use crate::mapping::{Mapping, MappingError, base_page};
use crate::region;

/// A failure to make memory.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum AnonymousError {
    #[error("cannot make memory \"{id}\": memfd of {size:#x} bytes in pages of {page:#x} bytes")]
    Create {
        id: String,
        size: u64,
        page: u64,
        #[source]
        source: io::Error,
    },
    #[error("cannot bind memory \"{id}\" to host node {node}")]
    Node {
        id: String,
        node: u32,
        #[source]
        source: MappingError,
    },
    #[error("cannot use the file of memory \"{id}\": it has {found:#x} bytes, and the slice has {size:#x}")]
    Size { id: String, found: u64, size: u64 },
    #[error(
        "cannot make memory \"{id}\" of {} of {}: {free} free, {missing} missing",
        counted(*needed, "hugetlb page"),
        size(*page)
    )]
    Pool { id: String, needed: u64, free: u64, missing: u64, page: u64 },
}

/// Anonymous shared memory with a file descriptor; freed, and by the kernel zeroed, when the last user is gone.
#[derive(Debug)]
pub struct Anonymous {
    pub(super) file: File,
    pub(super) size: u64,
    pub(super) page_size: u64,
}

impl Anonymous {
    /// `size` bytes for `id`, in hugetlb pages or in the host's base pages. The size is sealed: no holder of the
    /// descriptor can shrink the file under the guest.
    ///
    /// # Errors
    /// [`AnonymousError::Pool`] when hugetlb pages are short, [`AnonymousError::Create`] otherwise.
    pub fn new(id: &str, size: u64, huge: Option<HugePage>) -> Result<Self, AnonymousError> {
        Self::on_node(id, size, huge, None)
    }

    /// [`Anonymous::new`] with pages of the host's `node` only, whichever process touches them first: the policy is the
    /// file's, not a mapping's.
    ///
    /// # Errors
    /// As [`Anonymous::new`], and [`AnonymousError::Node`].
    pub fn on_node(
        id: &str,
        size: u64,
        huge: Option<HugePage>,
        node: Option<u32>,
    ) -> Result<Self, AnonymousError> {
        if let Some(huge) = huge {
            check_pool(id, size, huge, node)?;
        }
        let memory = Self::file(id, size, huge)?;
        memory.settle(id, huge, node)?;
        Ok(memory)
    }

    fn file(id: &str, size: u64, huge: Option<HugePage>) -> Result<Self, AnonymousError> {
        let page_size = huge.map_or_else(base_page, HugePage::bytes);
        let create =
            |source: io::Error| AnonymousError::Create { id: id.to_owned(), size, page: page_size, source };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let flags = huge.map_or(flags, |huge| flags | MemfdFlags::HUGETLB | huge.flag());
        let name: &CStr = c"egm-vmm";
        let file = memfd_create(name, flags).map(File::from).map_err(|error| create(error.into()))?;
        file.set_len(size).map_err(create)?;
        let size_seals = SealFlags::SHRINK | SealFlags::GROW;
        let size_seals = if egm_address::fault!("size-not-sealed") { SealFlags::empty() } else { size_seals };
        fcntl_add_seals(&file, size_seals | SealFlags::SEAL).map_err(|error| create(error.into()))?;
        Ok(Self { file, size, page_size })
    }

    /// Reserves the file's hugetlb pages, and binds all pages to `node`: both stay when the mapping that does it is gone.
    /// The kernel's reservation is the truth about the pool; a node's own pages are not reserved, so [`check_pool`] counts
    /// them.
    fn settle(&self, id: &str, huge: Option<HugePage>, node: Option<u32>) -> Result<(), AnonymousError> {
        if (huge.is_none() && node.is_none()) || egm_address::fault!("pool-pages-not-reserved") {
            return Ok(());
        }
        let (size, page) = (self.size, self.page_size);
        let mapping = Mapping::new(self, 0, size, 0).map_err(|error| match huge {
            Some(huge) if error.source.raw_os_error() == Some(libc::ENOMEM) => {
                short_pool(id, size, huge, node)
            }
            _ => AnonymousError::Create { id: id.to_owned(), size, page, source: error.source },
        })?;
        let Some(node) = node else { return Ok(()) };
        let bound = mapping.bind(&[node].into_iter().collect());
        bound.map_err(|source| AnonymousError::Node { id: id.to_owned(), node, source })
    }

    /// `file`, made elsewhere, as memory of `size` bytes in pages of `page_size`.
    ///
    /// # Errors
    /// [`AnonymousError::Size`].
    pub fn adopt(id: &str, file: File, size: u64, page_size: u64) -> Result<Self, AnonymousError> {
        let found = file.metadata().map_or(0, |metadata| metadata.len());
        if found == size {
            return Ok(Self { file, size, page_size });
        }
        Err(AnonymousError::Size { id: id.to_owned(), found, size })
    }
}

impl Backing for Anonymous {
    fn file(&self) -> &File {
        &self.file
    }
    fn offset(&self) -> u64 {
        0
    }
    fn size(&self) -> u64 {
        self.size
    }
    fn page_size(&self) -> u64 {
        self.page_size
    }
    fn is_invisible(&self) -> bool {
        false
    }
    fn outlives_power(&self) -> bool {
        false
    }
}

/// Whether the pool has the pages now. A node's own pool knows neither reservations nor pages beyond it.
fn check_pool(id: &str, size: u64, huge: HugePage, node: Option<u32>) -> Result<(), AnonymousError> {
    let (needed, free) = (size.div_ceil(huge.bytes()), free_pages(huge, node));
    if needed <= free { Ok(()) } else { Err(short_pool(id, size, huge, node)) }
}

fn short_pool(id: &str, size: u64, huge: HugePage, node: Option<u32>) -> AnonymousError {
    let (needed, free) = (size.div_ceil(huge.bytes()), free_pages(huge, node));
    // Pages may have come back since they were short.
    let missing = needed.saturating_sub(free).max(1);
    AnonymousError::Pool { id: id.to_owned(), needed, free, missing, page: huge.bytes() }
}

/// Pages of the pool that are free and not reserved.
fn free_pages(huge: HugePage, node: Option<u32>) -> u64 {
    let name = format!("hugepages-{}kB", huge.bytes() >> 10);
    let folder = node.map_or_else(
        || format!("/sys/kernel/mm/hugepages/{name}"),
        |node| format!("/sys/devices/system/node/node{node}/hugepages/{name}"),
    );
    let number = |name: &str| region::number(Path::new(&format!("{folder}/{name}"))).unwrap_or(0);
    let surplus = number("nr_overcommit_hugepages").saturating_sub(number("surplus_hugepages"));
    number("free_hugepages").saturating_sub(number("resv_hugepages")).saturating_add(surplus)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};

    use super::*;

    #[test]
    fn the_size_cannot_be_changed_by_a_holder_of_the_descriptor() {
        let memory = Anonymous::new("test", 1 << 20, None).unwrap();
        assert_eq!(memory.file().metadata().unwrap().len(), 1 << 20);
        assert!(memory.file().set_len(0).is_err());
        assert!(memory.file().set_len(2 << 20).is_err());
    }

    #[test]
    fn memory_of_a_node_that_does_not_exist_is_refused() {
        assert!(Anonymous::on_node("test", 1 << 20, None, Some(0)).is_ok());
        let refused = Anonymous::on_node("test", 1 << 20, None, Some(1000));
        assert!(matches!(refused, Err(AnonymousError::Node { node: 1000, .. })), "{refused:?}");
    }

    #[test]
    fn a_pool_that_is_too_small_is_named_with_what_is_missing() {
        match Anonymous::new("node0", 1 << 60, Some(HugePage::Size2M)) {
            Err(AnonymousError::Pool { id, needed, missing, free, .. }) => {
                assert_eq!((id.as_str(), needed), ("node0", 1 << 39));
                assert_eq!(missing, needed - free);
            }
            other => panic!("{other:?}"),
        }
    }

    /// Pages that another process takes after the start are those that no memory has reserved.
    #[test]
    fn pages_of_a_pool_are_reserved_before_any_is_touched() {
        let Some(_pool) = TestPool::of(4) else { return };
        let memory = Anonymous::new("test", 3 * PAGE, Some(HugePage::Size2M)).unwrap();
        let other = memfd_create(c"other", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).unwrap();
        let take = |pages| fallocate(&other, FallocateFlags::empty(), 0, pages * PAGE);
        assert!(take(1).is_ok(), "one page is free");
        assert!(take(2).is_err(), "a reserved page was given away");
        // Not before: a mapping reserves pages as well.
        let mapping = Mapping::new(&memory, 0, 3 * PAGE, 0).unwrap();
        mapping.populate(0, mapping.size()).unwrap();
        match Anonymous::new("second", PAGE, Some(HugePage::Size2M)) {
            Err(AnonymousError::Pool { needed: 1, free: 0, missing: 1, .. }) => {}
            other => panic!("{other:?}"),
        }
    }

    /// The pool's figures are read before the kernel reserves: another process may take the pages in between.
    #[test]
    fn a_pool_that_shrinks_before_the_reservation_is_short_all_the_same() {
        let Some(_pool) = TestPool::of(1) else { return };
        let memory = Anonymous::file("test", 2 * PAGE, Some(HugePage::Size2M)).unwrap();
        match memory.settle("test", Some(HugePage::Size2M), None) {
            Err(AnonymousError::Pool { needed: 2, free: 1, missing: 1, .. }) => {}
            other => panic!("{other:?}"),
        }
    }

    const PAGE: u64 = 2 << 20;

    /// The host's pool of 2 MiB pages with free pages for one test; as it was before on drop. The lock is the one that tests of
    /// egm-vmm take before they change a pool, so that they wait for each other.
    struct TestPool {
        file: File,
        before: String,
        _lock: File,
    }

    impl TestPool {
        fn of(pages: u64) -> Option<Self> {
            const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
            let skipped = |why: &str| println!("skipped: {POOL}: {why}");
            let Ok(file) = File::options().read(true).write(true).open(POOL) else {
                skipped("cannot open it for writing");
                return None;
            };
            let lock = File::open("/proc/sys/vm/nr_hugepages").unwrap();
            flock(&lock, FlockOperation::LockExclusive).unwrap();
            let before = fs::read_to_string(POOL).unwrap();
            let pool = Self { file, before, _lock: lock };
            if pool.before.trim() != "0" {
                skipped("other programs use the pool");
                return None;
            }
            rustix::io::pwrite(&pool.file, pages.to_string().as_bytes(), 0).unwrap();
            if fs::read_to_string(POOL).unwrap().trim() != pages.to_string() {
                skipped("the host has no free 2 MiB pages");
                return None;
            }
            Some(pool)
        }
    }

    impl Drop for TestPool {
        fn drop(&mut self) {
            let _ = rustix::io::pwrite(&self.file, self.before.trim().as_bytes(), 0);
        }
    }
}
