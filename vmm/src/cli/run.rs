//! `egm-vmm run`: from a configuration file to a guest that has ended.

use std::path::PathBuf;
use std::process::ExitCode;

use super::Outcome;
use crate::config::{self, Overrides};
use crate::error::{Blame, Report};
use crate::facts::{self, Functions};
use crate::machine::{self, ExitReason};
use crate::plan;
use crate::resources::Resources;

/// Starts the virtual machine of a configuration file and waits for its end.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The configuration (configs/schema.json describes it).
    file: PathBuf,
    /// Kernel in place of the file's "boot"."kernel".
    #[arg(long)]
    kernel: Option<PathBuf>,
    /// Initial RAM disk in place of the file's "boot"."initramfs".
    #[arg(long)]
    initramfs: Option<PathBuf>,
    /// Text added to the file's "boot"."cmdline".
    #[arg(long)]
    append: Option<String>,
}

/// The guest did not end as it should.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
struct Ended {
    reason: ExitReason,
    blame: Blame,
}

impl Report for Ended {
    fn blame(&self) -> Blame {
        self.blame
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    let overrides = Overrides {
        kernel: args.kernel.clone(),
        initramfs: args.initramfs.clone(),
        append: args.append.clone(),
    };
    let spec = config::load_with(&args.file, &overrides)?;
    let facts = facts::of_host(&Functions::of(&spec))?;
    let plan = plan::plan(&spec, &facts)?;
    let resources = Resources::open(&plan, &facts)?;
    if let Some(name) = resources.console.pty_name() {
        eprintln!("console: {name}");
    }
    let machine = machine::build(&plan, resources)?;
    let reason = machine.run();
    match reason.blame() {
        None => Ok(ExitCode::SUCCESS),
        Some(blame) => Err(Box::new(Ended { reason, blame })),
    }
}
