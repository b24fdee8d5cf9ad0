//! The command line: one file a subcommand, each with its `Args` and a `run` that returns the exit code.

mod bind;
mod check;
mod cloud_hypervisor;
mod ctl;
mod export;
mod facts;
mod form;
mod list;
mod plan;
mod run;
mod schema;
mod serve;

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use egm_report::program::generate::{self, Completions, Man};
use egm_report::program::log::Log;
use egm_report::program::{Outcome, end, end_on_panic, forbid_core_dumps, help};

use crate::console;

/// Run Linux virtual machines with Extended GPU Memory as NUMA nodes
#[derive(Debug, Parser)]
#[command(name = "egm-vmm", version, after_help = HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: Log,
}

const HELP: &str = "\
One JSON file describes a machine. Print its plan, then start it:

  egm-vmm plan configs/smoke.json
  egm-vmm run configs/smoke.json

Exit codes:

  0  the guest powered off, or a signal or the API ended it
  1  the guest failed
  2  the configuration or the command line is wrong
  3  the host lacks something
  4  a bug in egm-vmm";

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
    Serve(serve::Args),
    Ctl(ctl::Args),
    List(list::Args),
    Check(check::Args),
    Bind(bind::Args),
    Facts(facts::Args),
    Plan(plan::Args),
    Export(export::Args),
    Schema(schema::Args),
    Completions(Completions),
    Man(Man),
}

/// The command line of `run`, without the other commands. Those have most of the options, and describing them would take
/// most of the time between the program's start and the read of its configuration.
#[derive(Debug, Parser)]
#[command(name = "egm-vmm", version)]
struct RunLine {
    #[command(subcommand)]
    command: RunAlone,
    #[command(flatten)]
    log: Log,
}

#[derive(Debug, Subcommand)]
enum RunAlone {
    Run(run::Args),
}

impl Cli {
    /// The command line of this process. Ends the process with a message where it is wrong, and after `--help`.
    fn of_process() -> Self {
        Self::run_of(std::env::args_os()).unwrap_or_else(help::parse)
    }

    /// Parses `line` if it is a valid one of `run`. Messages come from the whole description alone.
    fn run_of(line: impl Iterator<Item = OsString>) -> Option<Self> {
        let RunLine { command: RunAlone::Run(args), log } = RunLine::try_parse_from(line).ok()?;
        Some(Self { command: Command::Run(args), log })
    }
}

/// Prints a line on standard error. Where that is full or its reader is gone, the line is lost and the machine goes on.
fn print_message(text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    forbid_core_dumps();
    // Disks are as after a loss of power: what was flushed is there.
    end_on_panic(console::restore_terminal);
    if cloud_hypervisor::is_called(std::env::args_os().next().as_deref()) {
        return end(cloud_hypervisor::run(&help::parse()));
    }
    let cli = Cli::of_process();
    cli.log.start();
    let outcome: Outcome = match &cli.command {
        Command::Run(args) => run::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Ctl(args) => ctl::run(args),
        Command::List(args) => list::run(args),
        Command::Check(args) => check::run(args),
        Command::Bind(args) => bind::run(args),
        Command::Facts(args) => facts::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Export(args) => export::run(args),
        Command::Schema(args) => Ok(schema::run(args)),
        Command::Completions(args) => Ok(generate::completions(args, Cli::command())),
        Command::Man(args) => generate::man(args, Cli::command()),
    };
    end(outcome)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::process::{Command, Stdio};

    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{LocalModes, tcgetattr};

    use super::*;
    use crate::config;

    /// The line as `run` alone reads it, and as the whole description does.
    fn both(line: &str) -> (Option<String>, Option<String>) {
        let words = || line.split(' ').map(OsString::from);
        let (alone, whole) = (Cli::run_of(words()), Cli::try_parse_from(words()).ok());
        (alone.map(|cli| format!("{cli:?}")), whole.map(|cli| format!("{cli:?}")))
    }

    #[test]
    fn run_reads_its_line_as_the_whole_description_does() {
        for line in [
            "egm-vmm run vm.json",
            "egm-vmm --log-format json run vm.json --log-level debug",
            "egm-vmm run --kernel k --initramfs i --append a vm.json --trust-domain t",
            "egm-vmm run vm.json --broker s --class c --wait",
            "egm-vmm run vm.json --api /run/egm-vmm/vm.sock",
            "egm-vmm run -- --odd.json",
        ] {
            let (alone, whole) = both(line);
            assert!(alone.is_some() && alone == whole, "{line}: {alone:?} {whole:?}");
        }
        for line in [
            "egm-vmm",
            "egm-vmm --help",
            "egm-vmm --version",
            "egm-vmm run",
            "egm-vmm run --help",
            "egm-vmm help run",
            "egm-vmm run vm.json --wait",
            "egm-vmm run vm.json --user u --broker b",
            "egm-vmm plan run",
            "egm-vmm plan vm.json",
        ] {
            assert_eq!(both(line).0, None, "{line}");
        }
    }

    /// Set in the process that panics.
    const PANICS: &str = "EGM_VMM_TEST_PANICS";

    #[test]
    fn a_panic_on_any_thread_is_our_bug_and_gives_the_terminal_back() {
        if std::env::var_os(PANICS).is_some() {
            return panic_with_a_raw_terminal();
        }
        let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&person).unwrap();
        unlockpt(&person).unwrap();
        let name = ptsname(&person, Vec::new()).unwrap();
        let program = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let modes = || tcgetattr(&person).unwrap().local_modes;
        let before = modes();
        let test = concat!(module_path!(), "::a_panic_on_any_thread_is_our_bug_and_gives_the_terminal_back");
        let (_, test) = test.split_once("::").unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", test])
            .env(PANICS, "")
            .stdin(Stdio::from(program))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("raw: true") && said.contains("a vCPU's mistake"), "{said}");
        assert_eq!((child.wait().unwrap().code(), modes()), (Some(4), before));
    }

    fn panic_with_a_raw_terminal() {
        end_on_panic(console::restore_terminal);
        let mut console = console::Console::open(&config::Console::Stdio).unwrap();
        console.take_terminal();
        let raw = !tcgetattr(io::stdin()).unwrap().local_modes.contains(LocalModes::ICANON);
        print_message(format_args!("raw: {raw}"));
        let _ = std::thread::spawn(|| panic!("a vCPU's mistake")).join();
    }
}
