//! Users other than root who may open a GPU: the kernel asks the broker about none of them.
//!
//! A user who may open a GPU's VFIO node has that GPU, with or without a slice and whatever the user's processes report. Only
//! owner, group and mode of the node count here; access control lists are not read.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use egm_address::PciAddress;

use crate::policy::{Policy, Who};
use crate::trust::{Hold, Party, is_same};

/// A GPU that users other than root may open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OpenGpu {
    pub(super) function: PciAddress,
    node: PathBuf,
    /// The user or the group; `None` for every user.
    who: Option<Who>,
}

impl OpenGpu {
    /// The hold that these users have of the GPU's region, as seen by user `uid` of trust domain `domain`.
    pub(super) fn hold(&self, policy: &Policy, uid: u32, domain: Option<&str>) -> Hold {
        let theirs = self.who.and_then(|who| policy.domain_of(who));
        let node = self.node.display();
        let owner = match self.who {
            Some(Who::User(uid)) => format!("user {uid}, who may open {node},"),
            Some(Who::Group(gid)) => format!("group {gid}, which may open {node},"),
            None => format!("every user, for {node} has no protection,"),
        };
        Hold {
            is_trusted: self.who == Some(Who::User(uid)) || is_same(domain, theirs),
            party: Party { owner, domain: theirs.map(str::to_owned) },
            gpu: Some(self.function),
        }
    }
}

/// Those of `functions` that users other than root may open on the host below `root`.
pub(super) fn open_gpus(root: &Path, functions: &[PciAddress]) -> Vec<OpenGpu> {
    let of = |function: &PciAddress| {
        let function = *function;
        nodes(root, function).into_iter().flat_map(move |node| {
            users(&node).into_iter().map(move |who| OpenGpu { function, node: node.clone(), who })
        })
    };
    functions.iter().flat_map(of).collect()
}

/// VFIO's nodes for `function`: that of its group and its own.
fn nodes(root: &Path, function: PciAddress) -> Vec<PathBuf> {
    let device = root.join("sys/bus/pci/devices").join(function.to_string());
    let group = fs::read_link(device.join("iommu_group")).ok();
    let group = group.and_then(|link| Some(root.join("dev/vfio").join(link.file_name()?)));
    let own = fs::read_dir(device.join("vfio-dev")).into_iter().flatten().filter_map(Result::ok);
    group.into_iter().chain(own.map(|entry| root.join("dev/vfio/devices").join(entry.file_name()))).collect()
}

/// Users other than root who may open `node`.
fn users(node: &Path) -> Vec<Option<Who>> {
    let Ok(metadata) = fs::metadata(node) else { return Vec::new() };
    let (mode, uid, gid) = (metadata.mode(), metadata.uid(), metadata.gid());
    let user = (mode & 0o600 != 0 && uid != 0).then_some(Some(Who::User(uid)));
    let group = (mode & 0o060 != 0 && gid != 0).then_some(Some(Who::Group(gid)));
    let every = (mode & 0o006 != 0).then_some(None);
    user.into_iter().chain(group).chain(every).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;
    use crate::policy::{Names, parse};

    #[test]
    fn who_may_open_a_gpu_has_it() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root gives a file to another user");
        }
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let gpu: PciAddress = "0009:01:00.0".parse().unwrap();
        let device = root.join("sys/bus/pci/devices").join(gpu.to_string());
        fs::create_dir_all(device.join("vfio-dev/vfio3")).unwrap();
        fs::create_dir_all(root.join("dev/vfio/devices")).unwrap();
        symlink("../../../kernel/iommu_groups/12", device.join("iommu_group")).unwrap();
        let (group, own) = (root.join("dev/vfio/12"), root.join("dev/vfio/devices/vfio3"));
        for node in [&group, &own] {
            fs::write(node, "").unwrap();
            fs::set_permissions(node, PermissionsExt::from_mode(0o600)).unwrap();
        }
        assert_eq!(open_gpus(root, &[gpu]), []);
        chown(&group, Some(1000), None).unwrap();
        chown(&own, None, Some(500)).unwrap();
        let who = || open_gpus(root, &[gpu]).into_iter().map(|open| open.who).collect::<Vec<_>>();
        assert_eq!(who(), [Some(Who::User(1000))], "the group may not open the other");
        fs::set_permissions(&own, PermissionsExt::from_mode(0o660)).unwrap();
        assert_eq!(who(), [Some(Who::User(1000)), Some(Who::Group(500))]);
        fs::set_permissions(&own, PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(who().last(), Some(&None));
    }

    #[test]
    fn users_of_a_gpu_are_trusted_by_themselves_and_by_their_trust_domain() {
        let text = r#"{"rules": [{"name": "a", "user": 1000, "trust_domain": "a"}, {"name": "b", "group": 500, "trust_domain": "a"},
            {"name": "c", "user": 1001, "trust_domain": "a"}, {"name": "d", "user": 1001, "class": "x"}]}"#;
        let policy = parse(text, &Names::default()).unwrap();
        let function = "0009:01:00.0".parse().unwrap();
        let table = [
            (Some(Who::User(1000)), 1000, None, true),
            (Some(Who::User(1000)), 1002, None, false),
            (Some(Who::User(1000)), 1002, Some("a"), true),
            (Some(Who::Group(500)), 1002, Some("a"), true),
            (Some(Who::Group(500)), 1002, Some("b"), false),
            (Some(Who::User(1001)), 1000, Some("a"), false), // one of that user's rules has no domain
            (None, 1000, Some("a"), false),
        ];
        for (who, uid, domain, trusted) in table {
            let open = OpenGpu { function, node: "/dev/vfio/12".into(), who };
            assert_eq!(open.hold(&policy, uid, domain).is_trusted, trusted, "{who:?} {uid} {domain:?}");
        }
    }
}
