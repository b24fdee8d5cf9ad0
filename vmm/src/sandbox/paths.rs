//! Paths and ports that the machine still reaches, by Landlock: none, but the folders of its own sockets.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, Scope,
};

use crate::config::{Console, DeviceKind};
use crate::plan::{FunctionRole, Plan};

/// Newest rules that this module was written for; older kernels have fewer of them.
const NEWEST: ABI = ABI::V9;

/// Landlock rules for a machine with files of sockets in `folders`; `None` if the kernel has no Landlock.
///
/// # Errors
/// The kernel refuses the rules. A folder that cannot be opened is left out.
pub(super) fn ruleset(folders: &[PathBuf]) -> Result<Option<OwnedFd>, RulesetError> {
    // Not `Scope::Signal`: before Linux 6.15 it keeps threads of one process from signalling each other.
    let rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::AbstractUnixSocket)?;
    let mut rules = rules.create()?;
    // At its end the machine removes its sockets, and a guest may connect to sockets beside that of its vsock device.
    for folder in folders {
        if let Ok(folder) = PathFd::new(folder) {
            rules = rules.add_rule(PathBeneath::new(folder, AccessFs::RemoveFile | AccessFs::ResolveUnix))?;
        }
    }
    Ok(rules.into())
}

/// Folders with sockets of the machine of `plan`.
pub(super) fn folders(plan: &Plan) -> Vec<PathBuf> {
    let console = match &plan.console {
        Console::Socket { path } => Some(path),
        _ => None,
    };
    let vsock = plan.pci.iter().filter_map(|function| match &function.role {
        FunctionRole::Endpoint { device, .. } => match &device.kind {
            DeviceKind::VirtioVsock { socket, .. } => socket.as_ref(),
            _ => None,
        },
        _ => None,
    });
    let mut folders: Vec<PathBuf> = console.into_iter().chain(vsock).map(|path| folder(path)).collect();
    folders.sort();
    folders.dedup();
    folders
}

/// The folder of the file at `path`.
fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_without_a_folder_in_its_path_is_in_the_current_one() {
        assert_eq!(folder(Path::new("console")), Path::new("."));
        assert_eq!(folder(Path::new("/run/vm/console")), Path::new("/run/vm"));
        assert_eq!(folder(Path::new("/")), Path::new("."));
    }
}
