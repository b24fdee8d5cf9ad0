//! `egm-vmm bind`: gives host functions to VFIO, and back.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use egm_address::PciAddress;
use egm_report::program::Outcome;
use egm_report::show::{Screen, Side, Table, print};
use egm_vfio::bind::{BindError, Binder, Change};
use egm_vfio::topology::GroupError;

use crate::error::{Blame, Remedy, Report};

/// Bind host functions to a VFIO driver, or back to the driver that they had
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// Host functions, such as 0000:41:00.0, or 41:00.0 in segment 0
    #[arg(value_name = "FUNCTION", required = true)]
    functions: Vec<PciAddress>,
    /// Driver to bind to [default: the kernel's VFIO driver for each function, usually vfio-pci]
    #[arg(long, value_name = "NAME")]
    driver: Option<String>,
    /// Bind the other functions of their IOMMU groups too
    #[arg(long)]
    group: bool,
    /// Bind them to the drivers that they had before
    #[arg(long, conflicts_with_all = ["driver", "group"])]
    undo: bool,
    /// Folder with a copy of a host's /sys to write into instead, without effect on hardware
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    root: PathBuf,
}

const EXAMPLE: &str = "\
Examples: a GPU for a guest; a NIC with vfio-pci and not its own VFIO driver; both back to the host

  egm-vmm bind 0000:41:00.0
  egm-vmm bind 0000:42:00.0 --driver vfio-pci
  egm-vmm bind 0000:41:00.0 0000:42:00.0 --undo

Needs root. Loads the driver's module (modprobe). A second run changes nothing. Refuses a function that has a mounted \
disk or the default route. Records the previous drivers in /run/egm-vmm/bind until --undo or a reboot.

Exit codes:

  0  all functions have the driver
  2  a function is a bridge, or the command line is wrong
  3  the host lacks something";

/// A [`BindError`] as the command line ends with it.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct Refused(BindError);

impl Report for Refused {
    fn remedy(&self) -> Remedy {
        let blame = match &self.0 {
            BindError::Group(GroupError::Bridge { .. }) | BindError::Name { .. } => Blame::Configuration,
            _ => Blame::Host,
        };
        Remedy { blame, help: self.0.help() }
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    let binder = Binder::new(Path::new(&args.root));
    let changes = if args.undo {
        binder.undo(&args.functions)
    } else {
        binder.bind(&args.functions, args.driver.as_deref(), args.group)
    };
    let mut table = Table::new(&[Side::Left; 3], &["function", "had", "has"]);
    for Change { function, before, now } in changes.map_err(Refused)? {
        let name = |driver: Option<String>| driver.unwrap_or_else(|| "no driver".to_owned());
        table.row(None, vec![function.to_string(), name(before), name(now)]);
    }
    let mut out = String::new();
    table.write(&mut out, Screen::of_stdout());
    print(out);
    Ok(ExitCode::SUCCESS)
}
