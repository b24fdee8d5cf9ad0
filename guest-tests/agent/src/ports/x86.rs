//! Port instructions. This is an unsafe module.
#![expect(unsafe_code, reason = "port instructions")]

/// Leave to use all ports, held by this thread.
#[derive(Debug)]
pub(crate) struct Ports(());

impl Ports {
    /// Asks the kernel for the ports; `None` when it refuses.
    pub(crate) fn open() -> Option<Self> {
        // SAFETY: changes what this thread may do, not memory.
        (unsafe { libc::iopl(3) } == 0).then_some(Self(()))
    }

    /// Reads `port` and writes `value`, in 1, 2 or 4 bytes (`width` modulo 3).
    pub(crate) fn exchange(&self, port: u16, width: usize, value: u32) {
        use std::arch::asm;
        let [byte, high, ..] = value.to_le_bytes();
        let word = u16::from_le_bytes([byte, high]);
        match width % 3 {
            // SAFETY: the thread may use ports (`open`), and port instructions touch registers only; what the device
            // does is what the caller wants to find out.
            0 => unsafe {
                asm!("in al, dx", "mov al, cl", "out dx, al", in("cl") byte, in("dx") port, out("al") _, options(nomem, nostack));
            },
            // SAFETY: as above.
            1 => unsafe {
                asm!("in ax, dx", "mov ax, cx", "out dx, ax", in("cx") word, in("dx") port, out("ax") _, options(nomem, nostack));
            },
            // SAFETY: as above.
            _ => unsafe {
                asm!("in eax, dx", "mov eax, ecx", "out dx, eax", in("ecx") value, in("dx") port, out("eax") _, options(nomem, nostack));
            },
        }
    }
}
