//! Data that was written before a flag is there when the flag is seen, in both directions.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use egm_vendor::cuda::{MESSAGE_WORDS, Memory, Messages, Reports, Shape, Words, pattern};

use super::each::{Seen, on_family};
use super::gpu::{self, Family, Gpu};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// Messages of a direction, each a 128-byte line.
const MESSAGES: u64 = 1 << 16;
/// Index of the flag in a message.
const FLAG: u64 = MESSAGE_WORDS - 1;
/// Threads of the GPU that receive: few, so that both sides are at work at once. One sends, which a processor keeps up with.
const SHAPE: Shape = Shape { blocks: 1, threads: 32 };
/// Time in which a kernel has to start; a kernel looks for a message so often, which takes a GPU minutes behind PCI.
const TIMEOUT: Duration = Duration::from_secs(20);
const LOOKS: u64 = 1 << 28;

/// Attempts to have both sides at work at once, each way. One is enough where both have a processor to themselves.
const ATTEMPTS: u32 = 16;

/// Messages are whole. Where both sides never were at work at once, nothing is decided.
pub(super) fn check(setting: &Setting, family: Family) -> Result<Finding, Broken> {
    on_family(setting, family, true, |gpu, kind, claim| {
        let memory = gpu.memory(kind, MESSAGES * MESSAGE_WORDS * 8)?;
        let Some(Received { waited, beside, .. }) =
            until_at_once(claim, setting.seed, |claim, seed| from_gpu(gpu, &memory, seed, claim))?
        else {
            return Ok(Seen::Not(format!(
                "{kind}: whole, but the GPU had sent its last message in each of {ATTEMPTS} attempts before the processor had looked at one"
            )));
        };
        let other = setting.seed ^ 1 << 63;
        if until_at_once(claim, other, |claim, seed| to_gpu(gpu, &memory, seed, claim))?.is_none() {
            return Ok(Seen::Not(format!(
                "{kind}: whole, but a kernel did not begin to wait for messages within {} s in each of {ATTEMPTS} attempts",
                TIMEOUT.as_secs()
            )));
        }
        claim.seen(format!(
            "{kind}: {MESSAGES} messages each way; {beside} were received before the GPU had sent its last one, {waited} of all were waited for; the GPU was at work when all were sent to it"
        ));
        Ok(Seen::Figures(Vec::new()))
    })
}

/// Tries until both sides were at work at once or something is untrue, each time with a seed of its own.
fn until_at_once<T>(
    claim: &mut Claim,
    seed: u64,
    mut attempt: impl FnMut(&mut Claim, u64) -> Result<Option<T>, Broken>,
) -> Result<Option<T>, Broken> {
    for number in 0..ATTEMPTS {
        let seen = attempt(claim, seed.wrapping_add(u64::from(number) << 32))?;
        if seen.is_some() || !claim.is_true() {
            return Ok(seen);
        }
    }
    Ok(None)
}

/// Messages of the GPU, as they were received.
#[derive(Default)]
struct Received {
    /// Number that were not there yet when they were looked for.
    waited: u64,
    /// Number that were received while the last one was not there.
    beside: u64,
    /// Number that had their flag before their data.
    torn: u64,
    /// The first that did not come.
    missing: Option<u64>,
}

/// The GPU sends; nothing where it was done before the processor had received anything. The processor looks for the
/// first message before the GPU starts to send.
fn from_gpu(gpu: &Gpu, memory: &Memory, seed: u64, claim: &mut Claim) -> Result<Option<Received>, Broken> {
    let words = memory.words()?.part(0, MESSAGES * MESSAGE_WORDS);
    clear(words, !seed);
    let slots = memory.part(0, words.count() * 8)?;
    let (looks, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    let received = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            looks.store(true, Ordering::Release);
            receive(words, seed, &ended)
        });
        while !looks.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let sent = gpu.kernels.produce(&gpu.stream, Shape::ONE, Messages { slots, seed });
        let done = sent.and_then(|()| gpu.stream.synchronize());
        ended.store(true, Ordering::Release);
        let received = receiver.join();
        done.map(|()| received)
    })?;
    let received =
        received.map_err(|_| Broken::Other("the thread that receives messages panicked".into()))?;
    if let Some(message) = received.missing {
        claim.untrue(format!("message {message} from the GPU had not come when its kernel had ended"));
    }
    let torn = received.torn;
    claim.holds(torn == 0, || {
        format!("{torn} of {MESSAGES} messages from the GPU had their flag before their data")
    });
    Ok((received.beside > 0).then_some(received))
}

