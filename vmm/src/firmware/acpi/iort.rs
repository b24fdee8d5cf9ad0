//! IORT: whom a function's messages and memory accesses go through (Arm DEN 0049).
//!
//! ```text
//! root complex of segment 0 ── requester ids 0 to 0xffff ──► ITS group ── the ITS
//! ```
//! The specification has one root complex a segment, and Linux takes the first, so host bridges of one segment share
//! theirs. A function's id at the ITS is its requester id: bus, device, function. An SMMU would stand between the two, for
//! the requester ids behind it: a node of type 4 whose own mappings lead to the group.

use acpi_tables::AmlSink;

use super::madt::ITS;
use super::{reserved, table};

/// Of the specification's revision D: what later ones add speaks of PASIDs and reserved memory, which nothing here has.
const REVISION: u8 = 0;
/// Bytes before the first node.
const HEADER: u32 = 48;
const ITS_GROUP: u8 = 0;
const ROOT_COMPLEX: u8 = 2;
const ITS_GROUP_SIZE: u16 = 24;
/// Its fields, and one mapping.
const ROOT_COMPLEX_SIZE: u16 = MAPPINGS + 20;
/// Offset of a root complex's mappings.
const MAPPINGS: u16 = 36;
/// Memory access properties: accesses are coherent, by a coherent path and as cacheable memory.
const COHERENT: u32 = 1;
const COHERENT_PATH: u8 = 1 << 0 | 1 << 1;
/// Address bits that the root complex's functions have.
const ADDRESS_BITS: u8 = 64;
/// Requester ids less one, which is how a mapping counts.
const ALL_REQUESTERS: u32 = 0xffff;

/// The table.
pub(super) fn iort() -> Vec<u8> {
    let mut body = Vec::new();
    body.dword(2); // nodes
    body.dword(HEADER);
    reserved(&mut body, 4);

    node(&mut body, ITS_GROUP, ITS_GROUP_SIZE, 0);
    body.dword(0); // no mappings
    body.dword(0);
    body.dword(1); // one ITS
    body.dword(ITS);

    node(&mut body, ROOT_COMPLEX, ROOT_COMPLEX_SIZE, 1);
    body.dword(1); // one mapping
    body.dword(MAPPINGS.into());
    body.dword(COHERENT);
    body.vec(&[0, 0, 0, COHERENT_PATH]); // allocation hints, reserved, flags
    body.dword(0); // no ATS: nothing translates
    body.dword(0); // segment
    body.vec(&[ADDRESS_BITS, 0, 0, 0]);
    // Input base, ids less one, output base, where to, flags.
    [0, ALL_REQUESTERS, 0, HEADER, 0].into_iter().for_each(|value| body.dword(value));
    table(*b"IORT", REVISION, &body)
}

/// The first fields of a node: type, length, revision, reserved.
fn node(body: &mut Vec<u8>, kind: u8, size: u16, revision: u8) {
    body.byte(kind);
    body.word(size);
    body.byte(revision);
    reserved(body, 4);
}
