//! Slices that a broker lends: it decides where they lie, so they are taken first and the plan is made around them.

use std::path::PathBuf;

use egm_address::{Offset, Span, SpanSet};
use egm_device::broker::{Client, Loan, Take};
use egm_device::region::Region;

use super::leases::LeaseError;
use crate::config::{EgmSlice, LOCAL, Spec};
use crate::facts::{Facts, HeldSpan, HostRegion};

/// A GPU and a hypervisor both map memory best in pieces of this size.
const HUGE_PAGE: u64 = 1 << 30;

/// Whom to ask, and as what.
#[derive(Debug, Clone)]
pub struct Broker {
    /// Its socket.
    pub socket: PathBuf,
    /// The VM class, for its policy.
    pub class: Option<String>,
    /// Whether to wait where there is no room now.
    pub wait: bool,
}

impl Broker {
    /// Loans for the slices of `spec` that are not this process's own memory, by index; `waiting` is told which slice has
    /// to wait, and why.
    ///
    /// # Errors
    /// [`LeaseError::Broker`]; what was lent goes back.
    pub(super) fn lend(
        &self,
        spec: &Spec,
        waiting: &dyn Fn(&str, &str),
    ) -> Result<Vec<(usize, Loan)>, LeaseError> {
        let slices =
            spec.egm.iter().enumerate().filter(|(_, slice)| slice.regions.iter().all(|r| r != LOCAL));
        let lend = |(index, slice): (usize, &EgmSlice)| {
            let id = format!("egm{index}");
            let size = slice.size.get();
            let take = Take {
                name: spec.name.clone(),
                regions: slice.regions.clone(),
                size,
                align: if size >= HUGE_PAGE { HUGE_PAGE } else { 0 },
                class: self.class.clone(),
                wait: self.wait,
            };
            let loan =
                Client::connect(&self.socket).and_then(|client| client.take(&take, |why| waiting(&id, why)));
            loan.map(|loan| (index, loan))
                .map_err(|source| LeaseError::Broker { id: format!("egm{index}"), source })
        };
        slices.map(lend).collect()
    }
}

/// Makes `spec` and `facts` such that each loan is the only place for its slice.
pub(super) fn pin(spec: &mut Spec, facts: &mut Facts, loans: &[(usize, Loan)]) {
    facts.regions = loans
        .iter()
        .map(|(index, loan)| {
            let (region, slice) = (loan.region(), loan.slice());
            let name = format!("{}.{index}", region.name);
            if let Some(wanted) = spec.egm.get_mut(*index) {
                wanted.regions = vec![name.clone()];
            }
            only(Region { name, ..region.clone() }, slice.offset, slice.size.get())
        })
        .collect();
}

/// `region`, of which nothing is to be had but `size` bytes from `offset`.
fn only(region: Region, offset: u64, size: u64) -> HostRegion {
    let span = |start, size| Span::new(Offset::new(start), size).into_iter().collect::<SpanSet<_>>();
    let rest = span(0, region.size.get()).minus(&span(offset, size));
    let held = rest.iter().map(|span| HeldSpan { span, owner: "others".to_owned() }).collect();
    HostRegion { region, held, clean: Vec::new() }
}

#[cfg(test)]
mod tests {
    use egm_address::ByteSize;
    use egm_device::region::RegionKind;
    use egm_device::retired::Retired;

    use super::*;

    #[test]
    fn a_loan_leaves_one_place_in_its_region() {
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
