//! Paths and ports that the machine still reaches, by Landlock: none, but the folders of its own sockets.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope,
};

use crate::config::{Console, DeviceKind};
use crate::plan::{FunctionRole, Plan};

/// Newest rules that this module was written for; older kernels have fewer of them.
const NEWEST: ABI = ABI::V9;

/// A folder with sockets of the machine.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SocketFolder {
    path: PathBuf,
    /// Whether the machine may also connect to sockets there.
    connects: bool,
}

impl SocketFolder {
    /// The folder of the file at `path`.
    pub(super) fn of(path: &Path, connects: bool) -> Self {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        Self { path: parent.unwrap_or_else(|| Path::new(".")).to_owned(), connects }
    }

    /// What the machine may do there and in the folders below: at its end it removes its sockets, and a guest may
    /// connect to sockets next to that of its vsock device.
    fn access(&self) -> BitFlags<AccessFs> {
        match self.connects {
            true => AccessFs::RemoveFile | AccessFs::ResolveUnix,
            false => AccessFs::RemoveFile.into(),
        }
    }
}

/// Landlock rules for a machine with files of sockets in `folders`; `None` if the kernel has no Landlock.
///
/// # Errors
/// The kernel refuses the rules. A folder that cannot be opened is left out.
pub(super) fn ruleset(folders: &[SocketFolder]) -> Result<Option<OwnedFd>, RulesetError> {
    // Not `Scope::Signal`: before Linux 6.15 it keeps threads of one process from signalling each other.
    let rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::AbstractUnixSocket)?;
    let mut rules = rules.create()?;
    for folder in folders {
        if let Ok(opened) = PathFd::new(&folder.path) {
            rules = rules.add_rule(PathBeneath::new(opened, folder.access()))?;
        }
    }
    Ok(rules.into())
}

/// Folders with sockets of the machine of `plan`, and with that of its control API at `api`.
pub(super) fn folders(plan: &Plan, api: Option<&Path>) -> Vec<SocketFolder> {
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
    folders_of(vsock.map(AsRef::as_ref), console.map(AsRef::as_ref).into_iter().chain(api))
}

/// Folders of sockets of vsock devices, and of those at which the machine only listens.
fn folders_of<'a>(
    vsock: impl Iterator<Item = &'a Path>,
    listening: impl Iterator<Item = &'a Path>,
) -> Vec<SocketFolder> {
    let connecting = vsock.map(|path| SocketFolder::of(path, true));
    let mut folders: Vec<_> = connecting.chain(listening.map(|path| SocketFolder::of(path, false))).collect();
    folders.sort();
    folders.dedup();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_without_a_folder_in_its_path_is_in_the_current_one() {
        let folder = |path: &str| SocketFolder::of(Path::new(path), true).path;
        assert_eq!(folder("console"), Path::new("."));
        assert_eq!(folder("/run/vm/console"), Path::new("/run/vm"));
        assert_eq!(folder("/"), Path::new("."));
    }

    #[test]
    fn only_in_the_folder_of_a_vsock_are_sockets_reached() {
        let folders = |vsock: &[&'static str], listening: &[&'static str]| -> Vec<(PathBuf, bool)> {
            let folders = folders_of(vsock.iter().map(Path::new), listening.iter().map(Path::new));
            folders.into_iter().map(|folder| (folder.path, folder.connects)).collect()
        };
        assert_eq!(folders(&[], &["/c/console", "/c/api"]), [("/c".into(), false)]);
        let both = folders(&["/v/vsock"], &["/v/console", "/c/api"]);
        assert_eq!(both, [("/c".into(), false), ("/v".into(), false), ("/v".into(), true)]);
    }

    #[test]
    fn beside_the_socket_of_the_api_files_are_removed_and_no_socket_is_reached() {
        let access = |connects| SocketFolder::of(Path::new("/run/vm/api.sock"), connects).access();
        assert_eq!(access(false), AccessFs::RemoveFile);
        assert_eq!(access(true), AccessFs::RemoveFile | AccessFs::ResolveUnix);
    }
}
