//! Where bad memory is: from this process's address to the guest's, and from a region's bytes to the guest's.

use egm_address::{Address, Gpa, Guest, InRegion, Span};
use egm_device::poison::GuestFault;

/// A mapped piece of guest memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MappedPiece {
    /// Address in this process.
    pub(super) host: u64,
    /// Where the guest sees it.
    pub(super) guest: Span<Guest>,
    /// Index of its memory in the machine.
    pub(super) memory: usize,
    /// Where it lies in that memory's region; of ordinary memory, in its file.
    pub(super) bytes: Span<InRegion>,
}

/// All of a guest's memory.
#[derive(Debug, Default)]
pub(super) struct MappedMemory(pub(super) Vec<MappedPiece>);

impl MappedMemory {
    /// The guest's addresses of a bad page; `None` when it is no memory of the guest.
    pub(super) fn of_fault(&self, fault: GuestFault) -> Option<Span<Guest>> {
        self.0.iter().find_map(|piece| {
            let first = fault.address.max(piece.host).checked_sub(piece.host)?;
            let end = fault.address.saturating_add(fault.size).checked_sub(piece.host)?;
            clip(piece.guest, first, end)
        })
    }

    /// The guest's addresses of `bad`, which are bytes of memory number `memory`; none for what the guest does not see.
    pub(super) fn of_bytes(&self, memory: usize, bad: Span<InRegion>) -> impl Iterator<Item = Span<Guest>> {
        self.0.iter().filter(move |piece| piece.memory == memory).filter_map(move |piece| {
            let part = piece.bytes.intersection(bad)?;
            let behind = |at: Address<InRegion>| at.offset_from(piece.bytes.start());
            clip(piece.guest, behind(part.start())?, behind(part.end())?)
        })
    }
}

/// The bytes from `first` to `end` after the start of `whole`, clipped to it.
fn clip(whole: Span<Guest>, first: u64, end: u64) -> Option<Span<Guest>> {
    let at = |behind| whole.start().get().checked_add(behind).map(Gpa::new);
    Span::between(at(first)?, at(end.min(whole.size()))?)
}

#[cfg(test)]
mod tests {
    use egm_address::Offset;
    use proptest::prelude::*;

    use super::*;

    const HOST: u64 = 0x7000_0000;

    /// A slice of 64 pages at 1 MiB of its region, seen by the guest at 4 GiB and, behind a hole of one page, at 8 GiB.
    fn slice() -> MappedMemory {
        let piece = |host, guest, bytes, size| MappedPiece {
            host,
            guest: Span::new(Gpa::new(guest), size).unwrap(),
            memory: 1,
            bytes: Span::new(Offset::new(bytes), size).unwrap(),
        };
        MappedMemory(vec![
            piece(HOST, 0x1_0000_0000, 0x10_0000, 0x2_0000),
            piece(0x9000_0000, 0x2_0000_0000, 0x12_1000, 0x1_f000),
        ])
    }

    fn fault(address: u64, size: u64) -> Option<(u64, u64)> {
        slice().of_fault(GuestFault { address, size }).map(|span| (span.start().get(), span.size()))
    }

    fn bytes(memory: usize, from: u64, size: u64) -> Vec<(u64, u64)> {
        let bad = Span::new(Offset::new(from), size).unwrap();
        slice().of_bytes(memory, bad).map(|span| (span.start().get(), span.size())).collect()
    }

    #[test]
    fn a_page_that_a_vcpu_accessed_is_found_by_its_host_address_and_clipped_to_its_piece() {
        assert_eq!(fault(HOST + 0x3000, 0x1000), Some((0x1_0000_3000, 0x1000)));
        assert_eq!(fault(0x9001_e000, 0x1000), Some((0x2_0001_e000, 0x1000)));
        assert_eq!(fault(HOST, 0x20_0000), Some((0x1_0000_0000, 0x2_0000)));
        assert_eq!((fault(HOST - 0x1000, 0x1000), fault(HOST + 0x2_0000, 0x1000)), (None, None));
        assert_eq!(fault(u64::MAX - 0xfff, 0x1000), None);
    }

    #[test]
    fn bytes_of_a_region_may_be_seen_in_two_places_or_in_none() {
        assert_eq!(bytes(1, 0x11_f000, 0x3000), [(0x1_0001_f000, 0x1000), (0x2_0000_0000, 0x1000)]);
        assert_eq!(bytes(1, 0x12_0000, 0x1000), []);
        assert_eq!(bytes(0, 0x10_0000, 0x1000), []);
    }

    proptest! {
        #[test]
        fn address_and_bytes_of_one_page_are_one_guest_address(page in 0u64..0x20) {
            let address = fault(HOST + (page << 12), 0x1000).unwrap();
            prop_assert_eq!(bytes(1, 0x10_0000 + (page << 12), 0x1000), [address]);
        }
    }
}
