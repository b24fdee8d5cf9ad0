//! Scenario: RDMA on a Grace host. A guest moves data between its nodes, EGM included. Then two guests, each with an
//! assigned card and a slice of its socket's EGM, move data into each other's EGM; the second has no other memory.
//! Four checks: each guest compares every byte; the wire is recorded; the last data on it lies in both slices at the
//! host's addresses; so do whole packets in the second slice, because its card reaches no other memory.
//!
//! `rdma_rxe` is software: a card's DMA brings packets to the guest's kernel, which copies their data to the registered memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use egm_guest::findings::{Check, Line};

use crate::engine::error::LabError;
use crate::engine::judge::Expected;
use crate::engine::scenario::Scenario;
use crate::hosts::grace::machine::WIRE;
use crate::hosts::parts::Plan;
use crate::rdma::guests::{alone, pair, together, with_a_card_each};
use crate::rdma::roce::{self, Flow, Mac, Wire};
use crate::runner::machine::Machine;
use crate::runner::steps::{Fault, Steps, timed};
use crate::slices::host_words::physical;

/// The EGM device of the other guest: each can be open once.
const OTHER: &str = "egm5";
/// The cards' addresses (`qemu.rs`).
const CARDS: [Mac; 2] = [[0x52, 0x54, 0, 0xe9, 0, 2], [0x52, 0x54, 0, 0xe9, 0, 6]];
/// Kernel words of the guest that listens and of the one that connects. Their data differs by its seed. The first
/// registers memory of its EGM node; the second has one node.
const WORDS: [&str; 2] = [
    pair!("egm.arg.rdma.rxe=192.168.101.12/24 egm.arg.rdma.listen=192.168.101.12:7471"),
    pair!(
        "egm.arg.seed=2 egm.arg.rdma.node=0 egm.arg.rdma.rxe=192.168.101.13/24 egm.arg.rdma.peer=192.168.101.12:7471"
    ),
];
/// A guest stays after its report, so that the lab can read its memory, and is then stopped.
const STAYS: &str = "egm.exit=hang";
const REPORTED: &str = "{\"egm-check\":\"summary\"";
/// Bytes that each guest moves by every kind of request (`egm.arg.size`), and additions that it requests.
const SIZE: u64 = 65_536;
const ADDITIONS: u64 = 200;
/// Maximum size of a recording in bytes; those of this scenario have a fifth.
const MOST: u64 = 256 << 20;
/// Bytes of a packet's data where cards take 1500, and of a word.
const PIECE: usize = 1024;
const WORD: usize = 8;
/// A driver's buffers for packets begin at a multiple of this (a line of an Arm processor's cache), and the packet, too.
const BUFFER: usize = 64;

/// Runs the scenario with its two cards.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, .. } = *steps;
    let ([first, second], _) = with_a_card_each(scenario)?;
    alone(steps, first)?;
    let expected = Expected::power_off(&["numa", "rdma.device", "rdma.pair"]);
    let [first, second] =
        [first, second].map(|guest| Scenario { end: STAYS, terminate_on: Some(REPORTED), expected, ..guest });
    let guests = [
        Scenario { name: "listens", words: WORDS[0], ..first },
        Scenario { name: "connects", words: WORDS[1], region: Some(OTHER), slice_alone: true, ..second },
    ];
    let ended = together(steps, &guests, |guest, machine, folder| {
        let mut seen = Vec::new();
        let boot = runner.boot_by(runner.command(machine), guest, machine, folder, |line| {
            if matches!(Line::parse(line), Some(Line::Summary(_))) {
                seen.push(finding("in-place", || in_place(machine)));
                if guest.slice_alone {
                    seen.push(finding("dma", || brought(machine)));
                }
            }
        })?;
        Ok((boot, seen))
    })?;
    for (guest, (boot, seen)) in guests.iter().zip(ended) {
        let mark = format!(" ({})", guest.name);
        steps.judge(guest.expected, &boot, &mark);
        steps.cases.extend(seen.into_iter().map(|case| Check { name: case.name.clone() + &mark, ..case }));
    }
    steps.cases.push(finding("wire", || carried(&recorded()?)));
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// A step that reports its observation.
fn finding(name: &str, step: impl FnOnce() -> Result<String, Fault>) -> Check {
    let mut seen = String::new();
    let mut case = timed(name, || {
        seen = step()?;
        Ok(())
    });
    if case.reason.is_empty() {
        case.reason = seen;
    }
    case
}

