//! Budgets of pages and comments. They only become smaller.

use std::collections::BTreeMap;

/// Bytes and lines of the README.
const README: (usize, usize) = (12 << 10, 200);
/// Columns of a line of a page, outside tables and blocks of code.
const COLUMNS: usize = 120;
/// Doc comments that are short.
const SHORT_COMMENTS: usize = 50;
/// Words of a short comment: it repeats a name, or names no more than a unit.
const SHORT: usize = 3;

/// Pages, and the comments of the whole tree, that are over their budget.
pub(crate) fn exceeded(texts: &BTreeMap<String, String>) -> Vec<String> {
    let pages = texts.iter().filter(|(path, _)| path.ends_with(".md"));
    let mut wrong: Vec<String> = pages.flat_map(|(path, text)| long_lines(path, text)).collect();
    if let Some(text) = texts.get("README.md") {
        let (bytes, lines) = README;
        if text.len() > bytes || text.lines().count() > lines {
            let (has, of) = (text.len(), text.lines().count());
            wrong.push(format!("README.md has {has} bytes and {of} lines, {bytes} and {lines} at most"));
        }
    }
    let sources = texts.iter().filter(|(path, _)| path.ends_with(".rs"));
    let short: usize = sources.map(|(_, text)| short_comments(text)).sum();
    if short > SHORT_COMMENTS {
        wrong.push(format!("{short} doc comments have {SHORT} words or fewer, {SHORT_COMMENTS} at most"));
    }
    wrong
}

fn long_lines(path: &str, text: &str) -> Vec<String> {
    let mut in_block = false;
    let mut long = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        }
        let columns = line.chars().count();
        if columns > COLUMNS && !in_block && !line.trim_start().starts_with('|') {
            long.push(format!("{path}:{number} has {columns} columns, {COLUMNS} at most"));
        }
    }
    long
}

fn short_comments(text: &str) -> usize {
    let mut words = vec![0];
    for line in text.lines() {
        match line.trim_start().strip_prefix("///") {
            Some(comment) => *words.last_mut().unwrap_or(&mut 0) += comment.split_whitespace().count(),
            None => words.push(0),
        }
    }
    words.into_iter().filter(|words| (1..=SHORT).contains(words)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_over_its_budget_is_found_and_tables_and_blocks_are_not() {
        let long = "x".repeat(COLUMNS + 1);
        let page = format!("{long}\n| {long} |\n```sh\n{long}\n```\n{}\n", &long[1..]);
        let of = |path: &str, text: &str| exceeded(&[(path.to_owned(), text.to_owned())].into());
        assert_eq!(of("docs/a.md", &page), ["docs/a.md:1 has 121 columns, 120 at most"]);
        assert_eq!(of("README.md", &"x\n".repeat(201)).len(), 1);
        assert_eq!(of("README.md", &"x\n".repeat(200)), Vec::<String>::new());
        let bytes = format!("{}\n", "x".repeat(99)).repeat(123);
        assert_eq!(of("README.md", &bytes).len(), 1, "{}", bytes.len());
    }

    #[test]
    fn comments_of_up_to_three_words_are_short() {
        let text = "/// One.\nx\n/// One two three.\nx\n/// One two three four.\nx\n/// One two\n/// three four.\nx\n";
        assert_eq!(short_comments(text), 2);
        let many = "/// One.\nx\n".repeat(SHORT_COMMENTS + 1);
        assert_eq!(exceeded(&[("a.rs".to_owned(), many)].into()).len(), 1);
    }
}
