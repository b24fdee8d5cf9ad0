//! `egm-vmm plan`: every address of a machine, before and without starting it.

use std::path::PathBuf;
use std::process::ExitCode;

use egm_device::trust::parse_name;
use egm_report::program::Outcome;
use egm_report::show::print;

use super::form::Form;
use crate::config::Overrides;
use crate::facts::{self, Scope};
use crate::plan::{self, Screen, View};

/// Show where everything of a virtual machine will be: memory map, PCI tree, NUMA nodes
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// Configuration of the machine; "-" is standard input
    #[arg(value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    form: Form,
    /// What the target host offers, as "egm-vmm facts" recorded it; the default is this host
    #[arg(long, value_name = "FILE")]
    facts: Option<PathBuf>,
    /// Trust domain of the machine: machines of one domain share a region that a GPU reaches
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    trust_domain: Option<String>,
    /// Print JSON
    #[arg(long, conflicts_with = "html")]
    json: bool,
    /// Print a page for a browser
    #[arg(long)]
    html: bool,
    /// Print a row for each NUMA node; the default is one row for equal nodes
    #[arg(long, conflicts_with_all = ["json", "nccl"])]
    wide: bool,
    /// Print NCCL's topology file for the guest, which NCCL_TOPO_FILE names there
    #[arg(long, conflicts_with_all = ["json", "html"])]
    nccl: bool,
}

const EXAMPLE: &str = "\
Examples: this host; a Grace machine, from any host; the same as a page; how NCCL should see GPUs and NICs; \
a document of cloud-hypervisor

  egm-vmm plan configs/smoke.json
  egm-vmm plan configs/grace-1gpu-egm.json --facts configs/facts/grace.json
  egm-vmm plan configs/grace-1gpu-egm.json \\
    --facts configs/facts/grace.json --html > plan.html
  egm-vmm plan configs/hgx-h200.json \\
    --facts configs/facts/hgx-h200.json --nccl > topology.xml
  egm-vmm plan --from cloud-hypervisor create.json

Nothing is opened or started, and /dev/kvm is not needed. Record another host's facts there: egm-vmm facts > facts.json";

pub(super) fn run(args: &Args) -> Outcome {
    let overrides = Overrides { trust_domain: args.trust_domain.clone(), ..Overrides::default() };
    let spec = args.form.load(&args.config, &overrides, args.facts.as_deref())?;
    let facts = match &args.facts {
        Some(path) => facts::load(path),
        None => facts::of_host(&Scope::of(&spec)),
    };
    let facts = facts?;
    let plan = plan::plan(&spec, &facts)?;
    let view = View { facts: &facts, screen: Screen::of_stdout(), wide: args.wide };
    print(if args.json {
        plan::json(&plan)
    } else if args.html {
        plan::html(&plan, &view)
    } else if args.nccl {
        plan::nccl(&plan, &facts)
    } else {
        plan::text(&plan, &view)
    });
    Ok(ExitCode::SUCCESS)
}
