//! Memory of this process as a file: memfd, or hugetlb pages by memfd.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::Backing;
use crate::mapping::{Mapping, MappingError};

/// Sizes of hugetlb pages that guests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePage {
    /// 2 MiB.
    Size2M,
    /// 1 GiB.
    Size1G,
}

impl HugePage {
    /// Bytes in a page.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }

    /// The page of `bytes`.
    pub const fn of(bytes: u64) -> Option<Self> {
        match bytes {
            0x20_0000 => Some(Self::Size2M),
            0x4000_0000 => Some(Self::Size1G),
            _ => None,
        }
    }

    const fn flag(self) -> MemfdFlags {
        match self {
            Self::Size2M => MemfdFlags::HUGE_2MB,
            Self::Size1G => MemfdFlags::HUGE_1GB,
        }
    }
}

/// Why memory could not be made.
#[derive(Debug, thiserror::Error)]
pub enum AnonymousError {
    /// The kernel refused the file.
    #[error("memory \"{id}\": memfd of {size:#x} bytes in pages of {page:#x} was refused")]
    Create {
        /// Whose memory.
        id: String,
        /// Its size in bytes.
        size: u64,
        /// Its page size in bytes.
        page: u64,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// The memory cannot be kept to a host node.
    #[error("memory \"{id}\" cannot come from host node {node}")]
    Node {
        /// Whose memory.
        id: String,
        /// The node.
        node: u32,
        /// The reason.
        #[source]
        source: MappingError,
    },
    /// A file that was passed has another size.
    #[error("memory \"{id}\" was passed as a file of {found:#x} bytes, and its slice has {size:#x}")]
    Size {
        /// Whose memory.
        id: String,
        /// Bytes of the file.
        found: u64,
        /// Bytes of the slice.
        size: u64,
    },
    /// The hugetlb pool has too few free pages. Checked here because mapping succeeds and the guest's first touch
    /// would be a SIGBUS.
    #[error(
        "memory \"{id}\" needs {needed} hugetlb pages of {page:#x} bytes, the pool has {free} free: {missing} too few"
    )]
    Pool {
        /// Whose memory.
        id: String,
        /// Pages needed.
        needed: u64,
        /// Pages free and not reserved.
        free: u64,
        /// Pages missing.
        missing: u64,
        /// Page size in bytes.
        page: u64,
    },
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

    /// [`Anonymous::new`] with pages of the host's `node` only, whoever touches them first: the policy belongs to the
    /// file, not to a mapping.
    ///
    /// # Errors
    /// As [`Anonymous::new`], and [`AnonymousError::Node`].
    pub fn on_node(
        id: &str,
        size: u64,
        huge: Option<HugePage>,
        node: Option<u32>,
    ) -> Result<Self, AnonymousError> {
        let page_size = huge.map_or_else(base_page, HugePage::bytes);
        if let Some(huge) = huge {
            check_pool(id, size, huge, node)?;
        }
        let create =
            |source: io::Error| AnonymousError::Create { id: id.to_owned(), size, page: page_size, source };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let flags = huge.map_or(flags, |huge| flags | MemfdFlags::HUGETLB | huge.flag());
        let name: &CStr = c"egm-vmm";
        let file = memfd_create(name, flags).map(File::from).map_err(|error| create(error.into()))?;
        file.set_len(size).map_err(create)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|error| create(error.into()))?;
        let memory = Self { file, size, page_size };
        node.map_or(Ok(()), |node| memory.bind(id, node))?;
        Ok(memory)
    }

    /// `file`, made elsewhere, as memory of `size` bytes in pages of `page_size`.
    pub(super) fn adopt(id: &str, file: File, size: u64, page_size: u64) -> Result<Self, AnonymousError> {
        let found = file.metadata().map_or(0, |metadata| metadata.len());
        if found == size {
            return Ok(Self { file, size, page_size });
        }
        Err(AnonymousError::Size { id: id.to_owned(), found, size })
    }

    fn bind(&self, id: &str, node: u32) -> Result<(), AnonymousError> {
        let error = |source| AnonymousError::Node { id: id.to_owned(), node, source };
        let mapping = Mapping::new(self, 0, self.size, 0).map_err(error)?;
        mapping.bind(&[node].into_iter().collect()).map_err(error)
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
}

/// Bytes in a page of the host's processors.
pub(crate) fn base_page() -> u64 {
    u64::try_from(rustix::param::page_size()).unwrap_or(4096)
}

/// A node's own pool knows neither reservations nor pages beyond it.
fn check_pool(id: &str, size: u64, huge: HugePage, node: Option<u32>) -> Result<(), AnonymousError> {
    let name = format!("hugepages-{}kB", huge.bytes() >> 10);
    let folder = node.map_or_else(
        || format!("/sys/kernel/mm/hugepages/{name}"),
        |node| format!("/sys/devices/system/node/node{node}/hugepages/{name}"),
    );
    let number = |name: &str| -> u64 {
        fs::read_to_string(format!("{folder}/{name}")).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0)
    };
    let surplus = number("nr_overcommit_hugepages").saturating_sub(number("surplus_hugepages"));
    let free = number("free_hugepages").saturating_sub(number("resv_hugepages")).saturating_add(surplus);
    let needed = size.div_ceil(huge.bytes());
    match needed.checked_sub(free) {
        None | Some(0) => Ok(()),
        Some(missing) => {
            Err(AnonymousError::Pool { id: id.to_owned(), needed, free, missing, page: huge.bytes() })
        }
    }
}

#[cfg(test)]
mod tests {
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
}
