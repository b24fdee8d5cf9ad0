//! `egm-device broker`: grants slices by a policy.

mod privileges;
mod warnings;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use egm_address::ByteSize;
use egm_report::{Blame, Remedy, Report};

use super::Outcome;
use super::access::{open, raise_descriptor_limit};
use super::signals;
use crate::broker::{LedgerSource, Server, ServerError};
use crate::host::LocalHost;
use crate::ledger::Paths;
use crate::policy::{self, Names, Policy, PolicyError};

/// Default socket of the broker. Not in the ledger's folder, which only root can read.
pub(super) const SOCKET: &str = "/run/egm-broker.sock";

/// The policy, unless another file is named.
const POLICY: &str = "/etc/egm-device/policy.json";

/// Grant slices to unprivileged users over a socket, by a policy
///
/// Runs until SIGTERM or Ctrl-C. A client owns its slice until it closes the connection and ends, or reports that it has
/// unmapped the slice; then the broker scrubs it. A device that can be opened only once stays open until the broker ends.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Socket for clients; every user may connect, and the policy decides about grants
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,
    /// Policy [default: /etc/egm-device/policy.json; without that file, only root gets slices]
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Limit for scrubbing free memory while no request waits, in bytes per second; 0 is no limit
    #[arg(long, value_name = "BYTES", default_value = "1GiB")]
    scrub_rate: ByteSize,
    #[command(flatten)]
    host: LocalHost,
}

/// The policy `named`, which must exist, or the usual one, which may be missing.
fn policy(named: Option<&Path>) -> Result<Policy, PolicyError> {
    let names = Names::of_host(Path::new("/"));
    match (named, policy::load(named.unwrap_or_else(|| Path::new(POLICY)), &names)) {
        (None, Err(error)) if error.is_missing() => Ok(Policy::root_only()),
        (_, loaded) => loaded,
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    privileges::check_process()?;
    let policy = policy(args.policy.as_deref())?;
    raise_descriptor_limit();
    let survey = args.host.survey()?;
    for warning in warnings::of(&policy, &survey.regions) {
        tracing::warn!("{warning}");
    }
    let ledger = open(&args.host)?.trusting(policy.clone());
    privileges::check_host(&Paths::below(args.host.root()), &survey.regions)?;
    let source = LedgerSource::new(ledger, survey.regions);
    let source = source.on_nodes(&survey.host.nodes).scrubbing(args.scrub_rate.get());
    let end = signals::pipe(&signals::END).map_err(ServerError::Wait)?;
    let mut server = Server::listen(&args.socket, policy, Arc::new(source))?;
    server.end_at(end.into())?;
    server.run()?;
    Ok(ExitCode::SUCCESS)
}

impl Report for PolicyError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Read { .. } => Blame::Host.help(format!(
                "name a file that exists with --policy; without it and without {POLICY} only root may"
            )),
            Self::File { source, .. } => source.remedy(),
            Self::Json(error) => Blame::Configuration.help(error.help.clone().unwrap_or_else(|| {
                r#"correct it there: {"rules": [{"name": …, "group": …, "regions": […], "quota": …}]}"#
                    .to_owned()
            })),
            Self::NotRootOwned { path, .. } => Blame::Configuration
                .help(format!("read it, then: chown root {0} && chmod go-w {0}", path.display())),
            Self::TooLarge | Self::TooManyRules { .. } => {
                Blame::Configuration.help("write rules for groups instead of users")
            }
            // The message names the remedy.
            Self::Rule { .. } | Self::NotText => Blame::Configuration.into(),
        }
    }

    fn excerpt(&self) -> Option<String> {
        match self {
            Self::File { source, .. } => source.excerpt(),
            Self::Json(error) => Some(error.excerpt.clone()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_is_named_and_not_there_is_an_error_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let error = policy(Some(&folder.path().join("typo.json"))).unwrap_err();
        assert!(error.to_string().contains("typo.json"), "{error}");
        assert!(error.blame() == Blame::Host && error.help().unwrap().contains("--policy"));
    }

    #[test]
    fn a_policy_that_is_no_json_is_named_with_its_line_and_a_remedy() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: a policy is root's, and this user is another");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.json");
        std::fs::write(&path, b"\xff").unwrap();
        let error = policy(Some(&path)).unwrap_err();
        assert!(egm_report::Chain(&error).to_string().contains("not UTF-8 text: save the file as UTF-8"));
        std::fs::write(&path, "{\"rules\":\n[}").unwrap();
        let error = policy(Some(&path)).unwrap_err();
        let text = egm_report::Chain(&error).to_string();
        let line = "  2 | [}\n    |  ^\n";
        let parts =
            ["cannot use policy", line, "line 2, column 2: policy is not JSON", "no value begins here"];
        for part in parts {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(error.blame(), Blame::Configuration);
    }
}
