//! HMAT: latency and bandwidth from processors to memory (ACPI 6.5, clause 5.2.28).
//!
//! The plan has one figure for reads and writes, so the "access" data types are used; Linux takes them for both. Linux
//! then publishes the figures of each memory node's nearest processors in `/sys/devices/system/node/nodeN/access0`
//! (any initiator) and `access1` (processors): the node's own where it has some, else those with the best figures.

use acpi_tables::AmlSink;
use acpi_tables::hmat::{DataType, MemoryProximityDomain};

use super::{bytes, reserved, table};
use crate::config::Access;
use crate::firmware::FirmwareError;
use crate::plan::{NodePlan, Plan};

/// Revision 2 counts latency in picoseconds and bandwidth in MB/s; 1 had other units.
const REVISION: u8 = 2;
/// Picoseconds in an entry of the latency matrix: plans count nanoseconds, up to 65534.
const LATENCY_UNIT: u32 = 1000;
/// Of an entry: not given.
const UNKNOWN: u16 = 0xffff;

/// The table, or `None` for a plan without figures.
pub(super) fn hmat(plan: &Plan) -> Result<Option<Vec<u8>>, FirmwareError> {
    let targets: Vec<&NodePlan> = plan.nodes.iter().filter(|n| n.memory > 0).collect();
    let initiators: Vec<u32> = plan.nodes.iter().filter(|n| !n.cpus.is_empty()).map(|n| n.id).collect();
    let figures = || targets.iter().flat_map(|t| t.access.iter().map(|a| (t.id, a)));
    if let Some((node, access)) = figures().find(|(_, a)| !initiators.contains(&a.from)) {
        return Err(FirmwareError::NoInitiator { node, from: access.from });
    }
    let Some(most) = figures().map(|(_, a)| a.bandwidth_mbps).max() else { return Ok(None) };

    let mut body = Vec::new();
    reserved(&mut body, 4);
    targets.iter().for_each(|target| domain(&mut body, target, &initiators));
    let latency = Matrix {
        data: DataType::AccessLatency,
        unit: LATENCY_UNIT,
        entry: |a: &Access| entry(a.latency_ns, 1),
    };
    latency.write(&mut body, &initiators, &targets);
    let unit = bandwidth_unit(most);
    let bandwidth =
        Matrix { data: DataType::AccessBandwidth, unit, entry: |a: &Access| entry(a.bandwidth_mbps, unit) };
    bandwidth.write(&mut body, &initiators, &targets);
    Ok(Some(table(*b"HMAT", REVISION, &body)))
}

/// Memory proximity domain attributes, clause 5.2.28.3. Without a processor of its own the initiator is left open.
fn domain(sink: &mut dyn AmlSink, target: &NodePlan, initiators: &[u32]) {
    if initiators.contains(&target.id) {
        sink.vec(&bytes(&MemoryProximityDomain::new(target.id, target.id)));
        return;
    }
    sink.dword(0); // type 0
    sink.dword(40);
    sink.dword(0); // flags: initiator not valid
    sink.dword(0);
    sink.dword(target.id);
    reserved(sink, 20);
}

/// The smallest of 1, 10, 100 … MB/s in which `most` fits an entry. Figures are rounded to it: up to 65534 MB/s
/// they stay exact, above that they keep at least four digits.
fn bandwidth_unit(most: u32) -> u32 {
    let fits = |unit: &u32| most.saturating_add(unit / 2) / unit < u32::from(UNKNOWN);
    (0..=5).map(|power| 10_u32.pow(power)).find(fits).unwrap_or(1_000_000)
}

/// `value` in units of `unit`, rounded, never one of the two reserved entries 0 and 0xffff.
fn entry(value: u32, unit: u32) -> u16 {
    let rounded = value.saturating_add(unit / 2).checked_div(unit).unwrap_or(0);
    u16::try_from(rounded).unwrap_or(UNKNOWN).clamp(1, UNKNOWN - 1)
}

/// One system locality latency and bandwidth information structure, clause 5.2.28.4.
struct Matrix<F> {
    data: DataType,
    unit: u32,
    entry: F,
}

impl<F: Fn(&Access) -> u16> Matrix<F> {
    fn write(&self, body: &mut Vec<u8>, initiators: &[u32], targets: &[&NodePlan]) {
        let mut rest = Vec::new();
        rest.vec(&[0, self.data as u8, 0, 0]); // flags: memory; no minimum transfer size
        rest.dword(count(initiators));
        rest.dword(count(targets));
        reserved(&mut rest, 4);
        rest.qword(u64::from(self.unit));
        initiators.iter().for_each(|id| rest.dword(*id));
        targets.iter().for_each(|target| rest.dword(target.id));
        for from in initiators {
            for target in targets {
                let access = target
                    .access
                    .iter()
                    .find(|a| a.from == *from)
                    .filter(|_| !egm_address::fault!("hmat-row-missing"));
                rest.word(access.map_or(UNKNOWN, |a| (self.entry)(a)));
            }
        }
        body.word(1);
        reserved(body, 2);
        body.dword(count(&rest).saturating_add(8));
        body.extend(rest);
    }
}

/// A length that fits: there are at most [`crate::config::MAX_NODES`] nodes.
fn count<T>(items: &[T]) -> u32 {
    u32::try_from(items.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bandwidth_up_to_65534_is_exact_and_the_largest_allowed_figure_fits() {
        assert_eq!((bandwidth_unit(65_534), entry(65_534, 1)), (1, 65_534));
        assert_eq!((bandwidth_unit(65_535), entry(450_000, 10)), (10, 45_000));
        assert_eq!((bandwidth_unit(65_534_000), entry(65_534_000, 1000)), (1000, 65_534));
    }

    proptest! {
        #[test]
        fn a_figure_is_off_by_less_than_its_unit_and_keeps_four_digits(
            (most, value) in (1u32..).prop_flat_map(|most| (Just(most), 1..=most)),
        ) {
            let unit = bandwidth_unit(most);
            let back = u64::from(entry(value, unit)) * u64::from(unit);
            prop_assert!(back.abs_diff(u64::from(value)) < u64::from(unit));
            prop_assert!(unit == 1 || most / unit >= 6553);
        }
    }
}
