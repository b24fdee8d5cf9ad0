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
        let parse = |text: &str| text.parse::<usize>().ok().filter(|number| *number > 0);
        let (number, count) = text.split_once('/').unwrap_or((text, ""));
        parse(number)
            .zip(parse(count))
            .filter(|(number, count)| number <= count)
            .map(|(number, count)| Self { number, count })
            .ok_or_else(|| "expected I/N with 1 <= I <= N, for instance 1/4".to_owned())
    }
}

impl Shard {
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
            let shards = (1..=count).map(|number| Shard { number, count });
            let mut names: Vec<_> = shards.flat_map(|shard| shard.of(ALL.to_vec())).map(|s| s.name).collect();
            let mut all: Vec<_> = ALL.iter().map(|s| s.name).collect();
            names.sort_unstable();
            all.sort_unstable();
            assert_eq!(names, all, "{count}");
        }
    }

    #[test]
    fn a_shard_has_a_number_from_1_to_their_count() {
        assert_eq!("2/3".parse(), Ok(Shard { number: 2, count: 3 }));
        for text in ["", "1", "0/3", "4/3", "1/0", "a/b", "1/2/3", "-1/2"] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
    }
}
