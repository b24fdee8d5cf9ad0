//! The table of faults, and checks that it agrees with the sources.

use std::fmt;

use serde::Deserialize;

use crate::engine::error::LabError;
use crate::engine::scenario::WITH_FAULT;

/// The environment variable with the file in which a process reports that it reached its fault.
pub(super) const REACHED: &str = "EGM_FAULT_REACHED";

/// Compiled into the program, as the table of skips is.
const TABLE: &str = include_str!("../../../faults.json");

/// One fault and the check that must turn red.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Row {
    /// Its name, as in `fault!`.
    pub(super) fault: String,
    /// The file that has it.
    #[serde(rename = "where")]
    pub(super) place: String,
    /// The defect, in a sentence.
    pub(super) what: String,
    /// The check that finds it.
    #[serde(rename = "found-by")]
    pub(super) finder: Finder,
}

/// The check that finds a fault.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) enum Finder {
    /// A unit test of the package that has the fault.
    Unit { package: String, test: String },
    /// An integration test, of programs or libraries that are built with the feature.
    Program { package: String, binary: String, test: String },
    /// A check of a scenario.
    Scenario { name: String, check: String },
}

impl Finder {
    /// The scenario that finds it.
    pub(super) fn scenario(&self) -> Option<&str> {
        match self {
            Self::Scenario { name, .. } => Some(name),
            Self::Unit { .. } | Self::Program { .. } => None,
        }
    }

    /// The scenario with `fault` in its host's programs.
    pub(super) fn scenario_with(&self, fault: &str) -> Option<String> {
        self.scenario().map(|name| format!("{name}{WITH_FAULT}{fault}"))
    }
}

impl fmt::Display for Finder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unit { package, test } => write!(f, "{package} {test}"),
            Self::Program { package, binary, test } => write!(f, "{package} {binary} {test}"),
            Self::Scenario { name, check } => write!(f, "scenario {name}, check {check}"),
        }
    }
}

/// The table of this program.
pub(super) fn read() -> Result<Vec<Row>, LabError> {
    LabError::json("guest-tests/faults.json", TABLE.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::faults::files;
    use crate::scenarios::ALL;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
    }

    /// Path and text of every Rust file of the packages.
    fn sources() -> Vec<(String, String)> {
        let root = root();
        let folders = ["vmm", "vfio", "egm-device", "guest-tests"].map(|folder| root.join(folder));
        let rust = folders
            .iter()
            .flat_map(|folder| files(folder))
            .filter(|path| path.extension().is_some_and(|e| e == "rs"));
        let path = |path: &Path| path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
        rust.map(|file| (path(&file), fs::read_to_string(&file).unwrap())).collect()
    }

    /// The name and the file of every planted fault.
    fn planted(sources: &[(String, String)]) -> Vec<(String, String)> {
        let names = |text: &str| -> Vec<String> {
            let arguments = text.split(concat!("fault!", "(")).skip(1);
            // The name is on a line of its own where the first one is full.
            let quoted = arguments.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split_once('"'));
            quoted.map(|(name, _)| name.to_owned()).collect()
        };
        sources
            .iter()
            .flat_map(|(path, text)| names(text).into_iter().map(|name| (name, path.clone())))
            .collect()
    }

    #[test]
    fn each_fault_of_the_sources_has_a_row_and_each_row_a_fault_and_a_check_of_its_own() {
        let mut of_sources = planted(&sources());
        let mut of_table: Vec<_> = read().unwrap().into_iter().map(|row| (row.fault, row.place)).collect();
        of_sources.sort();
        of_table.sort();
        // Several checks may find one fault.
        of_table.dedup();
        assert_eq!(of_table, of_sources);
        let checks = read().unwrap().into_iter().map(|row| (row.fault, row.finder.to_string()));
        assert_eq!(checks.collect::<BTreeSet<_>>().len(), read().unwrap().len(), "a row is there twice");
        let names: BTreeSet<_> = of_table.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), of_table.len(), "a name is used twice");
        assert!(
            names
                .iter()
                .all(|name| name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'))
        );
    }

    #[test]
    fn there_are_at_least_fifty_faults() {
        assert!(read().unwrap().len() >= 50, "{}", read().unwrap().len());
    }

    #[test]
    fn the_test_or_scenario_of_each_fault_exists() {
        let sources = sources();
        for row in read().unwrap() {
            assert!(row.what.ends_with('.') && row.what.len() > 20, "{}", row.fault);
            match &row.finder {
                Finder::Scenario { name, check } => {
                    assert!(ALL.iter().any(|scenario| scenario.name == name), "no scenario {name}");
                    // `run` is the lab's own failure.
                    assert!(!["", "run"].contains(&check.as_str()), "{}", row.fault);
                }
                Finder::Unit { test, .. } | Finder::Program { test, .. } => {
                    let definition = format!("fn {}(", test.rsplit("::").next().unwrap());
                    assert!(
                        sources.iter().any(|(_, text)| text.contains(&definition)),
                        "{}: no {test}",
                        row.fault
                    );
                }
            }
        }
    }
}
