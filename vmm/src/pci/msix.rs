//! MSI-X (PCI Express Base 6.0 §7.7.2): the table, the pending bits, and one eventfd a vector.
//!
//! A device, a vhost worker or the kernel's VFIO signals a vector by writing its eventfd. While the vector is
//! deliverable the eventfd is connected to KVM as an irqfd, so no thread of ours runs. While it is masked the eventfd
//! is disconnected and its counter *is* the pending bit: reading the pending bit array looks at the counter, and
//! connecting it again makes KVM deliver what waited. No interrupt is lost, and none is delivered while masked.
//!
//! A device outside this process gets a vector's eventfd when the guest first opens the vector ([`VectorSource`]): a
//! function may have 2048 vectors, and a guest uses eight. The eventfd is made then too.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use vmm_sys_util::eventfd::EventFd;

use super::saved::{MsixTable, SavedVector};
use crate::eventfd;
use crate::lock::lock;
use crate::snapshot::{Mismatch, ensure};

/// Bytes of a table entry.
pub(crate) const ENTRY_SIZE: u64 = 16;
/// Most vectors of a function (§7.7.2.2: an 11-bit field holds the number less one).
pub(crate) const MAX_VECTORS: u16 = 2048;

const VECTOR_MASKED: u32 = 1;

/// A message that interrupts a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MsiMessage {
    /// Address that the device writes to.
    pub address: u64,
    /// Value that the device writes.
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

    /// Releases `slot`, which is disconnected, because its function has gone.
    fn release(&self, _slot: u32) {}
}

/// A device that signals vectors by eventfds that the VMM supplies.
pub trait VectorSource: Send + Sync {
    /// The guest switched the mechanism on; no vector is open yet.
    ///
    /// # Errors
    /// The backend's.
    fn start(&self) -> io::Result<()>;

    /// From now on, until [`VectorSource::stop`], the device writes `trigger` for `vector`.
    ///
    /// # Errors
    /// The backend's.
    fn supply(&self, vector: u16, trigger: &Arc<EventFd>) -> io::Result<()>;

    /// The guest switched the mechanism off.
    fn stop(&self);
}

struct Vector {
    message: MsiMessage,
    control: u32,
    /// Whether the source has its eventfd.
    supplied: bool,
    /// The router's number for this vector, kept once it has one.
    slot: Option<u32>,
    /// Message that the eventfd is connected to.
    connected: Option<MsiMessage>,
}

struct MsixState {
    enabled: bool,
    function_masked: bool,
    vectors: Vec<Vector>,
    /// Connections that the router or the source refused.
    refused: u64,
}

/// The MSI-X structures of one function.
pub struct Msix {
    router: Arc<dyn MsiRouter>,
    source: Option<Arc<dyn VectorSource>>,
    /// One a vector, made when it is first needed where there is a source.
    triggers: Vec<OnceLock<Arc<EventFd>>>,
    state: Mutex<MsixState>,
}

impl Msix {
    /// `vectors` masked vectors, at most `MAX_VECTORS`.
    ///
    /// # Errors
    /// When an eventfd cannot be made.
    pub fn new(vectors: u16, router: Arc<dyn MsiRouter>) -> io::Result<Self> {
        let msix = Self::with(vectors, router, None);
        (0..msix.triggers.len()).try_for_each(|index| msix.open(index).map(drop))?;
        Ok(msix)
    }

    /// As [`Msix::new`] for vectors that `source` signals.
    pub fn of_device(vectors: u16, router: Arc<dyn MsiRouter>, source: Arc<dyn VectorSource>) -> Self {
        Self::with(vectors, router, Some(source))
    }

    fn with(vectors: u16, router: Arc<dyn MsiRouter>, source: Option<Arc<dyn VectorSource>>) -> Self {
        let count = usize::from(vectors.min(MAX_VECTORS));
        let vector = || Vector {
            message: MsiMessage::default(),
            control: VECTOR_MASKED,
            supplied: false,
            slot: None,
            connected: None,
        };
        let vectors = std::iter::repeat_with(vector).take(count).collect();
        let triggers = std::iter::repeat_with(OnceLock::new).take(count).collect();
        let state = MsixState { enabled: false, function_masked: false, vectors, refused: 0 };
        Self { router, source, triggers, state: Mutex::new(state) }
    }

    /// The descriptor of vector `index`, made if need be.
    fn open(&self, index: usize) -> io::Result<&Arc<EventFd>> {
        let cell = self.triggers.get(index).ok_or(io::ErrorKind::InvalidInput)?;
        match cell.get() {
            Some(trigger) => Ok(trigger),
            None => {
                let made = eventfd::new()?;
                Ok(cell.get_or_init(|| Arc::new(made)))
            }
        }
    }

