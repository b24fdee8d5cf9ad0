//! Transparent huge pages of a host (Documentation/admin-guide/mm/transhuge.rst).

use std::error::Error as _;
use std::path::Path;

use egm_address::ByteSize;

use crate::facts::nodes::text;
use crate::facts::{HugeFiles, Probe};

const FOLDER: &str = "sys/kernel/mm/transparent_hugepage";

/// Transparent huge pages of the largest size, and what the host has them for.
pub(super) struct HugePages {
    /// 2 MiB where the kernel has none.
    pub page: ByteSize,
    /// The setting for memory of files, empty when unknown.
    pub shmem: String,
    /// The setting for anonymous memory, empty when unknown or not asked for.
    pub anonymous: String,
}

impl HugePages {
    /// Huge pages of the host in `root`. `anonymous`: whether the plan depends on the setting for anonymous memory.
    pub(super) fn of(root: &Path, anonymous: bool) -> Self {
        let folder = root.join(FOLDER);
        let bytes = text(&folder.join("hpage_pmd_size")).unwrap_or_default().parse().ok();
        let page = ByteSize::new(bytes.filter(|bytes: &u64| bytes.is_power_of_two()).unwrap_or(2 << 20));
        let own = folder.join(format!("hugepages-{}kB", page.get() >> 10));
        Self {
            page,
            shmem: setting(&folder, &own, "shmem_enabled"),
            anonymous: if anonymous { setting(&folder, &own, "enabled") } else { String::new() },
        }
    }
}

/// The setting `name` of all sizes, or that of the largest size alone (Linux 6.8) where it overrides.
fn setting(all: &Path, own: &Path, name: &str) -> String {
    let read = |folder: &Path| chosen(&text(&folder.join(name)).unwrap_or_default());
    let all = read(all);
    if matches!(all.as_str(), "deny" | "force") {
        return all;
    }
    match read(own) {
        own if own.is_empty() || own == "inherit" => all,
        own => own,
    }
}

/// The word in brackets of `always [advise] never`.
fn chosen(text: &str) -> String {
    text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(word, _)| word).to_owned()
}

/// Mounts a tmpfs with huge pages and drops it.
pub(super) fn files() -> Probe<HugeFiles> {
    match egm_device::HugeFiles::mount() {
        Ok(files) => Probe::Present(HugeFiles { user_namespace: files.in_user_namespace() }),
        Err(error) => {
            let reason = error.source().map_or_else(String::new, |reason| format!(": {reason}"));
            Probe::Absent(format!("{error}{reason}"))
        }
    }
}
