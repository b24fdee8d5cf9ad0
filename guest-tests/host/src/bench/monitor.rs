//! The monitors that run a payload, and their command lines.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::figures::Report;
use super::smaps::GuestMemory;
use crate::engine::error::LabError;
use crate::engine::peer_program::{PeerName, PeerProgram, find};

/// QEMU's processor. Without architectural capabilities, which not every KVM lets QEMU set.
const QEMU_CPU: &str = "max,-arch-capabilities";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Monitor {
    /// The program under test.
    Egm(PathBuf),
    /// Another build of it, which the user provides.
    OtherEgm(PathBuf),
    /// QEMU's q35 with its default firmware.
    Q35,
    /// QEMU's smallest, with its smallest firmware.
    Microvm,
    /// cloud-hypervisor's program, which the user provides.
    CloudHypervisor(PathBuf),
    /// Firecracker's program, which the user provides.
    Firecracker(PathBuf),
}

/// Payload and memory for a monitor.
#[derive(Debug)]
pub(super) struct Payload {
    pub(super) kernel: PathBuf,
    /// MiB of guest memory.
    pub(super) mib: u64,
    /// Whether all memory is present before the guest starts.
    pub(super) prefault: bool,
}

impl Payload {
    /// Writes `elf` as the kernel `name` in `work`.
    pub(super) fn write(work: &Path, name: &str, elf: &[u8], mib: u64) -> Result<Self, LabError> {
        let kernel = work.join(format!("{name}.elf"));
        fs::write(&kernel, elf).map_err(LabError::file("write", &kernel))?;
        Ok(Self { kernel, mib, prefault: false })
    }

    /// The same with another value of `prefault`.
    pub(super) fn prefaulted(&self, prefault: bool) -> Self {
        Self { kernel: self.kernel.clone(), mib: self.mib, prefault }
    }

    /// Writes the configuration of a monitor that reads one.
    fn configure(&self, extension: &str, json: &serde_json::Value) -> Result<PathBuf, LabError> {
        let path = self.kernel.with_extension(extension);
        fs::write(&path, json.to_string()).map_err(LabError::file("write", &path))?;
        Ok(path)
    }
}

impl Monitor {
    /// Its name in a table.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Egm(_) => "egm-vmm",
            Self::OtherEgm(_) => "egm-vmm, another build",
            Self::Q35 => "QEMU q35",
            Self::Microvm => "QEMU microvm, qboot",
            Self::CloudHypervisor(_) => "cloud-hypervisor",
            Self::Firecracker(_) => "Firecracker",
        }
    }

    /// The mappings that are the memory of a guest with `mib`.
    pub(super) const fn guest_memory(&self, mib: u64) -> GuestMemory {
        match self {
            Self::Egm(_) | Self::OtherEgm(_) => GuestMemory::Named("egm-vmm (deleted)"),
            Self::Q35 | Self::Microvm => GuestMemory::Named("memfd:memory-backend-memfd"),
            // Private anonymous memory has no name.
            Self::CloudHypervisor(_) | Self::Firecracker(_) => GuestMemory::AtLeast { kib: mib << 10 },
        }
    }

    /// The command that starts it; `None` if it has no prefault and the payload needs that.
    pub(super) fn command(&self, payload: &Payload) -> Result<Option<Command>, LabError> {
        let Payload { kernel, mib, prefault } = payload;
        Ok(Some(match self {
            Self::Egm(program) | Self::OtherEgm(program) => {
                let config = payload.configure("json", &egm(payload))?;
                let mut command = Command::new(program);
                command.arg("run").arg(config);
                command
            }
            Self::Q35 | Self::Microvm if *prefault => return Ok(None),
            Self::Q35 => qemu("-machine q35,memory-backend=ram", payload),
            Self::Microvm => qemu("-machine microvm,memory-backend=ram -bios qboot.rom", payload),
            Self::CloudHypervisor(program) => {
                let prefault = if *prefault { "on" } else { "off" };
                let mut command = Command::new(program);
                command.args(["--memory", &format!("size={mib}M,prefault={prefault}"), "--cpus", "boot=1"]);
                command.args(["--serial", "tty", "--console", "off", "--kernel"]).arg(kernel);
                command
            }
            Self::Firecracker(_) if *prefault => return Ok(None),
            Self::Firecracker(program) => {
                let config = payload.configure("firecracker.json", &firecracker(payload))?;
                let mut command = Command::new(program);
                command.args(["--no-api", "--config-file"]).arg(config);
                command
            }
        }))
    }
}

