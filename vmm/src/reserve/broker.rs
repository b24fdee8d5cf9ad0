//! Slices from a broker: it decides where they lie, so they are taken first and the plan is made around them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use egm_address::{Offset, Span, SpanSet};
use egm_device::broker::{BrokerLease, Client, ClientError, SliceRequest};
use egm_device::region::{Region, RegionKind};

use super::error::ReserveError;
use super::leases::Leases;
use crate::config::{EgmSlice, GUEST_MEMFD, LOCAL, Spec};
use crate::facts::{Facts, HeldSpan, HostRegion, Trust};
use crate::plan::{huge_alignment, lost};

/// Shortest and longest pause of a machine that has returned its slices because one of them was refused.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(30);

/// The broker to use, and how to request slices from it.
#[derive(Debug, Clone)]
pub struct Broker {
    /// Unix socket that the broker listens on.
    pub socket: PathBuf,
    /// The VM class, for its policy.
    pub class: Option<String>,
    /// Whether to wait where there is no room now.
    pub wait: bool,
}

/// The slices that were requested from a broker.
#[derive(Debug, Default)]
pub(crate) struct GrantedSlices(Vec<Requested>);

#[derive(Debug)]
struct Requested {
    /// Index of the slice in the configuration.
    index: usize,
    source: Source,
}

/// Source of a slice that was requested from the broker.
#[derive(Debug)]
enum Source {
    /// From the broker, which keeps it granted while this value lives.
    Broker(Box<BrokerLease>),
    /// From this process: its list goes on with "local" or "guest-memfd", and the broker refused, for this reason.
    Local(String),
}

/// Announces each slice that has to wait, once.
struct Announcer<'a> {
    waiting: &'a dyn Fn(&str, &str),
    announced: BTreeSet<String>,
}

impl Announcer<'_> {
    fn announce(&mut self, id: &str, why: &str) {
        if self.announced.insert(id.to_owned()) {
            (self.waiting)(id, why);
        }
    }
}

impl Broker {
    /// The slices of `spec` that do not begin with this process's own memory. `waiting` is called once with each slice that
    /// has to wait, and the reason.
    ///
    /// Only the first slice waits: two machines that each held one slice and waited for the other's would deadlock.
    /// After the refusal of a later one, all slices are returned, and after a pause that one is the first to wait. The
    /// pause grows: slices that are free one by one and not together would be taken and returned without end.
    ///
    /// # Errors
    /// [`ReserveError::Broker`]; slices granted until then are returned.
    pub(crate) fn borrow(
        &self,
        spec: &Spec,
        waiting: &dyn Fn(&str, &str),
    ) -> Result<GrantedSlices, ReserveError> {
        let asked = spec.egm.iter().enumerate().filter(|(_, slice)| !before_own(slice).is_empty());
        let mut order: Vec<usize> = asked.map(|(index, _)| index).collect();
        let mut announcer = Announcer { waiting, announced: BTreeSet::new() };
        let mut pause = FIRST_PAUSE;
        loop {
            let mut granted = GrantedSlices::default();
            let Some(refused) = self.request(spec, &order, &mut granted, &mut announcer)? else {
                return Ok(granted);
            };
            granted.return_all()?;
            order.swap(0, refused);
            thread::sleep(pause);
            pause = pause.saturating_mul(2).min(LAST_PAUSE);
        }
    }

    /// Requests the slices with these indexes, and adds them to `granted`. Returns the position of one that has to wait, and is
    /// not the first.
    fn request(
        &self,
        spec: &Spec,
        order: &[usize],
        granted: &mut GrantedSlices,
        announcer: &mut Announcer<'_>,
    ) -> Result<Option<usize>, ReserveError> {
        for (position, &index) in order.iter().enumerate() {
            let Some(slice) = spec.egm.get(index) else { continue };
            let id = format!("egm{index}");
            let error = |source| ReserveError::Broker { id: id.clone(), source };
            let take = self.take(spec, slice, position == 0);
            let client = Client::connect(&self.socket).map_err(error)?;
            let source = match client.take(&take, |why| announcer.announce(&id, why)) {
                Ok(lease) => Source::Broker(Box::new(lease)),
                Err(ClientError::Refused { why, .. }) if slice.regions.iter().any(is_own) => {
                    Source::Local(why)
                }
                Err(ClientError::Refused { why, .. }) if self.wait && position > 0 => {
                    announcer.announce(&id, &why);
                    return Ok(Some(position));
                }
                Err(source) => return Err(error(source)),
            };
            granted.0.push(Requested { index, source });
        }
        Ok(None)
    }

    fn take(&self, spec: &Spec, slice: &EgmSlice, first: bool) -> SliceRequest {
        let size = slice.size.get();
        SliceRequest {
            name: spec.name.clone(),
            regions: before_own(slice).to_vec(),
            size,
            align: huge_alignment(size),
            class: self.class.clone(),
            wait: self.wait && first,
        }
    }
}

