//! Parses the output of GDRCopy's own programs: `gdrcopy_sanity`, `gdrcopy_copybw` and `gdrcopy_copylat` (2.4 to 2.6).
//! Pure. It ignores unknown lines; output without a known line counts as empty.

/// Most figures and names that are taken from one program.
const MOST: usize = 512;
/// Longest name that is taken, in bytes.
const NAME: usize = 80;

/// Totals and test names that `gdrcopy_sanity` prints.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sanity {
    /// Number of tests that passed.
    pub passed: u32,
    /// Number of tests that failed.
    pub failed: u32,
    /// Tests that could not be run.
    pub waived: u32,
    /// Names of those that failed.
    pub failures: Vec<String>,
    /// Names of those that were waived.
    pub waivers: Vec<String>,
}

impl Sanity {
    /// Parses its output; `None` when the line with the totals is missing, because the program died before.
    ///
    /// ```text
    /// Total: 36, Passed: 31, Failed: 0, Waived: 5
    ///
    /// List of waived tests:
    ///     basic_with_tokens
    /// ```
    pub fn parse(output: &str) -> Option<Self> {
        let mut lines = output.lines();
        let totals = lines.by_ref().find_map(totals)?;
        let [total, passed, failed, waived] = totals;
        if passed.checked_add(failed)?.checked_add(waived)? != total {
            return None;
        }
        let mut sanity = Self { passed, failed, waived, ..Self::default() };
        let mut list: Option<&mut Vec<String>> = None;
        for line in lines {
            match line.trim() {
                "List of failed tests:" => list = Some(&mut sanity.failures),
                "List of waived tests:" => list = Some(&mut sanity.waivers),
                "" => {}
                name if line.starts_with([' ', '\t']) && is_name(name) => {
                    if let Some(list) = &mut list
                        && list.len() < MOST
                    {
                        list.push(name.to_owned());
                    }
                }
                _ => list = None,
            }
        }
        Some(sanity)
    }
}

fn is_name(text: &str) -> bool {
    text.len() <= NAME && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// `Total: 36, Passed: 31, Failed: 0, Waived: 5`.
fn totals(line: &str) -> Option<[u32; 4]> {
    let mut numbers = [0; 4];
    let mut parts = line.trim().split(", ");
    for (number, name) in numbers.iter_mut().zip(["Total: ", "Passed: ", "Failed: ", "Waived: "]) {
        *number = parts.next()?.strip_prefix(name)?.parse().ok()?;
    }
    parts.next().is_none().then_some(numbers)
}

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyDirection {
    /// From processors to the GPU.
    Write,
    /// From the GPU to processors.
    Read,
}

/// A figure of `gdrcopy_copybw` or `gdrcopy_copylat`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figure {
    /// Direction of the copies that were measured.
    pub way: CopyDirection,
    /// Bytes of one copy.
    pub bytes: u64,
    /// Gigabytes (10⁹) a second of `copybw`, nanoseconds of `copylat`; more than 0.
    pub value: f64,
}

/// Parses the output of `gdrcopy_copybw`. Its MB are 2²⁰ bytes.
///
/// ```text
/// writing test, size=131072 offset=0 num_iters=10000
/// write BW: 17298.4MB/s
/// ```
pub fn bandwidths(output: &str) -> Vec<Figure> {
    let mut figures = Vec::new();
    let mut bytes = None;
    for line in output.lines() {
        if let Some(rest) =
            line.strip_prefix("writing test, size=").or_else(|| line.strip_prefix("reading test, size="))
        {
            bytes = rest.split_whitespace().next().and_then(|size| size.parse().ok());
            continue;
        }
        let way = [("write BW: ", CopyDirection::Write), ("read BW: ", CopyDirection::Read)];
        let found = way.iter().find_map(|(start, way)| Some((*way, line.strip_prefix(start)?)));
        if let Some((way, rest)) = found
            && let Some(bytes) = bytes
            && let Some(megabytes) = positive(rest.trim().strip_suffix("MB/s").unwrap_or_default())
            && figures.len() < MOST
        {
            figures.push(Figure { way, bytes, value: megabytes * f64::from(1 << 20) / 1e9 });
        }
    }
    figures
}

