//! BARs as devices reach them: peer-to-peer DMA.
//!
//! The guest programs guest addresses into a function; behind one may be another function's BAR. So every BAR is
//! in every I/O address space, at its guest address, as memory is. It follows the guest's moves; while the guest has
//! decoding off it stays, because switching it off and on is how BARs are sized, and to map 256 GiB takes time. An address
//! space that cannot take a piece goes without, the others have it: a server maps files, and a host BAR is none.

use std::sync::{Arc, Mutex};

use egm_address::{Gpa, Io, Iova, Span};
use egm_vfio::dma::{Access, DmaError, Domain};
use egm_vfio::memory::HostMemory;
use slab::Slab;

use crate::lock::lock;

/// A piece of a BAR in [`Peers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Peer(usize);

struct Piece {
    memory: Arc<dyn HostMemory>,
    at: Option<Span<Io>>,
    /// The address spaces that have it there.
    domains: Vec<Arc<dyn Domain>>,
}

/// The pieces of all functions' BARs, in the I/O address spaces of a machine.
#[derive(Default)]
pub(crate) struct Peers {
    domains: Vec<Arc<dyn Domain>>,
    pieces: Mutex<Slab<Piece>>,
}

impl Peers {
    /// No pieces yet, for these address spaces.
    pub(crate) fn new(domains: Vec<Arc<dyn Domain>>) -> Self {
        Self { domains, pieces: Mutex::default() }
    }

    /// Adds a piece that is mapped nowhere yet.
    pub(super) fn add(&self, memory: Arc<dyn HostMemory>) -> Peer {
        Peer(lock(&self.pieces).insert(Piece { memory, at: None, domains: Vec::new() }))
    }

    /// Maps `peer` for devices where the guest has it, at `gpa`; unmaps a piece that was left there.
    ///
    /// # Errors
    /// [`DmaError`], the first: devices of the address spaces that refuse it reach it nowhere.
    pub(super) fn place(&self, peer: Peer, gpa: Gpa) -> Result<(), DmaError> {
        let mut pieces = lock(&self.pieces);
        let Some(piece) = pieces.get(peer.0) else { return Ok(()) };
        let memory = Arc::clone(&piece.memory);
        let Ok(iova) = Span::new(Iova::new(gpa.get()), memory.size()) else { return Ok(()) };
        if piece.at == Some(iova) || (piece.at.is_some() && egm_address::fault!("bar-move-ignored-by-iommu"))
        {
            return Ok(());
        }
        for (number, piece) in pieces.iter_mut() {
            if number == peer.0 || piece.at.is_some_and(|at| at.overlaps(iova)) {
                piece.unmap();
            }
        }
        let mut outcome = Ok(());
        let mut have = Vec::new();
        for domain in self.domains.iter().filter(|_| !egm_address::fault!("peer-window-missing")) {
            let mapped = domain.map(iova, &memory, 0, Access::ReadWrite);
            have.extend(mapped.is_ok().then(|| Arc::clone(domain)));
            outcome = outcome.and(mapped);
        }
        if let Some(piece) = pieces.get_mut(peer.0) {
            (piece.at, piece.domains) = (Some(iova), have);
        }
        outcome
    }

    /// Unmaps `peer` for devices.
    pub(super) fn withdraw(&self, peer: Peer) {
        if let Some(piece) = lock(&self.pieces).get_mut(peer.0) {
            piece.unmap();
        }
    }

    /// Removes `peer` and releases its memory; its number may become another's.
    pub(super) fn remove(&self, peer: Peer) {
        self.withdraw(peer);
        lock(&self.pieces).try_remove(peer.0);
    }
}

impl Piece {
    /// Unmaps the piece. A mapping that cannot be removed ends with the address space, and keeps its memory until then.
    fn unmap(&mut self) {
        if let Some(iova) = self.at.take() {
            self.domains.drain(..).for_each(|domain| drop(domain.unmap(iova)));
        }
    }
}

#[cfg(test)]
mod tests {
    use egm_vfio::fake::FakeDomain;
    use egm_vfio::mapping::Mapping;

    use super::*;

    fn piece(size: u64) -> Arc<dyn HostMemory> {
        Arc::new(Mapping::pages(size, 0).unwrap())
    }

    fn starts(domain: &FakeDomain) -> Vec<u64> {
        domain.mapped().iter().map(|(iova, _)| iova.start().get()).collect()
    }

    #[test]
    fn a_piece_is_in_every_address_space_where_the_guest_has_it_and_nowhere_else() {
        let domains = [Arc::new(FakeDomain::default()), Arc::new(FakeDomain::default())];
        let peers = Peers::new(domains.iter().map(|domain| Arc::clone(domain) as _).collect());
        let (low, high) = (peers.add(piece(0x2000)), peers.add(piece(0x1000)));
        peers.place(low, Gpa::new(0x10_0000)).unwrap();
        peers.place(high, Gpa::new(0x20_0000)).unwrap();
        peers.place(low, Gpa::new(0x30_0000)).unwrap();
        domains.iter().for_each(|domain| assert_eq!(starts(domain), [0x20_0000, 0x30_0000]));
        // Another was left here with decoding off: it is not what the guest sees at that address.
        peers.place(high, Gpa::new(0x30_1000)).unwrap();
        domains.iter().for_each(|domain| assert_eq!(starts(domain), [0x30_1000]));
        peers.withdraw(high);
        domains.iter().for_each(|domain| assert!(starts(domain).is_empty()));
    }

    #[test]
    fn a_piece_that_one_address_space_refuses_is_in_the_others_and_leaves_them() {
        let without = FakeDomain::new(egm_vfio::dma::Limits::default(), &["pages"]);
        let (with, without) = (Arc::new(FakeDomain::default()), Arc::new(without));
        let peers = Peers::new(vec![Arc::clone(&with) as _, without]);
        let piece = peers.add(piece(0x1000));
        assert!(peers.place(piece, Gpa::new(0x1000)).is_err());
        assert_eq!(starts(&with), [0x1000]);
        peers.withdraw(piece);
        assert!(starts(&with).is_empty());
    }
}
