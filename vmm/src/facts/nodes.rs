//! Memory and NUMA nodes from `/proc/meminfo` and `/sys/devices/system/node`.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use egm_address::{ByteSize, CpuSet};
use egm_device::HugePage;

use crate::facts::{FactsError, HostMemory, HostNode, Pool};

/// Size that most files of the kernel do not exceed, in bytes.
const USUAL: usize = 4 << 10;

/// The text of a file of the kernel, without the newline. One read gets all of it where it can: the kernel may make the text
/// anew for each read, and reports no useful size.
pub(super) fn text(path: &Path) -> Result<String, FactsError> {
    let read = || {
        let mut bytes = Vec::with_capacity(USUAL);
        File::open(path)?.take(u64::MAX).read_to_end(&mut bytes)?; // a plain `File` would be queried for its size
        String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    };
    let text = read().map_err(|source| FactsError::Read { path: path.to_owned(), source })?;
    Ok(text.trim().to_owned())
}

fn set(path: &Path) -> Result<CpuSet, FactsError> {
    let text = text(path)?;
    text.parse().map_err(|_| FactsError::Content {
        path: path.to_owned(),
        text,
        expected: "a list like 0-3,8",
    })
}

fn number(path: &Path) -> Result<u64, FactsError> {
    let text = text(path)?;
    text.parse().map_err(|_| FactsError::Content { path: path.to_owned(), text, expected: "a number" })
}

/// Bytes of the line `name` of a `meminfo` file: `MemTotal:  24684096 kB`, in a node's after `Node 0 `.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let value = |line: &str| {
        let (label, value) = line.split_once(':')?;
        let before = label.strip_suffix(name)?;
        let is_it = before.is_empty() || before.ends_with(' ');
        is_it.then(|| value.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024))?
    };
    text.lines().find_map(value)
}

fn memory(path: &Path) -> Result<HostMemory, FactsError> {
    let text = text(path)?;
    let line = |name| meminfo(&text, name);
    // A node's file has no MemAvailable: free memory and the page cache but for shared memory come close.
    let cache =
        || line("FilePages")?.checked_sub(line("Shmem")?)?.checked_add(line("SReclaimable").unwrap_or(0));
    let available = || line("MemAvailable").or_else(|| line("MemFree")?.checked_add(cache().unwrap_or(0)));
    match (line("MemTotal"), available()) {
        (Some(total), Some(available)) => {
            Ok(HostMemory { total: ByteSize::new(total), available: ByteSize::new(available.min(total)) })
        }
        _ => Err(FactsError::Content {
            path: path.to_owned(),
            text,
            expected: "a list with MemTotal and MemFree",
        }),
    }
}

/// Memory of the whole host.
pub(super) fn host(root: &Path) -> Result<HostMemory, FactsError> {
    memory(&root.join("proc/meminfo"))
}

/// Every node that is online; a kernel without NUMA has one, node 0, with everything.
pub(super) fn all(root: &Path) -> Result<Vec<HostNode>, FactsError> {
    let folder = root.join("sys/devices/system/node");
    let online = match set(&folder.join("online")) {
        Err(FactsError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        online => Some(online?),
    };
    let Some(online) = online else {
        return Ok(vec![HostNode {
            id: 0,
            cpus: set(&root.join("sys/devices/system/cpu/online"))?,
            memory: host(root)?,
            distances: vec![10],
            pools: pools(&root.join("sys/kernel/mm/hugepages"))?,
        }]);
    };
    online.iter().map(|id| node(&folder.join(format!("node{id}")), id)).collect()
}

fn node(folder: &Path, id: u32) -> Result<HostNode, FactsError> {
    let path = folder.join("distance");
    let distances = text(&path)?;
    let parsed: Result<Vec<u8>, _> = distances.split_whitespace().map(str::parse).collect();
    let distances = parsed.map_err(|_| FactsError::Content {
        path,
        text: distances,
        expected: "a list of distances up to 255",
    })?;
    Ok(HostNode {
        id,
        cpus: set(&folder.join("cpulist"))?,
        memory: memory(&folder.join("meminfo"))?,
        distances,
        pools: pools(&folder.join("hugepages"))?,
    })
}

/// The pools of all page sizes, smaller pages first; a kernel without hugetlb has none.
fn pools(folder: &Path) -> Result<Vec<Pool>, FactsError> {
    HugePage::ALL.into_iter().filter_map(|page| pool(folder, page).transpose()).collect()
}

/// The pool of pages of this size, if the kernel has one.
fn pool(folder: &Path, page: HugePage) -> Result<Option<Pool>, FactsError> {
    let folder = folder.join(format!("hugepages-{}kB", page.bytes() >> 10));
    let total = match number(&folder.join("nr_hugepages")) {
        Err(FactsError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
        total => total?,
    };
    let free = if total == 0 { 0 } else { number(&folder.join("free_hugepages"))? };
    Ok(Some(Pool { page_size: ByteSize::new(page.bytes()), total, free }))
}
