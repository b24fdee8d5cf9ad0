//! Test programs that cargo has built.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::Deserialize;

use crate::command::Tool;
use crate::error::LabError;
use crate::faults::table::{Finder, Row};
use crate::progress::Stage;

/// A line of `cargo --message-format json`, as far as it is about test programs.
#[derive(Debug, Deserialize)]
struct Artifact {
    package_id: String,
    manifest_path: PathBuf,
    target: Target,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

impl Artifact {
    /// The package's name: `path+file:///FOLDER#NAME@VERSION`, or `…/NAME#VERSION` where its folder has its name.
    fn package(&self) -> &str {
        let (path, end) = self.package_id.rsplit_once('#').unwrap_or_default();
        let name = end.split_once('@').map(|(name, _)| name);
        name.or_else(|| path.rsplit('/').next()).unwrap_or_default()
    }
}

/// Test programs.
#[derive(Debug)]
pub(super) struct Binaries(Vec<Artifact>);

/// A test program.
#[derive(Debug)]
pub(super) struct Binary<'a> {
    /// The program.
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
        let mut artifacts = Vec::new();
        let fixed = ["test", "--no-run", "--quiet", "--message-format=json-render-diagnostics"];
        let arguments = fixed.into_iter().chain(arguments.iter().map(String::as_str));
        Tool::new("cargo", "cargo").args(arguments).lines(|line| {
            let artifact: Option<Artifact> = serde_json::from_str(line).ok();
            artifacts.extend(artifact.filter(|artifact| artifact.executable.is_some()));
        })?;
        stage.end();
        Ok(Self(artifacts))
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
        let artifact = self.0.iter().find(|artifact| {
            let is_kind = artifact.target.kind.iter().any(|kind| kinds.contains(&kind.as_str()));
            is_kind && artifact.target.name == name && artifact.package() == package
        })?;
        let folder = artifact.manifest_path.parent()?.to_owned();
        Some(Binary { path: artifact.executable.as_ref()?, folder })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_named_by_its_id_in_both_forms() {
        let named = |id: &str| {
            let target = Target { kind: Vec::new(), name: String::new() };
            let artifact =
                Artifact { package_id: id.into(), manifest_path: PathBuf::new(), target, executable: None };
            artifact.package().to_owned()
        };
        assert_eq!(named("path+file:///work/vmm/address#egm-address@0.1.0"), "egm-address");
        assert_eq!(named("path+file:///work/egm-device#0.1.0"), "egm-device");
    }
}
