//! Output for a reader that may be slow or asleep: a pipe of ours takes it, and a thread that may wait carries it on. A
//! regular file is no exception: its disk may be full, and its file system may not answer.
//!
//! The descriptor itself cannot be made non-blocking: standard output is one open file, shared with our parent process
//! and often with our own messages. A write may also wait although poll reported room. On the event loop it would
//! delay devices and signals, on a vCPU's thread every other thread that takes the serial port's lock.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Bytes that wait for the reader, where the host gives that much: several boot logs. The kernel's default is 64 KiB.
const CAPACITY: usize = 1 << 20;
/// How long [`Relay::finish`] waits for a reader that takes nothing.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How long [`Relay::drain`] waits: an order above [`GATHER`], and a pause that a guest survives.
const DRAIN: Duration = Duration::from_millis(100);
/// Pause after some output; then all bytes that came meanwhile go together. A guest writes a byte at a time, and waking
/// a thread for each costs the guest more than the byte does, where the two share a processor.
const GATHER: Duration = Duration::from_millis(10);
const STACK: usize = 64 << 10;

/// Input side of the pipe; dropping it waits for the reader, as long as it reads.
#[derive(Debug)]
pub(super) struct Relay {
    entry: Option<PipeWriter>,
    moved: Receiver<()>,
    thread: Option<JoinHandle<()>>,
    /// Bytes given to [`Self::write`].
    came: u64,
    /// Those that the pipe took.
    taken: u64,
    /// Bytes that the thread has written.
    went: Arc<AtomicU64>,
    /// Bytes that it has written or dropped.
    over: Arc<AtomicU64>,
}

impl Relay {
    /// Starts the thread that carries output to `to`.
    ///
    /// # Errors
    /// When the host has no descriptor or no thread left.
    pub(super) fn start(to: OwnedFd) -> io::Result<Self> {
        Self::with_pause(to, || thread::sleep(GATHER))
    }

    /// The same, with `pause` between looks at what was written.
    fn with_pause(to: OwnedFd, pause: impl Fn() + Send + 'static) -> io::Result<Self> {
        let (from, entry) = io::pipe()?;
        rustix::io::ioctl_fionbio(&entry, true)?;
        let _ = rustix::pipe::fcntl_setpipe_size(&entry, CAPACITY); // a refusal costs room, nothing else
        let (progress, moved) = sync_channel(1);
        let (went, over) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let counters = [Arc::clone(&went), Arc::clone(&over)];
        let moved_on = move |moved: Moved, count: usize| {
            let [went, over] = &counters;
            let counter = if moved == Moved::Written { went } else { over };
            counter.fetch_add(u64::try_from(count).unwrap_or(u64::MAX), Ordering::Release);
            let _ = progress.try_send(());
        };
        let carry = move || carry(from, &to, moved_on, pause);
        let thread = Builder::new().name("console".to_owned()).stack_size(STACK).spawn(carry)?;
        Ok(Self { entry: Some(entry), moved, thread: Some(thread), came: 0, taken: 0, went, over })
    }

    /// Takes `data`; bytes that the pipe has no room for are lost, as on a cable.
    pub(super) fn write(&mut self, data: &[u8]) {
        self.came = self.came.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        if let Some(entry) = &mut self.entry {
            let taken = entry.write(data).unwrap_or(0);
            self.taken = self.taken.saturating_add(u64::try_from(taken).unwrap_or(u64::MAX));
        }
    }

    /// Waits until the thread has written or dropped what the pipe took, but not longer than [`DRAIN`]; returns whether it has.
    pub(super) fn drain(&mut self) -> bool {
        let (start, waits) = (Instant::now(), || self.over.load(Ordering::Acquire) < self.taken);
        while waits() {
            let left = DRAIN.saturating_sub(start.elapsed());
            if left.is_zero() || self.moved.recv_timeout(left).is_err() {
                break;
            }
        }
        !waits()
    }

