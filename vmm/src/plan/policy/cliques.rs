//! GPU cliques: which GPUs of the machine the guest's driver sees as peers over PCI Express.

use egm_address::PciAddress;
use egm_vfio::host::HostFunction;
use egm_vfio::topology::{self, Relation, Route};
use egm_vfio::variant::Variant;
use egm_vfio::variant::clique::{self, Path};

use crate::config::{Clique, DeviceKind};
use crate::facts::Facts;
use crate::plan::demand::Demand;
use crate::plan::{AssignedRule, PlanError};

/// A GPU that may be in a clique.
struct Gpu<'a> {
    /// Number of its device.
    device: usize,
    host: &'a HostFunction,
    /// Whether the machine's other functions reach its BARs.
    is_reachable: bool,
    /// Clique number in the configuration.
    number: Option<clique::Clique>,
}

/// Clique numbers, and what is wrong with them.
pub(super) struct Cliques {
    pub(super) numbers: Vec<Option<u8>>,
    pub(super) warnings: Vec<String>,
}

/// Numbers the machine's GPUs: as the configuration does, and above that GPUs without a number that share a switch. `shares`:
/// functions of the machine may reach each other's BARs.
pub(super) fn decide(demand: &Demand<'_>, shares: bool) -> Result<Cliques, PlanError> {
    let all = gpus(demand, shares)?;
    let path = |from, to| path(demand.facts, &all, from, to);
    let (chosen, automatic): (Vec<&Gpu<'_>>, Vec<&Gpu<'_>>) =
        all.iter().partition(|gpu| gpu.number.is_some());
    let of: Vec<_> = chosen.iter().map(|gpu| gpu.number).collect();
    let mut warnings = clique::judge(&addresses(&chosen), &of, path);
    let first = of.iter().flatten().map(|clique| clique.number().saturating_add(1)).max().unwrap_or(0);
    let found = clique::number(&addresses(&automatic), path);
    warnings.extend(found.warnings);
    let mut numbers: Vec<Option<u8>> = vec![None; demand.devices.len()];
    let above = |clique: clique::Clique| clique::Clique::new(clique.number().checked_add(first)?);
    let found = automatic.iter().zip(found.of).map(|(gpu, clique)| (gpu, clique.and_then(above)));
    for (gpu, clique) in chosen.iter().zip(of).chain(found) {
        if let Some(number) = numbers.get_mut(gpu.device) {
            *number = clique.map(clique::Clique::number);
        }
    }
    Ok(Cliques { numbers, warnings: warnings.iter().map(ToString::to_string).collect() })
}

fn addresses(gpus: &[&Gpu<'_>]) -> Vec<PciAddress> {
    gpus.iter().map(|gpu| gpu.host.address).collect()
}

fn gpus<'a>(demand: &Demand<'a>, shares: bool) -> Result<Vec<Gpu<'a>>, PlanError> {
    let mut gpus = Vec::new();
    for (device, one) in demand.devices.iter().enumerate() {
        let (DeviceKind::Vfio { clique, .. }, Some(host)) = (&one.device.kind, one.host) else { continue };
        let is_gpu = matches!(Variant::of(host), Variant::NvidiaDisplay | Variant::NvGrace);
        let number = match clique {
            Clique::Number(_) if !is_gpu => {
                return Err(AssignedRule::Clique { device: one.device.id.clone() }.into());
            }
            Clique::Number(number) => clique::Clique::new(*number),
            Clique::Auto if is_gpu => None,
            Clique::Auto | Clique::Off => continue,
        };
        gpus.push(Gpu { device, host, is_reachable: shares && one.allows_p2p(), number });
    }
    Ok(gpus)
}

/// Path between two GPUs of the machine, for accesses of one to the other.
fn path(facts: &Facts, gpus: &[Gpu<'_>], from: PciAddress, to: PciAddress) -> Path {
    let find = |address| gpus.iter().find(|gpu| gpu.host.address == address);
    let (Some(from), Some(to)) = (find(from), find(to)) else { return Path::None };
    let found = topology::peer(&facts.functions, from.host, to.host);
    match (found.relation, found.route) {
        (_, Route::Blocked) => Path::None,
        _ if !to.is_reachable => Path::None,
        (Relation::Same | Relation::Pix | Relation::Pxb, _) => Path::Switch,
        _ => Path::Root,
    }
}
