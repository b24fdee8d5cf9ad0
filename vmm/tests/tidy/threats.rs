//! The table of attacks in `docs/security.md`: a planted fault switches the protection of each off, and a test of the row
//! finds it.

use std::collections::BTreeMap;

use serde_json::Value;

/// Attacks without a planted fault, and the reason for each.
pub(crate) const WITHOUT_FAULT: &[(&str, &str)] = &[
    (
        "read memory of a machine that has ended",
        "the kernel frees and zeroes memory that no process has, without a line of ours",
    ),
    (
        "the same with a device-DAX slice that has a device of its own",
        "the test needs such a device, and the lab's test programs are built without planted faults",
    ),
];

const PAGE: &str = "docs/security.md";
const TABLE: &str = "guest-tests/faults.json";

/// A row of the table of attacks.
struct Attack<'t> {
    name: &'t str,
    tests: &'t str,
    places: &'t str,
}

/// A row of the table of faults.
struct Fault {
    place: String,
    /// The scenario that finds it.
    scenario: Option<String>,
    /// The test that finds it: how its file's path starts, and its name.
    test: Option<(String, String)>,
}

/// Deviations of both tables from each other. `without` is the list of attacks that need no fault.
pub(crate) fn deviations(texts: &BTreeMap<String, String>, without: &[(&str, &str)]) -> Vec<String> {
    let (attacks, faults) = (attacks(&texts[PAGE]), faults(&texts[TABLE]));
    let is_listed = |name: &str| without.iter().any(|(attack, _)| *attack == name);
    let mut wrong = Vec::new();
    for Attack { name, tests, places } in &attacks {
        let found: Vec<_> = faults.iter().filter(|fault| fault.is_found_by(tests, texts)).collect();
        let is_at = |fault: &Fault| quoted(places).any(|place| fault.place.starts_with(place));
        let is_proven = found.iter().any(|fault| is_at(fault));
        match (is_listed(name), found.is_empty()) {
            (true, _) if is_proven => {
                wrong.push(format!("\"{name}\" has a fault: remove it from WITHOUT_FAULT"));
            }
            (false, true) => wrong.push(format!("{PAGE}: \"{name}\": its tests find no fault of {TABLE}")),
            (false, false) if !is_proven => {
                let at = found.iter().map(|fault| fault.place.as_str()).collect::<Vec<_>>().join(", ");
                wrong.push(format!(
                    "{PAGE}: \"{name}\": the faults of its tests are in {at}, not where it is enforced"
                ));
            }
            _ => {}
        }
    }
    let is_row = |name: &str| attacks.iter().any(|attack| attack.name == name);
    let gone = without.iter().filter(|(name, _)| !is_row(name));
    wrong.extend(gone.map(|(name, _)| format!("{PAGE} has no attack \"{name}\" of WITHOUT_FAULT")));
    if attacks.is_empty() || faults.is_empty() {
        wrong.push("a table is empty".to_owned());
    }
    wrong
}

fn attacks(page: &str) -> Vec<Attack<'_>> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let mut is_attack = false;
    let mut attacks = Vec::new();
    for row in rows {
        let cells: Vec<_> = row.split(" | ").collect();
        let [name, tests, places] = cells[..] else {
            is_attack = false;
            continue;
        };
        match name {
            "attack" => is_attack = true,
            // The head of another table.
            _ if !places.contains('/') => is_attack = false,
            _ if is_attack => attacks.push(Attack { name, tests, places }),
            _ => {}
        }
    }
    attacks
}

fn faults(table: &str) -> Vec<Fault> {
    let rows: Vec<Value> = serde_json::from_str(table).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let name = |test: &Value| text(&test["test"]).rsplit("::").next().unwrap().to_owned();
    let fault = |row: &Value| {
        let by = |kind: &str| row["found-by"].get(kind);
        let unit = |test: &Value| (format!("{}src/", folder(&text(&test["package"]))), name(test));
        let program = |test: &Value| {
            (format!("{}tests/{}", folder(&text(&test["package"])), text(&test["binary"])), name(test))
        };
        Fault {
            place: text(&row["where"]),
            scenario: by("scenario").map(|scenario| text(&scenario["name"])),
            test: by("unit").map(unit).or_else(|| by("program").map(program)),
        }
    };
    rows.iter().map(fault).collect()
}

