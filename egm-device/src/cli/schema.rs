//! `egm-device schema`: what this program's files may have in them, for editors and checkers.

use std::process::ExitCode;

use clap::ValueEnum;
use egm_report::show::print;

use crate::{policy, region, serve};

/// Print the JSON Schema of one of this program's files
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The policy of the broker, the devices of "egm-device serve --config", or a host file
    #[arg(value_name = "FILE")]
    file: File,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum File {
    Policy,
    Serve,
    Host,
}

impl File {
    fn schema(self) -> String {
        match self {
            Self::Policy => policy::schema(),
            Self::Serve => serve::schema(),
            Self::Host => region::host_file_schema(),
        }
    }
}

pub(super) fn run(args: &Args) -> ExitCode {
    print(args.file.schema());
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use egm_fixtures::schema::accepts;
    use serde_json::{Value, json};

    use super::*;

    const FILES: [(File, &str); 3] = [(File::Policy, "policy"), (File::Serve, "serve"), (File::Host, "host")];

    fn configs(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(name)
    }

    #[test]
    fn the_schemas_in_configs_are_current() {
        for (file, name) in FILES {
            let path = configs(&format!("schemas/{name}.schema.json"));
            let stored = fs::read_to_string(&path).unwrap_or_default();
            let command = format!("egm-device schema {name} > configs/schemas/{name}.schema.json");
            assert!(stored == file.schema(), "run: {command}");
        }
    }

    #[test]
    fn every_file_in_configs_is_what_its_schema_describes() {
        for (file, folder) in FILES {
            let schema = serde_json::from_str(&file.schema()).unwrap();
            let entries = fs::read_dir(configs(folder)).unwrap().map(|entry| entry.unwrap().path());
            let files: Vec<_> =
                entries.filter(|path| path.extension().is_some_and(|end| end == "json")).collect();
            assert!(!files.is_empty(), "{folder}");
            for path in files {
                let value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
                assert!(accepts(&schema, &value), "{}", path.display());
            }
        }
    }

    /// `good` is described, and not with the value of `key` (of its first entry) replaced by one of `bad`.
    fn described_but_not_with(file: File, good: &Value, list: &str, bad: &[(&str, Value)]) {
        let schema = serde_json::from_str(&file.schema()).unwrap();
        assert!(accepts(&schema, good), "{good}");
        for (key, value) in bad {
            let mut wrong = good.clone();
            wrong[list][0][*key] = value.clone();
            assert!(!accepts(&schema, &wrong), "{wrong}");
        }
    }

    #[test]
    fn what_a_reader_refuses_for_its_range_or_form_the_schema_refuses_too() {
        let rule = json!({ "rules": [{ "name": "a", "user": 1000, "quota": "1GiB", "weight": 65536 }] });
        let bad = [
            ("name", json!("a b")),
            ("user", json!(-1)),
            ("group", json!("users")),
            ("quota", json!("1GB")),
            ("weight", json!(0)),
            ("weight", json!(65537)),
            ("regions", json!(["a b"])),
            ("regions", json!([])),
            ("trust_domain", json!("")),
            ("quotta", json!("1GiB")),
        ];
        described_but_not_with(File::Policy, &rule, "rules", &bad);
        let device =
            json!({ "devices": [{ "name": "vm1", "region": "egm4", "size": "64GiB", "id": "1234:0001" }] });
        let bad = [
            ("name", json!("v m")),
            ("size", json!("0")),
            ("id", json!("1234")),
            ("gpus", json!(["x"])),
            ("trust_domain", json!("a/b")),
        ];
        described_but_not_with(File::Serve, &device, "devices", &bad);
        let span = json!({ "$schema": "host.schema.json", "regions": [{ "name": "a", "base": "0x1000", "size": "4GiB" }] });
        let bad =
            [("base", json!("1000")), ("base", json!(4096)), ("size", json!("4GB")), ("bse", json!("0x1"))];
        described_but_not_with(File::Host, &span, "regions", &bad);
    }
}
