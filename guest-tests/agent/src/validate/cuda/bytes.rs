//! Every byte that one side writes is what the other side reads.

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Kind, Memory};

use super::each::on_family;
use super::gpu::{self, Family, Gpu};
use super::managed;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// GPU writes, processors read, and the reverse.
pub(super) fn check(setting: &Setting, family: Family) -> Result<Finding, Broken> {
    on_family(setting, family, false, |gpu, kind, claim| {
        let wanted = managed::bounded(gpu, kind, setting.most)?;
        let memory = gpu.memory(kind, (wanted & !7).max(8))?;
        let bytes = memory.bytes().min((wanted & !7).max(8));
        if kind == Kind::Device {
            by_copies(gpu, &memory, bytes, setting.seed, claim)?;
        } else {
            directly(gpu, &memory, bytes, setting.seed, claim)?;
        }
        claim.seen(format!("{bytes:#x} bytes of {kind}, both ways"));
        Ok(Vec::<Figure>::new())
    })
}

/// Both sides have addresses for it. What is read was something else before (`!seed`).
fn directly(gpu: &Gpu, memory: &Memory, bytes: u64, seed: u64, claim: &mut Claim) -> Result<(), Broken> {
    let words = memory.words()?.part(0, bytes / 8);
    gpu::fill(words, !seed);
    gpu.fill(memory, bytes, seed)?;
    gpu::note(claim, "the GPU wrote, a processor read", gpu::compare(words, seed), seed);
    gpu.fill(memory, bytes, !seed)?;
    let other = seed ^ 1 << 63;
    gpu::fill(words, other);
    gpu::note(claim, "a processor wrote, the GPU read", gpu.compare(memory, bytes, other)?, other);
    Ok(())
}

/// Processors reach the GPU's own memory by a copy engine and pinned memory.
fn by_copies(gpu: &Gpu, memory: &Memory, bytes: u64, seed: u64, claim: &mut Claim) -> Result<(), Broken> {
    let host = Memory::new(&gpu.context, Kind::Pinned, bytes)?;
    let words = host.words()?;
    gpu::fill(words, !seed);
    gpu.fill(memory, bytes, seed)?;
    gpu.stream.copy(host.part(0, bytes)?, memory.part(0, bytes)?)?;
    gpu.stream.synchronize()?;
    gpu::note(claim, "the GPU wrote, a processor read a copy", gpu::compare(words, seed), seed);
    gpu.fill(memory, bytes, !seed)?;
    let other = seed ^ 1 << 63;
    gpu::fill(words, other);
    gpu.stream.copy(memory.part(0, bytes)?, host.part(0, bytes)?)?;
    gpu.stream.synchronize()?;
    gpu::note(claim, "a processor wrote, the GPU read a copy", gpu.compare(memory, bytes, other)?, other);
    Ok(())
}
