//! The device tree of an emulated Grace host.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::machine::{self, Profile};
use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::images::emulator::Emulator;

/// Makes the device tree of the emulated host in `share`: QEMU's own, with the firmware's properties of GPUs.
pub(crate) fn tree(profile: Profile, emulator: &Emulator, share: &Path) -> Result<PathBuf, LabError> {
    let path = share.join("grace.dtb");
    let dump = format!(",dumpdtb={}", path.to_string_lossy().replace(',', ",,"));
    let output =
        emulator.command().args(machine::board(profile, share)).args(machine::kind(profile, &dump)).output();
    let output = output.map_err(LabError::file("run", "QEMU"))?;
    if !output.status.success() {
        return Err(LabError::Content {
            what: "QEMU's device tree".into(),
            problem: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    }
    let fdtput = |words: Vec<OsString>| Tool::new("fdtput", "device-tree-compiler").args(words).bytes();
    for property in machine::properties(profile) {
        fdtput(vec!["-p".into(), "-c".into(), path.clone().into(), property.node.clone().into()])?;
        let head = ["-t".into(), "x".into(), path.clone().into(), property.node.into(), property.name.into()];
        let cells = property.cells.iter().map(|cell| format!("{cell:x}").into());
        fdtput(head.into_iter().chain(cells).collect())?;
    }
    Ok(path)
}
