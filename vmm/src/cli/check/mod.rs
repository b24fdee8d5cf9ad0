//! `egm-vmm check`: whether host functions can be given to a guest, and how they reach each other.

mod model;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use egm_address::PciAddress;
use egm_device::trust::parse_name;
use egm_report::program::Outcome;
use egm_report::show::{Screen, print};
use egm_vfio::dma::Memlock;
use egm_vfio::host::HostFunction;
use egm_vfio::topology::is_vfio_driver;

use crate::config::{self, DeviceKind, Overrides};
use crate::facts::{self, Facts, Scope};
use crate::plan::{self, Plan};

/// Shows what stands in the way of assigning host functions, and which of them reach each other
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// A configuration ("-" is standard input), or host functions [default: all GPUs, NICs, NVMe disks and functions bound to VFIO]
    #[arg(value_name = "CONFIG|FUNCTION")]
    what: Vec<String>,
    /// Trust domain of the machine: machines of one domain share a region that a GPU reaches
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    trust_domain: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Read a copy of a host's /proc and /sys in this folder instead
    #[arg(long, value_name = "FOLDER", conflicts_with = "facts")]
    root: Option<PathBuf>,
    /// What the host offers, as "egm-vmm facts" recorded it
    #[arg(long, value_name = "FILE")]
    facts: Option<PathBuf>,
}

const EXAMPLE: &str = "\
Examples: everything that could be passed; two functions; what a machine needs

  egm-vmm check
  egm-vmm check 0000:41:00.0 0000:42:00.0
  egm-vmm check configs/hgx-h200.json --facts configs/facts/hgx-h200.json

As root it also sees the ACS and ATS settings of switches. Exit codes: 0 all of them can be given to a guest now; 3 the
host lacks something, which the last lines name with its remedy.";

pub(super) fn run(args: &Args) -> Outcome {
    let addresses: Vec<PciAddress> = args.what.iter().filter_map(|text| text.parse().ok()).collect();
    let checked = match args.what.as_slice() {
        [file] if addresses.is_empty() && is_path(file) => {
            let overrides = Overrides { trust_domain: args.trust_domain.clone(), ..Overrides::default() };
            let spec = config::load_with(Path::new(file), &overrides)?;
            let facts = read(args, &Scope::of(&spec))?;
            let plan = plan::plan(&spec, &facts)?;
            let function = |kind: &DeviceKind| match kind {
                DeviceKind::Vfio { function, .. } => Some(*function),
                _ => None,
            };
            let wanted: Vec<PciAddress> =
                spec.devices.iter().filter_map(|device| function(&device.kind)).collect();
            judge(args, &facts, &wanted, Some(&plan))
        }
        [] => {
            let facts = read(args, &Scope::All)?;
            let wanted: Vec<PciAddress> =
                facts.functions.iter().filter(|f| is_interesting(f)).map(|f| f.address).collect();
            judge(args, &facts, &wanted, None)
        }
        texts => {
            // The first that is no function is an error with the form of one.
            let wanted = texts.iter().map(|text| text.parse()).collect::<Result<Vec<PciAddress>, _>>();
            let wanted = wanted.map_err(model::NotOne)?;
            let facts = read(
                args,
                &Scope::Only { functions: wanted.clone(), regions: false, huge_files: false, assigns: true },
            )?;
            judge(args, &facts, &wanted, None)
        }
    };
    let usable = checked.problems.is_empty();
    print(if args.json {
        // Every map has string keys, so nothing of it can fail to be JSON.
        serde_json::to_string_pretty(&checked).unwrap_or_default() + "\n"
    } else {
        text::text(&checked, Screen::of_stdout())
    });
    Ok(if usable { ExitCode::SUCCESS } else { ExitCode::from(3) })
}

/// Whether a word that is no function is meant as a file.
fn is_path(word: &str) -> bool {
    let path = Path::new(word);
    word == "-"
        || path.exists()
        || path.components().count() > 1
        || path.extension().is_some_and(|end| end == "json")
}

fn read(args: &Args, scope: &Scope) -> Result<Facts, facts::FactsError> {
    match (&args.facts, &args.root) {
        (Some(file), _) => facts::load(file),
        (None, Some(root)) => facts::read(root, scope),
        (None, None) => facts::of_host(scope),
    }
}

/// The memlock limit counts where this process would be the machine.
fn judge(args: &Args, facts: &Facts, wanted: &[PciAddress], plan: Option<&Plan>) -> model::Checked {
    let here = args.facts.is_none() && args.root.is_none();
    let passthrough = plan.and_then(|plan| plan.passthrough.as_ref());
    model::Checked::new(&facts.functions, wanted, passthrough, here.then(Memlock::of_process))
}

/// Whether an operator may want to assign it.
fn is_interesting(function: &HostFunction) -> bool {
    let by_class = matches!(function.class >> 16, 0x02 | 0x03 | 0x12) || function.class >> 8 == 0x0108;
    by_class || function.driver.as_deref().is_some_and(is_vfio_driver)
}
