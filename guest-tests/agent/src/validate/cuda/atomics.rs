//! Processors and the GPU add to one word, and nothing is lost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use egm_vendor::cuda::{Attribute, Kind, Memory, Shape, Words};

use super::each::{Seen, on_family};
use super::gpu::{Family, Gpu};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// Threads of the GPU that add.
const SHAPE: Shape = Shape { blocks: 8, threads: 128 };
/// Additions by each thread, in the first attempt.
const TIMES: u64 = 512;
/// Processors' threads, and what each adds.
const PROCESSORS: u64 = 2;
const PROCESSOR_TIMES: u64 = 100_000;
/// Index of the word by which a kernel shows that it runs; not in the counter's cache line.
const STARTED: u64 = 32;
/// Time in which a kernel has to start.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes that are used.
const BYTES: u64 = 4096;

/// Attempts, each with more additions by the GPU, until both were at work at once.
const ATTEMPTS: u32 = 6;

/// Result of additions by both.
struct Sum {
    /// The sum that they made.
    made: u64,
    /// The GPU was still adding when the first processor did.
    at_once: bool,
    /// The word that the kernel writes first was there at its end.
    started: bool,
}

/// The sum is right: at once where the GPU's atomic operations reach processors, otherwise in turns. CUDA promises no
/// more there ("Host Native Atomic" in the programming guide), so losses at once are reported and fail nothing. Where
/// both never were at work at once, nothing is decided.
pub(super) fn check(setting: &Setting, family: Family) -> Result<Finding, Broken> {
    on_family(setting, family, true, |gpu, kind, claim| {
        let memory = gpu.memory(kind, BYTES)?;
        in_turns(gpu, &memory, setting.seed, claim)?;
        // Managed memory is one's own while one adds.
        let strict = kind == Kind::Managed || gpu.context.attributes().has(Attribute::HOST_ATOMICS);
        for attempt in 0..ATTEMPTS {
            let times = TIMES << attempt;
            let Sum { made: sum, at_once, started } = additions(gpu, &memory, setting.seed, times)?;
            let right = SHAPE.count() * times + PROCESSORS * PROCESSOR_TIMES;
            let made = format!("{right} additions by both make {sum}");
            claim.holds(!strict || sum == right, || format!("{kind}: {made}; {}", note(gpu)));
            claim.holds(started, || {
                format!("{kind}: a kernel ended, and the word that it wrote first is not there")
            });
            if at_once {
                let promised =
                    if strict { String::new() } else { format!(", which is not promised: {}", note(gpu)) };
                claim.seen(format!("{kind}: right in turns; at once {made}{promised}"));
                return Ok(Seen::Figures(Vec::new()));
            }
        }
        Ok(Seen::Not(format!(
            "{kind}: right in turns, but the GPU and processors never were at work at once in {ATTEMPTS} attempts"
        )))
    })
}

/// First the GPU adds, then processors do.
fn in_turns(gpu: &Gpu, memory: &Memory, seed: u64, claim: &mut Claim) -> Result<(), Broken> {
    let words = memory.words()?;
    words.write(0, seed);
    words.write(STARTED, 0);
    let (counter, started) = (memory.part(0, 64)?, memory.part(STARTED * 8, 64)?);
    let mut right = 0_u64;
    for turn in 0..2_u64 {
        gpu.kernels.add(&gpu.stream, SHAPE, counter, TIMES, started)?;
        gpu.stream.synchronize()?;
        right += SHAPE.count() * TIMES;
        let sum = words.acquire(0).wrapping_sub(seed);
        claim.holds(sum == right, || format!("turn {turn} of the GPU: {right} additions make {sum}"));
        std::thread::scope(|scope| (0..PROCESSORS).for_each(|_| drop(scope.spawn(|| add(words)))));
        right += PROCESSORS * PROCESSOR_TIMES;
        let sum = words.acquire(0).wrapping_sub(seed);
        claim.holds(sum == right, || format!("turn {turn} of processors: {right} additions make {sum}"));
    }
    Ok(())
}

/// The GPU and processors add, at once if that can be had.
fn additions(gpu: &Gpu, memory: &Memory, seed: u64, times: u64) -> Result<Sum, Broken> {
    let (words, ended) = (memory.words()?, AtomicBool::new(false));
    words.write(0, seed);
    words.write(STARTED, 0);
    let (counter, started) = (memory.part(0, 64)?, memory.part(STARTED * 8, 64)?);
    let begun: Vec<u64> = std::thread::scope(|scope| {
        let ended = &ended;
        let threads: Vec<_> =
            (0..PROCESSORS).map(|_| scope.spawn(move || add_beside(words, ended))).collect();
        let launched = gpu.kernels.add(&gpu.stream, SHAPE, counter, times, started);
        let done = launched.and_then(|()| gpu.stream.synchronize());
        ended.store(true, Ordering::Release);
        let begun = threads.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect();
        done.map(|()| begun)
    })?;
    // A counter that has less than the GPU's part after a processor's addition: the GPU was not done, or that processor's or
    // another's addition was lost, which takes both at once, too.
    let by_gpu = SHAPE.count() * times;
    let at_once = begun.iter().any(|value| value.wrapping_sub(seed) < by_gpu);
    let made = words.acquire(0).wrapping_sub(seed);
    Ok(Sum { made, at_once, started: words.acquire(STARTED) != 0 })
}

/// Waits for the kernel, then adds; returns what the counter was after the first addition, if the kernel was seen to run.
fn add_beside(words: Words<'_>, ended: &AtomicBool) -> Option<u64> {
    let begun = Instant::now();
    while words.acquire(STARTED) == 0 && !ended.load(Ordering::Acquire) && begun.elapsed() < TIMEOUT {
        std::hint::spin_loop();
    }
    let runs = words.acquire(STARTED) != 0;
    words.increment(0);
    let then = words.acquire(0);
    for _ in 1..PROCESSOR_TIMES {
        words.increment(0);
    }
    runs.then_some(then)
}

fn add(words: Words<'_>) {
    for _ in 0..PROCESSOR_TIMES {
        words.increment(0);
    }
}

/// The driver's answer about host atomics, for fault-finding.
fn note(gpu: &Gpu) -> String {
    let value = gpu.context.attributes().get(Attribute::HOST_ATOMICS);
    let value = value.map_or_else(|| "unknown".to_owned(), |value| value.to_string());
    format!("{} is {value}", Attribute::HOST_ATOMICS)
}
