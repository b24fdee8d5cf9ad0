//! Kinds of memory that are registered.

use std::io;

use crate::error::Broken;
use crate::sys::Mapping;
use crate::sysfs;

/// A kind of memory: what it is called, and how some of it is had.
pub(in crate::validate) struct Kind {
    /// `node 2`, `pages of 2048 kB`.
    pub(in crate::validate) name: String,
    /// Makes some.
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

/// What a program gets without asking.
pub(in crate::validate) fn ordinary() -> Vec<Kind> {
    vec![Kind::new("ordinary memory", 4096, Mapping::new)]
}

/// Memory of each node that has some.
pub(in crate::validate) fn nodes() -> Result<Vec<Kind>, Broken> {
    let with_memory = sysfs::list("/sys/devices/system/node/has_memory")?;
    let with_processors = sysfs::list("/sys/devices/system/node/has_cpu")?;
    let kind = |node: u32| {
        let alone = if with_processors.iter().any(|other| other == node) { "" } else { " (memory alone)" };
        Kind::new(format!("node {node}{alone}"), 4096, move |size| Mapping::on_node(size, node))
    };
    Ok(with_memory.iter().map(kind).collect())
}

/// Large pages of each pool that has free ones, node by node.
pub(in crate::validate) fn pools() -> Result<Vec<Kind>, Broken> {
    let mut kinds = Vec::new();
    for node in sysfs::list("/sys/devices/system/node/has_memory")?.iter() {
        let pools = format!("/sys/devices/system/node/node{node}/hugepages");
        kinds.extend(sysfs::names(&pools).into_iter().filter_map(|folder| {
            let kilobytes: usize = folder.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let free = sysfs::number(format!("{pools}/{folder}/free_hugepages")).ok()?;
            let page = kilobytes.checked_mul(1024).filter(|page| page.is_power_of_two())?;
            let make = move |size| Mapping::huge(size, page.trailing_zeros(), node);
            let kind = Kind::new(format!("pages of {kilobytes} kB of node {node}"), page, make);
            let there = usize::try_from(free).ok()?.checked_mul(page)?;
            (free >= 2).then_some(Kind { there, ..kind })
        }));
    }
    Ok(kinds)
}
