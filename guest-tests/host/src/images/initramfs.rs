//! Initial roots: the guest's, with the agent as init, and those with busybox, for the emulated host and for a guest
//! with its root on a disk.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::images::cache::Cache;
use crate::images::cpio::{self, Content, CpioError};
use crate::images::debian::{Architecture, Archive};
use crate::images::kernel::StockKernel;
use crate::images::pmem;
use crate::images::rdma_kit::Kit;

/// Init of the emulated host.
const L1_INIT: &str = include_str!("l1-init.sh");
/// Init of a guest with its root on a disk.
const ROOT_INIT: &str = include_str!("root-init.sh");
/// Program of Debian's package busybox-static on this machine.
const BUSYBOX: &str = "/bin/busybox";

/// A guest's initial root, as guest-tests/DESIGN.md lays it out.
pub(crate) fn guest(agent: &Path, plan: Option<&[u8]>, kernel: &StockKernel) -> Result<Vec<u8>, LabError> {
    guest_with(agent, plan, kernel, None)
}

/// The same; with `kit`, the agent in it and the files that it loads.
pub(crate) fn guest_with(
    agent: &Path,
    plan: Option<&[u8]>,
    kernel: &StockKernel,
    kit: Option<&Kit>,
) -> Result<Vec<u8>, LabError> {
    let agent = read(kit.map_or(agent, |kit| &kit.agent))?;
    let programs = kit.map(Kit::files).transpose()?.unwrap_or_default();
    let mut files = modules(kernel)?;
    let plan = plan.map(|plan| Content { name: "egm/plan.json".to_owned(), bytes: plan.to_vec() });
    files.extend(plan);
    guest_archive(&agent, &files, &programs).map_err(invalid)
}

/// The archive with `agent` as init, `files` to read and `programs` in their folders.
fn guest_archive(agent: &[u8], files: &[Content], programs: &[Content]) -> Result<Vec<u8>, CpioError> {
    let mut archive = skeleton(&["egm", "egm/modules"])?;
    archive.file("init", 0o755, agent)?;
    for Content { name, bytes } in files {
        archive.file(name, 0o644, bytes)?;
    }
    for folder in folders(programs.iter().map(|program| program.name.as_str())) {
        archive.directory(folder)?;
    }
    for Content { name, bytes } in programs {
        archive.file(name, 0o755, bytes)?;
    }
    Ok(archive.finish())
}

/// The folders that these paths are in, each once and after the one that it is in.
fn folders<'a>(paths: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
    paths.flat_map(|path| path.match_indices('/').filter_map(|(at, _)| path.get(..at))).collect()
}

/// An initial root that hands over to the one on the guest's first disk.
pub(crate) fn handover(kernel: &StockKernel) -> Result<Vec<u8>, LabError> {
    busybox(None, ROOT_INIT, &["egm", "egm/modules", "root"], &modules(kernel)?)
}

/// The emulated host's initial root. `cache` has the busybox of a Grace host, and the file system of any other.
pub(crate) fn l1(kernel: &StockKernel, grace: bool, cache: &Cache) -> Result<Vec<u8>, LabError> {
    let (mut files, mut arm) = (modules(kernel)?, None);
    if grace {
        arm = Some(arm64_busybox(cache)?);
    } else {
        files.push(Content { name: "egm/pmem.ext4.gz".to_owned(), bytes: pmem::image(cache)? });
    }
    busybox(arm.as_deref(), L1_INIT, &["egm", "egm/modules", "run", "share"], &files)
}

/// Debian's static busybox for arm64, from the cache.
fn arm64_busybox(cache: &Cache) -> Result<PathBuf, LabError> {
    cache.obtain("arm64-busybox-", "", false, |cache, held| {
        let archive = Archive::of(Architecture::Arm64, cache, held)?;
        let package = archive.newest("busybox-static", |_| true)?;
        let scratch = cache.scratch(held)?;
        archive.unpack(&package, scratch.path())?;
        let program = ["usr/bin/busybox", "bin/busybox"].map(|path| scratch.path().join(path));
        let [merged, older] = &program;
        let made = if merged.exists() { merged } else { older };
        cache.publish(made, &format!("arm64-busybox-{}", package.version.replace(':', "-")), held)
    })
}

/// An initial root with a script of busybox as init.
pub(crate) fn script(init: &str) -> Result<Vec<u8>, LabError> {
    busybox(None, init, &[], &[])
}

/// An initial root with busybox, this machine's or `other`, under every applet name of this machine's.
fn busybox(
    other: Option<&Path>,
    init: &str,
    directories: &[&str],
    files: &[Content],
) -> Result<Vec<u8>, LabError> {
    if !Path::new(BUSYBOX).exists() {
        return Err(LabError::Host {
            what: format!("{BUSYBOX} is missing"),
            remedy: "install the Debian package busybox-static".into(),
        });
    }
    let program = read(other.unwrap_or_else(|| Path::new(BUSYBOX)))?;
    let applets = Tool::new(BUSYBOX, "busybox-static").args(["--list"]).text()?;
    let mut archive = skeleton(directories).map_err(invalid)?;
    add_busybox(&mut archive, init, &program, &applets).map_err(invalid)?;
    for Content { name, bytes } in files {
        archive.file(name, 0o644, bytes).map_err(invalid)?;
    }
    Ok(archive.finish())
}

/// Adds `program` under the names of all `applets`, a line each, and `init`.
fn add_busybox(
    archive: &mut cpio::Archive,
    init: &str,
    program: &[u8],
    applets: &str,
) -> Result<(), CpioError> {
    archive.file("init", 0o755, init.as_bytes())?;
    archive.directory("bin")?;
    archive.file("bin/busybox", 0o755, program)?;
    for applet in applets.lines().filter(|name| *name != "busybox") {
        archive.symlink(&format!("bin/{applet}"), "busybox")?;
    }
    Ok(())
}

/// The kernel's modules and their order, by their names in the archive.
fn modules(kernel: &StockKernel) -> Result<Vec<Content>, LabError> {
    let directory = kernel.directory.join("modules");
    let order = read(&directory.join("order"))?;
    let names = String::from_utf8_lossy(&order).into_owned();
    let mut files = vec![Content { name: "egm/modules/order".to_owned(), bytes: order }];
    for name in names.lines() {
        let bytes = read(&directory.join(name))?;
        files.push(Content { name: format!("egm/modules/{name}"), bytes });
    }
    Ok(files)
}

/// Mount points, a console for init's first words, and `directories`.
fn skeleton(directories: &[&str]) -> Result<cpio::Archive, CpioError> {
    let mut archive = cpio::Archive::default();
    for name in ["dev", "proc", "sys", "tmp"].iter().chain(directories) {
        archive.directory(name)?;
    }
    archive.character("dev/console", 5, 1)?;
    archive.character("dev/null", 1, 3)?;
    Ok(archive)
}

fn read(path: &Path) -> Result<Vec<u8>, LabError> {
    fs::read(path).map_err(LabError::file("read", path))
}

fn invalid(error: CpioError) -> LabError {
    LabError::Content { what: "initramfs".into(), problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_comes_once_and_before_what_is_in_it() {
        let found: Vec<_> =
            folders(["usr/lib/a/x", "usr/bin/y", "lib64/z"].into_iter()).into_iter().collect();
        assert_eq!(found, ["lib64", "usr", "usr/bin", "usr/lib", "usr/lib/a"]);
    }
}
