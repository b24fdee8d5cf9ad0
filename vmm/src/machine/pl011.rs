//! A PL011 serial port (Arm DDI 0183G): its registers, and no more.
//!
//! Transmitting takes no time, so its FIFO is always empty; there are no errors, modem lines or DMA.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use super::board_state::Pl011Registers;
use crate::snapshot::{Mismatch, ensure};

/// Bytes that the receive FIFO holds (revision 1 of the peripheral, as in [`IDENTITY`]).
const FIFO: usize = 16;
/// PeriphID0 to 3 and PCellID0 to 3 (3.3.15 to 3.3.22), from 0xfe0.
const IDENTITY: [u8; 8] = [0x11, 0x10, 0x14, 0x00, 0x0d, 0xf0, 0x05, 0xb1];

/// Bits of the flag register (3.3.3).
const CLEAR_TO_SEND: u32 = 1;
const DATA_SET_READY: u32 = 1 << 1;
const CARRIER: u32 = 1 << 2;
const RECEIVE_EMPTY: u32 = 1 << 4;
const RECEIVE_FULL: u32 = 1 << 6;
const TRANSMIT_EMPTY: u32 = 1 << 7;
/// Bits of the interrupt registers (3.3.10 to 3.3.13).
const RECEIVED: u32 = 1 << 4;
const TRANSMITTED: u32 = 1 << 5;
const INTERRUPTS: u32 = 0x7ff;

/// Registers by their offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Register {
    Data,
    Flag,
    /// A register that only stores its value, without an effect here: its index and its writable bits.
    Stored(usize, u32),
    Mask,
    Raw,
    Masked,
    Clear,
    Identity(usize),
    Reserved,
}

impl Register {
    fn decode(offset: u64) -> Self {
        match offset {
            0x00 => Self::Data,
            0x18 => Self::Flag,
            0x20 => Self::Stored(0, 0xff),   // low-power counter
            0x24 => Self::Stored(1, 0xffff), // baud rate
            0x28 => Self::Stored(2, 0x3f),   // its fraction
            0x2c => Self::Stored(3, 0xff),   // line control
            0x30 => Self::Stored(4, 0xff87), // control
            0x34 => Self::Stored(5, 0x3f),   // FIFO levels
            0x48 => Self::Stored(6, 0x7),    // DMA
            0x38 => Self::Mask,
            0x3c => Self::Raw,
            0x40 => Self::Masked,
            0x44 => Self::Clear,
            0xfe0..0x1000 if offset.is_multiple_of(4) => {
                Self::Identity(usize::try_from(offset.saturating_sub(0xfe0) / 4).unwrap_or_default())
            }
            _ => Self::Reserved,
        }
    }
}

#[derive(Debug)]
pub(super) struct Pl011 {
    received: VecDeque<u8>,
    stored: [u32; 7],
    mask: u32,
    /// Interrupts that stay until they are cleared: that something was transmitted.
    latched: u32,
}

/// Effect of an access, besides that on the registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(super) enum Effect {
    None,
    /// The guest took the last byte received.
    Drained,
    /// The guest sends this byte.
    Send(u8),
}

impl Default for Pl011 {
    /// As after reset: receiver and transmitter on (3.3.8), half-full levels (3.3.9).
    fn default() -> Self {
        Self { received: VecDeque::new(), stored: [0, 0, 0, 0, 0x300, 0x12, 0], mask: 0, latched: 0 }
    }
}

impl Pl011 {
    pub(super) fn interrupts(&self) -> bool {
        self.raw() & self.mask != 0
    }

    pub(super) fn saved(&self) -> Pl011Registers {
        let Self { received, stored, mask, latched } = self;
        let received = received.iter().copied().collect();
        Pl011Registers { stored: *stored, mask: *mask, latched: *latched, received }
    }

    /// A port in the state `saved`.
    ///
    /// # Errors
    /// [`Mismatch`].
    pub(super) fn restored(saved: &Pl011Registers) -> Result<Self, Mismatch> {
        let Pl011Registers { stored, mask, latched, received } = saved;
        let known = (mask | latched) & !INTERRUPTS == 0 && latched & RECEIVED == 0;
        ensure(known && received.len() <= FIFO, || "no PL011 has these registers".to_owned())?;
        let mut port = Self { received: received.iter().copied().collect(), mask: *mask, ..Self::default() };
        port.latched = *latched;
        for offset in (0..0x1000).step_by(4) {
            if let Register::Stored(index, bits) = Register::decode(offset)
                && let (Some(to), Some(from)) = (port.stored.get_mut(index), stored.get(index))
            {
                *to = from & bits;
            }
        }
        Ok(port)
    }

    /// Bytes that it takes now.
    pub(super) fn room(&self) -> usize {
        FIFO.saturating_sub(self.received.len())
    }

    /// Receives bytes; those without room are lost.
    pub(super) fn receive(&mut self, data: &[u8]) {
        self.received.extend(data.iter().take(self.room()));
    }

