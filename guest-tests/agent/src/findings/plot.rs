//! A plot as SVG that stands in a page: curves by size, the sizes on a logarithmic axis.

use std::collections::{BTreeMap, BTreeSet};

use crate::findings::Figure;
use crate::findings::series::{MemoryKind, Series};
use crate::findings::text::{escaped, number, size};

/// Width and height of the drawing, and the margins that its words need.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 40.0;
/// Most bars under one another; the table has the others.
const MOST_BARS: usize = 64;
/// Most series of one plot; more are not distinguishable.
const MOST_SERIES: usize = 24;
/// Number of colours for series without a known memory, from [`MemoryKind::Other`] on.
const OTHERS: usize = 4;
/// Dash patterns of lines that share a colour in one plot.
const DASHES: [&str; 4] = ["", "6 3", "2 3", "8 3 2 3"];

/// A figure with its validation and the value of an earlier run, if that has one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Point<'a> {
    pub(crate) validation: &'a str,
    pub(crate) figure: &'a Figure,
    pub(crate) before: Option<f64>,
}

impl<'a> Point<'a> {
    /// Identity of its series.
    fn key(&self) -> (&'a str, &'a str) {
        (self.validation, self.figure.series.as_str())
    }

    fn series(&self) -> Series<'a> {
        Series::of(self.validation, self.figure.series.as_str())
    }

    /// Whether it can be a point of a curve.
    fn has_size(&self) -> bool {
        self.figure.rounds > 0 && self.figure.bytes.is_some_and(|bytes| bytes > 0)
    }
}

/// A series of several sizes.
struct Line<'a> {
    key: (&'a str, &'a str),
    name: &'a str,
    memory: MemoryKind,
    /// Number of the lines before it with the same kind of memory.
    number: usize,
    points: Vec<Point<'a>>,
}

impl Line<'_> {
    /// Number of its colour: that of its memory. Series without a known memory take turns with the last colours.
    fn colour(&self) -> usize {
        let turn = if self.memory == MemoryKind::Other { self.number % OTHERS } else { 0 };
        usize::from(self.memory as u8) + turn
    }

    /// Attributes of its curve.
    fn style(&self) -> String {
        let number = if self.memory == MemoryKind::Other { self.number / OTHERS } else { self.number };
        let dash = DASHES.get(number % DASHES.len()).copied().unwrap_or_default();
        let colour = self.colour();
        format!("class=\"c{colour}\" fill=\"none\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"")
    }
}

/// The curves of a plot, in the order of their first points.
struct Curves<'a> {
    lines: Vec<Line<'a>>,
    left_out: usize,
}

impl<'a> Curves<'a> {
    fn of(points: &[Point<'a>]) -> Self {
        let mut curves = Self { lines: Vec::new(), left_out: 0 };
        let in_curves = in_curves(points);
        for point in points.iter().filter(|point| point.has_size() && in_curves.contains(&point.key())) {
            let known = curves.lines.iter_mut().find(|line| line.key == point.key());
            if let Some(line) = known {
                line.points.push(*point);
            } else if curves.lines.len() < MOST_SERIES {
                let Series { line: name, memory, .. } = point.series();
                let number = curves.lines.iter().filter(|line| line.memory == memory).count();
                curves.lines.push(Line { key: point.key(), name, memory, number, points: vec![*point] });
            } else {
                curves.left_out += 1;
            }
        }
        curves.lines.iter_mut().for_each(|line| line.points.sort_by_key(|point| point.figure.bytes));
        curves
    }

    fn points(&self) -> impl Iterator<Item = &Point<'a>> {
        self.lines.iter().flat_map(|line| &line.points)
    }
}

/// The series that have several sizes: one point is no curve.
fn in_curves<'a>(points: &[Point<'a>]) -> BTreeSet<(&'a str, &'a str)> {
    let mut sizes: BTreeMap<(&str, &str), BTreeSet<Option<u64>>> = BTreeMap::new();
    for point in points.iter().filter(|point| point.has_size()) {
        sizes.entry(point.key()).or_default().insert(point.figure.bytes);
    }
    sizes.into_iter().filter(|(_, sizes)| sizes.len() > 1).map(|(key, _)| key).collect()
}

