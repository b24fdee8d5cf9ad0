//! The slice behind a device: from the ledger, or from a broker.

use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use egm_address::{InBar, InRegion, SpanSet};
use egm_report::{Blame, Remedy, Report};

use super::file::DeviceConfig;
use crate::backing::Backing;
use crate::broker::{BrokerLease, Client, ClientError, SliceRequest};
use crate::carve::plan::Request;
use crate::device::{in_region, in_slice};
use crate::lease::Lease;
use crate::ledger::gpus::{claim_named, expect_functions};
use crate::ledger::{GpuLease, GrantError, Ledger, Watch};
use crate::owner::Owner;
use crate::region::{Region, Slice, Survey};
use crate::scrub::{Cause, ScrubError};

/// Step of a [`SliceError`] that gets a slice.
fn get_slice_of(device: &str) -> String {
    format!("get the slice of device \"{device}\"")
}

/// A failure to get or return the slice of a device.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum SliceError {
    #[error("cannot get a slice for device \"{device}\": no region or kind named \"{region}\" on this host")]
    NoRegion { device: String, region: String },
    #[error("cannot {step}")]
    Grant { step: String, source: GrantError },
    #[error("cannot {step}")]
    Broker { step: String, source: ClientError },
    #[error("cannot start device \"{device}\"")]
    Descriptor { device: String, source: io::Error },
}

impl Report for SliceError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::NoRegion { .. } => Blame::Host.help("egm-device regions lists them"),
            Self::Grant { source, .. } => source.remedy(),
            Self::Broker { source, .. } => source.remedy(),
            Self::Descriptor { .. } => Blame::Host
                .help("raise the limits of descriptors and threads: LimitNOFILE=, TasksMax=, ulimit -n -u"),
        }
    }
}

/// A slice that this process holds.
pub(crate) enum ServedSlice {
    /// Granted by this process's own ledger, with the claims of its GPUs.
    Lease(Box<Lease>, Option<GpuLease>),
    /// Granted by a broker, with its memory.
    Broker(Box<BrokerLease>, Box<dyn Backing>),
}

impl ServedSlice {
    /// The slice of `config`, scrubbed, by `ledger`; the first region of that name or kind that has room.
    pub(crate) fn from_ledger(
        config: &DeviceConfig,
        ledger: &Ledger,
        survey: &Survey,
        watch: &Watch<'_>,
    ) -> Result<Self, SliceError> {
        let align = config.align.map_or(0, |align| align.get());
        let owner = Owner::this(&config.name).in_domain(config.trust_domain.clone());
        let request = Request { align, ..Request::new(config.size.get(), owner.clone()) };
        let failed = |source| SliceError::Grant { step: get_slice_of(&config.name), source };
        expect_functions(ledger, &survey.regions, &config.gpus).map_err(failed)?;
        let mut refused = None;
        for region in survey.regions.iter().filter(|region| region.is_called(&config.region)) {
            let watch = Watch { near: survey.near(region), ..*watch };
            match ledger.grant(region, &request, &watch) {
                Ok(lease) => {
                    let gpus =
                        claim_named(ledger, &survey.regions, &config.gpus, &owner, &watch).map_err(failed)?;
                    return Ok(Self::Lease(Box::new(lease), gpus));
                }
                Err(source) => refused = refused.or(Some(source)),
            }
        }
        Err(match refused {
            Some(source) => failed(source),
            None => SliceError::NoRegion { device: config.name.clone(), region: config.region.clone() },
        })
    }

    /// The slice of `config` from the broker at `socket`.
    pub(crate) fn from_broker(config: &DeviceConfig, socket: &Path) -> Result<Self, SliceError> {
        let error = |source| SliceError::Broker { step: get_slice_of(&config.name), source };
        let take = SliceRequest {
            name: config.name.clone(),
            regions: vec![config.region.clone()],
            size: config.size.get(),
            align: config.align.map_or(0, |align| align.get()),
            class: None,
            wait: false,
        };
        let lease = Client::connect(socket).and_then(|client| client.take(&take, |_| {})).map_err(error)?;
        let backing = lease.backing().map_err(error)?;
        Ok(Self::Broker(Box::new(lease), backing))
    }

    /// The region, with its retired pages.
    #[must_use]
    pub(crate) fn region(&self) -> &Region {
        match self {
            Self::Lease(lease, _) => lease.region(),
            Self::Broker(lease, _) => lease.region(),
        }
    }

    /// The slice, as the ledger granted it.
    #[must_use]
    pub(crate) fn slice(&self) -> &Slice {
        match self {
            Self::Lease(lease, _) => lease.slice(),
            Self::Broker(lease, _) => lease.slice(),
        }
    }

    /// The memory of the slice.
    #[must_use]
    pub(crate) fn backing(&self) -> &dyn Backing {
        match self {
            Self::Lease(lease, _) => lease.as_ref(),
            Self::Broker(_, backing) => backing.as_ref(),
        }
    }

    /// Retired bytes, counted in the slice: they must not be used.
    #[must_use]
    pub(crate) fn retired(&self) -> SpanSet<InBar> {
        self.in_slice(self.region().retired.spans())
    }

    /// Bytes of the region, counted in the slice.
    #[must_use]
    pub(crate) fn in_slice(&self, spans: &SpanSet<InRegion>) -> SpanSet<InBar> {
        in_slice(self.slice(), spans)
    }

    /// Retires `bad` bytes of the slice, so that no later owner gets them.
    pub(crate) fn retire(&self, bad: &SpanSet<InBar>) {
        let bad = in_region(self.slice(), bad);
        let recorded: Result<(), Box<dyn std::error::Error>> = match self {
            Self::Lease(lease, _) => lease.retire(&bad).map_err(Into::into),
            Self::Broker(lease, _) => lease.retire(&bad).map_err(Into::into),
        };
        if let Err(error) = recorded {
            tracing::info!("bad pages of region {} are not recorded: {error}", self.region().name);
        }
    }

    /// Reports that a scrub, which the guest requested, left a block of the slice that is not zero: on standard error,
    /// and in the audit log of a ledger of this process's own. A broker logs the findings of its own scrubs.
    pub(crate) fn report_mismatch(&self, device: &str, end: &Result<(), ScrubError>) {
        if let Err(ScrubError { cause: cause @ Cause::NotZero { block, .. }, .. }) = end {
            tracing::info!("cannot scrub {device}: {cause}");
            if let Self::Lease(lease, _) = self {
                lease.log_mismatch(*block, cause);
            }
        }
    }

    /// Scrubs and returns the slice; no process may map it any more.
    pub(crate) fn return_slice(self, device: &str, watch: &Watch<'_>) -> Result<(), SliceError> {
        static NEVER: AtomicBool = AtomicBool::new(false);
        let step = format!("return the slice of device \"{device}\"");
        match self {
            Self::Lease(lease, gpus) => {
                drop(gpus);
                lease.return_slice(watch).map_err(|source| SliceError::Grant { step, source })
            }
            Self::Broker(lease, backing) => {
                drop(backing);
                lease.return_slice(&NEVER).map_err(|source| SliceError::Broker { step, source })
            }
        }
    }
}
