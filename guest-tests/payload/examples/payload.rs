//! Writes a bare-metal payload as an ELF file, for measurements with egm-vmm and with other VMMs.
//!
//! ```text
//! cargo run -p egm-payload --example payload -- hello > hello.elf
//! qemu-system-x86_64 -M microvm -nodefaults -display none -serial stdio -no-reboot \
//!     -device isa-debug-exit,iobase=0x600,iosize=1 -kernel hello.elf     # exit code 105
//! ```

use std::io::Write;
use std::process::ExitCode;

use egm_payload::{Entry, Ports, halt, hello, spin};

fn main() -> ExitCode {
    let name = std::env::args().nth(1);
    let file = match name.as_deref() {
        Some("hello") => hello(Ports::USUAL, Entry::Pvh),
        Some("hello-linux64") => hello(Ports::USUAL, Entry::Linux64),
        Some("halt") => halt(Ports::USUAL),
        Some("spin") => spin(Ports::USUAL),
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
