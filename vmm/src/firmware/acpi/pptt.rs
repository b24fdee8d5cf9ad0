//! PPTT: sockets, cores and threads (ACPI 6.5, clause 5.2.30). Caches are as in the processors' registers.

use acpi_tables::pptt::{PPTT, ProcessorHandle, ProcessorNode};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes};
use crate::plan::{Plan, VcpuPlan};

/// The table. A socket is the DSDT's processor container of that number, without which Linux numbers packages by their places
/// in this table. A core with one thread is a leaf; threads of a core are neighbours in the plan, and so are cores of a socket.
pub(super) fn pptt(plan: &Plan) -> Vec<u8> {
    let mut table = PPTT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for socket in plan.vcpus.chunk_by(|a, b| a.socket == b.socket) {
        let number = socket.first().map_or(0, |vcpu| vcpu.socket);
        let package = table.add_processor(ProcessorNode::new(None, number).physical().valid());
        for core in socket.chunk_by(|a, b| a.core == b.core) {
            add_core(&mut table, package, core);
        }
    }
    bytes(&table)
}

fn add_core(table: &mut PPTT, package: ProcessorHandle, threads: &[VcpuPlan]) {
    let leaf = |parent, vcpu: &VcpuPlan| ProcessorNode::new(Some(&parent), vcpu.index).valid().leaf();
    if let [only] = threads {
        table.add_processor(leaf(package, only));
        return;
    }
    let number = threads.first().map_or(0, |vcpu| vcpu.core);
    let core = table.add_processor(ProcessorNode::new(Some(&package), number));
    threads.iter().for_each(|vcpu| {
        table.add_processor(leaf(core, vcpu).thread());
    });
}
