//! Address decoding: which device answers an address.

use std::ops::Range;
use std::sync::Arc;

use super::board_state::{BoardState, BusState};
use crate::snapshot::{Mismatch, ensure};

/// A device with registers on the port or the memory bus. All methods run on vCPU threads, several at once.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` bytes (1 to 8) at `offset` from the device's first address.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Writes `data.len()` bytes (1 to 8) at `offset`.
    fn write(&self, offset: u64, data: &[u8]);

    /// Returns to the state at the machine's start, while no vCPU is in the guest.
    fn warm_reset(&self) {}

    /// The state that the guest has written, while no vCPU is in the guest; `None` without such state, or where another
    /// owner saves it.
    fn saved(&self) -> Option<BoardState> {
        None
    }

    /// Takes the state of a device like it, before a vCPU runs.
    ///
    /// # Errors
    /// [`Mismatch`].
    fn restore(&self, _saved: &BoardState) -> Result<(), Mismatch> {
        Err(Mismatch::new("it has no state"))
    }
}

/// A bus; its devices are known before the guest starts.
#[derive(Default)]
pub struct Bus {
    /// Sorted by address and disjoint: [`Bus::add`] keeps them so.
    devices: Vec<Decoder>,
}

/// A device and its addresses.
struct Decoder {
    range: Range<u64>,
    device: Arc<dyn BusDevice>,
}

/// The device that an access reaches.
struct Reached<'a> {
    device: &'a dyn BusDevice,
    offset: u64,
}

/// Two devices have one address.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("bus addresses {wanted:x?} and {taken:x?} overlap")]
pub struct Overlap {
    /// The range of the device that is refused.
    pub wanted: Range<u64>,
    /// The range of the device that is there already.
    pub taken: Range<u64>,
}

impl Bus {
    /// Puts `device` at `range`.
    ///
    /// # Errors
    /// [`Overlap`] when the range shares an address with another device's.
    pub fn add(&mut self, range: Range<u64>, device: Arc<dyn BusDevice>) -> Result<(), Overlap> {
        let at = self.devices.partition_point(|taken| taken.range.end <= range.start);
        if let Some(taken) = self.devices.get(at).filter(|taken| taken.range.start < range.end) {
            return Err(Overlap { wanted: range, taken: taken.range.clone() });
        }
        self.devices.insert(at, Decoder { range, device });
        Ok(())
    }

    /// Reads for the guest; an address without a device reads all ones, as on real buses.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some(Reached { device, offset }) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes for the guest; a write to no device is dropped.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some(Reached { device, offset }) = self.find(address, data.len()) {
            device.write(offset, data);
        }
    }

    /// Returns each device to its state at the machine's start.
    pub fn warm_reset(&self) {
        self.devices.iter().for_each(|decoder| decoder.device.warm_reset());
    }

    /// State of each device that has one.
    pub(super) fn saved(&self) -> BusState {
        let saved = |decoder: &Decoder| Some((decoder.range.start, decoder.device.saved()?));
        self.devices.iter().filter_map(saved).collect()
    }

    /// Takes the state of a bus like this one.
    ///
    /// # Errors
    /// [`Mismatch`].
    pub(super) fn restore(&self, saved: &BusState) -> Result<(), Mismatch> {
        let has_state = |decoder: &&Decoder| decoder.device.saved().is_some();
        let mut count: usize = 0;
        for Decoder { range, device } in self.devices.iter().filter(has_state) {
            let at = range.start;
            let saved = saved.get(&at).ok_or_else(|| Mismatch::new(format!("no device at {at:#x}")))?;
            device.restore(saved).map_err(|mismatch| mismatch.of(format!("device at {at:#x}")))?;
            count = count.saturating_add(1);
        }
        ensure(saved.len() == count, || format!("{} devices in place of {count}", saved.len()))
    }

    /// An access that runs over a device's end reaches no device.
    fn find(&self, address: u64, length: usize) -> Option<Reached<'_>> {
        let at = self.devices.partition_point(|decoder| decoder.range.end <= address);
        let Decoder { range, device } = self.devices.get(at)?;
        let end = address.checked_add(u64::try_from(length).ok()?)?;
        (range.start <= address && end <= range.end)
            .then(|| Reached { device: device.as_ref(), offset: address.saturating_sub(range.start) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, usize)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            self.0.lock().unwrap().push((offset, data.len()));
            data.fill(7);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.len()));
        }
    }

    #[test]
    fn an_access_goes_to_the_device_that_covers_all_of_it() {
        let device = Arc::new(Recorder::default());
        let mut bus = Bus::default();
        bus.add(0x100..0x108, device.clone()).unwrap();
        let mut data = [0; 4];
        bus.read(0x104, &mut data);
        assert_eq!(data, [7; 4]);
        for outside in [0xff, 0x105, 0x108, u64::MAX - 1] {
            bus.read(outside, &mut data);
            assert_eq!(data, [0xff; 4], "{outside:#x}");
            bus.write(outside, &data);
        }
        assert_eq!(*device.0.lock().unwrap(), [(4, 4)]);
    }

    #[test]
    fn two_devices_cannot_share_an_address() {
        let mut bus = Bus::default();
        bus.add(10..20, Arc::new(Recorder::default())).unwrap();
        assert!(bus.add(20..30, Arc::new(Recorder::default())).is_ok());
        assert_eq!(bus.add(15..16, Arc::new(Recorder::default())).unwrap_err().taken, 10..20);
        assert!(bus.add(0..11, Arc::new(Recorder::default())).is_err());
    }
}
