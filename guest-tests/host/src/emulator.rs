//! The emulator that the lab runs on: Debian's newest QEMU with every library it needs, unpacked into the cache and never
//! installed.
//!
//! Not the host's own, because only QEMU from 10.2 on changes a processor's pending interrupts atomically. Before that,
//! a VM exit of a nested guest could erase a timer interrupt that arrived in the same instant: the emulated host's
//! processor then ticked no more, for minutes or for ever.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, Lock};
use crate::debian::Archive;
use crate::error::LabError;
use crate::progress::Stage;

/// Prefix of the cache entry of the emulator for x86-64.
pub(crate) const PREFIX: &str = X86.prefix;

/// An emulated architecture.
#[derive(Debug, Clone, Copy)]
struct Kind {
    /// Prefix of its entry in the cache.
    prefix: &'static str,
    package: &'static str,
    program: &'static str,
}

const X86: Kind = Kind { prefix: "qemu-", package: "qemu-system-x86", program: "usr/bin/qemu-system-x86_64" };
const ARM: Kind =
    Kind { prefix: "arm-qemu-", package: "qemu-system-arm", program: "usr/bin/qemu-system-aarch64" };
/// The loader that belongs to the libraries; the host's may be older than they are.
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
/// Unused parts of the packages.
const WASTE: [&str; 4] = ["usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"];

/// QEMU in the cache.
#[derive(Debug, Clone)]
pub(crate) struct Emulator {
    root: PathBuf,
    program: &'static str,
}

impl Emulator {
    /// The cached emulator, fetched when there is none or the cached one is old.
    pub(crate) fn of(cache: &Cache) -> Result<Self, LabError> {
        let root = cache.obtain(X86.prefix, "", false, |cache, held| fetch(X86, cache, held))?;
        Ok(Self { root, program: X86.program })
    }

    /// The same for 64-bit Arm.
    pub(crate) fn arm(cache: &Cache) -> Result<Self, LabError> {
        let root = cache.obtain(ARM.prefix, "", false, |cache, held| fetch(ARM, cache, held))?;
        Ok(Self { root, program: ARM.program })
    }

    /// Its command, without options for the machine.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(self.root.join(LOADER));
        command.arg("--library-path").arg(self.root.join(LIBRARIES)).arg(self.root.join(self.program));
        for firmware in FIRMWARE {
            command.arg("-L").arg(self.root.join(firmware));
        }
        command
    }
}

fn fetch(kind: Kind, cache: &Cache, held: &Lock) -> Result<PathBuf, LabError> {
    let stage = Stage::begin("fetching Debian's newest QEMU");
    let archive = Archive::open(cache, held)?;
    let package = archive.newest(kind.package, |_| true)?;
    // A library path has no way to quote the colon of Debian's epoch.
    let version = package.version.rsplit(':').next().unwrap_or_default();
    let name = format!("{}{version}", kind.prefix);
    if cache.path(&name).exists() {
        return Ok(cache.touch(&name));
    }
    let scratch = cache.scratch(held)?;
    archive.unpack_with_dependencies(&package, scratch.path())?;
    for waste in WASTE {
        remove(&scratch.path().join(waste))?;
    }
    let emulator = Emulator { root: scratch.path().to_owned(), program: kind.program };
    let started = emulator.command().arg("--version").output();
    if !started.is_ok_and(|output| output.status.success()) {
        return Err(LabError::Content {
            what: format!("Debian's {} {}", kind.package, package.version),
            problem: "it does not start with the libraries of its own dependencies".into(),
        });
    }
    stage.end();
    cache.publish(scratch.path(), &name, held)
}

fn remove(path: &Path) -> Result<(), LabError> {
    if path.exists() { fs::remove_dir_all(path).map_err(LabError::file("remove", path)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs_with_its_own_loader_libraries_and_firmware() {
        let command = Emulator { root: "/cache/qemu-11".into(), program: X86.program }.command();
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        assert_eq!(command.get_program(), "/cache/qemu-11/usr/lib64/ld-linux-x86-64.so.2");
        assert_eq!(
            words[..3].join(" "),
            format!("--library-path /cache/qemu-11/{LIBRARIES} /cache/qemu-11/{}", X86.program)
        );
        assert_eq!(
            words[3..].join(" "),
            "-L /cache/qemu-11/usr/share/qemu -L /cache/qemu-11/usr/share/seabios"
        );
    }
}
