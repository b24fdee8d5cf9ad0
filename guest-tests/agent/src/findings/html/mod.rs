//! A run as one self-contained page: summary, key figures, verdicts by group, plots, and all figures as tables.
//!
//! The page is made to be shared. It names the machine's kernel and devices, but not the kernel's command line: a run
//! does not record it.

mod figures;
mod verdicts;

use std::collections::BTreeMap;

use crate::findings::group::groups;
use crate::findings::matrix::Matrix;
use crate::findings::text::{amount, escaped, size};
use crate::findings::{Comparison, Figure, Ratio, Run, Verdict};

const STYLE: &str = include_str!("page.css");

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

/// A part of the page that the list of contents links to.
struct Section {
    /// Identifier, unique in the page.
    id: String,
    title: String,
    body: String,
}

impl Section {
    fn new(id: impl Into<String>, title: impl Into<String>, body: String) -> Self {
        Self { id: id.into(), title: title.into(), body }
    }

    fn link(&self) -> String {
        format!("<li><a href=\"#{}\">{}</a></li>", self.id, escaped(&self.title))
    }

    fn html(&self) -> String {
        format!("<section id=\"{}\"><h2>{}</h2>{}</section>\n", self.id, escaped(&self.title), self.body)
    }
}

/// The page; with a comparison, it also has the figures of the earlier run.
pub fn html(run: &Run, before: Option<&Comparison>) -> String {
    let totals = run.totals();
    let (class, word) = if totals.is_good() { ("passed", "good") } else { ("failed", "not good") };
    let args: String = run.args.iter().map(|arg| format!(", {arg}")).collect();
    let sections = sections(run, before);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>egm-guest validate, {date}</title><style>\n{STYLE}</style></head><body>\n\
         <header><h1>egm-guest validate</h1><p><span class=\"{class}\">{word}</span> {totals}. {date}, seed {seed}, \
         sizes to {most}{args}.</p><nav aria-label=\"Contents\"><ul>{links}</ul></nav></header>\n<main>\n{body}</main>\
         </body></html>\n",
        date = escaped(&run.date),
        seed = run.seed,
        most = size(run.most),
        args = escaped(&args),
        links = sections.iter().map(Section::link).collect::<String>(),
        body = sections.iter().map(Section::html).collect::<String>(),
    )
}

/// The page from top to bottom.
fn sections(run: &Run, before: Option<&Comparison>) -> Vec<Section> {
    let ratios = before.map(Before::of);
    let mut sections = vec![
        Section::new("summary", "Summary", verdicts::summary(run)),
        Section::new("key-figures", "Key figures", key_figures(run)),
    ];
    if let Some(before) = before {
        sections.push(Section::new("before", "Compared with the earlier run", baseline(before)));
    }
    sections.push(Section::new("validations", "Validations", verdicts::folded(run)));
    for (number, group) in groups(run).iter().enumerate() {
        let plots = figures::plots(group, ratios.as_ref());
        if !plots.is_empty() {
            sections.push(Section::new(format!("plots-{number}"), format!("{}: plots", group.title), plots));
        }
    }
    sections.push(Section::new("figures", "All figures", figures::tables(run, ratios.as_ref())));
    sections.push(Section::new("machine", "Machine", machine(run)));
    sections
}

/// Values of validations, and the matrices of transfers.
fn key_figures(run: &Run) -> String {
    let row = |verdict: &Verdict| {
        let value = verdict.value_text();
        let row = format!(
            "<tr><th>{}</th><td class=\"number\">{}</td></tr>",
            escaped(&verdict.name),
            escaped(&value)
        );
        (!value.is_empty()).then_some(row)
    };
    let rows: String = run.verdicts.iter().filter_map(row).collect();
    let matrices: String = Matrix::of_run(run).iter().map(Matrix::html).collect();
    if rows.is_empty() && matrices.is_empty() {
        return "<p>No validation has measured anything.</p>".to_owned();
    }
    format!(
        "<div class=\"plots\">{matrices}</div><div class=\"scroll\"><table class=\"values\">{rows}</table></div>"
    )
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
    format!("<table class=\"facts\">{rows}</table>")
}

