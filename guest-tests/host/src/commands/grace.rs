//! `egm-lab grace`: a shell or a command in the emulated Grace host.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::engine::error::LabError;
use crate::engine::logs;
use crate::engine::scenario::GraceKernel;
use crate::hosts::l1::{self, Host};
use crate::hosts::qemu::Clock;
use crate::images::cache::Cache;
use crate::images::emulator;
use crate::images::initramfs;
use crate::images::kernel::{self, StockKernel};
use crate::images::tools::Tools;

/// Default folder for its files.
const FOLDER: &str = ".lab/grace";
/// Kernel word that requests a shell.
const SHELL: &str = "lab.shell";
/// File in its folder with the command to run instead of the runner.
const COMMAND: &str = "command";
/// Among its tools: a guest's initial root, with the agent as init.
const INITRAMFS: &str = "guest.cpio";

/// The emulated Grace host: what is started in it, and from which folder.
#[derive(Debug, Args)]
pub(crate) struct GraceArguments {
    #[command(subcommand)]
    verb: Verb,
    /// Folder that the host mounts as /share.
    #[arg(long, global = true, value_name = "DIR", default_value = FOLDER)]
    share: PathBuf,
    /// Kernel, instead of the one that is built and cached.
    #[arg(long, global = true, value_name = "FILE", conflicts_with = "stock")]
    kernel: Option<PathBuf>,
    /// Use a kernel with pages of 64 KiB, built and cached like the default.
    #[arg(long, global = true, conflicts_with_all = ["kernel", "stock"])]
    large_pages: bool,
    /// Use Debian's kernel: no build, but no nvgrace-gpu, EGM and iommufd either.
    #[arg(long, global = true)]
    stock: bool,
    /// Add GPUs with NVIDIA's id, a copy engine and a reset, behind a virtio-iommu instead of the SMMUv3.
    #[arg(long, global = true, alias = "outside")]
    vfio_user_gpus: bool,
}

impl GraceArguments {
    fn kind(&self) -> GraceKernel {
        match (self.stock, self.large_pages) {
            (true, _) => GraceKernel::Debian,
            (_, true) => GraceKernel::LargePages,
            _ => GraceKernel::Own,
        }
    }
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start a shell; Ctrl-D, exit or Ctrl-A X ends the machine.
    Shell,
    /// Run a command by the host's shell; the exit code is the command's.
    Run {
        /// Command and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// Starts the emulated host with a shell or a command.
pub(crate) fn run(arguments: &GraceArguments) -> Result<ExitCode, LabError> {
    emulator::supported()?;
    let cache = Cache::open()?;
    let share = &arguments.share;
    fs::create_dir_all(share).map_err(LabError::file("make", share))?;
    let tools = share.join("tools");
    let guest = Tools::of_grace(&cache)?;
    guest.copy_to(&tools)?;
    let image = tools.join(INITRAMFS);
    if guest.agent.exists() {
        let bytes = initramfs::guest(&guest.agent, None, &guest.kernel)?;
        fs::write(&image, bytes).map_err(LabError::file("write", &image))?;
    }
    let kernel = match &arguments.kernel {
        Some(path) => kernel_of(path, share)?,
        None => kernel::grace(arguments.kind(), &cache, false)?,
    };
    let plugged = arguments.vfio_user_gpus;
    let host = Host {
        kernel: &kernel,
        cache: &cache,
        plugged,
        grace: true,
        wire: false,
        clock: Clock::Real,
        gigantic: false,
    };
    match &arguments.verb {
        Verb::Shell => {
            logs::remove(&share.join(COMMAND))?;
            let (mut command, cards) = l1::emulate(&host, share, SHELL)?;
            if cards.servers.is_empty() {
                // `exec` replaces this program and returns only on error.
                return Err(LabError::file("run", "QEMU")(command.exec()));
            }
            command.status().map_err(LabError::file("run", "QEMU"))?;
            Ok(ExitCode::SUCCESS)
        }
        Verb::Run { words } => {
            let path = share.join(COMMAND);
            fs::write(&path, words.join(" ")).map_err(LabError::file("write", &path))?;
            logs::remove(&share.join("exit"))?;
            let (mut command, _cards) = l1::emulate(&host, share, "")?;
            command.status().map_err(LabError::file("run", "QEMU"))?;
            let code =
                fs::read_to_string(share.join("exit")).ok().and_then(|text| text.trim().parse::<u8>().ok());
            code.map(ExitCode::from).ok_or_else(|| LabError::Content {
                what: "the emulated Grace host".into(),
                problem: "it ended before the command did".into(),
            })
        }
    }
}

/// A kernel of the user's, without modules.
fn kernel_of(image: &Path, share: &Path) -> Result<StockKernel, LabError> {
    let kernel = StockKernel { directory: share.join("kernel") };
    let modules = kernel.directory.join("modules");
    fs::create_dir_all(&modules).map_err(LabError::file("make", &modules))?;
    let order = modules.join("order");
    fs::write(&order, "").map_err(LabError::file("write", &order))?;
    fs::copy(image, kernel.image()).map_err(LabError::file("copy", image))?;
    Ok(kernel)
}