/// Whether a machine makes the memory itself.
fn is_own(region: &String) -> bool {
    region == LOCAL || region == GUEST_MEMFD
}

/// The regions that a slice prefers to memory that the machine makes itself.
fn before_own(slice: &EgmSlice) -> &[String] {
    slice.regions.split(is_own).next().unwrap_or_default()
}

impl GrantedSlices {
    /// Returns the slices to the broker. One of a pool that the broker refuses to take back now, because other devices of
    /// this user may still reach it, goes back with this process.
    pub(super) fn return_all(self) -> Result<(), ReserveError> {
        for Requested { index, source } in self.0 {
            let Source::Broker(lease) = source else { continue };
            let is_pool = lease.region().kind.is_pool();
            match lease.return_slice(&AtomicBool::new(false)) {
                Err(ClientError::Refused { .. }) if is_pool => {}
                given => {
                    given.map_err(|source| ReserveError::Broker { id: format!("egm{index}"), source })?;
                }
            }
        }
        Ok(())
    }

    /// Changes `spec` and `facts` so that each slice has one placement only, that of its grant; returns notes on slices that
    /// are not of their first choice.
    pub(crate) fn pin(&self, spec: &mut Spec, facts: &mut Facts) -> Vec<String> {
        let mut notes = Vec::new();
        facts.regions.retain(|host| host.region.kind == RegionKind::GuestMemfd);
        for Requested { index, source } in &self.0 {
            let Some(wanted) = spec.egm.get_mut(*index) else { continue };
            let first = wanted.regions.first().cloned().unwrap_or_default();
            let (from, kind, why) = match source {
                Source::Broker(lease) => {
                    let (region, slice) = (lease.region(), lease.slice());
                    let name = format!("{}.{index}", region.name);
                    wanted.regions = vec![name.clone()];
                    let region_of_slice = Region { name, ..region.clone() };
                    facts.regions.push(only(region_of_slice, slice.offset, slice.size.get()));
                    (region.name.as_str(), region.kind.word(), "the broker had no room there")
                }
                Source::Local(why) => {
                    wanted.regions.retain(is_own);
                    let own = wanted.regions.first().map_or(LOCAL, String::as_str);
                    (own, own, why.as_str())
                }
            };
            if first != from && first != kind {
                notes.push(lost(*index, from, kind, &first, &why));
            }
        }
        notes
    }

    /// The slices with their memory.
    ///
    /// # Errors
    /// [`ReserveError::Broker`].
    pub(crate) fn into_leases(self) -> Result<Leases, ReserveError> {
        let leases = Leases::default();
        for Requested { index, source } in self.0 {
            if let Source::Broker(lease) = source {
                leases.add_granted(format!("egm{index}"), lease)?;
            }
        }
        Ok(leases)
    }
}

/// `region` with only `size` bytes from `offset` available.
fn only(region: Region, offset: u64, size: u64) -> HostRegion {
    let span = |start, size| Span::new(Offset::new(start), size).into_iter().collect::<SpanSet<_>>();
    let rest = span(0, region.size.get()).minus(&span(offset, size));
    // The broker has decided whether the machine may share the region with them.
    let others = |span| HeldSpan { span, owner: "others".to_owned(), trust: Trust::Unrecorded };
    let held = rest.iter().map(others).collect();
    HostRegion { region, held, clean: Vec::new(), gpus: Vec::new() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use egm_address::ByteSize;
    use egm_device::retired::Retired;

    use super::*;
    use crate::config::{EgmForm, PageSize};

    #[test]
    fn a_broker_is_asked_for_what_comes_before_memory_that_the_machine_makes_itself() {
        let asked = |regions: &[&str]| {
            let slice = EgmSlice {
                regions: regions.iter().map(|&region| region.to_owned()).collect(),
                size: ByteSize::new(2 << 20),
                node: 1,
                form: EgmForm::Memory,
                page_size: PageSize::Auto,
                host_nodes: None,
                distances: BTreeMap::new(),
                access: Vec::new(),
            };
            before_own(&slice).to_vec()
        };
        assert_eq!(asked(&["egm", "guest-memfd", "hugetlb"]), ["egm"]);
        assert_eq!(asked(&["hugetlb", "local"]), ["hugetlb"]);
        assert!(asked(&["guest-memfd"]).is_empty());
    }

    #[test]
    fn a_granted_slice_leaves_one_place_in_its_region() {
        let region = Region {
            name: "egm4.0".into(),
            kind: RegionKind::Egm { device: "/dev/egm4".into() },
            node: None,
            size: ByteSize::new(8 << 30),
            page_size: ByteSize::new(64 << 10),
            base: None,
            functions: Vec::new(),
            retired: Retired::default(),
        };
        let host = only(region, 2 << 30, 1 << 30);
        let held: Vec<_> = host.held.iter().map(|h| (h.span.start().get(), h.span.size())).collect();
        assert_eq!(held, [(0, 2 << 30), (3 << 30, 5 << 30)]);
    }
}
