//! `egm-lab`: boots a virtual machine, collects the guest's report about itself, and judges it.
//!
//! On a host with a KVM that runs Linux, scenarios run on that host. Elsewhere QEMU boots an emulated host (L1), and
//! this same program runs the scenarios inside it: there is one runner, and the lab only provides its machine.
//!
//! ```text
//!  KVM runs Linux:  egm-lab ─► egm-vmm ─► guest ─► report ─► outcome of each check
//!  elsewhere:       egm-lab ─► QEMU, the emulated host ─► egm-lab ─► egm-vmm ─► guest ─► …
//! ```
//! Two scenarios, and a file with their outcomes for CI:
//!
//! ```sh
//! egm-lab run demo vfio-dma --junit lab.xml
//! ```

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

use clap::{CommandFactory, Parser, Subcommand, ValueEnum};
use egm_address::Printable;
use egm_report::program::generate::{self, Completions, Man};
use egm_report::program::{self, help};
use egm_report::show::{Screen, hanging};

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

/// Boot virtual machines and judge the reports of their guests.
#[derive(Debug, Parser)]
#[command(name = "egm-lab", version)]
struct Arguments {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Print what this host can run; exit code 3 if it cannot run any guest.
    Check {
        /// Print JSON instead of lines.
        #[arg(long)]
        json: bool,
    },
    /// Fetch or build a kernel into the cache and print its path.
    Kernel {
        /// Kernel to fetch or build.
        which: Which,
        /// Look for a newer one even if the cached one is younger than 30 days.
        #[arg(long)]
        refresh: bool,
    },
    /// Run scenarios; the last line counts their passed, failed and skipped checks.
    Run(RunArguments),
    /// Boot your own configuration in the emulated PC; Ctrl-C ends it.
    RunConfig(RunConfigArguments),
    /// Print the skips of a test log; exit code 1 if guest-tests/skips.json does not allow one.
    Skips(SkipsArguments),
    /// Plant faults in the programs, one at a time
    ///
    /// Exit code 1: no test found one of them, or the test of one was skipped. With --unit, a skip that
    /// guest-tests/skips.json allows is no failure.
    Faults(FaultsArguments),
    /// Run mutation tests of the pure cores
    ///
    /// Exit code 1: a mutant survived that guest-tests/mutants.json does not list, or less than 95 % of a core's viable
    /// mutants were caught.
    Mutants(MutantsArguments),
    /// Measure start, memory, prefault and a guest's boot, together with QEMU.
    Bench(BenchArguments),
    /// Boot configs/demo.json and print the report of its guest.
    Demo,
    /// Check that the slice of "egm-device carve grant" is zero; exit code 1 if it is not.
    #[command(hide = true)]
    Zeros,
    /// Run a shell or a command in the emulated Grace host (arm64).
    Grace(GraceArguments),
    /// Own the slice of "egm-device carve grant": see `slices/owners.rs`.
    #[command(hide = true)]
    SliceOwner {
        /// Word to write at both ends of the slice.
        mark: u64,
    },
    /// Run Debian's newest QEMU for x86_64, from the cache.
    Qemu {
        /// Arguments that QEMU receives unchanged.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    Completions(Completions),
    Man(Man),
    /// Write an initial RAM disk for a guest: the agent, the kernel's modules and the plan.
    Initramfs {
        /// Output of "egm-vmm plan --json".
        #[arg(long)]
        plan: Option<PathBuf>,
        /// Path of the program egm-guest.
        #[arg(long)]
        agent: PathBuf,
        /// Path of the file to write.
        #[arg(long)]
        out: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Which {
    /// Emulated host: Debian's stable kernel, and modules for the lab.
    L1,
    /// Emulated host: built from Debian's newest linux-source, with iommufd, VFIO cdev and rdma_rxe.
    Built,
    /// Guest: Debian's stable cloud kernel, and modules for virtio.
    Guest,
    /// Emulated Grace host (arm64): built from the same source, with KVM, SMMUv3, nvgrace-gpu and an nvgrace-egm double.
    Grace,
    /// The kernel "grace" with pages of 64 KiB.
    #[value(name = "grace-64k")]
    Grace64k,
    /// Guest of the Grace host: Debian's newest kernel for arm64.
    Arm64,
    /// Guest of the Grace host: Debian's stable kernel for arm64.
    Arm64Stable,
}

fn main() -> ExitCode {
    let Arguments { command } = help::parse();
    match run(command) {
        Ok(code) => code,
        Err(error) => {
            let mut text = format!("error: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                text.push_str(&format!("\n  caused by: {cause}"));
                source = cause.source();
            }
            let screen = Screen::of_stderr();
            text.lines().for_each(|line| eprintln!("{}", screen.message(&Printable(line).to_string())));
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
        Verb::Completions(arguments) => Ok(generate::completions(&arguments, Arguments::command())),
        Verb::Man(arguments) => Ok(program::end(generate::man(&arguments, Arguments::command()))),
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
            println!("{:<14} {mark:<4} {}", finding.name, hanging(&finding.detail, 20, Screen::of_stdout()));
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