/// The traffic between the cards so far.
fn recorded() -> Result<Wire, Fault> {
    let mut recording = Vec::new();
    File::open(Path::new("/share").join(WIRE))?.take(MOST + 1).read_to_end(&mut recording)?;
    if recording.len() as u64 > MOST {
        return Err(Fault::Untrue(format!("{WIRE} has more than {MOST} bytes")));
    }
    Ok(roce::read(&recording)?)
}

/// Both guests had every kind of request carried over the wire between their cards, with all of the data.
fn carried(wire: &Wire) -> Result<String, Fault> {
    let [one, other] = CARDS;
    let mut said = Vec::new();
    for (name, way) in [("there", (one, other)), ("back", (other, one))] {
        let way = wire.ways.get(&way).ok_or_else(|| format!("no packet went {name}"))?;
        let Flow { written, answered, sent, atomics, .. } = way;
        let figures = format!(
            "{name}: {written} bytes written, {answered} read, {sent} sent, {atomics} atomic operations"
        );
        if [*written, *answered, *sent].iter().any(|bytes| *bytes < SIZE) || *atomics <= ADDITIONS {
            return Err(Fault::Untrue(figures));
        }
        said.push(figures);
    }
    Ok(said.join("; "))
}

/// While the guest of `machine` stays, the last data of the wire lies in its slice, in host memory. In one slice it is
/// the source of transfers; in the other only RDMA can have written it.
fn in_place(machine: &Machine) -> Result<String, Fault> {
    let pieces = recorded()?.pieces;
    // Registered memory begins with a page, so a piece lies at a multiple of its size.
    let found = in_slice(machine, &pieces, PIECE)?;
    match found.last_key_value() {
        // The process that registered the memory has ended, so the guest may have reused pages of it.
        Some((_, address)) if 2 * found.len() > pieces.len() => Ok(format!(
            "{} of {} pieces of {PIECE} bytes, the last at host address {address:#x}",
            found.len(),
            pieces.len()
        )),
        _ => Err(Fault::Untrue(format!("{} of {} pieces lie in the slice", found.len(), pieces.len()))),
    }
}

/// While the guest of `machine` stays, whole packets of the wire lie in its slice, its only memory. Only its card's DMA
/// can have written them. A reused buffer holds another packet, so not all of the last ones are there.
fn brought(machine: &Machine) -> Result<String, Fault> {
    let [one, other] = CARDS;
    let packets = recorded()?.ways.remove(&(one, other)).ok_or("nothing went over the wire")?.packets;
    let found = in_slice(machine, &packets, BUFFER)?;
    let (_, address) = found.last_key_value().ok_or("no packet of the wire lies in the slice")?;
    Ok(format!("{} of the last {} packets, one at host address {address:#x}", found.len(), packets.len()))
}

/// Indices of the `pieces` that lie in the slice of `machine`, with their host addresses.
fn in_slice(machine: &Machine, pieces: &[Vec<u8>], step: usize) -> Result<BTreeMap<usize, u64>, Fault> {
    let slice = machine.plan.as_ref().and_then(Plan::slice).ok_or("the plan names no address")?;
    let memory = physical(slice)?;
    let mut found = find(pieces, step, slice.size, |offset| memory.word(offset));
    found.values_mut().for_each(|offset| *offset += slice.start);
    Ok(found)
}

