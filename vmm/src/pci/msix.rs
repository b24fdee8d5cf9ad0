//! MSI-X (PCI Express Base 6.0 §7.7.2): the table, the pending bits, and one eventfd a vector.
//!
//! A device, a vhost worker or the kernel's VFIO signals a vector by writing its eventfd. While the vector is
//! deliverable the eventfd is connected to KVM as an irqfd, so no thread of ours runs. While it is masked the eventfd
//! is disconnected and its counter *is* the pending bit: reading the pending bit array looks at the counter, and
//! connecting it again makes KVM deliver what waited. No interrupt is lost, and none is delivered while masked.

use std::io;
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::lock::lock;

/// Bytes of a table entry.
pub const ENTRY_SIZE: u64 = 16;
/// Most vectors of a function (§7.7.2.2: an 11-bit field holds the number less one).
pub const MAX_VECTORS: u16 = 2048;

const VECTOR_MASKED: u32 = 1;

/// A message that interrupts a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MsiMessage {
    /// Address that the device writes to.
    pub address: u64,
    /// What it writes.
    pub data: u32,
}

/// Connects eventfds to interrupts; KVM implements it, tests have a fake.
pub trait MsiRouter: Send + Sync {
    /// From now on a write to `trigger` sends `message`; what was written before is sent at once.
    ///
    /// # Errors
    /// The kernel's, for instance when routes run out.
    fn connect(&self, slot: &mut Option<u32>, message: MsiMessage, trigger: &EventFd) -> io::Result<()>;

    /// From now on writes to `trigger` are kept in its counter.
    fn disconnect(&self, slot: u32, trigger: &EventFd);
}

struct Vector {
    message: MsiMessage,
    control: u32,
    trigger: Arc<EventFd>,
    /// The router's number for this vector, kept once it has one.
    slot: Option<u32>,
    /// What the eventfd is connected to.
    connected: Option<MsiMessage>,
}

struct State {
    enabled: bool,
    function_masked: bool,
    vectors: Vec<Vector>,
    /// Connections that the router refused.
    refused: u64,
}

/// The MSI-X structures of one function.
pub struct Msix {
    router: Arc<dyn MsiRouter>,
    triggers: Vec<Arc<EventFd>>,
    state: Mutex<State>,
}

impl Msix {
    /// `vectors` masked vectors, at most [`MAX_VECTORS`].
    ///
    /// # Errors
    /// When an eventfd cannot be made.
    pub fn new(vectors: u16, router: Arc<dyn MsiRouter>) -> io::Result<Self> {
        let triggers = (0..vectors.min(MAX_VECTORS))
            .map(|_| EventFd::new(EFD_NONBLOCK).map(Arc::new))
            .collect::<io::Result<Vec<_>>>()?;
        let vector = |trigger: &Arc<EventFd>| Vector {
            message: MsiMessage::default(),
            control: VECTOR_MASKED,
            trigger: Arc::clone(trigger),
            slot: None,
            connected: None,
        };
        let vectors = triggers.iter().map(vector).collect();
        let state = State { enabled: false, function_masked: false, vectors, refused: 0 };
        Ok(Self { router, triggers, state: Mutex::new(state) })
    }

    /// Number of vectors.
    pub fn len(&self) -> usize {
        self.triggers.len()
    }

    /// Whether there is no vector.
    pub fn is_empty(&self) -> bool {
        self.triggers.is_empty()
    }

    /// The descriptor of `vector`.
    pub fn trigger(&self, vector: u16) -> Option<&Arc<EventFd>> {
        self.triggers.get(usize::from(vector))
    }

    /// Signals `vector`; one out of range is ignored. A full counter means that the signal is pending already.
    pub fn signal(&self, vector: u16) {
        if let Some(trigger) = self.trigger(vector) {
            let _ = trigger.write(1);
        }
    }

    /// Connections that the router refused since the start.
    pub fn refused(&self) -> u64 {
        lock(&self.state).refused
    }

    /// The message control register changed.
    pub fn set_control(&self, enabled: bool, function_masked: bool) {
        let mut state = lock(&self.state);
        state.enabled = enabled;
        state.function_masked = function_masked;
        for index in 0..state.vectors.len() {
            self.update(&mut state, index);
        }
    }

