//! GPUs reach each other's memory, as the machine's maker announced it.

mod access;
mod atomics;
mod bandwidth;

use egm_vendor::cuda::{Device, Memory};

use super::cuda::each::devices;
use super::cuda::gpu::Gpu;
use super::cuda::latency::{Chase, chains};
use super::cuda::turns::Turns;
use super::{Part, Setting, Validation};
use crate::error::Broken;
use crate::finding::{Claim, Finding};

pub(super) static ALL: &[Validation] = &[
    Validation {
        name: "p2p.access",
        claim: "GPUs of a clique, or with a link, reach each other, and those that may not do not",
        run: access::matrix,
    },
    Validation {
        name: "p2p.bytes",
        claim: "every byte that a GPU writes to another one's memory is what that one reads",
        run: access::bytes,
    },
    Validation {
        name: "p2p.atomics",
        claim: "what all GPUs add to one word at once is not lost, in the memory of each",
        run: atomics::check,
    },
    Validation {
        name: "p2p.atomic_rate",
        claim: "one GPU's additions to a word of another one's memory add up, at this rate",
        run: atomics::rate,
    },
    Validation {
        name: "p2p.bandwidth",
        claim: "copy engines and SMs move right bytes between GPUs at every size, at these rates",
        run: bandwidth::check,
    },
    Validation {
        name: "p2p.latency",
        claim: "a GPU follows a chain in another one's memory to its end at every size, at this time a word",
        run: latency,
    },
];

/// Parts that its validations start as processes of their own.
pub(super) static PARTS: &[Part] = &[];

/// The GPUs, where there are two or more; otherwise the finding that reports the lack.
fn several() -> Result<Result<Vec<Device>, Finding>, Broken> {
    Ok(devices()?.and_then(|devices| match devices.as_slice() {
        [_] => Err(Finding::skipped("this machine has one GPU: peer-to-peer needs two")),
        _ => Ok(devices),
    }))
}

/// Does `work` with every two GPUs, in both orders, where the first may reach the second.
fn on_pairs(
    work: impl Fn(&Gpu, &Gpu, &mut Claim) -> Result<Vec<egm_guest::findings::Figure>, Broken>,
) -> Result<Finding, Broken> {
    let devices = match several()? {
        Ok(devices) => devices,
        Err(finding) => return Ok(finding),
    };
    let (mut claim, mut figures, mut denied) = (Claim::default(), Vec::new(), Vec::new());
    let gpus = devices.iter().map(|device| Gpu::new(*device)).collect::<Result<Vec<_>, _>>()?;
    for (from, to) in pairs(&gpus) {
        if from.device().can_access(to.device())? {
            figures.extend(work(from, to, &mut claim)?);
        } else {
            denied.push(pair(from, to));
        }
    }
    if denied.len() == gpus.len() * (gpus.len() - 1) {
        return Ok(Finding::skipped("no GPU may reach another one (the reason is in p2p.access)"));
    }
    if !denied.is_empty() {
        claim.seen(format!("not between {}", denied.join(", ")));
    }
    Ok(claim.finish().with_figures(figures))
}

/// Every two, in both orders.
fn pairs<T>(all: &[T]) -> impl Iterator<Item = (&T, &T)> {
    let at = |from: usize| all.iter().enumerate().filter(move |(to, _)| *to != from);
    all.iter().enumerate().flat_map(move |(index, from)| at(index).map(move |(_, to)| (from, to)))
}

/// Name of a pair: `GPU 0 to GPU 1`.
fn pair(from: &Gpu, to: &Gpu) -> String {
    format!("GPU {} to GPU {}", from.device().ordinal, to.device().ordinal)
}

/// A word of another GPU's memory takes so long.
fn latency(setting: &Setting) -> Result<Finding, Broken> {
    on_pairs(|from, to, claim| {
        let sizes = chains(setting.most);
        let most = sizes.iter().copied().max().unwrap_or(0);
        let memory = Memory::for_peers(&to.context, most, &[&from.context])?;
        let turns = Turns::new(setting, String::new())?;
        let what = pair(from, to);
        let chase = Chase { gpu: from, home: to, memory: &memory, what: &what, turns: &turns };
        chase.by_size(&sizes, setting.seed, claim)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_all_in_both_orders() {
        let found: Vec<(i32, i32)> = pairs(&[1, 2, 3]).map(|(from, to)| (*from, *to)).collect();
        assert_eq!(found, [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)]);
        assert_eq!(pairs(&[1]).count(), 0);
    }
}
