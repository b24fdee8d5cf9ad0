//! A page for a browser: one file, without scripts, fonts or anything else from elsewhere.
//!
//! A parameter called *html* is written as it stands; everything else is text, which is escaped.

use std::fmt::Write;

use crate::show::escape;

const STYLE: &str = include_str!("page.css");

/// A whole page: a head with facts in few words, and `main`, which is html. A description may be empty.
#[must_use]
pub fn page(title: &str, heading: &str, description: &str, facts: &[String], main: &str) -> String {
    let chips: String = facts.iter().map(|fact| format!("<li>{}</li>", escape(fact))).collect();
    let description = match description {
        "" => String::new(),
        text => format!("<p>{}</p>\n", escape(text)),
    };
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <header>\n<h1>{}</h1>\n{description}<ul class=\"chips\">{chips}</ul>\n</header>\n<main>\n{main}</main>\n\
         </body>\n</html>\n",
        escape(title),
        escape(heading),
    )
}

/// Most columns of a table that fits a narrow screen; the rows of a wider one become lists there.
const NARROW: usize = 6;

/// A section with a table; `numeric` columns keep to the right. Each row has a class of the style sheet and its cells.
/// A table without rows is the word "none".
#[must_use]
pub fn table(title: &str, heads: &[&str], numeric: &[usize], rows: &[(String, Vec<String>)]) -> String {
    if rows.is_empty() {
        return format!("<section>\n<h2>{}</h2>\n<p class=\"note\">none</p>\n</section>\n", escape(title));
    }
    let class = |i: &usize| if numeric.contains(i) { " class=\"number\"" } else { "" };
    let is_wide = heads.len() > NARROW;
    let head = |i: &usize| match heads.get(*i) {
        Some(head) if is_wide => format!(" data-head=\"{}\"", escape(head)),
        _ => String::new(),
    };
    let wide = if is_wide { " class=\"wide\"" } else { "" };
    let mut out =
        format!("<section>\n<h2>{}</h2>\n<div class=\"scroll\"><table{wide}>\n<thead><tr>", escape(title));
    for (i, head) in heads.iter().enumerate() {
        let _ = write!(out, "<th scope=\"col\"{}>{}</th>", class(&i), escape(head));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (tone, cells) in rows {
        let _ = write!(out, "<tr class=\"{tone}\">");
        for (i, cell) in cells.iter().enumerate() {
            let _ = write!(out, "<td{}{}>{}</td>", class(&i), head(&i), escape(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
    out
}

/// Legend of a drawing's colours: class of the style sheet and word.
#[must_use]
pub fn legend(colours: &[(&str, &str)]) -> String {
    let items: String =
        colours.iter().map(|(class, word)| format!("<li class=\"{class}\">{}</li>", escape(word))).collect();
    format!("<ul class=\"legend\" aria-label=\"Colours\">{items}</ul>")
}

/// Height in pixels of the largest bar.
const HEIGHT: u64 = 280;

/// A bar, drawn beside others to one scale.
#[derive(Debug, Clone)]
pub struct ScaledBar {
    /// Its caption, which drawing escapes.
    pub title: String,
    /// Its pieces, from the bottom up.
    pub pieces: Vec<ScaledPiece>,
}

/// A piece of a bar.
#[derive(Debug, Clone)]
pub struct ScaledPiece {
    /// Class of the style sheet.
    pub class: &'static str,
    /// Bytes that its height is proportional to.
    pub bytes: u64,
    /// Text beside the bar.
    pub label: String,
    /// Text for a pointer that rests on it; may be empty.
    pub hint: String,
}

impl ScaledBar {
    /// Bytes of all pieces together, at most `u64::MAX`.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.bytes))
    }

    /// The bar as a figure; `most` bytes have [`HEIGHT`].
    fn draw(&self, most: u64, out: &mut String) {
        let title = escape(&self.title);
        let _ = write!(
            out,
            "<figure>\n<figcaption>{title}</figcaption>\n<div class=\"bar\" aria-hidden=\"true\">"
        );
        for piece in self.pieces.iter().rev() {
            let (class, height) = (piece.class, height(piece.bytes, most));
            let hint = if piece.hint.is_empty() {
                String::new()
            } else {
                format!(" title=\"{}\"", escape(&piece.hint))
            };
            let _ = write!(out, "<i class=\"{class}\" style=\"height: {height}px\"{hint}></i>");
        }
        out.push_str("</div>\n<ul>");
        for piece in self.pieces.iter().rev() {
            let _ = write!(out, "<li class=\"{}\">{}</li>", piece.class, escape(&piece.label));
        }
        out.push_str("</ul>\n</figure>\n");
    }
}

/// Pixels of `bytes`, at least one.
fn height(bytes: u64, most: u64) -> u64 {
    let pixels = u128::from(bytes) * u128::from(HEIGHT) / u128::from(most);
    u64::try_from(pixels).unwrap_or(HEIGHT).max(1)
}

/// A section with `bars` side by side, drawn to one scale, and the names of their pieces.
#[must_use]
pub fn bars(title: &str, bars: &[ScaledBar]) -> String {
    let most = bars.iter().map(ScaledBar::bytes).max().unwrap_or(0).max(1);
    let mut out = format!("<section>\n<h2>{}</h2>\n<div class=\"bars\">\n", escape(title));
    bars.iter().for_each(|bar| bar.draw(most, &mut out));
    out.push_str("</div>\n<p class=\"note\">Drawn to one scale.</p>\n</section>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_name_holds_it_stays_text() {
        let evil = || "</title><script>\"'&".to_owned();
        let bar = ScaledBar {
            title: evil(),
            pieces: vec![ScaledPiece { class: "ram", bytes: 1, label: evil(), hint: evil() }],
        };
        let rows = [(String::new(), vec![evil()])];
        let heads = [evil(), evil(), evil(), evil(), evil(), evil(), evil()];
        let heads: Vec<&str> = heads.iter().map(String::as_str).collect();
        let main =
            bars(&evil(), &[bar]) + &table(&evil(), &heads, &[0], &rows) + &legend(&[("ram", &evil())]);
        let page = page(&evil(), &evil(), &evil(), &[evil()], &main);
        assert!(!page.contains("<script") && !page.contains("\"'&"), "{page}");
        assert_eq!(page.matches("&lt;script&gt;").count(), 19);
    }

    #[test]
    fn bars_have_one_scale_and_no_piece_is_lost() {
        let bar = |bytes: &[u64]| {
            let piece =
                |&bytes| ScaledPiece { class: "egm", bytes, label: String::new(), hint: String::new() };
            ScaledBar { title: String::new(), pieces: bytes.iter().map(piece).collect() }
        };
        let html = bars("", &[bar(&[3 << 40, 1 << 40]), bar(&[2 << 40, 4096]), bar(&[])]);
        let heights = |figure: &str| -> Vec<u64> {
            let styles = figure.split("height: ").skip(1);
            styles.map(|rest| rest.split("px").next().unwrap().parse().unwrap()).collect()
        };
        let figures: Vec<_> = html.split("<figure>").skip(1).map(heights).collect();
        // The last piece is on top.
        assert_eq!(figures, [vec![HEIGHT / 4, HEIGHT / 4 * 3], vec![1, HEIGHT / 2], vec![]]);
        assert!(bars("", &[bar(&[u64::MAX, u64::MAX])]).contains("height: 280px"));
    }

    #[test]
    fn a_wide_table_names_its_cells_for_narrow_screens() {
        let row = |columns: usize| [(String::new(), vec!["1".to_owned(); columns])];
        let heads = ["a", "b", "c", "d", "e", "f", "g"];
        let wide = table("", &heads, &[], &row(7));
        assert!(
            wide.contains("<table class=\"wide\">") && wide.contains("<td data-head=\"g\">1</td>"),
            "{wide}"
        );
        assert!(!table("", &heads[..6], &[], &row(6)).contains("data-head"));
    }

    #[test]
    fn a_table_without_rows_is_the_word_none() {
        let html = table("Regions", &["region", "size"], &[1], &[]);
        assert!(html.contains("<h2>Regions</h2>") && html.contains(">none<"), "{html}");
        assert!(!html.contains("<table"), "{html}");
    }
}
