//! How bytes get from and to the disk: [`uring`] where the kernel lets us, [`worker`] where it does not. Both take
//! the same jobs and pass the same tests.

mod uring;
mod worker;

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::io::Errno;
use vm_memory::{GuestMemoryMmap, VolatileSlice};
use vmm_sys_util::eventfd::EventFd;

use super::disk::DiskSpan;
use super::request::Data;
use crate::virtio::ring;

/// The rest of a read or write.
#[derive(Debug)]
pub(super) struct Transfer {
    memory: Arc<GuestMemoryMmap>,
    data: Data,
    offset: u64,
}

impl Transfer {
    /// All of `span`, which is as long as `data`.
    pub(super) fn new(memory: Arc<GuestMemoryMmap>, span: DiskSpan, data: Data) -> Self {
        Self { memory, data, offset: span.offset() }
    }

    /// Guest memory of what is left.
    fn slices(&self) -> Vec<VolatileSlice<'_>> {
        let mut slices = Vec::new();
        ring::slices(&self.memory, &self.data.segments, self.data.skip, self.data.length, &mut slices);
        slices
    }

    /// `bytes` went through. Whether nothing is left.
    ///
    /// # Errors
    /// When none went through: the file was truncated.
    fn advance(&mut self, bytes: usize) -> io::Result<bool> {
        if bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.offset = self.offset.saturating_add(bytes);
        self.data.skip = self.data.skip.saturating_add(bytes);
        self.data.length = self.data.length.saturating_sub(bytes);
        Ok(self.data.length == 0)
    }
}

/// Something to do with a disk.
#[derive(Debug)]
pub(super) enum Job {
    /// From the disk to guest memory.
    Read(Transfer),
    /// Memory to disk; when `durable`, it is on the medium when the job is done.
    Write {
        /// Memory and disk span.
        transfer: Transfer,
        /// Whether a flush is part of it.
        durable: bool,
    },
    /// Makes earlier writes durable, as fdatasync(2) does.
    Flush,
    /// Gives space back; what is read there afterwards is zero. On a block device the kernel does the same by the
    /// device's own commands.
    Punch(DiskSpan),
    /// Makes it zero and keeps the space.
    Zero(DiskSpan),
}

/// A finished job: the number that it was submitted with, and how it went.
pub(super) type Done = (u16, io::Result<()>);

/// An engine. Dropping it waits for what is in flight, as the kernel may still write to guest memory.
pub(super) trait Engine: Send {
    /// Readable when jobs are done.
    fn event(&self) -> &EventFd;

    /// Takes a job; `tag` is below the depth and not in flight.
    fn submit(&mut self, tag: u16, job: Job);

    /// Starts what was submitted.
    fn commit(&mut self);

    /// Appends finished jobs to `done`. Never waits: the event signals more.
    fn collect(&mut self, done: &mut Vec<Done>);

    /// Jobs that were submitted and not collected.
    fn in_flight(&self) -> usize;
}

/// The best engine that the kernel allows, for at most `depth` jobs at a time.
///
/// # Errors
/// The kernel's, when it is neither missing support nor a forbidden io_uring.
pub(super) fn open(file: &Arc<File>, depth: u16) -> io::Result<Box<dyn Engine>> {
    match uring::Uring::new(file, depth) {
        Ok(engine) => Ok(Box::new(engine)),
        Err(error) if is_refusal(&error) => Ok(Box::new(worker::Worker::new(file)?)),
        Err(error) => Err(error),
    }
}

