//! A run as one self-contained page: machine, plots, and a table of all verdicts.

use std::collections::BTreeMap;

use crate::findings::matrix::Matrix;
use crate::findings::plot::{bars, plot};
use crate::findings::text::{amount, escaped, number, size};
use crate::findings::{Comparison, Figure, Outcome, Ratio, Run, Verdict};

const STYLE: &str = include_str!("page.css");

/// Most units of one validation that are drawn; the table has all.
const MOST_UNITS: usize = 16;

/// Ratios to an earlier run, by validation, series, size and unit.
struct Before<'a>(BTreeMap<(&'a str, &'a str, Option<u64>, &'a str), &'a Ratio>);

impl<'a> Before<'a> {
    fn of(comparison: &'a Comparison) -> Self {
        let key = |ratio: &'a Ratio| ((&*ratio.name, &*ratio.series, ratio.bytes, &*ratio.unit), ratio);
        Self(comparison.ratios.iter().map(key).collect())
    }

    fn ratio(&self, name: &str, figure: &Figure) -> Option<&'a Ratio> {
        self.0.get(&(name, figure.series.as_str(), figure.bytes, figure.unit.as_str())).copied()
    }
}

/// The page; with a comparison, it also has the figures of the earlier run.
pub fn html(run: &Run, before: Option<&Comparison>) -> String {
    let totals = run.totals();
    let (class, word) = if totals.is_good() { ("passed", "good") } else { ("failed", "not good") };
    let args: String = run.args.iter().map(|arg| format!(", {arg}")).collect();
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>egm-guest validate, {date}</title><style>\n{STYLE}</style></head><body>\
         <header><h1>egm-guest validate</h1><p><span class=\"{class}\">{word}</span> {totals}. {date}, seed {seed}, \
         sizes to {most}{args}.</p></header><main>",
        date = escaped(&run.date),
        seed = run.seed,
        most = size(run.most),
        args = escaped(&args),
    );
    page.push_str(&machine(run));
    page.push_str(&verdicts(run));
    let ratios = before.map(Before::of);
    for verdict in run.verdicts.iter().filter(|verdict| !verdict.figures.is_empty()) {
        page.push_str(&figures(verdict, ratios.as_ref()));
    }
    if let Some(before) = before {
        page.push_str(&baseline(before));
    }
    page.push_str("</main></body></html>\n");
    page
}

fn machine(run: &Run) -> String {
    let machine = &run.machine;
    let none = || "none seen".to_owned();
    let mut facts = vec![
        ("program", run.program.clone()),
        ("kernel", machine.kernel.clone()),
        ("architecture", machine.architecture.clone()),
        ("hypervisor", machine.hypervisor.clone().unwrap_or_else(none)),
        ("product", machine.product.clone().unwrap_or_else(none)),
        ("processors", format!("{} × {}", machine.cpus, machine.cpu)),
        ("memory", amount(machine.memory)),
        ("GPU driver", machine.driver.clone().unwrap_or_else(none)),
    ];
    for node in &machine.nodes {
        let cpus = if node.cpus.is_empty() {
            "no processors".to_owned()
        } else {
            format!("processors {}", node.cpus)
        };
        let egm = if node.egm == Some(true) { ", EGM" } else { "" };
        facts.push(("node", format!("{}: {}, {cpus}{egm}", node.number, amount(node.memory))));
    }
    for gpu in &machine.gpus {
        facts.push(("GPU", format!("{} {} {}", gpu.address, gpu.id, gpu.name.clone().unwrap_or_default())));
    }
    let row = |(what, fact): &(&str, String)| format!("<tr><th>{what}</th><td>{}</td></tr>", escaped(fact));
    let rows: String = facts.iter().map(row).collect();
    format!("<section><h2>Machine</h2><table class=\"facts\">{rows}</table></section>")
}

const fn class(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Passed => "passed",
        Outcome::Failed => "failed",
        Outcome::Skipped => "skipped",
        Outcome::Error => "error",
    }
}

fn verdicts(run: &Run) -> String {
    let row = |verdict: &Verdict| {
        let value = verdict
            .value
            .map(|value| format!("{} {}", number(value), verdict.unit.as_deref().unwrap_or_default()));
        format!(
            "<tr><td><span class=\"{}\">{}</span></td><td class=\"name\">{}</td><td class=\"number\">{}</td>\
             <td class=\"text\">{}<div class=\"soft\">{} ({}.{:03} s, seed {})</div></td></tr>",
            class(verdict.outcome),
            verdict.outcome,
            escaped(&verdict.name),
            escaped(&value.unwrap_or_default()),
            escaped(&verdict.reason),
            escaped(&verdict.claim),
            verdict.millis / 1000,
            verdict.millis % 1000,
            verdict.seed
        )
    };
    let rows: String = run.verdicts.iter().map(row).collect();
    format!(
        "<section><h2>Validations</h2><table class=\"verdicts\"><thead><tr><th>outcome</th><th>name</th><th>value</th>\
         <th>reason, or what was seen; the claim</th></tr></thead><tbody>{rows}</tbody></table></section>"
    )
}

