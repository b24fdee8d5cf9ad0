//! Single packets into memory without pinned pages: which ones succeed on a device with a driver that loses its place
//! within a page, and how to recognise such a device.
//!
//! `rdma_rxe` of Linux 7.3.4 is (`drivers/infiniband/sw/rxe/rxe_odp.c`, `__rxe_odp_mr_copy`): `offset`, the place within the
//! first page, shortens what is copied, but is not added to `user_va`, so a packet that begins inside a page lands at the
//! page's first byte; and `addr` does not move on, so the next page gets the packet's beginning once more. What begins with
//! a page and ends in it is right, and so are atomics, which have a function of their own.

use egm_vendor::verbs::{Access, Memory, VerbsError, Work};

use super::super::rdma::data::{self, Ends};
use super::super::rdma::kinds;
use super::super::rdma::loopback::{self, Loopback};
use super::super::rdma::site::Site;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::Random;
use crate::sys::pages;

/// Bytes of the packet that is looked for, and where in its page it should be.
const LITTLE: usize = 64;
const INSIDE: usize = 512;

/// `found`, and if it failed, whether a packet that begins inside a page shows why.
pub(super) fn explained(site: &Site<'_>, seed: u64, mut found: Finding) -> Finding {
    if found.outcome != egm_guest::findings::Outcome::Failed {
        return found;
    }
    let mut lost = false;
    let looked = loopback::with(site, seed, |wire| {
        lost = loses_its_place(wire, seed)?;
        Ok(Finding::passed(""))
    });
    // The finding stays failed, whether or not a packet gets through.
    if let Err(broken) = looked {
        found.reason = format!("{}; a single packet does not show why: {broken}", found.reason);
    }
    if lost {
        found.reason = format!("{}; {}", of(&site.name), found.reason);
    }
    found
}

/// Description of the fault of such a device.
fn of(name: &str) -> String {
    let kernel = crate::sysfs::text("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!(
        "the driver of {name} in Linux {} puts a packet that begins inside a page at the page's first byte (in rdma_rxe of 7.3.4: __rxe_odp_mr_copy, which leaves the offset out): not this machine's memory is at fault; odp.page_starts is what such a driver gets right",
        kernel.trim()
    )
}

/// Whether a packet to the inside of a page is found at the page's beginning, and not where it should be.
fn loses_its_place(wire: &Loopback<'_>, seed: u64) -> Result<bool, Broken> {
    let mut random = Random::new(!seed);
    let (sent, poison) = (random.next(), random.next());
    let kind = kinds::ordinary().pop().ok_or_else(|| Broken::Other("there is no memory".to_owned()))?;
    let page = pages::size();
    let mut near = wire.domain.register(kind.memory(page)?, Access::DATA)?;
    let mut far = wire.domain.register(kind.memory(page)?, Access::DATA | Access::ON_DEMAND)?;
    data::put(&mut near, 0, LITTLE, sent);
    data::put(&mut far, 0, page, poison);
    wire.requester.post(1, near.sge(0, LITTLE)?, Work::Write(far.remote(INSIDE, LITTLE)?))?;
    wire.completions.wait(1, wire.site.timeout)?;
    let is_there = |at| data::difference(&far, at, LITTLE, sent).is_none();
    Ok(is_there(0) && !is_there(INSIDE))
}

/// A packet to the beginning of each of the pages of `size` bytes, and back: it is there, and nothing else has changed.
pub(super) fn each_page<N: Memory, F: Memory>(
    wire: &Loopback<'_>,
    Ends { near, far }: &mut Ends<'_, N, F>,
    size: usize,
    seed: u64,
    claim: &mut Claim,
) -> Result<(), VerbsError> {
    let mut random = Random::new(seed);
    let page = pages::size();
    let packet = page.min(usize::try_from(wire.site.place.port.mtu.bytes()).unwrap_or(page));
    // Registered memory begins with a page, and what moves with a larger one.
    let starts = || (0..size).step_by(page).filter(|at| at + page <= size);
    for back in [false, true] {
        let (sent, poison) = (random.next(), random.next());
        let seed_of = |at: usize| sent.wrapping_add(at as u64);
        for at in starts() {
            if back {
                data::put(near, at, page, poison);
                data::put(far, at, packet, seed_of(at));
            } else {
                data::put(near, at, packet, seed_of(at));
                data::put(far, at, page, poison);
            }
        }
        for at in starts() {
            let there = far.remote(at, packet)?;
            let work = if back { Work::Read(there) } else { Work::Write(there) };
            wire.requester.post(1, near.sge(at, packet)?, work)?;
            wire.completions.wait(1, wire.site.timeout)?;
        }
        let name = if back { "read" } else { "write" };
        for at in starts() {
            let (wrong, beside) = if back {
                (
                    data::difference(near, at, packet, seed_of(at)),
                    data::changed(near, at, packet..page, poison),
                )
            } else {
                (data::difference(far, at, packet, seed_of(at)), data::changed(far, at, packet..page, poison))
            };
            if let Some(byte) = wrong {
                claim.untrue(format!(
                    "byte {byte:#x} of a {name} of {packet:#x} bytes at page {:#x} is wrong",
                    at / page
                ));
            }
            if beside {
                claim.untrue(format!(
                    "a {name} of {packet:#x} bytes changed what is behind it in page {:#x}",
                    at / page
                ));
            }
        }
    }
    Ok(())
}
