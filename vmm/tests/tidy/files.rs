//! The files of the repository and the relations between them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The top of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Path from the top and text of every text file, build outputs and git's own left out.
pub(crate) fn texts() -> BTreeMap<String, String> {
    let mut texts = BTreeMap::new();
    collect(&root(), "", &mut texts);
    assert!(texts.contains_key("Cargo.toml"), "the repository was not found at {}", root().display());
    texts
}

fn collect(folder: &Path, prefix: &str, texts: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        let path = format!("{prefix}{name}");
        let kind = entry.file_type().unwrap();
        if kind.is_dir() && !matches!(name.as_str(), "target" | ".git" | ".lab") {
            collect(&entry.path(), &format!("{path}/"), texts);
        } else if kind.is_file()
            && let Ok(text) = fs::read_to_string(entry.path())
        {
            texts.insert(path, text);
        }
    }
}

/// Whether everything in this file is test code because of where it lies.
pub(crate) fn is_test_path(path: &str) -> bool {
    path.split('/').any(|part| matches!(part, "tests" | "benches" | "fuzz"))
}

/// The files that may hold `mod name;` of the file `path`.
pub(crate) fn module_files(path: &str, name: &str) -> [String; 2] {
    let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
    let folder = match file {
        "mod.rs" | "lib.rs" | "main.rs" => folder.to_owned(),
        _ => format!("{folder}/{}", file.trim_end_matches(".rs")),
    };
    [format!("{folder}/{name}.rs"), format!("{folder}/{name}/mod.rs")]
}

/// The files of modules that contain the file `path`, itself first.
pub(crate) fn module_chain(path: &str) -> Vec<String> {
    let mut chain = vec![path.to_owned()];
    let mut folder = path;
    while let Some((above, _)) = folder.rsplit_once('/') {
        chain.push(format!("{above}.rs"));
        chain.extend(["mod.rs", "lib.rs", "main.rs"].map(|file| format!("{above}/{file}")));
        if above.ends_with("/src") {
            break;
        }
        folder = above;
    }
    chain
}

/// Paths in Rust files that lead from a folder of `floors`, the lowest first, to a higher one: of `#[path]`, of `include_str!`
/// and of files that a test opens.
pub(crate) fn paths_upwards(texts: &BTreeMap<String, String>, floors: &[&str]) -> Vec<String> {
    let floor = |path: &str| {
        let folder = path.split('/').next();
        floors.iter().position(|floor| folder == Some(*floor))
    };
    let mut wrong = Vec::new();
    for (file, text) in texts.iter().filter(|(path, _)| path.ends_with(".rs")) {
        let Some(own) = floor(file) else { continue };
        for (line, number) in text.lines().zip(1..) {
            let quoted = line.split('"').map(|text| text.trim_start_matches('/'));
            for path in quoted.filter(|text| text.starts_with("../")) {
                if floor(path.trim_start_matches("../")).is_some_and(|other| other > own) {
                    wrong.push(format!("{file}:{number}: {path} lies on a higher floor"));
                }
            }
        }
    }
    wrong
}

/// A package of ours.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) folder: String,
    /// The packages of ours that it is built on, tests left out.
    pub(crate) built_on: BTreeSet<String>,
    /// Those that only its tests are built on.
    pub(crate) tested_with: BTreeSet<String>,
}

pub(crate) fn packages() -> Vec<Package> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().iter().map(package).collect()
}

fn package(metadata: &serde_json::Value) -> Package {
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let manifest = PathBuf::from(text(&metadata["manifest_path"]));
    let top = manifest.strip_prefix(root().canonicalize().unwrap()).unwrap().iter().next();
    let ours = |is_dev: bool| {
        let dependencies = metadata["dependencies"].as_array().unwrap().iter();
        dependencies
            .filter(|dependency| dependency["path"].is_string() && (dependency["kind"] == "dev") == is_dev)
            .map(|dependency| text(&dependency["name"]))
            .collect()
    };
    Package {
        name: text(&metadata["name"]),
        folder: top.unwrap().to_str().unwrap().to_owned(),
        built_on: ours(false),
        tested_with: ours(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_to_a_higher_floor_is_found_and_other_paths_are_not() {
        let of = |file: &str, line: &str| {
            paths_upwards(&[(file.to_owned(), format!("\n{line}\n"))].into(), &["vfio", "egm-device", "vmm"])
        };
        let line = "#[path = \"../../vmm/tests/pool.rs\"]";
        let wrong = ["egm-device/tests/a.rs:2: ../../vmm/tests/pool.rs lies on a higher floor"];
        assert_eq!(of("egm-device/tests/a.rs", line), wrong);
        let joined = "concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/../egm-device/a\")";
        assert_eq!(of("vfio/tests/a.rs", joined).len(), 1);
        assert_eq!(of("vfio/address/src/a.rs", "include_str!(\"../../../vmm/a\")").len(), 1);
        for (file, line) in [
            ("vmm/tests/a.rs", "#[path = \"../../egm-device/tests/b.rs\"]"),
            ("vmm/tests/a.rs", line),
            ("egm-device/tests/a.rs", "include_str!(\"../../docs/api.md\")"),
            ("egm-device/tests/a.rs", "\"vmm/a\""),
            ("egm-device/DESIGN.md", line),
        ] {
            assert_eq!(of(file, line), Vec::<String>::new(), "{file}: {line}");
        }
    }
}
