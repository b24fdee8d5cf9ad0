//! The report of a refused system call. A signal handler makes it, so it neither allocates nor locks.

use std::fmt::{self, Write};
use std::io;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::calls::name_of;
use crate::arch::native::system_call::ARCHITECTURE;
use crate::error::Blame;

/// The exit code of a process that made a refused call: a bug of ours.
pub(super) const EXIT_CODE: i32 = Blame::Internal as i32;

/// A system call that the filter of its thread does not permit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Refused {
    pub(super) call: u32,
    pub(super) arguments: [u64; 6],
    /// The name of the thread that made it, ended by a NUL.
    pub(super) thread: [u8; THREAD_NAME],
}

/// Bytes of a thread's name, the NUL at its end included.
pub(super) const THREAD_NAME: usize = 16;

impl Refused {
    pub(super) fn print(&self) {
        let mut text = Text::default();
        let _ = self.write(&mut text);
        // A pipe that is not read must not keep the process alive.
        let stderr = io::stderr();
        if poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&Timespec::default())) == Ok(1) {
            let _ = rustix::io::write(stderr.as_fd(), text.as_bytes()); // nothing can be done about a failure
        }
    }

    fn write(&self, to: &mut impl Write) -> fmt::Result {
        let end = self.thread.iter().position(|byte| *byte == 0).unwrap_or(THREAD_NAME);
        let thread =
            self.thread.get(..end).and_then(|name| str::from_utf8(name).ok()).unwrap_or("without a name");
        let name = name_of(self.call, ARCHITECTURE).unwrap_or("a system call without a name here");
        write!(
            to,
            "error: cannot go on: thread {thread} made the system call {name} (number {}) with ",
            self.call
        )?;
        for (index, argument) in self.arguments.iter().enumerate() {
            write!(to, "{}{argument:#x}", if index == 0 { "" } else { ", " })?;
        }
        writeln!(to, ", which the filter of its kind of thread refuses")?;
        writeln!(to, "  help: report this; --sandbox log runs the machine and has the kernel log such calls")
    }
}

/// Text of limited length; the rest is cut off.
struct Text {
    bytes: [u8; 512],
    length: usize,
}

impl Default for Text {
    fn default() -> Self {
        Self { bytes: [0; 512], length: 0 }
    }
}

impl Text {
    fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            let place = self.bytes.get_mut(self.length).ok_or(fmt::Error)?;
            *place = byte;
            self.length = self.length.saturating_add(1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::calls::named;
    use super::*;

    fn text(call: u32, arguments: [u64; 6]) -> String {
        let mut text = Text::default();
        let mut thread = [0; THREAD_NAME];
        thread[..5].copy_from_slice(b"vcpu0");
        Refused { call, arguments, thread }.write(&mut text).unwrap();
        String::from_utf8(text.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn a_report_names_thread_call_and_arguments() {
        let number = named("openat").unwrap().number(ARCHITECTURE).unwrap();
        let report = text(number, [0xffff_ff9c, 0x1000, 0, 0, 0, 0]);
        let expected = format!(
            "error: cannot go on: thread vcpu0 made the system call openat (number {number}) with 0xffffff9c, 0x1000, \
             0x0, 0x0, 0x0, 0x0, which"
        );
        assert!(report.starts_with(&expected) && report.contains("help: "), "{report}");
    }

    #[test]
    fn the_longest_report_fits_and_ends_its_last_line() {
        assert!(text(u32::MAX, [u64::MAX; 6]).ends_with('\n'));
    }

    #[test]
    fn a_long_text_is_cut_off() {
        let mut text = Text::default();
        assert!(text.write_str(&"x".repeat(600)).is_err());
        assert_eq!(text.as_bytes().len(), 512);
    }
}