fn figures(verdict: &Verdict, before: Option<&Before<'_>>) -> String {
    let value =
        |figure: &Figure| before.and_then(|b| b.ratio(&verdict.name, figure)).map(|ratio| ratio.first);
    let mut units: Vec<&str> = Vec::new();
    for figure in &verdict.figures {
        if !units.contains(&&*figure.unit) && units.len() < MOST_UNITS {
            units.push(&figure.unit);
        }
    }
    let mut section = format!("<section><h2>{}</h2><div class=\"plots\">", escaped(&verdict.name));
    Matrix::all(&verdict.figures).iter().for_each(|matrix| section.push_str(&matrix.html()));
    for unit in units {
        section.push_str(&plot(&verdict.name, &verdict.figures, unit, &value).unwrap_or_default());
        section.push_str(&bars(&verdict.name, &verdict.figures, unit, &value).unwrap_or_default());
    }
    section.push_str(
        "</div><details><summary>Figures</summary><div class=\"scroll\"><table><thead><tr><th>series</th>",
    );
    section.push_str("<th>size</th><th>median</th><th>least</th><th>most</th><th>unit</th><th>rounds</th>");
    section.push_str(if before.is_some() { "<th>of before</th></tr></thead>" } else { "</tr></thead>" });
    for figure in &verdict.figures {
        let ratio = before.map(|before| {
            let ratio = before.ratio(&verdict.name, figure).map(|ratio| format!("{:.3}", ratio.ratio));
            format!("<td class=\"number\">{}</td>", ratio.unwrap_or_default())
        });
        section.push_str(&format!(
            "<tr><td>{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td>\
             <td class=\"number\">{}</td><td>{}</td><td class=\"number\">{}</td>{}</tr>",
            escaped(&figure.series),
            figure.bytes.map(size).unwrap_or_default(),
            number(figure.value),
            number(figure.least),
            number(figure.most),
            escaped(&figure.unit),
            figure.rounds,
            ratio.unwrap_or_default()
        ));
    }
    section.push_str("</table></div></details></section>");
    section
}

/// Differences from the earlier run: machine and arguments, outcomes, and entries of only one run.
fn baseline(before: &Comparison) -> String {
    let changed = before.changed.iter().map(|change| {
        format!("<li>{}: was {}, is {}</li>", escaped(&change.name), change.first, change.second)
    });
    let gone = before.only_first.iter().map(|what| format!("<li>only before: {}</li>", escaped(what)));
    let new = before.only_second.iter().map(|what| format!("<li>only now: {}</li>", escaped(what)));
    let machines = before.machines.iter().map(|(what, first, second)| {
        format!("<li>{}: {} before, {} now</li>", escaped(what), escaped(first), escaped(second))
    });
    let items: String = machines.chain(changed).chain(gone).chain(new).collect();
    let items = if items.is_empty() { "<li>nothing else is different</li>".to_owned() } else { items };
    format!("<section><h2>Against the run before</h2><ul>{items}</ul></section>")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::run::tests::run;

    /// Checks that every element is closed by its own name: browsers do not need that, but readers of the source do.
    fn assert_closed(page: &str) {
        const VOID: [&str; 2] = ["meta", "!doctype"];
        let mut open: Vec<&str> = Vec::new();
        let body = page.replace(STYLE, "");
        for tag in body.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
            let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name), "{tag}");
            } else if !tag.ends_with('/') && !VOID.contains(&name) {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }

    #[test]
    fn the_page_has_machine_outcomes_reasons_and_plots_and_asks_nobody() {
        let page = html(&run(), None);
        assert_closed(&page);
        for words in
            ["Linux 6.12", "reason of numa.nodes", "class=\"skipped\"", "<polyline", "10de:2335", "seed 42"]
        {
            assert!(page.contains(words), "{words}");
        }
        for word in ["http://", "https://", "<script", "src=", "href=", "url("] {
            assert!(!page.contains(word), "{word}");
        }
    }

    #[test]
    fn a_hostile_device_name_stays_a_name() {
        let name = "</td><script>alert(1)</script><img src=x onerror='x'>\u{202e}";
        let mut hostile = run();
        hostile.machine.gpus[0].name = Some(name.into());
        hostile.machine.nodes[0].cpus = name.into();
        hostile.machine.product = Some(name.into());
        hostile.date = name.into();
        for verdict in &mut hostile.verdicts {
            verdict.reason = name.into();
            verdict.name = name.into();
            verdict.unit = Some(name.into());
            verdict.value = Some(1.0);
        }
        for figure in &mut hostile.verdicts[0].figures {
            figure.series = name.into();
            figure.unit = name.into();
        }
        let before = Comparison::of(&run(), &hostile, None);
        let page = html(&hostile, Some(&before));
        assert_closed(&page);
        assert!(!page.contains("<script") && !page.contains("<img") && !page.contains('\u{202e}'));
        assert!(page.contains("&lt;script&gt;"));
    }

    #[test]
    fn against_a_run_before_the_figures_have_ratios() {
        let mut now = run();
        now.verdicts[0].figures[0].value *= 0.5;
        let before = Comparison::of(&run(), &now, None);
        let page = html(&now, Some(&before));
        assert_closed(&page);
        assert!(page.contains("<td class=\"number\">0.500</td>") && page.contains("of before"));
    }
}
