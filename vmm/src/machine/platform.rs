//! The small devices: power, reset, panic, clock.

use std::sync::{Arc, Mutex};

use vm_superio::rtc_pl031::NoEvents;
use vm_superio::{Rtc, RtcState};

use super::board_state::{BoardState, ClockRegisters};
use super::bus::BusDevice;
use super::exit::{ExitLatch, ExitReason};
use super::reset::ResetLine;
use crate::firmware::{RESET_VALUE, SLEEP_TYPE_S5};
use crate::lock::lock;
use crate::snapshot::{Mismatch, ensure};

/// ACPI sleep control register (ACPI 6.5 §4.8.3.7): SLP_TYP in bits 4..2, SLP_EN in bit 5; and the status register
/// behind it, which reads zero.
pub(super) struct SleepControl(pub(super) Arc<ExitLatch>);

const SLEEP_ENABLE: u8 = 1 << 5;

impl BusDevice for SleepControl {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        let asks = |value: u8| value & SLEEP_ENABLE != 0 && value >> 2 & 7 == SLEEP_TYPE_S5;
        if offset == 0 && data.first().is_some_and(|value| asks(*value)) {
            self.0.set(ExitReason::PoweredOff);
        }
    }
}

/// ACPI reset register (ACPI 6.5 §4.8.3.6): a write of [`RESET_VALUE`] resets.
pub(super) struct ResetRegister(pub(super) ResetLine);

impl BusDevice for ResetRegister {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    fn write(&self, _offset: u64, data: &[u8]) {
        if data.first() == Some(&RESET_VALUE) {
            self.0.assert();
        }
    }
}

/// pvpanic (QEMU docs/specs/pvpanic.rst): reads as the supported events, takes the event that happened.
pub(super) struct Pvpanic(pub(super) Arc<ExitLatch>);

const PANICKED: u8 = 1;
const CRASH_LOADED: u8 = 2;

impl BusDevice for Pvpanic {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(first) = data.first_mut() {
            *first = PANICKED | CRASH_LOADED;
        }
    }
    fn write(&self, offset: u64, data: &[u8]) {
        match data.first().filter(|_| offset == 0 && !egm_address::fault!("panic-ignored")) {
            Some(event) if event & PANICKED != 0 => self.0.set(ExitReason::Panicked),
            Some(event) if event & CRASH_LOADED != 0 => self.0.set(ExitReason::CrashLoaded),
            _ => {}
        }
    }
}

/// A PL031 clock: the host's time (Arm DDI 0224C). It has no alarm, so no interrupt either.
pub(super) struct Clock(Mutex<Rtc<NoEvents>>);

impl Default for Clock {
    fn default() -> Self {
        Self(Mutex::new(Rtc::new()))
    }
}

impl BusDevice for Clock {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (Ok(register), Ok(word)) = (u16::try_from(offset), data.try_into()) {
            lock(&self.0).read(register, word);
        }
    }
    fn write(&self, offset: u64, data: &[u8]) {
        if let (Ok(register), Ok(word)) = (u16::try_from(offset), data.try_into()) {
            lock(&self.0).write(register, word);
        }
    }
    fn warm_reset(&self) {
        *lock(&self.0) = Rtc::new();
    }
    fn saved(&self) -> Option<BoardState> {
        let RtcState { lr, offset, mr, imsc, ris } = lock(&self.0).state();
        Some(BoardState::Clock(ClockRegisters { load: lr, offset, alarm: mr, mask: imsc, raw: ris }))
    }
    fn restore(&self, saved: &BoardState) -> Result<(), Mismatch> {
        let BoardState::Clock(saved) = saved else { return Err(Mismatch::new("it is another device")) };
        let ClockRegisters { load, offset, alarm, mask, raw } = *saved;
        // The difference of two times of 32 bits.
        let fits = offset.unsigned_abs() <= u32::MAX.into();
        ensure(fits, || format!("no clock is {offset} s ahead"))?;
        let state = RtcState { lr: load, offset, mr: alarm, imsc: mask, ris: raw };
        *lock(&self.0) = Rtc::from_state(&state, NoEvents);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;
    use crate::config::OnReset;

    #[test]
    fn the_clock_has_the_hosts_time_and_is_read_by_words_only() {
        let clock = Clock::default();
        let host = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let (before, mut word) = (host(), [0; 4]);
        clock.read(0, &mut word);
        assert!((before..=host()).contains(&u32::from_le_bytes(word).into()));
        let mut half = [7; 2];
        clock.read(0, &mut half);
        assert_eq!(half, [0; 2]);
    }

    fn after(make: impl Fn(Arc<ExitLatch>) -> Box<dyn BusDevice>, value: u8) -> Option<ExitReason> {
        let latch = ExitLatch::new().unwrap();
        make(Arc::clone(&latch)).write(0, &[value]);
        latch.reason().cloned()
    }

    #[test]
    fn only_sleep_type_5_with_the_enable_bit_powers_off() {
        for value in 0..=u8::MAX {
            let expected = (value & 0x20 != 0 && value & 0x1c == 0x14).then_some(ExitReason::PoweredOff);
            assert_eq!(after(|l| Box::new(SleepControl(l)), value), expected, "{value:#x}");
        }
    }

    #[test]
    fn reset_and_panic_take_their_values_only() {
        let register = |exit| -> Box<dyn BusDevice> {
            Box::new(ResetRegister(ResetLine::new(OnReset::Exit, &exit, &Arc::default())))
        };
        assert_eq!(after(register, 1), Some(ExitReason::Reset));
        assert_eq!(after(register, 2), None);
        assert_eq!(after(|l| Box::new(Pvpanic(l)), 1), Some(ExitReason::Panicked));
        assert_eq!(after(|l| Box::new(Pvpanic(l)), 2), Some(ExitReason::CrashLoaded));
        assert_eq!(after(|l| Box::new(Pvpanic(l)), 0), None);
    }
}
