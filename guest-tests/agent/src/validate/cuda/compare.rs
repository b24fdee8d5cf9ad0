//! Comparisons by a GPU, each with a control: it shows that the GPU would have reported a difference.

use std::ops::Range;

use egm_vendor::cuda::{Context, Kernels, Memory, Shape, Stream, Wrong};

use crate::error::Broken;

/// Bit that marks the seed of a deliberate difference: no check fills or compares with such a seed.
const CONTROL: u64 = 1 << 62;

/// A GPU that compares.
#[derive(Clone, Copy)]
pub(crate) struct Comparer<'g> {
    pub(crate) context: &'g Context,
    pub(crate) kernels: &'g Kernels,
    pub(crate) stream: &'g Stream,
    /// Memory that processors see, too; its first 64 bytes are for the GPU's report.
    pub(crate) results: &'g Memory,
}

impl Comparer<'_> {
    /// Compares these `bytes` with the pattern of `seed`, the first of which is the pattern's first.
    pub(crate) fn compare(
        self,
        memory: &Memory,
        bytes: Range<u64>,
        seed: u64,
    ) -> Result<Option<Wrong>, Broken> {
        let found = self.differences(memory, &bytes, seed)?;
        if found.is_none() {
            self.check_reports(memory, bytes, seed)?;
        }
        Ok(found)
    }

    /// Differences that the GPU reports: none if there is none, and none if it cannot report.
    fn differences(self, memory: &Memory, bytes: &Range<u64>, seed: u64) -> Result<Option<Wrong>, Broken> {
        let (part, words) = (self.results.part(0, 64)?, self.results.words()?);
        (0..8).for_each(|word| words.write(word, 0));
        let shape = Shape::whole(self.context);
        let compared = memory.part(bytes.start, bytes.end - bytes.start)?;
        self.kernels.check(self.stream, shape, compared, seed, part)?;
        self.stream.synchronize()?;
        let [count, index, value] = [0, 1, 2].map(|word| words.read(word));
        Ok((count > 0).then_some(Wrong { count, index, value }))
    }

    /// Shows that the GPU, which found no difference, would report one: the last word, with the pattern of `seed`, is
    /// compared with another one; exactly that difference must be reported, with what the word holds.
    pub(crate) fn check_reports(self, memory: &Memory, bytes: Range<u64>, seed: u64) -> Result<(), Broken> {
        let Some(last) = ((bytes.end - bytes.start) / 8).checked_sub(1) else { return Ok(()) };
        let right = egm_vendor::cuda::pattern(seed, last);
        let other = seed.wrapping_add(last) ^ CONTROL;
        let word = bytes.start + last * 8;
        let reported = self.differences(memory, &(word..word + 8), other)?;
        if reported == Some(Wrong { count: 1, index: 0, value: right }) {
            return Ok(());
        }
        let reported = reported.map_or_else(
            || "found none".to_owned(),
            |Wrong { count, value, .. }| format!("found {count}, the first with {value:#x}"),
        );
        Err(Broken::Other(format!(
            "comparisons by GPU {} cannot be trusted: it should have found one difference that was made on purpose, with {right:#x}, and {reported}",
            self.context.device().ordinal
        )))
    }
}