fn egm(payload: &Payload) -> serde_json::Value {
    serde_json::json!({
        "memory": { "size": format!("{}MiB", payload.mib), "prefault": payload.prefault },
        "boot": { "kernel": payload.kernel },
        "console": "stdio",
    })
}

/// Firecracker's configuration (its `docs/getting-started.md`); the console is its standard output.
fn firecracker(payload: &Payload) -> serde_json::Value {
    serde_json::json!({
        "boot-source": { "kernel_image_path": payload.kernel },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": payload.mib },
    })
}

fn qemu(machine: &str, payload: &Payload) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    let mib = payload.mib;
    command.args(
        format!(
            "-accel kvm {machine} -cpu {QEMU_CPU} -smp 1 -m {mib} -display none -nodefaults -serial stdio \
             -object memory-backend-memfd,id=ram,size={mib}M -kernel"
        )
        .split_whitespace(),
    );
    command.arg(&payload.kernel);
    command
}

/// The monitors that the user provides.
pub(super) fn provided(peers: &[PeerProgram]) -> Vec<Monitor> {
    let cloud_hypervisor = find(peers, PeerName::CloudHypervisor).map(Monitor::CloudHypervisor);
    let firecracker = find(peers, PeerName::Firecracker).map(Monitor::Firecracker);
    let other = find(peers, PeerName::EgmVmm).map(Monitor::OtherEgm);
    [other, cloud_hypervisor, firecracker].into_iter().flatten().collect()
}

/// QEMU where it is installed, and the monitors that the user provides.
pub(super) fn peers(report: &mut Report, peers: &[PeerProgram]) -> Vec<Monitor> {
    let mut all = if super::qemu_is_here() { vec![Monitor::Q35, Monitor::Microvm] } else { Vec::new() };
    if all.is_empty() {
        report.skipped.push("QEMU: install the Debian package qemu-system-x86".into());
    }
    all.extend(provided(peers));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(monitor: &Monitor, prefault: bool) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        let payload = Payload::write(folder.path(), "hello", b"", 256).unwrap().prefaulted(prefault);
        let command = monitor.command(&payload).unwrap()?;
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        Some(words.join(" ").replace(&folder.path().display().to_string(), "F"))
    }

    #[test]
    fn a_peer_runs_the_payload_with_the_same_memory() {
        let cloud_hypervisor = Monitor::CloudHypervisor("/c".into());
        assert_eq!(
            words(&cloud_hypervisor, true).unwrap(),
            "--memory size=256M,prefault=on --cpus boot=1 --serial tty --console off --kernel F/hello.elf"
        );
        let firecracker = Monitor::Firecracker("/f".into());
        assert_eq!(words(&firecracker, false).unwrap(), "--no-api --config-file F/hello.firecracker.json");
        assert_eq!(words(&firecracker, true), None);
    }

    #[test]
    fn the_monitors_that_the_user_provides_take_part() {
        let peers = |text: &[&str]| text.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
        let names = |peers: &[PeerProgram]| provided(peers).iter().map(Monitor::name).collect::<Vec<_>>();
        assert_eq!(names(&[]), [""; 0]);
        let both = peers(&["firecracker=/bin/sh", "cloud-hypervisor=/bin/sh"]);
        assert_eq!(names(&both), ["cloud-hypervisor", "Firecracker"]);
        assert_eq!(names(&peers(&["egm-vmm=/bin/sh"])), ["egm-vmm, another build"]);
        assert_eq!(words(&Monitor::OtherEgm("/e".into()), false), words(&Monitor::Egm("/e".into()), false));
    }
}