    /// Function-level reset: every vector masked, disconnected and not pending.
    pub fn reset(&self) {
        let mut state = lock(&self.state);
        state.enabled = false;
        state.function_masked = false;
        for index in 0..state.vectors.len() {
            if let Some(vector) = state.vectors.get_mut(index) {
                vector.control = VECTOR_MASKED;
                vector.message = MsiMessage::default();
            }
            self.update(&mut state, index);
            if let Some(vector) = state.vectors.get(index) {
                let _ = vector.trigger.read();
            }
        }
    }

    /// Reads the table; bytes past its end read as zero (§7.7.2: only aligned 4- and 8-byte accesses are defined,
    /// others answer zero).
    pub fn table_read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if !matches!(data.len(), 4 | 8) || !offset.is_multiple_of(4) {
            return;
        }
        let state = lock(&self.state);
        for (at, word) in (offset..=u64::MAX).step_by(4).zip(data.chunks_exact_mut(4)) {
            let Some(vector) = entry(at).and_then(|index| state.vectors.get(index)) else { continue };
            let [a0, a1, a2, a3, a4, a5, a6, a7] = vector.message.address.to_le_bytes();
            word.copy_from_slice(&match at % ENTRY_SIZE {
                0 => [a0, a1, a2, a3],
                4 => [a4, a5, a6, a7],
                8 => vector.message.data.to_le_bytes(),
                _ => vector.control.to_le_bytes(),
            });
        }
    }

    /// Writes the table; undefined accesses are ignored.
    pub fn table_write(&self, offset: u64, data: &[u8]) {
        if !matches!(data.len(), 4 | 8) || !offset.is_multiple_of(4) {
            return;
        }
        let mut state = lock(&self.state);
        for (at, word) in (offset..=u64::MAX).step_by(4).zip(data.as_chunks::<4>().0) {
            let value = u32::from_le_bytes(*word);
            let Some(index) = entry(at) else { return };
            let Some(vector) = state.vectors.get_mut(index) else { return };
            let message = &mut vector.message;
            match at % ENTRY_SIZE {
                0 => message.address = message.address & !0xffff_ffff | u64::from(value & !3),
                4 => message.address = message.address & 0xffff_ffff | u64::from(value) << 32,
                8 => message.data = value,
                _ => vector.control = value & VECTOR_MASKED,
            }
            self.update(&mut state, index);
        }
    }

    /// Reads the pending bit array, 64 vectors a quadword.
    pub fn pending_read(&self, offset: u64, data: &mut [u8]) {
        let state = lock(&self.state);
        for (byte, at) in data.iter_mut().zip(offset..=u64::MAX) {
            *byte = (0..8u8).fold(0, |bits, bit| {
                let vector =
                    usize::try_from(at).ok().and_then(|at| at.checked_mul(8)?.checked_add(usize::from(bit)));
                let pending = vector.and_then(|v| state.vectors.get(v)).is_some_and(is_pending);
                bits | u8::from(pending) << bit
            });
        }
    }

    fn update(&self, state: &mut State, index: usize) {
        let open = state.enabled && !state.function_masked;
        let Some(vector) = state.vectors.get_mut(index) else { return };
        let wanted = (open && vector.control & VECTOR_MASKED == 0).then_some(vector.message);
        if wanted == vector.connected {
            return;
        }
        if let (Some(_), Some(slot)) = (vector.connected.take(), vector.slot) {
            self.router.disconnect(slot, &vector.trigger);
        }
        if let Some(message) = wanted {
            match self.router.connect(&mut vector.slot, message, &vector.trigger) {
                Ok(()) => vector.connected = Some(message),
                Err(_) => state.refused = state.refused.saturating_add(1),
            }
        }
    }
}

fn entry(offset: u64) -> Option<usize> {
    usize::try_from(offset / ENTRY_SIZE).ok()
}