/// Indices of the `pieces` that lie whole in memory of `size` bytes at a multiple of `step`, with their last offset.
fn find(
    pieces: &[Vec<u8>],
    step: usize,
    size: u64,
    word: impl Fn(u64) -> Option<u64>,
) -> BTreeMap<usize, u64> {
    let mut by_first: BTreeMap<[u8; WORD], Vec<usize>> = BTreeMap::new();
    for (index, piece) in pieces.iter().enumerate() {
        // A piece shorter than a word is ignored.
        if let Some(first) = piece.first_chunk() {
            by_first.entry(*first).or_default().push(index);
        }
    }
    let bytes = |at: u64| word(at).map(u64::to_le_bytes);
    let lies = |piece: &[u8], at: u64| {
        let places = (at..).step_by(WORD);
        piece
            .chunks(WORD)
            .zip(places)
            .all(|(meant, at)| bytes(at).is_some_and(|found| found.starts_with(meant)))
    };
    let mut found = BTreeMap::new();
    for offset in (0..size).step_by(step) {
        let candidates = bytes(offset).and_then(|first| by_first.get(&first));
        let here = candidates
            .into_iter()
            .flatten()
            .filter(|index| pieces.get(**index).is_some_and(|piece| lies(piece, offset)));
        found.extend(here.map(|index| (*index, offset)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::select;

    /// A piece that no other number has.
    fn piece(number: u64) -> Vec<u8> {
        (0..(PIECE / WORD) as u64).flat_map(|word| (number << 32 | word).to_le_bytes()).collect()
    }

    fn found(pieces: &[Vec<u8>], step: usize, memory: &[u8]) -> Vec<(usize, u64)> {
        let word = |offset: u64| {
            let at = usize::try_from(offset).unwrap();
            Some(u64::from_le_bytes(memory.get(at..at + WORD)?.try_into().unwrap()))
        };
        find(pieces, step, memory.len() as u64, word).into_iter().collect()
    }

    #[test]
    fn a_piece_is_found_whole_and_nowhere_else() {
        let pieces = [piece(1), piece(2), piece(3)];
        let mut memory = [piece(9), piece(3), piece(1), piece(9), piece(2)].concat();
        assert_eq!(found(&pieces, PIECE, &memory), [(0, 2048), (1, 4096), (2, 1024)]);
        *memory.last_mut().unwrap() ^= 1;
        assert_eq!(found(&pieces, PIECE, &memory), [(0, 2048), (2, 1024)]);
        assert_eq!(found(&pieces, PIECE, &memory[8..]), []);
        assert_eq!(found(&[], PIECE, &memory), []);
    }

    #[test]
    fn packets_that_begin_alike_differ_to_their_last_byte_and_lie_where_buffers_begin() {
        let packet = |last: u8| [&[7; 60][..], &[last]].concat();
        let buffer = |last: u8| [&packet(last)[..], &[0; 3]].concat();
        let memory = [buffer(1), buffer(2), vec![0; 8], buffer(3), vec![0; 56]].concat();
        assert_eq!(found(&[1, 2, 3].map(packet), BUFFER, &memory), [(0, 0), (1, 64)]);
        assert_eq!(found(&[packet(1)], BUFFER, &memory[..56]), []);
        assert_eq!(found(&[vec![7; 7]], BUFFER, &memory), []);
    }

    #[test]
    fn every_kind_of_request_must_have_gone_both_ways() {
        let [one, other] = CARDS;
        let whole =
            Flow { written: SIZE, answered: SIZE, sent: SIZE, atomics: ADDITIONS + 1, ..Flow::default() };
        let wire =
            |ways: &[((Mac, Mac), Flow)]| Wire { ways: ways.iter().cloned().collect(), ..Wire::default() };
        let ways = |back: Flow| wire(&[((one, other), whole.clone()), ((other, one), back)]);
        assert!(carried(&ways(whole.clone())).is_ok_and(|said| said.contains("back: 65536 bytes written")));
        for back in [
            Flow { written: SIZE - 1, ..whole.clone() },
            Flow { answered: 0, ..whole.clone() },
            Flow { sent: 0, ..whole.clone() },
            Flow { atomics: ADDITIONS, ..whole.clone() },
        ] {
            assert!(carried(&ways(back)).is_err());
        }
        assert!(carried(&wire(&[((one, other), whole.clone())])).is_err());
    }

    #[test]
    fn the_cards_are_those_of_the_emulated_host_and_the_guests_differ() {
        let scenario = select(&["grace-rdma".into()], true).unwrap().remove(0);
        let ([first, second], _) = with_a_card_each(&scenario).unwrap();
        assert_eq!((first.assigned, second.assigned), (&["0000:02:00.0"][..], &["0000:06:00.0"][..]));
        assert_ne!(scenario.region, Some(OTHER));
        assert!(WORDS.iter().all(|words| words.contains(&format!("egm.arg.size={SIZE} "))));
    }
}
