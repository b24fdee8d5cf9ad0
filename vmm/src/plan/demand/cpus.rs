//! vCPU numbers, identities and pinning.

use crate::arch::Layout;
use crate::config::Spec;
use crate::plan::{PlanError, VcpuPlan};

/// The vCPUs: threads of a core are neighbours, then cores of a socket.
pub(in crate::plan) fn plan(spec: &Spec, layout: &Layout) -> Result<Vec<VcpuPlan>, PlanError> {
    let cpus = &spec.cpus;
    let (threads, cores) = (cpus.threads.max(1), cpus.cores.max(1));
    (0..cpus.count)
        .map(|index| {
            let hardware_id = (layout.hardware_id)(cpus, index);
            if hardware_id > layout.max_hardware_id {
                return Err(PlanError::HardwareId {
                    vcpu: index,
                    id: hardware_id,
                    max: layout.max_hardware_id,
                });
            }
            let node = spec.memory.nodes.iter().find(|node| node.cpus.contains(index));
            Ok(VcpuPlan {
                index,
                hardware_id,
                socket: index / threads / cores,
                core: index / threads % cores,
                thread: index % threads,
                node: node.ok_or(PlanError::VcpuNode { vcpu: index })?.id,
                host_cpus: usize::try_from(index).ok().and_then(|at| cpus.affinity.get(at)).cloned(),
            })
        })
        .collect()
}
