//! Verdicts in the page: their number by group, those that are bad, and all of them in folded tables.

use crate::findings::group::{Group, groups};
use crate::findings::text::escaped;
use crate::findings::{Outcome, Run, Verdict};

const OUTCOMES: [Outcome; 4] = [Outcome::Passed, Outcome::Failed, Outcome::Skipped, Outcome::Error];

const fn class(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Passed => "passed",
        Outcome::Failed => "failed",
        Outcome::Skipped => "skipped",
        Outcome::Error => "error",
    }
}

/// Outcomes by group, and the reasons of bad ones.
pub(super) fn summary(run: &Run) -> String {
    let heads: String =
        OUTCOMES.iter().map(|outcome| format!("<th class=\"number\">{outcome}</th>")).collect();
    let cell = |group: &Group<'_>, outcome: Outcome| match group.count(outcome) {
        0 => "<td></td>".to_owned(),
        count => format!("<td class=\"number {}\">{count}</td>", class(outcome)),
    };
    let row = |group: &Group<'_>| {
        let cells: String = OUTCOMES.iter().map(|outcome| cell(group, *outcome)).collect();
        format!("<tr><th>{}</th>{cells}</tr>", group.title)
    };
    let rows: String = groups(run).iter().map(row).collect();
    let is_bad = |verdict: &&Verdict| matches!(verdict.outcome, Outcome::Failed | Outcome::Error);
    let problem = |verdict: &Verdict| {
        format!(
            "<li><span class=\"{}\">{}</span> {}: {}</li>",
            class(verdict.outcome),
            verdict.outcome,
            escaped(&verdict.name),
            escaped(&verdict.reason)
        )
    };
    let problems: String = run.verdicts.iter().filter(is_bad).map(problem).collect();
    let problems =
        if problems.is_empty() { problems } else { format!("<ul class=\"problems\">{problems}</ul>") };
    format!(
        "{problems}<div class=\"scroll\"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
}

/// A folded table for each group; one with a bad verdict is open.
pub(super) fn folded(run: &Run) -> String {
    let of = |group: &Group<'_>| {
        let count = |outcome: &Outcome| match group.count(*outcome) {
            0 => None,
            count => Some(format!("{count} {outcome}")),
        };
        let counts: Vec<String> = OUTCOMES.iter().filter_map(count).collect();
        let rows: String = group.verdicts.iter().map(|verdict| row(verdict)).collect();
        format!(
            "<details{}><summary>{}: {}</summary><table class=\"verdicts\"><thead><tr><th>outcome</th><th>name</th>\
             <th>value</th><th>reason, or what was seen; the claim</th></tr></thead><tbody>{rows}</tbody></table></details>",
            if group.is_bad() { " open" } else { "" },
            group.title,
            counts.join(", ")
        )
    };
    groups(run).iter().map(of).collect()
}

fn row(verdict: &Verdict) -> String {
    format!(
        "<tr><td><span class=\"{}\">{}</span></td><td class=\"name\">{}</td><td class=\"number\">{}</td>\
         <td class=\"text\">{}<div class=\"soft\">{} ({}.{:03} s, seed {})</div></td></tr>",
        class(verdict.outcome),
        verdict.outcome,
        escaped(&verdict.name),
        escaped(&verdict.value_text()),
        escaped(&verdict.reason),
        escaped(&verdict.claim),
        verdict.millis / 1000,
        verdict.millis % 1000,
        verdict.seed
    )
}
