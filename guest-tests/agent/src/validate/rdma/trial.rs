//! Memory of CUDA as what an RDMA device writes, reads and adds to. The GPU has the last word on what is in it: a kernel fills
//! and compares, a copy engine brings back.

use egm_vendor::cuda::{Kind, Memory, Shape, Wrong};
use egm_vendor::verbs::{Access, Atomics, Registered, Remote, Work};

use super::super::Setting;
use super::super::cuda::gpu::{self, Gpu};
use super::data::{self, GUARD};
use super::loopback::Loopback;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::Random;
use crate::sys::Mapping;

/// Most bytes that are moved at once.
pub(in crate::validate) const LARGEST: usize = 64 << 20;
/// Odd pieces, each at a place of the seed's.
const PIECES: usize = 32;
/// The largest of them, in bytes.
const PIECE: usize = 8192;
/// Additions to a word of the GPU's.
const ADDITIONS: u64 = 100;

/// Moves data into the GPU's memory and out of it; `has_atomics` if the region was registered for atomics.
pub(in crate::validate) fn tried<M>(
    wire: &Loopback<'_>,
    setting: &Setting,
    gpu: &Gpu,
    memory: &Memory,
    region: &Registered<'_, M>,
    has_atomics: bool,
) -> Result<Finding, Broken> {
    let size = (region.size() - 2 * GUARD).min(LARGEST) & !7;
    let near = Mapping::new(size).map_err(Broken::system(format!("cannot have {size} bytes")))?;
    let near = wire.domain.register(near, Access::ALL)?;
    let mut trial = Trial { wire, gpu, memory, region, near, size, claim: Claim::default() };
    let mut random = Random::new(setting.seed);
    trial.written(random.next(), random.next())?;
    trial.read(random.next(), random.next())?;
    trial.sent(random.next(), random.next())?;
    trial.pieces(&mut random)?;
    if has_atomics && wire.site.abilities.atomics != Atomics::None {
        trial.added(random.next(), random.next())?;
    } else {
        trial.claim.seen("no atomics");
    }
    trial
        .claim
        .seen(format!("{size} bytes written, read and sent, {PIECES} unaligned pieces; a kernel compared"));
    Ok(trial.claim.finish())
}

/// One trial: ordinary memory at the near end, CUDA's at the far one.
struct Trial<'t, M> {
    wire: &'t Loopback<'t>,
    gpu: &'t Gpu,
    memory: &'t Memory,
    region: &'t Registered<'t, M>,
    near: Registered<'t, Mapping>,
    size: usize,
    claim: Claim,
}

