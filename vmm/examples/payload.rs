//! Writes a bare-metal payload as an ELF file, for measurements with egm-vmm and with other VMMs.
//!
//! ```text
//! cargo run -p egm-vmm --example payload -- hello > hello.elf
//! qemu-system-x86_64 -M microvm -nodefaults -display none -serial stdio -no-reboot \
//!     -device isa-debug-exit,iobase=0x600,iosize=1 -kernel hello.elf     # exit code 105
//! ```

#![expect(clippy::unwrap_used, reason = "shared with tests, which fail by panicking")]

#[expect(dead_code, reason = "most payloads are made for a plan, by tests")]
#[path = "../tests/payload/mod.rs"]
mod payload;

use std::io::Write;
use std::process::ExitCode;

use payload::elf::Entry;
use payload::{Ports, programs};

fn main() -> ExitCode {
    let name = std::env::args().nth(1);
    let file = match name.as_deref() {
        Some("hello") => programs::hello(Ports::USUAL, Entry::Pvh),
        Some("hello-linux64") => programs::hello(Ports::USUAL, Entry::Linux64),
        Some("halt") => programs::halt(Ports::USUAL),
        Some("spin") => programs::spin(Ports::USUAL),
        _ => {
            eprintln!("usage: payload hello|hello-linux64|halt|spin > FILE");
            return ExitCode::from(2);
        }
    };
    match std::io::stdout().write_all(&file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: standard output: {error}");
            ExitCode::FAILURE
        }
    }
}
