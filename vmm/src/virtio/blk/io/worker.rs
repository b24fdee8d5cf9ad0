//! One thread that does jobs one after the other, for hosts that forbid io_uring.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use vmm_sys_util::eventfd::EventFd;

use super::{Done, Engine, Job, Transfer};
use crate::eventfd;
use crate::virtio::iovec::{preadv, pwritev};

/// The thread and the ways to and from it.
pub(super) struct Worker {
    /// `None` only while dropping: the thread ends when it is gone.
    jobs: Option<Sender<(u16, Job)>>,
    done: Receiver<Done>,
    event: Arc<EventFd>,
    in_flight: usize,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the kernel refuses a thread or an eventfd.
    pub(super) fn new(file: &Arc<File>) -> io::Result<Self> {
        let event = Arc::new(eventfd::new()?);
        let (jobs, todo) = channel::<(u16, Job)>();
        let (finished, done) = channel();
        let (file, bell) = (Arc::clone(file), Arc::clone(&event));
        let thread = thread::Builder::new().name("blk".into()).spawn(move || {
            for (tag, job) in todo {
                let result = perform(&file, job);
                if finished.send((tag, result)).is_err() {
                    return;
                }
                let _ = bell.write(1); // a full counter is readable already
            }
        })?;
        Ok(Self { jobs: Some(jobs), done, event, in_flight: 0, thread: Some(thread) })
    }
}

impl Engine for Worker {
    fn event(&self) -> &EventFd {
        &self.event
    }

    fn submit(&mut self, tag: u16, job: Job) {
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send((tag, job)).is_ok());
        self.in_flight = self.in_flight.saturating_add(usize::from(sent));
    }

    fn commit(&mut self) {}

    fn collect(&mut self, done: &mut Vec<Done>) {
        let before = done.len();
        done.extend(self.done.try_iter());
        self.in_flight = self.in_flight.saturating_sub(done.len().saturating_sub(before));
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was reported there
        }
    }
}

fn perform(file: &File, job: Job) -> io::Result<()> {
    let keep = FallocateFlags::KEEP_SIZE;
    match job {
        Job::Read(mut transfer) => repeat(&mut transfer, |t| preadv(file.as_fd(), &t.slices(), t.offset)),
        Job::Write { mut transfer, durable } => {
            repeat(&mut transfer, |t| pwritev(file.as_fd(), &t.slices(), t.offset))?;
            if durable { Ok(fdatasync(file)?) } else { Ok(()) }
        }
        Job::Flush => Ok(fdatasync(file)?),
        Job::Punch(span) => {
            Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | keep, span.offset(), span.length())?)
        }
        Job::Zero(span) => {
            Ok(fallocate(file, FallocateFlags::ZERO_RANGE | keep, span.offset(), span.length())?)
        }
    }
}

/// The kernel may do less than all at once.
fn repeat(transfer: &mut Transfer, call: impl Fn(&Transfer) -> io::Result<usize>) -> io::Result<()> {
    while !transfer.advance(call(transfer)?)? {}
    Ok(())
}
