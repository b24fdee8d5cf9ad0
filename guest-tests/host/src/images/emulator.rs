//! The emulator that the lab runs on: Debian's newest QEMU with every library it needs, unpacked into the cache and never
//! installed.
//!
//! Not the host's own, because only QEMU from 10.2 on changes a processor's pending interrupts atomically. Before that,
//! a VM exit of a nested guest could erase a timer interrupt that arrived in the same instant: the emulated host's
//! processor then ticked no more, for minutes or for ever.
//!
//! One instruction of the emulator for x86-64 is replaced ([`deliver_once`]): see guest-tests/DESIGN.md, "The emulator".

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::engine::error::LabError;
use crate::engine::progress::Stage;
use crate::images::cache::{Cache, Lock};
use crate::images::debian::Archive;

/// Prefix of the cache entry of the emulator for x86-64.
pub(crate) const PREFIX: &str = X86.prefix;

#[derive(Debug, Clone, Copy)]
struct Target {
    /// Prefix of its entry in the cache.
    prefix: &'static str,
    package: &'static str,
    program: &'static str,
}

const X86: Target =
    Target { prefix: "x86-qemu-", package: "qemu-system-x86", program: "usr/bin/qemu-system-x86_64" };
const ARM: Target =
    Target { prefix: "arm-qemu-", package: "qemu-system-arm", program: "usr/bin/qemu-system-aarch64" };
/// Architecture of the machine that both run on, as the compiler names it: the packages are Debian's for amd64.
const HOST: &str = "x86_64";
/// The reason why no emulated host starts on a machine of another architecture.
pub(crate) const NEEDED: &str = "the emulated hosts need an x86-64 machine";
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
        supported()?;
        let root = cache.obtain(X86.prefix, "", false, |cache, held| fetch(X86, cache, held))?;
        Ok(Self { root, program: X86.program })
    }

    /// The same for 64-bit Arm.
    pub(crate) fn arm(cache: &Cache) -> Result<Self, LabError> {
        supported()?;
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

/// Refuses a machine that does not run the emulators.
pub(crate) fn supported() -> Result<(), LabError> {
    runs_on(std::env::consts::ARCH)
}

/// Refuses a machine of another `architecture` than the emulators.
pub(crate) fn runs_on(architecture: &str) -> Result<(), LabError> {
    if architecture == HOST {
        return Ok(());
    }
    Err(LabError::Host {
        what: format!("{NEEDED}, and this one is {architecture}"),
        remedy: "run scenarios as root on its own /dev/kvm, or use an x86-64 machine".into(),
    })
}

fn fetch(kind: Target, cache: &Cache, held: &Lock) -> Result<PathBuf, LabError> {
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
    let program = scratch.path().join(kind.program);
    let mut bytes = fs::read(&program).map_err(LabError::file("read", &program))?;
    if kind.prefix == PREFIX {
        if deliver_once(&mut bytes) {
            fs::write(&program, bytes).map_err(LabError::file("write", &program))?;
        } else {
            Stage::note(
                "this QEMU has another VMRUN than the lab knows: an interrupt of a guest may come twice",
            );
        }
    }
    stage.end();
    cache.publish(scratch.path(), &name, held)
}

/// Removes the store with which `helper_vmrun` (QEMU 11.1) leaves the vector of an interrupt that it has just delivered in
/// `exception_index`; returns whether `program` has exactly one such place. QEMU's loop takes the vector for an exception
/// that is still to be delivered when it is asked to stop before the next interrupt or exception.
///
/// ```text
/// 89 b3 xx xx ff ff                       mov  %esi, exception_index(%rbx)
/// c7 83 yy yy yy yy 00 00 00 00           movl $0, exception_is_int(%rbx)
/// 48 c7 83 zz zz zz zz ff ff ff ff        movq $-1, exception_next_eip(%rbx), four bytes further
/// ```
fn deliver_once(program: &mut [u8]) -> bool {
    const NOP: [u8; 6] = [0x66, 0x0f, 0x1f, 0x44, 0, 0];
    let found: Vec<usize> =
        program.windows(27).enumerate().filter(|(_, bytes)| is_store(bytes)).map(|(at, _)| at).collect();
    let [at] = found[..] else { return false };
    program[at..at + NOP.len()].copy_from_slice(&NOP);
    true
}

/// Whether `bytes`, 27 of them, are the three instructions of [`deliver_once`].
fn is_store(bytes: &[u8]) -> bool {
    let offset = |at: usize| bytes[at..].first_chunk().map(|chunk| i32::from_le_bytes(*chunk));
    bytes.starts_with(&[0x89, 0xb3])
        && bytes[4..8] == [0xff, 0xff, 0xc7, 0x83]
        && bytes[12..19] == [0, 0, 0, 0, 0x48, 0xc7, 0x83]
        && bytes[23..27] == [0xff; 4]
        && offset(8).and_then(|offset| offset.checked_add(4)) == offset(19)
}

fn remove(path: &Path) -> Result<(), LabError> {
    if path.exists() { fs::remove_dir_all(path).map_err(LabError::file("remove", path)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of QEMU 11.1.3 as Debian built it (11.1.3+ds-1~bpo13+1, at 0x8c979b).
    const VMRUN: [u8; 34] = [
        0x44, 0x89, 0xab, 0x80, 0x34, 0, 0, 0x89, 0xb3, 0x50, 0xc2, 0xff, 0xff, 0xc7, 0x83, 0x84, 0x34, 0, 0,
        0, 0, 0, 0, 0x48, 0xc7, 0x83, 0x88, 0x34, 0, 0, 0xff, 0xff, 0xff, 0xff,
    ];

    #[test]
    fn the_store_of_the_vector_is_removed_where_it_is_unmistakable() {
        let mut once = VMRUN;
        assert!(deliver_once(&mut once));
        assert_eq!((&once[..7], &once[13..]), (&VMRUN[..7], &VMRUN[13..]));
        assert_eq!(once[7..13], [0x66, 0x0f, 0x1f, 0x44, 0, 0]);
        let mut other = VMRUN;
        other[26] = 0x8c;
        for mut unknown in [Vec::new(), once.to_vec(), other.to_vec(), VMRUN.repeat(2)] {
            let before = unknown.clone();
            assert!(!deliver_once(&mut unknown));
            assert_eq!(unknown, before);
        }
    }

    #[test]
    fn a_machine_of_another_architecture_is_refused_as_one_that_lacks_something() {
        assert!(runs_on("x86_64").is_ok());
        let error = runs_on("aarch64").unwrap_err();
        assert_eq!(error.exit_code(), 3);
        let text = "the emulated hosts need an x86-64 machine, and this one is aarch64; ";
        assert!(error.to_string().starts_with(text), "{error}");
    }

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
