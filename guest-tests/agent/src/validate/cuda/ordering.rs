//! What was written before a flag is there when the flag is seen, in both directions.

use std::time::{Duration, Instant};

use egm_cuda::{MESSAGE_WORDS, Memory, Shape, Words, pattern};

use super::gpu::{self, Family, Gpu, on_family};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// Messages of a direction, each a 128-byte line.
const MESSAGES: u64 = 1 << 16;
/// Index of the flag in a message.
const FLAG: u64 = MESSAGE_WORDS - 1;
/// Threads of the GPU that receive: few, so that both sides are at work at once. One sends, which a processor keeps up with.
const SHAPE: Shape = Shape { blocks: 1, threads: 32 };
/// How long a message may take; a kernel looks so often, which takes a GPU minutes behind PCI.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOKS: u64 = 1 << 28;

/// Messages are whole.
pub(super) fn check(setting: &Setting, family: Family) -> Result<Finding, Broken> {
    on_family(setting, family, true, |gpu, kind, claim| {
        let bytes = MESSAGES * MESSAGE_WORDS * 8;
        let memory = gpu.memory(kind, bytes)?;
        let words = memory.words()?.part(0, bytes / 8);
        clear(words, !setting.seed);
        gpu.kernels.produce(&gpu.stream, Shape::ONE, memory.part(0, bytes)?, setting.seed)?;
        let early = receive(words, setting.seed, claim);
        gpu.stream.synchronize()?;
        let other = setting.seed ^ 1 << 63;
        clear(words, !other);
        let sent = to_gpu(gpu, &memory, words, other, claim)?;
        claim.seen(format!(
            "{kind}: {MESSAGES} messages each way, {early} were waited for by the processor; the GPU was at work when {sent} were sent"
        ));
        Ok(Vec::new())
    })
}

/// No flag is set, and the data is another.
fn clear(words: Words<'_>, poison: u64) {
    gpu::fill(words, poison);
    for message in 0..MESSAGES {
        words.release(message * MESSAGE_WORDS + FLAG, 0);
    }
}

/// Reads each message as soon as its flag is there; returns for how many it had to wait.
fn receive(words: Words<'_>, seed: u64, claim: &mut Claim) -> u64 {
    let (mut waited, mut torn) = (0, 0);
    for message in 0..MESSAGES {
        let (first, begun) = (message * MESSAGE_WORDS, Instant::now());
        let mut looks = 0_u32;
        while words.acquire(first + FLAG) != message + 1 {
            looks += 1;
            if looks.is_multiple_of(1 << 16) && begun.elapsed() > PATIENCE {
                claim.untrue(format!(
                    "message {message} from the GPU did not come within {} s",
                    PATIENCE.as_secs()
                ));
                return waited;
            }
        }
        waited += u64::from(looks > 0);
        torn += u64::from((first..first + FLAG).any(|index| words.read(index) != pattern(seed, index)));
    }
    claim.holds(torn == 0, || {
        format!("{torn} of {MESSAGES} messages from the GPU had their flag before their data")
    });
    waited
}

/// Sends messages to a kernel that waits for them; returns how many were sent while it did.
fn to_gpu(gpu: &Gpu, memory: &Memory, words: Words<'_>, seed: u64, claim: &mut Claim) -> Result<u64, Broken> {
    let ((wrong, found), (started, start)) = (gpu.result(0)?, gpu.result(1)?);
    let slots = memory.part(0, words.count() * 8)?;
    let in_time = std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let begun = Instant::now();
            while start.acquire(0) == 0 && begun.elapsed() < PATIENCE {
                std::hint::spin_loop();
            }
            let in_time = start.acquire(0) != 0;
            send(words, seed);
            in_time
        });
        let launched = gpu.kernels.consume(&gpu.stream, SHAPE, slots, (seed, LOOKS), (wrong, started));
        let done = launched.and_then(|()| gpu.stream.synchronize());
        let in_time = sender.join().unwrap_or(false);
        done.map(|()| in_time)
    })?;
    let [count, index, value, missing] = [0, 1, 2, 3].map(|word| found.read(word));
    claim.holds(count == 0, || {
        format!("{count} words of messages to the GPU came after their flag, for instance {value:#x} at word {index}")
    });
    claim.holds(missing == 0, || format!("{missing} messages to the GPU did not come"));
    Ok(if in_time { MESSAGES } else { 0 })
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