    /// Number of vectors, at most `MAX_VECTORS`.
    pub fn len(&self) -> usize {
        self.triggers.len()
    }

    /// Whether there is no vector.
    pub fn is_empty(&self) -> bool {
        self.triggers.is_empty()
    }

    /// The descriptor of `vector`; with a source only once the guest opened it.
    pub fn trigger(&self, vector: u16) -> Option<&Arc<EventFd>> {
        self.triggers.get(usize::from(vector))?.get()
    }

    /// Signals `vector`; one out of range is ignored. A full counter means that the signal is pending already.
    pub fn signal(&self, vector: u16) {
        if let Some(trigger) = self.trigger(vector) {
            let _ = trigger.write(1);
        }
    }

    /// Connections that the router or the source refused since the start.
    pub fn refused(&self) -> u64 {
        lock(&self.state).refused
    }

    /// Applies a write of the message control register.
    pub(crate) fn set_control(&self, enabled: bool, function_masked: bool) {
        let mut state = lock(&self.state);
        self.control(&mut state, enabled, function_masked);
    }

    fn control(&self, state: &mut MsixState, enabled: bool, function_masked: bool) {
        let (started, stopped) = (enabled && !state.enabled, state.enabled && !enabled);
        (state.enabled, state.function_masked) = (enabled, function_masked);
        if let Some(source) = self.source.as_ref().filter(|_| started)
            && source.start().is_err()
        {
            state.refused = state.refused.saturating_add(1);
        }
        for index in 0..state.vectors.len() {
            self.update(state, index);
        }
        if let Some(source) = self.source.as_ref().filter(|_| stopped) {
            source.stop();
            state.vectors.iter_mut().for_each(|vector| vector.supplied = false);
        }
    }

    /// Function-level reset: every vector masked, disconnected and not pending.
    pub fn reset(&self) {
        let mut state = lock(&self.state);
        for vector in &mut state.vectors {
            vector.control = VECTOR_MASKED;
            vector.message = MsiMessage::default();
        }
        self.control(&mut state, false, false);
        self.triggers.iter().filter_map(OnceLock::get).for_each(|trigger| drop(trigger.read()));
    }

    /// Sets what an entry of the table holds, for a mechanism that has its messages elsewhere.
    pub fn program(&self, vector: u16, message: MsiMessage, masked: bool) {
        let mut state = lock(&self.state);
        let index = usize::from(vector);
        if let Some(vector) = state.vectors.get_mut(index) {
            (vector.message, vector.control) = (message, u32::from(masked));
            self.update(&mut state, index);
        }
    }

