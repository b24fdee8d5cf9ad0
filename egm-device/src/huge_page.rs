//! Sizes of hugetlb pages.

use rustix::fs::MemfdFlags;

/// A size of hugetlb pages that guests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePage {
    /// 2 MiB: x86, and arm64 with base pages of 4 KiB.
    Size2M,
    /// 32 MiB: arm64 with base pages of 4 or 16 KiB.
    Size32M,
    /// 512 MiB: arm64 with base pages of 64 KiB.
    Size512M,
    /// 1 GiB: x86, and arm64 with base pages of 4 KiB.
    Size1G,
}

impl HugePage {
    /// Every size, smaller first.
    pub const ALL: [Self; 4] = [Self::Size2M, Self::Size32M, Self::Size512M, Self::Size1G];

    /// Bytes in a page.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Size2M => 2 << 20,
            Self::Size32M => 32 << 20,
            Self::Size512M => 512 << 20,
            Self::Size1G => 1 << 30,
        }
    }

    /// The page of `bytes`.
    pub fn of(bytes: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|page| page.bytes() == bytes)
    }

    /// The flag of memfd_create(2) for this size.
    pub(crate) const fn flag(self) -> MemfdFlags {
        match self {
            Self::Size2M => MemfdFlags::HUGE_2MB,
            Self::Size32M => MemfdFlags::HUGE_32MB,
            Self::Size512M => MemfdFlags::HUGE_512MB,
            Self::Size1G => MemfdFlags::HUGE_1GB,
        }
    }
}
