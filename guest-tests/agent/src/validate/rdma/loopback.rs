//! Two queue pairs of one device, connected with each other.

use egm_vendor::verbs::{CompletionQueue, Connected, Domain};

use super::site::Site;
use crate::error::Broken;
use crate::finding::Finding;
use crate::pattern::Random;

/// Requests under way on each queue pair.
pub(in crate::validate) const DEPTH: u32 = 32;

/// Both ends of a connection and what belongs to them.
#[derive(Debug)]
pub(in crate::validate) struct Loopback<'l> {
    /// The device and where on it the connection is.
    pub(in crate::validate) site: &'l Site<'l>,
    /// Protection domain in which memory is registered.
    pub(in crate::validate) domain: &'l Domain<'l>,
    /// For completions of both ends.
    pub(in crate::validate) completions: &'l CompletionQueue<'l>,
    /// This end makes requests.
    pub(in crate::validate) requester: Connected<'l>,
    pub(in crate::validate) responder: Connected<'l>,
}

/// Connects a pair and runs `check` with it.
pub(in crate::validate) fn with(
    site: &Site<'_>,
    seed: u64,
    check: impl FnOnce(&Loopback<'_>) -> Result<Finding, Broken>,
) -> Result<Finding, Broken> {
    let mut random = Random::new(seed);
    let depth = DEPTH.min(site.abilities.max_qp_wr);
    let domain = site.context.domain()?;
    let completions = site.context.completion_queue((4 * depth).min(site.abilities.max_cqe))?;
    let (near, far) = (domain.queue_pair(&completions, depth)?, domain.queue_pair(&completions, depth)?);
    let near_end = near.endpoint(&site.place, random.next_u32());
    let far_end = far.endpoint(&site.place, random.next_u32());
    let near = near.connect(&site.place, &near_end, &far_end)?;
    let far = far.connect(&site.place, &far_end, &near_end)?;
    check(&Loopback { site, domain: &domain, completions: &completions, requester: near, responder: far })
}
