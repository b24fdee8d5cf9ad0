//! Functions that this host depends on: disks that are mounted, and the network of the default route.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use egm_address::PciAddress;

/// Use of a function by the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Use {
    /// A file system on a disk behind it.
    Mounted(String),
    /// The default route, through this interface.
    DefaultRoute(String),
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted(at) => write!(f, "a disk of it is mounted at {at}"),
            Self::DefaultRoute(interface) => write!(f, "the default route leads through {interface}"),
        }
    }
}

/// Use of the function at `address` by the host, if there is one.
pub(super) fn host_use(root: &Path, address: PciAddress) -> Option<Use> {
    let name = address.to_string();
    let is_behind = |path: &PathBuf| path.components().any(|part| part.as_os_str() == name.as_str());
    let mounted = mounts(root).into_iter().find(|(device, _)| below(device, "slaves").iter().any(is_behind));
    if let Some((_, at)) = mounted {
        return Some(Use::Mounted(at));
    }
    let leads = |interface: &String| {
        let folder = root.join("sys/class/net").join(interface);
        // The device is the function, or something on a bus of its own behind it.
        let real = |path: &PathBuf| path.join("device").canonicalize().ok();
        below(&folder, "").iter().filter_map(real).any(|path| is_behind(&path))
    };
    routes(root).into_iter().find(leads).map(Use::DefaultRoute)
}

/// The block device of each mount, as a folder of sysfs, and where it is mounted (`proc_pid_mountinfo(5)`).
fn mounts(root: &Path) -> Vec<(PathBuf, String)> {
    let text = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    let mount = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ');
        let (number, at) = (fields.nth(2)?, fields.nth(1)?);
        // btrfs has a number of its own, but names a device.
        let by_name = after.split(' ').nth(1).and_then(|source| source.strip_prefix("/dev/"));
        let by_name =
            by_name.and_then(|name| Some(root.join("sys/class/block").join(Path::new(name).file_name()?)));
        let folder = [Some(root.join("sys/dev/block").join(number)), by_name];
        let folder = folder.into_iter().flatten().find(|folder| folder.exists())?;
        Some((folder, at.to_owned()))
    };
    text.lines().filter_map(mount).collect()
}

/// Interfaces of default routes, IPv4 and IPv6 (`proc(5)`, `net/ipv6/route.c`).
fn routes(root: &Path) -> BTreeSet<String> {
    let read = |file: &str| fs::read_to_string(root.join("proc/net").join(file)).unwrap_or_default();
    let (v4, v6) = (read("route"), read("ipv6_route"));
    let v4 = v4.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_default = fields.get(1) == Some(&"00000000") && fields.get(7) == Some(&"00000000");
        fields.first().filter(|_| is_default)?.to_string().into()
    });
    let v6 = v6.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_default = fields.first()?.bytes().all(|digit| digit == b'0') && fields.get(1) == Some(&"00");
        fields.last().filter(|_| is_default)?.to_string().into()
    });
    // The kernel's own entries for "nothing" lead to lo.
    v4.chain(v6).filter(|interface| interface != "lo").collect()
}

/// The real folders of a device and of all its parts: `slaves/*` of mapped disks and arrays, `lower_*` of bonds,
/// bridges and VLANs.
fn below(folder: &Path, slaves: &str) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut open: Vec<PathBuf> = folder.canonicalize().into_iter().collect();
    while let Some(device) = open.pop() {
        let parts = fs::read_dir(device.join(slaves)).into_iter().flatten().filter_map(Result::ok);
        let is_part = |name: &str| !slaves.is_empty() || name.starts_with("lower_");
        let parts = parts.filter(|entry| entry.file_name().to_str().is_some_and(is_part));
        open.extend(
            parts.filter_map(|entry| entry.path().canonicalize().ok()).filter(|path| !found.contains(path)),
        );
        // A partition has no slaves of its own but lies in the folder of its disk, which its path shows.
        found.insert(device);
    }
    found
}
