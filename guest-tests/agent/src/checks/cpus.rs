//! Claim: every planned vCPU is online and really runs, with the planned sockets, cores and threads, APIC id and flags.

use std::thread;

use egm_address::CpuSet;

use super::Context;
use crate::error::Broken;
use crate::expect::{Plan, Vcpu};
use crate::finding::{Claim, Finding};
use crate::sysfs;

const CPUS: &str = "/sys/devices/system/cpu";

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let plan = &context.plan;
    let mut claim = Claim::default();
    let online = sysfs::list(format!("{CPUS}/online"))?;
    let planned: CpuSet = plan.vcpus.iter().map(|v| v.index).collect();
    claim.equal("the list of online CPUs", &online.to_string(), &planned.to_string());
    for cpu in online.iter().filter(|cpu| planned.contains(*cpu)) {
        let topology = format!("{CPUS}/cpu{cpu}/topology");
        let siblings = [
            ("the package", sysfs::list(format!("{topology}/package_cpus_list"))?),
            ("the core", sysfs::list(format!("{topology}/core_cpus_list"))?),
        ];
        for ((what, is), planned) in siblings.into_iter().zip(planned_siblings(plan, cpu)) {
            claim.equal(format!("{what} of CPU {cpu}"), &is.to_string(), &planned.to_string());
        }
        if let Err(why) = runs_on(cpu) {
            claim.untrue(format!("no thread runs on CPU {cpu}: {why}"));
        }
    }
    if plan.arch == "x86_64" {
        identity(&mut claim, plan, &sysfs::text("/proc/cpuinfo")?);
    }
    claim.seen(format!("CPUs {online}"));
    Ok(claim.finish().with_value(f64::from(u32::try_from(online.len()).unwrap_or(u32::MAX)), "vCPUs"))
}

/// The vCPUs of the socket and of the core that `cpu` is in.
fn planned_siblings(plan: &Plan, cpu: u32) -> [CpuSet; 2] {
    let with = |same: fn(&Vcpu, &Vcpu) -> bool| -> CpuSet {
        let own = plan.vcpus.iter().find(|v| v.index == cpu);
        plan.vcpus.iter().filter(|v| own.is_some_and(|own| same(own, v))).map(|v| v.index).collect()
    };
    [with(|a, b| a.socket == b.socket), with(|a, b| (a.socket, a.core) == (b.socket, b.core))]
}

/// Moves a thread to `cpu` and asks where it is.
fn runs_on(cpu: u32) -> Result<(), String> {
    let wanted = usize::try_from(cpu).map_err(|e| e.to_string())?;
    let place = thread::spawn(move || {
        let mut set = rustix::thread::CpuSet::new();
        set.set(wanted);
        rustix::thread::sched_setaffinity(None, &set).map(|()| rustix::thread::sched_getcpu())
    });
    match place.join() {
        Ok(Ok(place)) if place == wanted => Ok(()),
        Ok(Ok(place)) => Err(format!("it runs on {place}")),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("its thread panicked".to_owned()),
    }
}

/// APIC ids and flags in `/proc/cpuinfo`.
fn identity(claim: &mut Claim, plan: &Plan, cpuinfo: &str) {
    for block in cpuinfo.split("\n\n") {
        let field = |key| sysfs::field(block, key);
        let Some(cpu) = field("processor").and_then(|n| n.parse::<u32>().ok()) else { continue };
        if let Some(vcpu) = plan.vcpus.iter().find(|v| v.index == cpu) {
            let apic = field("apicid").and_then(|n| n.parse::<u32>().ok());
            claim.equal(format!("the APIC id of CPU {cpu}"), &apic, &Some(vcpu.hardware_id));
        }
        for flag in ["x2apic", "hypervisor"] {
            let there = field("flags").is_some_and(|flags| flags.split(' ').any(|f| f == flag));
            claim.holds(there, || format!("CPU {cpu} has no flag {flag}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::tests::q35;

    const CPUINFO: &str = include_str!("../../fixtures/q35/cpuinfo");

    fn judged(plan: &Plan, cpuinfo: &str) -> String {
        let mut claim = Claim::default();
        identity(&mut claim, plan, cpuinfo);
        claim.finish().reason
    }

    #[test]
    fn apic_ids_and_flags_are_compared() {
        let mut plan = q35();
        assert_eq!(judged(&plan, CPUINFO), "");
        assert_eq!(judged(&plan, &CPUINFO.replacen(" x2apic", "", 1)), "CPU 0 has no flag x2apic");
        plan.vcpus[1].hardware_id = 4;
        assert!(judged(&plan, CPUINFO).contains("the APIC id of CPU 1 is Some(1), planned Some(4)"));
    }

    #[test]
    fn siblings_share_a_socket_or_a_core() {
        let plan = q35();
        let [package, core] = planned_siblings(&plan, 1);
        assert_eq!((package.to_string(), core.to_string()), ("0-1".into(), "1".into()));
    }

    #[test]
    fn a_thread_runs_where_it_is_pinned_and_nowhere_without_a_cpu() {
        assert_eq!(runs_on(0), Ok(()));
        assert!(runs_on(1000).is_err());
    }
}
