//! `egm-vmm facts`: what this host offers, as JSON for `--facts` of both programs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use egm_report::program::Outcome;
use egm_report::show::print;

use crate::facts::{self, Scope};
use crate::reserve::Servers;

/// Record this host as JSON for --facts of both programs: processors, memory, devices
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// Folder with a copy of a host's /proc and /sys, to read instead of this host
    #[arg(long, value_name = "FOLDER")]
    root: Option<PathBuf>,
    /// Description of the machine [default: the name of the host]
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// vfio-user server to connect to, for the sizes of its BARs; a server for one client ends afterwards
    #[arg(long = "server", value_name = "SOCKET", conflicts_with = "root")]
    servers: Vec<PathBuf>,
}

const EXAMPLE: &str = "\
Examples: this host, and a split of its memory planned elsewhere; a host on
which egm-vmm cannot run, from a copy of its files

  egm-vmm facts > facts.json
  egm-device carve advise --hypervisor 64GiB --facts facts.json
  egm-vmm facts --root COPY > facts.json

Run it as root: the kernel shows the addresses of memory to root only. The
record also has the kernel's command line.";

pub(super) fn run(args: &Args) -> Outcome {
    let read = |root: &PathBuf| facts::read(Path::new(root), &Scope::All);
    let facts = args.root.as_ref().map_or_else(|| facts::of_host(&Scope::All), read);
    let mut facts = facts?;
    let mut servers = Servers::default();
    args.servers.iter().try_for_each(|socket| servers.connect(socket))?;
    facts.servers = servers.facts();
    if let Some(description) = &args.description {
        facts.description.clone_from(description);
    }
    // Every map has string keys, so nothing of it can fail to be JSON.
    print(serde_json::to_string_pretty(&facts).unwrap_or_default() + "\n");
    Ok(ExitCode::SUCCESS)
}
