//! Users other than root that may open a GPU: the kernel consults no ledger and no broker about them.
//!
//! A user that may open a GPU's VFIO node has that GPU, with or without a slice and whatever the user's processes
//! report. Owner, group, mode and access control list of the node count. Members of group 0 count as root.
#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use egm_address::PciAddress;
use rustix::fs::getxattr;
use rustix::io::Errno;
use serde::Serialize;

use crate::access_list::AccessList;
use crate::owner::Owner;
use crate::owner::is_same;
use crate::policy::{Policy, RuleSubject};

/// Read and write permission. Reading is enough: the kernel checks no mode for the operations of VFIO.
const OPEN: u16 = 6;

/// Most bytes of an access control list: the kernel's limit of an attribute.
const MAX_LIST: usize = 1 << 16;

/// Users that may open a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Opener {
    /// One user, by number.
    User(u32),
    /// The members of one group.
    Group(u32),
    /// All users of the host.
    Everyone,
}

/// A GPU that users other than root may open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OpenGpu {
    /// VFIO node of the GPU or its group.
    pub node: PathBuf,
    /// Users that may open the node.
    pub opener: Opener,
    /// The trust domain that the policy gives them in all of their rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

impl OpenGpu {
    /// Whether `owner` may share the GPU's region with these users.
    pub(super) fn is_trusted_by(&self, owner: &Owner) -> bool {
        self.opener == Opener::User(owner.uid) || is_same(owner.domain.as_deref(), self.domain.as_deref())
    }
}

impl fmt::Display for OpenGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.opener {
            Opener::User(uid) => write!(f, "user {uid}")?,
            Opener::Group(gid) => write!(f, "group {gid}")?,
            Opener::Everyone => f.write_str("every user")?,
        }
        write!(f, " (may open {})", self.node.display())
    }
}

/// Users other than root that may open `function` on the host below `root`, with their trust domains by `policy`.
pub(super) fn open_gpus(root: &Path, function: PciAddress, policy: &Policy) -> Vec<OpenGpu> {
    let open = |node: &PathBuf, opener| {
        let domain = match opener {
            Opener::User(uid) => policy.domain_of(RuleSubject::User(uid)),
            Opener::Group(gid) => policy.domain_of(RuleSubject::Group(gid)),
            Opener::Everyone => None,
        };
        OpenGpu { node: node.clone(), opener, domain: domain.map(str::to_owned) }
    };
    let nodes = nodes(root, function).into_iter().filter(|_| !egm_address::fault!("gpu-openers-overlooked"));
    nodes.flat_map(|node| openers(&node).into_iter().map(move |opener| open(&node, opener))).collect()
}

/// VFIO's nodes for `function`: that of its group and its own.
pub(super) fn nodes(root: &Path, function: PciAddress) -> Vec<PathBuf> {
    let device = root.join("sys/bus/pci/devices").join(function.to_string());
    let group = fs::read_link(device.join("iommu_group")).ok();
    let group = group.and_then(|link| Some(root.join("dev/vfio").join(link.file_name()?)));
    let own = fs::read_dir(device.join("vfio-dev")).into_iter().flatten().filter_map(Result::ok);
    group.into_iter().chain(own.map(|entry| root.join("dev/vfio/devices").join(entry.file_name()))).collect()
}

/// Users other than root that may open `node`. A node that cannot be judged is open to every user.
fn openers(node: &Path) -> Vec<Opener> {
    let metadata = match fs::metadata(node) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(_) => return vec![Opener::Everyone],
        Ok(metadata) => metadata,
    };
    let mut list = vec![0; MAX_LIST];
    match getxattr(node, OsStr::new("system.posix_acl_access"), &mut list) {
        Ok(length) => judge(&metadata, list.get(..length)),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => judge(&metadata, None),
        Err(_) => vec![Opener::Everyone],
    }
}

