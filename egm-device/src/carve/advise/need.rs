//! Memory that a host needs for itself: memory in use now that cannot be given up, plus a reserve.
//!
//! In use is `MemTotal - MemAvailable - Hugetlb` of `/proc/meminfo`. So page cache and other reclaimable memory do not
//! count, and pools of huge pages do not either, because a split replaces them. Memory of guests that run now does count,
//! unless it is in such a pool.

use egm_address::ByteSize;
use egm_report::show::size;

use crate::carve::advise::Split;

/// Reserve for page tables, the page cache, and the monitors of guests.
pub(crate) const RESERVE: ByteSize = ByteSize::new(1 << 30);

/// Memory that a host needs for itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Need {
    /// Memory in use now that cannot be given up; `None` where that is unknown, as for a recorded host.
    pub in_use: Option<ByteSize>,
}

impl Need {
    /// The need of the host with this `/proc/meminfo`.
    #[must_use]
    pub fn of(meminfo: &str) -> Self {
        let field = |name: &str| {
            let mut values = meminfo.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kibibytes: u64 = values.next()?.split_whitespace().next()?.parse().ok()?;
            kibibytes.checked_mul(1024)
        };
        let in_use = || {
            let used = field("MemTotal")?.checked_sub(field("MemAvailable")?)?;
            Some(ByteSize::new(used.saturating_sub(field("Hugetlb").unwrap_or(0))))
        };
        Self { in_use: in_use() }
    }

    /// Memory in use, if known, plus `RESERVE`.
    #[must_use]
    pub fn total(self) -> ByteSize {
        ByteSize::new(self.in_use.map_or(0, ByteSize::get).saturating_add(RESERVE.get()))
    }

    /// Warning about a split that leaves the hypervisor less than the need; `None` where it leaves enough.
    #[must_use]
    pub fn warning(self, split: &Split) -> Option<String> {
        let keeps = split.nodes.iter().fold(0u64, |sum, node| sum.saturating_add(node.keeps.get()));
        let reserve = size(RESERVE.get());
        let sum = match self.in_use {
            Some(in_use) => format!("{} in use now and a reserve of {reserve}", size(in_use.get())),
            None => format!("a reserve of {reserve}; memory in use is unknown"),
        };
        (keeps < self.total().get()).then(|| {
            format!(
                "the hypervisor keeps {}, but this host needs {} ({sum}): keep more with --hypervisor",
                size(keeps),
                size(self.total().get())
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carve::advise::NodeSplit;

    const MEMINFO: &str = "\
MemTotal:       16777216 kB
MemFree:         1048576 kB
MemAvailable:    8388608 kB
HugePages_Total:    1024
Hugetlb:         2097152 kB
";

    /// A split that leaves the hypervisor so many GiB at each of two nodes.
    fn split(keeps: u64) -> Split {
        let node = |node| NodeSplit {
            node,
            keeps: ByteSize::new(keeps << 30),
            guests: ByteSize::new(1 << 30),
            hidden: Vec::new(),
        };
        Split { nodes: vec![node(0), node(1)], ..Split::default() }
    }

    #[test]
    fn memory_in_use_is_neither_reclaimable_nor_in_pools() {
        assert_eq!(Need::of(MEMINFO).in_use, Some(ByteSize::new(6 << 30)));
        let without_pools = MEMINFO.replace("Hugetlb:", "Other:");
        assert_eq!(Need::of(&without_pools).in_use, Some(ByteSize::new(8 << 30)));
        let old_kernel = MEMINFO.replace("MemAvailable:", "Other:");
        let hostile = MEMINFO.replace("16777216", "1").replace("2097152", "99999999999999999999");
        for unknown in ["", old_kernel.as_str(), hostile.as_str()] {
            assert_eq!(Need::of(unknown), Need::default(), "{unknown}");
        }
    }

    #[test]
    fn a_split_that_leaves_less_than_the_need_has_a_warning() {
        let need = Need::of(MEMINFO);
        assert_eq!(need.total(), ByteSize::new(7 << 30));
        assert_eq!(need.warning(&split(4)), None);
        let exact = Need { in_use: Some(ByteSize::new(7 << 30)) };
        assert_eq!(exact.warning(&split(4)), None, "8 GiB of 8 GiB");
        assert_eq!(
            need.warning(&split(3)).as_deref(),
            Some(
                "the hypervisor keeps 6 GiB, but this host needs 7 GiB (6 GiB in use now and a reserve of 1 GiB): \
                 keep more with --hypervisor"
            )
        );
    }

    #[test]
    fn of_a_recorded_host_only_the_reserve_is_known() {
        assert_eq!(Need::default().warning(&split(1)), None);
        let warning = Need::default().warning(&split(0)).unwrap();
        assert!(warning.contains("needs 1 GiB (a reserve of 1 GiB; memory in use is unknown)"), "{warning}");
    }
}
