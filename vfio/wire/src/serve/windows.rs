//! The memory that a client lends a device: windows of DMA addresses that do not overlap.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::message::{DmaMap, DmaUnmap};

/// Most windows of a client.
pub(super) const MOST_WINDOWS: usize = 0xffff;

/// What a client lends.
#[derive(Debug, Default)]
pub struct Windows(BTreeMap<u64, (DmaMap, Option<OwnedFd>)>);

/// Where DMA addresses lead.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The file, and the offset in it; without one the client has to be asked.
    pub file: Option<(BorrowedFd<'a>, u64)>,
    /// Bytes from here to the end of the window.
    pub left: u64,
}

impl Windows {
    /// Takes a window.
    ///
    /// # Errors
    /// `EEXIST` over another, `ENOSPC` when there are 65,535.
    pub fn map(&mut self, map: DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        if self.0.len() >= MOST_WINDOWS {
            return Err(Errno::NOSPC);
        }
        let last = last(map);
        let before = self.0.range(..=last).next_back();
        if before.is_some_and(|(_, (known, _))| self::last(*known) >= map.address) {
            return Err(Errno::EXIST);
        }
        self.0.insert(map.address, (map, file));
        Ok(())
    }

    /// Lets a window go, or all.
    ///
    /// # Errors
    /// `ENOENT` when there is no such window.
    pub fn unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        match unmap {
            DmaUnmap::All => self.0.clear(),
            DmaUnmap::Window { address, size } => {
                let known = self.0.get(&address).is_some_and(|(map, _)| map.size == size);
                known.then(|| self.0.remove(&address)).ok_or(Errno::NOENT)?;
            }
        }
        Ok(())
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Where `address` leads; `None` where the device may not read, or write.
    #[must_use]
    pub fn place(&self, address: u64, write: bool) -> Option<Place<'_>> {
        let (_, (map, file)) = self.0.range(..=address).next_back()?;
        let inside = address.checked_sub(map.address)?;
        let left = map.size.checked_sub(inside).filter(|left| *left > 0)?;
        let allowed = if write { map.write } else { map.read };
        let offset = map.offset.checked_add(inside)?;
        allowed.then(|| Place { file: file.as_ref().map(|file| (file.as_fd(), offset)), left })
    }
}

/// A window's last address: it is never empty and ends in 64 bits.
fn last(map: DmaMap) -> u64 {
    map.address.saturating_add(map.size.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(address: u64, size: u64) -> DmaMap {
        DmaMap { read: true, write: false, offset: 0x100, address, size }
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
        for (address, size) in [(0x1000, 0xfff), (0x1001, 0x1000), (0, 1)] {
            assert_eq!(windows.unmap(DmaUnmap::Window { address, size }), Err(Errno::NOENT));
        }
        windows.unmap(DmaUnmap::Window { address: 0x1000, size: 0x1000 }).unwrap();
        assert_eq!(windows.count(), 2);
        windows.unmap(DmaUnmap::All).unwrap();
        assert_eq!(windows.count(), 0);
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
        fn an_address_leads_where_the_one_window_over_it_says(
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
