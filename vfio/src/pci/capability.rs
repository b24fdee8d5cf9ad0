//! The two lists of capabilities in a configuration space (PCI Express Base 6.0 §7.5.3 and §7.6.3), walked so that any
//! bytes give a finite list of disjoint capabilities within the space.

use std::fmt;

use super::registers::{
    CAPABILITIES, CONVENTIONAL, EXPRESS, FIRST_CAPABILITY, STATUS, STATUS_CAPABILITIES, byte, dword,
    extended, id, word,
};

/// The list that a capability is in, and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CapabilityId {
    /// In the list at 0x34.
    Standard(u8),
    /// In the list at 0x100.
    Extended(u16),
}

impl fmt::Display for CapabilityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Standard(id) => write!(f, "{id:#04x}"),
            Self::Extended(id) => write!(f, "extended {id:#06x}"),
        }
    }
}

/// A capability of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    /// The list that it is in, and its number there.
    pub id: CapabilityId,
    /// Its first byte; a multiple of 4.
    pub offset: u16,
    /// Bytes from there on that are its own: 2 at least, 4 in the extended list.
    pub length: u16,
    /// Whether the specification defines that length. If not, it extends to the next capability or the list's end.
    pub exact: bool,
}

impl Capability {
    /// Offset of the first byte after it.
    pub fn end(&self) -> u16 {
        self.offset.saturating_add(self.length)
    }
}

/// End of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListEnd {
    /// With a null link, as it should.
    Null,
    /// The link leads to a capability that was there before.
    Loop(u16),
    /// The link leads out of the part of the space where capabilities may be.
    Outside(u16),
    /// The bytes there read as all ones: nothing answers.
    Dead(u16),
    /// It begins within another capability.
    Overlap(u16),
}

impl fmt::Display for ListEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => write!(f, "with a null link"),
            Self::Loop(at) => write!(f, "at {at:#x}, to which it comes a second time"),
            Self::Outside(at) => write!(f, "at {at:#x}, where no capability can be"),
            Self::Dead(at) => write!(f, "at {at:#x}, which reads as all ones"),
            Self::Overlap(at) => write!(f, "at {at:#x}, which lies in another capability"),
        }
    }
}

/// A list as far as it makes sense.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List {
    /// Its capabilities in the order of the links, disjoint.
    pub capabilities: Vec<Capability>,
    /// Why the list ends there.
    pub end: ListEnd,
}

impl List {
    /// The first capability with this id.
    pub fn find(&self, id: CapabilityId) -> Option<&Capability> {
        self.capabilities.iter().find(|capability| capability.id == id)
    }
}

/// Target of one link: the capability's id and the next link.
struct Node {
    id: CapabilityId,
    next: u16,
}

/// Bounds of a list's capabilities, and how to read one of its nodes.
struct ListBounds {
    first: u16,
    end: u16,
    read: fn(&[u8], u16) -> Option<Node>,
}

const STANDARD: ListBounds = ListBounds {
    first: FIRST_CAPABILITY,
    end: CONVENTIONAL,
    read: |space, at| {
        let header = word(space, at)?;
        let [id, next] = header.to_le_bytes();
        (header != u16::MAX).then_some(Node { id: CapabilityId::Standard(id), next: u16::from(next & 0xfc) })
    },
};

const EXTENDED: ListBounds = ListBounds {
    first: CONVENTIONAL,
    end: EXPRESS,
    read: |space, at| {
        let header = dword(space, at)?;
        let [low, high, next_low, next_high] = header.to_le_bytes();
        let next = u16::from_le_bytes([next_low, next_high]) >> 4 & 0xffc;
        let id = CapabilityId::Extended(u16::from_le_bytes([low, high]));
        (header != u32::MAX).then_some(Node { id, next })
    },
};

/// The list that begins at 0x34; empty if the status register reports none.
pub fn standard(space: &[u8]) -> List {
    let has = word(space, STATUS).is_some_and(|status| status & STATUS_CAPABILITIES != 0);
    let first = byte(space, CAPABILITIES).filter(|_| has).unwrap_or(0) & 0xfc;
    walk(space, &STANDARD, u16::from(first))
}

/// Vectors of the MSI-X capability (§7.7.2); 0 without one.
pub fn msix_vectors(space: &[u8]) -> u16 {
    let list = standard(space);
    let control =
        list.find(CapabilityId::Standard(id::MSIX)).and_then(|c| word(space, c.offset.saturating_add(2)));
    control.map_or(0, |control| (control & 0x7ff).saturating_add(1))
}

/// The list that begins at 0x100; empty for a space of 256 bytes, and if 0x100 holds zero.
pub fn extended(space: &[u8]) -> List {
    let has = dword(space, CONVENTIONAL).is_some_and(|header| header != 0);
    walk(space, &EXTENDED, if has { CONVENTIONAL } else { 0 })
}

