//! Memory that is shared with a vfio-user server.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egm_address::{Io, Iova, Span};
use egm_vfio_wire::client::CallError;
use egm_vfio_wire::message::{ByFile, DmaMap, DmaUnmap, Limits as WireLimits};

use super::Link;
use crate::dma::{Access, DmaError, Domain, Limits};
use crate::mapping::{MadeOf, Mapping};
use crate::memory::{HostBacking, HostMemory};

/// Address space of one vfio-user device. Memory is shared by its file; memory without a file cannot be shared.
pub struct UserDomain {
    link: Arc<Link>,
    limits: WireLimits,
    /// Shared ranges by first address. Locked across a call, so that two maps cannot both find space.
    shared: Mutex<BTreeMap<Iova, SharedSpan>>,
}

struct SharedSpan {
    span: Span<Io>,
    _memory: Arc<dyn HostMemory>,
}

impl UserDomain {
    pub(super) fn new(link: Arc<Link>, limits: WireLimits) -> Self {
        Self { link, limits, shared: Mutex::default() }
    }

    fn shared(&self) -> MutexGuard<'_, BTreeMap<Iova, SharedSpan>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Smallest page that the server accepts, in bytes; 4 KiB if its capabilities hold no valid size.
    fn page(&self) -> u64 {
        let smallest = self.limits.page_sizes.trailing_zeros();
        1_u64.checked_shl(smallest).filter(|page| *page >= 0x1000).unwrap_or(0x1000)
    }
}

/// The file of `memory` from `offset` on.
fn file(memory: &dyn HostMemory, offset: u64) -> Option<(BorrowedFd<'_>, u64)> {
    let (file, first) = match memory.backing() {
        HostBacking::File { file, offset } | HostBacking::GuestMemfd { file, offset } => (file, offset),
        HostBacking::Bar { dma_buf } => dma_buf?,
        HostBacking::Invisible | HostBacking::Pages => return None,
    };
    Some((file, first.checked_add(offset)?))
}

fn refused(iova: Span<Io>, what: &'static str, error: CallError) -> DmaError {
    let source = match error {
        CallError::Refused { source, .. } => source,
        other => io::Error::other(other),
    };
    DmaError::Refused { iova: iova.start(), size: iova.size(), what, source }
}

impl Domain for UserDomain {
    fn limits(&self) -> Limits {
        let left = self.limits.maps.saturating_sub(u64::try_from(self.shared().len()).unwrap_or(u64::MAX));
        let mappings = Some(u32::try_from(left).unwrap_or(u32::MAX));
        Limits { ranges: Vec::new(), page_size: self.page(), mappings }
    }

    fn map(
        &self,
        iova: Span<Io>,
        memory: &Arc<dyn HostMemory>,
        offset: u64,
        access: Access,
    ) -> Result<(), DmaError> {
        let (first, size) = (iova.start(), iova.size());
        let no_way = |rule| DmaError::NoWay { iova: first, size, rule };
        let end = offset.checked_add(size);
        if end.is_none_or(|end| end > memory.size()) {
            return Err(no_way("it ends beyond the shared memory"));
        }
        if !first.is_aligned(self.page()) || !size.is_multiple_of(self.page()) {
            return Err(no_way("the vfio-user server takes whole pages of its own size only"));
        }
        let (file, offset) = file(memory.as_ref(), offset)
            .ok_or_else(|| no_way("a vfio-user server gets memory as a file, and this has none"))?;
        if let HostBacking::Bar { .. } = memory.backing()
            && Mapping::of(file, offset, self.page(), 0, MadeOf::Bar(None)).is_err()
        {
            return Err(no_way(
                "a vfio-user server maps what it gets, and this kernel's dma-bufs cannot be mapped",
            ));
        }
        let mut shared = self.shared();
        let before = shared.range(..=iova.last()).next_back();
        if before.is_some_and(|(_, shared)| shared.span.overlaps(iova)) {
            let source = io::ErrorKind::AlreadyExists.into();
            return Err(DmaError::Refused { iova: first, size, what: "share it twice", source });
        }
        if u64::try_from(shared.len()).is_ok_and(|count| count >= self.limits.maps) {
            return Err(no_way("the vfio-user server takes no more pieces of memory"));
        }
        let write = access == Access::ReadWrite;
        let map = DmaMap { read: true, write, offset, address: first.get(), size, by_file: ByFile::Any };
        self.link
            .call(|client| client.dma_map(map, Some(file)))
            .map_err(|error| refused(iova, "share it with the vfio-user server", error))?;
        shared.insert(first, SharedSpan { span: iova, _memory: Arc::clone(memory) });
        Ok(())
    }

    fn unmap(&self, iova: Span<Io>) -> Result<(), DmaError> {
        let mut shared = self.shared();
        if shared.get(&iova.start()).is_none_or(|known| known.span != iova) {
            let rule = "it was not shared as this piece";
            return Err(DmaError::NoWay { iova: iova.start(), size: iova.size(), rule });
        }
        let unmap = DmaUnmap::Window { address: iova.start().get(), size: iova.size() };
        let answer = self.link.call(|client| client.dma_unmap(unmap));
        // A lost server has no access any more; a server that refuses still has it.
        if !matches!(answer, Err(CallError::Refused { .. })) {
            shared.remove(&iova.start());
        }
        answer.map_err(|error| refused(iova, "take it back from the vfio-user server", error))
    }
}
