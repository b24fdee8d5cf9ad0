//! On-demand paging: memory that a device uses without holding its pages, so that they may move meanwhile, to another node
//! or into a GPU. What a device cannot reach where it is comes back; the data must be right in every case.

mod gpu;
mod moving;
mod packet;

use egm_vendor::verbs::{Access, VerbsError};

use super::rdma::{data, kinds, loopback, site};
use super::{Setting, Validation};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use site::Site;

pub(super) static ALL: &[Validation] = &[
    Validation {
        name: "odp.explicit",
        claim: "memory regions without pinned pages (explicit ODP): every byte right, pages touched first by the device among them",
        run: |setting| site::with(setting, |site| explicit(site, setting)),
    },
    Validation {
        name: "odp.implicit",
        claim: "one memory region for all of the address space (implicit ODP): every byte right",
        run: |setting| site::with(setting, |site| implicit(site, setting)),
    },
    Validation {
        name: "odp.page_starts",
        claim: "a packet a page, at its beginning: right also while the pages move",
        run: |setting| site::with(setting, |site| moving::run(site, setting, moving::What::PageStarts)),
    },
    Validation {
        name: "odp.moving",
        claim: "data is right while its pages move, between nodes or into larger ones",
        run: |setting| site::with(setting, |site| moving::run(site, setting, moving::What::Everything)),
    },
    Validation {
        name: "odp.gpu_moving",
        claim: "data is right in pages that a GPU had moved into itself",
        run: |setting| site::with(setting, |site| gpu::moving(site, setting)),
    },
];

/// Reason why on-demand paging cannot be tried, if so.
fn lacking(site: &Site<'_>) -> Option<Finding> {
    let missing = site.abilities.odp.missing();
    (!missing.is_empty()).then(|| {
        let name = &site.name;
        Finding::skipped(format!(
            "{name} reports no on-demand paging of {}; mlx5 has it, rxe since Linux 6.16",
            missing.join(", ")
        ))
    })
}

fn explicit(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    if let Some(skipped) = lacking(site) {
        return Ok(skipped);
    }
    let atomics = if site.abilities.odp.atomic { Access::REMOTE_ATOMIC } else { Access::NONE };
    let found = data::moves(site, setting, &kinds::ordinary(), Access::DATA | atomics | Access::ON_DEMAND)?;
    Ok(packet::explained(site, setting.seed, found))
}

fn implicit(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    if let Some(skipped) = lacking(site) {
        return Ok(skipped);
    }
    if !site.abilities.odp.implicit {
        return Ok(Finding::skipped(format!("{} reports no implicit on-demand paging; mlx5 has", site.name)));
    }
    let size = usize::try_from(setting.most).unwrap_or(1 << 30).clamp(1 << 17, 1 << 30);
    loopback::with(site, setting.seed, |wire| {
        let mut claim = Claim::default();
        let memory = |kind: &kinds::Kind| kind.memory(size + 2 * data::GUARD);
        for kind in kinds::ordinary() {
            let (near, far) = (memory(&kind)?, memory(&kind)?);
            let moved = wire.domain.register_implicit(near).and_then(|near| {
                let mut ends = data::Ends { near, far: wire.domain.register(far, Access::DATA)? };
                data::whole(wire, &mut ends, size, setting.seed, &mut claim, &kind.name)
            });
            match moved {
                Ok(()) => {
                    claim.seen(format!("{size} bytes written, read and sent by an implicit memory region"))
                }
                Err(error) => claim.untrue(format!("{}: {error}", kind.name)),
            }
        }
        Ok(claim.finish())
    })
}

/// The finding for a device that refuses memory without pinned pages, although it reports that it takes such.
fn refused(site: &Site<'_>, error: &VerbsError) -> Finding {
    Finding::failed(format!("{} reports on-demand paging, but: {error}", site.name))
}
