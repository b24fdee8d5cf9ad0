//! Kinds of memory that are registered.

use std::io;
use std::path::Path;

use crate::error::Broken;
use crate::sys::Mapping;
use crate::tree::Tree;
use crate::{machine, sysfs};

/// A kind of memory: its name, and how to allocate it.
pub(in crate::validate) struct Kind {
    /// `node 2`, `huge pages of 2048 kB of node 0`.
    pub(in crate::validate) name: String,
    make: Box<dyn Fn(usize) -> io::Result<Mapping>>,
    /// Sizes are multiples of it.
    page: usize,
    /// Bytes that there are.
    there: usize,
}

impl Kind {
    fn new(
        name: impl Into<String>,
        page: usize,
        make: impl Fn(usize) -> io::Result<Mapping> + 'static,
    ) -> Self {
        Self { name: name.into(), make: Box::new(make), page, there: usize::MAX }
    }

    /// The most that two memories of this kind may have.
    pub(in crate::validate) fn most(&self) -> usize {
        self.there / self.page / 2 * self.page
    }

    /// `size` bytes or a little more.
    pub(in crate::validate) fn memory(&self, size: usize) -> Result<Mapping, Broken> {
        let size = size.max(1).next_multiple_of(self.page);
        (self.make)(size).map_err(Broken::system(format!("cannot have {size} bytes of {}", self.name)))
    }
}

/// Memory that a program gets without asking.
pub(in crate::validate) fn ordinary() -> Vec<Kind> {
    let there = machine::meminfo(&Tree::live(), "MemAvailable").map_or(usize::MAX, part);
    vec![Kind { there, ..Kind::new("ordinary memory", 4096, Mapping::new) }]
}

/// Part of `free` bytes that is taken at most, for both ends together: registered memory cannot be taken back.
fn part(free: u64) -> usize {
    usize::try_from(free / 2).unwrap_or(usize::MAX)
}

/// The nodes that have memory; none where the kernel has no NUMA.
pub(in crate::validate) fn with_memory() -> Result<Vec<u32>, Broken> {
    const NODES: &str = "/sys/devices/system/node/has_memory";
    if !Path::new(NODES).exists() {
        return Ok(Vec::new());
    }
    Ok(sysfs::list(NODES)?.iter().collect())
}

/// Bytes of `node` that are free: `Node 1 MemFree: 340952 kB`.
fn free(node: u32) -> Option<u64> {
    let text = sysfs::text(format!("/sys/devices/system/node/node{node}/meminfo")).ok()?;
    free_in(&text)
}

fn free_in(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains(" MemFree:"))?;
    let (_, value) = line.split_once(':')?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Memory of each node that has some; the machine's where the kernel has no NUMA.
pub(in crate::validate) fn nodes() -> Result<Vec<Kind>, Broken> {
    let with_memory = with_memory()?;
    if with_memory.is_empty() {
        return Ok(ordinary());
    }
    let with_processors = sysfs::list("/sys/devices/system/node/has_cpu")?;
    let kind = |node: u32| {
        let alone = if with_processors.iter().any(|other| other == node) { "" } else { " (memory alone)" };
        let name = format!("node {node}{alone}");
        let there = free(node).map_or(usize::MAX, part);
        Kind { there, ..Kind::new(name, 4096, move |size| Mapping::on_node(size, node)) }
    };
    Ok(with_memory.into_iter().map(kind).collect())
}

/// Large pages of each pool that has free ones, node by node.
pub(in crate::validate) fn pools() -> Result<Vec<Kind>, Broken> {
    let mut kinds = Vec::new();
    for node in with_memory()? {
        let pools = format!("/sys/devices/system/node/node{node}/hugepages");
        kinds.extend(sysfs::names(&pools).into_iter().filter_map(|folder| {
            let kilobytes: usize = folder.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let free = sysfs::number(format!("{pools}/{folder}/free_hugepages")).ok()?;
            let page = kilobytes.checked_mul(1024).filter(|page| page.is_power_of_two())?;
            let make = move |size| Mapping::huge(size, page.trailing_zeros(), node);
            let kind = Kind::new(format!("huge pages of {kilobytes} kB of node {node}"), page, make);
            let there = usize::try_from(free).ok()?.checked_mul(page)?;
            (free >= 2).then_some(Kind { there, ..kind })
        }));
    }
    Ok(kinds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_of_a_node_is_read_and_half_of_it_is_the_most() {
        let text =
            "Node 1 MemTotal:       349241344 kB\nNode 1 MemFree:        1024 kB\nNode 1 MemUsed: 1 kB\n";
        assert_eq!(free_in(text), Some(1 << 20));
        assert_eq!((free_in(""), free_in("Node 1 MemFree: x kB")), (None, None));
        let kind = Kind { there: part(1 << 20), ..Kind::new("node 1", 4096, Mapping::new) };
        assert_eq!(kind.most(), 1 << 18);
    }
}
