//! The page `docs/cloud-hypervisor-api.md`, of which the tables are those of the code. After a change of a table:
//! ```text
//! EGM_PAGES=write cargo test -p egm-vmm cloud::tests::page && git diff docs/cloud-hypervisor-api.md
//! ```

use std::fmt::Write as _;
use std::fs;

use super::super::table::{Fate, PARTS, Row, Usual};

const PAGE: &str = "../docs/cloud-hypervisor-api.md";
/// What stands above this line is written by hand.
const MARK: &str =
    "<!-- From here on written from vmm/src/api/cloud/table by vmm/src/api/cloud/tests/page.rs -->\n";

#[test]
fn the_page_has_the_rows_of_the_table() {
    let page = fs::read_to_string(PAGE).unwrap();
    let (by_hand, written) = page.split_once(MARK).unwrap();
    let tables: String = PARTS.iter().map(|(title, groups)| table(title, groups)).collect();
    if std::env::var_os("EGM_PAGES").is_some_and(|value| value == "write") {
        fs::write(PAGE, format!("{by_hand}{MARK}{tables}")).unwrap();
    } else {
        assert!(written == tables, "{PAGE}: see the top of this file");
    }
}

fn table(title: &str, groups: &[&[Row]]) -> String {
    let mut table = format!(
        "\n## {title}\n\n| field | here | meaning | reason of a refusal; remedy |\n|---|---|---|---|\n"
    );
    for row in groups.iter().copied().flatten() {
        let refusal =
            if row.refuses.is_empty() { String::new() } else { format!("{}; {}", row.refuses, row.help) };
        writeln!(table, "| `{}` | {} | {} | {refusal} |", row.path, here(row.fate), row.means).unwrap();
    }
    table
}

fn here(fate: Fate) -> String {
    match fate {
        Fate::Honoured(key) => format!("`{key}`"),
        Fate::Derived(_) => "derived".to_owned(),
        Fate::Refused(Usual::Nothing | Usual::Judged) => "refused".to_owned(),
        Fate::Refused(Usual::Flag(flag)) => format!("refused unless `{flag}`"),
        Fate::Refused(Usual::Number(number)) => format!("refused unless `{number}`"),
        Fate::Refused(Usual::Words(words)) => format!("refused unless `{}`", words.join("` or `")),
    }
}
