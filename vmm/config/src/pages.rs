//! Host pages behind guest memory.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Size of the host pages behind guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum PageSize {
    /// Transparent huge pages where the host has them; the plan prints which, and why not.
    #[serde(rename = "auto")]
    Auto,
    /// 4 KiB pages only.
    #[serde(rename = "4K")]
    Size4K,
    /// 2 MiB hugetlb pages.
    #[serde(rename = "2M")]
    Size2M,
    /// 1 GiB hugetlb pages.
    #[serde(rename = "1G")]
    Size1G,
}

impl PageSize {
    /// Bytes in a page that the host guarantees; for [`PageSize::Auto`] the base page.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Auto | Self::Size4K => 4 << 10,
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }

    /// Whether the memory comes from a hugetlb pool.
    pub const fn is_hugetlb(self) -> bool {
        self.hugetlb().is_some()
    }

    /// The size of hugetlb pages, as configurations, other monitors and the kernel write it; `None` for others.
    pub const fn hugetlb(self) -> Option<&'static str> {
        match self {
            Self::Auto | Self::Size4K => None,
            Self::Size2M => Some("2M"),
            Self::Size1G => Some("1G"),
        }
    }

    /// Pages of a hugetlb pool, which have `bytes`; `None` for sizes that no configuration has a word for.
    pub fn of_pool(bytes: u64) -> Option<Self> {
        [Self::Size2M, Self::Size1G].into_iter().find(|page| page.bytes() == bytes)
    }
}
