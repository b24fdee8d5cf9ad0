//! `egm-plug`: a machine as `egm-vmm run` starts it, with a socket at which functions of the host are plugged in and out, for
//! tests. A connection is a question of one line and an answer of one line:
//!
//! ```text
//! plug ID FUNCTION      ok 1 (the slot)
//! unplug ID             ok Orderly | ok Surprise
//! …                     error WHY
//! ```

use std::error::Error;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use clap::Parser;
use egm_report::program::log::Log;
use egm_vmm::config::{self, Overrides};
use egm_vmm::error::Chain;
use egm_vmm::facts::{self, Scope};
use egm_vmm::hotplug::{Handle, HotplugError, Source, UNPLUG_TIMEOUT};
use egm_vmm::launch::Placement;
use egm_vmm::machine;
use egm_vmm::reserve::Servers;
use egm_vmm::resources::Resources;

/// A machine for tests: words on a socket plug its functions in and out.
#[derive(Debug, Parser)]
struct Arguments {
    /// The machine's configuration.
    config: PathBuf,
    /// Socket for requests; an old one is replaced.
    socket: PathBuf,
    #[command(flatten)]
    log: Log,
}

/// Longest question.
const MAX_LINE: u64 = 256;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    arguments.log.start();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            let causes = std::iter::successors(error.source(), |cause| (**cause).source());
            eprintln!("error: {}", causes.fold(error.to_string(), |all, cause| format!("{all}: {cause}")));
            ExitCode::from(3)
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let spec = config::load_with(&arguments.config, &Overrides::default())?;
    let scope = Scope::of(&spec);
    let Placement { facts, plan, leases } = Placement::take(&spec, || facts::of_host(&scope), &|_, _| {})?;
    let resources = Resources::open(&plan, &facts, &leases, Servers::default(), &|_, _| {})?;
    let machine = machine::build(&plan, resources, &Arc::default())?;
    let handle = machine.hotplug().ok_or("the machine has no hot-plug port")?;
    match std::fs::remove_file(&arguments.socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let listener = UnixListener::bind(&arguments.socket)?;
    thread::spawn(move || listener.incoming().flatten().try_for_each(|client| serve(client, &handle)));
    let ended = machine.run(&|_| ());
    eprintln!("{}", ended.reason);
    Ok(ended.reason.remedy().map_or(ExitCode::SUCCESS, |remedy| remedy.blame.into()))
}

/// Answers one request. A client that does not read the answer does not end the machine.
fn serve(client: UnixStream, handle: &Handle) -> io::Result<()> {
    let mut line = String::new();
    if BufReader::new(&client).take(MAX_LINE).read_line(&mut line).is_ok() {
        let answer = match answer(line.trim(), handle) {
            Ok(answer) => format!("ok {answer}"),
            Err(why) => format!("error {why}"),
        };
        let _ = writeln!(&client, "{answer}");
    }
    Ok(())
}

fn answer(line: &str, handle: &Handle) -> Result<String, String> {
    match line.split_whitespace().collect::<Vec<_>>().as_slice() {
        ["plug", id, function] => {
            let function = function.parse().map_err(|error| format!("{function}: {error}"))?;
            let slot = handle.plug(id, Source::Host(function));
            slot.map(|slot| slot.to_string()).map_err(|error| one_line(&error))
        }
        ["unplug", id] => {
            let removal = handle.unplug(id, UNPLUG_TIMEOUT).map_err(|error| one_line(&error))?;
            Ok(format!("{removal:?}"))
        }
        _ => Err(format!("no such question: {line}")),
    }
}

/// An answer has one line.
fn one_line(error: &HotplugError) -> String {
    Chain(error)
        .to_string()
        .trim_start_matches("error: ")
        .lines()
        .map(str::trim)
        .collect::<Vec<_>>()
        .join("; ")
}
