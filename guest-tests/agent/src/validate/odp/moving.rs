//! Transfers while the pages under them move: of everything, or of a packet a page. The second is less, but what a device
//! gets right that loses its place within a page ([`super::packet`]).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use egm_vendor::verbs::{Access, VerbsError};

use super::super::Setting;
use super::super::rdma::data::{self, Ends};
use super::super::rdma::kinds;
use super::super::rdma::loopback::{self, Loopback};
use super::super::rdma::site::Site;
use super::packet;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sys::pages::{self, Aligned};

/// Duration of transfers, and the minimum of them.
const WHILE: Duration = Duration::from_secs(3);
const AT_LEAST: usize = 8;
/// A large page, to which the range that is moved is aligned.
const LARGE: usize = 2 << 20;

/// Way in which pages are made to move.
#[derive(Debug, Clone, Copy)]
enum MoveMethod {
    /// To and fro between these two nodes.
    Nodes(u32, u32),
    /// Into large pages and out of them: the one way on a machine with one node.
    Sizes,
}

/// Kind of transfers meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// All bytes, by requests as large as they may be.
    Everything,
    /// The beginning of each page, by a request of one packet.
    PageStarts,
}

pub(super) fn run(site: &Site<'_>, setting: &Setting, what: What) -> Result<Finding, Broken> {
    if let Some(skipped) = super::lacking(site) {
        return Ok(skipped);
    }
    let nodes = kinds::with_memory()?;
    let way = match nodes.as_slice() {
        [first, .., last] => MoveMethod::Nodes(*first, *last),
        _ => MoveMethod::Sizes,
    };
    let size = usize::try_from(setting.most).unwrap_or(1 << 26).clamp(LARGE, 1 << 26);
    let found = loopback::with(site, setting.seed, |wire| with_pair(wire, setting, size, way, what))?;
    Ok(packet::explained(site, setting.seed, found))
}

fn with_pair(
    wire: &Loopback<'_>,
    setting: &Setting,
    size: usize,
    way: MoveMethod,
    what: What,
) -> Result<Finding, Broken> {
    let mut kinds = kinds::ordinary();
    let kind = kinds.pop().ok_or_else(|| Broken::Argument("odp".to_owned(), "has no memory"))?;
    let whole = size + 2 * data::GUARD + LARGE;
    let aligned = || {
        let none = || Broken::Other("memory without a large page's beginning".to_owned());
        Aligned::new(kind.memory(whole)?, LARGE).ok_or_else(none)
    };
    let (near, far) = (aligned()?, aligned()?);
    // The range that is moved is the one that is used.
    let (start, length) = (far.address(), size / LARGE * LARGE);
    let on_demand = |memory| wire.domain.register(memory, Access::DATA | Access::ON_DEMAND);
    let mut ends = match on_demand(near).and_then(|near| Ok(Ends { near, far: on_demand(far)? })) {
        Ok(ends) => ends,
        Err(error) => return Ok(super::refused(wire.site, &error)),
    };
    let (stop, moved) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut claim = Claim::default();
    let (mut rounds, begun) = (0usize, Instant::now());
    let transferred: Result<(), VerbsError> = thread::scope(|scope| {
        scope.spawn(|| keep_moving(way, start, length, &stop, &moved));
        let mut one = || {
            let seed = setting.seed.wrapping_add(rounds as u64);
            rounds += 1;
            match what {
                What::Everything => data::whole(wire, &mut ends, size, seed, &mut claim, "pages that move"),
                What::PageStarts => packet::each_page(wire, &mut ends, size, seed, &mut claim),
            }
        };
        let mut result = Ok(());
        while result.is_ok() && (begun.elapsed() < WHILE || moved.load(Ordering::Relaxed) < AT_LEAST) {
            result = one();
            if begun.elapsed() > 10 * WHILE {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        result
    });
    transferred?;
    let moved = moved.load(Ordering::Relaxed);
    // An untrue claim stays untrue, whether or not pages moved.
    if moved == 0 && claim.is_true() {
        return Ok(Finding::skipped(format!("no page moved ({way:?}): this kernel does not move them here")));
    }
    let done = match what {
        What::Everything => format!("{size} bytes written, read and sent"),
        What::PageStarts => format!("the beginnings of {} pages written and read", size / pages::size()),
    };
    claim.seen(format!("{rounds} rounds of {done} while their pages moved {moved} times ({way:?})"));
    Ok(claim.finish())
}

/// Moves the pages to and fro until `stop` is set, and counts the moves that took place.
fn keep_moving(way: MoveMethod, start: u64, size: usize, stop: &AtomicBool, moved: &AtomicUsize) {
    let mut to_last = true;
    while !stop.load(Ordering::Relaxed) {
        let done = match way {
            MoveMethod::Nodes(first, last) => {
                let node = if to_last { last } else { first };
                pages::move_to(start, size, node).is_ok()
                    && pages::node_of(start).ok() == i32::try_from(node).ok()
            }
            MoveMethod::Sizes => pages::renewed(start, size),
        };
        to_last = !to_last;
        moved.fetch_add(usize::from(done), Ordering::Relaxed);
        thread::yield_now();
    }
}
