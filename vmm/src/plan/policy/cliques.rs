//! GPU cliques: which GPUs of the machine the guest's driver sees as peers over PCI Express.

use egm_address::PciAddress;
use egm_vfio::host::HostFunction;
use egm_vfio::topology::{self, Relation, Route};
use egm_vfio::variant::Variant;
use egm_vfio::variant::clique::{self, Path};

use crate::config::{Clique, DeviceKind};
use crate::facts::Facts;
use crate::plan::demand::wanted::Wanted;
use crate::plan::{AssignedRule, PlanError};

/// A GPU that may be in a clique.
struct Gpu<'a> {
    /// Number of its device.
    device: usize,
    host: &'a HostFunction,
    /// Whether the machine's other functions reach its BARs.
    lends: bool,
    /// Clique number in the configuration.
    number: Option<clique::Clique>,
}

/// Clique numbers by device, and what is wrong with them: those of the configuration; GPUs without one that share a
/// switch get numbers above. The last argument holds, by device, whether others reach its BARs.
pub(in crate::plan) fn decide(
    facts: &Facts,
    wanted: &[Wanted<'_>],
    lends: &[bool],
) -> Result<(Vec<Option<u8>>, Vec<String>), PlanError> {
    let all = gpus(wanted, lends)?;
    let addresses = |gpus: &[&Gpu<'_>]| gpus.iter().map(|gpu| gpu.host.address).collect::<Vec<_>>();
    let path = |from, to| path(facts, &all, from, to);
    let (chosen, automatic): (Vec<&Gpu<'_>>, Vec<&Gpu<'_>>) =
        all.iter().partition(|gpu| gpu.number.is_some());
    let mut numbers: Vec<Option<u8>> = vec![None; wanted.len()];
    let mut tell = |gpu: &Gpu<'_>, number: Option<u8>| {
        if let Some(place) = numbers.get_mut(gpu.device) {
            *place = number;
        }
    };
    let of: Vec<_> = chosen.iter().map(|gpu| gpu.number).collect();
    let mut warnings = clique::judge(&addresses(&chosen), &of, path);
    chosen.iter().for_each(|gpu| tell(gpu, gpu.number.map(clique::Clique::number)));
    let first = of.iter().flatten().map(|clique| clique.number().saturating_add(1)).max().unwrap_or(0);
    let found = clique::number(&addresses(&automatic), path);
    warnings.extend(found.warnings);
    for (gpu, clique) in automatic.iter().zip(found.of) {
        let number = clique.and_then(|clique| clique.number().checked_add(first));
        tell(gpu, number.and_then(clique::Clique::new).map(clique::Clique::number));
    }
    Ok((numbers, warnings.iter().map(ToString::to_string).collect()))
}

fn gpus<'a>(wanted: &[Wanted<'a>], lends: &[bool]) -> Result<Vec<Gpu<'a>>, PlanError> {
    let mut gpus = Vec::new();
    for (device, (one, lends)) in wanted.iter().zip(lends).enumerate() {
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
        gpus.push(Gpu { device, host, lends: *lends, number });
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
        _ if !to.lends => Path::None,
        (Relation::Same | Relation::Pix | Relation::Pxb, _) => Path::Switch,
        _ => Path::Root,
    }
}
