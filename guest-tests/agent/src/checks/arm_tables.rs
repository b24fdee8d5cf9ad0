//! The part of the tables' claim that is about Arm: MADT, GTDT, IORT, PPTT and SPCR match the plan.

use std::collections::BTreeSet;

use egm_address::PciAddress;

use crate::acpi::arm;
use crate::error::Broken;
use crate::expect::{Plan, Vcpu};
use crate::finding::Claim;

/// Two frames of 64 KiB (GICv3 12.10).
const REDISTRIBUTOR: u64 = 128 << 10;
/// Microsoft's number of a PL011.
const PL011: u8 = 3;
/// Private interrupts of the timers: secure, EL1, virtual, EL2 (SBSA 3.8).
const TIMERS: [u32; 4] = [29, 30, 27, 26];

pub(super) fn judge(
    claim: &mut Claim,
    plan: &Plan,
    table: impl Fn(&'static str) -> Result<Vec<u8>, Broken>,
) -> Result<(), Broken> {
    controllers(claim, plan, &arm::madt(&table("APIC")?)?);
    claim.equal("the timers' interrupts in the GTDT", &arm::gtdt(&table("GTDT")?)?, &TIMERS);
    messages(claim, plan, &arm::iort(&table("IORT")?)?);
    let places = arm::pptt(&table("PPTT")?)?;
    let of = |vcpu: &Vcpu| places.get(&vcpu.index).copied();
    claim.equal("the number of processors in the PPTT", &places.len(), &plan.vcpus.len());
    for (vcpu, next) in plan.vcpus.iter().zip(plan.vcpus.iter().skip(1)) {
        let Some(((package, core), (next_package, next_core))) = of(vcpu).zip(of(next)) else {
            claim.untrue(format!("the PPTT lacks vCPU {} or {}", vcpu.index, next.index));
            continue;
        };
        let said = (package == next_package, core == next_core);
        let planned = (vcpu.socket == next.socket, (vcpu.socket, vcpu.core) == (next.socket, next.core));
        claim.equal(
            format!("whether vCPUs {} and {} share package and core", vcpu.index, next.index),
            &said,
            &planned,
        );
    }
    if let Some(line) = plan.lines.iter().find(|line| line.owner == "serial") {
        let base = window(plan, "serial").map_or(0, |(start, _)| start);
        let planned = arm::Spcr { kind: PL011, base, interrupt: line.gsi };
        claim.equal("the console of the SPCR", &arm::spcr(&table("SPCR")?)?, &planned);
    }
    Ok(())
}

/// Start and size of the window with this label.
fn window(plan: &Plan, label: &str) -> Option<(u64, u64)> {
    let found = plan.windows.iter().find(|window| window.label == label);
    found.map(|window| (window.span.start().get(), window.span.size()))
}

fn controllers(claim: &mut Claim, plan: &Plan, madt: &arm::Madt) {
    let start = |label| window(plan, label).map(|(start, _)| start);
    claim.equal("the version of the GIC in the MADT", &madt.version, &3);
    let planned: Vec<u64> = start("GIC distributor").into_iter().collect();
    claim.equal("the distributors of the MADT", &madt.distributors, &planned);
    claim.equal(
        "the ITS of the MADT",
        &madt.its,
        &start("GIC ITS").map(|base| (0, base)).into_iter().collect(),
    );
    let room: u64 = madt.redistributors.iter().map(|(_, size)| u64::from(*size)).sum();
    let base = madt.redistributors.first().map(|(base, _)| *base);
    claim.equal("the first redistributor of the MADT", &base, &start("GIC redistributors"));
    let needed = REDISTRIBUTOR.saturating_mul(u64::try_from(plan.vcpus.len()).unwrap_or(u64::MAX));
    claim.equal("the bytes of redistributors in the MADT", &room, &needed);
    let planned = plan.vcpus.iter().map(|vcpu| (vcpu.index, u64::from(vcpu.hardware_id))).collect();
    claim.equal("the processors of the MADT", &madt.processors, &planned);
}

/// Every function's messages reach the ITS under its requester id.
fn messages(claim: &mut Claim, plan: &Plan, mappings: &[arm::Mapping]) {
    let requester =
        |at: PciAddress| (u32::from(at.segment()), u32::from(at.bus()) << 8 | u32::from(at.devfn()));
    let all: BTreeSet<_> = plan.pci.iter().map(|function| requester(function.address)).collect();
    for (segment, id) in all {
        let of = |m: &&arm::Mapping| m.segment == segment && (m.from.0..=m.from.1).contains(&id);
        let found = mappings.iter().find(of).map(|m| (m.its, m.to.wrapping_add(id.wrapping_sub(m.from.0))));
        claim.equal(format!("where the IORT sends messages of {id:#06x}"), &found, &Some((Some(0), id)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::tests::grace;

    fn judged(plan: &Plan) -> String {
        let table = |name: &str| {
            let bytes: &[u8] = match name {
                "APIC" => include_bytes!("../../../../vmm/tests/golden-acpi/APIC"),
                "GTDT" => include_bytes!("../../../../vmm/tests/golden-acpi/GTDT"),
                "IORT" => include_bytes!("../../../../vmm/tests/golden-acpi/IORT"),
                "PPTT" => include_bytes!("../../../../vmm/tests/golden-acpi/PPTT"),
                _ => include_bytes!("../../../../vmm/tests/golden-acpi/SPCR"),
            };
            Ok(bytes.to_vec())
        };
        let mut claim = Claim::default();
        judge(&mut claim, plan, table).unwrap();
        claim.finish().reason
    }

    #[test]
    fn tables_of_a_plan_are_as_planned() {
        assert_eq!(judged(&grace()), "");
    }

    #[test]
    fn each_wrong_value_is_named() {
        let mut plan = grace();
        plan.vcpus[3].hardware_id = 0x100;
        assert!(judged(&plan).contains("the processors of the MADT"));
        let mut plan = grace();
        plan.vcpus[4].socket = 0;
        assert!(judged(&plan).contains(
            "whether vCPUs 3 and 4 share package and core is (false, false), planned (true, false)"
        ));
        let mut plan = grace();
        plan.lines[0].gsi = 34;
        assert!(judged(&plan).contains("the console of the SPCR"));
        let mut plan = grace();
        plan.vcpus.pop();
        assert!(judged(&plan).contains("the bytes of redistributors in the MADT"));
    }
}