fn is_pending(vector: &Vector) -> bool {
    if vector.connected.is_some() {
        return false; // KVM consumes the counter as it is written
    }
    // Taking the counter and giving it back is how one asks; nobody else takes while the state is locked.
    vector.trigger.read().is_ok_and(|count| vector.trigger.write(count).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Remembers what is connected; like KVM, it takes what was already signalled.
    #[derive(Default)]
    struct FakeRouter {
        connected: Mutex<Vec<(u32, MsiMessage)>>,
        delivered: Mutex<Vec<MsiMessage>>,
        next: Mutex<u32>,
    }

    impl MsiRouter for FakeRouter {
        fn connect(&self, slot: &mut Option<u32>, message: MsiMessage, trigger: &EventFd) -> io::Result<()> {
            let mut next = self.next.lock().unwrap();
            let slot = *slot.get_or_insert_with(|| {
                *next += 1;
                *next
            });
            self.connected.lock().unwrap().push((slot, message));
            if trigger.read().is_ok() {
                self.delivered.lock().unwrap().push(message);
            }
            Ok(())
        }
        fn disconnect(&self, slot: u32, _trigger: &EventFd) {
            self.connected.lock().unwrap().retain(|(s, _)| *s != slot);
        }
    }

    fn msix() -> (Arc<FakeRouter>, Msix) {
        let router = Arc::new(FakeRouter::default());
        let msix = Msix::new(3, Arc::clone(&router) as Arc<dyn MsiRouter>).unwrap();
        (router, msix)
    }

    fn program(msix: &Msix, vector: u64, message: MsiMessage, control: u32) {
        msix.table_write(vector * 16, &message.address.to_le_bytes());
        msix.table_write(vector * 16 + 8, &message.data.to_le_bytes());
        msix.table_write(vector * 16 + 12, &control.to_le_bytes());
    }

    const MESSAGE: MsiMessage = MsiMessage { address: 0xfee0_1000, data: 0x4031 };

    #[test]
    fn a_vector_is_connected_only_while_enabled_and_unmasked() {
        let (router, msix) = msix();
        program(&msix, 1, MESSAGE, 0);
        assert!(router.connected.lock().unwrap().is_empty(), "not enabled yet");
        msix.set_control(true, false);
        assert_eq!(*router.connected.lock().unwrap(), [(1, MESSAGE)]);
        msix.set_control(true, true);
        assert!(router.connected.lock().unwrap().is_empty(), "function mask");
        msix.set_control(true, false);
        msix.table_write(28, &1u32.to_le_bytes());
        assert!(router.connected.lock().unwrap().is_empty(), "vector mask");
    }

    #[test]
    fn a_signal_while_masked_is_pending_and_delivered_on_unmask() {
        let (router, msix) = msix();
        program(&msix, 1, MESSAGE, 1);
        msix.set_control(true, false);
        msix.signal(1);
        let mut pending = [0u8; 8];
        msix.pending_read(0, &mut pending);
        assert_eq!(pending, [2, 0, 0, 0, 0, 0, 0, 0]);
        msix.table_write(28, &0u32.to_le_bytes());
        msix.pending_read(0, &mut pending);
        assert_eq!((pending[0], router.delivered.lock().unwrap().as_slice()), (0, [MESSAGE].as_slice()));
    }

    /// Whoever holds the descriptor, a kernel worker say, need not hear of it.
    #[test]
    fn an_entry_that_is_written_again_sends_what_its_descriptor_signals_elsewhere() {
        let (router, msix) = msix();
        let other = MsiMessage { address: 0xfee0_2000, data: 0x4032 };
        let held = Arc::clone(msix.trigger(1).unwrap());
        program(&msix, 1, MESSAGE, 0);
        msix.set_control(true, false);
        program(&msix, 1, other, 0);
        assert_eq!(*router.connected.lock().unwrap(), [(1, other)], "while it is open");
        msix.table_write(28, &1u32.to_le_bytes());
        held.write(1).unwrap();
        program(&msix, 1, MESSAGE, 0);
        assert_eq!(*router.delivered.lock().unwrap(), [MESSAGE], "and while it is masked, as Linux does it");
    }

    #[test]
    fn reset_masks_disconnects_and_forgets() {
        let (router, msix) = msix();
        program(&msix, 0, MESSAGE, 0);
        msix.set_control(true, false);
        msix.signal(2);
        msix.reset();
        let (mut word, mut pending) = ([0u8; 4], [0u8; 1]);
        msix.table_read(12, &mut word);
        msix.pending_read(0, &mut pending);
        assert!(router.connected.lock().unwrap().is_empty());
        assert_eq!((word, pending), ([1, 0, 0, 0], [0]));
    }

    #[test]
    fn every_offset_and_length_is_harmless() {
        let (_, msix) = msix();
        msix.set_control(true, false);
        for offset in (0..0x80).chain([u64::MAX - 16, u64::MAX]) {
            for length in 0..=8 {
                let mut data = vec![0xff; length];
                msix.table_write(offset, &data);
                msix.table_read(offset, &mut data);
                msix.pending_read(offset, &mut data);
            }
        }
    }
}
