//! GPUs add to one word at once, and nothing is lost.

use std::time::{Duration, Instant};

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Device, Kind, Memory, Shape};

use super::{on_pairs, pair, several};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;
use crate::validate::cuda::gpu::Gpu;
use crate::validate::cuda::measure::{Clock, ROUNDS};

/// Threads of a GPU that add.
const SHAPE: Shape = Shape { blocks: 8, threads: 128 };
/// Additions by each thread at first; four times as much in each further attempt, until all GPUs were at work at once.
const TIMES: u64 = 256;
const ATTEMPTS: u32 = 5;
/// Additions of each thread in a round that is measured.
const TIMES_OF_ROUND: u64 = 1024;
/// Time in which kernels have to start.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Result of additions by all.
struct Sum {
    /// The sum that they made.
    made: u64,
    /// There was a moment at which every GPU was adding.
    at_once: bool,
}

/// The sum of all additions is right, in the memory of each GPU. Where GPUs never were at work at once, nothing is decided.
pub(super) fn check(setting: &Setting) -> Result<Finding, Broken> {
    let devices = match several()? {
        Ok(devices) => devices,
        Err(finding) => return Ok(finding),
    };
    let (mut claim, mut not, mut decided) = (Claim::default(), Vec::new(), 0);
    for home in &devices {
        let mut peers = Vec::new();
        for device in devices.iter().filter(|device| device.ordinal != home.ordinal) {
            peers.extend(device.can_access(*home)?.then_some(*device));
        }
        if peers.is_empty() {
            continue;
        }
        if at_home(*home, &peers, setting.seed, &mut claim)? {
            decided += 1;
        } else {
            not.push(format!(
                "memory of GPU {}: right, but the GPUs never were at work at once in {ATTEMPTS} attempts",
                home.ordinal
            ));
        }
    }
    if claim.is_true() && decided == 0 {
        return Ok(Finding::skipped(if not.is_empty() {
            "no GPU may reach another one (the reason is in p2p.access)".to_owned()
        } else {
            not.join("; ")
        }));
    }
    not.into_iter().for_each(|reason| claim.seen(format!("not checked: {reason}")));
    Ok(claim.finish())
}

/// Rate of the additions of each GPU to one word of each other GPU's memory, in 10^6 additions a second.
pub(super) fn rate(setting: &Setting) -> Result<Finding, Broken> {
    on_pairs(|from, to, claim| {
        let memory = Memory::for_peers(&to.context, 4096, &[&from.context])?;
        let pinned = Memory::new(&from.context, Kind::Pinned, 4096)?;
        let (word, counter, start) = (pinned.words()?, memory.part(0, 64)?, pinned.part(0, 64)?);
        word.write(0, setting.seed);
        from.stream.copy(counter, start)?;
        let (clock, (started, _)) = (Clock::new(&from.context, None)?, from.result(0)?);
        let additions = SHAPE.count() * TIMES_OF_ROUND;
        let mut rates = Vec::new();
        for _ in 0..=ROUNDS {
            let seconds = clock.seconds(&from.stream, None, || {
                Ok(from.kernels.add(&from.stream, SHAPE, counter, TIMES_OF_ROUND, started)?)
            })?;
            #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
            rates.push(additions as f64 / seconds / 1e6);
        }
        from.stream.copy(start, counter)?;
        from.stream.synchronize()?;
        let right = additions * (ROUNDS as u64 + 1);
        let made = word.read(0).wrapping_sub(setting.seed);
        claim.holds(made == right, || format!("{}: {right} additions make {made}", pair(from, to)));
        rates.remove(0); // the first round includes the start of the kernel's code
        let figure = Figure::of(format!("{}: additions", pair(from, to)), None, "M/s", &mut rates);
        claim.seen(format!("{} {:.0} M/s", figure.series, figure.value));
        Ok(vec![figure])
    })
}

/// A GPU and its peers add to a word of its memory; whether they were seen to do so at once.
fn at_home(home: Device, peers: &[Device], seed: u64, claim: &mut Claim) -> Result<bool, Broken> {
    let gpu = Gpu::new(home)?;
    // Whatever takes its time is made before anything is launched.
    let all = std::iter::once(&home).chain(peers).map(|device| Gpu::new(*device));
    let all = all.collect::<Result<Vec<_>, _>>()?;
    let contexts: Vec<_> = all.iter().skip(1).map(|gpu| &gpu.context).collect();
    let memory = Memory::for_peers(&gpu.context, 4096, &contexts)?;
    for attempt in 0..ATTEMPTS {
        let times = TIMES << (2 * attempt);
        let Sum { made, at_once } = additions(&gpu, &memory, &all, seed, times, claim)?;
        let right = all.len() as u64 * SHAPE.count() * times;
        claim.holds(made == right, || {
            format!("in memory of GPU {}: {right} additions make {made}", home.ordinal)
        });
        if at_once {
            claim.seen(format!(
                "memory of GPU {}: {right} additions by {} GPUs at once",
                home.ordinal,
                all.len()
            ));
            return Ok(true);
        }
    }
    Ok(false)
}

/// Additions by `all` to a word of `memory`, which belongs to the GPU `home`; that one looks at it meanwhile.
fn additions(
    home: &Gpu,
    memory: &Memory,
    all: &[Gpu],
    seed: u64,
    times: u64,
    claim: &mut Claim,
) -> Result<Sum, Broken> {
    let pinned = Memory::new(&home.context, Kind::Pinned, 4096)?;
    let (word, counter) = (pinned.words()?, memory.part(0, 64)?);
    word.write(0, seed);
    home.stream.copy(counter, pinned.part(0, 64)?)?;
    home.stream.synchronize()?;
    let sum = || -> Result<u64, Broken> {
        home.stream.copy(pinned.part(0, 64)?, counter)?;
        home.stream.synchronize()?;
        Ok(word.read(0).wrapping_sub(seed))
    };
    // Words by which each shows that it runs.
    let runs = all.iter().map(|gpu| gpu.result(1)).collect::<Result<Vec<_>, _>>()?;
    for (gpu, (started, _)) in all.iter().zip(&runs) {
        gpu.kernels.add(&gpu.stream, SHAPE, counter, times, *started)?;
    }
    let begun = Instant::now();
    let run = || runs.iter().all(|(_, started)| started.acquire(0) != 0);
    while !run() && begun.elapsed() < TIMEOUT {
        std::hint::spin_loop();
    }
    // All run; and where the word has less than one GPU's part, none of them is done.
    let at_once = run() && sum()? < SHAPE.count() * times;
    all.iter().try_for_each(|gpu| gpu.stream.synchronize())?;
    for (gpu, (_, started)) in all.iter().zip(&runs) {
        claim.holds(started.acquire(0) != 0, || {
            format!(
                "GPU {}: a kernel ended, and the word that it wrote first is not there",
                gpu.device().ordinal
            )
        });
    }
    Ok(Sum { made: sum()?, at_once })
}
