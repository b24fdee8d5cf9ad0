//! `--require` and `--strict`: validations that must pass, so that a run that decided nothing is not taken for a good one.

use std::collections::BTreeMap;

use egm_guest::findings::{Outcome, Run, Verdict};

use super::select::select;
use crate::finding::Finding;

/// Name of the verdict on the required validations.
pub(super) const NAME: &str = "required";
const CLAIM: &str =
    "every validation of --require, of a group its core, passed; with --strict every selected validation";

/// Names that a reason spells out for each cause.
const NAMED: usize = 3;

/// Names among `chosen` that must pass. `wanted` is written as for `--select`, but a group stands for its `core`; `strict`
/// stands for all that are chosen.
///
/// # Errors
/// A word that names no validation, or a required validation that `--select` leaves out.
pub(super) fn required<'n>(
    all: &[&'n str],
    chosen: &[&'n str],
    wanted: &[String],
    strict: bool,
    core: impl Fn(&str) -> Option<&'static [&'static str]>,
) -> Result<Vec<&'n str>, String> {
    let words = wanted.iter().flat_map(|text| text.split(',')).map(str::trim);
    let words = words.map(|word| core(word).map_or_else(|| word.to_owned(), |names| names.join(",")));
    let words: Vec<String> = words.collect();
    let named = if words.is_empty() { Vec::new() } else { select("--require", all, &words)? };
    if let Some(absent) = named.iter().find(|name| !chosen.contains(name)) {
        return Err(format!("--require names {absent}, which --select leaves out"));
    }
    Ok(if strict { chosen.to_vec() } else { named })
}

/// The verdict on `names` in `run`; `None` when nothing is required.
pub(super) fn verdict(run: &Run, names: &[&str]) -> Option<Verdict> {
    if names.is_empty() {
        return None;
    }
    let mut causes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for name in names {
        match run.verdicts.iter().find(|verdict| verdict.name == *name) {
            Some(verdict) if verdict.outcome == Outcome::Passed => {}
            Some(verdict) => {
                causes.entry(format!("{}: {}", verdict.outcome, verdict.reason)).or_default().push(name);
            }
            None => causes.entry("it did not run".to_owned()).or_default().push(name),
        }
    }
    let missing: usize = causes.values().map(Vec::len).sum();
    let finding = if missing == 0 {
        Finding::passed(format!("{} validations", names.len()))
    } else {
        let causes: Vec<String> =
            causes.iter().map(|(cause, names)| format!("{} {cause}", list(names))).collect();
        Finding::failed(format!("{missing} of {} did not pass: {}", names.len(), causes.join("; ")))
    };
    Some(finding.into_verdict(NAME, CLAIM, run.seed))
}

/// `a, b, c and 4 more`.
fn list(names: &[&str]) -> String {
    let (shown, rest) = names.split_at(names.len().min(NAMED));
    let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::{Machine, RUN_VERSION};

    use super::*;

    const ALL: [&str; 4] = ["memory.pattern", "cuda.pools", "cuda.host_numa", "rdma.pair"];

    fn words(text: &str) -> Vec<String> {
        vec![text.to_owned()]
    }

    /// Of the group `cuda` alone; words for others select as usual.
    fn core(group: &str) -> Option<&'static [&'static str]> {
        const CUDA: &[&str] = &["cuda.host_numa"];
        (group == "cuda").then_some(CUDA)
    }

    #[test]
    fn required_names_are_selected_ones_and_strict_means_all_of_them() {
        let none = |_: &str| None;
        assert_eq!(required(&ALL, &ALL, &[], false, none).unwrap(), [""; 0]);
        assert_eq!(required(&ALL, &ALL, &words("cuda.*,rdma.pair"), false, none).unwrap(), ALL[1..]);
        assert_eq!(required(&ALL, &ALL[..2], &[], true, none).unwrap(), ALL[..2]);
        let absent = required(&ALL, &ALL[..2], &words("cuda.*"), false, none).unwrap_err();
        assert!(absent.contains("cuda.host_numa, which --select leaves out"), "{absent}");
        let unknown = required(&ALL, &ALL, &words("cudda"), false, none).unwrap_err();
        assert!(
            unknown.contains("--require \"cudda\"") && unknown.contains("memory, cuda, rdma"),
            "{unknown}"
        );
        assert!(required(&ALL, &ALL, &words(""), false, none).unwrap_err().contains("without a word"));
    }

    #[test]
    fn a_group_is_required_by_its_core_and_a_name_or_pattern_by_all_that_it_is() {
        let required = |text| required(&ALL, &ALL, &words(text), false, core);
        assert_eq!(required("cuda").unwrap(), ["cuda.host_numa"]);
        assert_eq!(required("memory.pattern, cuda,rdma.pair").unwrap(), [ALL[0], ALL[2], ALL[3]]);
        assert_eq!(required("cuda,cuda.pools").unwrap(), ["cuda.pools", "cuda.host_numa"]);
        assert_eq!(required("cuda.*").unwrap(), ["cuda.pools", "cuda.host_numa"]);
        assert_eq!(required("cuda.*,-cuda.pools").unwrap(), ["cuda.host_numa"]);
        let left_out = super::required(&ALL, &ALL[..2], &words("cuda"), false, core).unwrap_err();
        assert!(left_out.contains("cuda.host_numa, which --select leaves out"), "{left_out}");
    }

    #[test]
    fn what_did_not_pass_is_named_with_its_reason_once() {
        let found = [
            ("memory.pattern", Finding::passed("x")),
            ("cuda.pools", Finding::skipped("no GPU")),
            ("cuda.host_numa", Finding::skipped("no GPU")),
        ];
        let run = Run {
            version: RUN_VERSION,
            date: String::new(),
            program: String::new(),
            seed: 1,
            most: 1,
            args: Vec::new(),
            machine: Machine::default(),
            verdicts: found.into_iter().map(|(name, finding)| finding.into_verdict(name, "", 1)).collect(),
        };
        assert_eq!(verdict(&run, &[]), None);
        assert_eq!(verdict(&run, &ALL[..1]).unwrap().outcome, Outcome::Passed);
        let failed = verdict(&run, &ALL).unwrap();
        assert_eq!(failed.outcome, Outcome::Failed);
        assert_eq!(
            failed.reason,
            "3 of 4 did not pass: rdma.pair it did not run; cuda.pools, cuda.host_numa skipped: no GPU"
        );
    }
}
