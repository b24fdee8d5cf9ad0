//! A run as a person reads it in a terminal.

use egm_guest::findings::{Comparison, Outcome, Run, Verdict, groups, visible, wrapped};
use egm_report::show::{COLUMNS, Screen, Style};

use super::required;

/// Blanks before a reason that has lines of its own.
const INDENT: usize = 4;
/// Columns of the value.
const VALUE: usize = 19;

/// Verdicts by group, key figures as matrices, bars of the other figures, differences from an earlier run, and totals.
pub(super) fn table(run: &Run, before: Option<&Comparison>, screen: Screen) -> String {
    let mut text = String::new();
    for group in groups(run) {
        text.push_str(&heading(group.title, screen));
        for verdict in group.verdicts {
            text.push_str(&row(verdict, screen));
            if !is_good(verdict.outcome) && !["baseline.least", required::NAME].contains(&&*verdict.name) {
                text.push_str(&again(run, verdict));
            }
        }
    }
    let matrices = egm_guest::findings::matrices(run, screen.columns().unwrap_or(COLUMNS));
    let bars = egm_guest::findings::bars(run, before, screen.columns().unwrap_or(COLUMNS));
    for (title, figures) in [("Key figures", matrices), ("Figures", bars)] {
        if !figures.is_empty() {
            text.push_str(&heading(title, screen));
            text.push_str(&figures);
        }
    }
    if let Some(before) = before {
        text.push_str(&different(before));
    }
    text.push_str(&format!("\n{}; seed {}\n", run.totals(), run.seed));
    // The heading of the first group has no empty line before it.
    text.trim_start_matches('\n').to_owned()
}

/// The title of a group, after an empty line.
fn heading(title: &str, screen: Screen) -> String {
    format!("\n{}\n", screen.paint(Style::Strong, title))
}

/// The words that repeat a validation, for a shell.
fn again(run: &Run, verdict: &Verdict) -> String {
    let args: String = run.args.iter().map(|arg| format!(" --arg {}", quoted(&visible(arg)))).collect();
    let name = quoted(&visible(&verdict.name));
    format!("  again: egm-guest validate --select {name} --seed {} --size {}{args}\n", run.seed, run.most)
}

/// A word as a shell takes it for one.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-=/:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Outcomes, and what is in one run only; ratios are beside the bars.
fn different(before: &Comparison) -> String {
    let mut lines = vec![String::new()];
    for change in &before.changed {
        lines.push(format!("{} was {} before", visible(&change.name), change.first));
    }
    for (when, list) in [("before", &before.only_first), ("now", &before.only_second)] {
        match list.as_slice() {
            [] => {}
            [first] => lines.push(format!("only {when}: {first}")),
            [first, rest @ ..] => lines.push(format!("only {when}: {first}, and {} more", rest.len())),
        }
    }
    if let [worst, ..] = before.below(1.0).as_slice() {
        lines.push(format!("worst against before: {}, {:.3}", worst.what(), worst.ratio));
    }
    lines.push(String::new());
    lines.join("\n")
}

fn row(verdict: &Verdict, screen: Screen) -> String {
    let value = verdict.value_text();
    let word = format!("{:<7}", verdict.outcome);
    let outcome = screen.paint(verdict.outcome.style(), &word);
    let (name, reason) = (visible(&verdict.name), visible(&verdict.reason));
    let length = format!("{name:<28} {word} {value:>VALUE$}  {reason}").chars().count();
    match screen.columns() {
        Some(columns) if length > columns => {
            let row = format!("{name:<28} {outcome} {value:>VALUE$}");
            let below = if reason.is_empty() { String::new() } else { wrapped(&reason, INDENT, columns) };
            format!("{}\n{below}", row.trim_end())
        }
        _ => {
            let row = format!("{name:<28} {outcome} {value:>VALUE$}  {reason}");
            format!("{}\n", row.trim_end())
        }
    }
}

