//! A run of `egm-guest validate`: the machine, the time, the seed, and the verdict of each validation.

use std::collections::BTreeMap;

use egm_report::json::{self, JsonError};
use serde::{Deserialize, Serialize};

use crate::findings::{Outcome, Verdict};

/// Version of the document that is written.
pub const RUN_VERSION: u32 = 2;
/// Oldest version that is read; in version 1 the outcome `skipped` has the name `waived`.
const OLDEST_VERSION: u32 = 1;
/// Longest document of a run that is read, in bytes.
pub const MAX_RUN: usize = 64 << 20;
/// Most verdicts of a run.
const MAX_VERDICTS: usize = 1024;
/// Longest text about the machine, or argument, in characters.
const MAX_TEXT: usize = 4096;
/// Most arguments of a run, of all validations together.
const MAX_ARGS: usize = 1024;
/// Most nodes or GPUs of a machine.
const MAX_PARTS: usize = 4096;

/// A run of validations on one machine: the document of `egm-guest validate --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Version of the document, [`RUN_VERSION`].
    #[serde(rename = "egm-run")]
    pub version: u32,
    /// Time of its start, UTC: `2026-11-22T13:00:00Z`.
    pub date: String,
    /// Program that ran it: name, version, kind of linking.
    pub program: String,
    /// The seed from which those of the validations are derived.
    pub seed: u64,
    /// The largest size, in bytes.
    pub most: u64,
    /// Arguments of validations, `KEY=VALUE`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// The machine that it ran on.
    pub machine: Machine,
    /// Verdict of each validation, in the order in which they ran.
    pub verdicts: Vec<Verdict>,
}

/// The machine of a run, as far as it reports itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Machine {
    /// Name, release and version of the kernel.
    pub kernel: String,
    /// The processor's architecture, as the kernel calls it.
    pub architecture: String,
    /// Evidence that this is a virtual machine; `None` without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hypervisor: Option<String>,
    /// Vendor and product by SMBIOS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub product: Option<String>,
    pub cpu: String,
    /// Processors that are online.
    pub cpus: u32,
    /// Memory in bytes: `MemTotal` of `/proc/meminfo`.
    pub memory: u64,
    /// NUMA nodes that are online.
    #[serde(default)]
    pub nodes: Vec<Node>,
    /// Display and 3D controllers.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
}

/// A NUMA node, with or without memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// The kernel's number: N of `/sys/devices/system/node/nodeN`.
    pub number: u32,
    /// Its processors, as the kernel's list: `0-3`; empty if it has none.
    pub cpus: String,
    /// Its memory in bytes.
    pub memory: u64,
    /// Whether it is Extended GPU Memory, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egm: Option<bool>,
}

/// A display or 3D controller.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// PCI address, as sysfs names it: `0000:01:00.0`.
    pub address: String,
    /// PCI vendor and device: `10de:2335`.
    pub id: String,
    /// Its driver's name for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Why a document is no run that this program reads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// It is not JSON, or of something else.
    #[error("no run: {}, in line {}, column {}", .0.reason, .0.line, .0.column)]
    Json(Box<JsonError>),
    /// It is too long, of another version, or has more parts or longer texts than a run has.
    #[error("{0}")]
    Refused(String),
}

/// Number of validations by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Totals {
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
    /// Validations that ended with an error.
    pub errors: usize,
}

impl Totals {
    /// Whether no validation failed or ended with an error.
    pub const fn is_good(self) -> bool {
        self.failed == 0 && self.errors == 0
    }
}

impl Run {
    /// Reads the document of a run.
    ///
    /// # Errors
    /// [`RunError`]: it is no run, or longer than [`MAX_RUN`], say.
    pub fn parse(text: &[u8]) -> Result<Self, RunError> {
        #[derive(Deserialize)]
        struct Version {
            #[serde(rename = "egm-run")]
            version: u32,
        }
        if text.len() > MAX_RUN {
            return Err(RunError::Refused(format!("a run of {} bytes, {MAX_RUN} at most", text.len())));
        }
        let Version { version } = json::from_slice(text).map_err(RunError::Json)?;
        if !(OLDEST_VERSION..=RUN_VERSION).contains(&version) {
            return Err(RunError::Refused(format!(
                "a run of version {version}; this program reads versions {OLDEST_VERSION} to {RUN_VERSION}"
            )));
        }
        let run: Self = json::from_slice(text).map_err(RunError::Json)?;
        run.check().map_err(RunError::Refused)?;
        Ok(Self { version: RUN_VERSION, ..run })
    }

