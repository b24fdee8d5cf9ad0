//! The program by the name `cloud-hypervisor`, as kata-containers and libvirt start it.
//!
//! They ask for the version, and start a process that serves an API; machines come by it. All options that they pass are
//! parsed, and none is ignored.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use egm_report::program::Outcome;
use egm_report::show::print;

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
    #[arg(long, value_name = "SOCKET")]
    api_socket: Option<String>,
    /// Write events as JSON: path=PATH or fd=NUMBER
    #[arg(long, value_name = "FILE")]
    event_monitor: Option<String>,
    /// Filter system calls: true, false or log
    #[arg(long, value_name = "WORD", value_parser = ["true", "false", "log"], hide_possible_values = true)]
    seccomp: Option<String>,
    /// Write messages to FILE [default: standard error]
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
    /// Print more messages; twice for all
    #[arg(short, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Print the versions of cloud-hypervisor's API and of egm-vmm
    #[arg(short = 'V', long)]
    version: bool,
}

const HELP: &str = "\
This is egm-vmm by the name cloud-hypervisor. Machines come by the API, and no
option describes one. Check a machine's document, the body of vm.create:

  egm-vmm check --from cloud-hypervisor FILE

Exit codes: 2 the command line is wrong; 3 the host lacks something.";

/// Options that cannot take effect.
#[derive(Debug, thiserror::Error)]
#[error("cannot honour {options}: by this name egm-vmm serves no API yet")]
struct NotServed {
    /// As they were written.
    options: String,
}

impl Report for NotServed {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help(
            "serve an API for the machine's document: egm-vmm serve --api PATH\n\
             or start a machine by its own file: egm-vmm run FILE --api PATH\n\
             or plan the body of vm.create: egm-vmm plan --from cloud-hypervisor FILE",
        )
    }
}

/// Whether `program`, the first word of a command line, has the name.
pub(super) fn is_called(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()) == Some(OsStr::new(NAME))
}

pub(super) fn run(line: &CommandLine) -> Outcome {
    if line.version {
        print(format!("{NAME} v{VERSION}\negm-vmm {}\n", env!("CARGO_PKG_VERSION")));
        return Ok(ExitCode::SUCCESS);
    }
    let log_file = line.log_file.as_ref().map(|file| file.display().to_string());
    let options = [
        ("--api-socket ", line.api_socket.clone()),
        ("--event-monitor ", line.event_monitor.clone()),
        ("--seccomp ", line.seccomp.clone()),
        ("--log-file ", log_file),
        ("-v", (line.verbose > 0).then(String::new)),
    ];
    let written = options.into_iter().filter_map(|(option, value)| Some(format!("{option}{}", value?)));
    Err(NotServed { options: written.collect::<Vec<_>>().join(", ") }.into())
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
