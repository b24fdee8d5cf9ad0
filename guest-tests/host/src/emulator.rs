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

/// How its entry in the cache begins.
pub(crate) const PREFIX: &str = "qemu-";
const PACKAGE: &str = "qemu-system-x86";
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
/// The loader that belongs to the libraries; the host's may be older than they are.
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
/// What the packages carry beside that, and nobody reads here.
const WASTE: [&str; 4] = ["usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"];

/// QEMU in the cache.
#[derive(Debug, Clone)]
pub(crate) struct Emulator {
    root: PathBuf,
}

impl Emulator {
    /// That of the cache, fetched when there is none or the one there has become old.
    pub(crate) fn of(cache: &Cache) -> Result<Self, LabError> {
        cache.obtain(PREFIX, "", false, fetch).map(|root| Self { root })
    }

    /// Its command, without options for the machine.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(self.root.join(LOADER));
        command.arg("--library-path").arg(self.root.join(LIBRARIES)).arg(self.root.join(PROGRAM));
        for firmware in FIRMWARE {
            command.arg("-L").arg(self.root.join(firmware));
        }
        command
    }
}

fn fetch(cache: &Cache, held: &Lock) -> Result<PathBuf, LabError> {
    let stage = Stage::begin("fetching Debian's newest QEMU");
    let archive = Archive::open(cache, held)?;
    let package = archive.newest(PACKAGE, |_| true)?;
    // A library path has no way to quote the colon of Debian's epoch.
    let version = package.version.rsplit(':').next().unwrap_or_default();
    let name = format!("{PREFIX}{version}");
    if cache.path(&name).exists() {
        return Ok(cache.touch(&name));
    }
    let scratch = cache.scratch(held)?;
    archive.unpack_with_dependencies(&package, scratch.path())?;
    for waste in WASTE {
        remove(&scratch.path().join(waste))?;
    }
    let emulator = Emulator { root: scratch.path().to_owned() };
    let started = emulator.command().arg("--version").output();
    if !started.is_ok_and(|output| output.status.success()) {
        return Err(LabError::Content {
            what: format!("Debian's {PACKAGE} {}", package.version),
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
        let command = Emulator { root: "/cache/qemu-11".into() }.command();
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        assert_eq!(command.get_program(), "/cache/qemu-11/usr/lib64/ld-linux-x86-64.so.2");
        assert_eq!(
            words[..3].join(" "),
            format!("--library-path /cache/qemu-11/{LIBRARIES} /cache/qemu-11/{PROGRAM}")
        );
        assert_eq!(
            words[3..].join(" "),
            "-L /cache/qemu-11/usr/share/qemu -L /cache/qemu-11/usr/share/seabios"
        );
    }
}