    /// Reads the table; bytes past its end read as zero (§7.7.2: only aligned 4- and 8-byte accesses are defined,
    /// others answer zero).
    pub(crate) fn table_read(&self, offset: u64, data: &mut [u8]) {
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
    pub(crate) fn table_write(&self, offset: u64, data: &[u8]) {
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
    pub(crate) fn pending_read(&self, offset: u64, data: &mut [u8]) {
        let state = lock(&self.state);
        for (byte, at) in data.iter_mut().zip(offset..=u64::MAX) {
            *byte = (0..8u8).fold(0, |bits, bit| {
                let vector =
                    usize::try_from(at).ok().and_then(|at| at.checked_mul(8)?.checked_add(usize::from(bit)));
                let pending = vector.is_some_and(|vector| self.is_pending(&state, vector));
                bits | u8::from(pending) << bit
            });
        }
    }

    /// Whether `vector` was signalled and its message is not sent yet.
    pub(crate) fn is_waiting(&self, vector: u16) -> bool {
        self.is_pending(&lock(&self.state), vector.into())
    }

    /// The table and the pending bits.
    pub(crate) fn saved(&self) -> MsixTable {
        let state = lock(&self.state);
        let saved = |(index, vector): (usize, &Vector)| SavedVector {
            address: vector.message.address,
            data: vector.message.data,
            masked: vector.control & VECTOR_MASKED != 0,
            pending: self.is_pending(&state, index),
        };
        MsixTable(state.vectors.iter().enumerate().map(saved).collect())
    }

    /// Takes the table and the pending bits of a function like this one, with the enable and mask bits of its control
    /// register. Vectors that are pending and open are sent.
    ///
    /// # Errors
    /// [`Mismatch`]: another number of vectors, or a message that the router refuses.
    pub(crate) fn restore(
        &self,
        saved: &MsixTable,
        enabled: bool,
        function_masked: bool,
    ) -> Result<(), Mismatch> {
        let MsixTable(saved) = saved;
        let mut state = lock(&self.state);
        let count = state.vectors.len();
        ensure(saved.len() == count, || format!("{} vectors in place of {count}", saved.len()))?;
        let refused = state.refused;
        for (index, saved) in saved.iter().enumerate() {
            let SavedVector { address, data, masked, pending } = *saved;
            ensure(address & 3 == 0, || format!("no message of a vector goes to {address:#x}"))?;
            if let Some(vector) = state.vectors.get_mut(index) {
                vector.message = MsiMessage { address, data };
                vector.control = u32::from(masked);
            }
            if let (true, Ok(trigger)) = (pending, self.open(index)) {
                let _ = trigger.write(1); // its counter is empty
            }
        }
        self.control(&mut state, enabled, function_masked);
        ensure(state.refused == refused, || "KVM refuses the message of a vector".to_owned())
    }

    fn update(&self, state: &mut MsixState, index: usize) {
        let open = state.enabled && !state.function_masked;
        let Some(vector) = state.vectors.get_mut(index) else { return };
        let wanted = (open && vector.control & VECTOR_MASKED == 0).then_some(vector.message);
        if wanted == vector.connected {
            return;
        }
        if let (Some(_), Some(slot), Some(trigger)) =
            (vector.connected.take(), vector.slot, self.triggers.get(index).and_then(OnceLock::get))
        {
            self.router.disconnect(slot, trigger);
        }
        let Some(message) = wanted.filter(|_| !egm_address::fault!("msix-vector-silent")) else { return };
        // The source comes last, so that its signals find their route.
        let outcome = self.open(index).and_then(|trigger| {
            self.router.connect(&mut vector.slot, message, trigger)?;
            vector.connected = Some(message);
            if let Some(source) = self.source.as_ref().filter(|_| !vector.supplied) {
                source.supply(u16::try_from(index).unwrap_or(u16::MAX), trigger)?;
                vector.supplied = true;
            }
            Ok(())
        });
        if outcome.is_err() {
            state.refused = state.refused.saturating_add(1);
        }
    }

    fn is_pending(&self, state: &MsixState, vector: usize) -> bool {
        let connected = state.vectors.get(vector).is_none_or(|vector| vector.connected.is_some());
        match self.triggers.get(vector).and_then(OnceLock::get) {
            // Only a read shows the counter, so write it back; the state lock keeps other readers out.
            Some(trigger) if !connected && !egm_address::fault!("msix-pending-bit-lost") => {
                trigger.read().is_ok_and(|count| trigger.write(count).is_ok())
            }
            _ => false, // KVM consumes the counter as it is written
        }
    }
}

impl Drop for Msix {
    fn drop(&mut self) {
        self.reset();
        lock(&self.state).vectors.iter().filter_map(|vector| vector.slot).for_each(|slot| {
            self.router.release(slot);
        });
    }
}

fn entry(offset: u64) -> Option<usize> {
    usize::try_from(offset / ENTRY_SIZE).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records connections; like KVM, it takes what was already signalled.
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

    /// A holder of the descriptor, such as a kernel worker, needs no notification.
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

    /// Records the calls that it receives.
    #[derive(Default)]
    struct FakeSource(Mutex<Vec<String>>);

    impl FakeSource {
        fn record(&self, what: String) {
            self.0.lock().unwrap().push(what);
        }
        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    impl VectorSource for FakeSource {
        fn start(&self) -> io::Result<()> {
            self.record("start".to_owned());
            Ok(())
        }
        fn supply(&self, vector: u16, _trigger: &Arc<EventFd>) -> io::Result<()> {
            self.record(format!("supply {vector}"));
            Ok(())
        }
        fn stop(&self) {
            self.record("stop".to_owned());
        }
    }

    #[test]
    fn a_source_is_notified_of_a_vector_once_when_the_guest_first_opens_it() {
        let (router, source) = (Arc::new(FakeRouter::default()), Arc::new(FakeSource::default()));
        let msix = Msix::of_device(2048, Arc::clone(&router) as _, Arc::clone(&source) as _);
        program(&msix, 7, MESSAGE, 0);
        assert!(msix.trigger(7).is_none(), "no descriptor before it is needed");
        msix.set_control(true, true);
        assert_eq!(source.take(), ["start"]);
        msix.set_control(true, false);
        program(&msix, 7, MESSAGE, 1);
        program(&msix, 7, MESSAGE, 0);
        assert_eq!(source.take(), ["supply 7"]);
        msix.trigger(7).unwrap().write(1).unwrap();
        msix.set_control(false, false);
        msix.set_control(true, false);
        assert_eq!(source.take(), ["stop", "start", "supply 7"]);
        msix.reset();
        assert_eq!(source.take(), ["stop"]);
        assert!(router.connected.lock().unwrap().is_empty());
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
