//! A plot as SVG that stands in a page: curves by size, the sizes on a logarithmic axis.

use std::collections::{BTreeMap, BTreeSet};

use crate::findings::Figure;
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
/// Number of the page's colours, `c0` and so on.
const COLOURS: usize = 6;
/// Dash patterns of lines after all colours are used.
const DASHES: [&str; 4] = ["", "6 3", "2 3", "8 3 2 3"];

/// The value of a figure in an earlier run.
pub(crate) type Before<'a> = dyn Fn(&Figure) -> Option<f64> + 'a;

/// The data of a plot: the points of one unit, by series in their original order.
struct Curves<'a> {
    series: Vec<(&'a str, Vec<&'a Figure>)>,
    left_out: usize,
}

impl<'a> Curves<'a> {
    fn of(figures: &'a [Figure], unit: &str) -> Self {
        let mut curves = Self { series: Vec::new(), left_out: 0 };
        let in_curves = in_curves(figures, unit);
        for figure in
            figures.iter().filter(|figure| is_drawn(figure, unit) && in_curves.contains(&*figure.series))
        {
            if let Some((_, points)) = curves.series.iter_mut().find(|(name, _)| *name == figure.series) {
                points.push(figure);
            } else if curves.series.len() < MOST_SERIES {
                curves.series.push((&figure.series, vec![figure]));
            } else {
                curves.left_out += 1;
            }
        }
        curves.series.iter_mut().for_each(|(_, points)| points.sort_by_key(|figure| figure.bytes));
        curves
    }

    fn points(&self) -> impl Iterator<Item = &'a Figure> + '_ {
        self.series.iter().flat_map(|(_, points)| points.iter().copied())
    }
}

/// Whether a figure can be a point of a curve.
fn is_drawn(figure: &Figure, unit: &str) -> bool {
    figure.unit == unit && figure.rounds > 0 && figure.bytes.is_some_and(|bytes| bytes > 0)
}

/// The series that have several sizes: one point is no curve.
fn in_curves<'a>(figures: &'a [Figure], unit: &str) -> BTreeSet<&'a str> {
    let mut sizes: BTreeMap<&str, BTreeSet<Option<u64>>> = BTreeMap::new();
    for figure in figures.iter().filter(|figure| is_drawn(figure, unit)) {
        sizes.entry(&figure.series).or_default().insert(figure.bytes);
    }
    sizes.into_iter().filter(|(_, sizes)| sizes.len() > 1).map(|(series, _)| series).collect()
}

/// Mapping of values to positions in the drawing.
struct Axes {
    /// Exponents of two at the left and the right.
    x: (f64, f64),
    /// The value at the top; the bottom is 0.
    top: f64,
}

