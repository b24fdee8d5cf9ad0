//! `egm-vmm export`: a machine's configuration in the words of another monitor.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::export::{Guest, Monitor, Options, Output, export, load};
use egm_device::host::Host;
use egm_report::program::{Outcome, print_json};
use egm_report::show::print;
use serde::Serialize;

/// Write a machine of egm-vmm for another monitor
///
/// Starts nothing. Notes on standard error list what the monitor cannot express and what must be done before the start.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Monitor to write for
    #[arg(value_name = "MONITOR")]
    monitor: Monitor,
    /// Configuration of the machine, as for "egm-vmm run"; "-" is standard input
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Use options of NVIDIA's builds of QEMU and libvirt, through which a GPU's driver finds its EGM
    #[arg(long)]
    nvidia: bool,
    /// UEFI image for Arm guests [default: Debian's]
    #[arg(long, value_name = "FILE")]
    firmware: Option<String>,
    /// Folder with the sockets of "egm-device serve"
    #[arg(long, value_name = "FOLDER", default_value = "/run/egm-serve")]
    sockets: PathBuf,
    /// Print JSON: the arguments of the command or the XML, and the notes
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: Host,
}

const EXAMPLES: &str = "\
Examples: QEMU's command line for this host; a libvirt domain for a recorded host

  egm-vmm export qemu --config vm.json > vm.sh
  egm-vmm export libvirt --config configs/gh200.json \\
    --facts facts.json > domain.xml

A command line is quoted for a shell: start it with \"sh vm.sh\".";

/// Output of `--json`: a command or XML, depending on the monitor, and the notes.
#[derive(Debug, Serialize)]
struct Record<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<Vec<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    xml: Option<&'a str>,
    notes: &'a [String],
}

pub(super) fn run(args: &Args) -> Outcome {
    let machine = load(&args.config)?;
    let guest = Guest::new(machine, &args.host.survey()?, args.sockets.clone())?;
    let options = Options { nvidia: args.nvidia, firmware: args.firmware.clone() };
    let export = export(&guest, args.monitor, &options)?;
    if args.json {
        let (command, xml) = match &export.output {
            Output::Command(command) => (Some(command.words().collect()), None),
            Output::Xml(xml) => (None, Some(xml.as_str())),
        };
        print_json(&Record { command, xml, notes: &export.notes });
        return Ok(ExitCode::SUCCESS);
    }
    export.notes.iter().for_each(|note| tracing::info!("{note}"));
    match &export.output {
        Output::Command(command) => print(command.to_string()),
        Output::Xml(xml) => print(xml),
    }
    Ok(ExitCode::SUCCESS)
}
