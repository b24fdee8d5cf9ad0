//! A command line, and how a shell reads it.

use std::fmt;

/// A program and its arguments; its text is one that a POSIX shell reads back as exactly these words.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Command {
    /// Options with their values, one group a line; the first is the program.
    groups: Vec<Vec<String>>,
}

impl Command {
    pub(super) fn new(program: &str) -> Self {
        Self { groups: vec![vec![program.to_owned()]] }
    }

    /// Adds an option without a value.
    pub(super) fn flag(&mut self, option: &str) {
        self.groups.push(vec![option.to_owned()]);
    }

    /// Adds an option with a value.
    pub(super) fn option(&mut self, option: &str, value: impl Into<String>) {
        self.groups.push(vec![option.to_owned(), value.into()]);
    }

    /// Adds an option with several values; does not add it without values.
    pub(super) fn options(&mut self, option: &str, values: Vec<String>) {
        if !values.is_empty() {
            self.groups.push([vec![option.to_owned()], values].concat());
        }
    }

    /// The program and its arguments.
    pub(crate) fn words(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flatten().map(String::as_str)
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, group) in self.groups.iter().enumerate() {
            if index > 0 {
                f.write_str(" \\\n  ")?;
            }
            // An option's further values stand below its first.
            let between = if group.len() > 2 { " \\\n    " } else { " " };
            let words: Vec<String> = group.iter().map(|word| quoted(word)).collect();
            f.write_str(&words.join(between))?;
        }
        f.write_str("\n")
    }
}

/// `word` as a shell reads it back (POSIX XCU 2.2.2): bare where no character is special, else in single quotes.
pub(super) fn quoted(word: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(bare) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::process;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_shell_reads_back_the_same_words(
            values in prop::collection::vec(prop_oneof!["[^\0]{0,12}", "[ '\"\\\\$`!*?~#&|;<>(){}\\[\\]\n=-]{0,6}"], 1..5)
        ) {
            let mut command = Command::new("printf");
            command.option("%s\\0", "--");
            command.options("-x", values);
            let output = process::Command::new("sh").args(["-c", &command.to_string()]).output().unwrap();
            let said = String::from_utf8(output.stdout).unwrap();
            let read: Vec<&str> = said.split_terminator('\0').collect();
            let words: Vec<&str> = command.words().skip(2).collect();
            prop_assert_eq!(read, words);
        }
    }
}
