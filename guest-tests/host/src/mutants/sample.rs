//! A part of the mutants, which rotates with the days.

use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

/// Part `index` of `count`, from 0 on: every `count`th mutant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    index: u64,
    count: u64,
}

impl FromStr for Sample {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let day = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs() / 86_400);
        Self::on_day(text, day)
            .ok_or_else(|| "expected K/N with 1 <= K <= N, or today/N, for instance 1/40".to_owned())
    }
}

impl Sample {
    fn on_day(text: &str, day: u64) -> Option<Self> {
        let (number, count) = text.split_once('/')?;
        let count: u64 = count.parse().ok().filter(|count| *count > 0)?;
        let index = match number {
            "today" => day.checked_rem(count)?,
            _ => number.parse::<u64>().ok()?.checked_sub(1)?,
        };
        (index < count).then_some(Self { index, count })
    }

    /// Whether the part has none of `mutants` mutants.
    pub(crate) fn is_empty(self, mutants: usize) -> bool {
        u64::try_from(mutants).is_ok_and(|mutants| mutants <= self.index)
    }

    /// As `cargo mutants --shard` takes it.
    pub(crate) fn shard(self) -> String {
        format!("{}/{}", self.index, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_a_part_of_its_count_or_rotates_with_the_days() {
        for (text, shard) in [("1/1", "0/1"), ("3/40", "2/40"), ("40/40", "39/40"), ("today/40", "7/40")] {
            assert_eq!(Sample::on_day(text, 47).unwrap().shard(), shard, "{text}");
        }
        for text in ["", "1", "0/3", "4/3", "1/0", "today/0", "today", "a/b", "-1/2"] {
            assert_eq!(Sample::on_day(text, 47), None, "{text}");
        }
    }

    #[test]
    fn a_part_beyond_the_last_mutant_is_empty() {
        let third = Sample { index: 2, count: 40 };
        assert!(third.is_empty(2) && !third.is_empty(3));
    }
}
