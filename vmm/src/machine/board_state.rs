//! State of the board's devices in a snapshot. Types only; the owner of each value checks it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::snapshot::hex;

/// State of the devices of a bus, by their first address.
pub(crate) type BusState = BTreeMap<u64, BoardState>;

/// State of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the variants are their documentation")]
pub enum BoardState {
    /// A 16550 serial port.
    Serial(SerialRegisters),
    /// A PL011 serial port.
    Pl011(Pl011Registers),
    Clock(ClockRegisters),
    /// Address register of PCI's configuration ports.
    ConfigAddress(u32),
}

/// Registers of a 16550, by the names of its data sheet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct SerialRegisters {
    pub divisor: u16,
    pub interrupt_enable: u8,
    pub interrupt_identification: u8,
    pub line_control: u8,
    pub line_status: u8,
    pub modem_control: u8,
    pub modem_status: u8,
    pub scratch: u8,
    /// Bytes that the guest has not read yet.
    #[serde(with = "hex")]
    pub received: Vec<u8>,
}

/// Registers of a PL011 (Arm DDI 0183G).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Pl011Registers {
    /// Registers that store a value, in the order of the device's own list.
    pub stored: [u32; 7],
    pub mask: u32,
    /// Interrupts that stay until they are cleared.
    pub latched: u32,
    /// Bytes that the guest has not read yet.
    #[serde(with = "hex")]
    pub received: Vec<u8>,
}

/// Registers of a PL031 (Arm DDI 0224C).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct ClockRegisters {
    pub load: u32,
    /// Seconds that the guest's time is ahead of the host's.
    pub offset: i64,
    pub alarm: u32,
    pub mask: u32,
    pub raw: u32,
}