/// Users of a node with access control list `list`, if it has one.
fn judge(metadata: &Metadata, list: Option<&[u8]>) -> Vec<Opener> {
    let bits = |shift: u32| u16::try_from(metadata.mode() >> shift & 7).unwrap_or(OPEN);
    let plain = || AccessList { group: bits(3), other: bits(0), users: Vec::new(), groups: Vec::new() };
    let Some(list) = list.map_or_else(|| Some(plain()), AccessList::parse) else {
        return vec![Opener::Everyone];
    };
    let may_open = |id: u32, bits: u16| id != 0 && bits & OPEN != 0;
    let mut openers = Vec::new();
    // The owner of a node changes its mode at will.
    for (uid, bits) in [(metadata.uid(), OPEN)].into_iter().chain(list.users) {
        openers.extend(may_open(uid, bits).then_some(Opener::User(uid)));
    }
    for (gid, bits) in [(metadata.gid(), list.group)].into_iter().chain(list.groups) {
        openers.extend(may_open(gid, bits).then_some(Opener::Group(gid)));
    }
    openers.dedup();
    openers.extend((list.other & OPEN != 0).then_some(Opener::Everyone));
    openers
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use rustix::fs::{XattrFlags, setxattr};

    use super::*;
    use crate::access_list::tests::encode;
    use crate::policy::{Names, parse};

    #[test]
    fn users_that_may_open_a_gpu_have_it() {
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
        let openers = || {
            let open = open_gpus(root, gpu, &Policy::root_only());
            open.into_iter().map(|open| open.opener).collect::<Vec<_>>()
        };
        assert_eq!(openers(), []);
        chown(&group, Some(1000), None).unwrap();
        chown(&own, None, Some(500)).unwrap();
        assert_eq!(openers(), [Opener::User(1000)], "the group may not open the other");
        fs::set_permissions(&group, PermissionsExt::from_mode(0o000)).unwrap();
        assert_eq!(openers(), [Opener::User(1000)], "its owner may change the mode");
        fs::set_permissions(&own, PermissionsExt::from_mode(0o660)).unwrap();
        assert_eq!(openers(), [Opener::User(1000), Opener::Group(500)]);
        fs::set_permissions(&own, PermissionsExt::from_mode(0o664)).unwrap();
        assert_eq!(openers().last(), Some(&Opener::Everyone));
    }

    #[test]
    fn an_access_control_list_names_users_and_groups_of_a_gpu() {
        let node = tempfile::NamedTempFile::new().unwrap();
        let none = u32::MAX;
        let set = |entries: &[(u16, u16, u32)]| {
            let name = "system.posix_acl_access";
            setxattr(node.path(), name, &encode(entries), XattrFlags::empty()).is_ok()
        };
        let entries = |mask| {
            [(1, 6, none), (2, 6, 1000), (4, 0, none), (8, 6, 500), (0x10, mask, none), (0x20, 0, none)]
        };
        if !rustix::process::geteuid().is_root() || !set(&entries(6)) {
            return println!("skipped: this needs root and a file system with access control lists");
        }
        assert_eq!(openers(node.path()), [Opener::User(1000), Opener::Group(500)]);
        assert!(set(&entries(1)));
        assert_eq!(openers(node.path()), [], "the mask takes the permission");
        let metadata = fs::metadata(node.path()).unwrap();
        assert_eq!(judge(&metadata, Some(b"\x02")), [Opener::Everyone], "an unreadable list");
    }

    #[test]
    fn users_of_a_gpu_are_trusted_by_themselves_and_by_their_trust_domain() {
        let text = r#"{"rules": [{"name": "a", "user": 1000, "trust_domain": "a"}, {"name": "b", "group": 500, "trust_domain": "a"},
            {"name": "c", "user": 1001, "trust_domain": "a"}, {"name": "d", "user": 1001, "class": "x"}]}"#;
        let policy = parse(text, &Names::default()).unwrap();
        let domain = |who| policy.domain_of(who).map(str::to_owned);
        let table = [
            (Opener::User(1000), domain(RuleSubject::User(1000)), 1000, None, true),
            (Opener::User(1000), domain(RuleSubject::User(1000)), 1002, None, false),
            (Opener::User(1000), domain(RuleSubject::User(1000)), 1002, Some("a"), true),
            (Opener::Group(500), domain(RuleSubject::Group(500)), 1002, Some("a"), true),
            (Opener::Group(500), domain(RuleSubject::Group(500)), 1002, Some("b"), false),
            // One of that user's rules has no domain.
            (Opener::User(1001), domain(RuleSubject::User(1001)), 1000, Some("a"), false),
            (Opener::Everyone, None, 1000, Some("a"), false),
        ];
        for (opener, domain, uid, requester, trusted) in table {
            let open = OpenGpu { node: "/dev/vfio/12".into(), opener, domain };
            let owner = Owner { uid, ..Owner::this("vm") }.in_domain(requester.map(str::to_owned));
            assert_eq!(open.is_trusted_by(&owner), trusted, "{opener:?} {uid} {requester:?}");
        }
    }
}