impl Axes {
    fn of(curves: &Curves<'_>, before: &Before<'_>) -> Self {
        let exponents = || curves.points().filter_map(|figure| figure.bytes).map(exponent);
        let (least, most) = (exponents().fold(f64::MAX, f64::min), exponents().fold(0.0, f64::max));
        let values = |figure: &Figure| [figure.most, figure.value, before(figure).unwrap_or(0.0)];
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
    #[expect(clippy::cast_precision_loss, reason = "a place in a drawing")]
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

/// The plot of the figures of `unit`, for series with several sizes, with its legend; `None` without any. Thin lines
/// are an earlier run's.
pub(crate) fn plot(title: &str, figures: &[Figure], unit: &str, before: &Before<'_>) -> Option<String> {
    let curves = Curves::of(figures, unit);
    if curves.series.is_empty() {
        return None;
    }
    let axes = Axes::of(&curves, before);
    let label = escaped(&format!("{title}, {unit} by size"));
    let mut svg = format!(
        "<figure><figcaption>{label}</figcaption><div class=\"scroll\"><svg role=\"img\" aria-label=\"{label}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\">"
    );
    svg.push_str(&grid(&axes, unit));
    for (index, (name, points)) in curves.series.iter().enumerate() {
        svg.push_str(&line_before(&axes, points, index, before));
        svg.push_str(&curve(&axes, name, points, unit, index));
    }
    svg.push_str("</svg></div><ul class=\"legend\">");
    for (index, (name, _)) in curves.series.iter().enumerate() {
        let line = format!(
            "<svg viewBox=\"0 0 28 8\"><line x1=\"0\" x2=\"28\" y1=\"4\" y2=\"4\" {}/></svg>",
            style(index)
        );
        svg.push_str(&format!("<li>{line}{}</li>", escaped(name)));
    }
    if curves.points().any(|figure| before(figure).is_some()) {
        svg.push_str("<li>thin: the run before</li>");
    }
    if curves.left_out > 0 {
        svg.push_str(&format!("<li>{} points of more series are in the table only</li>", curves.left_out));
    }
    svg.push_str("</ul></figure>");
    Some(svg)
}

/// Bars of the figures of `unit` that are no curve, on one scale; `None` without any. A mark shows the earlier run.
pub(crate) fn bars(title: &str, figures: &[Figure], unit: &str, before: &Before<'_>) -> Option<String> {
    let in_curves = in_curves(figures, unit);
    let is_point = |figure: &Figure| is_drawn(figure, unit) && in_curves.contains(&*figure.series);
    let is_bar = |figure: &&Figure| figure.unit == unit && figure.rounds > 0 && !is_point(figure);
    let shown: Vec<&Figure> = figures.iter().filter(is_bar).take(MOST_BARS).collect();
    if shown.is_empty() {
        return None;
    }
    let values = |figure: &&Figure| [figure.value, before(figure).unwrap_or(0.0)];
    let most = shown.iter().flat_map(values).fold(0.0, f64::max);
    let part = |value: f64| {
        let part = value / most * 100.0;
        if part.is_finite() { part.clamp(0.0, 100.0) } else { 0.0 }
    };
    let mut list = format!(
        "<figure><figcaption>{}</figcaption><ul class=\"bars\">",
        escaped(&format!("{title}, {unit}"))
    );
    for figure in shown {
        let at = figure.bytes.map_or_else(String::new, |bytes| format!(", {}", size(bytes)));
        let mark = before(figure).map(|value| format!("<b style=\"left:{:.1}%\"></b>", part(value)));
        list.push_str(&format!(
            "<li><span>{}{at}</span><span class=\"bar\"><i style=\"width:{:.1}%\"></i>{}</span>\
             <span class=\"number\">{}</span></li>",
            escaped(&figure.series),
            part(figure.value),
            mark.unwrap_or_default(),
            number(figure.value)
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

fn style(index: usize) -> String {
    let dash = DASHES.get(index / COLOURS % DASHES.len()).copied().unwrap_or_default();
    format!("class=\"c{}\" fill=\"none\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"", index % COLOURS)
}

/// A thin line through the points' values in an earlier run.
fn line_before(axes: &Axes, points: &[&Figure], index: usize, before: &Before<'_>) -> String {
    let place = |figure: &&Figure| {
        let x = axes.x(exponent(figure.bytes.unwrap_or(1)));
        before(figure).map(|value| format!("{x:.1},{:.1}", axes.y(value)))
    };
    let line: Vec<String> = points.iter().filter_map(place).collect();
    if line.is_empty() {
        return String::new();
    }
    let colour = index % COLOURS;
    format!(
        "<polyline class=\"c{colour}\" fill=\"none\" stroke-width=\"0.8\" points=\"{}\"/>",
        line.join(" ")
    )
}

/// A line through the medians; at each median a whisker over its rounds, and the numbers as a tooltip.
fn curve(axes: &Axes, name: &str, points: &[&Figure], unit: &str, index: usize) -> String {
    let place = |figure: &Figure| (axes.x(exponent(figure.bytes.unwrap_or(1))), axes.y(figure.value));
    let line: Vec<String> =
        points.iter().map(|figure| place(figure)).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let mut svg = format!("<g {}><polyline points=\"{}\"/>", style(index), line.join(" "));
    for figure in points {
        let (x, y) = place(figure);
        let (low, high) = (axes.y(figure.least), axes.y(figure.most));
        let said = format!(
            "{name}, {}: {} {unit} ({} to {}, {} rounds)",
            size(figure.bytes.unwrap_or(0)),
            number(figure.value),
            number(figure.least),
            number(figure.most),
            figure.rounds
        );
        svg.push_str(&format!(
            "<line stroke-width=\"1\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>\
             <circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"><title>{}</title></circle>",
            escaped(&said)
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

    fn drawn(figures: &[Figure], unit: &str) -> Option<String> {
        plot("memory", figures, unit, &|_| None)
    }

    #[test]
    fn a_curve_goes_from_left_to_right_and_higher_values_lie_higher() {
        let figures = [figure("read", 1 << 20, 20.0), figure("read", 4096, 10.0)];
        let svg = drawn(&figures, "GB/s").unwrap();
        assert!(svg.contains("<polyline points=\"70.0,137.0 744.0,14.0\"/>"), "{svg}");
        assert!(svg.contains("read, 1 MiB: 20.0 GB/s (20.0 to 20.0, 1 rounds)"), "{svg}");
        assert!(svg.contains(">64 KiB</text>") && !svg.contains("the run before"), "{svg}");
        let both = plot("memory", &figures, "GB/s", &|figure| Some(figure.value * 2.0)).unwrap();
        assert!(both.contains("points=\"70.0,161.6 744.0,63.2\"/>"), "{both}");
        assert!(both.contains("thin: the run before") && both.matches("<polyline").count() == 2, "{both}");
    }

    #[test]
    fn nothing_to_draw_is_no_plot_and_one_point_is_a_bar() {
        let one = [figure("read", 4096, 1.0), figure("write", 4096, 4.0)];
        assert_eq!((drawn(&one, "ns"), drawn(&one, "GB/s")), (None, None));
        assert_eq!(bars("memory", &one, "ns", &|_| None), None);
        let list = bars("memory", &one, "GB/s", &|_| Some(2.0)).unwrap();
        assert!(list.contains("read, 4 KiB") && list.contains("width:25.0%"), "{list}");
        assert!(list.contains("left:50.0%") && list.contains("width:100.0%"), "{list}");
        let curve = [figure("read", 4096, 1.0), figure("read", 8192, 1.0)];
        assert_eq!(bars("memory", &curve, "GB/s", &|_| None), None);
    }

    #[test]
    fn the_top_is_a_round_number() {
        assert_eq!([0.0, 0.7, 1.0, 21.0, 499.0, 501.0].map(ceiling), [1.0, 1.0, 1.0, 25.0, 500.0, 1000.0]);
        assert_eq!(ceiling(f64::NAN), 1.0);
    }

    proptest! {
        #[test]
        fn every_place_is_inside_the_drawing(bytes in prop::collection::vec(1u64.., 1..5), value in 0.0f64..1e300) {
            let figures: Vec<Figure> = bytes.iter().map(|bytes| figure("<x>", *bytes, value)).collect();
            let svg = drawn(&figures, "GB/s").unwrap_or_default();
            let list = bars("t", &figures, "GB/s", &|_| Some(f64::MAX)).unwrap_or_default();
            prop_assert!(!svg.is_empty() || !list.is_empty());
            for text in [svg, list] {
                prop_assert!(!text.contains("NaN") && !text.contains("inf") && !text.contains("<x>"));
            }
        }
    }
}