/// Mapping of values to positions in the drawing.
struct Axes {
    /// Exponents of two at the left and the right.
    x: (f64, f64),
    /// The value at the top; the bottom is 0.
    top: f64,
}

impl Axes {
    fn of(curves: &Curves<'_>) -> Self {
        let exponents = || curves.points().filter_map(|point| point.figure.bytes).map(exponent);
        let (least, most) = (exponents().fold(f64::MAX, f64::min), exponents().fold(0.0, f64::max));
        let values = |point: &Point<'_>| [point.figure.most, point.figure.value, point.before.unwrap_or(0.0)];
        let highest = curves.points().flat_map(values).fold(0.0, f64::max);
        Self { x: (least, if most > least { most } else { least + 1.0 }), top: ceiling(highest) }
    }

    fn x(&self, exponent: f64) -> f64 {
        LEFT + (exponent - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (value / self.top).clamp(0.0, 1.0) * (HEIGHT - TOP - BOTTOM)
    }
}

fn exponent(bytes: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a position in a drawing")]
    let bytes = bytes as f64;
    bytes.log2()
}

/// The next of 1, 2, 2.5, 5 times a power of ten that is not below `value`.
fn ceiling(value: f64) -> f64 {
    if !(value.is_finite() && value > 0.0) {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].map(|step| step * power).into_iter().find(|top| *top >= value).unwrap_or(value)
}

/// The plot of series with several sizes, all of one unit, with its legend; `None` without any. Thin lines are an
/// earlier run's.
pub(crate) fn plot(title: &str, unit: &str, points: &[Point<'_>]) -> Option<String> {
    let curves = Curves::of(points);
    if curves.lines.is_empty() {
        return None;
    }
    let axes = Axes::of(&curves);
    let label = escaped(&format!("{title}, {unit} by size"));
    let mut svg = format!(
        "<figure><figcaption>{label}</figcaption><div class=\"scroll\"><svg role=\"img\" aria-label=\"{label}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\">"
    );
    svg.push_str(&grid(&axes, unit));
    for line in &curves.lines {
        svg.push_str(&line_before(&axes, line));
        svg.push_str(&curve(&axes, line, unit));
    }
    svg.push_str("</svg></div><ul class=\"legend\">");
    for line in &curves.lines {
        let sample = format!(
            "<svg viewBox=\"0 0 28 8\"><line x1=\"0\" x2=\"28\" y1=\"4\" y2=\"4\" {}/></svg>",
            line.style()
        );
        svg.push_str(&format!("<li>{sample}{}</li>", escaped(line.name)));
    }
    if curves.points().any(|point| point.before.is_some()) {
        svg.push_str("<li>thin: the earlier run</li>");
    }
    if curves.left_out > 0 {
        svg.push_str(&format!("<li>{} points of more series are in the table only</li>", curves.left_out));
    }
    svg.push_str("</ul></figure>");
    Some(svg)
}

/// Bars of the figures that are no curve, all of one unit, on one scale; `None` without any. A mark shows the earlier
/// run.
pub(crate) fn bars(title: &str, unit: &str, points: &[Point<'_>]) -> Option<String> {
    let in_curves = in_curves(points);
    let is_bar = |point: &&Point<'_>| {
        point.figure.rounds > 0 && !(point.has_size() && in_curves.contains(&point.key()))
    };
    let shown: Vec<&Point<'_>> = points.iter().filter(is_bar).take(MOST_BARS).collect();
    if shown.is_empty() {
        return None;
    }
    let values = |point: &&Point<'_>| [point.figure.value, point.before.unwrap_or(0.0)];
    let most = shown.iter().flat_map(values).fold(0.0, f64::max);
    let part = |value: f64| {
        let part = value / most * 100.0;
        if part.is_finite() { part.clamp(0.0, 100.0) } else { 0.0 }
    };
    let mut list = format!(
        "<figure><figcaption>{}</figcaption><ul class=\"bars\">",
        escaped(&format!("{title}, {unit}"))
    );
    for point in shown {
        let (series, value) = (point.series(), point.figure.value);
        let at = point.figure.bytes.map_or_else(String::new, |bytes| format!(", {}", size(bytes)));
        let mark = point.before.map(|value| format!("<b style=\"left:{:.1}%\"></b>", part(value)));
        list.push_str(&format!(
            "<li><span>{}{at}</span><span class=\"bar c{}\"><i style=\"width:{:.1}%\"></i>{}</span>\
             <span class=\"number\">{}</span></li>",
            escaped(series.line),
            series.memory as u8,
            part(value),
            mark.unwrap_or_default(),
            number(value)
        ));
    }
    list.push_str("</ul></figure>");
    Some(list)
}

fn grid(axes: &Axes, unit: &str) -> String {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let mut svg = String::new();
    for step in 0..=5u8 {
        let value = axes.top * f64::from(step) / 5.0;
        let y = axes.y(value);
        svg.push_str(&format!(
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"value\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT - 6.0,
            y + 4.0,
            number(value)
        ));
    }
    let (first, last) = (axes.x.0.ceil().max(0.0), axes.x.1.floor().min(63.0));
    let every = if last - first > 14.0 { 4 } else { 2 };
    for power in
        (0..64u32).filter(|power| (first..=last).contains(&f64::from(*power)) && power.is_multiple_of(every))
    {
        let x = axes.x(f64::from(power));
        svg.push_str(&format!(
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
             <text class=\"size\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>",
            bottom + 16.0,
            size(1 << power)
        ));
    }
    svg.push_str(&format!("<text class=\"unit\" x=\"4\" y=\"{}\">{}</text>", HEIGHT - 6.0, escaped(unit)));
    svg
}

/// A thin line through the values that the points had in an earlier run.
fn line_before(axes: &Axes, line: &Line<'_>) -> String {
    let position = |point: &Point<'_>| {
        let x = axes.x(exponent(point.figure.bytes.unwrap_or(1)));
        point.before.map(|value| format!("{x:.1},{:.1}", axes.y(value)))
    };
    let points: Vec<String> = line.points.iter().filter_map(position).collect();
    if points.is_empty() {
        return String::new();
    }
    format!(
        "<polyline class=\"c{}\" fill=\"none\" stroke-width=\"0.8\" points=\"{}\"/>",
        line.colour(),
        points.join(" ")
    )
}

/// A line through the medians; at each median a whisker over its rounds, and the numbers as a tooltip.
fn curve(axes: &Axes, line: &Line<'_>, unit: &str) -> String {
    let position = |figure: &Figure| (axes.x(exponent(figure.bytes.unwrap_or(1))), axes.y(figure.value));
    let figures = || line.points.iter().map(|point| point.figure);
    let points: Vec<String> = figures().map(position).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let mut svg = format!("<g {}><polyline points=\"{}\"/>", line.style(), points.join(" "));
    for figure in figures() {
        let (x, y) = position(figure);
        let (low, high) = (axes.y(figure.least), axes.y(figure.most));
        let tooltip = format!(
            "{}, {}: {} {unit} ({} to {}, {} rounds)",
            line.name,
            size(figure.bytes.unwrap_or(0)),
            number(figure.value),
            number(figure.least),
            number(figure.most),
            figure.rounds
        );
        svg.push_str(&format!(
            "<line stroke-width=\"1\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>\
             <circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"><title>{}</title></circle>",
            escaped(&tooltip)
        ));
    }
    svg.push_str("</g>");
    svg
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn figure(series: &str, bytes: u64, value: f64) -> Figure {
        Figure::of(series, Some(bytes), "GB/s", &mut [value])
    }

    fn points(figures: &[Figure], before: impl Fn(&Figure) -> Option<f64>) -> Vec<Point<'_>> {
        let point = |figure| Point { validation: "memory.bandwidth", figure, before: before(figure) };
        figures.iter().map(point).collect()
    }

