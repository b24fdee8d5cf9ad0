//! A plot as SVG that stands in a page: curves by size, the sizes on a logarithmic axis.

use crate::Figure;
use crate::text::{escaped, number, size};

/// Width and height of the drawing, and the margins that its words need.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 40.0;
/// Most series of one plot; more cannot be told apart.
const MOST_SERIES: usize = 24;
/// Colours that stay apart for who cannot tell red from green (Okabe and Ito).
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
/// How lines differ when the colours have been used.
const DASHES: [&str; 4] = ["", "6 3", "2 3", "8 3 2 3"];

/// What a plot shows: the points of one unit, by series in the order in which they come.
struct Curves<'a> {
    series: Vec<(&'a str, Vec<&'a Figure>)>,
    left_out: usize,
}

impl<'a> Curves<'a> {
    fn of(figures: &'a [Figure], unit: &str) -> Self {
        let mut curves = Self { series: Vec::new(), left_out: 0 };
        let drawn = |f: &&Figure| f.unit == unit && f.rounds > 0 && f.bytes.is_some_and(|bytes| bytes > 0);
        for figure in figures.iter().filter(drawn) {
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

/// Where values lie in the drawing.
struct Axes {
    /// Exponents of two at the left and the right.
    x: (f64, f64),
    /// The value at the top; the bottom is 0.
    top: f64,
}

impl Axes {
    fn of(curves: &Curves<'_>) -> Self {
        let exponents = || curves.points().filter_map(|figure| figure.bytes).map(exponent);
        let (least, most) = (exponents().fold(f64::MAX, f64::min), exponents().fold(0.0, f64::max));
        let highest = curves.points().map(|figure| figure.most.max(figure.value)).fold(0.0, f64::max);
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

/// The plot of all figures of `unit` that have sizes, with its legend; `None` without any.
pub(crate) fn plot(title: &str, figures: &[Figure], unit: &str) -> Option<String> {
    let curves = Curves::of(figures, unit);
    if curves.series.is_empty() {
        return None;
    }
    let axes = Axes::of(&curves);
    let label = escaped(&format!("{title}, {unit} by size"));
    let mut svg = format!(
        "<figure><figcaption>{label}</figcaption><svg role=\"img\" aria-label=\"{label}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\">"
    );
    svg.push_str(&grid(&axes, unit));
    for (index, (name, points)) in curves.series.iter().enumerate() {
        svg.push_str(&curve(&axes, name, points, unit, index));
    }
    svg.push_str("</svg><ul class=\"legend\">");
    for (index, (name, _)) in curves.series.iter().enumerate() {
        let line = format!(
            "<svg viewBox=\"0 0 28 8\"><line x1=\"0\" x2=\"28\" y1=\"4\" y2=\"4\" {}/></svg>",
            style(index)
        );
        svg.push_str(&format!("<li>{line}{}</li>", escaped(name)));
    }
    if curves.left_out > 0 {
        svg.push_str(&format!("<li>{} points of more series are in the table only</li>", curves.left_out));
    }
    svg.push_str("</ul></figure>");
    Some(svg)
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
    let colour = COLOURS.get(index % COLOURS.len()).copied().unwrap_or("#000");
    let dash = DASHES.get(index / COLOURS.len() % DASHES.len()).copied().unwrap_or_default();
    format!("stroke=\"{colour}\" fill=\"none\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"")
}

/// A line through the medians; at each a whisker over its rounds, and the numbers for who points at it.
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

    #[test]
    fn a_curve_goes_from_left_to_right_and_higher_values_lie_higher() {
        let figures = [figure("read", 1 << 20, 20.0), figure("read", 4096, 10.0)];
        let svg = plot("memory", &figures, "GB/s").unwrap();
        assert!(svg.contains("<polyline points=\"70.0,137.0 744.0,14.0\"/>"), "{svg}");
        assert!(svg.contains("read, 1 MiB: 20.0 GB/s (20.0 to 20.0, 1 rounds)"), "{svg}");
        assert!(svg.contains(">64 KiB</text>"), "{svg}");
    }

    #[test]
    fn nothing_to_draw_is_no_plot_and_one_point_is_one() {
        assert_eq!(plot("memory", &[figure("read", 4096, 1.0)], "ns"), None);
        assert_eq!(plot("memory", &[figure("read", 0, 1.0)], "GB/s"), None);
        assert!(plot("memory", &[figure("read", 4096, 1.0)], "GB/s").is_some());
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
            let svg = plot("t", &figures, "GB/s").unwrap();
            prop_assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("<x>"));
        }
    }
}
