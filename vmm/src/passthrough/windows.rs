//! The parts of a function's BARs that the guest reaches without an exit.
//!
//! Each is mapped once, when the function is opened, at an address that suits its planned one; a memory slot puts it
//! into the guest. A slot changes only when its part moves, and outside of every lock that an access takes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use egm_address::Gpa;
use egm_vfio::dma::DmaError;

use super::parts::MappedPart;
use super::peers::{Peer, Peers};
use crate::kvm::{Slot, SlotTable};
use crate::lock::lock;
use crate::pci::DecodedBar;

/// A part and where it is.
struct Window {
    part: MappedPart,
    slot: Option<(Gpa, Slot)>,
    peer: Option<Peer>,
}

/// A BAR that other functions cannot reach.
pub(super) struct Unreachable {
    pub(super) bar: u8,
    pub(super) source: DmaError,
}

/// All of a function's mapped parts.
pub(super) struct Windows {
    slots: Arc<dyn SlotTable>,
    peers: Arc<Peers>,
    windows: Mutex<Vec<Window>>,
    refused: AtomicU64,
}

impl Windows {
    /// `parts`, not in the guest yet. Devices reach them too where their BAR is `reachable`.
    pub(super) fn new(
        parts: Vec<MappedPart>,
        slots: Arc<dyn SlotTable>,
        peers: Arc<Peers>,
        reachable: impl Fn(u8) -> bool,
    ) -> Self {
        let peer = |part: &MappedPart| reachable(part.bar).then(|| peers.add(Arc::clone(&part.memory)));
        let windows = parts.into_iter().map(|part| Window { peer: peer(&part), part, slot: None }).collect();
        Self { slots, peers, windows: Mutex::new(windows), refused: AtomicU64::new(0) }
    }

    /// Lets other functions reach the parts before the guest runs, with the BARs at `bars`.
    ///
    /// # Errors
    /// The first refusal; the parts after it are tried all the same.
    pub(super) fn share(&self, bars: &[DecodedBar]) -> Result<(), Unreachable> {
        let mut outcome = Ok(());
        for window in lock(&self.windows).iter() {
            let placed = window.peer.zip(window.part.place(bars));
            let placed = placed.map_or(Ok(()), |(peer, gpa)| self.peers.place(peer, gpa));
            let placed = placed.map_err(|source| Unreachable { bar: window.part.bar, source });
            outcome = outcome.and(placed);
        }
        outcome
    }

    /// Moves the parts to the guest's BARs at `bars`, and the others nowhere. A part that the kernel refuses is reached by
    /// exits.
    pub(super) fn place(&self, bars: &[DecodedBar]) {
        let mut windows = lock(&self.windows);
        // First remove, then add: two parts may exchange their addresses.
        for window in windows.iter_mut() {
            let wanted = window.part.place(bars);
            if let Some((_, slot)) = window.slot.take_if(|(gpa, _)| Some(*gpa) != wanted) {
                self.count(self.slots.remove(slot).is_err());
            }
        }
        for window in windows.iter_mut() {
            let Some(gpa) = window.part.place(bars) else { continue };
            if window.slot.is_none() {
                let added = self.slots.add(gpa, Arc::clone(&window.part.memory));
                self.count(added.is_err());
                window.slot = added.ok().map(|slot| (gpa, slot));
            }
            if let Some(peer) = window.peer {
                self.count(self.peers.place(peer, gpa).is_err());
            }
        }
    }

    /// Removes the parts from the guest and from other functions.
    pub(super) fn withdraw(&self) {
        self.place(&[]);
        lock(&self.windows).iter().filter_map(|window| window.peer).for_each(|p| self.peers.withdraw(p));
    }

    /// The same for good: the parts are released, and nothing is placed any more.
    pub(super) fn end(&self) {
        // Under one guard: a vCPU that waits here with earlier addresses must find nothing to place.
        let mut windows = lock(&self.windows);
        for window in std::mem::take(&mut *windows) {
            if let Some((_, slot)) = window.slot {
                self.count(self.slots.remove(slot).is_err());
            }
            window.peer.into_iter().for_each(|peer| self.peers.remove(peer));
        }
    }

    /// Changes that the kernel refused.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    fn count(&self, refused: bool) {
        self.refused.fetch_add(u64::from(refused), Ordering::Relaxed);
    }
}