impl<M> Trial<'_, M> {
    /// Has the GPU fill `size` bytes from `offset`, both multiples of 8.
    fn fill(&self, offset: usize, size: usize, seed: u64) -> Result<(), Broken> {
        let part = self.memory.part(offset as u64, size as u64)?;
        self.gpu.kernels.fill(&self.gpu.stream, Shape::whole(&self.gpu.context), part, seed)?;
        Ok(self.gpu.stream.synchronize()?)
    }

    /// Has the GPU compare them.
    fn differ(&self, offset: usize, size: usize, seed: u64) -> Result<Option<Wrong>, Broken> {
        self.gpu.compare_at(self.memory, offset as u64..(offset + size) as u64, seed)
    }

    /// Writes may still be on their way after completion: a read behind them arrives after them, as NCCL does it.
    fn flush(&mut self) -> Result<(), Broken> {
        let there = self.region.remote(0, 8)?;
        self.one(self.size - 8, 8, Work::Read(there))
    }

    fn one(&mut self, from: usize, size: usize, work: Work) -> Result<(), Broken> {
        self.wire.requester.post(1, self.near.sge(from, size)?, work)?;
        Ok(self.wire.completions.wait(1, self.wire.site.timeout).map(drop)?)
    }

    /// All of it, by as many requests as they take.
    fn whole(&self, work: fn(Remote) -> Work) -> Result<(), Broken> {
        let there = self.region.remote(GUARD, self.size)?;
        Ok(data::transfer(self.wire, self.size, |at, length| {
            Ok((self.near.sge(at, length)?, work(there.plus(at as u64))))
        })?)
    }

    fn written(&mut self, sent: u64, poison: u64) -> Result<(), Broken> {
        let end = GUARD + self.size;
        self.fill(0, end + GUARD, poison)?;
        store(&mut self.near, self.size, sent);
        self.whole(Work::Write)?;
        self.flush()?;
        let wrong = self.differ(GUARD, self.size, sent)?;
        gpu::note(&mut self.claim, "a write, as the GPU sees it", wrong, sent);
        let before = self.differ(0, GUARD, poison)?;
        gpu::note(&mut self.claim, "what is before a write", before, poison);
        let behind = poison.wrapping_add((end / 8) as u64);
        let after = self.differ(end, GUARD, behind)?;
        gpu::note(&mut self.claim, "what is behind a write", after, behind);
        Ok(())
    }

    fn read(&mut self, sent: u64, poison: u64) -> Result<(), Broken> {
        self.fill(GUARD, self.size, sent)?;
        store(&mut self.near, self.size, poison);
        self.whole(Work::Read)?;
        if let Some(at) = difference(&self.near, self.size, sent) {
            self.claim
                .untrue(format!("byte {at:#x} of a read of {:#x} bytes of the GPU's is wrong", self.size));
        }
        Ok(())
    }

    fn sent(&mut self, sent: u64, poison: u64) -> Result<(), Broken> {
        let size = self.size.min(1 << 20);
        self.fill(GUARD, size, poison)?;
        store(&mut self.near, size, sent);
        self.wire.responder.post_receive(2, self.region.sge(GUARD, size)?)?;
        self.wire.requester.post(1, self.near.sge(0, size)?, Work::Send)?;
        let done = self.wire.completions.wait(2, self.wire.site.timeout)?;
        let arrived = done.iter().find(|completion| completion.id == 2).map(|completion| completion.bytes);
        self.claim.equal("the size of what was sent", &arrived, &u32::try_from(size).ok());
        self.flush()?;
        let wrong = self.differ(GUARD, size, sent)?;
        gpu::note(&mut self.claim, "a send, as the GPU sees it", wrong, sent);
        Ok(())
    }

    /// Odd sizes at odd places, in and out, against a model of the bytes.
    fn pieces(&mut self, random: &mut Random) -> Result<(), Broken> {
        let room = self.size.min(16 * PIECE);
        let poison = random.next();
        self.fill(GUARD, room, poison)?;
        let mut model = bytes_of(poison, room);
        for _ in 0..PIECES {
            let size = 1 + random.below(PIECE);
            let (from, to) = (random.below(self.size - size), random.below(room - size));
            let fresh = bytes_of(random.next(), size.next_multiple_of(8));
            self.near.store(from, &fresh[..size]);
            let there = self.region.remote(GUARD + to, size)?;
            self.one(from, size, Work::Write(there))?;
            model[to..to + size].copy_from_slice(&fresh[..size]);
            self.near.store(from, &vec![0; size]);
            self.one(from, size, Work::Read(there))?;
            let mut back = vec![0; size];
            self.near.load(from, &mut back);
            if back != fresh[..size] {
                self.claim.untrue(format!(
                    "a piece of {size:#x} bytes at {to:#x} does not come back as it was written"
                ));
            }
        }
        self.flush()?;
        let seen = self.by_copy_engine(room)?;
        if let Some(at) = seen.iter().zip(&model).position(|(seen, meant)| seen != meant) {
            self.claim.untrue(format!(
                "byte {at:#x} after {PIECES} unaligned pieces is {:#x} instead of {:#x}",
                seen[at], model[at]
            ));
        }
        Ok(())
    }

    /// The first `size` bytes behind the guard, by a way that no RDMA device has a part in.
    fn by_copy_engine(&self, size: usize) -> Result<Vec<u8>, Broken> {
        let staging = Memory::new(&self.gpu.context, Kind::Pinned, size as u64)?;
        self.gpu.stream.copy(staging.part(0, size as u64)?, self.memory.part(GUARD as u64, size as u64)?)?;
        self.gpu.stream.synchronize()?;
        let words = staging.words()?;
        Ok((0..size as u64 / 8).flat_map(|index| words.read(index).to_ne_bytes()).collect())
    }

    /// Additions to a word of the GPU's, one after the other, each with its answer.
    fn added(&mut self, start: u64, step: u64) -> Result<(), Broken> {
        self.fill(GUARD, 8, start)?;
        let first = egm_vendor::cuda::pattern(start, 0);
        let there = self.region.remote(GUARD, 8)?;
        for index in 0..ADDITIONS {
            self.one(0, 8, Work::FetchAdd(there, step))?;
            let mut answer = [0; 8];
            self.near.load(0, &mut answer);
            let meant = first.wrapping_add(step.wrapping_mul(index));
            self.claim.equal(
                format!("the answer of fetch-and-add {index}"),
                &u64::from_ne_bytes(answer),
                &meant,
            );
        }
        self.flush()?;
        let seen = self.by_copy_engine(8)?.try_into().map_or(0, u64::from_ne_bytes);
        let meant = first.wrapping_add(step.wrapping_mul(ADDITIONS));
        self.claim.equal(format!("the GPU's word after {ADDITIONS} fetch-and-adds"), &seen, &meant);
        Ok(())
    }
}

/// The bytes of the GPU's pattern; `size` is a multiple of 8.
fn bytes_of(seed: u64, size: usize) -> Vec<u8> {
    (0..size as u64 / 8).flat_map(|index| egm_vendor::cuda::pattern(seed, index).to_ne_bytes()).collect()
}

/// Bytes that are made at once.
const CHUNK: usize = 1 << 16;

/// Fills the first `size` bytes with the GPU's pattern.
fn store(near: &mut Registered<'_, Mapping>, size: usize, seed: u64) {
    for at in (0..size).step_by(CHUNK) {
        near.store(at, &bytes_of(seed.wrapping_add((at / 8) as u64), CHUNK.min(size - at)));
    }
}

/// The first byte that is not of the GPU's pattern.
fn difference(near: &Registered<'_, Mapping>, size: usize, seed: u64) -> Option<usize> {
    (0..size).step_by(CHUNK).find_map(|at| {
        let meant = bytes_of(seed.wrapping_add((at / 8) as u64), CHUNK.min(size - at));
        let mut seen = vec![0; meant.len()];
        near.load(at, &mut seen);
        seen.iter().zip(&meant).position(|(seen, meant)| seen != meant).map(|place| at + place)
    })
}
