//! SRAT: which proximity domain every processor and byte of memory is in (ACPI 6.5, clause 5.2.16).
//!
//! Linux numbers its nodes in the order in which domains appear here, so the order is part of what the guest sees:
//! processors, then generic initiators, then memory.

use acpi_tables::AmlSink;
use acpi_tables::srat::MemoryAffinity;
use egm_address::{Guest, PciAddress, Span};

use super::madt::short_ids;
use super::{bytes, reserved, table};
use crate::plan::{MemoryPlan, Plan, VcpuPlan};

/// From revision 2 on domains have 32 bits; 3 has all structures of ACPI 6.5.
const REVISION: u8 = 3;
const ENABLED: u32 = 1;

/// The table.
pub(super) fn srat(plan: &Plan) -> Vec<u8> {
    let mut body = Vec::new();
    body.dword(1); // clause 5.2.16: "reserved to be 1 for backward compatibility"
    reserved(&mut body, 8);
    plan.vcpus.iter().for_each(|vcpu| processor(&mut body, vcpu));
    let initiators = plan.nodes.iter().filter_map(|node| Some((node.id, node.initiator?)));
    initiators.for_each(|(node, gpu)| generic_initiator(&mut body, node, gpu));
    for (node, span) in merged(&plan.memory) {
        let affinity = MemoryAffinity::new(node, span.start().get(), span.size()).enabled();
        body.extend(bytes(&affinity));
    }
    table(*b"SRAT", REVISION, &body)
}

fn processor(sink: &mut dyn AmlSink, vcpu: &VcpuPlan) {
    let [low, high @ ..] = vcpu.node.to_le_bytes();
    match short_ids(vcpu) {
        // Processor local APIC affinity, clause 5.2.16.1.
        Some((id, _)) => {
            sink.vec(&[0, 16, low, id]);
            sink.dword(ENABLED);
            sink.byte(0); // local SAPIC EID
            sink.vec(&high);
            sink.dword(0); // clock domain
        }
        // Processor local x2APIC affinity, clause 5.2.16.3.
        None => {
            sink.vec(&[2, 24]);
            reserved(sink, 2);
            sink.dword(vcpu.node);
            sink.dword(vcpu.hardware_id);
            sink.dword(ENABLED);
            sink.dword(0); // clock domain
            reserved(sink, 4);
        }
    }
}

/// Generic initiator affinity with a PCI handle (clause 5.2.16.6): the node that a GPU's driver brings memory to.
fn generic_initiator(sink: &mut dyn AmlSink, node: u32, gpu: PciAddress) {
    const PCI_HANDLE: u8 = 1;
    sink.vec(&[5, 32, 0, PCI_HANDLE]);
    sink.dword(node);
    sink.word(gpu.segment());
    sink.vec(&[gpu.bus(), gpu.devfn()]);
    reserved(sink, 12);
    sink.dword(ENABLED);
    reserved(sink, 4);
}

/// RAM with touching spans of one node joined: the guest need not know where one backing ends.
fn merged(memory: &[MemoryPlan]) -> Vec<(u32, Span<Guest>)> {
    let mut spans: Vec<(u32, Span<Guest>)> = Vec::with_capacity(memory.len());
    for piece in memory {
        let joined = spans
            .last()
            .filter(|(node, last)| *node == piece.node && last.end() == piece.span.start())
            .and_then(|(_, last)| Span::between(last.start(), piece.span.end()));
        match (spans.last_mut(), joined) {
            (Some(last), Some(span)) => last.1 = span,
            _ => spans.push((piece.node, piece.span)),
        }
    }
    spans
}
