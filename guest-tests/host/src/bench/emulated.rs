//! Sections that are measured in the emulated host: its inputs, and the return of its figures.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::Section;
use crate::engine::error::LabError;
use crate::engine::logs;
use crate::engine::progress::Stage;
use crate::hosts::l1;
use crate::images::cache::Cache;
use crate::images::cargo;
use crate::images::kernel::StockKernel;
use crate::images::portable::Portable;
use crate::images::tools::Tools;

/// Maximum attempts with an emulated host that ends without figures.
const ATTEMPTS: usize = 3;
/// It prints nothing while it measures.
const SILENCE: Duration = Duration::from_secs(900);
/// The NVMe drive behind the emulated host's first root port.
pub(super) const FUNCTION: &str = "0000:01:00.0";
/// QEMU's folder among the tools, with its libraries and its firmware.
const QEMU: &str = "qemu";
const QEMU_PROGRAM: &str = "/usr/bin/qemu-system-x86_64";
const FIRMWARE: [&str; 5] = [
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/pvh.bin",
    "/usr/share/qemu/qboot.rom",
    "/usr/share/qemu/kvmvapic.bin",
];

/// An emulated host before its boot, and its files.
pub(super) struct EmulatedHost {
    /// The cache of kernels.
    pub(super) cache: Cache,
    share: PathBuf,
}

impl EmulatedHost {
    /// Puts the programs, and QEMU where this host has it, into `directory`.
    pub(super) fn new(directory: &Path) -> Result<Self, LabError> {
        let cache = Cache::open()?;
        let host = Self { cache, share: directory.join("lab") };
        Tools::of_checkout(&host.cache)?.copy_to(&host.tools())?;
        if super::qemu_is_here() {
            copy_qemu(&host.tools().join(QEMU))?;
        }
        Ok(host)
    }

    /// The folder that becomes its `/run/tools`.
    pub(super) fn tools(&self) -> PathBuf {
        self.share.join("tools")
    }

    /// Whether it will have QEMU.
    pub(super) fn has_qemu(&self) -> bool {
        has_qemu(&self.tools())
    }

    /// Adds the benchmark `bench` of `package` to its tools as `name`; where it is here.
    pub(super) fn add_bench(&self, package: &str, bench: &str, name: &str) -> Result<PathBuf, LabError> {
        let programs = cargo::programs(["bench", "--package", package, "--bench", bench])?;
        let built = programs.into_iter().find(|built| built.target.name == bench);
        let built = built.map(|built| built.executable);
        let path = built.ok_or_else(|| LabError::Content {
            what: format!("benchmark {bench} of {package}"),
            problem: "cargo built none".into(),
        })?;
        fs::copy(&path, self.tools().join(name)).map_err(LabError::file("copy", &path))?;
        Ok(path)
    }

    /// Boots it with `kernel`, lets it measure, and returns its figures. A host that ends without them is booted again.
    pub(super) fn measure<T: DeserializeOwned>(
        &self,
        kernel: &StockKernel,
        section: Section,
        words: &[&str],
    ) -> Result<T, LabError> {
        let name = section.name();
        let file = results(section);
        let path = self.share.join(&file);
        let arguments = [&["bench", &name, "--within", "/run/tools", "--report", "/share"], words].concat();
        for attempt in 1..=ATTEMPTS {
            logs::remove(&path)?;
            l1::boot(kernel, &self.cache, section.clock(), &self.share, &arguments, SILENCE)?;
            if let Ok(json) = fs::read(&path) {
                return LabError::json(file, &json);
            }
            Stage::note(&format!("the emulated host left no figures: attempt {attempt} of {ATTEMPTS}"));
        }
        let problem = format!("it left no figures: see {}", self.share.join(l1::LOG).display());
        Err(LabError::Content { what: "the emulated host".into(), problem })
    }
}

/// The file in which the emulated host leaves the figures of `section`.
pub(super) fn results(section: Section) -> String {
    format!("{}.json", section.name())
}

/// QEMU, its libraries, and the firmware of its machines.
fn copy_qemu(to: &Path) -> Result<(), LabError> {
    Portable::here(Path::new(QEMU_PROGRAM)).copy(to, QEMU)?;
    for file in FIRMWARE {
        let target = to.join(Path::new(file).file_name().unwrap_or_default());
        fs::copy(file, &target).map_err(LabError::file("copy", file))?;
    }
    Ok(())
}

/// Whether QEMU is among `tools`.
pub(super) fn has_qemu(tools: &Path) -> bool {
    tools.join(QEMU).exists()
}

/// In the emulated host: QEMU among `tools`.
pub(super) fn qemu(tools: &Path) -> Command {
    let directory = tools.join(QEMU);
    let program = directory.join(QEMU);
    let program = Portable::copied(&directory, QEMU).unwrap_or_else(|| Portable::here(&program));
    let mut command = program.command();
    command.arg("-L").arg(&directory);
    command
}
