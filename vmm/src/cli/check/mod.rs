//! `egm-vmm check`: whether a host can run a machine, whether its functions can be given to a guest, and how they reach each
//! other.

mod inspect;
mod machine;
mod memory;
mod model;
mod names;
mod peers;
mod proc_tables;
mod row;
mod text;

use std::path::{Path, PathBuf};

use egm_address::PciAddress;
use egm_device::trust::parse_name;
use egm_report::program::Outcome;
use egm_report::show::{Screen, print};
use egm_vfio::host::HostFunction;
use egm_vfio::topology::is_vfio_driver;

use self::machine::Machine;
use self::model::{Checked, NotOne};
use super::form::Form;
use crate::config::{DeviceKind, Overrides};
use crate::error::Report;
use crate::facts::{self, Facts, Scope};
use crate::plan;

/// Check that a host can run a machine, or assign its functions to one
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// A configuration ("-" is standard input), or host functions [default: all]
    #[arg(value_name = "CONFIG|FUNCTION")]
    what: Vec<String>,
    #[command(flatten)]
    form: Form,
    /// Trust domain of the machine, as for "egm-vmm run"
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    trust_domain: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Read a copy of a host's /proc and /sys in FOLDER
    #[arg(long, value_name = "FOLDER", conflicts_with = "facts")]
    root: Option<PathBuf>,
    /// Read what "egm-vmm facts" recorded of a host
    #[arg(long, value_name = "FILE")]
    facts: Option<PathBuf>,
}

const EXAMPLE: &str = "\
Before a machine starts, check all that its configuration needs: kernel, disks,
taps, sockets, KVM, memory, slices and functions. The machine's files are only
read, and no socket is connected. The ledger is read under its lock:

  egm-vmm check vm.json

The same for a document that cloud-hypervisor's API takes:

  egm-vmm check --from cloud-hypervisor create.json

Before a configuration is written, check which host functions can be assigned,
and how they reach each other: all GPUs, NICs, NVMe disks and functions that are
bound to VFIO, or these two:

  egm-vmm check
  egm-vmm check 0000:41:00.0 0000:42:00.0

With --facts or --root another host is judged, without files and sockets, which
only that host could show:

  egm-vmm check configs/hgx-h200.json --facts configs/facts/hgx-h200.json

Root also sees the ACS and ATS settings of switches.

Exit codes: 0 nothing stands in the way; 2 the configuration is wrong, or names
a file that cannot be used; 3 the host lacks something. The last lines name what
stands in the way, each with its remedy.";

pub(super) fn run(args: &Args) -> Outcome {
    let checked = match args.what.as_slice() {
        [file] if args.form.is_foreign() || is_configuration(file) => of_machine(args, Path::new(file))?,
        words if args.form.is_foreign() => return Err(NotOne::Documents { count: words.len() }.into()),
        [] => {
            let facts = read(args, &Scope::All)?;
            let wanted: Vec<PciAddress> =
                facts.functions.iter().filter(|f| is_interesting(f)).map(|f| f.address).collect();
            Checked::of_functions(&facts.functions, &wanted)
        }
        texts => {
            // The first that is no function is an error with the form of one.
            let wanted = texts.iter().map(|text| text.parse()).collect::<Result<Vec<PciAddress>, _>>();
            let wanted = wanted.map_err(NotOne::Function)?;
            let facts = read(
                args,
                &Scope::Only { functions: wanted.clone(), regions: false, huge_files: false, assigns: true },
            )?;
            Checked::of_functions(&facts.functions, &wanted)
        }
    };
    print(if args.json {
        // Every map has string keys, so nothing of it can fail to be JSON.
        serde_json::to_string_pretty(&checked).unwrap_or_default() + "\n"
    } else {
        text::text(&checked, Screen::of_stdout())
    });
    Ok(row::exit_code(&checked.rows))
}

/// All that the machine of the configuration `file` needs.
fn of_machine(args: &Args, file: &Path) -> Result<Checked, Box<dyn Report>> {
    let overrides = Overrides { trust_domain: args.trust_domain.clone(), ..Overrides::default() };
    let spec = args.form.load(file, &overrides, args.facts.as_deref())?;
    let facts = read(args, &Scope::of(&spec))?;
    let planned = plan::plan(&spec, &facts);
    let is_here = args.facts.is_none() && args.root.is_none();
    let machine = Machine { spec: &spec, facts: &facts, plan: planned.as_ref(), is_here };
    let function = |kind: &DeviceKind| match kind {
        DeviceKind::Vfio { function, .. } => Some(*function),
        _ => None,
    };
    let wanted: Vec<PciAddress> = spec.devices.iter().filter_map(|device| function(&device.kind)).collect();
    let mut checked = Checked::of_functions(&facts.functions, &wanted);
    checked.rows.splice(..0, machine.rows());
    let passthrough = planned.as_ref().ok().and_then(|plan| plan.passthrough.as_ref());
    checked.pinned = passthrough.map(|passthrough| passthrough.pinned);
    checked.machine = Some(spec.name.clone());
    Ok(checked)
}

/// Whether a word alone names a configuration, and not a function.
fn is_configuration(word: &str) -> bool {
    let path = Path::new(word);
    let is_path = word == "-"
        || path.exists()
        || path.components().count() > 1
        || path.extension().is_some_and(|end| end == "json");
    word.parse::<PciAddress>().is_err() && is_path
}

fn read(args: &Args, scope: &Scope) -> Result<Facts, facts::FactsError> {
    match (&args.facts, &args.root) {
        (Some(file), _) => facts::load(file),
        (None, Some(root)) => facts::read(root, scope),
        (None, None) => facts::of_host(scope),
    }
}

/// Whether an operator may want to assign it.
fn is_interesting(function: &HostFunction) -> bool {
    let by_class = matches!(function.class >> 16, 0x02 | 0x03 | 0x12) || function.class >> 8 == 0x0108;
    by_class || function.driver.as_deref().is_some_and(is_vfio_driver)
}
