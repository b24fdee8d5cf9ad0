//! Data Direct pairs: both functions of a card go to one guest, and GPUs that they reach have their second BAR where the
//! host has it ([`egm_vfio::variant::data_direct`]).

use egm_address::PciAddress;
use egm_vfio::host::HostFunction;
use egm_vfio::topology::{Relation, relation};
use egm_vfio::variant::Variant;
use egm_vfio::variant::data_direct::{Candidate, pair, placement};

use crate::facts::Facts;
use crate::plan::demand::devices::DeviceDemand;
use crate::plan::{AssignedRule, PlanError};

/// Finds the pairs among `devices`, and fixes the BARs that they need. What a machine without GPUs does not use is a note.
pub(super) fn decide(facts: &Facts, devices: &mut [DeviceDemand<'_>]) -> Result<Vec<String>, PlanError> {
    let hosts: Vec<&HostFunction> = devices.iter().filter_map(|one| one.host).collect();
    let candidates: Vec<Candidate<'_>> = hosts.iter().filter_map(|host| candidate(host)).collect();
    let mut pairs: Vec<(&HostFunction, PciAddress)> = Vec::new();
    for found in pair(&candidates) {
        let Some(one) = devices.iter().find(|one| is_at(one, found.data_direct)) else { continue };
        if let Some(why) = found.problem {
            let (device, function) = (one.device.id.clone(), found.data_direct);
            let partner = other(facts, function, false);
            return Err(AssignedRule::DataDirect { device, function, why, partner }.into());
        }
        let network = found.network.into_iter();
        pairs.extend(network.filter_map(|network| Some((one.host?, network))));
    }
    let mut notes = Vec::new();
    let has_gpus = hosts.iter().any(|host| Variant::of(host).takes_clique());
    for one in devices.iter_mut() {
        let Some(host) = one.host else { continue };
        one.partner = pairs.iter().find_map(|(data_direct, network)| match host.address {
            at if at == *network => Some(data_direct.address),
            at if at == data_direct.address => Some(*network),
            _ => None,
        });
        if Variant::of(host) == Variant::ConnectX
            && one.partner.is_none()
            && let Some(partner) = other(facts, host.address, true)
        {
            let missing = AssignedRule::NoDataDirect { device: one.device.id.clone(), partner };
            if has_gpus {
                return Err(missing.into());
            }
            notes.push(format!(
                "device \"{}\" has no Data Direct: {partner} is not given to this guest",
                one.device.id
            ));
        }
    }
    for (data_direct, _) in pairs {
        devices.iter_mut().try_for_each(|one| fix(one, data_direct))?;
    }
    Ok(notes)
}

fn is_at(one: &DeviceDemand<'_>, address: PciAddress) -> bool {
    one.host.is_some_and(|host| host.address == address)
}

fn candidate(host: &HostFunction) -> Option<Candidate<'_>> {
    let is_data_direct = match Variant::of(host) {
        Variant::DataDirect => true,
        Variant::ConnectX => false,
        _ => return None,
    };
    Some(Candidate { address: host.address, is_data_direct, card: host.card.as_ref() })
}

/// The function of the host that is of the same card as the one at `address`.
fn other(facts: &Facts, address: PciAddress, data_direct: bool) -> Option<PciAddress> {
    let number = |host: &HostFunction| host.card.as_ref()?.number.clone();
    let own = facts.functions.iter().find(|host| host.address == address).and_then(number)?;
    let candidates = facts.functions.iter().filter_map(|host| Some((host, candidate(host)?)));
    let mut same = candidates.filter(|(host, candidate)| {
        candidate.is_data_direct == data_direct && number(host).as_ref() == Some(&own)
    });
    same.next().map(|(host, _)| host.address)
}

/// Fixes the BAR of a GPU that `data_direct` reaches: by switches, or as one group of the IOMMU (the driver's own test).
fn fix(one: &mut DeviceDemand<'_>, data_direct: &HostFunction) -> Result<(), PlanError> {
    let Some(host) = one.host.filter(|host| Variant::of(host).takes_clique()) else { return Ok(()) };
    let one_group = host.iommu_group.is_some() && host.iommu_group == data_direct.iommu_group;
    if !one_group && relation(host, data_direct) > Relation::Pxb {
        return Ok(());
    }
    let device = one.device.id.clone();
    let wrong = |index, why| AssignedRule::DataDirectBar { device: device.clone(), index, why };
    let wish = placement(&host.bars).ok_or_else(|| wrong(2, "the host gave it none"))?;
    let bar = one.bars.iter_mut().find(|bar| bar.index == wish.bar);
    let bar = bar.ok_or_else(|| wrong(wish.bar, "the function has no such memory BAR"))?;
    if bar.at.is_some_and(|at| at != wish.address) {
        return Err(wrong(wish.bar, "\"bars\" gives it another").into());
    }
    if !wish.address.is_aligned(bar.size) {
        return Err(wrong(wish.bar, "that is not a multiple of its size").into());
    }
    (bar.at, bar.data_direct) = (Some(wish.address), true);
    Ok(())
}
