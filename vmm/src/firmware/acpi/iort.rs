//! IORT: the route of a function's messages and memory accesses (Arm DEN 0049).
//!
//! ```text
//! root complex of segment 0 ─┬─ requester ids behind an SMMU ──► SMMUv3 ──┬─► ITS group ── the ITS
//!                            └─ all others ───────────────────────────────┘
//! ```
//! The specification has one root complex a segment, and Linux takes the first, so host bridges of one segment share
//! theirs. A function's id, at an SMMU and at the ITS, is its requester id: bus, device, function.

use acpi_tables::AmlSink;

use super::madt::ITS;
use super::{reserved, table};
use crate::plan::{Plan, SmmuPlan};

/// Of the specification's revision D: later ones add PASIDs and reserved memory, which nothing here has.
const REVISION: u8 = 0;
/// Bytes before the first node, which is the ITS group.
const HEADER: u16 = 48;
const ITS_GROUP_SIZE: u16 = 24;
/// Fields of a root complex and of an SMMUv3 before their mappings.
const ROOT_COMPLEX_FIELDS: u16 = 36;
const SMMU_FIELDS: u16 = 68;
const MAPPING_SIZE: u16 = 20;
/// Memory access properties: accesses are coherent, by a coherent path and as cacheable memory.
const COHERENT: u32 = 1;
const COHERENT_PATH: u8 = 1 << 0 | 1 << 1;
/// The SMMU's own accesses are coherent, whatever its registers say.
const COHERENT_SMMU: u32 = 1 << 0;
/// Address bits that the root complex's functions have.
const ADDRESS_BITS: u8 = 64;
const LAST_REQUESTER: u32 = 0xffff;

/// Ids that keep their numbers at the node at offset `to`.
#[derive(Clone, Copy)]
struct Mapping {
    first: u32,
    last: u32,
    to: u16,
}

/// Type and revision of a node.
#[derive(Clone, Copy)]
struct NodeType {
    kind: u8,
    revision: u8,
}

const ITS_GROUP: NodeType = NodeType { kind: 0, revision: 0 };
const ROOT_COMPLEX: NodeType = NodeType { kind: 2, revision: 1 };
const SMMU: NodeType = NodeType { kind: 4, revision: 1 };

pub(super) fn iort(plan: &Plan) -> Vec<u8> {
    let mut body = Vec::new();
    body.dword(u32::try_from(plan.smmus.len()).unwrap_or(u32::MAX).saturating_add(2)); // nodes
    body.dword(HEADER.into());
    reserved(&mut body, 4);

    node(&mut body, ITS_GROUP, ITS_GROUP_SIZE, &[]);
    body.dword(1); // one ITS
    body.dword(ITS);

    let mut at = HEADER + ITS_GROUP_SIZE;
    let mut ways = Vec::new();
    let mut next = 0;
    for smmu in &plan.smmus {
        write_smmu(&mut body, smmu);
        let (first, last) = (u32::from(smmu.buses.0) << 8, u32::from(smmu.buses.1) << 8 | 0xff);
        let before = first.checked_sub(1).filter(|end| *end >= next);
        ways.extend(before.map(|last| Mapping { first: next, last, to: HEADER }));
        ways.push(Mapping { first, last, to: at });
        next = last.saturating_add(1);
        at = at.saturating_add(SMMU_FIELDS + MAPPING_SIZE);
    }
    let rest = Mapping { first: next, last: LAST_REQUESTER, to: HEADER };
    ways.extend((next <= rest.last).then_some(rest));
    node(&mut body, ROOT_COMPLEX, ROOT_COMPLEX_FIELDS, &ways);
    body.dword(COHERENT);
    body.vec(&[0, 0, 0, COHERENT_PATH]); // allocation hints, reserved, flags
    body.dword(0); // no ATS
    body.dword(0); // segment
    body.vec(&[ADDRESS_BITS, 0, 0, 0]);
    ways.iter().for_each(|way| way.write(&mut body));
    table(*b"IORT", REVISION, &body)
}

fn write_smmu(body: &mut Vec<u8>, smmu: &SmmuPlan) {
    let ways = [Mapping { first: 0, last: LAST_REQUESTER, to: HEADER }];
    node(body, SMMU, SMMU_FIELDS, &ways);
    body.qword(smmu.span.start().get());
    body.dword(COHERENT_SMMU);
    reserved(body, 4);
    body.qword(0); // no VATOS page
    body.dword(0); // model: a plain SMMUv3
    smmu.lines.into_iter().for_each(|line| body.dword(line));
    reserved(body, 8); // no node of its own, no messages of its own
    ways.iter().for_each(|way| way.write(body));
}

/// The first fields of a node; its mappings follow `fields` bytes.
fn node(body: &mut Vec<u8>, NodeType { kind, revision }: NodeType, fields: u16, mappings: &[Mapping]) {
    let count = u16::try_from(mappings.len()).unwrap_or(u16::MAX);
    body.byte(kind);
    body.word(fields.saturating_add(count.saturating_mul(MAPPING_SIZE)));
    body.byte(revision);
    reserved(body, 4);
    body.dword(count.into());
    body.dword(if count == 0 { 0 } else { fields.into() });
}

impl Mapping {
    fn write(&self, body: &mut Vec<u8>) {
        let Self { first, last, to } = *self;
        // Input base, ids less one, output base, where to, flags.
        let to = to.saturating_add(u16::from(egm_address::fault!("its-table-wrong")));
        [first, last.saturating_sub(first), first, to.into(), 0]
            .into_iter()
            .for_each(|value| body.dword(value));
    }
}