fn walk(space: &[u8], kind: &ListBounds, first: u16) -> List {
    let mut nodes: Vec<(CapabilityId, u16)> = Vec::new();
    let mut at = first;
    // Each step adds an offset that was not there, and there are 960 at most.
    let end = loop {
        if at == 0 {
            break ListEnd::Null;
        }
        if at < kind.first || at >= kind.end {
            break ListEnd::Outside(at);
        }
        if nodes.iter().any(|(_, offset)| *offset == at) {
            break ListEnd::Loop(at);
        }
        let Some(node) = (kind.read)(space, at) else { break ListEnd::Dead(at) };
        nodes.push((node.id, at));
        at = node.next;
    };
    cut(space, kind.end, &nodes, end)
}

/// Sets the length of every node, and ends the list before the first that reaches into another.
fn cut(space: &[u8], space_end: u16, nodes: &[(CapabilityId, u16)], end: ListEnd) -> List {
    let mut list = List { capabilities: Vec::new(), end };
    for &(id, offset) in nodes {
        let inside = |capability: &Capability| (capability.offset..capability.end()).contains(&offset);
        if list.capabilities.iter().any(inside) {
            list.end = ListEnd::Overlap(offset);
            break;
        }
        let above = nodes.iter().map(|(_, other)| *other).filter(|other| *other > offset).min();
        let room = above.unwrap_or(space_end).min(space_end).saturating_sub(offset);
        let before = list.capabilities.iter().map(|c| c.offset).filter(|other| *other > offset).min();
        let bound = before.unwrap_or(space_end).saturating_sub(offset);
        let capability = match length(space, id, offset, room) {
            Length::Exact(length) => Capability { id, offset, length, exact: true },
            Length::Open => Capability { id, offset, length: room, exact: false },
        };
        if capability.length > bound {
            list.end = ListEnd::Overlap(offset);
            break;
        }
        list.capabilities.push(capability);
    }
    list
}

enum Length {
    /// Length that the specification defines.
    Exact(u16),
    /// Undefined, or dependent on the content.
    Open,
}

/// Bytes of a capability, by the clause that defines it.
fn length(space: &[u8], id: CapabilityId, at: u16, room: u16) -> Length {
    let field = |offset: u16| word(space, at.saturating_add(offset)).unwrap_or(0);
    let long = |offset: u16| dword(space, at.saturating_add(offset)).unwrap_or(0);
    Length::Exact(match id {
        CapabilityId::Standard(id) => match id {
            id::POWER | id::VPD => 8,
            0x02 => 12,       // AGP
            0x04 | 0x06 => 4, // slot identification, CompactPCI hot swap
            0x0d => 8,        // subsystem ids of a bridge
            id::MSI => msi_length(field(2)),
            id::VENDOR => field(2).to_le_bytes().first().map_or(3, |length| u16::from(*length).max(3)),
            id::EXPRESS => express_length(field(2), room),
            id::MSIX => 12,
            id::ADVANCED => 6,
            _ => return Length::Open,
        },
        CapabilityId::Extended(id) => match id {
            extended::NULL => 4,
            0x03 | 0x1f | 0x25 => 12, // serial number, precision time, data link feature
            0x04 | 0x1e => 16,        // power budgeting, L1 substates
            extended::VENDOR => vendor_length(long(4)),
            extended::DVSEC => vendor_length(long(4)),
            0x0e | 0x0f | 0x18 | 0x1b => 8, // ARI, ATS, LTR, PASID
            0x10 => 64,                     // SR-IOV
            0x13 => 16,                     // PRI
            extended::REBAR | 0x24 => resizable_length(long(8)),
            0x2e => 24, // data object exchange
            _ => return Length::Open,
        },
    })
}

/// §7.7.1: 64-bit addresses and a mask per vector make it longer.
fn msi_length(control: u16) -> u16 {
    match (control & 1 << 7 != 0, control & 1 << 8 != 0) {
        (false, false) => 10,
        (true, false) => 14,
        (false, true) => 20,
        (true, true) => 24,
    }
}

/// §7.5.3: version 1 had only what the kind of function needs; version 2 has everything, though endpoints are about
/// that lack the slot registers at its end.
fn express_length(flags: u16, room: u16) -> u16 {
    const INTEGRATED_ENDPOINT: u16 = 9;
    match (flags & 0xf, flags >> 4 & 0xf) {
        (0 | 1, INTEGRATED_ENDPOINT) => 0x0c,
        (0 | 1, _) => 0x14,
        _ => room.clamp(0x2c, 0x3c),
    }
}

/// §7.9.5 and §7.9.6: the length includes the header, so the minimum is 8.
fn vendor_length(header: u32) -> u16 {
    u16::try_from(header >> 20).unwrap_or(u16::MAX).max(8)
}

/// §7.8.6: an entry of 8 bytes for each of 1 to 6 registers, counted in the first control register.
fn resizable_length(control: u32) -> u16 {
    let entries = u16::try_from(control >> 5 & 7).unwrap_or(0).clamp(1, 6);
    entries.saturating_mul(8).saturating_add(4)
}