    /// One byte reaches every level that can be chosen, and the timeout.
    fn raw(&self) -> u32 {
        let received = if self.received.is_empty() { 0 } else { RECEIVED };
        received | self.latched
    }

    pub(super) fn read(&mut self, offset: u64) -> (u32, Effect) {
        let value = match Register::decode(offset) {
            Register::Data => {
                let byte = self.received.pop_front().map_or(0, u32::from);
                let drained = self.received.is_empty();
                return (byte, if drained { Effect::Drained } else { Effect::None });
            }
            Register::Flag => self.flags(),
            Register::Stored(index, _) => self.stored.get(index).copied().unwrap_or(0),
            Register::Mask => self.mask,
            Register::Raw => self.raw(),
            Register::Masked => self.raw() & self.mask,
            Register::Identity(index) => IDENTITY.get(index).copied().map_or(0, u32::from),
            Register::Clear | Register::Reserved => 0,
        };
        (value, Effect::None)
    }

    pub(super) fn write(&mut self, offset: u64, value: u32) -> Effect {
        match Register::decode(offset) {
            Register::Data => {
                self.latched |= TRANSMITTED;
                let [byte, ..] = value.to_le_bytes();
                return Effect::Send(byte);
            }
            Register::Stored(index, bits) => {
                if let Some(stored) = self.stored.get_mut(index) {
                    *stored = value & bits;
                }
            }
            Register::Mask => self.mask = value & INTERRUPTS,
            Register::Clear => self.latched &= !value,
            Register::Flag
            | Register::Raw
            | Register::Masked
            | Register::Identity(_)
            | Register::Reserved => {}
        }
        Effect::None
    }

    fn flags(&self) -> u32 {
        let receive = match self.received.len() {
            0 => RECEIVE_EMPTY,
            FIFO.. => RECEIVE_FULL,
            _ => 0,
        };
        CLEAR_TO_SEND | DATA_SET_READY | CARRIER | TRANSMIT_EMPTY | receive
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: u64 = 0;
    const FLAG: u64 = 0x18;
    const MASK: u64 = 0x38;
    const RAW: u64 = 0x3c;
    const MASKED: u64 = 0x40;
    const CLEAR: u64 = 0x44;

    #[test]
    fn what_is_received_is_read_in_order_and_interrupts_until_it_is_read() {
        let mut port = Pl011::default();
        port.receive(b"ab");
        assert_eq!((port.read(RAW).0, port.interrupts()), (RECEIVED, false));
        assert_eq!(port.write(MASK, RECEIVED), Effect::None);
        assert!(port.interrupts());
        assert_eq!(port.write(CLEAR, RECEIVED), Effect::None);
        assert!(port.interrupts(), "it is still full");
        assert_eq!(port.read(DATA), (b'a'.into(), Effect::None));
        assert_eq!(port.read(DATA), (b'b'.into(), Effect::Drained));
        assert_eq!((port.interrupts(), port.read(FLAG).0 & RECEIVE_EMPTY), (false, RECEIVE_EMPTY));
    }

    #[test]
    fn more_than_the_fifo_holds_is_lost() {
        let mut port = Pl011::default();
        port.receive(&[7; FIFO + 1]);
        assert_eq!((port.room(), port.read(FLAG).0 & RECEIVE_FULL), (0, RECEIVE_FULL));
        let bytes = (0..=FIFO).map(|_| port.read(DATA).0).collect::<Vec<_>>();
        assert_eq!((bytes[FIFO - 1], bytes[FIFO]), (7, 0));
    }

    #[test]
    fn each_byte_sent_interrupts_until_that_is_cleared() {
        let mut port = Pl011::default();
        assert_eq!(port.write(DATA, u32::from(b'x') | 0xff00), Effect::Send(b'x'));
        assert_eq!((port.read(MASKED).0, port.read(RAW).0), (0, TRANSMITTED));
        assert_eq!(port.write(MASK, TRANSMITTED), Effect::None);
        assert!(port.interrupts());
        assert_eq!(port.write(CLEAR, TRANSMITTED), Effect::None);
        assert!(!port.interrupts());
    }

    #[test]
    fn a_driver_finds_the_identity_of_revision_1() {
        let mut port = Pl011::default();
        let words = (0xfe0..0x1000).step_by(4).map(|offset| port.read(offset).0);
        assert_eq!(words.collect::<Vec<_>>(), IDENTITY.map(u32::from));
    }

    #[test]
    fn every_offset_answers_and_keeps_its_writable_bits_only() {
        let mut port = Pl011::default();
        for offset in 0..0x1000 {
            let _ = port.write(offset, u32::MAX);
            let kept = match Register::decode(offset) {
                Register::Stored(_, bits) => bits,
                Register::Mask => INTERRUPTS,
                _ => continue,
            };
            assert_eq!(port.read(offset).0, kept, "{offset:#x}");
        }
        assert!((0..0x1000).all(|offset| port.read(offset).0 <= 0xffff));
    }
}