    /// Its document in one line, for a console.
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    fn check(&self) -> Result<(), String> {
        if self.verdicts.len() > MAX_VERDICTS {
            return Err(format!("a run of {} validations, {MAX_VERDICTS} at most", self.verdicts.len()));
        }
        if self.args.len() > MAX_ARGS {
            return Err(format!("a run with {} arguments, {MAX_ARGS} at most", self.args.len()));
        }
        let parts = self.machine.nodes.len().max(self.machine.gpus.len());
        if parts > MAX_PARTS {
            return Err(format!("a machine of {parts} nodes or GPUs, {MAX_PARTS} at most"));
        }
        let machine = &self.machine;
        let own = [&self.date, &self.program, &machine.kernel, &machine.architecture, &machine.cpu];
        let given = [&machine.hypervisor, &machine.product, &machine.driver].into_iter().flatten();
        let gpus = machine.gpus.iter().flat_map(|gpu| [&gpu.address, &gpu.id].into_iter().chain(&gpu.name));
        let texts = own
            .into_iter()
            .chain(&self.args)
            .chain(given)
            .chain(gpus)
            .chain(machine.nodes.iter().map(|node| &node.cpus));
        let longest = texts.map(|text| text.chars().count()).max().unwrap_or(0);
        if longest > MAX_TEXT {
            return Err(format!(
                "a machine or an argument with a text of {longest} characters, {MAX_TEXT} at most"
            ));
        }
        self.verdicts.iter().try_for_each(Verdict::check)
    }

    /// Its document, with a line break at the end.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Its document with one verdict a line.
    pub fn to_json_lines(&self) -> String {
        let bare = Self { verdicts: Vec::new(), ..self.clone() };
        let head = serde_json::to_string(&bare).unwrap_or_default();
        let verdict = |verdict| serde_json::to_string(verdict).unwrap_or_default();
        let verdicts: Vec<String> = self.verdicts.iter().map(verdict).collect();
        format!("{}[\n{}\n]}}\n", head.trim_end_matches("[]}"), verdicts.join(",\n"))
    }

    /// The run with the largest size of each series only, figures of four digits, no claims, and no reasons that repeat figures:
    /// small enough to publish.
    #[must_use]
    pub fn brief(mut self) -> Self {
        for verdict in &mut self.verdicts {
            let mut largest: BTreeMap<(String, String), Option<u64>> = BTreeMap::new();
            for figure in &verdict.figures {
                let most = largest.entry((figure.series.clone(), figure.unit.clone())).or_default();
                *most = figure.bytes.max(*most);
            }
            verdict.figures.retain(|figure| {
                largest.get(&(figure.series.clone(), figure.unit.clone())) == Some(&figure.bytes)
            });
            for figure in &mut verdict.figures {
                [figure.value, figure.least, figure.most] =
                    [figure.value, figure.least, figure.most].map(four_digits);
            }
            verdict.value = verdict.value.map(four_digits);
            verdict.claim.clear();
            if verdict.outcome == Outcome::Passed && !verdict.figures.is_empty() {
                verdict.reason.clear();
            }
        }
        self
    }

    /// Number of validations by outcome.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for verdict in &self.verdicts {
            match verdict.outcome {
                Outcome::Passed => totals.passed += 1,
                Outcome::Failed => totals.failed += 1,
                Outcome::Skipped => totals.skipped += 1,
                Outcome::Error => totals.errors += 1,
            }
        }
        totals
    }
}

