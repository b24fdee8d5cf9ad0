//! An assembler for the few instructions that payloads need.
//!
//! KVM may have to emulate every instruction (`kvm_pvm`, or a CPU without hardware virtualisation), so there is only
//! integer code here that its emulator has always supported. Unless noted, an encoding means the same in 32-bit and in
//! 64-bit mode; "SDM" is the Intel manual, volume 2.
//!
//! Registers: `ebx` is the address, `al/ax/eax` the value, `dx` the port, `esi` random numbers or text, `edi` a count.

/// A place in the code, perhaps not yet known.
#[derive(Debug, Clone, Copy)]
pub struct Label(usize);

/// Size of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// 8 bits.
    Byte,
    /// 16 bits.
    Word,
    /// 32 bits.
    Long,
}

impl Width {
    /// All of them, narrow first.
    pub const ALL: [Self; 3] = [Self::Byte, Self::Word, Self::Long];
}

#[derive(Debug, Clone, Copy)]
enum Reference {
    /// Distance from the end of the field.
    Relative,
    /// Address.
    Absolute,
}

/// Code and data that will lie at `base`.
#[derive(Debug)]
pub struct Code {
    base: u32,
    bytes: Vec<u8>,
    labels: Vec<Option<usize>>,
    references: Vec<(usize, Label, Reference)>,
    /// Whether the code that follows runs in 64-bit mode.
    long_mode: bool,
}

impl Code {
    /// Nothing yet, in 32-bit mode.
    pub fn new(base: u32) -> Self {
        Self { base, bytes: Vec::new(), labels: Vec::new(), references: Vec::new(), long_mode: false }
    }

    /// The finished bytes.
    pub fn finish(mut self) -> Vec<u8> {
        for (at, label, reference) in std::mem::take(&mut self.references) {
            let target = u32::try_from(self.labels[label.0].expect("every label is placed")).unwrap();
            let value = match reference {
                Reference::Absolute => self.base + target,
                Reference::Relative => target.wrapping_sub(u32::try_from(at + 4).unwrap()),
            };
            self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        self.bytes
    }

    /// A place to be named by [`Code::place`].
    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// `label` is here.
    pub fn place(&mut self, label: Label) {
        self.labels[label.0] = Some(self.bytes.len());
    }

    /// A label that is here.
    pub fn here(&mut self) -> Label {
        let label = self.label();
        self.place(label);
        label
    }

    /// The following code runs in 64-bit mode.
    pub fn enter_long_mode(&mut self) {
        self.long_mode = true;
    }

    /// Bytes as they are: data, or an instruction that is used once.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Four bytes, little endian.
    pub fn dword(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    fn refer(&mut self, label: Label, reference: Reference) {
        self.references.push((self.bytes.len(), label, reference));
        self.raw(&[0; 4]);
    }

    /// An instruction that ends with the address of `label`.
    pub fn raw_address(&mut self, bytes: &[u8], label: Label) -> &mut Self {
        self.raw(bytes).refer(label, Reference::Absolute);
        self
    }

    fn jump(&mut self, opcode: &[u8], label: Label) {
        self.raw(opcode).refer(label, Reference::Relative);
    }
    /// Jumps.
    pub fn jmp(&mut self, label: Label) {
        self.jump(&[0xe9], label);
    }
    /// Jumps when the last comparison found no difference.
    pub fn je(&mut self, label: Label) {
        self.jump(&[0x0f, 0x84], label);
    }
    /// Jumps when it found a difference.
    pub fn jne(&mut self, label: Label) {
        self.jump(&[0x0f, 0x85], label);
    }
    /// Calls.
    pub fn call(&mut self, label: Label) {
        self.jump(&[0xe8], label);
    }

    /// `eax` becomes `value`.
    pub fn mov_eax(&mut self, value: u32) {
        self.raw(&[0xb8]).dword(value);
    }
    /// `ecx` becomes `value`.
    pub fn mov_ecx(&mut self, value: u32) {
        self.raw(&[0xb9]).dword(value);
    }
    /// `edx` becomes `value`.
    pub fn mov_edx(&mut self, value: u32) {
        self.raw(&[0xba]).dword(value);
    }
    /// `esi` becomes `value`.
    pub fn mov_esi(&mut self, value: u32) {
        self.raw(&[0xbe]).dword(value);
    }
    /// `edi` becomes `value`.
    pub fn mov_edi(&mut self, value: u32) {
        self.raw(&[0xbf]).dword(value);
    }

    /// `ebx`, in 64-bit mode `rbx`, becomes the address of later accesses.
    pub fn at(&mut self, address: u64) {
        if self.long_mode {
            self.raw(&[0x48, 0xbb]).raw(&address.to_le_bytes());
        } else {
            let address = u32::try_from(address).expect("32-bit mode reaches 4 GiB");
            self.raw(&[0xbb]).dword(address);
        }
    }

    /// `dx` is the port that is accessed.
    pub fn port(&mut self, port: u16) {
        self.mov_edx(port.into());
    }

    /// An access. Its 16 and 32-bit forms are `opcode + 1`, the former with an operand size prefix.
    fn sized(&mut self, width: Width, opcode: u8, rest: &[u8]) {
        match width {
            Width::Byte => self.raw(&[opcode]),
            Width::Word => self.raw(&[0x66, opcode + 1]),
            Width::Long => self.raw(&[opcode + 1]),
        }
        .raw(rest);
    }

    /// Port to `al`, `ax` or `eax`.
    pub fn input(&mut self, width: Width) {
        self.sized(width, 0xec, &[]);
    }
    /// `al`, `ax` or `eax` to port.
    pub fn output(&mut self, width: Width) {
        self.sized(width, 0xee, &[]);
    }
    /// Memory to `al`, `ax` or `eax`.
    pub fn load(&mut self, width: Width) {
        self.sized(width, 0x8a, &[0x03]);
    }
    /// `al`, `ax` or `eax` to memory.
    pub fn store(&mut self, width: Width) {
        self.sized(width, 0x88, &[0x03]);
    }
    /// Compares `al`, `ax` or `eax` with the low bytes of `value`.
    pub fn compare(&mut self, width: Width, value: u32) {
        let bytes = value.to_le_bytes();
        let size = match width {
            Width::Byte => 1,
            Width::Word => 2,
            Width::Long => 4,
        };
        self.sized(width, 0x3c, &bytes[..size]);
    }

    /// `al` to a port.
    pub fn output_byte(&mut self, port: u16, value: u8) {
        self.port(port);
        self.raw(&[0xb0, value]);
        self.output(Width::Byte);
    }

    /// Stops this processor for good.
    pub fn halt(&mut self) {
        let again = self.here();
        self.raw(&[0xfa, 0xf4]); // cli, hlt
        self.jmp(again);
    }

    /// The next of George Marsaglia's 32-bit xorshift numbers in `esi`, which must not start at 0. Changes `eax`.
    pub fn random(&mut self) {
        for shift in [[0xe0, 13], [0xe8, 17], [0xe0, 5]] {
            self.raw(&[0x89, 0xf0]); // mov eax, esi
            self.raw(&[0xc1]).raw(&shift); // shl or shr eax
            self.raw(&[0x31, 0xc6]); // xor esi, eax
        }
    }

    /// `edi -= 1`, and back to `label` until it is 0.
    pub fn count_down(&mut self, label: Label) {
        self.raw(&[0x83, 0xef, 0x01]);
        self.jne(label);
    }
}
