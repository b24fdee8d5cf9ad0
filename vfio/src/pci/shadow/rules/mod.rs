//! Guest view of each register and capability, with reasons: tables for readers as much as for the code.

mod extended;
mod header;
mod standard;

use std::fmt;

use super::image::Masks;
use crate::pci::capability::CapabilityId;

pub(super) use header::HEADER;

/// Treatment of a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Treatment {
    /// The guest does not see it.
    Hidden,
    /// The guest reads the device's values and writes nothing.
    ReadOnly,
    /// Reads and writes go to the device.
    PassThrough,
    /// Some registers are the device's, some are ours.
    Emulated,
    /// We add it; the device does not have it.
    Added,
}

impl fmt::Display for Treatment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hidden => "hidden",
            Self::ReadOnly => "read-only",
            Self::PassThrough => "passed",
            Self::Emulated => "emulated",
            Self::Added => "added",
        })
    }
}

/// A row of the table of capabilities.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) id: CapabilityId,
    pub(super) name: &'static str,
    pub(super) treatment: Treatment,
    pub(super) registers: Registers,
    pub(super) reason: &'static str,
}

/// Location of a rule's registers.
#[derive(Debug)]
pub(super) enum Registers {
    /// At these offsets from the capability, if it is long enough.
    At(&'static [Register]),
    /// At offsets that follow from MSI's control register.
    Msi,
    /// A pair for each resizable BAR.
    Resizable,
}

/// A row of a table of registers.
#[derive(Debug)]
pub(super) struct Register {
    /// Offset from the capability's first byte, or the header's.
    pub(super) offset: u16,
    /// Bytes, 1 to 4.
    pub(super) width: u8,
    pub(super) name: &'static str,
    pub(super) masks: Masks,
    /// Initial value of our bits, derived from the device's value.
    pub(super) value: fn(u32) -> u32,
    /// Value that the device gets in bits that the guest does not write, derived from its own.
    pub(super) fill: fn(u32) -> u32,
    pub(super) reason: &'static str,
}

const fn same(value: u32) -> u32 {
    value
}

const fn zero(_: u32) -> u32 {
    0
}

impl Register {
    /// Constant: the device's value when it was opened.
    const fn constant(offset: u16, width: u8, name: &'static str, reason: &'static str) -> Self {
        let masks = Masks { live: 0, store: 0, forward: 0 };
        Self { offset, width, name, masks, value: same, fill: same, reason }
    }

    /// Constant: zero, whatever the device has there.
    const fn zero(offset: u16, width: u8, name: &'static str, reason: &'static str) -> Self {
        Self { value: zero, ..Self::constant(offset, width, name, reason) }
    }

    /// The device's current value, read-only.
    const fn live(offset: u16, width: u8, name: &'static str, reason: &'static str) -> Self {
        let masks = Masks { live: u32::MAX, store: 0, forward: 0 };
        Self { masks, ..Self::constant(offset, width, name, reason) }
    }

    /// Kept here in the bits of `store`.
    const fn kept(offset: u16, width: u8, name: &'static str, store: u32, reason: &'static str) -> Self {
        let masks = Masks { live: 0, store, forward: 0 };
        Self { masks, ..Self::constant(offset, width, name, reason) }
    }
}

static UNKNOWN: Rule = Rule {
    id: CapabilityId::Standard(0xff),
    name: "unknown",
    treatment: Treatment::Hidden,
    registers: Registers::At(&[]),
    reason: "no rule for it: what it does to the host is not known",
};

/// The row for a capability.
pub(super) fn rule(id: CapabilityId) -> &'static Rule {
    let id = if egm_address::fault!("ats-left-on") && id == CapabilityId::Extended(0x0f) {
        CapabilityId::Extended(0x03)
    } else {
        id
    };
    all().find(|rule| rule.id == id).unwrap_or(&UNKNOWN)
}

fn all() -> impl Iterator<Item = &'static Rule> {
    standard::STANDARD.iter().chain(extended::EXTENDED)
}

/// A row of [`rules`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleRow {
    /// The capability; `None` for the header.
    pub capability: Option<CapabilityId>,
    /// A register in it, by its offset there; `None` for the capability as a whole.
    pub register: Option<u16>,
    /// Name of the capability or register.
    pub name: &'static str,
    /// Treatment of the capability; `None` for a register.
    pub treatment: Option<Treatment>,
    /// Reason for the treatment.
    pub reason: &'static str,
}

impl fmt::Display for RuleRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.capability, self.register) {
            (Some(id), None) => write!(f, "{id} ")?,
            (None, Some(at)) => write!(f, "header {at:#04x} ")?,
            (_, at) => write!(f, "  +{:#04x} ", at.unwrap_or(0))?,
        }
        f.write_str(self.name)?;
        if let Some(treatment) = self.treatment {
            write!(f, ": {treatment}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// Every rule: the header's registers, then the capabilities of both lists, each with its registers.
pub fn rules() -> impl Iterator<Item = RuleRow> {
    let register = |capability: Option<CapabilityId>| {
        move |row: &'static Register| RuleRow {
            capability,
            register: Some(row.offset),
            name: row.name,
            treatment: None,
            reason: row.reason,
        }
    };
    let capability = move |rule: &'static Rule| {
        let rows = match rule.registers {
            Registers::At(rows) => rows,
            Registers::Msi | Registers::Resizable => &[],
        };
        let whole = RuleRow {
            capability: Some(rule.id),
            register: None,
            name: rule.name,
            treatment: Some(rule.treatment),
            reason: rule.reason,
        };
        std::iter::once(whole).chain(rows.iter().map(register(Some(rule.id))))
    };
    HEADER.iter().map(register(None)).chain(all().flat_map(capability))
}
