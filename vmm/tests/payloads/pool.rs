//! A pool of huge pages of the host, for as long as a test needs it.

use std::fs::{self, File};

/// Pages of one size, reserved for one test at a time and returned on drop.
pub(crate) struct Pool {
    path: String,
    before: String,
    /// Serialises the tests that change pools: each is a process of its own.
    _lock: File,
}

impl Pool {
    /// `pages` free pages of `kib` KiB; `None`, with the reason printed, where the host does not provide them.
    pub(crate) fn reserve(pages: u64, kib: u64) -> Option<Self> {
        let folder = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB");
        let skip = |why: &str| println!("skipped: {folder}: {why}");
        let lock = File::open("/proc/sys/vm/nr_hugepages").ok()?;
        lock.lock().ok()?;
        let path = format!("{folder}/nr_hugepages");
        let Ok(before) = fs::read_to_string(&path) else {
            skip("no such pool");
            return None;
        };
        let number = |name: &str| -> u64 {
            fs::read_to_string(format!("{folder}/{name}")).unwrap().trim().parse().unwrap()
        };
        let (total, free) = (number("nr_hugepages"), number("free_hugepages"));
        let pool = Self { path, before, _lock: lock };
        if fs::write(&pool.path, (total + pages.saturating_sub(free)).to_string()).is_err() {
            skip("this user may not change it");
            return None;
        }
        if number("free_hugepages") < pages {
            skip("the host has too little contiguous memory");
            return None;
        }
        Some(pool)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = fs::write(&self.path, self.before.trim());
    }
}
