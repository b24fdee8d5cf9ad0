//! Programs and files for running scenarios.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::images::cache::Cache;
use crate::images::emulator::Emulator;
use crate::images::kernel::{self, StockKernel};
use crate::images::portable::Portable;
use crate::images::rdma_kit::Kit;

/// Name of the Debian root file system among copied tools.
const ROOT: &str = "root.img";
/// Name of the kernel for every machine there.
const GENERIC: &str = "generic";
/// Name of the folder of a guest's RDMA kit, with its kernel.
const RDMA: &str = "rdma";
/// Name of the folder of test programs, there and beside this program.
const TESTS: &str = "tests";
/// Folder of cloud-hypervisor there.
const CLOUD_HYPERVISOR: &str = "cloud-hypervisor";

/// Folder of the build directory in which `scripts/lab/arm64` puts the programs for the emulated Grace host.
const ARM64_FOLDER: &str = "aarch64-unknown-linux-gnu/lab";

/// What the machines of scenarios have for `egm-vmm run --sandbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Sandbox {
    /// Calls that a machine does not need end it.
    Strict,
    /// The kernel logs them.
    Log,
    /// The machines run without a sandbox.
    Off,
}

impl Sandbox {
    /// The words of a command line.
    pub(crate) const fn words(self) -> [&'static str; 2] {
        let mode = match self {
            Self::Strict => "strict",
            Self::Log => "log",
            Self::Off => "off",
        };
        ["--sandbox", mode]
    }
}

/// Programs and files for running scenarios.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    pub(crate) lab: PathBuf,
    pub(crate) vmm: PathBuf,
    /// `egm-device`, which grants slices.
    pub(crate) device: PathBuf,
    pub(crate) agent: PathBuf,
    /// A function behind vfio-user, which few scenarios need.
    pub(crate) function: PathBuf,
    pub(crate) configs: PathBuf,
    pub(crate) kernel: StockKernel,
    /// The guest's kernel for every machine, when a scenario needs it.
    pub(crate) generic: Option<StockKernel>,
    /// A guest's RDMA kit, when a scenario needs it.
    pub(crate) rdma: Option<Kit>,
    /// The Debian root file system, when a scenario needs it.
    pub(crate) root: Option<PathBuf>,
    /// Tests of `egm-device`, where they are built, when a scenario runs them.
    pub(crate) tests: Option<PathBuf>,
    /// An emulator, when a scenario runs its guests in one.
    pub(crate) emulator: Option<Emulator>,
    /// cloud-hypervisor, where the user provides it.
    pub(crate) cloud_hypervisor: Option<Portable>,
    /// The sandbox of machines, where the user chose one.
    pub(crate) sandbox: Option<Sandbox>,
}

impl Tools {
    /// A checkout's tools: programs in this one's folder, `configs` in the current directory, the cached kernel.
    pub(crate) fn of_checkout(cache: &Cache) -> Result<Self, LabError> {
        let lab = std::env::current_exe().map_err(LabError::file("find", "egm-lab"))?;
        let (vmm, device, agent) = (beside("egm-vmm")?, beside("egm-device")?, beside("egm-guest")?);
        Ok(Self {
            vmm,
            device,
            agent,
            function: lab.with_file_name("egm-function"),
            configs: configs()?,
            kernel: kernel::guest(cache, false)?,
            generic: None,
            rdma: None,
            root: None,
            tests: Some(lab.with_file_name(TESTS)).filter(|folder| folder.exists()),
            emulator: None,
            cloud_hypervisor: None,
            sandbox: None,
            lab,
        })
    }

    /// The command that runs the machine of `config`.
    pub(crate) fn run(&self, config: &Path) -> Command {
        let mut command = Command::new(&self.vmm);
        command.arg("run").arg(config).args(self.sandbox.into_iter().flat_map(Sandbox::words));
        command
    }

    /// The command that restores the machine of the snapshot in `folder`.
    pub(crate) fn restore(&self, folder: &Path) -> Command {
        let mut command = Command::new(&self.vmm);
        command.arg("run").arg("--restore").arg(folder);
        command
    }

    /// The emulated Grace host's tools: programs for aarch64 and Debian's newest kernel for arm64.
    pub(crate) fn of_grace(cache: &Cache) -> Result<Self, LabError> {
        Ok(Self::within(&arm64_folder(), configs()?, kernel::arm64(cache, false)?))
    }

    /// Programs in `folder`, with these and no more.
    pub(crate) fn within(folder: &Path, configs: PathBuf, kernel: StockKernel) -> Self {
        let at = |name: &str| folder.join(name);
        Self {
            lab: at("egm-lab"),
            vmm: at("egm-vmm"),
            device: at("egm-device"),
            agent: at("egm-guest"),
            function: at("egm-function"),
            configs,
            kernel,
            generic: None,
            rdma: None,
            root: None,
            tests: None,
            emulator: None,
            cloud_hypervisor: None,
            sandbox: None,
        }
    }

    /// A message about a program that scenarios in the emulated Grace host need and that is not built, if any.
    pub(crate) fn missing_for_grace() -> Option<String> {
        let folder = arm64_folder();
        let names = ["egm-lab", "egm-vmm", "egm-device", "egm-guest", "egm-function"];
        let programs = names.map(|name| folder.join(name));
        let absent = programs.iter().find(|program| !program.exists())?;
        Some(format!("{} is missing: scripts/lab/arm64 builds it", absent.display()))
    }

