//! The parts of cloud-hypervisor's `VmConfig` that answers show of every machine.

use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::cloud::ConsoleOutputMode;
use crate::config::{Boot, Console};

/// Bits of a guest address in cloud-hypervisor's document, where it names none.
const PHYS_BITS: u8 = 46;

/// Parts of the machine's `VmConfig`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ShownConfig {
    pub(super) cpus: ShownCpus,
    pub(super) memory: ShownMemory,
    pub(super) payload: ShownPayload,
    /// The serial port, and the console of a document that names it so: the machine has one of both.
    pub(super) serial: ShownConsole,
    pub(super) console: ShownConsole,
}

/// Processors of the guest, which keeps as many as it starts with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ShownCpus {
    pub(super) boot_vcpus: u32,
    pub(super) max_vcpus: u32,
    /// Number of bits of a guest address.
    pub(super) max_phys_bits: u8,
}

/// Memory of the guest, with its slices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ShownMemory {
    /// Size in bytes, slices included.
    pub(super) size: u64,
}

/// Files that are booted, and the kernel's command line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ShownPayload {
    pub(super) kernel: String,
    pub(super) cmdline: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) initramfs: Option<String>,
}

/// Where the output of a console goes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ShownConsole {
    /// Off, Pty, Tty, File, Socket or Null.
    #[schemars(with = "String")]
    pub(super) mode: ConsoleOutputMode,
    /// Path of the pseudo-terminal on the host, while the machine runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<String>,
}

impl From<ConsoleOutputMode> for ShownConsole {
    fn from(mode: ConsoleOutputMode) -> Self {
        Self { mode, file: None }
    }
}

impl From<&Console> for ShownConsole {
    fn from(console: &Console) -> Self {
        let mode = match console {
            Console::Stdio => ConsoleOutputMode::Tty,
            Console::File { .. } => ConsoleOutputMode::File,
            Console::Pty => ConsoleOutputMode::Pty,
            Console::Socket { .. } => ConsoleOutputMode::Socket,
            Console::Null => ConsoleOutputMode::Null,
        };
        mode.into()
    }
}

impl ShownConfig {
    /// Of a machine with `vcpus` processors, `memory` bytes, and `serial` as its only console.
    pub(super) fn new(vcpus: u32, memory: u64, boot: &Boot, serial: &Console) -> Self {
        // Paths of a command line may be no UTF-8, which JSON must be.
        let text = |path: &Path| path.to_string_lossy().into_owned();
        Self {
            cpus: ShownCpus { boot_vcpus: vcpus, max_vcpus: vcpus, max_phys_bits: PHYS_BITS },
            memory: ShownMemory { size: memory },
            payload: ShownPayload {
                kernel: text(&boot.kernel),
                cmdline: boot.cmdline.clone(),
                initramfs: boot.initramfs.as_deref().map(text),
            },
            serial: serial.into(),
            console: ShownConsole::default(),
        }
    }

    /// The same with the consoles as the document names them.
    pub(super) fn with_consoles(self, serial: ShownConsole, console: ShownConsole) -> Self {
        Self { serial, console, ..self }
    }

    /// The same of a machine that runs: with `bits` bits of an address, and `terminal`, which its console may be.
    pub(super) fn running(mut self, bits: u8, terminal: Option<&str>) -> Self {
        self.cpus.max_phys_bits = bits;
        for console in [&mut self.serial, &mut self.console] {
            if console.mode == ConsoleOutputMode::Pty {
                console.file = terminal.map(str::to_owned);
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot() -> Boot {
        serde_json::from_str(r#"{"kernel":"k","initramfs":null,"cmdline":""}"#).unwrap()
    }

    /// kata-containers reads these without defaults: `CpusConfig`, `ConsoleConfig` and `SerialConfig` of its ch-config.
    #[test]
    fn the_parts_have_what_kata_requires() {
        let boot = boot();
        let shown = ShownConfig::new(2, 1 << 30, &boot, &Console::Null);
        let json = serde_json::to_value(&shown).unwrap();
        for (object, key) in [
            ("cpus", "boot_vcpus"),
            ("cpus", "max_vcpus"),
            ("cpus", "max_phys_bits"),
            ("memory", "size"),
            ("serial", "mode"),
            ("console", "mode"),
        ] {
            assert!(!json[object][key].is_null(), "{object}.{key}: {json}");
        }
    }

    #[test]
    fn a_pseudo_terminal_is_shown_under_the_name_that_the_document_gives_it() {
        let boot = boot();
        let shown = ShownConfig::new(1, 1, &boot, &Console::Pty);
        let named = shown.clone().with_consoles(ConsoleOutputMode::Off.into(), ConsoleOutputMode::Pty.into());
        let files = |shown: ShownConfig| {
            let running = shown.running(39, Some("/dev/pts/7"));
            (running.serial.file, running.console.file, running.cpus.max_phys_bits)
        };
        assert_eq!(files(shown), (Some("/dev/pts/7".to_owned()), None, 39));
        assert_eq!(files(named), (None, Some("/dev/pts/7".to_owned()), 39));
    }
}
