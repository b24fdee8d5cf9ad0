//! Words that comments, messages and documents do without: personal pronouns and feelings of programs.

use std::collections::BTreeMap;

/// Excluded words: subjects without a name, and programs that speak, hear, trust or give.
const EXCLUDED: &[&str] = &[
    "believe", "believed", "believes", "heard", "hears", "lend", "lends", "lent", "met", "nobody", "says",
    "somebody", "tell", "tells", "told", "who", "whoever", "whom", "whose",
];

/// Uses of excluded words that each part of the tree may still have. These numbers only become smaller.
const ALLOWED: &[(&str, usize)] = &[];

/// Parts of the tree with more uses than allowed; `literals` are those of Rust's production code, by file.
pub(crate) fn too_many(
    texts: &BTreeMap<String, String>,
    literals: &BTreeMap<&str, &[String]>,
) -> Vec<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (path, text) in texts {
        let part = match path.split_once('/') {
            Some((folder, _)) => folder,
            None => "pages at the top",
        };
        let in_lines: usize = if path.ends_with(".rs") {
            text.lines().filter(|line| line.trim_start().starts_with("//")).map(excluded).sum()
        } else if path.ends_with(".md") || is_script_or_unit(path, text) {
            text.lines().map(excluded).sum()
        } else {
            0
        };
        let strings = literals.get(path.as_str()).copied().unwrap_or_default();
        let in_strings: usize = strings.iter().map(|string| excluded(&string.replace("\\n", " "))).sum();
        *counts.entry(part).or_default() += in_lines + in_strings;
    }
    let allowed = |part: &str| ALLOWED.iter().find(|(name, _)| *name == part).map_or(0, |(_, count)| *count);
    let parts = counts.iter().filter(|(part, count)| **count > allowed(part));
    parts.map(|(part, count)| format!("{part}: {count} excluded words, {} allowed", allowed(part))).collect()
}

/// Whether a file is a script, of any language, or a unit of systemd.
fn is_script_or_unit(path: &str, text: &str) -> bool {
    text.starts_with("#!/") || [".service", ".socket"].iter().any(|end| path.ends_with(end))
}

fn excluded(line: &str) -> usize {
    let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter(|word| EXCLUDED.contains(&word.to_lowercase().as_str())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excluded_words_count_in_comments_strings_scripts_units_and_pages_only() {
        let code = "/// Who says so.\nlet who = 1;\n";
        let script = "#!/bin/sh\necho told\n";
        let texts = [
            ("new/a.rs", code),
            ("new/a.md", "Told."),
            ("new/a", script),
            ("new/a.service", "# Told"),
            ("new/b", "told"),
        ];
        let texts = texts.map(|(path, text)| (path.to_owned(), text.to_owned())).into();
        let literals = ["\"nobody has\\ntold\"".to_owned()];
        let literals = [("new/a.rs", literals.as_slice())].into();
        assert_eq!(too_many(&texts, &literals), ["new: 7 excluded words, 0 allowed"]);
    }
}
