//! A page for a browser: one file, without scripts, fonts or anything else from elsewhere.
//!
//! A parameter called *html* is written as it stands; everything else is text, which is escaped.

use std::fmt::Write;

use crate::show::{escape, size};

const STYLE: &str = include_str!("page.css");

/// A whole page: a head with facts in few words, and `main`, which is html.
#[must_use]
pub fn page(title: &str, heading: &str, description: &str, facts: &[String], main: &str) -> String {
    let chips: String = facts.iter().map(|fact| format!("<li>{}</li>", escape(fact))).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n\
         <header>\n<h1>{}</h1>\n<p>{}</p>\n<ul class=\"chips\">{chips}</ul>\n</header>\n<main>\n{main}</main>\n\
         </body>\n</html>\n",
        escape(title),
        escape(heading),
        escape(description),
    )
}

/// A section with a table; `numeric` columns keep to the right. Each row has a class of the style sheet and its cells.
#[must_use]
pub fn table(title: &str, heads: &[&str], numeric: &[usize], rows: &[(String, Vec<String>)]) -> String {
    let class = |i: &usize| if numeric.contains(i) { " class=\"number\"" } else { "" };
    let mut out =
        format!("<section>\n<h2>{}</h2>\n<div class=\"scroll\"><table>\n<thead><tr>", escape(title));
    for (i, head) in heads.iter().enumerate() {
        let _ = write!(out, "<th scope=\"col\"{}>{}</th>", class(&i), escape(head));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (tone, cells) in rows {
        let _ = write!(out, "<tr class=\"{tone}\">");
        for (i, cell) in cells.iter().enumerate() {
            let _ = write!(out, "<td{}>{}</td>", class(&i), escape(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
    out
}

/// Legend of a map's colours: class of the style sheet and word.
#[must_use]
pub fn legend(colours: &[(&str, &str)]) -> String {
    let items: String =
        colours.iter().map(|(class, word)| format!("<li class=\"{class}\">{}</li>", escape(word))).collect();
    format!("<ul class=\"legend\" aria-label=\"Colours\">{items}</ul>")
}

/// A range of a map.
#[derive(Debug, Clone)]
pub struct Band {
    /// Class of the style sheet; `free` is a thin broken band.
    pub class: &'static str,
    /// Its first address, as shown beside it.
    pub start: String,
    /// Bytes.
    pub size: u64,
    /// Its name.
    pub what: String,
    /// Details, to its right.
    pub detail: String,
    /// Text for a pointer that rests on it.
    pub hint: String,
}

const WIDTH: u32 = 640;
/// Left edge of the bands, after the addresses.
const BAND_X: u32 = 150;
const BAND_WIDTH: u32 = 250;
const TOP: u32 = 14;
/// A band holds at least one line of text.
const LEAST: u32 = 26;
const GAP: u32 = 22;

impl Band {
    fn is_free(&self) -> bool {
        self.class == "free"
    }

    /// `LEAST` up to 4 KiB and 3 more for each doubling.
    fn height(&self) -> u32 {
        if self.is_free() {
            return GAP;
        }
        self.size.max(4096).ilog2().saturating_sub(12).saturating_mul(3).saturating_add(LEAST)
    }
}

/// A map as an SVG element that takes its colours from the page. `id` is an identifier, unique in the page; `end` is
/// the end of the last band, as shown.
///
/// Sizes run from 4 KiB to many TiB, so height grows with their logarithm: everything can be read, larger is taller,
/// and the numbers beside it show the sizes.
#[must_use]
pub fn map(id: &str, title: &str, bands: &[Band], end: &str) -> String {
    let total: u32 = bands.iter().map(Band::height).sum::<u32>().saturating_add(TOP * 2);
    let mut out = format!(
        "<svg class=\"map\" viewBox=\"0 0 {WIDTH} {total}\" width=\"{WIDTH}\" height=\"{total}\" role=\"img\" \
         aria-labelledby=\"{id}\">\n<title id=\"{id}\">{}</title>\n",
        escape(title)
    );
    let mut y = TOP;
    for band in bands {
        draw(band, y, &mut out);
        y = y.saturating_add(band.height());
    }
    let (x, base) = (BAND_X - 12, y.saturating_add(4));
    let _ = writeln!(out, "<text class=\"address\" x=\"{x}\" y=\"{base}\">{}</text>\n</svg>", escape(end));
    out
}

fn draw(band: &Band, y: u32, out: &mut String) {
    let high = band.height();
    let middle = y.saturating_add(high / 2).saturating_add(4);
    let inset = if band.is_free() { 0 } else { 1 };
    let _ = writeln!(
        out,
        "<g class=\"{}\"><title>{}</title>\n\
         <text class=\"address\" x=\"{}\" y=\"{}\">{}</text>\n\
         <line class=\"tick\" x1=\"{}\" x2=\"{BAND_X}\" y1=\"{y}\" y2=\"{y}\"/>\n\
         <rect x=\"{BAND_X}\" y=\"{}\" width=\"{BAND_WIDTH}\" height=\"{}\" rx=\"{}\"/>",
        band.class,
        escape(&band.hint),
        BAND_X - 12,
        y.saturating_add(4),
        escape(&band.start),
        BAND_X - 7,
        y.saturating_add(inset),
        high.saturating_sub(2 * inset),
        3 * inset,
    );
    let (size, what) = (size(band.size), escape(&band.what));
    if band.is_free() {
        let centre = BAND_X + BAND_WIDTH / 2;
        let _ = writeln!(out, "<text class=\"gap\" x=\"{centre}\" y=\"{middle}\">{size} {what}</text></g>");
        return;
    }
    let _ = writeln!(
        out,
        "<text class=\"what\" x=\"{}\" y=\"{middle}\">{what}</text>\n\
         <text class=\"size\" x=\"{}\" y=\"{middle}\">{size}</text>\n\
         <text class=\"detail\" x=\"{}\" y=\"{middle}\">{}</text></g>",
        BAND_X + 12,
        BAND_X + BAND_WIDTH - 12,
        BAND_X + BAND_WIDTH + 12,
        escape(&band.detail),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_name_holds_it_stays_text() {
        let evil = || "</title><script>\"'&".to_owned();
        let band = Band { class: "ram", start: evil(), size: 1, what: evil(), detail: evil(), hint: evil() };
        let free = Band { class: "free", ..band.clone() };
        let rows = [(String::new(), vec![evil()])];
        let main = map("m", &evil(), &[band, free], &evil())
            + &table(&evil(), &[&evil()], &[0], &rows)
            + &legend(&[("ram", &evil())]);
        let page = page(&evil(), &evil(), &evil(), &[evil()], &main);
        assert!(!page.contains("<script") && !page.contains("\"'&"), "{page}");
        assert_eq!(page.matches("&lt;script&gt;").count(), 17);
    }
}
