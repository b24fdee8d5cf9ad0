//! IORT: the route of a function's messages (Arm DEN 0049): root complex of segment 0, then ITS group, the ITS.
//!
//! The specification has one root complex a segment, and Linux takes the first, so host bridges of one segment share
//! theirs. A function's id at the ITS is its requester id: bus, device, function.

use acpi_tables::AmlSink;

use super::madt::ITS;
use super::{reserved, table};

/// Of the specification's revision D: later ones add PASIDs and reserved memory, which nothing here has.
const REVISION: u8 = 0;
/// Bytes before the first node, which is the ITS group.
const HEADER: u16 = 48;
const ITS_GROUP_SIZE: u16 = 24;
/// Fields of a root complex before its mapping.
const ROOT_COMPLEX_FIELDS: u16 = 36;
const MAPPING_SIZE: u16 = 20;
/// Memory access properties: accesses are coherent, by a coherent path and as cacheable memory.
const COHERENT: u32 = 1;
const COHERENT_PATH: u8 = 1 << 0 | 1 << 1;
/// Address bits that the root complex's functions have.
const ADDRESS_BITS: u8 = 64;
const LAST_REQUESTER: u32 = 0xffff;

/// Type and revision of a node.
#[derive(Clone, Copy)]
struct NodeType {
    kind: u8,
    revision: u8,
}

const ITS_GROUP: NodeType = NodeType { kind: 0, revision: 0 };
const ROOT_COMPLEX: NodeType = NodeType { kind: 2, revision: 1 };

pub(super) fn iort() -> Vec<u8> {
    let mut body = Vec::new();
    body.dword(2); // nodes
    body.dword(HEADER.into());
    reserved(&mut body, 4);

    node(&mut body, ITS_GROUP, ITS_GROUP_SIZE, 0);
    body.dword(1); // one ITS
    body.dword(ITS);

    node(&mut body, ROOT_COMPLEX, ROOT_COMPLEX_FIELDS, 1);
    body.dword(COHERENT);
    body.vec(&[0, 0, 0, COHERENT_PATH]); // allocation hints, reserved, flags
    body.dword(0); // no ATS
    body.dword(0); // segment
    body.vec(&[ADDRESS_BITS, 0, 0, 0]);
    // All ids keep their numbers at the ITS group: input base, ids less one, output base, where to, flags.
    let to = HEADER.saturating_add(u16::from(egm_address::fault!("its-table-wrong")));
    [0, LAST_REQUESTER, 0, to.into(), 0].into_iter().for_each(|value| body.dword(value));
    table(*b"IORT", REVISION, &body)
}

/// The first fields of a node; its `mappings` follow `fields` bytes.
fn node(body: &mut Vec<u8>, NodeType { kind, revision }: NodeType, fields: u16, mappings: u16) {
    body.byte(kind);
    body.word(fields.saturating_add(mappings.saturating_mul(MAPPING_SIZE)));
    body.byte(revision);
    reserved(body, 4);
    body.dword(mappings.into());
    body.dword(if mappings == 0 { 0 } else { fields.into() });
}