/// The folder of a package.
fn folder(package: &str) -> String {
    let folder = match package {
        "egm-config" => "vmm/config",
        "egm-vfio-wire" => "vfio/wire",
        "egm-vfio" | "egm-vmm" => &package[4..],
        other => other,
    };
    format!("{folder}/")
}

impl Fault {
    /// Whether a test of the cell `tests` finds it: a function, a scenario, or any function of a file.
    fn is_found_by(&self, tests: &str, texts: &BTreeMap<String, String>) -> bool {
        if let Some(scenario) = &self.scenario {
            return tests.contains(&format!("scenario `{scenario}`"));
        }
        let Some((begin, name)) = &self.test else { return false };
        let definition = format!("fn {name}(");
        let is_in = |file: &str| {
            file.starts_with(begin) && texts.get(file).is_some_and(|text| text.contains(&definition))
        };
        quoted(tests).any(|named| named == *name || is_in(named))
    }
}

fn quoted(cell: &str) -> impl Iterator<Item = &str> + Clone {
    cell.split('`').skip(1).step_by(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAULTS: &str = r#"[
        {"fault": "f", "where": "vmm/src/a.rs", "found-by": {"program": {"package": "egm-vmm", "binary": "x", "test": "bytes_stay"}}},
        {"fault": "g", "where": "vmm/src/b.rs", "found-by": {"scenario": {"name": "hostile", "check": "x"}}}
    ]"#;

    fn of(rows: &str, without: &[(&str, &str)]) -> Vec<String> {
        let page = format!("| attack | test | enforced in |\n|---|---|---|\n{rows}");
        let texts = [(PAGE, page.as_str()), (TABLE, FAULTS), ("vmm/tests/x.rs", "fn bytes_stay() {}")];
        deviations(&texts.map(|(path, text)| (path.to_owned(), text.to_owned())).into(), without)
    }

    #[test]
    fn an_attack_has_a_fault_that_one_of_its_tests_finds_at_its_place() {
        for row in [
            "| read | `other`, `bytes_stay` | `vmm/src/a.rs` |",
            "| read | `vmm/tests/x.rs` | `vmm/src/` |",
            "| read | scenario `hostile` (`--full`) | `vmm/src/c.rs`, `vmm/src/b.rs` |",
        ] {
            assert_eq!(of(row, &[]), [""; 0], "{row}");
            assert!(of(row, &[("read", "kernel")])[0].contains("remove it from WITHOUT_FAULT"), "{row}");
        }
        for (row, why) in [
            ("| read | `other` | `vmm/src/a.rs` |", "its tests find no fault"),
            ("| read | scenario `hostile-two` | `vmm/src/b.rs` |", "its tests find no fault"),
            ("| read | `egm-device/tests/x.rs` | `vmm/src/a.rs` |", "its tests find no fault"),
            ("| read | `bytes_stay` | `vmm/src/b.rs` |", "vmm/src/a.rs, not where it is enforced"),
        ] {
            assert!(of(row, &[])[0].contains(why), "{row}: {:?}", of(row, &[]));
            assert_eq!(of(row, &[("read", "kernel")]), [""; 0], "{row}");
        }
    }

    #[test]
    fn an_exception_without_its_attack_and_an_empty_table_are_found() {
        let row = "| read | `bytes_stay` | `vmm/src/a.rs` |";
        assert!(of(row, &[("write", "kernel")])[0].contains("no attack \"write\""));
        assert_eq!(of("| module | uses | why |", &[]), ["a table is empty"]);
    }
}
