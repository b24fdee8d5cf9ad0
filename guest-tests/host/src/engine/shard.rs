//! A part of a list that is divided among several machines.

use std::str::FromStr;

/// Part `number` of `count`, from 1 on, as `--shard I/N` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shard {
    number: usize,
    count: usize,
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text, None).ok_or_else(|| "expected I/N with 1 <= I <= N, for instance 1/4".to_owned())
    }
}

impl Shard {
    /// `text` as I/N, or with `day` as today/N: the part of the day with this number since 1970.
    pub(crate) fn parse(text: &str, day: Option<u64>) -> Option<Self> {
        let positive = |text: &str| text.parse::<usize>().ok().filter(|number| *number > 0);
        let (number, count) = text.split_once('/')?;
        let count = positive(count)?;
        let number = match day {
            Some(day) if number == "today" => {
                usize::try_from(day).ok()?.checked_rem(count)?.checked_add(1)?
            }
            _ => positive(number)?,
        };
        (number <= count).then_some(Self { number, count })
    }

    /// Each of `count` parts.
    pub(crate) fn all(count: usize) -> impl Iterator<Item = Self> {
        (1..=count).map(move |number| Self { number, count })
    }

    /// Whether the part has none of `elements` elements.
    pub(crate) fn is_empty(self, elements: usize) -> bool {
        elements < self.number
    }

    /// As `cargo mutants --shard` takes it, from 0 on.
    pub(crate) fn zero_based(self) -> String {
        format!("{}/{}", self.number.saturating_sub(1), self.count)
    }

    /// Every `count`th element, so that neighbours, which have similar durations, are in different shards.
    pub(crate) fn of<T>(self, all: Vec<T>) -> Vec<T> {
        all.into_iter().skip(self.number.saturating_sub(1)).step_by(self.count.max(1)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::ALL;

    #[test]
    fn the_shards_together_are_every_scenario_once() {
        for count in 1..=ALL.len() + 1 {
            let mut names: Vec<_> =
                Shard::all(count).flat_map(|shard| shard.of(ALL.to_vec())).map(|s| s.name).collect();
            let mut all: Vec<_> = ALL.iter().map(|s| s.name).collect();
            names.sort_unstable();
            all.sort_unstable();
            assert_eq!(names, all, "{count}");
        }
    }

    #[test]
    fn a_sample_is_a_part_of_its_count_or_rotates_with_the_days() {
        for (text, part) in [("1/1", "0/1"), ("3/40", "2/40"), ("40/40", "39/40"), ("today/40", "7/40")] {
            assert_eq!(Shard::parse(text, Some(47)).unwrap().zero_based(), part, "{text}");
        }
        for text in ["", "1", "0/3", "4/3", "1/0", "today/0", "today", "a/b", "-1/2"] {
            assert_eq!(Shard::parse(text, Some(47)), None, "{text}");
        }
        assert_eq!(Shard::parse("today/40", None), None);
    }

    #[test]
    fn a_part_beyond_the_last_element_is_empty() {
        let third = Shard { number: 3, count: 40 };
        assert!(third.is_empty(2) && !third.is_empty(3));
    }

    #[test]
    fn a_shard_has_a_number_from_1_to_their_count() {
        assert_eq!("2/3".parse(), Ok(Shard { number: 2, count: 3 }));
        for text in ["", "1", "0/3", "4/3", "1/0", "a/b", "1/2/3", "-1/2"] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
    }
}
