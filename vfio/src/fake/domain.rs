//! A fake I/O address space.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};

use egm_address::{Io, Iova, Span};

use super::lock;
use crate::dma::{Access, DmaError, Domain, Limits};
use crate::memory::{HostBacking, HostMemory};

/// An I/O address space that records its maps, and through which a test reads and writes as a device would.
#[derive(Default)]
pub struct FakeDomain {
    limits: Limits,
    /// Kinds of memory that it cannot map, by the words of [`kind`].
    without: BTreeSet<&'static str>,
    maps: Mutex<BTreeMap<Iova, Mapped>>,
}

struct Mapped {
    iova: Span<Io>,
    memory: Arc<dyn HostMemory>,
    offset: u64,
    access: Access,
}

/// The kind of memory in one word: `file`, `guest_memfd`, `invisible`, `bar` or `pages`.
pub fn kind(backing: &HostBacking<'_>) -> &'static str {
    match backing {
        HostBacking::File { .. } => "file",
        HostBacking::GuestMemfd { .. } => "guest_memfd",
        HostBacking::Invisible => "invisible",
        HostBacking::Bar { .. } => "bar",
        HostBacking::Pages => "pages",
    }
}

impl FakeDomain {
    /// Creates one with these limits, which cannot map the kinds of memory in `without` (see [`kind`]).
    pub fn new(limits: Limits, without: &[&'static str]) -> Self {
        Self { limits, without: without.iter().copied().collect(), maps: Mutex::default() }
    }

    /// Mapped spans in ascending order, each with its access.
    pub fn mapped(&self) -> Vec<(Span<Io>, Access)> {
        lock(&self.maps).values().map(|mapped| (mapped.iova, mapped.access)).collect()
    }

    /// Reads at `iova` as a device; `None` is a fault.
    pub fn read(&self, iova: Iova, data: &mut [u8]) -> Option<()> {
        let maps = lock(&self.maps);
        let (mapped, offset) = at(&maps, iova, data.len())?;
        mapped.memory.read(offset, data)
    }

    /// Writes at `iova` as a device; `None` is a fault.
    pub fn write(&self, iova: Iova, data: &[u8]) -> Option<()> {
        let maps = lock(&self.maps);
        let (mapped, offset) = at(&maps, iova, data.len())?;
        if mapped.access == Access::Read {
            return None;
        }
        mapped.memory.write(offset, data)
    }
}

/// The map that has all of `length` bytes at `iova`, and their offset in its memory.
fn at(maps: &BTreeMap<Iova, Mapped>, iova: Iova, length: usize) -> Option<(&Mapped, u64)> {
    let (_, mapped) = maps.range(..=iova).next_back()?;
    let wanted = Span::new(iova, u64::try_from(length).ok()?).ok()?;
    let inside = iova.offset_from(mapped.iova.start())?;
    mapped.iova.covers(wanted).then_some((mapped, mapped.offset.checked_add(inside)?))
}

impl Domain for FakeDomain {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn map(
        &self,
        iova: Span<Io>,
        memory: &Arc<dyn HostMemory>,
        offset: u64,
        access: Access,
    ) -> Result<(), DmaError> {
        let (start, size) = (iova.start(), iova.size());
        let refused = |number| DmaError::Refused {
            iova: start,
            size,
            what: "map memory",
            source: io::Error::from_raw_os_error(number),
        };
        if self.without.contains(kind(&memory.backing())) {
            return Err(DmaError::NoWay { iova: start, size, rule: "the fake was set to refuse" });
        }
        let mut maps = lock(&self.maps);
        let count = u32::try_from(maps.len()).unwrap_or(u32::MAX);
        if self.limits.mappings.is_some_and(|most| count >= most) {
            return Err(refused(rustix::io::Errno::NOSPC.raw_os_error()));
        }
        if maps.values().any(|mapped| mapped.iova.overlaps(iova)) {
            return Err(refused(rustix::io::Errno::EXIST.raw_os_error()));
        }
        if offset.checked_add(size).is_none_or(|end| end > memory.size()) {
            return Err(refused(rustix::io::Errno::FAULT.raw_os_error()));
        }
        maps.insert(start, Mapped { iova, memory: Arc::clone(memory), offset, access });
        Ok(())
    }

    fn unmap(&self, iova: Span<Io>) -> Result<(), DmaError> {
        let mut maps = lock(&self.maps);
        match maps.remove(&iova.start()) {
            Some(mapped) if mapped.iova == iova => Ok(()),
            other => {
                maps.extend(other.map(|mapped| (mapped.iova.start(), mapped)));
                let source = io::Error::from(io::ErrorKind::NotFound);
                Err(DmaError::Refused { iova: iova.start(), size: iova.size(), what: "unmap", source })
            }
        }
    }
}
