//! io_uring: the I/O thread hands jobs to the kernel and goes on; an eventfd signals when some are done.
//!
//! This is an unsafe module: the kernel keeps pointers after the call that gave them. The rules:
//! * a slot owns its job, and with it the guest memory, the vectors that point there, and stays in place until the
//!   kernel has completed it;
//! * dropping the engine first waits for all slots;
//! * no Rust reference into guest memory is made.
#![expect(
    unsafe_code,
    reason = "the ring takes pointers that must outlive the call; slots keep what they point to"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::register::Restriction;
use io_uring::squeue::Entry;
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode};
use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

use super::{Done, Engine, Job};
use crate::eventfd;
use crate::virtio::iovec;

/// A job in flight and the vectors that the kernel may still look at.
struct Slot {
    job: Job,
    vectors: Vec<libc::iovec>,
}

// SAFETY: the pointers in `vectors` lead to guest memory that `job` keeps mapped, and only the kernel follows them.
unsafe impl Send for Slot {}

/// Operations of a disk. The ring refuses others: it would do them past the filters of system calls (`sandbox`).
const OPERATIONS: [u8; 4] =
    [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];

/// A ring and what is in flight on it.
pub(super) struct Uring {
    ring: IoUring,
    event: EventFd,
    /// Kept open for the operations in flight.
    file: Arc<File>,
    slots: Vec<Option<Slot>>,
    in_flight: usize,
}

impl Uring {
    /// A ring for `depth` jobs at a time.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn new(file: &Arc<File>, depth: u16) -> io::Result<Self> {
        // With twice as many places for completions: it cannot overflow.
        let ring: IoUring = IoUring::builder().setup_r_disabled().build(depth.into())?;
        let event = eventfd::new()?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        if !egm_address::fault!("ring-not-restricted") {
            ring.submitter().register_restrictions(&mut OPERATIONS.map(Restriction::sqe_op))?;
        }
        ring.submitter().register_enable_rings()?;
        let slots = std::iter::repeat_with(|| None).take(depth.into()).collect();
        Ok(Self { ring, event, file: Arc::clone(file), slots, in_flight: 0 })
    }

    fn entry(&self, tag: u16) -> Option<Entry> {
        let slot = self.slots.get(usize::from(tag))?.as_ref()?;
        let fd = Fd(self.file.as_raw_fd());
        let (vectors, count) = (slot.vectors.as_ptr(), u32::try_from(slot.vectors.len()).ok()?);
        let entry = match &slot.job {
            Job::Read(transfer) => opcode::Readv::new(fd, vectors, count).offset(transfer.offset).build(),
            Job::Write { transfer, durable } => opcode::Writev::new(fd, vectors, count)
                .offset(transfer.offset)
                .rw_flags(if *durable { libc::RWF_DSYNC } else { 0 })
                .build(),
            Job::Flush => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Job::Punch(span) => opcode::Fallocate::new(fd, span.length())
                .offset(span.offset())
                .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
            Job::Zero(span) => opcode::Fallocate::new(fd, span.length())
                .offset(span.offset())
                .mode(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
        };
        Some(entry.user_data(tag.into()))
    }

    /// Puts what slot `tag` has left to do on the ring.
    fn push(&mut self, tag: u16) {
        let slot = self.slots.get_mut(usize::from(tag)).and_then(Option::as_mut);
        if let Some(Slot { job: Job::Read(transfer) | Job::Write { transfer, .. }, vectors }) = slot {
            (*vectors, _) = iovec::vectors(&transfer.slices());
        }
        let Some(entry) = self.entry(tag) else { return };
        // SAFETY: the slot owns what the entry points to and keeps it until the completion is collected.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        debug_assert!(pushed.is_ok(), "a slot has at most one entry, and the ring a place for each slot");
    }

    fn enter(&mut self, want: usize) {
        loop {
            match self.ring.submit_and_wait(want) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // Short of memory, for instance: entries stay on the ring. Come back by way of the event.
                    let _ = self.event.write(1);
                    return;
                }
                Ok(_) => return,
            }
        }
    }

    /// Result of a completion for its slot; `None` when there is more to do, which is on the ring again.
    fn settle(&mut self, tag: u16, result: i32) -> Option<io::Result<()>> {
        let slot = self.slots.get_mut(usize::from(tag)).and_then(Option::as_mut)?;
        let outcome = match usize::try_from(result) {
            Err(_) => match Errno::from_raw_os_error(result.saturating_neg()) {
                Errno::INTR | Errno::AGAIN => Ok(false),
                errno => Err(errno.into()),
            },
            Ok(bytes) => match &mut slot.job {
                Job::Read(transfer) | Job::Write { transfer, .. } => transfer.advance(bytes),
                Job::Flush | Job::Punch(_) | Job::Zero(_) => Ok(true),
            },
        };
        match outcome {
            Ok(false) => {
                self.push(tag);
                None
            }
            Ok(true) => Some(Ok(())),
            Err(error) => Some(Err(error)),
        }
    }
}

impl Engine for Uring {
    fn event(&self) -> &EventFd {
        &self.event
    }

    fn submit(&mut self, tag: u16, job: Job) {
        if let Some(slot @ None) = self.slots.get_mut(usize::from(tag)) {
            *slot = Some(Slot { job, vectors: Vec::new() });
            self.in_flight = self.in_flight.saturating_add(1);
            self.push(tag);
        }
    }

    fn commit(&mut self) {
        if !self.ring.submission().is_empty() {
            self.enter(0);
        }
    }

    fn collect(&mut self, done: &mut Vec<Done>) {
        let completions: Vec<_> = self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
        for (tag, result) in completions {
            let Ok(tag) = u16::try_from(tag) else { continue };
            if let Some(result) = self.settle(tag, result) {
                if let Some(slot) = self.slots.get_mut(usize::from(tag)) {
                    *slot = None;
                }
                self.in_flight = self.in_flight.saturating_sub(1);
                done.push((tag, result));
            }
        }
        self.commit(); // the rest of short transfers
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut done = Vec::new();
        loop {
            self.collect(&mut done);
            if self.in_flight == 0 {
                return;
            }
            self.enter(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_does_nothing_but_what_a_disk_needs() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let mut engine = match Uring::new(&file, 4) {
            Ok(engine) => engine,
            Err(error) => return println!("skipped: io_uring: {error}"),
        };
        let path = c"/dev/null".as_ptr();
        let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), path).flags(libc::O_RDONLY).build();
        for entry in [open, opcode::Nop::new().build(), opcode::Close::new(Fd(0)).build()] {
            // SAFETY: the path is a constant, and the others point to nothing.
            unsafe { engine.ring.submission().push(&entry.user_data(u64::MAX)) }.unwrap();
            engine.ring.submit_and_wait(1).unwrap();
            let result = engine.ring.completion().next().unwrap().result();
            assert_eq!(result, -libc::EACCES);
        }
        let registered = engine.ring.submitter().unregister_eventfd();
        assert_eq!(registered.unwrap_err().raw_os_error(), Some(libc::EACCES));
    }
}
