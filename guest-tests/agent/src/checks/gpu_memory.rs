//! Claim: memory of an assigned GPU that processors share keeps what is written to it, as much as there is, and what its
//! BARs have beyond reads ones.
//!
//! The argument `gpu.barN`: how many bytes of BAR N are memory (default: all). All of it is filled with words that are
//! different at every place, of all GPUs and BARs before anything is read, so two addresses that lead to one byte are found
//! too; then again with all bits inverted. In the end the first and the last word of each BAR's memory are [`MARK`], by
//! which the host finds them.

use std::fs::{self, File};

use super::Context;
use super::memory_map::mebibytes;
use crate::error::Broken;
use crate::expect::{Bar, Function};
use crate::finding::{Claim, Finding};
use crate::sys::Registers;
use crate::{pattern, sysfs};

/// Content that stays in the memory.
const MARK: u64 = 0x6d65_6d20_7570_6721;
const WORD: usize = size_of::<u64>();

/// A BAR of a GPU.
struct Part {
    name: String,
    bar: Registers,
    /// Bytes from its start that are memory.
    memory: usize,
    /// The pattern that is its own.
    seed: u64,
}

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut parts = Vec::new();
    for (seed, (function, bar)) in (1..).zip(context.plan.gpu_memory()) {
        let size = bar.span.size();
        let memory = context.args.get(&format!("gpu.bar{}", bar.index), size)?.min(size);
        parts.push(Part::map(function, bar, memory, seed)?);
    }
    if parts.is_empty() {
        return Ok(Finding::skipped("the guest has no GPU with memory that processors share"));
    }
    let mut claim = Claim::default();
    for flip in [0, u64::MAX] {
        parts.iter().for_each(|part| part.fill(flip));
        parts.iter().for_each(|part| part.look(&mut claim, flip));
    }
    let mut tested = 0u64;
    for part in &parts {
        part.beyond(&mut claim);
        part.mark();
        tested += part.memory as u64;
        claim.seen(format!("{}: {:#x} of {:#x} bytes", part.name, part.memory, part.bar.size()));
    }
    Ok(claim.finish().with_value(mebibytes(tested), "MiB"))
}

impl Part {
    fn map(function: &Function, bar: &Bar, memory: u64, seed: u64) -> Result<Self, Broken> {
        let folder = sysfs::pci(function.address);
        let _ = fs::write(folder.join("enable"), "1");
        let path = folder.join(format!("resource{}", bar.index));
        let file = File::options().read(true).write(true).open(&path).map_err(Broken::file("open", &path))?;
        let number = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mapped = Registers::map(&file, number(bar.span.size())).map_err(Broken::file("map", path))?;
        let name = format!("BAR {} of {}", bar.index, function.address);
        Ok(Self { name, bar: mapped, memory: number(memory), seed })
    }

    /// Offset and pattern of each word of the memory.
    fn words(&self, flip: u64) -> impl Iterator<Item = (usize, u64)> {
        let seed = self.seed;
        (0u64..)
            .zip((0..self.memory).step_by(WORD))
            .map(move |(index, offset)| (offset, pattern::word(seed, index) ^ flip))
    }

    fn fill(&self, flip: u64) {
        self.words(flip).for_each(|(offset, word)| self.bar.write(offset, word));
    }

    fn look(&self, claim: &mut Claim, flip: u64) {
        let wrong = self.words(flip).find(|(offset, word)| self.bar.read(*offset) != *word);
        let found =
            |offset| format!("{:#x} at {offset:#x}, where it is not what was written", self.bar.read(offset));
        claim.holds(wrong.is_none(), || {
            format!("{} has {}", self.name, wrong.map_or_else(String::new, |(offset, _)| found(offset)))
        });
    }

    /// Nothing is there, whatever is written.
    fn beyond(&self, claim: &mut Claim) {
        let size = self.bar.size();
        if self.memory >= size {
            return;
        }
        for offset in [self.memory, self.memory.midpoint(size), size - WORD].map(|at| at & !(WORD - 1)) {
            self.bar.write(offset, 0);
            claim.equal(
                format!("{} at {offset:#x}, beyond its memory,", self.name),
                &self.bar.read(offset),
                &u64::MAX,
            );
        }
    }

    fn mark(&self) {
        [0, self.memory.saturating_sub(WORD)].iter().for_each(|offset| self.bar.write(*offset, MARK));
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn part(size: usize, memory: usize, seed: u64) -> Part {
        let file = File::from(memfd_create("bar", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(size as u64).unwrap();
        Part { name: "BAR".into(), bar: Registers::map(&file, size).unwrap(), memory, seed }
    }

    fn fault(part: &Part, look: impl Fn(&Part, &mut Claim)) -> String {
        let mut claim = Claim::default();
        look(part, &mut claim);
        claim.finish().reason
    }

    #[test]
    fn one_wrong_word_is_named_by_its_place() {
        let part = part(8192, 8192, 1);
        part.fill(0);
        assert_eq!(fault(&part, |part, claim| part.look(claim, 0)), "");
        part.bar.write(0x1008, 7);
        assert!(fault(&part, |part, claim| part.look(claim, 0)).contains("0x7 at 0x1008"));
    }

    #[test]
    fn what_keeps_values_beyond_the_memory_is_named() {
        let part = part(8192, 4096, 1);
        assert!(fault(&part, |part, claim| part.beyond(claim)).contains("at 0x1000, beyond its memory"));
        part.mark();
        assert_eq!([0, 4088, 8184].map(|at| part.bar.read(at)), [MARK, MARK, 0]);
    }
}
