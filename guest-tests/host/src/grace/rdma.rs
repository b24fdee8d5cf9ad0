//! The story of RDMA on a Grace host: two guests at once, each with a passed network card and a slice of its socket's EGM device,
//! move data into each other's EGM. It is told three times: each guest compares every byte, the wire between the cards was
//! recorded, and what was written last over that wire lies in both slices at the host's addresses.
//!
//! `rdma_rxe` is software: a card's DMA brings packets to the guest's kernel, which copies them to and from the registered memory.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use egm_report::{Check, Line};

use crate::error::LabError;
use crate::frame::{Fault, Frame, timed};
use crate::host_parts::Plan;
use crate::rdma::{pair, together, with_a_card_each};
use crate::roce::{self, Mac, Way, Ways};
use crate::run::Machine;
use crate::scenarios::Scenario;
use crate::slices::physical;

use super::machine::WIRE;

/// The EGM device of the other guest: each can be open once.
const OTHER: &str = "egm5";
/// The cards' addresses (`qemu.rs`).
const CARDS: [Mac; 2] = [[0x52, 0x54, 0, 0xe9, 0, 2], [0x52, 0x54, 0, 0xe9, 0, 6]];
/// What one waits with and the other connects with. Their data differs by its seed.
const WORDS: [&str; 2] = [
    pair!("egm.arg.rdma.rxe=192.168.101.12/24 egm.arg.rdma.listen=192.168.101.12:7471"),
    pair!("egm.arg.seed=2 egm.arg.rdma.rxe=192.168.101.13/24 egm.arg.rdma.peer=192.168.101.12:7471"),
];
/// A guest that has reported stays, so that its memory can be looked at, and is then stopped.
const STAYS: &str = "egm.exit=hang";
const REPORTED: &str = "{\"egm-check\":\"summary\"";
/// Bytes that each guest moves by every kind of request (`egm.arg.size`), and additions that it asks for.
const SIZE: u64 = 65_536;
const ADDITIONS: u64 = 200;
/// Bytes of a packet's data where cards take 1500, and of a word.
const PIECE: usize = 1024;
const WORD: usize = 8;

/// Tells the story of the two cards of `scenario`.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, .. } = *frame;
    let stays = Scenario { end: STAYS, terminate_on: Some(REPORTED), ..*scenario };
    let ([first, second], _) = with_a_card_each(&stays)?;
    let guests = [
        Scenario { name: "listens", words: WORDS[0], ..first },
        Scenario { name: "connects", words: WORDS[1], region: Some(OTHER), ..second },
    ];
    let ended = together(frame, &guests, |guest, machine, folder| {
        let mut seen = None;
        let boot = runner.boot_by(runner.command(machine), guest, machine, folder, |line| {
            if matches!(Line::parse(line), Some(Line::Summary(_))) {
                seen = Some(told("in-place", || in_place(machine)));
            }
        })?;
        Ok((boot, seen))
    })?;
    for (guest, (boot, seen)) in guests.iter().zip(ended) {
        let mark = format!(" ({})", guest.name);
        frame.judge(guest.expected, &boot, &mark);
        frame.cases.extend(seen.map(|case| Check { name: case.name.clone() + &mark, ..case }));
    }
    frame.cases.push(told("wire", || carried(&recorded()?)));
    frame.free();
    frame.no_faults("no-dma-faults");
    Ok(())
}