    /// The tools that [`Tools::copy_to`] put into `directory`.
    pub(crate) fn copied(directory: &Path) -> Self {
        let at = |name: &str| directory.join(name);
        Self {
            generic: Some(StockKernel { directory: at(GENERIC) }).filter(|kernel| kernel.image().exists()),
            rdma: Kit::copied(&at(RDMA)),
            root: Some(at(ROOT)).filter(|path| path.exists()),
            tests: Some(at(TESTS)).filter(|path| path.exists()),
            cloud_hypervisor: Portable::copied(&at(CLOUD_HYPERVISOR), CLOUD_HYPERVISOR),
            ..Self::within(directory, at("configs"), StockKernel { directory: at("guest") })
        }
    }

    /// The same without what `scenarios` do not need.
    pub(crate) fn needed_by(&self, scenarios: &[Scenario]) -> Self {
        let any = |needs: fn(&Scenario) -> bool| scenarios.iter().any(needs);
        let mut tools = self.clone();
        tools.root.take_if(|_| !any(|s| s.debian));
        tools.generic.take_if(|_| !any(|s| s.generic));
        tools.rdma.take_if(|_| !any(|s| s.rdma));
        tools.tests.take_if(|_| !any(|s| s.tests));
        tools.cloud_hypervisor.take_if(|_| !any(|s| s.peer.is_some()));
        tools
    }

    /// Copies everything into `directory`, for a machine that shares nothing else with this one.
    pub(crate) fn copy_to(&self, directory: &Path) -> Result<(), LabError> {
        match std::fs::remove_dir_all(directory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(LabError::file("empty", directory)(error));
            }
            _ => {}
        }
        let target = Self::copied(directory);
        let hosts = target.configs.join("host");
        for path in [&target.configs, &hosts] {
            std::fs::create_dir_all(path).map_err(LabError::file("make", path))?;
        }
        let programs = [
            (&self.lab, &target.lab),
            (&self.vmm, &target.vmm),
            (&self.device, &target.device),
            (&self.agent, &target.agent),
            (&self.function, &target.function),
        ];
        // The constructor decides which of them must exist; the others are optional.
        for (program, to) in programs.into_iter().filter(|(program, _)| program.exists()) {
            copy(program, to)?;
        }
        copy_files(&self.configs, &target.configs)?;
        copy_files(&self.configs.join("host"), &hosts)?;
        self.root.iter().try_for_each(|root| copy(root, &directory.join(ROOT)))?;
        self.generic.iter().try_for_each(|kernel| copy_kernel(kernel, &directory.join(GENERIC)))?;
        if let Some(tests) = &self.tests {
            let to = directory.join(TESTS);
            std::fs::create_dir_all(&to).map_err(LabError::file("make", &to))?;
            copy_files(tests, &to)?;
        }
        if let Some(program) = &self.cloud_hypervisor {
            program.copy(&directory.join(CLOUD_HYPERVISOR), CLOUD_HYPERVISOR)?;
        }
        if let Some(kit) = &self.rdma {
            copy_kernel(&kit.kernel, &directory.join(RDMA))?;
            kit.copy_to(&directory.join(RDMA))?;
        }
        copy_kernel(&self.kernel, &target.kernel.directory)
    }

    /// The kernel for a guest that needs drivers of all kinds, or for one that does not.
    pub(crate) fn kernel(&self, generic: bool) -> &StockKernel {
        self.generic.as_ref().filter(|_| generic).unwrap_or(&self.kernel)
    }

    /// The kernel for the guest of `scenario`.
    pub(crate) fn kernel_for(&self, scenario: &Scenario) -> &StockKernel {
        self.kit(scenario).map_or_else(|| self.kernel(scenario.generic), |kit| &kit.kernel)
    }

    /// The RDMA kit for the guest of `scenario`.
    pub(crate) fn kit(&self, scenario: &Scenario) -> Option<&Kit> {
        self.rdma.as_ref().filter(|_| scenario.rdma)
    }
}

/// The directory configs/ of a checkout in which this program runs.
fn configs() -> Result<PathBuf, LabError> {
    let configs = PathBuf::from("configs");
    configs.canonicalize().map_err(|_| absent(&configs, "run it in the repository's root"))
}

/// Folder of the programs for the emulated Grace host, in this program's build directory.
fn arm64_folder() -> PathBuf {
    let lab = std::env::current_exe().unwrap_or_default();
    lab.ancestors().nth(3).unwrap_or_else(|| Path::new("target")).join(ARM64_FOLDER)
}

/// The program `name` that was built with this one.
pub(crate) fn beside(name: &str) -> Result<PathBuf, LabError> {
    let lab = std::env::current_exe().map_err(LabError::file("find", "egm-lab"))?;
    let path = lab.with_file_name(name);
    if path.exists() { Ok(path) } else { Err(absent(&path, "cargo build --profile lab")) }
}

fn absent(path: &Path, remedy: &str) -> LabError {
    LabError::Host { what: format!("{} is missing", path.display()), remedy: remedy.into() }
}

fn copy(from: &Path, to: &Path) -> Result<(), LabError> {
    std::fs::copy(from, to).map(drop).map_err(LabError::file("copy", from))
}

fn copy_kernel(kernel: &StockKernel, to: &Path) -> Result<(), LabError> {
    let modules = to.join("modules");
    std::fs::create_dir_all(&modules).map_err(LabError::file("make", &modules))?;
    copy(&kernel.image(), &StockKernel { directory: to.to_owned() }.image())?;
    copy_files(&kernel.directory.join("modules"), &modules)
}

fn copy_files(from: &Path, to: &Path) -> Result<(), LabError> {
    let entries = std::fs::read_dir(from).map_err(LabError::file("read", from))?;
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()) {
        copy(&path, &to.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(())
}
