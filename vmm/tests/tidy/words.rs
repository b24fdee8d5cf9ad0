//! Words that comments, messages and documents do without: personal pronouns and feelings of programs.

use std::collections::BTreeMap;

/// Excluded words: subjects without a name, and programs that speak, hear, trust or give.
const EXCLUDED: &[&str] = &[
    "believe", "believed", "believes", "heard", "hears", "lend", "lends", "lent", "met", "nobody", "says",
    "somebody", "tell", "tells", "told", "who", "whoever", "whom", "whose",
];

/// Uses of excluded words that each part of the tree may still have. These numbers only become smaller.
const ALLOWED: &[(&str, usize)] = &[];

/// Parts of the tree with more uses than allowed.
pub(crate) fn too_many(texts: &BTreeMap<String, String>) -> Vec<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (path, text) in texts {
        let part = match path.split_once('/') {
            Some((folder, _)) => folder,
            None => "pages at the top",
        };
        *counts.entry(part).or_default() += if path.ends_with(".md") {
            text.lines().map(excluded).sum()
        } else if path.ends_with(".rs") {
            text.lines().filter(|line| is_prose(line)).map(excluded).sum()
        } else {
            0
        };
    }
    let allowed = |part: &str| ALLOWED.iter().find(|(name, _)| *name == part).map_or(0, |(_, count)| *count);
    let parts = counts.iter().filter(|(part, count)| **count > allowed(part));
    parts.map(|(part, count)| format!("{part}: {count} excluded words, {} allowed", allowed(part))).collect()
}

/// Whether `line` of Rust is a comment or the text of an error.
fn is_prose(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("//") || line.starts_with("#[error(")
}

fn excluded(line: &str) -> usize {
    let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter(|word| EXCLUDED.contains(&word.to_lowercase().as_str())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excluded_words_count_in_comments_errors_and_pages_only() {
        let code = "/// Who says so.\nlet who = 1;\n#[error(\"nobody has it\")]\n";
        let texts = [("new/a.rs", code), ("new/a.md", "Told.")];
        let texts = texts.map(|(path, text)| (path.to_owned(), text.to_owned())).into();
        assert_eq!(too_many(&texts), ["new: 4 excluded words, 0 allowed"]);
    }
}
