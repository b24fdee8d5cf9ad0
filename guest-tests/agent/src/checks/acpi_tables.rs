//! Claim: SRAT, SLIT and HMAT, read as bytes, give every vCPU, every byte of memory, every distance and every figure the
//! planned value; on Arm the others say the planned controllers, processors, console and ways of messages. No kernel
//! stands between, so this is never waived.

use egm_address::{Guest, Span, SpanSet};

use super::Context;
use crate::acpi::{self, Figure, Hmat, Processor, Srat};
use crate::error::Broken;
use crate::expect::{Plan, first_mebibyte};
use crate::finding::{Claim, Finding};
use crate::sysfs;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let plan = &context.plan;
    let table = |name| sysfs::bytes(format!("/sys/firmware/acpi/tables/{name}"));
    let mut claim = Claim::default();
    affinities(&mut claim, plan, &acpi::srat(&table("SRAT")?)?);
    distances(&mut claim, plan, &acpi::slit(&table("SLIT")?)?);
    if plan.nodes.iter().any(|node| !node.access.is_empty()) {
        figures(&mut claim, plan, &acpi::hmat(&table("HMAT")?)?);
    }
    if plan.arch == "aarch64" {
        super::arm_tables::judge(&mut claim, plan, table)?;
    }
    claim.seen(format!("{} nodes", plan.nodes.len()));
    Ok(claim.finish())
}

fn affinities(claim: &mut Claim, plan: &Plan, srat: &Srat) {
    claim.equal("the number of processors in the SRAT", &srat.processors.len(), &plan.vcpus.len());
    for vcpu in &plan.vcpus {
        let id = if plan.arch == "x86_64" {
            Processor::Apic(vcpu.hardware_id)
        } else {
            Processor::Uid(vcpu.index)
        };
        claim.equal(
            format!("the SRAT domain of vCPU {}", vcpu.index),
            &srat.processors.get(&id),
            &Some(&vcpu.node),
        );
    }
    let planned: Vec<_> = plan.nodes.iter().filter_map(|node| Some((node.initiator?, node.id))).collect();
    claim.equal("generic initiators of the SRAT", &srat.initiators, &planned);
    let windows: SpanSet<Guest> = plan.windows.iter().map(|w| w.span).collect();
    for node in &plan.nodes {
        let of = |memory: &mut dyn Iterator<Item = _>| -> SpanSet<Guest> { memory.collect() };
        let said =
            of(&mut srat.memory.iter().filter(|(_, domain)| *domain == node.id).map(|(span, _)| *span));
        let planned = of(&mut plan.memory.iter().filter(|m| m.node == node.id).map(|m| m.span));
        let planned = if node.egm { hull(&planned) } else { planned };
        for (what, spans) in [
            ("lacks", plan.usable(Some(node.id)).minus(&first_mebibyte()).minus(&said)),
            ("has unplanned", said.minus(&planned).minus(&windows)),
        ] {
            for span in spans.iter() {
                claim.untrue(format!("domain {} of the SRAT {what} memory {span}", node.id));
            }
        }
    }
}

/// A slice is one range, with the retired pages that the memory map does not have.
fn hull(slice: &SpanSet<Guest>) -> SpanSet<Guest> {
    let ends = slice.iter().next().zip(slice.iter().last());
    ends.and_then(|(first, last)| Span::between(first.start(), last.end())).into_iter().collect()
}

fn distances(claim: &mut Claim, plan: &Plan, slit: &[Vec<u8>]) {
    let at = |id: u32| usize::try_from(id).unwrap_or(usize::MAX);
    for (from, row) in plan.nodes.iter().zip(&plan.distances) {
        for (to, planned) in plan.nodes.iter().zip(row) {
            let said = slit.get(at(from.id)).and_then(|row| row.get(at(to.id)));
            claim.equal(format!("the SLIT distance {} to {}", from.id, to.id), &said, &Some(planned));
        }
    }
}

fn figures(claim: &mut Claim, plan: &Plan, hmat: &Hmat) {
    for node in &plan.nodes {
        for access in &node.access {
            let latency = u64::from(access.latency_ns) * 1000;
            let bandwidth = u64::from(access.bandwidth_mbps);
            // An entry has 16 bits: all latencies in ns fit, large bandwidths are rounded to the table's unit.
            let slack = bandwidth / 32_767;
            for (figure, planned, slack) in [
                (Figure::ReadLatency, latency, 0),
                (Figure::WriteLatency, latency, 0),
                (Figure::ReadBandwidth, bandwidth, slack),
                (Figure::WriteBandwidth, bandwidth, slack),
            ] {
                let said = hmat.get(&(figure, access.from, node.id));
                claim.holds(said.is_some_and(|value| value.abs_diff(planned) <= slack), || {
                    format!(
                        "{figure:?} {} to {} in the HMAT is {said:?}, planned {planned}",
                        access.from, node.id
                    )
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::tests::{grace, q35};

    fn judged(plan: &Plan) -> String {
        let mut claim = Claim::default();
        affinities(&mut claim, plan, &acpi::srat(include_bytes!("../../fixtures/q35/SRAT")).unwrap());
        distances(&mut claim, plan, &acpi::slit(include_bytes!("../../fixtures/q35/SLIT")).unwrap());
        figures(&mut claim, plan, &acpi::hmat(include_bytes!("../../fixtures/q35/HMAT")).unwrap());
        claim.finish().reason
    }

    #[test]
    fn recorded_tables_are_as_planned() {
        assert_eq!(judged(&q35()), "");
    }

    #[test]
    fn tables_of_a_machine_with_gpus_and_slices_are_as_planned() {
        let (mut plan, mut claim) = (grace(), Claim::default());
        let srat = acpi::srat(include_bytes!("../../fixtures/grace/SRAT")).unwrap();
        affinities(&mut claim, &plan, &srat);
        distances(&mut claim, &plan, &acpi::slit(include_bytes!("../../fixtures/grace/SLIT")).unwrap());
        assert_eq!(claim.finish().reason, "");
        plan.nodes[2].initiator = Some("0000:09:00.0".parse().unwrap());
        let mut claim = Claim::default();
        affinities(&mut claim, &plan, &srat);
        assert!(claim.finish().reason.starts_with("generic initiators of the SRAT"));
    }

    #[test]
    fn each_wrong_value_is_named() {
        let mut plan = q35();
        plan.distances[0][1] = 41;
        assert_eq!(judged(&plan), "the SLIT distance 0 to 1 is Some(40), planned Some(41)");
        let mut plan = q35();
        plan.nodes[1].access[0].latency_ns = 401;
        assert!(judged(&plan).starts_with("ReadLatency 0 to 1 in the HMAT is Some(400000), planned 401000"));
        let mut plan = q35();
        plan.vcpus[1].node = 1;
        assert_eq!(judged(&plan), "the SRAT domain of vCPU 1 is Some(0), planned Some(1)");
        let mut plan = q35();
        plan.memory[1].node = 0;
        assert!(judged(&plan).contains("domain 1 of the SRAT has unplanned memory 0x20000000..0x2ffd9000"));
        assert!(judged(&plan).contains("domain 0 of the SRAT lacks memory 0x20000000..0x2ffd9000"));
    }
}
