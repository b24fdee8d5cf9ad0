//! Additions of all PEs to one word, and barriers.

use egm_vendor::cuda::{Kind, Shape};
use egm_vendor::nvshmem::SignalOp;

use super::element::Element;
use crate::error::Broken;

/// Additions that each PE signals to each word.
const SIGNALS: u64 = 200;
/// Additions of each thread of a kernel.
const TIMES: u64 = 64;
/// Rounds of [`barrier`]: every other barrier is on the stream, the rest of the host.
const ROUNDS: u16 = 32;
/// Bytes that the late PE of a round fills first.
const LATE: usize = 8 << 20;

/// `nvshmem.atomics`: PE 0 has the words; a kernel's additions go over the address that the library gives for it.
pub(super) fn atomics(element: &mut Element<'_>) -> Result<(), Broken> {
    let memory = element.pe.allocate(64)?;
    element.write(&memory, &[0; 8])?;
    element.pe.barrier();
    let word = memory.range(0, 8)?;
    for _ in 0..SIGNALS {
        element.pe.signal_op_on(word, 3, SignalOp::Add, 0, &element.stream)?;
    }
    element.pe.quiet_on(&element.stream);
    element.stream.synchronize()?;
    let shape = Shape::whole(&element.context);
    let started = egm_vendor::cuda::Memory::new(&element.context, Kind::Pinned, 64)?;
    let peer = element.pe.peer_memory(&memory, 0)?;
    match &peer {
        Some(peer) => {
            let counter = peer.gpu().part(8, 8)?;
            element.kernels.add(&element.stream, shape, counter, TIMES, started.whole())?;
            element.stream.synchronize()?;
        }
        None => element.untrue("its GPU does not reach PE 0's memory"),
    }
    element.pe.barrier();
    if element.me() == 0 {
        let is = element.read(&memory)?;
        let pes = element.count() as u64;
        let should = [3 * SIGNALS * pes, shape.count() * TIMES * pes];
        for (what, (is, should)) in ["signals", "kernels"].into_iter().zip(is.iter().zip(should)) {
            if *is != should {
                element.untrue(format!("{what} of {pes} PEs added up to {is}, not to {should}"));
            }
        }
        element.found.seen.push(format!("{} additions by signals, {} by kernels", SIGNALS * pes, should[1]));
    }
    element.pe.barrier();
    drop(peer);
    element.pe.free(memory)?;
    Ok(())
}

/// `nvshmem.barrier`: in each round another PE is late. A PE that leaves the barrier before the late one has put its
/// word finds the word of an earlier round.
pub(super) fn barrier(element: &mut Element<'_>) -> Result<(), Broken> {
    let pes = element.count();
    let (words, late) = (element.pe.allocate(pes * 8)?, element.pe.allocate(LATE)?);
    let rounds: Vec<u64> = (0..=ROUNDS).map(u64::from).collect();
    let source = element.pe.allocate(rounds.len() * 8)?;
    element.write(&words, &vec![0; pes])?;
    element.write(&source, &rounds)?;
    element.pe.barrier();
    let me = usize::try_from(element.me()).unwrap_or(0);
    let mut old = Vec::new();
    for round in 1..=ROUNDS {
        let at = usize::from(round);
        if at % pes == me {
            element.fill(&late, element.seed_of(element.me(), round))?;
        }
        for pe in 0..element.pe.count() {
            element.pe.put_on(words.range(me * 8, 8)?, source.range(at * 8, 8)?, pe, &element.stream)?;
        }
        let queued = round % 2 == 1;
        if queued {
            element.pe.barrier_on(&element.stream);
            element.stream.synchronize()?;
        } else {
            element.stream.synchronize()?;
            element.pe.barrier();
        }
        // A PE that is ahead may have put its next word already.
        let is = element.read(&words)?;
        let behind = is.iter().position(|word| *word < u64::from(round));
        old.extend(behind.map(|pe| (round, pe, if queued { "on the stream" } else { "of the host" })));
    }
    if let Some((round, pe, which)) = old.first() {
        element.untrue(format!(
            "a barrier {which} let it go before PE {pe} had put its word (round {round}, {} in all)",
            old.len()
        ));
    }
    element.found.seen.push(format!("{ROUNDS} rounds, in each another PE late"));
    element.pe.barrier();
    [words, late, source].into_iter().try_for_each(|memory| element.pe.free(memory))?;
    Ok(())
}