/// Differences from the earlier run: figures, outcomes, machine and arguments, and entries of only one run.
fn baseline(before: &Comparison) -> String {
    let summary = &before.summary;
    let figures =
        format!("<li>{} figures in both, {} within 2 %</li>", summary.figures, summary.within_2_percent);
    let ends = [("worst", &summary.worst), ("best", &summary.best)];
    let ends = ends.into_iter().filter_map(|(word, end)| {
        let end = end.as_ref()?;
        Some(format!("<li>{word}: {:.3}, {}</li>", end.ratio, escaped(&end.figure)))
    });
    let changed = before.changed.iter().map(|change| {
        format!("<li>{}: was {}, is {}</li>", escaped(&change.name), change.first, change.second)
    });
    let gone = before.only_first.iter().map(|what| format!("<li>only before: {}</li>", escaped(what)));
    let new = before.only_second.iter().map(|what| format!("<li>only now: {}</li>", escaped(what)));
    let machines = before.machines.iter().map(|(what, first, second)| {
        format!("<li>{}: {} before, {} now</li>", escaped(what), escaped(first), escaped(second))
    });
    let first = [figures].into_iter().chain(ends).chain(changed).collect::<String>();
    let rest: String = machines.chain(gone).chain(new).collect();
    let rest = if rest.is_empty() { "<li>nothing else is different</li>".to_owned() } else { rest };
    format!(
        "<ul>{first}</ul><details><summary>Machines, and entries of one run only</summary><ul>{rest}</ul></details>"
    )
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
    fn the_page_has_machine_outcomes_reasons_and_plots_and_loads_nothing() {
        let page = html(&run(), None);
        assert_closed(&page);
        for words in
            ["Linux 6.12", "reason of numa.nodes", "class=\"skipped\"", "<polyline", "10de:2335", "seed 42"]
        {
            assert!(page.contains(words), "{words}");
        }
        for word in ["http://", "https://", "<script", "src=", "url("] {
            assert!(!page.contains(word), "{word}");
        }
    }

    #[test]
    fn the_contents_link_to_every_section_in_the_order_of_the_page() {
        let page = html(&run(), None);
        let links: Vec<&str> =
            page.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
        let ids: Vec<String> = page
            .split("<section id=\"")
            .skip(1)
            .map(|rest| format!("#{}", rest.split('"').next().unwrap()))
            .collect();
        assert_eq!(links, ids);
        let expected = ["#summary", "#key-figures", "#validations", "#plots-0", "#figures", "#machine"];
        assert_eq!(links, expected);
    }

    #[test]
    fn groups_are_folded_unless_one_of_theirs_is_bad() {
        let page = html(&run(), None);
        assert!(page.contains("<details><summary>Memory: 1 passed</summary>"), "{page}");
        assert!(page.contains("<details open><summary>NUMA: 1 failed</summary>"), "{page}");
        assert!(page.contains("<details><summary>CUDA: 1 skipped</summary>"), "{page}");
        let problems = page.split("<ul class=\"problems\">").nth(1).unwrap().split("</ul>").next().unwrap();
        assert!(problems.contains("numa.nodes") && problems.contains("pci.links"), "{problems}");
        assert!(!problems.contains("cuda.host_numa"), "{problems}");
    }

    #[test]
    fn one_plot_has_the_kinds_of_memory_of_several_validations() {
        let mut gpu = run();
        for (validation, memory) in [(0, "pinned memory"), (2, "managed memory")] {
            let figure =
                |bytes: u64| Figure::of(format!("GPU 0, {memory}: SM read"), Some(bytes), "GB/s", &mut [1.0]);
            gpu.verdicts[validation].name = format!("cuda.{validation}.bandwidth");
            gpu.verdicts[validation].figures = vec![figure(4096), figure(8192)];
        }
        let page = html(&gpu, None);
        assert_closed(&page);
        assert_eq!(page.matches("SM read, GB/s by size</figcaption>").count(), 1, "{page}");
        assert_eq!(page.matches("<polyline").count(), 2, "{page}");
        assert!(page.contains("SM read, 8 KiB, GB/s (row: memory, column: GPU)"), "{page}");
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
    fn beside_an_earlier_run_the_figures_have_ratios() {
        let mut now = run();
        now.verdicts[0].figures[0].value *= 0.5;
        let before = Comparison::of(&run(), &now, None);
        let page = html(&now, Some(&before));
        assert_closed(&page);
        assert!(page.contains("<td class=\"number\">0.500</td>") && page.contains("of before"));
    }
}
