//! Times by the GPU's clock, and figures of rounds.

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Context, Event, Stream};

use super::turns::Turns;
use crate::error::Broken;

/// Rounds that count; one before them warms up.
pub(crate) const ROUNDS: usize = 7;
/// The same for what goes both ways at once: how two copies share a bus differs by a tenth from round to round.
pub(crate) const ROUNDS_BOTH: usize = 21;
/// Bytes that a round moves at least, by repeating, so that small sizes take a time that can be measured.
pub(crate) const ROUND: u64 = 256 << 20;
/// The same where nothing leaves GPUs and what is between them, which takes a tenth of the time or less.
pub(crate) const ROUND_OF_GPUS: u64 = 2 << 30;
/// Seconds that a GPU works before a round counts that comes after another program's work.
const WARM: f64 = 5e-3;
/// Most repetitions of a round.
const REPEATS: u64 = 64;
const SMALLEST: u64 = 4096;

/// Between two points of a stream, with a second stream in between where there is one.
pub(crate) struct Clock {
    start: Event,
    end: Event,
    joined: Option<Event>,
}

impl Clock {
    /// For streams of these contexts.
    pub(crate) fn new(main: &Context, side: Option<&Context>) -> Result<Self, Broken> {
        let joined = side.map(Event::new).transpose()?;
        Ok(Self { start: Event::new(main)?, end: Event::new(main)?, joined })
    }

    /// Seconds that the GPU takes for what `work` queues on `main`, and on `side`, which starts with it and is awaited.
    pub(crate) fn seconds(
        &self,
        main: &Stream,
        side: Option<&Stream>,
        work: impl FnOnce() -> Result<(), Broken>,
    ) -> Result<f64, Broken> {
        main.record(&self.start)?;
        if let Some(side) = side {
            side.wait(&self.start)?;
        }
        work()?;
        if let (Some(side), Some(joined)) = (side, &self.joined) {
            side.record(joined)?;
            main.wait(joined)?;
        }
        main.record(&self.end)?;
        main.synchronize()?;
        Ok(self.start.seconds_until(&self.end)?)
    }

    /// The same for `once`, queued `times` times. With one stream, one more is queued before the clock starts: the GPU
    /// works on it while the rest is queued. Otherwise the time until the first is queued counts, too: some 3 µs, which
    /// are 4 % of what 256 MiB of an H200's own memory take.
    pub(crate) fn round(
        &self,
        main: &Stream,
        side: Option<&Stream>,
        times: u64,
        once: impl Fn() -> Result<(), Broken>,
    ) -> Result<f64, Broken> {
        if side.is_none() {
            once()?;
        }
        self.seconds(main, side, || (0..times).try_for_each(|_| once()))
    }
}

/// Sizes from 4 KiB to `most`, four times the one before, and `most` itself.
pub(crate) fn sizes(most: u64) -> Vec<u64> {
    let most = (most & !0xfff).max(SMALLEST);
    let mut sizes: Vec<u64> = std::iter::successors(Some(SMALLEST), |size| size.checked_mul(4))
        .take_while(|size| *size < most)
        .collect();
    sizes.push(most);
    sizes
}

/// Repetitions of a transfer of `bytes` in a round that moves `round` bytes.
pub(crate) fn repeats(bytes: u64, round: u64) -> u64 {
    (round / bytes.max(1)).clamp(1, REPEATS)
}

/// The figure of rounds that each move `bytes` once for each of `repeats`, by the seconds of each round.
pub(crate) fn bandwidth(series: String, size: u64, moved: u64, seconds: Vec<f64>) -> Figure {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let bytes = moved as f64;
    let mut rounds: Vec<f64> = seconds.into_iter().map(|seconds| bytes / seconds / 1e9).collect();
    Figure::of(series, Some(size), "GB/s", &mut rounds)
}

/// Seconds of `count` rounds of `round`, after one that is not counted; of the figure `series` at `size` bytes. Where another
/// program was at work before a round, others that are not counted make the GPU, its caches and translations ours again.
pub(crate) fn rounds(
    turns: &Turns,
    series: &str,
    size: u64,
    count: usize,
    mut round: impl FnMut() -> Result<f64, Broken>,
) -> Result<Vec<f64>, Broken> {
    let mut seconds = Vec::new();
    for number in 0..=count {
        let mut worked = if turns.wait(series, size)? { 0.0 } else { WARM };
        while worked < WARM {
            // A hundred rounds are enough, at any reading of the clock.
            worked += round()?.max(WARM / 100.0);
        }
        let took = round()?;
        turns.took(took)?;
        if number > 0 {
            seconds.push(took);
        }
    }
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_go_from_4_kib_to_the_largest() {
        assert_eq!(sizes(64 << 10), [4096, 16384, 65536]);
        assert_eq!(sizes(100_000), [4096, 16384, 65536, 98304]);
        assert_eq!(sizes(0), [4096]);
        assert_eq!(sizes(u64::MAX).len(), 27);
    }

    #[test]
    fn small_transfers_are_repeated_and_large_ones_are_not() {
        let of = |round: u64| [4096, 16 << 20, 256 << 20, 1 << 30].map(|bytes| repeats(bytes, round));
        assert_eq!(of(ROUND), [64, 16, 1, 1]);
        assert_eq!(of(ROUND_OF_GPUS), [64, 64, 8, 2]);
    }

    #[test]
    fn bandwidth_is_bytes_by_the_median_time() {
        let figure = bandwidth("x".into(), 4096, 2_000_000_000, vec![1.0, 2.0, 0.5]);
        assert_eq!((figure.value, figure.least, figure.most, figure.bytes), (2.0, 1.0, 4.0, Some(4096)));
    }
}
