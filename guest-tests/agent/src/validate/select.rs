//! `--select` and `--require`: words that name validations.

/// Which of `names` (each `group.what`) are selected by `wanted`, in their own order: a word is a group, a name, or a
/// pattern with `*` (any text) and `?` (one character) for either; one that starts with `-` takes away again. Nothing
/// but such words starts from all. `option` is what the words were written behind.
///
/// # Errors
/// A word that selects nothing, words of which none is left, or words that together leave nothing.
pub(super) fn select<'a>(option: &str, names: &[&'a str], wanted: &[String]) -> Result<Vec<&'a str>, String> {
    let words: Vec<&str> =
        wanted.iter().flat_map(|text| text.split(',')).map(str::trim).filter(|w| !w.is_empty()).collect();
    if words.is_empty() && !wanted.is_empty() {
        return Err(format!("{option} without a word: {}", known(names)));
    }
    let mut chosen = vec![words.iter().all(|word| word.starts_with('-')); names.len()];
    for word in words {
        let (pattern, take) = word.strip_prefix('-').map_or((word, true), |pattern| (pattern, false));
        let mut any = false;
        for (chosen, name) in chosen.iter_mut().zip(names) {
            if is_selected(name, pattern) {
                any = true;
                *chosen = take;
            }
        }
        if !any {
            return Err(format!(
                "{option} {word:?} is no group, name or pattern of a validation: {}",
                known(names)
            ));
        }
    }
    if !chosen.contains(&true) {
        return Err(format!("{option} {:?} leaves no validation", wanted.join(",")));
    }
    Ok(names.iter().zip(chosen).filter_map(|(name, chosen)| chosen.then_some(*name)).collect())
}

/// The groups of `names`, for an error.
fn known(names: &[&str]) -> String {
    let mut groups: Vec<&str> =
        names.iter().map(|name| name.split_once('.').map_or(*name, |(group, _)| group)).collect();
    groups.dedup();
    format!("groups are {}; `egm-guest validate --list` names all", groups.join(", "))
}

fn is_selected(name: &str, pattern: &str) -> bool {
    let group = name.split_once('.').map_or(name, |(group, _)| group);
    matches(pattern.as_bytes(), name.as_bytes()) || matches(pattern.as_bytes(), group.as_bytes())
}

/// Whether `text` is of the form `pattern`; linear in the product of their lengths.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None; // behind the last `*`, and how far it reaches
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                p += 1;
                star = Some((p, t));
            }
            Some(c) if *c == b'?' || Some(c) == text.get(t) => {
                p += 1;
                t += 1;
            }
            _ => match &mut star {
                Some((behind, reach)) => {
                    *reach += 1;
                    (p, t) = (*behind, *reach);
                }
                None => return false,
            },
        }
    }
    pattern.iter().skip(p).all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NAMES: [&str; 5] =
        ["memory.pattern", "memory.latency", "numa.nodes", "cuda.host_numa", "cuda.pools"];

    fn chosen(words: &[&str]) -> Result<Vec<&'static str>, String> {
        select("--select", &NAMES, &words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_word_is_a_group_a_name_or_a_pattern_and_the_order_stays() {
        assert_eq!(chosen(&[]).unwrap(), NAMES);
        assert_eq!(chosen(&["numa,memory"]).unwrap(), NAMES[..3]);
        assert_eq!(chosen(&["cuda.pools", "memory.pattern"]).unwrap(), ["memory.pattern", "cuda.pools"]);
        assert_eq!(chosen(&["*.p*"]).unwrap(), ["memory.pattern", "cuda.pools"]);
        assert_eq!(chosen(&["cuda.pool?"]).unwrap(), ["cuda.pools"]);
        assert_eq!(chosen(&["*"]).unwrap(), NAMES);
    }

    #[test]
    fn a_word_with_a_minus_takes_away() {
        assert_eq!(chosen(&["-memory", "-cuda.pools"]).unwrap(), ["numa.nodes", "cuda.host_numa"]);
        assert_eq!(chosen(&["memory,-*.latency"]).unwrap(), ["memory.pattern"]);
    }

    #[test]
    fn a_word_that_selects_nothing_is_an_error() {
        for word in ["memroy", "cuda.", "-x", "?"] {
            assert!(chosen(&[word]).unwrap_err().contains(word), "{word}");
        }
    }

    #[test]
    fn a_selection_that_leaves_nothing_is_an_error() {
        for words in [&["*,-*"][..], &["-memory,-numa,-cuda"], &[""], &[",", " "]] {
            assert!(chosen(words).is_err(), "{words:?}");
        }
    }

    proptest! {
        #[test]
        fn a_pattern_made_of_a_text_matches_it(text in "[a-c]{0,12}", at in 0usize..12, star: bool) {
            let at = at.min(text.len());
            let pattern = if star { format!("{}*", &text[..at]) } else { text.clone() };
            prop_assert!(matches(pattern.as_bytes(), text.as_bytes()));
            prop_assert!(matches(b"*", text.as_bytes()));
            let longer = format!("{text}x");
            prop_assert!(!matches(longer.as_bytes(), text.as_bytes()));
        }
    }
}
