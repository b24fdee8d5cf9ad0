//! Touches all of a guest's memory before it starts, on many processors.
//!
//! `MADV_POPULATE_WRITE` in chunks from a shared counter: no thread waits for another's slow chunk, and the
//! kernel zeroes on the processor that asks, so workers pinned to the memory's own node fill from that node.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use egm_address::CpuSet;

use crate::mapping::{Mapping, MappingError};
use crate::worker_pool::{self, Task};

/// Bytes that a worker makes present in one call, unless pages are larger: two workers in one page would wait.
/// The kernel holds the address space's lock meanwhile, for which the next worker's stack waits: with 64 MiB, 16 workers
/// came one after the other and took 2.4 times as long.
const CHUNK: usize = 2 << 20;
/// Bytes of memory for each worker.
const SHARE: usize = 64 << 20;

/// Memory that could not be made present.
#[derive(Debug, thiserror::Error)]
#[error("cannot prefault mapping {index}")]
pub struct PrefaultError {
    /// Position among the mappings.
    pub index: usize,
    /// The failure of the first worker that failed.
    #[source]
    pub source: MappingError,
}

/// Number of workers for `bytes` of memory when the host lets this process use `processors`.
pub fn workers_for(bytes: usize, processors: usize) -> usize {
    processors.min(bytes.div_ceil(SHARE)).max(1)
}

/// Makes every page of `mappings` present. Each has the host processors near it, if known. `progress` is
/// called with the bytes done so far, from any worker.
///
/// # Errors
/// The first failure; the others stop at their next chunk.
pub fn prefault(
    mappings: &[(&Mapping, Option<CpuSet>)],
    progress: &(dyn Fn(usize) + Sync),
) -> Result<(), PrefaultError> {
    let (done, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let count = |bytes| {
        let before = done.fetch_add(bytes, Ordering::Relaxed);
        progress(before.saturating_add(bytes));
    };
    let (stop, count) = (&stop, &count);
    let jobs = mappings.iter().enumerate().map(|(index, (mapping, near))| {
        let next = AtomicUsize::new(0);
        let work = move || {
            let result = fill(mapping, &next, stop, count);
            stop.fetch_or(result.is_err(), Ordering::Relaxed);
            result.map_err(|source| PrefaultError { index, source })
        };
        let threads = workers_for(mapping.size(), near.as_ref().map_or(processors, |n| n.len().max(1)));
        Task { threads, near: near.as_ref(), idle: false, work: Box::new(work) }
    });
    worker_pool::run(&jobs.collect::<Vec<_>>()).into_iter().collect()
}

fn fill(
    mapping: &Mapping,
    next: &AtomicUsize,
    stop: &AtomicBool,
    count: &dyn Fn(usize),
) -> Result<(), MappingError> {
    let chunk = CHUNK.max(mapping.fault_size());
    while !stop.load(Ordering::Relaxed) {
        let from = next.fetch_add(chunk, Ordering::Relaxed);
        let size = chunk.min(mapping.size().saturating_sub(from));
        if size == 0 {
            break;
        }
        if !egm_address::fault!("prefault-skipped") {
            mapping.populate(from, size)?;
        }
        count(size);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Anonymous;
    use crate::backing::Backing;

    #[test]
    fn every_page_is_present_afterwards() {
        let memory = Anonymous::new("test", 3 << 20, None).unwrap();
        let mapping = Mapping::new(&memory, 0, 3 << 20, 0).unwrap();
        let reports = AtomicUsize::new(0);
        prefault(&[(&mapping, Some("0".parse().unwrap()))], &|bytes| {
            reports.fetch_max(bytes, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(reports.into_inner(), 3 << 20);
        let blocks = std::os::unix::fs::MetadataExt::blocks(&memory.file().metadata().unwrap());
        assert_eq!(blocks * 512, 3 << 20);
    }

    #[test]
    fn small_memory_gets_one_worker_and_large_memory_all() {
        assert_eq!((workers_for(1, 64), workers_for(usize::MAX, 64), workers_for(1 << 30, 4)), (1, 64, 4));
    }
}
