//! Words that comments, messages and documents do without: personal pronouns and feelings of programs.

use std::collections::BTreeMap;

/// Excluded words: subjects without a name, and programs that speak, hear, trust or give.
const EXCLUDED: &[&str] = &[
    "believe", "believed", "believes", "heard", "hears", "lend", "lends", "lent", "met", "nobody", "says",
    "somebody", "tell", "tells", "told", "who", "whoever", "whom", "whose",
];

/// Uses of excluded words that each part of the tree may still have. These numbers only become smaller.
const ALLOWED: &[(&str, usize)] = &[];

/// Words that names of functions and types do without as well.
const EXCLUDED_IN_NAMES: &[&str] = &["hear", "knows", "learns", "likes", "nobodys", "said", "say", "wants"];

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

/// Functions and types with an excluded word in their name.
pub(crate) fn in_names(texts: &BTreeMap<String, String>) -> Vec<String> {
    let rust = texts.iter().filter(|(path, _)| path.ends_with(".rs"));
    let lines = rust.flat_map(|(path, text)| (1_usize..).zip(text.lines()).map(move |line| (path, line)));
    let names = lines.filter_map(|(path, (number, line))| Some((path, number, declared(line)?)));
    names
        .filter(|(_, _, name)| has_excluded_part(name))
        .map(|(path, number, name)| format!("{path}:{number}: {name} has an excluded word"))
        .collect()
}

/// The name of the function or type that `line` declares.
fn declared(line: &str) -> Option<&str> {
    let code = line.split("//").next()?.split('"').next()?;
    let mut words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.find(|word| ["fn", "struct", "enum", "trait", "type"].contains(word))?;
    words.next()
}

/// Whether a part of `name`, in snake or camel case, is excluded.
fn has_excluded_part(name: &str) -> bool {
    let snake: String =
        name.chars().flat_map(|c| c.is_uppercase().then_some('_').into_iter().chain([c])).collect();
    let is_excluded = |part: &str| EXCLUDED.contains(&part) || EXCLUDED_IN_NAMES.contains(&part);
    snake.to_lowercase().split('_').any(is_excluded)
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

    #[test]
    fn excluded_words_are_found_in_names_of_functions_and_types() {
        let code = [
            "    pub(crate) fn a_server_that_says_no() {}",
            "struct WhoAsks;",
            "fn hears() {} // fn told",
            "fn essay() { let who = \"fn tells\"; }",
        ];
        let found = in_names(&[("new/a.rs".to_owned(), code.join("\n"))].into());
        assert_eq!(
            found,
            [
                "new/a.rs:1: a_server_that_says_no has an excluded word",
                "new/a.rs:2: WhoAsks has an excluded word",
                "new/a.rs:3: hears has an excluded word"
            ]
        );
    }
}
