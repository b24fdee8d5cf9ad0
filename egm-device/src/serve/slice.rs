//! The slice behind a device: from the ledger, or from a broker.

use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use egm_address::{InBar, InRegion, SpanSet};
use egm_report::{Blame, Report};

use super::file::Offer;
use crate::backing::Backing;
use crate::broker::{Client, ClientError, Loan, Take};
use crate::carve::plan::Request;
use crate::device::{in_region, in_slice};
use crate::lease::Lease;
use crate::ledger::gpus::claim_named;
use crate::ledger::{GpuLease, GrantError, Ledger, Watch};
use crate::owner::Owner;
use crate::region::{Region, Slice, Survey};
use crate::scrub::{Cause, ScrubError};

/// Why a device has no slice.
#[derive(Debug, thiserror::Error)]
pub enum SliceError {
    /// No region or kind has this name.
    #[error("device \"{device}\": no region or kind named \"{region}\" on this host")]
    NoRegion {
        /// The device.
        device: String,
        /// Its region.
        region: String,
    },
    /// The ledger refuses.
    #[error("device \"{device}\" has no slice")]
    Grant {
        /// The device.
        device: String,
        /// Why.
        source: GrantError,
    },
    /// The broker refuses.
    #[error("device \"{device}\" has no slice")]
    Loan {
        /// The device.
        device: String,
        /// Why.
        source: ClientError,
    },
    /// No descriptor for it.
    #[error("device \"{device}\" cannot be made")]
    Descriptor {
        /// The device.
        device: String,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl Report for SliceError {
    fn blame(&self) -> Blame {
        match self {
            Self::Grant { source, .. } => source.blame(),
            Self::Loan { source, .. } => source.blame(),
            Self::NoRegion { .. } | Self::Descriptor { .. } => Blame::Host,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::NoRegion { .. } => Some("egm-device regions lists them".to_owned()),
            Self::Grant { source, .. } => source.help(),
            Self::Loan { source, .. } => source.help(),
            Self::Descriptor { .. } => None,
        }
    }
}

/// A slice that this process holds.
pub enum Held {
    /// By its own ledger.
    Lease(Box<Lease>, Option<GpuLease>),
    /// From a broker.
    Loan(Box<Loan>, Box<dyn Backing>),
}

impl Held {
    /// The slice of `offer`, scrubbed, by `ledger`; the first region of that name or kind that has room.
    ///
    /// # Errors
    /// [`SliceError`].
    pub fn grant(
        offer: &Offer,
        ledger: &Ledger,
        survey: &Survey,
        watch: &Watch<'_>,
    ) -> Result<Self, SliceError> {
        let align = offer.align.map_or(0, |align| align.get());
        let owner = Owner::this(&offer.name).in_domain(offer.trust_domain.clone());
        let request = Request { align, ..Request::new(offer.size.get(), owner.clone()) };
        let failed = |source| SliceError::Grant { device: offer.name.clone(), source };
        let is_meant = |region: &&Region| region.name == offer.region || region.kind.word() == offer.region;
        let mut refused = None;
        for region in survey.regions.iter().filter(is_meant) {
            let near = survey.host.nodes.iter().find(|node| Some(node.id) == region.node);
            let watch = Watch { near: near.map(|node| &node.cpus), ..*watch };
            match ledger.grant(region, &request, &watch) {
                Ok(lease) => {
                    let gpus =
                        claim_named(ledger, &survey.regions, &offer.gpus, &owner, &watch).map_err(failed)?;
                    return Ok(Self::Lease(Box::new(lease), gpus));
                }
                Err(source) => refused = refused.or(Some(source)),
            }
        }
        Err(match refused {
            Some(source) => failed(source),
            None => SliceError::NoRegion { device: offer.name.clone(), region: offer.region.clone() },
        })
    }

    /// The slice of `offer` from the broker at `socket`.
    ///
    /// # Errors
    /// [`SliceError`].
    pub fn borrow(offer: &Offer, socket: &Path) -> Result<Self, SliceError> {
        let error = |source| SliceError::Loan { device: offer.name.clone(), source };
        let take = Take {
            name: offer.name.clone(),
            regions: vec![offer.region.clone()],
            size: offer.size.get(),
            align: offer.align.map_or(0, |align| align.get()),
            class: None,
            wait: false,
        };
        let loan = Client::connect(socket).and_then(|client| client.take(&take, |_| {})).map_err(error)?;
        let backing = loan.backing().map_err(error)?;
        Ok(Self::Loan(Box::new(loan), backing))
    }

    /// The region, with its retired pages.
    #[must_use]
    pub fn region(&self) -> &Region {
        match self {
            Self::Lease(lease, _) => lease.region(),
            Self::Loan(loan, _) => loan.region(),
        }
    }

    /// The slice.
    #[must_use]
    pub fn slice(&self) -> &Slice {
        match self {
            Self::Lease(lease, _) => lease.slice(),
            Self::Loan(loan, _) => loan.slice(),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn backing(&self) -> &dyn Backing {
        match self {
            Self::Lease(lease, _) => lease.as_ref(),
            Self::Loan(_, backing) => backing.as_ref(),
        }
    }

    /// Retired bytes, counted in the slice: they must not be used.
    #[must_use]
    pub fn retired(&self) -> SpanSet<InBar> {
        self.in_slice(self.region().retired.spans())
    }

    /// Bytes of the region, counted in the slice.
    #[must_use]
    pub fn in_slice(&self, spans: &SpanSet<InRegion>) -> SpanSet<InBar> {
        in_slice(self.slice(), spans)
    }

    /// Retires `bad` bytes of the slice, so that no later owner gets them.
    pub fn retire(&self, bad: &SpanSet<InBar>) {
        let bad = in_region(self.slice(), bad);
        let told: Result<(), Box<dyn std::error::Error>> = match self {
            Self::Lease(lease, _) => lease.retire(&bad).map_err(Into::into),
            Self::Loan(loan, _) => loan.retire(&bad).map_err(Into::into),
        };
        if let Err(error) = told {
            tracing::info!("bad pages of region {} are not recorded: {error}", self.region().name);
        }
    }

    /// Reports that a scrub, which the guest requested, left a block of the slice that is not zero: on standard error,
    /// and in the audit log of a ledger of this process's own. A broker logs the findings of its own scrubs.
    pub fn report_mismatch(&self, device: &str, end: &Result<(), ScrubError>) {
        if let Err(ScrubError { cause: cause @ Cause::NotZero { block, .. }, .. }) = end {
            tracing::info!("cannot scrub {device}: {cause}");
            if let Self::Lease(lease, _) = self {
                lease.log_mismatch(*block, cause);
            }
        }
    }

    /// Scrubs and returns the slice; no process may map it any more.
    ///
    /// # Errors
    /// [`SliceError`].
    pub fn give_back(self, device: &str, watch: &Watch<'_>) -> Result<(), SliceError> {
        static NEVER: AtomicBool = AtomicBool::new(false);
        let device = device.to_owned();
        match self {
            Self::Lease(lease, gpus) => {
                drop(gpus);
                lease.give_back(watch).map_err(|source| SliceError::Grant { device, source })
            }
            Self::Loan(loan, backing) => {
                drop(backing);
                loan.give_back(&NEVER).map_err(|source| SliceError::Loan { device, source })
            }
        }
    }
}
