//! Programs that cargo builds, by its messages.

use std::path::PathBuf;

use serde::Deserialize;

use crate::engine::command::Tool;
use crate::engine::error::LabError;

/// A message of `cargo --message-format json` about a program.
#[derive(Debug, Deserialize)]
pub(crate) struct Built {
    package_id: String,
    pub(crate) manifest_path: PathBuf,
    pub(crate) target: Target,
    pub(crate) executable: PathBuf,
}

/// The target that the program is of.
#[derive(Debug, Deserialize)]
pub(crate) struct Target {
    pub(crate) kind: Vec<String>,
    pub(crate) name: String,
}

impl Built {
    /// The package's name: `path+file:///FOLDER#NAME@VERSION`, or `…/NAME#VERSION` where its folder has its name.
    pub(crate) fn package(&self) -> &str {
        let (path, end) = self.package_id.rsplit_once('#').unwrap_or_default();
        let name = end.split_once('@').map(|(name, _)| name);
        name.or_else(|| path.rsplit('/').next()).unwrap_or_default()
    }
}

/// Builds what `cargo ARGUMENTS` would run, and returns the programs. Messages about libraries have no `executable`.
pub(crate) fn programs<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Result<Vec<Built>, LabError> {
    let mut built = Vec::new();
    let fixed = ["--no-run", "--quiet", "--message-format=json-render-diagnostics"];
    let tool = Tool::new("cargo", "cargo").args(arguments.into_iter().chain(fixed));
    tool.lines(|line| built.extend(serde_json::from_str::<Built>(line).ok()))?;
    Ok(built)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_named_by_its_id_in_both_forms() {
        let named = |id: &str| {
            let target = Target { kind: Vec::new(), name: String::new() };
            let built = Built {
                package_id: id.into(),
                manifest_path: PathBuf::new(),
                target,
                executable: PathBuf::new(),
            };
            built.package().to_owned()
        };
        assert_eq!(named("path+file:///work/vfio/address#egm-address@0.1.0"), "egm-address");
        assert_eq!(named("path+file:///work/egm-device#0.1.0"), "egm-device");
    }
}
