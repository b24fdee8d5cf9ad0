//! Limit on this process's locked memory: memory that an IOMMU maps stays in place, and counts.

use std::fs;

use rustix::process::{Resource, getrlimit};

use super::DmaError;

/// A limit on locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memlock {
    /// Bytes; `None` without a limit.
    pub limit: Option<u64>,
    /// Bytes that are locked already.
    pub locked: u64,
}

impl Memlock {
    /// Current limit and use of this process.
    pub fn of_process() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self::parse(&status, getrlimit(Resource::Memlock).current)
    }

    /// Parses `/proc/PID/status` and `RLIMIT_MEMLOCK`. A process with `CAP_IPC_LOCK` has no limit (vfio_iommu_type1 and
    /// iommufd alike). The former counts `VmLck`, the latter `VmPin`.
    fn parse(status: &str, limit: Option<u64>) -> Self {
        const CAP_IPC_LOCK: u32 = 14;
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(|line| line.trim().trim_end_matches(" kB"))
        };
        let kib = |name| value(name).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let capabilities = value("CapEff").and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0);
        Self {
            limit: limit.filter(|_| capabilities & 1 << CAP_IPC_LOCK == 0),
            locked: kib("VmLck").max(kib("VmPin")).saturating_mul(1024),
        }
    }

    /// Whether `needed` more bytes may be locked.
    ///
    /// # Errors
    /// [`DmaError::Memlock`], from which the sufficient limit follows.
    pub fn check(self, needed: u64) -> Result<(), DmaError> {
        match self.limit {
            Some(limit) if self.locked.saturating_add(needed) > limit => {
                Err(DmaError::Memlock { needed, limit, locked: self.locked })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str =
        "Name:\tegm-vmm\nVmLck:\t    2048 kB\nVmPin:\t       0 kB\nCapEff:\t0000000000000000\n";

    #[test]
    fn locked_bytes_and_the_limit_are_those_of_the_process() {
        let memlock = Memlock::parse(STATUS, Some(8 << 20));
        assert_eq!(memlock, Memlock { limit: Some(8 << 20), locked: 2 << 20 });
        memlock.check(6 << 20).unwrap();
        let error = memlock.check((6 << 20) + 1).unwrap_err();
        assert!(error.to_string().contains("0x600001 more bytes"), "{error}");
        assert!(error.remedy().unwrap().contains("LimitMEMLOCK=8388609"));
        assert!(error.remedy().unwrap().contains("ulimit -l 8193"));
    }

    #[test]
    fn a_process_with_the_right_to_lock_everything_has_no_limit() {
        let able = STATUS.replace("CapEff:\t0000000000000000", "CapEff:\t0000000000004000");
        assert_eq!(Memlock::parse(&able, Some(0)).limit, None);
        Memlock::parse(&able, Some(0)).check(u64::MAX).unwrap();
        assert_eq!(Memlock::parse(STATUS, None).limit, None);
        assert_eq!(Memlock::parse("", Some(1)), Memlock { limit: Some(1), locked: 0 });
    }
}
