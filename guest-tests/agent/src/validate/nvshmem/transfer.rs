//! Puts, gets, and puts with a signal.

use egm_vendor::cuda::{Kind, pattern};
use egm_vendor::nvshmem::{Compare, Memory, Range, Signal};

use super::element::{Element, WHOLE, first_difference};
use crate::error::Broken;
use crate::pattern::Random;

/// Bytes of the memory in which lengths and alignments are tried.
const SMALL: usize = 64 << 10;
/// Number of them, beside the ones that are always tried.
const DRAWN: usize = 12;
/// Lengths that a copy may have a special way for.
const LENGTHS: [usize; 10] = [1, 2, 3, 7, 8, 9, 63, 65, 4095, 4097];
/// Largest memory for which all bytes are compared on both sides, in bytes.
const MOST: u64 = 256 << 20;
/// Messages with a signal.
const MESSAGES: usize = 64;
/// Bytes of such a message.
const MESSAGE: usize = 16 << 10;

/// Source and target of bytes.
#[derive(Debug, Clone, Copy)]
struct Move {
    to: usize,
    from: usize,
    bytes: usize,
}

/// The moves that are tried: all [`LENGTHS`], then some that the seed draws.
fn moves(seed: u64) -> Vec<Move> {
    let mut random = Random::new(seed);
    let mut lengths: Vec<usize> = LENGTHS.to_vec();
    lengths.extend((0..DRAWN).map(|_| 1 + random.below(SMALL / 2)));
    let offset = |random: &mut Random, bytes| random.below(SMALL - bytes + 1);
    lengths
        .into_iter()
        .map(|bytes| Move { to: offset(&mut random, bytes), from: offset(&mut random, bytes), bytes })
        .collect()
}

