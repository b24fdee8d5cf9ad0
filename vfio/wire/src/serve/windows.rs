//! Memory that a client shares with a device: windows of DMA addresses that do not overlap.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;

use crate::message::{DmaMap, DmaUnmap};

/// Most windows of a client.
pub(super) const MOST_WINDOWS: usize = 0xffff;

/// Windows that a client shares.
///
/// Behind an IOMMU a client has thousands of windows into one file and sends its descriptor with each: one is kept.
#[derive(Debug, Default)]
pub struct Windows {
    by_address: BTreeMap<u64, (DmaMap, Option<Arc<OwnedFd>>)>,
    /// Regular files behind the windows: each descriptor of such a file leads to the same pages.
    files: BTreeMap<Identity, Arc<OwnedFd>>,
}

/// Identity of a regular file, memory files included: device, inode and access mode of its descriptor.
type Identity = (u64, u64, u32);

/// Target of a DMA address.
#[derive(Debug, Clone, Copy)]
pub struct WindowBytes<'a> {
    /// The file, and the offset in it; without a file, accesses go through the client.
    pub file: Option<(BorrowedFd<'a>, u64)>,
    /// Bytes from here to the end of the window.
    pub left: u64,
}

impl Windows {
    /// Adds a window.
    ///
    /// # Errors
    /// `EEXIST` if it overlaps another, `ENOSPC` if there are 65,535.
    pub fn map(&mut self, map: DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        if self.by_address.len() >= MOST_WINDOWS {
            return Err(Errno::NOSPC);
        }
        let last = last(map);
        let before = self.by_address.range(..=last).next_back();
        if before.is_some_and(|(_, (known, _))| self::last(*known) >= map.address) {
            return Err(Errno::EXIST);
        }
        let file = file.map(|file| self.shared(file));
        self.by_address.insert(map.address, (map, file));
        Ok(())
    }

    /// Removes the windows of a range, or all. A range may cover several: QEMU unmaps address spaces in ranges that are
    /// powers of two.
    ///
    /// # Errors
    /// `ENOENT` for a range without a window, `EINVAL` when it would split one: nothing is unmapped then.
    pub fn unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        let DmaUnmap::Window { address, size } = unmap else {
            *self = Self::default();
            return Ok(());
        };
        let Some(end) = size.checked_sub(1).map(|size| address.saturating_add(size)) else {
            return Err(Errno::INVAL);
        };
        // They do not overlap: only the last before the range and the last in it can cross its edges.
        let before = self.by_address.range(..address).next_back();
        let inside: Vec<u64> = self.by_address.range(address..=end).map(|(at, _)| *at).collect();
        let at_end = inside.last().and_then(|at| self.by_address.get(at));
        if before.is_some_and(|(_, (map, _))| last(*map) >= address)
            || at_end.is_some_and(|(map, _)| last(*map) > end)
        {
            return Err(Errno::INVAL);
        }
        if inside.is_empty() && !egm_address::fault!("unmap-of-nothing-accepted") {
            return Err(Errno::NOENT);
        }
        inside.iter().for_each(|at| drop(self.by_address.remove(at)));
        self.files.retain(|_, file| Arc::strong_count(file) > 1);
        Ok(())
    }

    /// Returns the known descriptor of the same file, or `file`.
    fn shared(&mut self, file: OwnedFd) -> Arc<OwnedFd> {
        match identity(&file) {
            Some(identity) => Arc::clone(self.files.entry(identity).or_insert_with(|| Arc::new(file))),
            None => Arc::new(file),
        }
    }

    /// Number of windows, 65,535 at most.
    #[must_use]
    pub fn count(&self) -> usize {
        self.by_address.len()
    }

    /// Target of `address`; `None` if the device may not read it (write it, if `write`).
    #[must_use]
    pub fn place(&self, address: u64, write: bool) -> Option<WindowBytes<'_>> {
        let (_, (map, file)) = self.by_address.range(..=address).next_back()?;
        let inside = address.checked_sub(map.address)?;
        let left = map.size.checked_sub(inside).filter(|left| *left > 0)?;
        let allowed = if write { map.write } else { map.read };
        let offset = map.offset.checked_add(inside)?;
        allowed.then(|| WindowBytes { file: file.as_ref().map(|file| (file.as_fd(), offset)), left })
    }
}

/// Identity of `file`; `None` if it is no regular file: all files of another kind may have one inode.
fn identity(file: &OwnedFd) -> Option<Identity> {
    let stat =
        fstat(file).ok().filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)?;
    let mode = fcntl_getfl(file).ok()? & OFlags::RWMODE;
    Some((stat.st_dev, stat.st_ino, mode.bits()))
}