/// A step that says what it saw.
fn told(name: &str, step: impl FnOnce() -> Result<String, Fault>) -> Check {
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

/// What went over the wire between the cards so far.
fn recorded() -> Result<Ways, Fault> {
    let recording = fs::read(Path::new("/share").join(WIRE))?;
    Ok(roce::read(&recording)?)
}

/// Both guests had every kind of request carried over the wire between their cards, with all of the data.
fn carried(ways: &Ways) -> Result<String, Fault> {
    let [one, other] = CARDS;
    let mut said = Vec::new();
    for (name, way) in [("there", (one, other)), ("back", (other, one))] {
        let way = ways.get(&way).ok_or_else(|| format!("no packet went {name}"))?;
        let Way { written, answered, sent, atomics, .. } = way;
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

/// While the guest of `machine` stays: what went over the wire last in the middle of writes lies in its slice, in host memory. One
/// guest read it there to send it; into the other's nobody but RDMA put it.
fn in_place(machine: &Machine) -> Result<String, Fault> {
    let (start, size) = machine.plan.as_ref().and_then(Plan::slice).ok_or("the plan names no address")?;
    let [one, other] = CARDS;
    let ways = recorded()?;
    // The one that waited made its requests last.
    let way = ways.get(&(one, other)).ok_or("nothing was written over the wire")?;
    let memory = physical(start, size)?;
    let first = find(&way.last, size, |offset| memory.word(offset))?;
    Ok(format!("{} pieces of {PIECE} bytes, one at host address {:#x}", way.last.len(), start + first))
}

/// Where the last of `pieces` lies in memory of `size` bytes, in which all of them must be. What is registered begins with a page,
/// so a piece lies at a multiple of its size.
fn find(pieces: &[Vec<u8>], size: u64, word: impl Fn(u64) -> Option<u64>) -> Result<u64, Fault> {
    let words = |piece: &[u8]| -> Vec<u64> {
        piece.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
    };
    let wanted: Vec<Vec<u64>> = pieces.iter().map(|piece| words(piece)).collect();
    if wanted.is_empty() || wanted.iter().any(|piece| piece.len() * WORD != PIECE) {
        return Err(Fault::Untrue(format!(
            "{} pieces went over the wire, not of {PIECE} bytes each",
            pieces.len()
        )));
    }
    let by_first: BTreeMap<u64, &[u64]> =
        wanted.iter().filter_map(|piece| Some((*piece.first()?, piece.as_slice()))).collect();
    let mut found = BTreeMap::new();
    for offset in (0..size).step_by(PIECE) {
        let Some(piece) = word(offset).and_then(|first| by_first.get(&first)) else { continue };
        if (offset..).step_by(WORD).zip(*piece).all(|(at, meant)| word(at) == Some(*meant)) {
            found.insert(piece.first(), offset);
        }
    }
    let last = wanted.last().and_then(|piece| found.get(&piece.first()));
    match last {
        Some(offset) if found.len() == by_first.len() => Ok(*offset),
        _ => Err(Fault::Untrue(format!("{} of {} pieces lie in the slice", found.len(), by_first.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::select;

    /// A piece that no other number has.
    fn piece(number: u64) -> Vec<u8> {
        (0..(PIECE / WORD) as u64).flat_map(|word| (number << 32 | word).to_le_bytes()).collect()
    }

    fn found(pieces: &[Vec<u8>], memory: &[u8]) -> Option<u64> {
        let word = |offset: u64| {
            let at = usize::try_from(offset).unwrap();
            Some(u64::from_le_bytes(memory.get(at..at + 8)?.try_into().unwrap()))
        };
        find(pieces, memory.len() as u64, word).ok()
    }

    #[test]
    fn all_pieces_must_lie_in_memory_in_any_order_and_to_the_last_byte() {
        let pieces = [piece(1), piece(2), piece(3)];
        let mut memory = [piece(9), piece(3), piece(1), piece(9), piece(2)].concat();
        assert_eq!(found(&pieces, &memory), Some(PIECE as u64));
        *memory.last_mut().unwrap() ^= 1;
        assert_eq!(found(&pieces, &memory), None);
        assert_eq!(found(&pieces[..1], &memory), Some(2 * PIECE as u64));
    }

    #[test]
    fn nothing_on_the_wire_is_not_found_everywhere() {
        assert_eq!(found(&[], &piece(1)), None);
        assert_eq!(found(&[piece(1)[..512].to_vec()], &piece(1)), None);
    }

    #[test]
    fn every_kind_of_request_must_have_gone_both_ways() {
        let [one, other] = CARDS;
        let whole =
            Way { written: SIZE, answered: SIZE, sent: SIZE, atomics: ADDITIONS + 1, last: Vec::new() };
        let ways = |back: Way| Ways::from([((one, other), whole.clone()), ((other, one), back)]);
        assert!(carried(&ways(whole.clone())).is_ok_and(|said| said.contains("back: 65536 bytes written")));
        for back in [
            Way { written: SIZE - 1, ..whole.clone() },
            Way { answered: 0, ..whole.clone() },
            Way { sent: 0, ..whole.clone() },
            Way { atomics: ADDITIONS, ..whole.clone() },
        ] {
            assert!(carried(&ways(back)).is_err());
        }
        assert!(carried(&Ways::from([((one, other), whole)])).is_err());
    }

    #[test]
    fn the_cards_are_those_of_the_emulated_host_and_the_guests_differ() {
        let scenario = select(&["grace-rdma".into()], true).unwrap().remove(0);
        let ([first, second], _) = with_a_card_each(&scenario).unwrap();
        assert_eq!((first.passed, second.passed), (&["0000:02:00.0"][..], &["0000:06:00.0"][..]));
        assert_ne!(scenario.region, Some(OTHER));
        assert!(WORDS.iter().all(|words| words.contains(&format!("egm.arg.size={SIZE} "))));
    }
}
