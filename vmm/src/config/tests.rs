//! What a configuration means, and what is said of one that is wrong.

use super::*;

fn repository(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(name)
}

#[test]
fn every_file_in_configs_is_good() {
    let mut seen = 0;
    for entry in std::fs::read_dir(repository("")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let whole = name.ends_with(".json") && !name.starts_with("base-") && name != "schema.json";
        if whole {
            let spec = load(&path).unwrap_or_else(|e| panic!("{e}"));
            assert!(!spec.description.is_empty(), "{name}");
            seen += 1;
        }
    }
    assert!(seen >= 5, "{seen} files");
}
