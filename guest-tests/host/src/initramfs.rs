//! The two initial roots: the guest's, with the agent as init, and the emulated host's, with busybox.

use std::fs;
use std::path::Path;

use crate::cpio::{Archive, CpioError};
use crate::error::LabError;
use crate::kernel::GuestKernel;

/// Init of the emulated host.
const L1_INIT: &str = include_str!("l1-init.sh");
/// Debian's static busybox.
const BUSYBOX: &str = "/bin/busybox";

/// A guest's initial root, as guest-tests/DESIGN.md lays it out.
pub(crate) fn guest(agent: &Path, plan: Option<&[u8]>, kernel: &GuestKernel) -> Result<Vec<u8>, LabError> {
    let agent = read(agent)?;
    let modules = kernel.directory.join("modules");
    let order = read(&modules.join("order"))?;
    let names = String::from_utf8_lossy(&order).into_owned();
    let mut files = vec![("egm/modules/order".to_owned(), order)];
    for name in names.lines() {
        files.push((format!("egm/modules/{name}"), read(&modules.join(name))?));
    }
    files.extend(plan.map(|plan| ("egm/plan.json".to_owned(), plan.to_vec())));
    let build = || {
        let mut archive = skeleton(&["egm", "egm/modules"])?;
        archive.file("init", 0o755, &agent)?;
        for (name, bytes) in &files {
            archive.file(name, 0o644, bytes)?;
        }
        Ok(archive.finish())
    };
    build().map_err(invalid)
}

/// The emulated host's initial root: busybox under every name it answers to, and our init.
pub(crate) fn l1() -> Result<Vec<u8>, LabError> {
    if !Path::new(BUSYBOX).exists() {
        return Err(LabError::Host {
            what: format!("{BUSYBOX} is missing"),
            remedy: "install the Debian package busybox-static".into(),
        });
    }
    let busybox = read(Path::new(BUSYBOX))?;
    let applets = crate::command::Tool::new(BUSYBOX, "busybox-static").args(["--list"]).text()?;
    let build = || {
        let mut archive = skeleton(&["bin", "run", "share"])?;
        archive.file("init", 0o755, L1_INIT.as_bytes())?;
        archive.file("bin/busybox", 0o755, &busybox)?;
        for applet in applets.lines().filter(|name| *name != "busybox") {
            archive.symlink(&format!("bin/{applet}"), "busybox")?;
        }
        Ok(archive.finish())
    };
    build().map_err(invalid)
}

/// Mount points, a console for init's first words, and `directories`.
fn skeleton(directories: &[&str]) -> Result<Archive, CpioError> {
    let mut archive = Archive::default();
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
