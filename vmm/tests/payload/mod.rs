//! Guests of a few hundred bytes that run wherever /dev/kvm opens, also where no Linux does.
//!
//! A payload prints what it found on the serial port. It ends with "ok" and a power off, or with "failed: …", the claim
//! that does not hold, and a power off too.

pub(crate) mod code;
pub(crate) mod elf;
pub(crate) mod long_mode;
pub(crate) mod programs;

use code::{Code, Label, Width};
use elf::Entry;

/// Where payloads are loaded: 2 MiB, away from the edges of RAM and from what boot loaders put below 1 MiB.
pub(crate) const BASE: u32 = 0x20_0000;
/// The stack grows down from here.
const STACK: u32 = BASE - 16;

/// The ports that a payload ends by and speaks to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ports {
    pub(crate) serial: u16,
    pub(crate) sleep: u16,
    pub(crate) reset: u16,
    pub(crate) pvpanic: u16,
}

impl Ports {
    /// What x86 plans have. QEMU has them too, with `-M microvm -device isa-debug-exit,iobase=0x600,iosize=1`.
    pub(crate) const USUAL: Self = Self { serial: 0x3f8, sleep: 0x600, reset: 0x604, pvpanic: 0x505 };
}

/// A payload being written.
#[derive(Debug)]
pub(crate) struct Payload {
    code: Code,
    ports: Ports,
    print: Label,
    texts: Vec<(Label, String)>,
}

impl Payload {
    pub(crate) fn new(ports: Ports) -> Self {
        let mut code = Code::new(BASE);
        code.raw(&[0xbc]).dword(STACK); // mov esp; in 64-bit mode it clears the upper half
        let print = code.label();
        Self { code, ports, print, texts: Vec::new() }
    }

    /// Prints `text`. Changes `eax`, `edx` and `esi`.
    pub(crate) fn print(&mut self, text: &str) {
        let label = self.code.label();
        self.texts.push((label, text.to_owned()));
        self.code.raw_address(&[0xbe], label); // mov esi
        self.code.call(self.print);
    }

    /// When the last comparison found a difference, the payload ends with "failed: `claim`".
    pub(crate) fn expect_equal(&mut self, claim: &str) {
        let good = self.code.label();
        self.code.je(good);
        self.fail(claim);
        self.code.place(good);
    }

    /// When the last comparison found none, the payload ends with "failed: `claim`".
    pub(crate) fn expect_different(&mut self, claim: &str) {
        let good = self.code.label();
        self.code.jne(good);
        self.fail(claim);
        self.code.place(good);
    }

    fn fail(&mut self, claim: &str) {
        self.print(&format!("failed: {claim}\n"));
        self.power_off();
    }

    /// `\_S5` by the sleep control register (ACPI 6.5, clause 4.8.3.7): SLP_TYP 5, SLP_EN.
    pub(crate) fn power_off(&mut self) {
        self.code.output_byte(self.ports.sleep, 5 << 2 | 1 << 5);
        self.code.halt();
    }

    /// Ends well, and is a file now.
    pub(crate) fn ok(mut self) -> Vec<u8> {
        self.print("ok\n");
        self.power_off();
        self.finish(Entry::Pvh)
    }

    /// The routine that prints, the texts, and the file around it all.
    pub(crate) fn finish(mut self, entry: Entry) -> Vec<u8> {
        self.code.place(self.print);
        self.code.port(self.ports.serial);
        let next = self.code.here();
        let done = self.code.label();
        self.code.raw(&[0xac, 0x84, 0xc0]); // lodsb; test al, al
        self.code.je(done);
        self.code.output(Width::Byte);
        self.code.jmp(next);
        self.code.place(done);
        self.code.raw(&[0xc3]); // ret
        for (label, text) in std::mem::take(&mut self.texts) {
            self.code.place(label);
            self.code.raw(text.as_bytes()).raw(&[0]);
        }
        elf::elf(entry, BASE, &self.code.finish())
    }
}