    fn drawn(figures: &[Figure]) -> Option<String> {
        plot("memory", "GB/s", &points(figures, |_| None))
    }

    fn barred(figures: &[Figure], before: Option<f64>) -> Option<String> {
        bars("memory", "GB/s", &points(figures, |_| before))
    }

    #[test]
    fn a_curve_goes_from_left_to_right_and_higher_values_lie_higher() {
        let figures = [figure("read", 1 << 20, 20.0), figure("read", 4096, 10.0)];
        let svg = drawn(&figures).unwrap();
        assert!(svg.contains("<polyline points=\"70.0,137.0 744.0,14.0\"/>"), "{svg}");
        assert!(svg.contains("read, 1 MiB: 20.0 GB/s (20.0 to 20.0, 1 rounds)"), "{svg}");
        assert!(svg.contains(">64 KiB</text>") && !svg.contains("the earlier run"), "{svg}");
        let both = points(&figures, |figure| Some(figure.value * 2.0));
        let both = plot("memory", "GB/s", &both).unwrap();
        assert!(both.contains("points=\"70.0,161.6 744.0,63.2\"/>"), "{both}");
        assert!(both.contains("thin: the earlier run") && both.matches("<polyline").count() == 2, "{both}");
    }

    #[test]
    fn one_memory_has_one_colour_and_each_of_its_lines_has_another_dash() {
        let series = ["GPU 0, pinned memory: SM read", "GPU 0, a pool on node 0: SM read"];
        let more = ["GPU 1, a pool on node 0: SM read"];
        let figures: Vec<Figure> = series
            .iter()
            .chain(&more)
            .flat_map(|series| [figure(series, 4096, 1.0), figure(series, 8192, 2.0)])
            .collect();
        let svg = drawn(&figures).unwrap();
        let style = |colour: u8, dash: &str| {
            format!("<g class=\"c{colour}\" fill=\"none\" stroke-width=\"2\" stroke-dasharray=\"{dash}\">")
        };
        let (pool, pinned) = (MemoryKind::Pool as u8, MemoryKind::Pinned as u8);
        let styles = [style(pinned, ""), style(pool, ""), style(pool, "6 3")];
        assert!(styles.iter().all(|style| svg.matches(style.as_str()).count() == 1), "{svg}");
        assert!(svg.contains("</svg>GPU 1, a pool on node 0</li>"), "{svg}");
        let list = barred(&figures[..1], None).unwrap();
        assert!(list.contains(&format!("class=\"bar c{pinned}\"")), "{list}");
    }

