//! Help and messages of a command line, as wide as the terminal and in its colours.
//!
//! clap aligns the text. It breaks lines and colours words only with more dependencies, which no other part of a program
//! needs; both are done here, on its output.

use std::env;
use std::io::{self, Write};
use std::process;

use clap::Parser;
use egm_address::Printable;

use crate::show::{COLUMNS, Screen, Style, exported_columns, print, wrap, written};
use crate::{Blame, Chain};

/// The command line of this process. Ends the process with a message where it is wrong, and after `--help`.
#[must_use]
pub fn parse<C: Parser>() -> C {
    let mut command = C::command().term_width(columns(Screen::of_stdout()));
    let matches = command.try_get_matches_from_mut(env::args_os());
    let parsed = matches.and_then(|mut matches| {
        C::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
    });
    parsed.unwrap_or_else(|error| exit(&error))
}

/// Prints `error`, which is help too, and ends the process.
pub(crate) fn exit(error: &clap::Error) -> ! {
    let text = error.render().to_string();
    if error.use_stderr() {
        // Standard error may be closed: then the message is lost, and the exit code is not.
        let screen = Screen::of_stderr();
        let text = shown(&text, screen.columns().unwrap_or(usize::MAX), screen);
        let _ = io::stderr().write_all(text.as_bytes());
        process::exit(Blame::Configuration as i32);
    }
    let screen = Screen::of_stdout();
    print(shown(&text, columns(screen), screen));
    if let Err(error) = written() {
        eprintln!("{}", Chain(&error));
        process::exit(Blame::Host as i32);
    }
    process::exit(0)
}

/// Columns of help. In a file it has those that the caller exports, or as many as every terminal has.
fn columns(screen: Screen) -> usize {
    let exported = Some(exported_columns()).filter(|columns| *columns >= LEAST);
    screen.columns().or(exported).unwrap_or(COLUMNS)
}

/// The fewest columns of help.
const LEAST: usize = 40;

/// The `text` of clap in lines of at most `columns`, as `screen` shows them.
fn shown(text: &str, columns: usize, screen: Screen) -> String {
    text.lines().map(|line| lines(line.trim_end(), columns, screen) + "\n").collect()
}

/// A line, broken between words. What follows stands below its text: of an option, below the text beside the option.
fn lines(line: &str, columns: usize, screen: Screen) -> String {
    let (head, text) = line.split_at(beside(line));
    let below = head.chars().count();
    let mut parts = wrap(text, columns.saturating_sub(below)).into_iter();
    let first = painted(head, parts.next().unwrap_or_default(), screen);
    parts.fold(first, |lines, part| format!("{lines}\n{:below$}{}", "", Printable(part)))
}

const USAGE: &str = "Usage: ";

/// Where in a `line` its text begins: beside the name of an option, argument, command or value, or after the indent.
fn beside(line: &str) -> usize {
    if line.starts_with(USAGE) {
        return USAGE.len();
    }
    let item = line.trim_start_matches(' ');
    let indent = line.len() - item.len();
    // A value's name has a colon, and the longest name has one space after it.
    let gap = if item.starts_with("- ") { item.find(": ").map(|colon| colon + 1) } else { item.find("  ") };
    let text = item.get(gap.unwrap_or(0)..).unwrap_or_default().trim_start_matches(' ');
    if indent >= 2 && !text.is_empty() { line.len() - text.len() } else { indent }
}

/// The first line of an item: `head` has its indent and, where text stands beside it, its name.
fn painted(head: &str, text: &str, screen: Screen) -> String {
    let name = head.trim();
    let is_heading = head.is_empty() && text.ends_with(':') && text.split(' ').count() <= 4;
    let is_option = name.is_empty() && !head.is_empty() && text.starts_with('-') && !text.starts_with("- ");
    if is_heading || is_option {
        return format!("{head}{}", screen.paint(Style::Strong, text));
    }
    if name.is_empty() {
        return format!("{head}{}", screen.message(&Printable(text).to_string()));
    }
    let indent = head.len() - head.trim_start().len();
    let pad = head.len() - head.trim_end().len();
    format!("{:indent$}{}{:pad$}{}", "", screen.paint(Style::Strong, name), "", Printable(text))
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction, Command};

    use super::*;

    fn command() -> Command {
        Command::new("egm-test")
            .about("Tests how a sentence of a command breaks where the terminal ends")
            .arg(
                Arg::new("FILE")
                    .help("A file with a description that has more words than fit")
                    .required(true),
            )
            .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print JSON"))
            .after_help("A paragraph that is longer than the terminal has columns.\n\n  egm-test FILE")
    }

    fn help(screen: Screen) -> String {
        let command = command().term_width(columns(screen));
        let help = command.try_get_matches_from(["egm-test", "--help"]).unwrap_err();
        shown(&help.render().to_string(), columns(screen), screen)
    }

    #[test]
    fn help_breaks_between_words_and_stands_below_its_text() {
        let expected = "\
Tests how a sentence of a command breaks
where the terminal ends

Usage: egm-test [OPTIONS] <FILE>

Arguments:
  <FILE>  A file with a description that
          has more words than fit

Options:
      --json  Print JSON
  -h, --help  Print help

A paragraph that is longer than the
terminal has columns.

  egm-test FILE
";
        assert_eq!(help(Screen::plain(40)), expected);
    }

    #[test]
    fn usage_and_values_continue_below_their_text() {
        let shown = |line: &str, columns: usize| lines(line, columns, Screen::plain(columns));
        assert_eq!(
            shown("Usage: egm-test [OPTIONS] <FILE>", 20),
            "Usage: egm-test\n       [OPTIONS]\n       <FILE>"
        );
        assert_eq!(
            shown("  - longest: a text that is longer than this", 30),
            "  - longest: a text that is\n             longer than this"
        );
    }

    #[test]
    fn headings_and_names_are_strong_and_nothing_else_changes() {
        let coloured = help(Screen::coloured(60));
        for strong in ["Usage:", "Options:", "<FILE>", "-h, --help", "--json"] {
            assert!(coloured.contains(&format!("\u{1b}[1m{strong}\u{1b}[0m")), "{strong}: {coloured:?}");
        }
        let plain = coloured.replace("\u{1b}[1m", "").replace("\u{1b}[0m", "");
        assert_eq!(plain, help(Screen::plain(60)));
    }

    #[test]
    fn a_mistake_has_its_label_in_colour_and_no_control_characters() {
        let error = command().try_get_matches_from(["egm-test", "a", "\u{1b}[2Jb"]).unwrap_err();
        let shown = shown(&error.render().to_string(), 80, Screen::coloured(80));
        assert!(shown.starts_with("\u{1b}[1;31merror:\u{1b}[0m unexpected"), "{shown:?}");
        assert!(!shown.contains("\u{1b}[2J") && shown.contains("\\u{1b}[2Jb"), "{shown:?}");
    }
}