/// Parses the output of `gdrcopy_copylat`: the last two columns are microseconds, average or median first.
///
/// ```text
/// gdr_copy_to_mapping         1          0.0889          0.0885
/// ```
pub fn latencies(output: &str) -> Vec<Figure> {
    let ways =
        [("gdr_copy_to_mapping", CopyDirection::Write), ("gdr_copy_from_mapping", CopyDirection::Read)];
    let figure = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        let (_, way) = ways.iter().find(|(start, _)| *start == name)?;
        let bytes = words.next()?.parse().ok()?;
        Some(Figure { way: *way, bytes, value: positive(words.next()?)? * 1e3 })
    };
    output.lines().filter_map(figure).take(MOST).collect()
}

fn positive(text: &str) -> Option<f64> {
    text.parse().ok().filter(|value: &f64| value.is_finite() && *value > 0.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SANITY: &str = include_str!("../../fixtures/sanity.txt");
    const COPYBW: &str = include_str!("../../fixtures/copybw.txt");
    const COPYLAT: &str = include_str!("../../fixtures/copylat.txt");

    #[test]
    fn a_run_with_waivers_is_read() {
        let sanity = Sanity::parse(SANITY).unwrap();
        assert_eq!((sanity.passed, sanity.failed, sanity.waived), (31, 0, 5));
        assert!(sanity.failures.is_empty());
        assert_eq!(sanity.waivers.len(), 5);
        assert!(sanity.waivers.contains(&"basic_with_tokens".to_owned()), "{:?}", sanity.waivers);
    }

    #[test]
    fn a_run_with_a_failure_names_it() {
        let text = SANITY.replace("Passed: 31, Failed: 0", "Passed: 30, Failed: 1").replace(
            "List of waived",
            "List of failed tests:\n    invalidation_access_after_free_cumemalloc\n\nList of waived",
        );
        let sanity = Sanity::parse(&text).unwrap();
        assert_eq!(sanity.failures, ["invalidation_access_after_free_cumemalloc"]);
        assert_eq!((sanity.failed, sanity.waivers.len()), (1, 5));
    }

    #[test]
    fn totals_that_do_not_add_up_or_are_missing_are_no_result() {
        assert_eq!(Sanity::parse(""), None);
        assert_eq!(Sanity::parse(&SANITY.replace("Passed: 31", "Passed: 32")), None);
        assert_eq!(Sanity::parse("&&&& RUNNING basic_cumemalloc\n"), None);
        assert_eq!(Sanity::parse("Total: 4294967295, Passed: 4294967295, Failed: 1, Waived: 0"), None);
    }

    #[test]
    fn bandwidths_are_read_with_their_size_and_unit() {
        let figures = bandwidths(COPYBW);
        assert_eq!(figures.len(), 2);
        assert_eq!((figures[0].way, figures[0].bytes), (CopyDirection::Write, 131_072));
        assert!((figures[0].value - 12.340_3).abs() < 1e-3, "{}", figures[0].value);
        assert_eq!(figures[1].way, CopyDirection::Read);
        assert!(bandwidths("write BW: 1MB/s\n").is_empty(), "a size has to come before");
        assert!(bandwidths("writing test, size=1 x\nwrite BW: -1MB/s\nwrite BW: nanMB/s\n").is_empty());
    }

    #[test]
    fn latencies_are_read_for_both_ways() {
        let figures = latencies(COPYLAT);
        assert_eq!(figures.len(), 6);
        assert_eq!((figures[0].way, figures[0].bytes), (CopyDirection::Write, 1));
        assert!((figures[0].value - 88.9).abs() < 0.01);
        assert!(figures.iter().any(|figure| figure.way == CopyDirection::Read && figure.bytes == 4));
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_harm(text in "\\PC{0,200}", start in 0usize..400) {
            for sample in [SANITY, COPYBW, COPYLAT] {
                let end = (0..=start.min(sample.len())).rev().find(|end| sample.is_char_boundary(*end)).unwrap();
                let mixed = format!("{}{text}", &sample[..end]);
                let _ = Sanity::parse(&mixed);
                prop_assert!(bandwidths(&mixed).iter().all(|figure| figure.value > 0.0));
                prop_assert!(latencies(&mixed).iter().all(|figure| figure.value > 0.0));
            }
        }
    }
}