    #[test]
    fn series_without_a_known_memory_are_distinct() {
        let names: Vec<String> = (0..9).map(|n| format!("transfer {n}")).collect();
        let figures: Vec<Figure> =
            names.iter().flat_map(|name| [figure(name, 4096, 1.0), figure(name, 8192, 2.0)]).collect();
        let points = points(&figures, |_| None);
        let styles: BTreeSet<String> = Curves::of(&points).lines.iter().map(Line::style).collect();
        assert_eq!(styles.len(), names.len(), "{styles:?}");
        let page = include_str!("html/page.css");
        for colour in 0..usize::from(MemoryKind::Other as u8) + OTHERS {
            let (class, light) =
                (format!(".c{colour} {{ --c: var(--c{colour}); }}"), format!("--c{colour}: #"));
            assert!(page.contains(&class) && page.matches(&light).count() == 2, "{colour}");
        }
    }

    #[test]
    fn nothing_to_draw_is_no_plot_and_one_point_is_a_bar() {
        let one = [figure("read", 4096, 1.0), figure("write", 4096, 4.0)];
        assert_eq!((drawn(&[]), drawn(&one), barred(&[], None)), (None, None, None));
        let list = barred(&one, Some(2.0)).unwrap();
        assert!(list.contains("read, 4 KiB") && list.contains("width:25.0%"), "{list}");
        assert!(list.contains("left:50.0%") && list.contains("width:100.0%"), "{list}");
        let curve = [figure("read", 4096, 1.0), figure("read", 8192, 1.0)];
        assert_eq!(barred(&curve, None), None);
    }

    #[test]
    fn the_top_is_a_round_number() {
        assert_eq!([0.0, 0.7, 1.0, 21.0, 499.0, 501.0].map(ceiling), [1.0, 1.0, 1.0, 25.0, 500.0, 1000.0]);
        assert_eq!(ceiling(f64::NAN), 1.0);
    }

    proptest! {
        #[test]
        fn every_position_is_inside_the_drawing(bytes in prop::collection::vec(1u64.., 1..5), value in 0.0f64..1e300) {
            let figures: Vec<Figure> = bytes.iter().map(|bytes| figure("<x>", *bytes, value)).collect();
            let svg = drawn(&figures).unwrap_or_default();
            let list = barred(&figures, Some(f64::MAX)).unwrap_or_default();
            prop_assert!(!svg.is_empty() || !list.is_empty());
            for text in [svg, list] {
                prop_assert!(!text.contains("NaN") && !text.contains("inf") && !text.contains("<x>"));
            }
        }
    }
}
