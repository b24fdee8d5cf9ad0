//! Claim: SRAT, SLIT and HMAT, read as bytes, give every vCPU, every byte of memory, every distance and every figure the
//! planned value; FADT, MCFG and HEST match the planned machine, and the DSDT is whole; on Arm the others match the
//! planned controllers, processors, console and ways of messages. No kernel stands between, so this is never skipped.

use egm_address::{Gpa, Guest, Span, SpanSet};

use super::Context;
use crate::acpi::platform::{Ecam, ErrorSource, Fadt};
use crate::acpi::{self, Figure, Hmat, Processor, Srat, platform};
use crate::error::Broken;
use crate::expect::{Plan, WindowKind, first_mebibyte};
use crate::finding::{Claim, Finding};
use crate::sysfs;

/// `ARM_BOOT_ARCH` of a machine with firmware that is called by HVC.
const PSCI_BY_HVC: u16 = 0b11;
/// Bytes of one bus in configuration space.
const BUS: u64 = 1 << 20;
/// An error block's bytes, and the notification by an event device.
const BLOCK: u32 = 4096;
const BY_EVENT: u8 = 7;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let plan = &context.plan;
    let table = |name| sysfs::bytes(format!("/sys/firmware/acpi/tables/{name}"));
    let mut claim = Claim::default();
    affinities(&mut claim, plan, &acpi::srat(&table("SRAT")?)?);
    distances(&mut claim, plan, &acpi::slit(&table("SLIT")?)?);
    if plan.nodes.iter().any(|node| !node.access.is_empty()) {
        figures(&mut claim, plan, &acpi::hmat(&table("HMAT")?)?);
    }
    fixed(&mut claim, plan, table)?;
    if plan.arch == "aarch64" {
        super::arm_tables::judge(&mut claim, plan, table)?;
    }
    claim.seen(format!("{} nodes", plan.nodes.len()));
    Ok(claim.finish())
}

/// Checks other tables than the nodes': the machine itself, its configuration space, and its reports of bad memory.
fn fixed(
    claim: &mut Claim,
    plan: &Plan,
    table: impl Fn(&'static str) -> Result<Vec<u8>, Broken>,
) -> Result<(), Broken> {
    let Fadt { reduced, arm_boot, dsdt } = platform::fadt(&table("FACP")?)?;
    let psci = if plan.arch == "aarch64" { PSCI_BY_HVC } else { 0 };
    claim.equal(
        "no fixed registers, and PSCI by HVC on Arm, in the FADT",
        &(reduced, arm_boot),
        &(true, psci),
    );
    let window = |kind| plan.windows.iter().find(|window| window.kind == kind).map(|window| window.span);
    // On Arm it is counted as memory, the first.
    let firmware = window(WindowKind::Firmware).or_else(|| plan.memory.first().map(|memory| memory.span));
    let ours = |address: u64, size: u64| {
        let span = Span::<Guest>::new(Gpa::new(address), size).ok();
        span.zip(firmware).is_some_and(|(span, window)| window.covers(span))
    };
    let size = platform::dsdt(&table("DSDT")?)?;
    claim.holds(size > acpi::HEADER && ours(dsdt, size as u64), || {
        format!("the DSDT at {dsdt:#x} is no firmware's")
    });
    let planned = window(WindowKind::Ecam).map(|span| {
        let last = (span.size() / BUS).checked_sub(1).and_then(|last| u8::try_from(last).ok());
        Ecam { base: span.start().get(), segment: 0, buses: (0, last.unwrap_or(u8::MAX)) }
    });
    let planned: Vec<Ecam> = planned.into_iter().collect();
    claim.equal("configuration space in the MCFG", &platform::mcfg(&table("MCFG")?)?, &planned);
    if plan.lines.iter().any(|line| line.owner == "errors") {
        let sources = platform::hest(&table("HEST")?)?;
        claim.equal("the number of error sources in the HEST", &sources.len(), &1);
        for source in sources {
            let ErrorSource { enabled, address, notification, block } = source;
            let right = (enabled, notification, block) == (true, BY_EVENT, BLOCK) && ours(address, 8);
            claim.holds(right, || format!("the HEST has {source:?}"));
        }
    }
    Ok(())
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
        let srat = acpi::srat(include_bytes!("../../../../vmm/tests/golden-acpi/SRAT")).unwrap();
        affinities(&mut claim, &plan, &srat);
        distances(
            &mut claim,
            &plan,
            &acpi::slit(include_bytes!("../../../../vmm/tests/golden-acpi/SLIT")).unwrap(),
        );
        assert_eq!(claim.finish().reason, "");
        plan.nodes[2].initiator = Some("0000:09:00.0".parse().unwrap());
        let mut claim = Claim::default();
        affinities(&mut claim, &plan, &srat);
        assert!(claim.finish().reason.starts_with("generic initiators of the SRAT"));
    }

    fn fixed_with(plan: &Plan, hest: &[u8]) -> String {
        let table = |name: &str| {
            let bytes: &[u8] = match name {
                "FACP" => include_bytes!("../../../../vmm/tests/golden-acpi/FACP"),
                "DSDT" => include_bytes!("../../../../vmm/tests/golden-acpi/DSDT"),
                "MCFG" => include_bytes!("../../../../vmm/tests/golden-acpi/MCFG"),
                _ => hest,
            };
            Ok(bytes.to_vec())
        };
        let mut claim = Claim::default();
        fixed(&mut claim, plan, table).unwrap();
        claim.finish().reason
    }

    const HEST: &[u8] = include_bytes!("../../../../vmm/tests/golden-acpi/HEST");

    #[test]
    fn the_machine_itself_is_as_planned_or_named() {
        assert_eq!(fixed_with(&grace(), HEST), "");
        let mut plan = grace();
        plan.arch = "x86_64".into();
        assert!(fixed_with(&plan, HEST).contains("in the FADT is (true, 3), planned (true, 0)"));
        let mut plan = grace();
        let elsewhere = Span::new(Gpa::new(0x7000_0000), 1 << 20).unwrap();
        plan.windows.iter_mut().find(|window| window.kind == WindowKind::Ecam).unwrap().span = elsewhere;
        plan.memory[0].span = elsewhere;
        let text = fixed_with(&plan, HEST);
        assert!(text.contains("configuration space in the MCFG"), "{text}");
        assert!(text.contains("the DSDT at") && text.contains("the HEST has ErrorSource"), "{text}");
    }

    #[test]
    fn a_guest_that_would_get_no_report_of_bad_memory_is_named() {
        let mut none = HEST.to_vec();
        let [sum, count] = [9, 36];
        none[sum] = none[sum].wrapping_add(none[count]);
        none[count] = 0;
        assert_eq!(fixed_with(&grace(), &none), "the number of error sources in the HEST is 0, planned 1");
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
