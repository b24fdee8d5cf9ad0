//! Access to the ledger of a host, for every command that needs it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_report::{Blame, Remedy, Report};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::host::LocalHost;
use crate::ledger::{Ledger, LedgerError};
use crate::region::{Region, Survey};

/// Arguments of every command that reads the ledger
#[derive(Debug, clap::Args)]
pub(super) struct LedgerArgs {
    #[command(flatten)]
    pub(super) host: LocalHost,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// The ledger of `host`, made if it has none.
pub(super) fn open(host: &LocalHost) -> Result<Ledger, LedgerError> {
    Ledger::of_host(host.root())
}

#[derive(Debug, thiserror::Error)]
#[error("cannot find region \"{name}\": this host has {known}")]
pub(super) struct UnknownRegion {
    name: String,
    known: String,
}

impl Report for UnknownRegion {
    fn remedy(&self) -> Remedy {
        Blame::Host.help("egm-device regions lists them, and the reasons that others were refused")
    }
}

/// The region called `name`.
pub(super) fn find<'a>(survey: &'a Survey, name: &str) -> Result<&'a Region, UnknownRegion> {
    survey.regions.iter().find(|region| region.name == name).ok_or_else(|| {
        let known: Vec<_> = survey.regions.iter().map(|region| region.name.as_str()).collect();
        let known = if known.is_empty() { "no region".to_owned() } else { known.join(", ") };
        UnknownRegion { name: name.to_owned(), known }
    })
}

/// Raises this process's limit of descriptors to the most that the host permits. Most hosts permit more than a shell's
/// 1024, and a slice needs up to ten.
pub(super) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
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
