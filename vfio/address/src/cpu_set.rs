//! Lists of processor numbers as the kernel writes them: `0-3,8`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Quoted;

/// A set of processor numbers, each below [`CpuSet::LIMIT`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpuSet(BTreeSet<u32>);

/// Why a text is not a processor list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum CpuSetError {
    /// An element is neither `N` nor `N-M`.
    #[error(
        "{} in CPU list {} is not a number or a range: write for instance \"0-3,8\"",
        Quoted(element),
        Quoted(text)
    )]
    Element { text: String, element: String },
    /// A range runs backwards.
    #[error("range {first}-{last} in CPU list {} runs backwards: put the smaller number first", Quoted(text))]
    Backwards { text: String, first: u32, last: u32 },
    /// A number at or above the limit.
    #[error("CPU {cpu} in CPU list {} is not below {}: no host has that many", Quoted(text), CpuSet::LIMIT)]
    TooLarge { text: String, cpu: u32 },
}

impl CpuSet {
    /// Numbers are below this; Linux's largest `CONFIG_NR_CPUS` is 8192.
    pub const LIMIT: u32 = 8192;

    /// Iterates over the processor numbers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Whether `cpu` is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Number of processors in the set.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<u32> for CpuSet {
    /// Numbers at or above [`CpuSet::LIMIT`] are left out.
    fn from_iter<I: IntoIterator<Item = u32>>(iter: I) -> Self {
        Self(iter.into_iter().filter(|cpu| *cpu < Self::LIMIT).collect())
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;
    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        let mut cpus = BTreeSet::new();
        for element in
            text.trim().split(',').map(str::trim).filter(|e| !e.is_empty() || !text.trim().is_empty())
        {
            let wrong = || CpuSetError::Element { text: text.to_owned(), element: element.to_owned() };
            let number = |part: &str| part.trim().parse::<u32>().map_err(|_| wrong());
            let (first, last) = match element.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(element)?, number(element)?),
            };
            if first > last {
                return Err(CpuSetError::Backwards { text: text.to_owned(), first, last });
            }
            if last >= Self::LIMIT {
                return Err(CpuSetError::TooLarge { text: text.to_owned(), cpu: last });
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(cpu) => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        let texts: Vec<String> = ranges
            .into_iter()
            .map(|(first, last)| if first == last { format!("{first}") } else { format!("{first}-{last}") })
            .collect();
        f.pad(&texts.join(","))
    }
}

impl Serialize for CpuSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
impl<'de> Deserialize<'de> for CpuSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_list_is_read_and_printed_as_the_kernel_does() {
        let set: CpuSet = "8, 0-3,2".parse().unwrap();
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8]);
        assert_eq!(set.to_string(), "0-3,8");
        assert!("".parse::<CpuSet>().unwrap().is_empty());
    }

    #[test]
    fn a_wrong_list_states_what_is_wrong() {
        assert!(matches!("0-".parse::<CpuSet>(), Err(CpuSetError::Element { .. })));
        assert!(matches!("1,,2".parse::<CpuSet>(), Err(CpuSetError::Element { .. })));
        assert!(matches!("3-1".parse::<CpuSet>(), Err(CpuSetError::Backwards { first: 3, last: 1, .. })));
        assert!(matches!("0-4000000000".parse::<CpuSet>(), Err(CpuSetError::TooLarge { .. })));
    }

    #[test]
    fn a_set_has_exactly_the_numbers_of_its_list() {
        let set: CpuSet = "0-3,8".parse().unwrap();
        assert_eq!((set.len(), set.is_empty()), (5, false));
        assert!(set.contains(3) && set.contains(8) && !set.contains(4) && !set.contains(9));
        let text = serde_json::to_string(&set).unwrap();
        assert_eq!((text.as_str(), serde_json::from_str(&text).unwrap()), ("\"0-3,8\"", set));
    }

    #[test]
    fn numbers_from_the_limit_on_are_left_out_of_a_collection_and_refused_in_a_list() {
        let last = CpuSet::LIMIT - 1;
        let set: CpuSet = [last, CpuSet::LIMIT, u32::MAX].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [last]);
        assert_eq!(last.to_string().parse::<CpuSet>().unwrap(), set);
        assert!(CpuSet::LIMIT.to_string().parse::<CpuSet>().is_err());
    }

    proptest! {
        #[test]
        fn printing_and_reading_is_the_identity(cpus in prop::collection::btree_set(0u32..CpuSet::LIMIT, 0..40)) {
            let set: CpuSet = cpus.into_iter().collect();
            prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set);
        }
        #[test]
        fn any_text_is_a_list_or_an_error(text in "[0-9,\\- a]{0,16}") {
            let _ = text.parse::<CpuSet>();
        }
    }
}