    /// Waits until the thread has written everything, as long as it makes progress; returns how many bytes remain.
    pub(super) fn finish(&mut self) -> u64 {
        if self.entry.take().is_some() {
            loop {
                match self.moved.recv_timeout(TIMEOUT) {
                    Ok(()) => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        let _ = self.thread.take().map(JoinHandle::join);
                        break;
                    }
                    Err(RecvTimeoutError::Timeout) => break, // the thread ends with its reader, or with the process
                }
            }
        }
        self.came.saturating_sub(self.went.load(Ordering::Relaxed))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Step of some output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moved {
    Written,
    /// All of a read is written, or dropped.
    Over,
}

/// Carries output until the other end of `from` is closed. `moved_on` gets the number of bytes of each step; `pause`
/// follows a read that did not fill the buffer.
fn carry(mut from: PipeReader, to: &OwnedFd, moved_on: impl Fn(Moved, usize), pause: impl Fn()) {
    let mut buffer = [0; 4096];
    loop {
        let (mut rest, count) = match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => (buffer.get(..count).unwrap_or_default(), count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        };
        while !rest.is_empty() {
            match rustix::io::write(to, rest) {
                Ok(0) => break,
                Ok(count) => {
                    moved_on(Moved::Written, count);
                    rest = rest.get(count..).unwrap_or_default();
                }
                Err(Errno::INTR) => {}
                // Non-blocking by our own setting, or by a process that has the same file open.
                Err(Errno::AGAIN) => drop(poll(&mut [PollFd::new(to, PollFlags::OUT)], None)),
                Err(_) => break, // no reader, or no room, now
            }
        }
        moved_on(Moved::Over, count);
        if count < buffer.len() {
            pause();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::sync::mpsc::channel;

    use super::*;

    /// Less than any pipe of ours has, and more than `narrow` has.
    const TEXT: usize = 32 << 10;

    /// A pipe that is full after a page.
    fn narrow() -> (PipeReader, PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        rustix::pipe::fcntl_setpipe_size(&writer, 4096).unwrap();
        (reader, writer)
    }

    fn text() -> Vec<u8> {
        (0..=u8::MAX).cycle().take(TEXT).collect()
    }

    #[test]
    fn a_slow_reader_gets_everything_in_order_after_the_end_too() {
        for nonblocking in [false, true] {
            let (mut reader, writer) = narrow();
            rustix::io::ioctl_fionbio(&writer, nonblocking).unwrap();
            let mut relay = Relay::start(writer.into()).unwrap();
            text().iter().for_each(|byte| relay.write(&[*byte]));
            let end = thread::spawn(move || drop(relay));
            let mut read = Vec::new();
            reader.read_to_end(&mut read).unwrap();
            end.join().unwrap();
            assert!(read == text());
        }
    }

    #[test]
    fn a_first_byte_goes_at_once_and_those_that_come_in_the_pause_go_together() {
        let (to, reader) = UnixDatagram::pair().unwrap();
        let (end_pause, paused) = channel();
        let mut relay = Relay::with_pause(to.into(), move || {
            let _ = paused.recv();
        })
        .unwrap();
        let received = || {
            let mut buffer = [0; 64];
            let count = reader.recv(&mut buffer).unwrap(); // hangs when the relay waits
            String::from_utf8_lossy(&buffer[..count]).into_owned()
        };
        relay.write(b"l");
        assert_eq!(received(), "l");
        b"ogin: ".iter().for_each(|byte| relay.write(&[*byte]));
        end_pause.send(()).unwrap();
        assert_eq!(received(), "ogin: ");
        relay.write(b"root");
        drop(end_pause);
        drop(relay);
        assert_eq!(received(), "root");
    }

    #[test]
    fn a_reader_that_takes_nothing_costs_output_and_no_wait() {
        let (mut reader, writer) = narrow();
        let mut relay = Relay::start(writer.into()).unwrap();
        (0..=2 * CAPACITY / TEXT).for_each(|_| relay.write(&text())); // hangs when it waits
        let mut first = vec![0; TEXT];
        reader.read_exact(&mut first).unwrap();
        assert!(first == text());
        drop(reader);
    }

    #[test]
    fn a_reader_that_leaves_stops_nothing() {
        let (reader, writer) = narrow();
        let mut relay = Relay::start(writer.into()).unwrap();
        drop(reader);
        relay.write(&text());
        drop(relay);
    }
}
