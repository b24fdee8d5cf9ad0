//! Words of the kernel's command line that decide which memory it uses.
//!
//! `Documentation/admin-guide/kernel-parameters.txt`: `mem=nn[KMG]`, and on x86 `memmap=nn[KMG]$ss[KMG]` (reserved)
//! and `memmap=nn[KMG]!ss[KMG]` (persistent memory), several to a word with commas.

use egm_address::{Host, Hpa, Span};

/// Effect of such a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// `mem=`: nothing from this address (x86), or no more than so many bytes (Arm).
    Limit(u64),
    /// `memmap=nn$ss`: marks nn bytes from ss on as reserved.
    Reserve(Span<Host>),
    /// `memmap=nn!ss`: for the persistent memory driver.
    Persistent(Span<Host>),
}

/// A word and its effects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    /// The word as it was written.
    pub text: String,
    /// Effects in the kernel; several for a list, none for text that it does not understand.
    pub effects: Vec<Effect>,
}

/// The words of `line` that decide which memory the kernel uses: `mem=`, `memmap=`, and those of hugetlb.
#[must_use]
pub fn parse(line: &str) -> Vec<Word> {
    let word = |text: &str| {
        let (key, value) = text.split_once('=')?;
        let effects = match key {
            "mem" => size(value).filter(|(_, rest)| rest.is_empty()).map(|(n, _)| Effect::Limit(n)),
            "memmap" => None,
            "hugepages" | "hugepagesz" | "default_hugepagesz" => None,
            _ => return None,
        };
        let spans = value.split(',').filter_map(|part| if key == "memmap" { map(part) } else { None });
        Some(Word { text: text.to_owned(), effects: effects.into_iter().chain(spans).collect() })
    };
    line.split_whitespace().filter_map(word).collect()
}

fn map(part: &str) -> Option<Effect> {
    let (bytes, rest) = size(part)?;
    let mut chars = rest.chars();
    let sign = chars.next()?;
    let (start, rest) = size(chars.as_str())?;
    let span = Span::new(Hpa::new(start), bytes).ok().filter(|_| rest.is_empty())?;
    match sign {
        '$' => Some(Effect::Reserve(span)),
        '!' => Some(Effect::Persistent(span)),
        _ => None,
    }
}

/// The kernel's `memparse`: a number in C's notation and a power of 1024, and the rest of the text.
fn size(text: &str) -> Option<(u64, &str)> {
    let (radix, digits) = match text.get(..2) {
        Some("0x" | "0X") => (16, text.get(2..)?),
        _ if text.len() > 1 && text.starts_with('0') && text.as_bytes().get(1)?.is_ascii_digit() => (8, text),
        _ => (10, text),
    };
    let end = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
    let (digits, rest) = digits.split_at(end);
    let number = u64::from_str_radix(digits, radix).ok()?;
    let shift = match rest.chars().next().map(|c| c.to_ascii_uppercase()) {
        Some('K') => 10,
        Some('M') => 20,
        Some('G') => 30,
        Some('T') => 40,
        Some('P') => 50,
        Some('E') => 60,
        _ => return Some((number, rest)),
    };
    Some((number.checked_mul(1 << shift)?, rest.get(1..)?))
}

/// Whether a word of `line` keeps all of `span` from the kernel's allocator. `ram_below` are the bytes of System RAM
/// that lie below the span: on Arm `mem=` counts bytes, and keeps the lowest ones.
#[must_use]
pub(crate) fn explain(line: &str, span: Span<Host>, ram_below: u64) -> bool {
    parse(line).iter().flat_map(|word| &word.effects).any(|effect| match *effect {
        Effect::Limit(limit) => span.start().get() >= limit && ram_below <= limit,
        Effect::Reserve(aside) | Effect::Persistent(aside) => aside.covers(span),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(start: u64, size: u64) -> Span<Host> {
        Span::new(Hpa::new(start), size).unwrap()
    }

    #[test]
    fn words_are_read_as_the_kernel_reads_them() {
        let words = parse("quiet mem=4096M memmap=2G$0x100000000,1G!10G memory=1 memmap=64K#1M hugepages=4");
        let effects: Vec<_> = words.iter().flat_map(|w| w.effects.clone()).collect();
        assert_eq!(
            effects,
            [
                Effect::Limit(4 << 30),
                Effect::Reserve(span(4 << 30, 2 << 30)),
                Effect::Persistent(span(10 << 30, 1 << 30)),
            ]
        );
        assert_eq!(words.len(), 4);
    }

    #[test]
    fn a_span_needs_a_word_that_covers_all_of_it() {
        assert!(explain("memmap=2G$4G", span(4 << 30, 2 << 30), 0));
        assert!(!explain("memmap=2G$4G", span(4 << 30, (2 << 30) + 1), 0));
        assert!(explain("mem=4G", span(5 << 30, 1 << 30), 4 << 30));
        assert!(!explain("mem=4G", span(3 << 30, 1 << 30), 3 << 30));
        assert!(!explain("quiet memmap=2G", span(4 << 30, 1 << 30), 0));
    }

    proptest! {
        #[test]
        fn any_command_line_is_read(line in "(mem|memmap)=[0-9xKMG$!#,]{0,30}") {
            let _ = parse(&line);
        }
    }
}