/// No flag is set, and the data is another.
fn clear(words: Words<'_>, poison: u64) {
    gpu::fill(words, poison);
    for message in 0..MESSAGES {
        words.release(message * MESSAGE_WORDS + FLAG, 0);
    }
}

/// Reads each message as soon as its flag is there; the first that is not there when the kernel has ended is missing.
fn receive(words: Words<'_>, seed: u64, ended: &AtomicBool) -> Received {
    let mut received = Received::default();
    let last = (MESSAGES - 1) * MESSAGE_WORDS + FLAG;
    for message in 0..MESSAGES {
        let first = message * MESSAGE_WORDS;
        let there = || words.acquire(first + FLAG) == message + 1;
        let mut waited = false;
        while !there() {
            waited = true;
            // What it sent was sent before it ended.
            if ended.load(Ordering::Acquire) && !there() {
                received.missing = Some(message);
                return received;
            }
            std::hint::spin_loop();
        }
        received.waited += u64::from(waited);
        let torn = (first..first + FLAG).any(|index| words.read(index) != pattern(seed, index));
        received.torn += u64::from(torn);
        received.beside += u64::from(words.acquire(last) != MESSAGES);
    }
    received
}

/// Sends messages to a kernel that waits for them; nothing where it did not begin to in time.
fn to_gpu(gpu: &Gpu, memory: &Memory, seed: u64, claim: &mut Claim) -> Result<Option<()>, Broken> {
    let words = memory.words()?.part(0, MESSAGES * MESSAGE_WORDS);
    clear(words, !seed);
    let ((wrong, found), (started, start)) = (gpu.result(0)?, gpu.result(1)?);
    let (slots, ended) = (memory.part(0, words.count() * 8)?, AtomicBool::new(false));
    let in_time = std::thread::scope(|scope| {
        let ended = &ended;
        let sender = scope.spawn(move || {
            let begun = Instant::now();
            while start.acquire(0) == 0 && !ended.load(Ordering::Acquire) && begun.elapsed() < TIMEOUT {
                std::hint::spin_loop();
            }
            let in_time = start.acquire(0) != 0;
            send(words, seed);
            in_time
        });
        let messages = Messages { slots, seed };
        let launched = gpu.kernels.consume(&gpu.stream, SHAPE, messages, LOOKS, Reports { wrong, started });
        let done = launched.and_then(|()| gpu.stream.synchronize());
        ended.store(true, Ordering::Release);
        let in_time = sender.join().unwrap_or(false);
        done.map(|()| in_time)
    })?;
    let [count, index, value, missing] = [0, 1, 2, 3].map(|word| found.read(word));
    claim.holds(
        start.acquire(0) != 0,
        || "a kernel that waits for messages ended, and the word that it wrote first is not there",
    );
    claim.holds(count == 0, || {
        format!("{count} words of messages to the GPU came after their flag, for instance {value:#x} at word {index}")
    });
    claim.holds(missing == 0, || format!("{missing} messages to the GPU did not come"));
    Ok(in_time.then_some(()))
}

fn send(words: Words<'_>, seed: u64) {
    for message in 0..MESSAGES {
        let first = message * MESSAGE_WORDS;
        for index in first..first + FLAG {
            words.write(index, pattern(seed, index));
        }
        words.release(first + FLAG, message + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_attempt_has_a_seed_of_its_own_and_the_first_that_is_seen_ends_them() {
        let mut seeds = Vec::new();
        let none: Option<()> = until_at_once(&mut Claim::default(), u64::MAX, |_, seed| {
            seeds.push(seed);
            Ok(None)
        })
        .unwrap();
        let distinct: std::collections::BTreeSet<_> = seeds.iter().collect();
        assert!(none.is_none() && seeds.len() == 16 && distinct.len() == 16, "{seeds:x?}");
        let third = until_at_once(&mut Claim::default(), 5, |_, seed| Ok((seed >> 32 == 2).then_some(seed)));
        assert_eq!(third.unwrap(), Some(5 + (2 << 32)));
    }
}
