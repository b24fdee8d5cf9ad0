//! `egm-lab`: boots a virtual machine, collects the guest's report about itself, and judges it.
//!
//! On a host with a KVM that runs Linux, scenarios run on that host. Elsewhere QEMU boots an emulated host (L1), and
//! this same program runs the scenarios inside it: there is one runner, and the lab only provides its machine.

mod assigned;
mod bench;
mod commands;
mod engine;
mod faults;
mod grace;
mod hosts;
mod images;
mod mutants;
mod peers;
mod rdma;
mod runner;
mod scenarios;
mod skips;
mod slices;

use std::error::Error;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use crate::bench::BenchArguments;
use crate::commands::grace::GraceArguments;
use crate::commands::run_config::RunConfigArguments;
use crate::commands::session::RunArguments;
use crate::engine::error::LabError;
use crate::engine::scenario::GraceKernel;
use crate::faults::FaultsArguments;
use crate::hosts::capability::{Host, Where};
use crate::images::cache::Cache;
use crate::images::emulator::Emulator;
use crate::images::initramfs;
use crate::images::kernel;
use crate::mutants::MutantsArguments;
use crate::skips::SkipsArguments;
use crate::slices::grant;
use crate::slices::owners;

/// Boots virtual machines and judges the reports of their guests.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Report what this host can run; exit code 3 when it cannot run a guest at all.
    Check {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Get a kernel into the cache, and print its path.
    Kernel {
        /// Kernel to get.
        which: Which,
        /// Look for a newer one even when the cache has one of the last 30 days.
        #[arg(long)]
        refresh: bool,
    },
    /// Run scenarios; the last line counts their passed, failed and skipped checks.
    Run(RunArguments),
    /// Boot a configuration of your own in the emulated PC, where /dev/kvm runs no stock kernels; Ctrl-C ends it.
    RunConfig(RunConfigArguments),
    /// Print the skips of a test log; exit code 1 when guest-tests/skips.json does not allow one of them.
    Skips(SkipsArguments),
    /// Plant faults in our programs, one at a time; exit code 1 when the test or scenario of one stays green.
    Faults(FaultsArguments),
    /// Run the mutation tests of the pure cores; exit code 1 when a mutant survives that guest-tests/mutants.json does
    /// not list, or less than 95 % of a whole core's viable mutants are caught.
    Mutants(MutantsArguments),
    /// Measure start, memory, prefault and a guest's boot, and QEMU's in the same run.
    Bench(BenchArguments),
    /// Boot configs/demo.json, and print the report of its guest.
    Demo,
    /// Whether the slice that `egm-device carve grant` passes is zero; exit code 1 when it is not.
    #[command(hide = true)]
    Zeros,
    /// The emulated Grace host (arm64): a shell or a command in it.
    Grace(GraceArguments),
    /// Owner of a slice that `egm-device carve grant` provides: see `slices/owners.rs`.
    #[command(hide = true)]
    SliceOwner {
        /// Word that it writes.
        mark: u64,
    },
    /// Run Debian's newest QEMU for x86_64, from the cache.
    Qemu {
        /// Its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Write a guest's initial root: the agent, the kernel's modules and the plan.
    Initramfs {
        /// Output of `egm-vmm plan --json`.
        #[arg(long)]
        plan: Option<PathBuf>,
        /// Path of the agent.
        #[arg(long)]
        agent: PathBuf,
        /// File to write.
        #[arg(long)]
        out: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Which {
    /// The emulated host's: Debian's stable kernel and the modules that the lab needs.
    L1,
    /// A kernel for the emulated host, built from Debian's newest linux-source, with iommufd, VFIO cdev and rdma_rxe.
    Built,
    /// The guest's: Debian's stable cloud kernel and the modules that a virtio guest needs.
    Guest,
    /// The emulated Grace host's (arm64), built from the same source: KVM, SMMUv3, nvgrace-gpu, the double of nvgrace-egm.
    Grace,
    /// The same with pages of 64 KiB.
    #[value(name = "grace-64k")]
    Grace64k,
    /// Its guest's: Debian's newest for arm64.
    Arm64,
    /// Debian's stable one for arm64.
    Arm64Stable,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                eprintln!("  caused by: {cause}");
                source = cause.source();
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(verb: Verb) -> Result<ExitCode, LabError> {
    match verb {
        Verb::Check { json } => check(json),
        Verb::Kernel { which, refresh } => {
            let cache = Cache::open()?;
            let path = match which {
                Which::L1 => kernel::l1(&cache, refresh)?.directory,
                Which::Built => kernel::built(&cache, refresh)?.image(),
                Which::Guest => kernel::guest(&cache, refresh)?.directory,
                Which::Grace => kernel::grace(GraceKernel::Own, &cache, refresh)?.image(),
                Which::Grace64k => kernel::grace(GraceKernel::LargePages, &cache, refresh)?.image(),
                Which::Arm64 => kernel::arm64(&cache, refresh)?.directory,
                Which::Arm64Stable => kernel::arm64_stable(&cache, refresh)?.directory,
            };
            println!("{}", path.display());
            Ok(ExitCode::SUCCESS)
        }
        Verb::Run(arguments) => commands::session::run(&arguments),
        Verb::RunConfig(arguments) => commands::run_config::run(&arguments),
        Verb::Skips(arguments) => skips::run(&arguments),
        Verb::Faults(arguments) => faults::run(&arguments),
        Verb::Mutants(arguments) => mutants::run(&arguments),
        Verb::Bench(arguments) => bench::run(&arguments),
        Verb::Zeros => Ok(ExitCode::from(u8::from(!grant::check_zeros()?))),
        Verb::SliceOwner { mark } => owners::own(mark).map(|()| ExitCode::SUCCESS),
        Verb::Demo => commands::session::demo(),
        Verb::Grace(arguments) => commands::grace::run(&arguments),
        Verb::Qemu { arguments } => {
            // `exec` replaces this program and returns only on error.
            let error = Emulator::of(&Cache::open()?)?.command().args(arguments).exec();
            Err(LabError::file("run", "QEMU")(error))
        }
        Verb::Initramfs { plan, agent, out } => {
            let plan =
                plan.map(|path| std::fs::read(&path).map_err(LabError::file("read", path))).transpose()?;
            let kernel = kernel::guest(&Cache::open()?, false)?;
            let bytes = initramfs::guest(&agent, plan.as_deref(), &kernel)?;
            std::fs::write(&out, bytes).map_err(LabError::file("write", out))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn check(json: bool) -> Result<ExitCode, LabError> {
    let cache = Cache::open().ok();
    let host = Host::detect(cache.as_ref());
    if json {
        let text = serde_json::to_string_pretty(&host)
            .map_err(|error| LabError::Content { what: "findings".into(), problem: error.to_string() })?;
        println!("{text}");
    } else {
        for finding in &host.findings {
            let mark = if finding.present { "yes" } else { "no" };
            println!("{:<14} {mark:<4} {}", finding.name, finding.detail);
        }
        println!(
            "{:<14} {}",
            "guests run",
            match host.place {
                Some(Where::Kvm) => "on this machine's /dev/kvm",
                Some(Where::Lab) => "in the lab: an emulated host under QEMU",
                None => "nowhere: see the lines that say no",
            }
        );
    }
    Ok(ExitCode::from(if host.place.is_some() { 0 } else { 3 }))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    /// The folders, from the lowest: those of one row do not use each other.
    const FOLDERS: [&[&str]; 10] = [
        &["engine"],
        &["images"],
        &["hosts"],
        &["skips"],
        &["runner"],
        &["rdma", "slices"],
        &["assigned"],
        &["grace", "peers"],
        &["scenarios"],
        &["bench", "commands", "faults", "mutants"],
    ];
    /// The one use within a row: a planted fault's scenario runs as by `egm-lab run`.
    const EXCEPTION: (&str, &str) = ("faults", "commands");

    fn row(folder: &str) -> usize {
        let row = FOLDERS.iter().position(|row| row.contains(&folder));
        row.unwrap_or_else(|| panic!("{folder} is in no row"))
    }

    /// Folders that the production code of `text` names.
    fn used(text: &str) -> BTreeSet<&str> {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let paths = code.flat_map(|line| line.split("crate::").skip(1));
        paths.filter_map(|path| path.split(|c: char| !c.is_alphanumeric() && c != '_').next()).collect()
    }

    fn files(folder: &Path) -> Vec<String> {
        let mut texts = Vec::new();
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                texts.append(&mut files(&path));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                texts.push(fs::read_to_string(&path).unwrap());
            }
        }
        texts
    }

    #[test]
    fn a_folder_uses_only_itself_and_lower_ones() {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for folder in FOLDERS.concat() {
            let texts = files(&src.join(folder));
            assert!(!texts.is_empty(), "{folder}");
            for other in texts.iter().flat_map(|text| used(text)).filter(|other| *other != folder) {
                assert!(row(other) < row(folder) || (folder, other) == EXCEPTION, "{folder} uses {other}");
            }
        }
    }
}