/// Whether an outcome is one that a run can end well with.
pub(super) const fn is_good(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Passed | Outcome::Skipped)
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Figure;

    use super::*;
    use crate::finding::Finding;

    #[test]
    fn a_row_has_no_escapes_but_our_colours() {
        let verdict = Finding::error("a\u{1b}[2Jb").into_verdict("memory.pattern", "", 1);
        assert_eq!(
            row(&verdict, Screen::FILE),
            "memory.pattern               error                        a\u{fffd}[2Jb\n"
        );
        assert!(row(&verdict, Screen::coloured(80)).contains("\u{1b}[31merror  \u{1b}[0m"));
    }

    #[test]
    fn a_reason_that_does_not_fit_the_terminal_has_lines_of_its_own() {
        let verdict = Finding::skipped(
            "no huge page is set aside and free: say so to the kernel, for this one is long",
        );
        let verdict = verdict.into_verdict("memory.hugetlb", "", 1);
        let text = row(&verdict, Screen::plain(60));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "memory.hugetlb               skipped");
        assert!(lines.len() == 3 && lines.iter().all(|line| line.chars().count() <= 60), "{text}");
        assert_eq!(row(&verdict, Screen::FILE).lines().count(), 1);
    }

    fn run_of(verdicts: Vec<Verdict>) -> Run {
        Run {
            version: egm_guest::findings::RUN_VERSION,
            date: String::new(),
            program: String::new(),
            seed: 3,
            most: 65536,
            args: vec!["memory.rounds=2".into(), "nvshmem.library=/a b/it's.so".into()],
            machine: egm_guest::findings::Machine::default(),
            verdicts,
        }
    }

    #[test]
    fn what_failed_is_repeated_with_its_arguments_as_one_shell_word_each() {
        let run = run_of(vec![Finding::failed("x").into_verdict("memory.pattern", "", 1)]);
        let text = table(&run, None, Screen::FILE);
        let again = "again: egm-guest validate --select memory.pattern --seed 3 --size 65536 --arg memory.rounds=2 \
                     --arg 'nvshmem.library=/a b/it'\\''s.so'\n";
        assert!(text.contains(again), "{text}");
    }

    #[test]
    fn a_table_has_groups_values_and_matrices() {
        let passed = |name, reason: &str| Finding::passed(reason).into_verdict(name, "", 1);
        let figure = |series: &str, value| Figure::of(series, Some(1 << 30), "GB/s", &mut [value]);
        let mut memory = passed("memory.bandwidth", "");
        memory.figures = vec![figure("read, node 0", 12.0)];
        let mut pinned = passed("cuda.pinned.bandwidth", "");
        pinned.figures = vec![
            figure("GPU 0, pinned memory: SM read", 51.4),
            figure("GPU 1, pinned memory: SM read", 51.5),
            figure("GPU 0, pinned memory: SM write", 52.7),
        ];
        let run = run_of(vec![pinned, passed("cuda.pinned.bytes", "both ways"), memory]);
        assert_eq!(
            table(&run, None, Screen::FILE),
            "Memory\n\
             memory.bandwidth             passed            12.0 GB/s\n\
             \n\
             CUDA\n\
             cuda.pinned.bandwidth        passed       51.4-52.7 GB/s\n\
             cuda.pinned.bytes            passed                       both ways\n\
             \n\
             Key figures\n\
             \u{20} SM read, 1 GiB, GB/s (row: memory, column: GPU)\n\
             \u{20}                  GPU 0   GPU 1\n\
             \u{20} pinned memory     51.4    51.5\n\
             \u{20} SM write, 1 GiB, GB/s (row: memory, column: GPU)\n\
             \u{20}                  GPU 0\n\
             \u{20} pinned memory     52.7\n\
             \n\
             Figures\n\
             memory.bandwidth (GB/s)\n\
             \u{20} read, node 0     1 GiB ##############################     12.0\n\
             \n\
             3 passed, 0 failed, 0 skipped, 0 errors; seed 3\n"
        );
        let coloured = table(&run, None, Screen::coloured(80));
        assert!(coloured.starts_with("\u{1b}[1mMemory\u{1b}[0m\n"), "{coloured}");
    }
}
