//! A Debian root file system that brings up a network and reports when multi-user.target is reached.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::engine::progress::Stage;
use crate::images::cache::{Cache, Lock};

/// The release that is installed.
const RELEASE: &str = "trixie";
/// Size of the image; a minimal Debian with systemd takes half of it.
const SIZE: &str = "640M";
/// The unit that reports.
const REPORT: &str = include_str!("root-report.sh");

const UNIT: &str = "[Unit]\nDescription=Report to egm-lab\nAfter=multi-user.target network-online.target\n\
                    Wants=network-online.target\n\n[Service]\nType=oneshot\nExecStart=/usr/local/sbin/egm-report\n\n\
                    [Install]\nWantedBy=graphical.target\n";

/// The cached image of a guest with `address` in a /24, made if it is missing: that needs root, because debootstrap does.
pub(crate) fn debian(cache: &Cache, address: Ipv4Addr) -> Result<PathBuf, LabError> {
    let found = || cache.newest("debian-root-", ".img").map(|(path, _)| path);
    if let Some(path) = found() {
        return Ok(path);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(LabError::Host {
            what: "a Debian root file system is made by root only".into(),
            remedy: "run this scenario once as root".into(),
        });
    }
    let lock = cache.lock()?;
    found().map_or_else(|| make(cache, &lock, address), Ok)
}

fn make(cache: &Cache, held: &Lock, address: Ipv4Addr) -> Result<PathBuf, LabError> {
    let stage = Stage::begin(&format!("making a Debian {RELEASE} root file system"));
    let scratch = cache.scratch(held)?;
    let root = scratch.path().join("root");
    let mirror = crate::images::debian::mirror()?;
    let packages = "--include=systemd-sysv,udev,iproute2";
    Tool::new("debootstrap", "debootstrap")
        .args(["--variant=minbase", packages, RELEASE])
        .args([root.as_os_str(), mirror.as_ref()])
        .bytes()?;
    configure(&root, address)?;
    let image = scratch.path().join("root.img");
    Tool::new("mke2fs", "e2fsprogs")
        .args(["-q", "-t", "ext4", "-d"])
        .args([root.as_os_str(), image.as_os_str(), SIZE.as_ref()])
        .bytes()?;
    stage.end();
    cache.publish(&image, &format!("debian-root-{RELEASE}.img"), held)
}

fn configure(root: &Path, address: Ipv4Addr) -> Result<(), LabError> {
    let write = |name: &str, text: &str, mode: u32| {
        let path = root.join(name);
        fs::write(&path, text).map_err(LabError::file("write", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(LabError::file("write", &path))
    };
    write("etc/hostname", "egm-guest\n", 0o644)?;
    write("etc/fstab", "/dev/vda / ext4 defaults 0 1\n", 0o644)?;
    let network = format!("[Match]\nType=ether\n\n[Network]\nAddress={address}/24\n");
    write("etc/systemd/network/10-egm.network", &network, 0o644)?;
    write("usr/local/sbin/egm-report", REPORT, 0o755)?;
    write("etc/systemd/system/egm-report.service", UNIT, 0o644)?;
    // Files that only the installation needs do not belong on a small disk.
    for waste in ["var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"] {
        let path = root.join(waste);
        if path.exists() {
            fs::remove_dir_all(&path).map_err(LabError::file("remove", &path))?;
        }
    }
    let systemctl = |args: &[&str]| {
        let at = format!("--root={}", root.display());
        Tool::new("systemctl", "systemd").args([at.as_str()]).args(args).bytes().map(drop)
    };
    systemctl(&[
        "enable",
        "systemd-networkd.service",
        "systemd-networkd-wait-online.service",
        "egm-report.service",
    ])?;
    // A login prompt would write between the lines of the report.
    systemctl(&["mask", "serial-getty@ttyS0.service"])
}
