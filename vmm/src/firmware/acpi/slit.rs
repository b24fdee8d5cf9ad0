//! SLIT: relative distances (ACPI 6.5, clause 5.2.17).
//!
//! The matrix is indexed by domain number, and the plan's numbers may have gaps. Linux reads only rows and columns of
//! domains that SRAT named, but refuses the whole table when a diagonal entry is not 10 or another one is at most 10.
//! So an unused domain is at distance 10 from itself and unreachable (255) otherwise.

use acpi_tables::AmlSink;

use super::table;
use crate::config::distance::LOCAL;
use crate::firmware::FirmwareError;
use crate::plan::Plan;

const REVISION: u8 = 1;
const UNREACHABLE: u8 = 255;

/// The table, of a plan with node ids below [`crate::config::MAX_NODES`] only.
pub(super) fn slit(plan: &Plan) -> Result<Vec<u8>, FirmwareError> {
    let domains = plan.nodes.iter().map(|n| n.id.saturating_add(1)).max().unwrap_or(0);
    let mut body = Vec::new();
    body.qword(u64::from(domains));
    for from in 0..domains {
        for to in 0..domains {
            body.push(distance(plan, from, to)?);
        }
    }
    Ok(table(*b"SLIT", REVISION, &body))
}

/// Distance between two domains; the plan may have neither.
fn distance(plan: &Plan, from: u32, to: u32) -> Result<u8, FirmwareError> {
    let index = |id: u32| plan.nodes.iter().position(|node| node.id == id);
    match index(from).zip(index(to)) {
        Some((row, column)) => {
            let wrong = row != column && egm_address::fault!("slit-distance-wrong");
            let distance = plan.distances.get(row).and_then(|distances| distances.get(column));
            let distance = distance.map(|distance| distance.saturating_add(u8::from(wrong)));
            distance.ok_or(FirmwareError::Distance { from, to })
        }
        None if from == to => Ok(LOCAL),
        None => Ok(UNREACHABLE),
    }
}
