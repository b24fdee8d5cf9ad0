//! Additions and comparisons at one word, from both ends at once.

use egm_vendor::verbs::{Access, Atomics, Registered, VerbsError, Work};

use super::super::Setting;
use super::kinds;
use super::loopback::{self, Loopback};
use super::site::Site;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::Random;
use crate::sys::Mapping;

/// Additions of each end.
const ADDITIONS: usize = 500;
/// Bytes of memory: the word, and a word for each answer.
const SIZE: usize = 8 * (1 + 2 * ADDITIONS);

pub(super) fn run(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    if site.abilities.atomics == Atomics::None {
        return Ok(Finding::skipped(format!("{} reports no atomics", site.name)));
    }
    loopback::with(site, setting.seed, |wire| {
        let mut claim = Claim::default();
        let kinds = kinds::nodes()?;
        for kind in &kinds {
            let mut region = wire.domain.register(kind.memory(SIZE)?, Access::ALL)?;
            let mut here = Claim::default();
            additions(wire, &mut region, setting.seed, &mut here)?;
            comparisons(wire, &mut region, setting.seed, &mut here)?;
            if !here.is_true() {
                claim.untrue(format!("{}: {}", kind.name, here.finish().reason));
            }
        }
        let names: Vec<&str> = kinds.iter().map(|kind| kind.name.as_str()).collect();
        let names = names.join(", ");
        claim.seen(format!(
            "{} fetch-and-adds from two queue pairs, 3 compare-and-swaps on {names}",
            2 * ADDITIONS
        ));
        Ok(claim.finish())
    })
}

fn word(region: &Registered<'_, Mapping>, index: usize) -> u64 {
    let mut bytes = [0; 8];
    region.load(8 * index, &mut bytes);
    u64::from_ne_bytes(bytes)
}

/// Each addition returns what the word was: all of them together have seen each sum once.
fn additions(
    wire: &Loopback<'_>,
    region: &mut Registered<'_, Mapping>,
    seed: u64,
    claim: &mut Claim,
) -> Result<(), VerbsError> {
    let (mut random, total) = (Random::new(seed), 2 * ADDITIONS);
    let (start, step) = (random.next(), random.next() | 1);
    region.store(0, &start.to_ne_bytes());
    for index in 1..=total {
        region.store(8 * index, &0xbad_u64.to_ne_bytes());
    }
    let there = region.remote(0, 8)?;
    let at_once = usize::from(wire.site.place.max_rd_atomic.min(wire.site.place.max_dest_rd_atomic)).max(2);
    let mut under_way = 0usize;
    for index in 1..=total {
        if under_way == at_once {
            under_way = under_way.saturating_sub(wire.completions.wait(1, wire.site.timeout)?.len());
        }
        let end = if index % 2 == 0 { &wire.requester } else { &wire.responder };
        end.post(index as u64, region.sge(8 * index, 8)?, Work::FetchAdd(there, step))?;
        under_way += 1;
    }
    wire.completions.wait(under_way, wire.site.timeout)?;
    let sum = start.wrapping_add(step.wrapping_mul(total as u64));
    if word(region, 0) != sum {
        let lost = sum.wrapping_sub(word(region, 0)).wrapping_mul(inverse(step));
        claim.untrue(format!("after {total} fetch-and-adds {lost} are missing"));
    }
    let mut seen: Vec<u64> = (1..=total)
        .map(|index| word(region, index).wrapping_sub(start).wrapping_mul(inverse(step)))
        .collect();
    seen.sort_unstable();
    if seen.iter().zip(0u64..).any(|(seen, meant)| *seen != meant) {
        claim.untrue("the answers of the fetch-and-adds are not each sum once");
    }
    Ok(())
}

/// One over an odd number, modulo 2^64 (Newton).
fn inverse(odd: u64) -> u64 {
    (0..6).fold(odd, |x, _| x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x))))
}

fn comparisons(
    wire: &Loopback<'_>,
    region: &mut Registered<'_, Mapping>,
    seed: u64,
    claim: &mut Claim,
) -> Result<(), VerbsError> {
    let mut random = Random::new(!seed);
    let (is, other, becomes) = (random.next(), random.next(), random.next());
    let there = region.remote(0, 8)?;
    region.store(0, &is.to_ne_bytes());
    // What is compared with, what is there afterwards, what the answer is.
    for (compared, after, before) in [(other, is, is), (is, becomes, is), (is, becomes, becomes)] {
        region.store(8, &(!before).to_ne_bytes());
        wire.requester.post(1, region.sge(8, 8)?, Work::CompareSwap(there, compared, becomes))?;
        wire.completions.wait(1, wire.site.timeout)?;
        claim.equal("the answer of a compare-and-swap", &word(region, 1), &before);
        claim.equal("the word after a compare-and-swap", &word(region, 0), &after);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_odd_number_times_its_inverse_is_one() {
        for odd in [1, 3, 0x9e37_79b9_7f4a_7c15, u64::MAX] {
            assert_eq!(odd.wrapping_mul(inverse(odd)), 1);
        }
    }
}
