//! Output for people: columns that line up and fit the terminal, colour, sizes, text in a page.

mod out;
pub mod page;
mod screen;
mod table;
mod wrap;

pub use out::{Unwritten, print, printable_lines, written};
#[cfg(feature = "program")]
pub(crate) use screen::exported_columns;
pub use screen::{COLUMNS, Screen, Style};
pub use table::{Side, Table};
pub use wrap::{hanging, wrap};

use egm_address::ByteSize;

/// A number of bytes for a person: exact with at most three decimals (`2.25 GiB`, `511.625 MiB`), or rounded to two
/// where that would need a long number (`~256.09 GiB`).
#[must_use]
pub fn size(bytes: u64) -> String {
    let units = [("TiB", 40u32), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let large = units.iter().filter(|(_, shift)| bytes >> shift > 0);
    let Some((unit, shift)) = large.clone().next() else { return format!("{bytes} B") };
    for (unit, shift) in large {
        let thousandths = (u128::from(bytes) * 1000) >> shift;
        let short = thousandths < if thousandths.is_multiple_of(1000) { 100_000_000 } else { 10_000_000 };
        if short && u128::from(bytes) * 1000 == thousandths << shift {
            let (whole, rest) = (thousandths / 1000, format!(".{:03}", thousandths % 1000));
            return format!("{whole}{} {unit}", rest.trim_end_matches('0').trim_end_matches('.'));
        }
    }
    let hundredths = (u128::from(bytes) * 100 + (1 << shift) / 2) >> shift;
    format!("~{}.{:02} {unit}", hundredths / 100, hundredths % 100)
}

/// Text as HTML shows it, printable but for its newlines; names, paths and descriptions come from files of any origin.
#[must_use]
pub fn escape(text: &str) -> String {
    markup(&printable_lines(text))
}

/// `text` as content or as a quoted attribute of HTML and XML, with every other character as it is.
#[must_use]
pub fn markup(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A number of things; the plural of `noun` ends in an s.
///
/// ```
/// use egm_report::show::counted;
/// assert_eq!([0, 1, 2].map(|slices| counted(slices, "slice")), ["0 slices", "1 slice", "2 slices"]);
/// ```
#[must_use]
pub fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Exactly this many bytes, in a command line's notation: `64MiB`, and `4097B` where no unit divides them.
#[must_use]
pub fn exact(bytes: u64) -> String {
    let text = ByteSize::new(bytes).to_string();
    if text.ends_with('B') { text } else { text + "B" }
}

/// Names that [`first_of`] lists at most.
const MAX_NAMES: usize = 4;

/// `a, b, c, d and 2 more`: an error is one line, however many are in the way.
#[must_use]
pub fn first_of(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(MAX_NAMES);
    let named = names.take(MAX_NAMES).collect::<Vec<_>>().join(", ");
    if more == 0 { named } else { format!("{named} and {more} more") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_names_the_first_are_listed() {
        let names = |n: u32| first_of((0..n).map(|n| n.to_string()).collect::<Vec<_>>().into_iter());
        assert_eq!([names(1), names(4), names(6)], ["0", "0, 1, 2, 3", "0, 1, 2, 3 and 2 more"]);
    }

    #[test]
    fn a_size_in_a_remedy_is_the_same_size_when_it_is_read() {
        for (bytes, text) in
            [(0, "0B"), (4097, "4097B"), (64 << 20, "64MiB"), (u64::MAX, "18446744073709551615B")]
        {
            assert_eq!(exact(bytes), text);
            assert_eq!(text.parse(), Ok(ByteSize::new(bytes)));
        }
    }

    #[test]
    fn sizes_are_exact_and_short() {
        let shown = [
            0,
            1000,
            4096,
            0xa0000,
            0x1ffa_0000,
            2304 << 20,
            2044 << 10,
            262_240 << 20,
            245_761 << 18,
            255 << 40,
        ]
        .map(size);
        assert_eq!(
            shown,
            [
                "0 B",
                "1000 B",
                "4 KiB",
                "640 KiB",
                "511.625 MiB",
                "2.25 GiB",
                "2044 KiB",
                "~256.09 GiB",
                "~60.00 GiB",
                "255 TiB"
            ]
        );
    }
}