/// Words as bytes in the order in which they lie in memory.
fn bytes_of(words: impl Iterator<Item = u64>) -> Vec<u8> {
    words.flat_map(u64::to_ne_bytes).collect()
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

/// Content of the memory after a move: poison with the moved bytes in it.
fn expected(poison: u64, source: u64, step: Move) -> Vec<u64> {
    let words = (SMALL / 8) as u64;
    let mut bytes = bytes_of((0..words).map(|index| pattern(poison, index)));
    let from = bytes_of((0..words).map(|index| pattern(source, index)));
    if let (Some(to), Some(from)) =
        (bytes.get_mut(step.to..step.to + step.bytes), from.get(step.from..step.from + step.bytes))
    {
        to.copy_from_slice(from);
    }
    words_of(&bytes)
}

/// `nvshmem.start`: the PEs are there and reach each other.
pub(super) fn start(element: &mut Element<'_>) -> Result<(), Broken> {
    let (major, minor, patch) = element.pe.library().version();
    element
        .found
        .seen
        .push(format!("NVSHMEM {major}.{minor}.{patch} of {}", element.pe.library().path().display()));
    let memory = element.pe.allocate(SMALL)?;
    let mut addresses = Vec::new();
    for pe in 0..element.pe.count() {
        match element.pe.peer_memory(&memory, pe)? {
            Some(peer) => addresses.push(peer.gpu().address()),
            None => element.untrue(format!("its GPU does not reach PE {pe}'s memory")),
        }
    }
    addresses.sort_unstable();
    addresses.dedup();
    if element.found.untrue.is_empty() && addresses.len() != element.count() {
        element.untrue(format!("{} PEs' memory has {} addresses", element.count(), addresses.len()));
    }
    element.pe.barrier();
    element.pe.free(memory)?;
    Ok(())
}

/// One move after the other, each into poison, each compared byte by byte by the PE that has the bytes afterwards.
fn try_moves(element: &mut Element<'_>, what: &str, is_put: bool) -> Result<(), Broken> {
    let (to, from) = (element.pe.allocate(SMALL)?, element.pe.allocate(SMALL)?);
    let steps = moves(element.seed);
    for (round, step) in (0..).zip(&steps) {
        let (source, poison) = (2 * round, 2 * round + 1);
        element.fill(&from, element.seed_of(element.me(), source))?;
        element.fill(&to, element.seed_of(element.me(), poison))?;
        element.pe.barrier();
        let (to_range, from_range) = (to.range(step.to, step.bytes)?, from.range(step.from, step.bytes)?);
        let writer = if is_put { element.previous() } else { element.next() };
        go(element, is_put, to_range, from_range, round % 2 == 1)?;
        element.pe.barrier();
        let should = expected(element.seed_of(element.me(), poison), element.seed_of(writer, source), *step);
        if let Some(at) = first_difference(&element.read(&to)?, &should) {
            let Move { to, bytes, .. } = *step;
            element.untrue(format!(
                "{what} of {bytes} bytes to {to:#x} with PE {writer}: byte {at:#x} is wrong"
            ));
        }
        element.pe.barrier();
    }
    element.pe.free(to)?;
    element.pe.free(from)?;
    element.found.seen.push(format!("{} lengths and alignments", steps.len()));
    Ok(())
}

/// Puts to the next PE or gets from it, at once or by the stream.
fn go(
    element: &Element<'_>,
    is_put: bool,
    to: Range<'_>,
    from: Range<'_>,
    queued: bool,
) -> Result<(), Broken> {
    let (pe, whom, stream) = (&element.pe, element.next(), &element.stream);
    match (is_put, queued) {
        (true, false) => pe.put(to, from, whom)?,
        (true, true) => pe.put_on(to, from, whom, stream)?,
        (false, false) => pe.get(to, from, whom)?,
        (false, true) => pe.get_on(to, from, whom, stream)?,
    }
    if queued {
        pe.quiet_on(stream);
        stream.synchronize()?;
    }
    Ok(())
}

/// A move of as much as the run's largest size allows, compared by a kernel.
fn try_whole(element: &mut Element<'_>, what: &str, is_put: bool) -> Result<(), Broken> {
    let bytes = usize::try_from(element.most.min(MOST)).unwrap_or(SMALL) / 16 * 16;
    let (to, from) = (element.pe.allocate(bytes)?, element.pe.allocate(bytes)?);
    let (source, poison) = (WHOLE, WHOLE + 1);
    element.fill(&from, element.seed_of(element.me(), source))?;
    element.fill(&to, element.seed_of(element.me(), poison))?;
    element.pe.barrier();
    go(element, is_put, to.range(0, bytes)?, from.range(0, bytes)?, true)?;
    element.pe.barrier();
    let writer = if is_put { element.previous() } else { element.next() };
    let wrong = element.differing(&to, element.seed_of(writer, source))?;
    if wrong > 0 {
        element.untrue(format!("{what} of {bytes:#x} bytes with PE {writer}: {wrong} words are wrong"));
    }
    element.found.seen.push(format!("{bytes:#x} bytes at once"));
    element.pe.barrier();
    element.pe.free(to)?;
    element.pe.free(from)?;
    Ok(())
}

/// `nvshmem.put`: lengths and alignments one by one, then as much as the run allows at once.
pub(super) fn put(element: &mut Element<'_>) -> Result<(), Broken> {
    try_moves(element, "put", true)?;
    try_whole(element, "put", true)
}

/// `nvshmem.get`: as [`put`], in the other direction.
pub(super) fn get(element: &mut Element<'_>) -> Result<(), Broken> {
    try_moves(element, "get", false)?;
    try_whole(element, "get", false)
}

/// `nvshmem.signal`: each message has a place of its own, so that a sender that is ahead spoils nothing.
pub(super) fn signal(element: &mut Element<'_>) -> Result<(), Broken> {
    let bytes = MESSAGES * MESSAGE;
    let (to, from) = (element.pe.allocate(bytes)?, element.pe.allocate(bytes)?);
    let word = element.pe.allocate(8)?;
    element.fill(&from, element.seed_of(element.me(), 0))?;
    element.fill(&to, element.seed_of(element.me(), 1))?;
    element.write(&word, &[0])?;
    element.pe.barrier();
    let seen = egm_vendor::cuda::Memory::new(&element.context, Kind::Pinned, bytes as u64)?;
    seen.words()?.fill(element.seed_of(element.me(), 2));
    let receiver = egm_vendor::cuda::Stream::new(&element.context)?;
    exchange(element, &to, &from, &word, &seen, &receiver)?;
    let (is, writer) = (seen.words()?, element.previous());
    let seed = element.seed_of(writer, 0);
    let words = (bytes / 8) as u64;
    let wrong: Vec<u64> = (0..words).filter(|index| is.read(*index) != pattern(seed, *index)).collect();
    if let Some(first) = wrong.first() {
        let message = first * 8 / MESSAGE as u64;
        element.untrue(format!(
            "the signal of message {message} from PE {writer} came before its data: {} words were old",
            wrong.len()
        ));
    }
    element.found.seen.push(format!("{MESSAGES} messages of {MESSAGE:#x} bytes"));
    element.pe.barrier();
    [to, from, word].into_iter().try_for_each(|memory| element.pe.free(memory))?;
    Ok(())
}

/// Sends all messages to the next PE on one stream and takes those of the previous one on another.
fn exchange(
    element: &Element<'_>,
    to: &Memory<'_>,
    from: &Memory<'_>,
    word: &Memory<'_>,
    seen: &egm_vendor::cuda::Memory,
    receiver: &egm_vendor::cuda::Stream,
) -> Result<(), Broken> {
    let (pe, word) = (&element.pe, word.range(0, 8)?);
    let arrived = to.gpu().ok_or_else(|| Broken::Other("the heap is not on this GPU".to_owned()))?;
    for message in 0..MESSAGES {
        let at = message * MESSAGE;
        let number = message as u64 + 1;
        let (to, from) = (to.range(at, MESSAGE)?, from.range(at, MESSAGE)?);
        let signal = Signal { word, value: number };
        pe.put_signal_on(to, from, signal, element.next(), &element.stream)?;
        pe.signal_wait_until_on(word, Compare::AtLeast, number, receiver)?;
        let (at, bytes) = (at as u64, MESSAGE as u64);
        receiver.copy(seen.part(at, bytes)?, arrived.part(at, bytes)?)?;
    }
    element.stream.synchronize()?;
    Ok(receiver.synchronize()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_moves_and_all_stay_inside() {
        let list = |seed| format!("{:?}", moves(seed));
        assert_eq!(list(5), list(5));
        assert_ne!(list(5), list(6));
        for step in moves(9) {
            assert!(step.bytes > 0 && step.to + step.bytes <= SMALL && step.from + step.bytes <= SMALL);
        }
    }

    #[test]
    fn what_is_expected_is_poison_but_for_the_moved_bytes() {
        let step = Move { to: 3, from: 9, bytes: 5 };
        let is = bytes_of(expected(1, 2, step).into_iter());
        let (poison, source) =
            (bytes_of((0..4).map(|i| pattern(1, i))), bytes_of((0..4).map(|i| pattern(2, i))));
        assert_eq!(is.len(), SMALL);
        assert_eq!(is[..3], poison[..3]);
        assert_eq!(is[3..8], source[9..14]);
        assert_eq!(is[8..32], poison[8..32]);
    }
}
