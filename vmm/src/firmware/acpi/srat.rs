//! SRAT: which proximity domain every processor and byte of memory is in (ACPI 6.5, clause 5.2.16).
//!
//! Linux numbers its nodes in the order in which domains appear here, so the order is part of what the guest sees:
//! processors, then generic initiators, then memory.

use acpi_tables::AmlSink;
use acpi_tables::srat::MemoryAffinity;
use egm_address::{Guest, PciAddress, Span};

use super::madt::short_ids;
use super::{bytes, reserved, table};
use crate::config::Architecture;
use crate::firmware::memory_of_nodes;
use crate::plan::{MemoryKind, MemoryPlan, Plan, VcpuPlan};

/// From revision 2 on domains have 32 bits; 3 has all structures of ACPI 6.5.
const REVISION: u8 = 3;
const ENABLED: u32 = 1;

pub(super) fn srat(plan: &Plan) -> Vec<u8> {
    let mut body = Vec::new();
    body.dword(1); // clause 5.2.16: "reserved to be 1 for backward compatibility"
    reserved(&mut body, 8);
    let processor = match plan.arch {
        Architecture::X86_64 => apic,
        Architecture::Aarch64 => gicc,
    };
    plan.vcpus.iter().for_each(|vcpu| processor(&mut body, vcpu));
    let initiators = plan.nodes.iter().filter_map(|node| Some((node.id, node.initiator?)));
    initiators.for_each(|(node, gpu)| generic_initiator(&mut body, node, gpu));
    for (node, span) in merged(plan) {
        let node = if egm_address::fault!("srat-memory-in-node-0") { 0 } else { node };
        let affinity = MemoryAffinity::new(node, span.start().get(), span.size()).enabled();
        body.extend(bytes(&affinity));
    }
    table(*b"SRAT", REVISION, &body)
}

fn apic(sink: &mut Vec<u8>, vcpu: &VcpuPlan) {
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

/// GICC affinity, clause 5.2.16.4.
fn gicc(sink: &mut Vec<u8>, vcpu: &VcpuPlan) {
    sink.vec(&[3, 18]);
    sink.dword(vcpu.node);
    sink.dword(vcpu.index);
    sink.dword(ENABLED);
    sink.dword(0); // clock domain
}

/// Generic initiator affinity with a PCI handle (clause 5.2.16.6): the node that a GPU's driver brings memory to.
fn generic_initiator(sink: &mut dyn AmlSink, node: u32, gpu: PciAddress) {
    const PCI_HANDLE: u8 = 1;
    sink.vec(&[5, 32, 0, PCI_HANDLE]);
    sink.dword(node);
    sink.word(gpu.segment());
    let handle = [gpu.bus(), gpu.devfn()];
    sink.vec(&if egm_address::fault!("generic-initiator-swapped") { [handle[1], handle[0]] } else { handle });
    reserved(sink, 12);
    sink.dword(ENABLED);
    reserved(sink, 4);
}

/// Memory with touching spans of one node joined: the guest need not know where one backing ends. On Arm every byte of
/// the memory map has to be in a node, or Linux ignores them all: that is the firmware's memory too. A slice is one span
/// with its retired pages, which the memory map does not have.
fn merged(plan: &Plan) -> Vec<(u32, Span<Guest>)> {
    let all: Vec<MemoryPlan> = match plan.arch {
        Architecture::X86_64 => plan.memory.clone(),
        Architecture::Aarch64 => memory_of_nodes(plan).collect(),
    };
    let mut spans: Vec<(MemoryPlan, Span<Guest>)> = Vec::with_capacity(all.len());
    for piece in all {
        let joins = |last: &MemoryPlan, span: Span<Guest>| {
            let slice = piece.kind == MemoryKind::Egm && piece.backing == last.backing;
            last.node == piece.node && (slice || span.end() == piece.span.start())
        };
        match spans.last_mut() {
            Some((last, span)) if joins(last, *span) => {
                *span = Span::between(span.start(), piece.span.end()).unwrap_or(*span);
            }
            _ => spans.push((piece.clone(), piece.span)),
        }
    }
    spans.into_iter().map(|(first, span)| (first.node, span)).collect()
}
