//! vCPU numbers, identities and pinning, and whether the host has processors for them.

use egm_address::CpuSet;

use crate::arch::{Layout, layout_of};
use crate::config::{Architecture, Spec};
use crate::facts::Facts;
use crate::plan::{PlanError, VcpuPlan};

/// Whether guests with the instruction set `wanted` run on a `host`.
///
/// # Errors
/// [`PlanError::Architecture`].
pub(crate) fn check_architecture(wanted: Architecture, host: Architecture) -> Result<(), PlanError> {
    if wanted == host {
        return Ok(());
    }
    Err(PlanError::Architecture { wanted: layout_of(wanted).name, host: layout_of(host).name })
}

/// Whether the host is of the guest's kind and runs that many vCPUs.
pub(super) fn check_host(spec: &Spec, facts: &Facts) -> Result<(), PlanError> {
    check_architecture(spec.arch, facts.arch)?;
    match facts.kvm.present() {
        Some(kvm) if spec.cpus.count > kvm.max_vcpus => {
            Err(PlanError::Vcpus { count: spec.cpus.count, max: kvm.max_vcpus })
        }
        _ => Ok(()),
    }
}

/// Whether the host has the CPUs that vCPUs are pinned to.
pub(super) fn check_pinning(vcpus: &[VcpuPlan], facts: &Facts) -> Result<(), PlanError> {
    let cpus: CpuSet = facts.nodes.iter().flat_map(|node| node.cpus.iter()).collect();
    let pinned = vcpus.iter().flat_map(|vcpu| vcpu.host_cpus.iter().map(move |set| (vcpu.index, set)));
    for (vcpu, set) in pinned {
        if let Some(cpu) = set.iter().find(|cpu| !cpus.contains(*cpu)) {
            return Err(PlanError::HostCpu { vcpu, cpu, cpus });
        }
    }
    Ok(())
}

/// The vCPUs: threads of a core are neighbours, then cores of a socket.
pub(super) fn plan(spec: &Spec, layout: &Layout) -> Result<Vec<VcpuPlan>, PlanError> {
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
