//! A Debian root file system that brings up a network and reports when multi-user.target is reached.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

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
    let found = || cache.newest("debian-root-", ".img").map(|entry| entry.path);
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
    let root = Root(scratch.path().join("root"));
    let mirror = crate::images::debian::mirror()?;
    let packages = "--include=systemd-sysv,udev,iproute2";
    Tool::new("debootstrap", "debootstrap")
        .args(["--variant=minbase", packages, RELEASE])
        .args([root.0.as_os_str(), mirror.as_ref()])
        .bytes()?;
    root.configure(address)?;
    let image = scratch.path().join("root.img");
    Tool::new("mke2fs", "e2fsprogs")
        .args(["-q", "-t", "ext4", "-d"])
        .args([root.0.as_os_str(), image.as_os_str(), SIZE.as_ref()])
        .bytes()?;
    stage.end();
    cache.publish(&image, &format!("debian-root-{RELEASE}.img"), held)
}

/// The root file system in the making, as a folder.
struct Root(PathBuf);

impl Root {
    /// Configures the guest with `address`.
    fn configure(&self, address: Ipv4Addr) -> Result<(), LabError> {
        self.write("etc/hostname", "egm-guest\n", 0o644)?;
        self.write("etc/fstab", "/dev/vda / ext4 defaults 0 1\n", 0o644)?;
        let network = format!("[Match]\nType=ether\n\n[Network]\nAddress={address}/24\n");
        self.write("etc/systemd/network/10-egm.network", &network, 0o644)?;
        self.write("usr/local/sbin/egm-report", REPORT, 0o755)?;
        self.write("etc/systemd/system/egm-report.service", UNIT, 0o644)?;
        // Files that only the installation needs do not belong on a small disk.
        for waste in ["var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"] {
            let path = self.0.join(waste);
            if path.exists() {
                fs::remove_dir_all(&path).map_err(LabError::file("remove", &path))?;
            }
        }
        self.systemctl(&[
            "enable",
            "systemd-networkd.service",
            "systemd-networkd-wait-online.service",
            "egm-report.service",
        ])?;
        // A login prompt would write between the lines of the report.
        self.systemctl(&["mask", "serial-getty@ttyS0.service"])
    }

    fn write(&self, name: &str, text: &str, mode: u32) -> Result<(), LabError> {
        let path = self.0.join(name);
        fs::write(&path, text).map_err(LabError::file("write", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(LabError::file("write", &path))
    }

    fn systemctl(&self, arguments: &[&str]) -> Result<(), LabError> {
        let root = format!("--root={}", self.0.display());
        Tool::new("systemctl", "systemd").args([root.as_str()]).args(arguments).bytes().map(drop)
    }
}
