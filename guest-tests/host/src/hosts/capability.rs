//! The capabilities of this host: probed, never assumed.

use std::fs;
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::images::cache::Cache;
use crate::images::emulator;

/// Memory that the emulated host is given, in MiB.
pub(crate) const L1_MEMORY_MIB: u64 = 9472;

/// Host that scenarios run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Where {
    /// This machine, by its own /dev/kvm.
    Kvm,
    /// Emulated host with a /dev/kvm of its own.
    Lab,
}

/// A capability that was probed, and the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// Name of the capability.
    pub(crate) name: &'static str,
    /// Whether the host has it.
    pub(crate) present: bool,
    /// The observation, or the consequence of its absence and the remedy.
    pub(crate) detail: String,
}

/// All probed capabilities, and the conclusion.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Host {
    /// Capabilities in the order of the printed lines.
    pub(crate) findings: Vec<Finding>,
    /// Default host of scenarios; `None` when they cannot run.
    #[serde(rename = "where")]
    pub(crate) place: Option<Where>,
}

/// Programs that the lab runs, and their Debian packages.
const PROGRAMS: [Program; 2] = [
    Program { name: "busybox", path: "bin/busybox", package: "busybox-static" },
    Program { name: "depmod", path: "usr/sbin/depmod", package: "kmod" },
];
/// Devices that some scenarios need on the machine that runs egm-vmm itself.
const OPTIONAL: [Device; 4] = [
    Device {
        name: "tun",
        path: "dev/net/tun",
        without: "no virtio-net on this machine; load the module tun",
    },
    Device {
        name: "vhost-net",
        path: "dev/vhost-net",
        without: "virtio-net runs in user space; load the module vhost_net",
    },
    Device {
        name: "vhost-vsock",
        path: "dev/vhost-vsock",
        without: "virtio-vsock runs in user space; load the module vhost_vsock",
    },
    Device { name: "iommufd", path: "dev/iommu", without: "VFIO by group only, if at all" },
];

/// A program, by its path below the root.
struct Program {
    name: &'static str,
    path: &'static str,
    package: &'static str,
}

impl Program {
    fn find(&self, root: &Path) -> Finding {
        let present = root.join(self.path).exists();
        let detail = match present {
            true => format!("/{}", self.path),
            false => format!("install the Debian package {}", self.package),
        };
        Finding { name: self.name, present, detail }
    }
}

/// A device, by its path below the root.
struct Device {
    name: &'static str,
    path: &'static str,
    /// Consequence of its absence, and the remedy.
    without: &'static str,
}

impl Device {
    fn find(&self, root: &Path) -> Finding {
        let present = root.join(self.path).exists();
        let detail = if present { format!("/{}", self.path) } else { self.without.into() };
        Finding { name: self.name, present, detail }
    }
}

impl Host {
    /// Detects what this machine has.
    pub(crate) fn detect(cache: Option<&Cache>) -> Self {
        let privileged = rustix::process::geteuid().is_root();
        Self::detect_below(Path::new("/"), cache, privileged, std::env::consts::ARCH)
    }

    fn detect_below(root: &Path, cache: Option<&Cache>, privileged: bool, architecture: &str) -> Self {
        let kvm = kvm(root);
        let stock = stock_kernels(root, kvm.present);
        let here = stock.present && privileged;
        let mut findings = vec![kvm, stock, administrator(privileged)];
        let lab_from = findings.len();
        findings.push(processor(architecture));
        findings.extend(PROGRAMS.map(|program| program.find(root)));
        findings.push(memory(root));
        let lab = findings.iter().skip(lab_from).all(|f| f.present);
        findings.push(kernel("lab kernel", "host-", cache));
        findings.push(kernel("guest kernel", "guest-", cache));
        findings.push(kernel("emulator", emulator::PREFIX, cache));
        findings.extend(OPTIONAL.map(|device| device.find(root)));
        let place = if here { Some(Where::Kvm) } else { lab.then_some(Where::Lab) };
        Self { findings, place }
    }

    pub(crate) fn missing(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|f| !f.present)
    }
}

fn kvm(root: &Path) -> Finding {
    let name = "kvm";
    match fs::File::options().read(true).write(true).open(root.join("dev/kvm")) {
        Ok(_) => Finding { name, present: true, detail: "/dev/kvm opens".into() },
        Err(error) => {
            let detail = match error.kind() {
                ErrorKind::NotFound => {
                    "no /dev/kvm: virtualisation is off in the firmware, or this is a guest".into()
                }
                ErrorKind::PermissionDenied => "no permission on /dev/kvm: join the group kvm".into(),
                _ => format!("/dev/kvm does not open: {error}"),
            };
            Finding { name, present: false, detail }
        }
    }
}

