//! Peer access of GPUs: which pairs have it, and that it works.

use egm_vendor::cuda::{Device, Memory, P2p};

use super::{on_pairs, pair, pairs, several};
use crate::config_space;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sysfs;
use crate::validate::Setting;
use crate::validate::cuda::gpu::{Gpu, note};

/// A little memory, to try.
const TRIED: u64 = 2 << 20;

/// Compares the driver's answer for each pair, the announced clique, and the result of an access.
pub(super) fn matrix(setting: &Setting) -> Result<Finding, Broken> {
    let devices = match several()? {
        Ok(devices) => devices,
        Err(finding) => return Ok(finding),
    };
    let mut claim = Claim::default();
    let gpus = devices.iter().map(|device| Gpu::new(*device)).collect::<Result<Vec<_>, _>>()?;
    for device in &devices {
        let clique =
            clique(*device)?.map_or_else(|| "no clique".to_owned(), |clique| format!("clique {clique}"));
        claim.seen(format!("GPU {} at {}: {clique}", device.ordinal, device.pci_address()?));
    }
    for (from, to) in pairs(&gpus) {
        one(from, to, setting.seed, &mut claim)?;
    }
    Ok(claim.finish())
}

/// The clique that a GPU's configuration space names.
fn clique(device: Device) -> Result<Option<u8>, Broken> {
    // A container may not be shown it.
    let config = sysfs::bytes(sysfs::pci(device.pci_address()?).join("config")).unwrap_or_default();
    Ok(config_space::clique(&config))
}

fn one(from: &Gpu, to: &Gpu, seed: u64, claim: &mut Claim) -> Result<(), Broken> {
    let (a, b) = (from.device(), to.device());
    let can = a.can_access(b)?;
    let [rank, access, atomics] =
        [P2p::Rank, P2p::Access, P2p::Atomics].map(|what| a.p2p(b, what).unwrap_or(-1));
    let name = pair(from, to);
    claim.holds(can == (access == 1), || {
        format!("{name}: cuDeviceCanAccessPeer returns {can}, the attribute of the pair is {access}")
    });
    let announced = clique(a)?.is_some_and(|clique_of_a| clique(b).ok().flatten() == Some(clique_of_a));
    claim.holds(!announced || can, || {
        format!("{name}: both are of one clique, but the driver sees no way: is the hypervisor hidden from the guest (kvm=off)?")
    });
    let tried = Memory::for_peers(&to.context, TRIED, &[&from.context]);
    match (can, tried) {
        (true, Ok(memory)) => {
            from.fill(&memory, TRIED, seed)?;
            note(claim, &name, to.compare(&memory, TRIED, seed)?, seed);
            claim.seen(format!("{name}: reached, rank {rank}, atomics {atomics}"));
        }
        (true, Err(error)) => claim.untrue(format!("{name}: promised, but {error}")),
        (false, Ok(_)) => claim.untrue(format!("{name}: denied, but its memory can be mapped")),
        (false, Err(_)) => claim.seen(format!("{name}: not reached, nothing announced it")),
    }
    Ok(())
}

/// Every byte, written by one and read by the other, and the reverse.
pub(super) fn bytes(setting: &Setting) -> Result<Finding, Broken> {
    on_pairs(|from, to, claim| {
        let bytes = (setting.most & !7).max(8);
        let memory = Memory::for_peers(&to.context, bytes, &[&from.context])?;
        to.fill(&memory, bytes, !setting.seed)?;
        from.fill(&memory, bytes, setting.seed)?;
        note(
            claim,
            &format!("{}, written", pair(from, to)),
            to.compare(&memory, bytes, setting.seed)?,
            setting.seed,
        );
        let other = setting.seed ^ 1 << 63;
        to.fill(&memory, bytes, other)?;
        note(claim, &format!("{}, read", pair(from, to)), from.compare(&memory, bytes, other)?, other);
        claim.seen(format!("{}: {bytes:#x} bytes", pair(from, to)));
        Ok(Vec::new())
    })
}
