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
    let row = |from: u32| {
        let node = plan.nodes.iter().position(|n| n.id == from);
        (0..domains).map(move |to| match node.zip(plan.nodes.iter().position(|n| n.id == to)) {
            Some((i, j)) => {
                let distance = plan.distances.get(i).and_then(|row| row.get(j));
                let distance = distance.map(|far| {
                    far.saturating_add(u8::from(i != j && egm_address::fault!("slit-distance-wrong")))
                });
                distance.ok_or(FirmwareError::Distance { from, to })
            }
            None if from == to => Ok(LOCAL),
            None => Ok(UNREACHABLE),
        })
    };
    let matrix = (0..domains).flat_map(row).collect::<Result<Vec<u8>, _>>()?;
    let mut body = Vec::new();
    body.qword(u64::from(domains));
    body.extend(matrix);
    Ok(table(*b"SLIT", REVISION, &body))
}
