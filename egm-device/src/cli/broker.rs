//! `egm-device broker`: lends slices to whom the policy lets.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use egm_address::ByteSize;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::Outcome;
use super::host::Host;
use super::ledger;
use crate::broker::{LedgerSource, Server};
use crate::policy::{self, Names, PolicyError};
use crate::report::{Blame, Report};

/// Where clients find the broker. Not in the ledger's folder, which is root's alone.
pub(super) const SOCKET: &str = "/run/egm-broker.sock";

/// Lends slices to other users' processes, as the policy says, and opens devices that open once
///
/// It runs until it is ended. A slice is lent until its client has closed the connection and ended, or says that it has
/// unmapped it; then it is scrubbed. A device that opens once stays with the broker until it ends.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Where clients connect; anybody may, and the policy decides
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,
    /// Who may take what; without this file only root may
    #[arg(long, value_name = "FILE", default_value = "/etc/egm-device/policy.json")]
    policy: PathBuf,
    /// Bytes a second at most for scrubbing what nobody has, while nobody asks; 0 for not at all
    #[arg(long, value_name = "BYTES", default_value = "1GiB")]
    scrub_rate: ByteSize,
    #[command(flatten)]
    host: Host,
}

pub(super) fn run(args: &Args) -> Outcome {
    let policy = policy::load(&args.policy, &Names::of_host(Path::new("/")))?;
    let limit = getrlimit(Resource::Nofile);
    // A slice needs about five descriptors, and every host allows more than a shell's 1024.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let survey = args.host.survey()?;
    let source = LedgerSource::new(ledger::open(&args.host)?, survey.regions);
    let source = source.on_nodes(&survey.host.nodes).scrubbing(args.scrub_rate.get());
    let mut server = Server::listen(&args.socket, policy, Arc::new(source))?;
    server.run()?;
    Ok(ExitCode::SUCCESS)
}

impl Report for PolicyError {
    fn blame(&self) -> Blame {
        match self {
            Self::Read { .. } => Blame::Host,
            _ => Blame::Configuration,
        }
    }
}
