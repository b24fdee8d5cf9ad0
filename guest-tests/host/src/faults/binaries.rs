//! Test programs that cargo has built.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::engine::error::LabError;
use crate::engine::progress::Stage;
use crate::faults::table::{Finder, Row};
use crate::images::cargo::{self, Built};

#[derive(Debug)]
pub(super) struct Binaries(Vec<Built>);

#[derive(Debug)]
pub(super) struct Binary<'a> {
    pub(super) path: &'a PathBuf,
    /// Its package's folder, in which cargo runs tests.
    pub(super) folder: PathBuf,
}

impl Binaries {
    /// The programs of `rows`, which are all unit tests or all integration tests.
    ///
    /// Unit tests always contain faults: cargo builds all packages, as for the other tests of a run. Programs of
    /// integration tests are built with the feature.
    pub(super) fn of(rows: &[&Row]) -> Result<Self, LabError> {
        let tests = rows.iter().filter_map(|row| match &row.finder {
            Finder::Program { package, binary, .. } => {
                Some([format!("--package={package}"), format!("--test={binary}")])
            }
            Finder::Unit { .. } | Finder::Scenario { .. } => None,
        });
        let tests: BTreeSet<_> = tests.flatten().collect();
        if tests.is_empty() {
            return Self::build(&["--workspace", "--lib", "--bins"].map(str::to_owned));
        }
        let with = ["--profile=faults", "--features=planted-faults"].map(str::to_owned);
        Self::build(&with.into_iter().chain(tests).collect::<Vec<_>>())
    }

    fn build(arguments: &[String]) -> Result<Self, LabError> {
        let stage = Stage::begin("building tests");
        let programs = cargo::programs(["test"].into_iter().chain(arguments.iter().map(String::as_str)))?;
        stage.end();
        Ok(Self(programs))
    }

    /// The program that has the test of `finder`.
    pub(super) fn with_test_of(&self, finder: &Finder) -> Option<Binary<'_>> {
        let library = |package: &str| package.replace('-', "_");
        let (package, kinds, name) = match finder {
            Finder::Unit { package, .. } if package == env!("CARGO_PKG_NAME") => {
                (package, ["bin"; 2], package.clone())
            }
            Finder::Unit { package, .. } => (package, ["lib", "rlib"], library(package)),
            Finder::Program { package, binary, .. } => (package, ["test"; 2], binary.clone()),
            Finder::Scenario { .. } => return None,
        };
        let built = self.0.iter().find(|built| {
            let is_kind = built.target.kind.iter().any(|kind| kinds.contains(&kind.as_str()));
            is_kind && built.target.name == name && built.package() == package
        })?;
        Some(Binary { path: &built.executable, folder: built.manifest_path.parent()?.to_owned() })
    }
}