/// An old kernel, a seccomp filter, `kernel.io_uring_disabled`, or before Linux 5.12 the limit of locked memory.
fn is_refusal(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOSYS | Errno::PERM | Errno::NOMEM))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::virtio::ring::Segment;
    use crate::virtio::testing::{memory, wait_readable};

    /// Hangs when an event is lost.
    fn wait(engine: &dyn Engine) {
        wait_readable(engine.event());
        engine.event().read().unwrap();
    }

    const SECTORS: u64 = 256;

    fn each(test: impl Fn(&mut dyn Engine, &File, &Arc<GuestMemoryMmap>)) {
        let memory = Arc::new(memory());
        for use_ring in [true, false] {
            let file = Arc::new(tempfile::tempfile().unwrap());
            file.set_len(SECTORS * 512).unwrap();
            if use_ring {
                match uring::Uring::new(&file, 8) {
                    Ok(mut engine) => test(&mut engine, &file, &memory),
                    Err(error) => assert!(is_refusal(&error), "{error}"),
                }
            } else {
                test(&mut worker::Worker::new(&file).unwrap(), &file, &memory);
            }
        }
    }

    fn transfer(memory: &Arc<GuestMemoryMmap>, sector: u64, skip: u64, segments: &[(u64, u32)]) -> Transfer {
        let segments: Vec<Segment> = segments
            .iter()
            .map(|(at, length)| Segment { address: GuestAddress(*at), length: *length })
            .collect();
        let length = ring::total(&segments) - skip;
        let span = DiskSpan::new(SECTORS, sector, length).unwrap();
        Transfer::new(Arc::clone(memory), span, Data { segments, skip, length })
    }

    fn run(engine: &mut dyn Engine, job: Job) -> io::Result<()> {
        engine.submit(3, job);
        engine.commit();
        let mut done = Vec::new();
        while done.is_empty() {
            wait(engine);
            engine.collect(&mut done);
        }
        let [(3, result)] = <[Done; 1]>::try_from(done).unwrap() else { panic!("another tag") };
        assert_eq!(engine.in_flight(), 0);
        result
    }

    #[test]
    fn bytes_go_both_ways_across_segments_and_regions() {
        each(|engine, file, memory| {
            let text: Vec<u8> = (0..1024u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
            memory.write_slice(&text, GuestAddress(0x7_fe10)).unwrap(); // crosses into the second region
            for durable in [false, true] {
                let transfer = transfer(memory, 2, 16, &[(0x7_fe00, 0x210), (0x8_0010, 0x200)]);
                run(engine, Job::Write { transfer, durable }).unwrap();
                let mut back = vec![0; 1024];
                file.read_exact_at(&mut back, 1024).unwrap();
                assert_eq!(back, text);
            }
            run(engine, Job::Read(transfer(memory, 2, 0, &[(0x2000, 1000), (0x3000, 24)]))).unwrap();
            let mut back = vec![0; 1024];
            memory.read_slice(&mut back[..1000], GuestAddress(0x2000)).unwrap();
            memory.read_slice(&mut back[1000..], GuestAddress(0x3000)).unwrap();
            assert_eq!(back, text);
            run(engine, Job::Flush).unwrap();
        });
    }

    #[test]
    fn a_hole_reads_zero_and_its_neighbours_stay() {
        each(|engine, file, _| {
            file.write_all_at(&[7; 16384], 0).unwrap();
            let span = DiskSpan::new(SECTORS, 8, 4096).unwrap();
            run(engine, Job::Punch(span)).unwrap();
            let mut back = vec![0; 16384];
            file.read_exact_at(&mut back, 0).unwrap();
            let zero = |byte: &u8| *byte == 0;
            assert!(
                back[4096..8192].iter().all(zero)
                    && !back[..4096].iter().any(zero)
                    && !back[8192..].iter().any(zero)
            );
        });
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error_not_a_hang() {
        each(|engine, file, memory| {
            file.set_len(512 * 3).unwrap();
            let error = run(engine, Job::Read(transfer(memory, 2, 0, &[(0x2000, 1024)]))).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        });
    }

    #[test]
    fn many_jobs_in_flight_all_come_back_once() {
        each(|engine, _, memory| {
            for tag in 0..8 {
                engine.submit(tag, Job::Read(transfer(memory, tag.into(), 0, &[(0x2000, 512)])));
            }
            engine.commit();
            let mut done = Vec::new();
            while engine.in_flight() != 0 {
                wait(engine);
                engine.collect(&mut done);
            }
            let mut tags: Vec<u16> =
                done.into_iter().map(|(tag, result)| result.map(|()| tag).unwrap()).collect();
            tags.sort_unstable();
            assert_eq!(tags, [0, 1, 2, 3, 4, 5, 6, 7]);
        });
    }
}
