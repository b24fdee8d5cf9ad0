//! Access to the ledger of a host, for every command that needs it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_address::CpuSet;
use egm_report::{Blame, Report};

use crate::host::Host;
use crate::ledger::{Identity, Ledger, LedgerError, Paths};
use crate::region::{Region, Survey};

/// Arguments of every command that reads the ledger
#[derive(Debug, clap::Args)]
pub(super) struct LedgerArgs {
    #[command(flatten)]
    pub(super) host: Host,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// The ledger of `host`, made if it has none; a host of which only the facts are here has no ledger here.
pub(super) fn open(host: &Host) -> Result<Ledger, Box<dyn Report>> {
    if host.is_recorded() {
        return Err(RecordedHost.into());
    }
    let root = host.root();
    let identity = Identity::read(root)
        .map_err(|source| LedgerError::Record { step: "tell this boot from others for", source })?;
    Ok(Ledger::open(Paths::below(root), identity)?)
}

/// The facts are of another host: its regions are other memory here.
#[derive(Debug, thiserror::Error)]
#[error("a host that was recorded has no memory to take and no ledger: --recorded is for plans")]
struct RecordedHost;

impl Report for RecordedHost {
    fn blame(&self) -> Blame {
        Blame::Configuration
    }
}

/// There is no region of that name.
#[derive(Debug, thiserror::Error)]
#[error("there is no region \"{name}\": there are {known}")]
pub(super) struct UnknownRegion {
    name: String,
    known: String,
}

impl Report for UnknownRegion {
    fn blame(&self) -> Blame {
        Blame::Host
    }

    fn help(&self) -> Option<String> {
        Some("see them, and why others were refused: egm-device regions".to_owned())
    }
}

/// The region called `name`.
pub(super) fn find<'a>(survey: &'a Survey, name: &str) -> Result<&'a Region, UnknownRegion> {
    survey.regions.iter().find(|region| region.name == name).ok_or_else(|| UnknownRegion {
        name: name.to_owned(),
        known: survey.regions.iter().map(|region| region.name.as_str()).collect::<Vec<_>>().join(", "),
    })
}

/// The processors near `region`.
pub(super) fn near<'a>(survey: &'a Survey, region: &Region) -> Option<&'a CpuSet> {
    survey.host.nodes.iter().find(|node| Some(node.id) == region.node).map(|node| &node.cpus)
}

/// A flag that Ctrl-C and SIGTERM set.
pub(super) fn cancelled_by_signals() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // Where it cannot be caught, the process ends: what is not recorded clean stays dirty.
        let _ = signal_hook::flag::register(signal, flag.clone());
    }
    flag
}
