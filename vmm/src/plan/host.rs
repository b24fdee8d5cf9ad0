//! Whether the host is of the guest's kind, and has the CPUs and the nodes that the plan names.

use egm_address::CpuSet;

use crate::arch::layout_of;
use crate::config::Spec;
use crate::facts::Facts;
use crate::plan::{BackingPlan, PlanError, VcpuPlan};

/// Whether the host is of the guest's kind and runs that many vCPUs.
pub(super) fn check_target(spec: &Spec, facts: &Facts) -> Result<(), PlanError> {
    if spec.arch != facts.arch {
        let (wanted, host) = (layout_of(spec.arch).name, layout_of(facts.arch).name);
        return Err(PlanError::Architecture { wanted, host });
    }
    match facts.kvm.present() {
        Some(kvm) if spec.cpus.count > kvm.max_vcpus => {
            Err(PlanError::Vcpus { count: spec.cpus.count, max: kvm.max_vcpus })
        }
        _ => Ok(()),
    }
}

/// Whether the host has the CPUs that vCPUs are pinned to.
pub(super) fn check_cpus(vcpus: &[VcpuPlan], facts: &Facts) -> Result<(), PlanError> {
    let cpus: CpuSet = facts.nodes.iter().flat_map(|node| node.cpus.iter()).collect();
    let pinned = vcpus.iter().flat_map(|vcpu| vcpu.host_cpus.iter().map(move |set| (vcpu.index, set)));
    for (vcpu, set) in pinned {
        if let Some(cpu) = set.iter().find(|cpu| !cpus.contains(*cpu)) {
            return Err(PlanError::HostCpu { vcpu, cpu, cpus });
        }
    }
    Ok(())
}

/// Whether the host has the nodes that memory comes from.
pub(super) fn check_nodes(backings: &[BackingPlan], facts: &Facts) -> Result<(), PlanError> {
    let known: CpuSet = facts.nodes.iter().map(|node| node.id).collect();
    for backing in backings {
        let missing = backing.host_nodes.iter().flat_map(CpuSet::iter).find(|node| !known.contains(*node));
        if let Some(node) = missing {
            return Err(PlanError::HostNode { what: backing.id.clone(), node, nodes: known });
        }
    }
    Ok(())
}