/// The number with four significant digits.
fn four_digits(number: f64) -> f64 {
    format!("{number:.3e}").parse().unwrap_or(number)
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { passed, failed, skipped, errors } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped, {errors} errors")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::findings::Figure;

    /// A run with one verdict of each outcome and figures in the first.
    pub(crate) fn run() -> Run {
        let verdict = |name: &str, outcome| Verdict {
            name: name.into(),
            claim: format!("claim of {name}"),
            outcome,
            reason: format!("reason of {name}"),
            value: None,
            unit: None,
            figures: Vec::new(),
            seed: 7,
            millis: 1500,
        };
        let mut passed = verdict("memory.bandwidth", Outcome::Passed);
        for (bytes, speed) in [(4096u64, 10.0), (65536, 20.0), (1 << 20, 15.0)] {
            for (series, factor) in [("read, node 0", 1.0), ("write, node 0", 0.5)] {
                let mut rounds = [speed * factor, speed * factor * 1.1, speed * factor * 0.9];
                passed.figures.push(Figure::of(series, Some(bytes), "GB/s", &mut rounds));
            }
        }
        passed.figures.push(Figure::of("chase, node 0", Some(4096), "ns", &mut [1.5]));
        passed.figures.push(Figure::of("huge pages", None, "of all", &mut [0.5]));
        Run {
            version: RUN_VERSION,
            date: "2026-11-22T13:00:00Z".into(),
            program: "egm-guest 0.1.0".into(),
            seed: 42,
            most: 1 << 20,
            args: Vec::new(),
            machine: Machine {
                kernel: "Linux 6.12".into(),
                architecture: "x86_64".into(),
                cpu: "Some CPU".into(),
                cpus: 2,
                memory: 8 << 30,
                nodes: vec![Node { number: 0, cpus: "0-1".into(), memory: 8 << 30, egm: None }],
                gpus: vec![Gpu { address: "0000:01:00.0".into(), id: "10de:2335".into(), name: None }],
                ..Machine::default()
            },
            verdicts: vec![
                passed,
                verdict("numa.nodes", Outcome::Failed),
                verdict("cuda.host_numa", Outcome::Skipped),
                verdict("pci.links", Outcome::Error),
            ],
        }
    }

    #[test]
    fn a_run_is_read_back_as_it_was_written() {
        assert_eq!(Run::parse(run().to_json().as_bytes()), Ok(run()));
        assert_eq!(run().totals(), Totals { passed: 1, failed: 1, skipped: 1, errors: 1 });
        assert!(!run().totals().is_good());
    }

    #[test]
    fn a_brief_run_has_the_largest_size_of_each_series_and_four_digits() {
        let mut long = run();
        long.verdicts[0].figures.push(Figure::of("read, node 0", Some(1 << 21), "GB/s", &mut [1.0 / 3.0]));
        long.verdicts[0].value = Some(396.789_123);
        let brief = long.clone().brief();
        let series: Vec<_> =
            brief.verdicts[0].figures.iter().map(|f| (f.series.as_str(), f.bytes, f.value)).collect();
        assert_eq!(
            series,
            [
                ("write, node 0", Some(1 << 20), 7.5),
                ("chase, node 0", Some(4096), 1.5),
                ("huge pages", None, 0.5),
                ("read, node 0", Some(1 << 21), 0.3333)
            ]
        );
        assert_eq!(brief.verdicts[0].value, Some(396.8));
        assert_eq!(Run::parse(brief.to_json_lines().as_bytes()), Ok(brief));
    }

    #[test]
    fn version_1_with_its_word_for_skipped_is_read_and_written_as_the_current_version() {
        let older = run().to_json().replace("\"egm-run\": 2", "\"egm-run\": 1").replace("skipped", "waived");
        let read = Run::parse(older.as_bytes()).unwrap();
        assert_eq!((read.version, read.verdicts[2].outcome), (RUN_VERSION, Outcome::Skipped));
    }

    #[test]
    fn another_version_and_what_is_too_long_are_refused() {
        let newer = run().to_json().replace("\"egm-run\": 2", "\"egm-run\": 3, \"more\": 1");
        let refused = |text: &[u8]| Run::parse(text).unwrap_err().to_string();
        assert!(refused(newer.as_bytes()).contains("version 3"));
        let mut long = run();
        long.machine.cpu = "x".repeat(MAX_TEXT + 1);
        assert!(refused(long.to_json().as_bytes()).contains("characters"));
        let mut many = run();
        many.verdicts = vec![many.verdicts[1].clone(); MAX_VERDICTS + 1];
        assert!(refused(many.to_json().as_bytes()).contains("validations"));
        assert!(refused(b"[]").starts_with("no run: ") && refused(b"[]").contains(", in line 1, column "));
    }
}
