//! Figures in the page: a plot for each transfer of a group, with a line for each memory, and tables.

use super::Before;
use crate::findings::group::Group;
use crate::findings::plot::{Point, bars, plot};
use crate::findings::series::Series;
use crate::findings::text::{escaped, number, size};
use crate::findings::{Figure, Run, Verdict};

/// Most plots of one group; the tables have all figures.
const MOST_PLOTS: usize = 64;

/// The figures of one plot.
struct Plot<'a> {
    transfer: &'a str,
    unit: &'a str,
    points: Vec<Point<'a>>,
}

/// The plots of a group: curves where a series has several sizes, bars otherwise. Empty without figures.
pub(super) fn plots(group: &Group<'_>, before: Option<&Before<'_>>) -> String {
    let mut plots: Vec<Plot<'_>> = Vec::new();
    let figures = group.verdicts.iter().flat_map(|verdict| verdict.figures.iter().map(move |f| (verdict, f)));
    for (verdict, figure) in figures.filter(|(_, figure)| figure.rounds > 0) {
        let (validation, unit) = (verdict.name.as_str(), figure.unit.as_str());
        let transfer = Series::of(validation, &figure.series).plot;
        let earlier = before.and_then(|before| before.ratio(validation, figure)).map(|ratio| ratio.first);
        let point = Point { validation, figure, before: earlier };
        let known = plots.iter_mut().find(|plot| plot.transfer == transfer && plot.unit == unit);
        if let Some(plot) = known {
            plot.points.push(point);
        } else if plots.len() < MOST_PLOTS {
            plots.push(Plot { transfer, unit, points: vec![point] });
        }
    }
    let drawn = |Plot { transfer, unit, points }: &Plot<'_>| {
        let curves = plot(transfer, unit, points).unwrap_or_default();
        curves + &bars(transfer, unit, points).unwrap_or_default()
    };
    let drawn: String = plots.iter().map(drawn).collect();
    if drawn.is_empty() { drawn } else { format!("<div class=\"plots\">{drawn}</div>") }
}

/// A folded table of the figures of each validation.
pub(super) fn tables(run: &Run, before: Option<&Before<'_>>) -> String {
    let measured = run.verdicts.iter().filter(|verdict| !verdict.figures.is_empty());
    let tables: String = measured.map(|verdict| table(verdict, before)).collect();
    if tables.is_empty() { "<p>No validation has measured anything.</p>".to_owned() } else { tables }
}

fn table(verdict: &Verdict, before: Option<&Before<'_>>) -> String {
    let row = |figure: &Figure| {
        let ratio = before.map(|before| {
            let ratio = before.ratio(&verdict.name, figure).map(|ratio| format!("{:.3}", ratio.ratio));
            format!("<td class=\"number\">{}</td>", ratio.unwrap_or_default())
        });
        format!(
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
        )
    };
    format!(
        "<details><summary>{}</summary><div class=\"scroll\"><table><thead><tr><th>series</th><th>size</th>\
         <th>median</th><th>minimum</th><th>maximum</th><th>unit</th><th>rounds</th>{}</tr></thead>\
         <tbody>{}</tbody></table></div></details>",
        escaped(&verdict.name),
        if before.is_some() { "<th>of before</th>" } else { "" },
        verdict.figures.iter().map(row).collect::<String>()
    )
}
