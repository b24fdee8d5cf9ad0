//! Transparent huge pages of a host (Documentation/admin-guide/mm/transhuge.rst).

use std::error::Error as _;
use std::path::Path;

use egm_address::ByteSize;

use crate::facts::nodes::text;
use crate::facts::{HugeFiles, Probe};

const FOLDER: &str = "sys/kernel/mm/transparent_hugepage";

/// Bytes of a huge page; 2 MiB where the kernel has none.
pub(super) fn page(root: &Path) -> ByteSize {
    let text = text(&root.join(FOLDER).join("hpage_pmd_size")).unwrap_or_default();
    let bytes = text.parse().ok().filter(|bytes: &u64| bytes.is_power_of_two());
    ByteSize::new(bytes.unwrap_or(2 << 20))
}

/// The setting `name`, that of huge pages of the largest size where it has one of its own (Linux 6.8); empty when unknown.
pub(super) fn setting(root: &Path, name: &str) -> String {
    let folder = root.join(FOLDER);
    let read = |path: &Path| chosen(&text(path).unwrap_or_default());
    let all = read(&folder.join(name));
    let own = read(&folder.join(format!("hugepages-{}kB", page(root).get() >> 10)).join(name));
    match (all.as_str(), own.as_str()) {
        ("deny" | "force", _) | (_, "" | "inherit") => all,
        _ => own,
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
