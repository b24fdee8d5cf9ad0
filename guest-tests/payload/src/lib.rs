//! Guests of a few hundred bytes that run wherever /dev/kvm opens, also where no Linux does.
//!
//! A payload prints its result on the serial port. It ends with "ok" and a power off, or with "failed: …", the claim
//! that does not hold, and a power off too.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a payload that cannot be assembled is a mistake in a test")]

mod code;
mod elf;
pub mod long_mode;

pub use code::{Code, Label, Width};
pub use elf::Entry;

/// Load address of payloads: 2 MiB, away from the edges of RAM and from boot loaders' data below 1 MiB.
pub const BASE: u32 = 0x20_0000;
/// The stack grows down from here.
const STACK: u32 = BASE - 16;

/// The ports for a payload's output and its end.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    /// Data of the 16550.
    pub serial: u16,
    /// ACPI sleep control.
    pub sleep: u16,
    /// ACPI reset.
    pub reset: u16,
    /// Panic notification.
    pub pvpanic: u16,
}

impl Ports {
    /// The ports of x86 plans. QEMU has them too, with `-M microvm -device isa-debug-exit,iobase=0x600,iosize=1`.
    pub const USUAL: Self = Self { serial: 0x3f8, sleep: 0x600, reset: 0x604, pvpanic: 0x505 };
}

/// A payload being written.
#[derive(Debug)]
pub struct Payload {
    /// Its code so far.
    pub code: Code,
    /// Its ports for output and its end.
    pub ports: Ports,
    print: Label,
    texts: Vec<(Label, String)>,
}

impl Payload {
    /// An empty one, with a stack.
    pub fn new(ports: Ports) -> Self {
        let mut code = Code::new(BASE);
        code.raw(&[0xbc]).dword(STACK); // mov esp; in 64-bit mode it clears the upper half
        let print = code.label();
        Self { code, ports, print, texts: Vec::new() }
    }

    /// Prints `text`. Changes `eax`, `edx` and `esi`.
    pub fn print(&mut self, text: &str) {
        let label = self.code.label();
        self.texts.push((label, text.to_owned()));
        self.code.raw_address(&[0xbe], label); // mov esi
        self.code.call(self.print);
    }

    /// When the last comparison found a difference, the payload ends with "failed: `claim`".
    pub fn expect_equal(&mut self, claim: &str) {
        let good = self.code.label();
        self.code.je(good);
        self.fail(claim);
        self.code.place(good);
    }

    /// When the last comparison found none, the payload ends with "failed: `claim`".
    pub fn expect_different(&mut self, claim: &str) {
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
    pub fn power_off(&mut self) {
        self.code.output_byte(self.ports.sleep, 5 << 2 | 1 << 5);
        self.code.halt();
    }

    /// Ends well, and is a file now.
    pub fn ok(mut self) -> Vec<u8> {
        self.print("ok\n");
        self.power_off();
        self.finish(Entry::Pvh)
    }

    /// The routine that prints, the texts, and the file around it all.
    pub fn finish(mut self, entry: Entry) -> Vec<u8> {
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

/// Writes a byte to the serial port as soon as possible, prints "hello" and powers off.
pub fn hello(ports: Ports, entry: Entry) -> Vec<u8> {
    let mut payload = Payload::new(ports);
    payload.code.output_byte(ports.serial, b'!');
    payload.print("hello\n");
    payload.power_off();
    payload.finish(entry)
}

/// Prints "ready" and halts with interrupts off, so that only the operator can end it.
pub fn halt(ports: Ports) -> Vec<u8> {
    let mut payload = Payload::new(ports);
    payload.print("ready\n");
    payload.code.halt();
    payload.finish(Entry::Pvh)
}

/// A register that a guest reads, and its expected value.
#[derive(Debug, Clone, Copy)]
pub struct Register {
    /// Its location.
    pub place: Place,
    /// Expected value, if known: another value means that the guest measures something else.
    pub value: Option<u32>,
}

/// Location of a register.
#[derive(Debug, Clone, Copy)]
pub enum Place {
    /// At an address.
    Memory(u32),
    /// In configuration space, by the ports 0xcf8 and 0xcfc: the value for the former.
    Config(u32),
}

/// Writes each of `setup` (address and value) to configuration space, reads each register `reads` times, and prints
/// [`TURN`] before, between and after.
pub fn exits(ports: Ports, setup: &[(u32, u32)], registers: &[Register], reads: u32) -> Vec<u8> {
    let mut payload = Payload::new(ports);
    let select = |code: &mut Code, place: u32| {
        code.port(0xcf8);
        code.mov_eax(place);
        code.output(Width::Long);
        code.port(0xcfc);
    };
    for (place, value) in setup {
        select(&mut payload.code, *place);
        payload.code.mov_eax(*value);
        payload.code.output(Width::Long);
    }
    for register in registers {
        payload.print(&format!("{TURN}\n"));
        match register.place {
            Place::Memory(address) => payload.code.at(address.into()),
            Place::Config(place) => select(&mut payload.code, place),
        }
        payload.code.mov_edi(reads);
        let again = payload.code.here();
        match register.place {
            Place::Memory(_) => payload.code.load(Width::Long),
            Place::Config(_) => payload.code.input(Width::Long),
        }
        payload.code.count_down(again);
        if let Some(value) = register.value {
            payload.code.compare(Width::Long, value);
            payload.expect_equal(&format!("{:x?} is {value:#x}", register.place));
        }
    }
    payload.print(&format!("{TURN}\n{OVER}\n"));
    payload.power_off();
    payload.finish(Entry::Pvh)
}

/// [`exits`] prints this between registers.
pub const TURN: &str = "turn";
/// [`exits`] prints this at the end.
pub const OVER: &str = "over";

/// Prints "zeros" and halts when all of the `bytes` (a multiple of 8) from guest physical address `from` are zero; else
/// it fails.
pub fn zeros(ports: Ports, from: u64, bytes: u64) -> Vec<u8> {
    let mut payload = Payload::new(ports);
    let gibibytes = (from + bytes).div_ceil(1 << 30);
    long_mode::enter(&mut payload.code, u32::try_from(gibibytes).unwrap());
    payload.code.raw(&[0x48, 0xbf]).raw(&from.to_le_bytes()); // mov rdi
    payload.code.raw(&[0x48, 0xb9]).raw(&(bytes / 8).to_le_bytes()); // mov rcx
    payload.code.raw(&[0x31, 0xc0, 0xfc, 0xf3, 0x48, 0xaf]); // xor eax, eax; cld; repe scasq
    payload.expect_equal("every byte is zero");
    payload.print("zeros\n");
    payload.code.halt();
    payload.finish(Entry::Pvh)
}

/// Prints "ready" and loops for ever without an exit.
pub fn spin(ports: Ports) -> Vec<u8> {
    let mut payload = Payload::new(ports);
    payload.print("ready\n");
    let again = payload.code.here();
    payload.code.jmp(again);
    payload.finish(Entry::Pvh)
}