fn stock_kernels(root: &Path, kvm: bool) -> Finding {
    let pvm = root.join("sys/module/kvm_pvm").exists();
    let detail = match (kvm, pvm) {
        (false, _) => "needs kvm",
        (true, true) => "kvm_pvm emulates guest kernel code one instruction at a time and stops at BMI2",
        (true, false) => "hardware virtualisation",
    };
    Finding { name: "stock kernels", present: kvm && !pvm, detail: detail.into() }
}

fn administrator(privileged: bool) -> Finding {
    let detail = if privileged {
        "may make taps and /run/egm-vmm"
    } else {
        "no taps without it: guests run in the lab"
    };
    Finding { name: "root", present: privileged, detail: detail.into() }
}

/// Whether the lab's emulators run on a processor of `architecture`.
fn processor(architecture: &str) -> Finding {
    let present = emulator::runs_on(architecture).is_ok();
    let detail = match present {
        true => architecture.into(),
        false => format!("{architecture}: {}", emulator::NEEDED),
    };
    Finding { name: "processor", present, detail }
}

/// Emulated hosts that this machine runs at a time. Each keeps one processor busy, a Grace host with two as well.
pub(crate) fn jobs() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let hosts = usize::try_from(available(Path::new("/")) / L1_MEMORY_MIB).unwrap_or(usize::MAX);
    processors.min(hosts).max(1)
}

/// Available memory, in MiB; 0 if unknown.
fn available(root: &Path) -> u64 {
    let text = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|l| l.split_whitespace().next()).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) / 1024
}

fn memory(root: &Path) -> Finding {
    let mib = available(root);
    let detail = format!("{mib} MiB available, the lab takes up to {L1_MEMORY_MIB} MiB");
    Finding { name: "memory", present: mib >= L1_MEMORY_MIB, detail }
}

fn kernel(name: &'static str, prefix: &str, cache: Option<&Cache>) -> Finding {
    let found: Option<PathBuf> = cache.and_then(|c| c.newest(prefix, "")).map(|entry| entry.path);
    let detail =
        found.map_or_else(|| "is fetched when it is first needed".into(), |p| p.display().to_string());
    Finding { name, present: true, detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[&str]) -> (tempfile::TempDir, Host) {
        host_of("x86_64", files)
    }

    fn host_of(architecture: &str, files: &[&str]) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "MemAvailable: 16777216 kB\n").unwrap();
        }
        let host = Host::detect_below(root.path(), None, true, architecture);
        (root, host)
    }

    fn missing<'a>(host: &'a Host, name: &str) -> &'a str {
        &host.missing().find(|f| f.name == name).unwrap().detail
    }

    const LAB: [&str; 3] = ["bin/busybox", "usr/sbin/depmod", "proc/meminfo"];

    #[test]
    fn kvm_that_runs_stock_kernels_is_preferred() {
        let (_root, host) = host(&["dev/kvm"]);
        assert_eq!(host.place, Some(Where::Kvm));
    }

    #[test]
    fn a_page_table_virtualiser_leads_to_the_lab() {
        let mut files = vec!["dev/kvm", "sys/module/kvm_pvm/x"];
        files.extend(LAB);
        let (_root, host) = host(&files);
        assert_eq!(host.place, Some(Where::Lab));
        assert!(missing(&host, "stock kernels").contains("kvm_pvm"));
    }

    #[test]
    fn without_root_the_lab_is_preferred_to_a_machine_without_a_network() {
        let (root, _) = host(&["dev/kvm"]);
        assert_eq!(Host::detect_below(root.path(), None, false, "x86_64").place, None);
    }

    #[test]
    fn an_arm64_host_runs_guests_by_its_own_kvm_or_not_at_all() {
        let (_root, without) = host_of("aarch64", &LAB);
        assert_eq!(without.place, None);
        assert_eq!(missing(&without, "processor"), "aarch64: the emulated hosts need an x86-64 machine");
        assert_eq!(host(&LAB).1.place, Some(Where::Lab), "an x86-64 host with the same files");
        let files = [&LAB[..], &["dev/kvm"]].concat();
        assert_eq!(host_of("aarch64", &files).1.place, Some(Where::Kvm));
    }

    #[test]
    fn an_empty_host_runs_nothing_and_lists_what_to_install() {
        let (_root, host) = host(&[]);
        assert_eq!(host.place, None);
        assert!(missing(&host, "busybox").contains("busybox-static"));
        assert!(missing(&host, "kvm").contains("no /dev/kvm"));
    }
}