/// Last address of a window, which is never empty and ends within 64 bits.
fn last(map: DmaMap) -> u64 {
    map.address.saturating_add(map.size.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::message::ByFile;

    fn map(address: u64, size: u64) -> DmaMap {
        DmaMap { read: true, write: false, offset: 0x100, address, size, by_file: ByFile::Any }
    }

    #[test]
    fn windows_do_not_overlap_and_go_as_they_came() {
        let mut windows = Windows::default();
        windows.map(map(0x1000, 0x1000), None).unwrap();
        windows.map(map(u64::MAX - 0xfff, 0x1000), None).unwrap();
        for wrong in [map(0x1fff, 1), map(0, 0x1001), map(0x1800, 1), map(0, u64::MAX), map(u64::MAX, 1)] {
            assert_eq!(windows.map(wrong, None), Err(Errno::EXIST), "{wrong:x?}");
        }
        windows.map(map(0x2000, 1), None).unwrap();
        let mut unmap = |address, size| (windows.unmap(DmaUnmap::Window { address, size }), windows.count());
        for (address, size) in [(0x1000, 0xfff), (0x1001, 0x1000), (0, 0x1001), (0x1800, 1), (0x1000, 0)] {
            assert_eq!(unmap(address, size), (Err(Errno::INVAL), 3), "{address:x} {size:x}");
        }
        assert_eq!(unmap(0x3000, 0x1000), (Err(Errno::NOENT), 3), "no window is there");
        assert_eq!(unmap(0x1000, 0x1000), (Ok(()), 2));
        assert_eq!(unmap(0, 0x10000), (Ok(()), 1), "a range takes all that it covers");
        windows.unmap(DmaUnmap::All).unwrap();
        assert_eq!(windows.count(), 0);
    }

    #[test]
    fn windows_into_one_file_keep_one_descriptor_until_the_last_is_gone() {
        let memory = |name| memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
        let (file, other) = (memory("one"), memory("other"));
        let mut windows = Windows::default();
        for index in 0..100 {
            windows.map(map(index << 12, 0x1000), Some(file.try_clone().unwrap())).unwrap();
        }
        assert_eq!(windows.files.len(), 1);
        windows.map(map(1 << 40, 0x1000), Some(other)).unwrap();
        let reopened = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        windows.map(map(1 << 41, 0x1000), Some(reopened.into())).unwrap();
        assert_eq!(windows.files.len(), 3, "one that may only be read is another");
        let of =
            |windows: &Windows, at| fstat(windows.place(at, false).unwrap().file.unwrap().0).unwrap().st_ino;
        assert_eq!(
            (of(&windows, 99 << 12), of(&windows, 0)),
            (fstat(&file).unwrap().st_ino, of(&windows, 1))
        );
        assert_ne!(of(&windows, 1 << 40), of(&windows, 0));
        windows.unmap(DmaUnmap::Window { address: 0, size: 99 << 12 }).unwrap();
        assert_eq!(windows.files.len(), 3);
        windows.unmap(DmaUnmap::Window { address: 99 << 12, size: 0x1000 }).unwrap();
        assert_eq!(windows.files.len(), 2);
    }

    #[test]
    fn a_client_has_65535_windows_at_most() {
        let mut windows = Windows::default();
        let taken = (0..70_000).filter(|index| windows.map(map(index << 12, 0x1000), None).is_ok());
        assert_eq!(taken.count(), 65_535);
        assert_eq!(windows.map(map(1 << 60, 1), None), Err(Errno::NOSPC));
    }

    proptest! {
        #[test]
        fn an_address_leads_where_the_one_window_over_it_states(
            spans in prop::collection::vec((0..40_u64, 1..8_u64), 0..8), address in 0..50_u64
        ) {
            let mut windows = Windows::default();
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (start, size) in spans {
                let free = taken.iter().all(|(other, length)| start >= other + length || *other >= start + size);
                prop_assert_eq!(windows.map(map(start, size), None).is_ok(), free);
                if free {
                    taken.push((start, size));
                }
            }
            let expected = taken.iter().find(|(start, size)| (*start..start + size).contains(&address));
            let left = windows.place(address, false).map(|place| place.left);
            prop_assert_eq!(left, expected.map(|(start, size)| start + size - address));
            prop_assert!(windows.place(address, true).is_none(), "they may only be read");
        }
    }
}
