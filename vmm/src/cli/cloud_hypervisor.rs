//! The program started as `cloud-hypervisor`, as kata-containers and libvirt start it.
//!
//! They query the version, then start a process and create machines through its API. Every option that they pass is honoured
//! or refused.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use egm_report::program::Outcome;
use egm_report::program::log::Log;
use egm_report::show::print;
use rustix::stdio::dup2_stderr;

use super::serve::{PathOrDescriptor, Service, SharedArgs};
use crate::error::{Blame, Remedy, Report};

/// The name that other programs know.
const NAME: &str = "cloud-hypervisor";
/// Version of cloud-hypervisor with the same API and documents. libvirt reads `cloud-hypervisor vA.B.C`.
const VERSION: &str = "54.0.0";

/// Serve cloud-hypervisor's API
#[derive(Debug, Parser)]
#[command(name = NAME, disable_version_flag = true, arg_required_else_help = true, after_help = HELP)]
pub(super) struct CommandLine {
    /// Serve the API at this Unix socket: PATH, path=PATH or fd=NUMBER
    #[arg(long, value_name = "SOCKET", required_unless_present = "version")]
    api_socket: Option<PathOrDescriptor>,
    /// Write cloud-hypervisor's events as JSON: path=PATH or fd=NUMBER
    ///
    /// With a named pipe, the program waits at its start for a reader. Events that only egm-vmm has: GET /egm/v1/events.
    #[arg(long, value_name = "FILE")]
    event_monitor: Option<PathOrDescriptor>,
    /// Filter system calls: only false, which is the default here; true and log are refused
    #[arg(long, value_name = "WORD", value_parser = ["true", "false", "log"], hide_possible_values = true)]
    seccomp: Option<String>,
    /// Append messages to FILE [default: standard error]
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
    /// Print more messages, as --log-level debug does
    #[arg(short, action = clap::ArgAction::Count, conflicts_with = "log_level")]
    verbose: u8,
    /// Print the versions of cloud-hypervisor's API and of egm-vmm
    #[arg(short = 'V', long)]
    version: bool,
    #[command(flatten)]
    shared: SharedArgs,
    #[command(flatten)]
    log: Log,
}

const HELP: &str = "\
This is egm-vmm, started as cloud-hypervisor: egm-vmm serve with
cloud-hypervisor's options, which ends with its guest. Clients create machines
through the API; no option describes one. Check the body of vm.create:

  egm-vmm check --from cloud-hypervisor FILE

Exit codes:

  0  the guest powered off, or a signal or the API ended the program
  1  the guest failed
  2  the command line is wrong
  3  the host lacks something
  4  a bug in egm-vmm";

/// Options that cannot take effect.
#[derive(Debug, thiserror::Error)]
enum OptionError {
    #[error(
        "cannot filter system calls (--seccomp {word}): the program executes itself after each machine, which no filter permits"
    )]
    Seccomp { word: String },
    #[error("cannot write messages to {}", path.display())]
    LogFile { path: PathBuf, source: io::Error },
}

impl Report for OptionError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Seccomp { .. } => Blame::Configuration.help(
                "leave --seccomp out, or write --seccomp false;\n\
                 a machine in a sandbox: egm-vmm run FILE --api PATH --sandbox strict",
            ),
            Self::LogFile { .. } => Blame::Configuration.help("name a file that you may write"),
        }
    }
}

/// Whether `program`, the first word of a command line, has the name.
pub(super) fn is_called(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()) == Some(OsStr::new(NAME))
}

pub(super) fn run(line: &CommandLine) -> Outcome {
    let CommandLine { api_socket, event_monitor, seccomp, log_file, verbose, version, shared, log } = line;
    let (false, Some(api)) = (version, api_socket) else {
        print(format!("{NAME} v{VERSION}\negm-vmm {}\n", env!("CARGO_PKG_VERSION")));
        return Ok(ExitCode::SUCCESS);
    };
    if let Some(word) = seccomp.as_ref().filter(|word| *word != "false") {
        return Err(OptionError::Seccomp { word: word.clone() }.into());
    }
    // Standard error stays the file in later executions.
    if let Some(path) = log_file.as_ref().filter(|_| !shared.resume) {
        write_messages_to(path).map_err(|source| OptionError::LogFile { path: path.clone(), source })?;
    }
    let log = if *verbose > 0 { log.verbose() } else { *log };
    log.start();
    let (api, event_monitor) = (api.clone(), event_monitor.clone());
    Service { name: c"cloud-hypervisor", api, shared, event_monitor, ends_with_guest: true }.run()
}

/// Appends standard error to the file at `path`.
fn write_messages_to(path: &Path) -> io::Result<()> {
    Ok(dup2_stderr(File::options().append(true).create(true).open(path)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_that_of_the_file_wherever_it_lies() {
        for (program, called) in [
            ("cloud-hypervisor", true),
            ("/usr/bin/cloud-hypervisor", true),
            ("egm-vmm", false),
            ("/opt/cloud-hypervisor/egm-vmm", false),
            ("cloud-hypervisor-static", false),
        ] {
            assert_eq!(is_called(Some(OsStr::new(program))), called, "{program}");
        }
        assert!(!is_called(None));
    }
}
