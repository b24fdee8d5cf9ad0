//! The verdict of one validation: the form in which its process reports it to the parent, and in which a run keeps it.

use serde::{Deserialize, Serialize};

use crate::findings::figure::{largest, units};
use crate::findings::text::number;
use crate::findings::{Figure, Outcome, visible};

/// Longest document of one validation, in bytes.
pub const MAX_VERDICT: usize = 4 << 20;
/// Most figures that one validation has.
pub const MAX_FIGURES: usize = 4096;
/// Longest text of a verdict, in characters.
const MAX_TEXT: usize = 4096;

/// The result of one validation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Verdict {
    /// Name of the validation, such as `memory.pattern`.
    pub name: String,
    pub claim: String,
    pub outcome: Outcome,
    /// Reason why it is not passed, or the observation.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Its most important figure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Unit of `value`, such as `GB/s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<Figure>,
    pub seed: u64,
    /// Milliseconds that it took.
    #[serde(default)]
    pub millis: u64,
}

impl Verdict {
    /// Reads the document of one validation.
    ///
    /// # Errors
    /// It is longer than [`MAX_VERDICT`], is no verdict, or has more figures or longer texts than a verdict may have.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        if text.len() > MAX_VERDICT {
            return Err(format!("a verdict of {} bytes, {MAX_VERDICT} at most", text.len()));
        }
        let verdict: Self = serde_json::from_slice(text).map_err(|error| format!("no verdict: {error}"))?;
        verdict.check().map(|()| verdict)
    }

    /// Checks the bounds of a verdict.
    ///
    /// # Errors
    /// The bound that it exceeds.
    pub fn check(&self) -> Result<(), String> {
        if self.figures.len() > MAX_FIGURES {
            return Err(format!("a verdict with {} figures, {MAX_FIGURES} at most", self.figures.len()));
        }
        let own = [&self.name, &self.claim, &self.reason].into_iter().chain(&self.unit);
        let texts = own.chain(self.figures.iter().flat_map(|figure| [&figure.series, &figure.unit]));
        let longest = texts.map(|text| text.chars().count()).max().unwrap_or(0);
        if longest > MAX_TEXT {
            return Err(format!("a verdict with a text of {longest} characters, {MAX_TEXT} at most"));
        }
        Ok(())
    }

    /// Its most important figure, with the unit. Without one: the range of its figures, each series at its largest size.
    /// Empty without figures, and where figures have several units.
    pub fn value_text(&self) -> String {
        if let Some(value) = self.value {
            let unit = self.unit.as_deref().unwrap_or_default();
            return visible(format!("{} {unit}", number(value)).trim_end());
        }
        let units = units(self.figures.iter());
        let [unit] = units.as_slice() else { return String::new() };
        let values = || largest(&self.figures, unit).into_iter().map(|figure| figure.value);
        let (low, high) = (values().fold(f64::MAX, f64::min), values().fold(f64::MIN, f64::max));
        let (low, high) = (number(low), number(high));
        visible(&if low == high { format!("{low} {unit}") } else { format!("{low}-{high} {unit}") })
    }

    /// Its document; long texts are cut, and excess figures are omitted.
    pub fn to_json(&self) -> String {
        let mut bounded = self.clone();
        for text in [&mut bounded.name, &mut bounded.claim, &mut bounded.reason] {
            cut(text);
        }
        bounded.figures.truncate(MAX_FIGURES);
        for figure in &mut bounded.figures {
            cut(&mut figure.series);
            cut(&mut figure.unit);
        }
        serde_json::to_string(&bounded).unwrap_or_default()
    }
}

/// Keeps the first characters of a long text.
fn cut(text: &mut String) {
    if let Some((end, _)) = text.char_indices().nth(MAX_TEXT) {
        text.truncate(end);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn verdict() -> Verdict {
        Verdict {
            name: "memory.pattern".into(),
            claim: "memory keeps what is written".into(),
            outcome: Outcome::Passed,
            reason: "2 nodes".into(),
            value: Some(1.5),
            unit: Some("GB/s".into()),
            figures: vec![Figure::of("read", Some(4096), "GB/s", &mut [1.0, 2.0])],
            seed: u64::MAX,
            millis: 3,
        }
    }

    #[test]
    fn a_verdict_is_read_back_as_it_was_written() {
        assert_eq!(Verdict::parse(verdict().to_json().as_bytes()), Ok(verdict()));
    }

    #[test]
    fn what_is_too_long_is_cut_when_written_and_refused_when_read() {
        let mut long = verdict();
        long.reason = "ü".repeat(MAX_TEXT + 1);
        long.figures = vec![long.figures[0].clone(); MAX_FIGURES + 1];
        let read = Verdict::parse(long.to_json().as_bytes()).unwrap();
        assert_eq!((read.reason.chars().count(), read.figures.len()), (MAX_TEXT, MAX_FIGURES));
        let raw = serde_json::to_vec(&long).unwrap();
        assert!(Verdict::parse(&raw).unwrap_err().contains("figures"));
        long.figures.clear();
        assert!(Verdict::parse(&serde_json::to_vec(&long).unwrap()).unwrap_err().contains("characters"));
        assert!(Verdict::parse(&vec![b' '; MAX_VERDICT + 1]).unwrap_err().contains("bytes"));
    }

    #[test]
    fn the_value_column_has_the_value_or_the_range_of_the_largest_sizes() {
        let mut verdict = verdict();
        assert_eq!(verdict.value_text(), "1.50 GB/s");
        verdict.value = None;
        assert_eq!(verdict.value_text(), "1.50 GB/s");
        verdict.figures.push(Figure::of("write", Some(4096), "GB/s", &mut [9.0]));
        verdict.figures.push(Figure::of("write", Some(8192), "GB/s", &mut [31.0]));
        assert_eq!(verdict.value_text(), "1.50-31.0 GB/s");
        verdict.figures.push(Figure::of("step", None, "ns", &mut [1.0]));
        assert_eq!(verdict.value_text(), "", "two units");
        verdict.figures.clear();
        assert_eq!(verdict.value_text(), "");
    }

    proptest! {
        #[test]
        fn any_text_is_a_verdict_or_an_error(text in "\\PC{0,80}") {
            let _ = Verdict::parse(text.as_bytes());
        }
    }
}
