//! QEMU's command line.
//!
//! Key and value options have one escape: a comma in a value is written twice (QEMU's `keyval.c` and `qemu-option.c`).
//! Devices with objects as properties are written as JSON, which those take since QEMU 6.2.

mod devices;
mod memory;

pub(super) use memory::{backend, distances, figure_options};

use egm_config::{Architecture, Console};

use super::command::Command;
use super::guest::Guest;
use super::words::text;
use super::{Export, Options, Output};

/// Debian's UEFI for Arm guests, which alone gives them ACPI (package qemu-efi-aarch64).
pub(super) const ARM_FIRMWARE: &str = "/usr/share/qemu-efi-aarch64/QEMU_EFI.fd";
/// The build that has "acpi-egm-memory".
pub(super) const NVIDIA_BUILD: &str = "NVIDIA's build of QEMU (github.com/NVIDIA/QEMU, nvidia_stable)";

/// Makes QEMU's command line.
pub(super) fn export(guest: &Guest, options: &Options) -> Export {
    let mut qemu = Qemu { guest, options, command: command(guest), notes: guest.notes.clone() };
    qemu.machine();
    qemu.memory();
    qemu.devices();
    qemu.boot();
    qemu.console();
    qemu.unsaid();
    Export { output: Output::Command(qemu.command), notes: qemu.notes }
}

fn command(guest: &Guest) -> Command {
    Command::new(match guest.machine.arch {
        Architecture::X86_64 => "qemu-system-x86_64",
        Architecture::Aarch64 => "qemu-system-aarch64",
    })
}

struct Qemu<'a> {
    guest: &'a Guest,
    options: &'a Options,
    command: Command,
    notes: Vec<String>,
}

/// `id` as QEMU takes it: it begins with a letter.
fn id(id: &str) -> String {
    if id.starts_with(|c: char| c.is_ascii_alphabetic()) { id.to_owned() } else { format!("dev-{id}") }
}

/// `value` in a list of keys and values.
fn value(value: &str) -> String {
    value.replace(',', ",,")
}

impl Qemu<'_> {
    fn machine(&mut self) {
        let machine = &self.guest.machine;
        let hmat = if self.guest.nodes.iter().any(|node| !node.access.is_empty()) { ",hmat=on" } else { "" };
        self.command.option("-name", value(&machine.name));
        self.command.flag("-nodefaults");
        let window = machine.pcie.window64.map(|size| size.get());
        match machine.arch {
            Architecture::X86_64 => {
                self.command.option("-machine", format!("q35,accel=kvm{hmat}"));
                if let Some(bytes) = window {
                    self.command.option("-global", format!("q35-pcihost.pci-hole64-size={bytes}"));
                }
            }
            Architecture::Aarch64 => {
                let window = window.map_or_else(String::new, |bytes| format!(",highmem-mmio-size={bytes}"));
                let machine = format!("virt,accel=kvm,gic-version=3{window}{hmat}");
                self.command.option("-machine", machine);
                let firmware = self.options.firmware.as_deref().unwrap_or(ARM_FIRMWARE);
                self.command.option("-bios", firmware);
            }
        }
        self.command.option("-cpu", "host");
        let cpus = &machine.cpus;
        let smp = format!(
            "cpus={},sockets={},cores={},threads={}",
            cpus.count, cpus.sockets, cpus.cores, cpus.threads
        );
        self.command.option("-smp", smp);
    }

    fn boot(&mut self) {
        let boot = &self.guest.machine.boot;
        self.command.option("-kernel", text(&boot.kernel));
        if let Some(initramfs) = &boot.initramfs {
            self.command.option("-initrd", text(initramfs));
        }
        if !boot.cmdline.is_empty() {
            self.command.option("-append", &boot.cmdline);
        }
    }

    fn console(&mut self) {
        self.command.option("-display", "none");
        let serial = match &self.guest.machine.console {
            Console::Stdio => "stdio".to_owned(),
            Console::Pty => "pty".to_owned(),
            Console::Null => "null".to_owned(),
            Console::File { path } => {
                self.command
                    .option("-chardev", format!("file,id=console,append=on,path={}", value(text(path))));
                "chardev:console".to_owned()
            }
            Console::Socket { path } => {
                let path = value(text(path));
                let chardev = format!("socket,id=console,server=on,wait=off,path={path}");
                self.command.option("-chardev", chardev);
                "chardev:console".to_owned()
            }
        };
        self.command.option("-serial", serial);
    }

    fn unsaid(&mut self) {
        if !self.guest.machine.cpus.affinity.is_empty() {
            self.notes.push(
                "cpus.affinity is left out: QEMU reports the threads of vCPUs by QMP (query-cpus-fast), taskset pins them"
                    .to_owned(),
            );
        }
        if self.guest.machine.arch == Architecture::Aarch64 {
            let firmware = "the guest boots by UEFI, for without it QEMU gives Arm guests a device tree and no ACPI; \
                            --firmware names another than Debian's";
            self.notes.push(firmware.to_owned());
        }
    }
}
