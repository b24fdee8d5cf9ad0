//! A run as JUnit XML, as continuous integration reads it: a suite a group, a case a validation.

use std::collections::BTreeMap;
use std::io::{self, Write};

use quick_xml::Writer;
use quick_xml::events::BytesText;

use crate::findings::text::{number, size};
use crate::findings::{Outcome, Run, Verdict, visible};

/// The document.
pub fn junit(run: &Run) -> String {
    let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
    // Writing to memory does not fail.
    let _ = document(&mut writer, run);
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    text.push_str(&String::from_utf8_lossy(&writer.into_inner()));
    text.push('\n');
    text
}

fn document<W: Write>(writer: &mut Writer<W>, run: &Run) -> io::Result<()> {
    let mut groups: BTreeMap<&str, Vec<&Verdict>> = BTreeMap::new();
    for verdict in &run.verdicts {
        groups.entry(group(&verdict.name)).or_default().push(verdict);
    }
    let totals = counts(&run.verdicts.iter().collect::<Vec<_>>());
    let mut suites = writer.create_element("testsuites").with_attribute(("name", "egm-guest validate"));
    for (key, value) in &totals {
        suites = suites.with_attribute((*key, value.as_str()));
    }
    suites.write_inner_content(|writer| {
        groups.iter().try_for_each(|(group, verdicts)| suite(writer, run, group, verdicts))
    })?;
    Ok(())
}

fn group(name: &str) -> &str {
    name.split_once('.').map_or(name, |(group, _)| group)
}

/// The attributes that suites have.
fn counts(verdicts: &[&Verdict]) -> [(&'static str, String); 5] {
    let count = |outcome| verdicts.iter().filter(|verdict| verdict.outcome == outcome).count().to_string();
    [
        ("tests", verdicts.len().to_string()),
        ("failures", count(Outcome::Failed)),
        ("errors", count(Outcome::Error)),
        ("skipped", count(Outcome::Skipped)),
        ("time", seconds(verdicts.iter().fold(0, |sum, verdict| sum.saturating_add(verdict.millis)))),
    ]
}

fn seconds(millis: u64) -> String {
    format!("{}.{:03}", millis / 1000, millis % 1000)
}

fn suite<W: Write>(writer: &mut Writer<W>, run: &Run, group: &str, verdicts: &[&Verdict]) -> io::Result<()> {
    let timestamp = run.date.trim_end_matches('Z');
    let mut suite = writer
        .create_element("testsuite")
        .with_attribute(("name", visible(group).as_str()))
        .with_attribute(("timestamp", visible(timestamp).as_str()));
    for (key, value) in &counts(verdicts) {
        suite = suite.with_attribute((*key, value.as_str()));
    }
    suite.write_inner_content(|writer| {
        properties(writer, run)?;
        verdicts.iter().try_for_each(|verdict| case(writer, verdict))
    })?;
    Ok(())
}

fn properties<W: Write>(writer: &mut Writer<W>, run: &Run) -> io::Result<()> {
    let machine = &run.machine;
    let facts = [
        ("seed", run.seed.to_string()),
        ("program", visible(&run.program)),
        ("kernel", visible(&machine.kernel)),
        ("hypervisor", visible(machine.hypervisor.as_deref().unwrap_or("none seen"))),
        ("driver", visible(machine.driver.as_deref().unwrap_or("none"))),
    ];
    writer.create_element("properties").write_inner_content(|writer| {
        facts.iter().try_for_each(|(name, value)| {
            let property = writer.create_element("property").with_attribute(("name", *name));
            property.with_attribute(("value", value.as_str())).write_empty().map(|_| ())
        })
    })?;
    Ok(())
}

fn case<W: Write>(writer: &mut Writer<W>, verdict: &Verdict) -> io::Result<()> {
    let (class, name) = (visible(group(&verdict.name)), visible(&verdict.name));
    let case = writer
        .create_element("testcase")
        .with_attribute(("classname", class.as_str()))
        .with_attribute(("name", name.as_str()))
        .with_attribute(("time", seconds(verdict.millis).as_str()));
    case.write_inner_content(|writer| {
        let reason = visible(&verdict.reason);
        let element = match verdict.outcome {
            Outcome::Passed => None,
            Outcome::Failed => Some("failure"),
            Outcome::Error => Some("error"),
            Outcome::Skipped => Some("skipped"),
        };
        if let Some(element) = element {
            let element = writer.create_element(element).with_attribute(("message", reason.as_str()));
            element.write_text_content(BytesText::new(&reason))?;
        }
        writer.create_element("system-out").write_text_content(BytesText::new(&said(verdict)))?;
        Ok(())
    })?;
    Ok(())
}

/// Claim, seed and figures, a line each.
fn said(verdict: &Verdict) -> String {
    let mut text = format!("{}\nseed {}\n", visible(&verdict.claim), verdict.seed);
    if verdict.outcome == Outcome::Passed && !verdict.reason.is_empty() {
        text.push_str(&format!("{}\n", visible(&verdict.reason)));
    }
    for figure in &verdict.figures {
        let at = figure.bytes.map_or_else(String::new, |bytes| format!(", {}", size(bytes)));
        let (series, unit) = (visible(&figure.series), visible(&figure.unit));
        text.push_str(&format!("{series}{at}: {} {unit}\n", number(figure.value)));
    }
    text
}

#[cfg(test)]
mod tests {
    use quick_xml::Reader;
    use quick_xml::events::Event;

    use super::*;
    use crate::findings::run::tests::run;

    /// Names of elements that open, in order; fails when the text is not well formed.
    fn elements(xml: &str) -> Vec<String> {
        let mut reader = Reader::from_str(xml);
        reader.config_mut().check_end_names = true;
        let (mut names, mut depth) = (Vec::new(), 0);
        loop {
            match reader.read_event().unwrap() {
                Event::Start(start) => {
                    depth += 1;
                    start.attributes().for_each(|attribute| drop(attribute.unwrap()));
                    names.push(String::from_utf8(start.name().as_ref().to_vec()).unwrap());
                }
                Event::Empty(empty) => names.push(String::from_utf8(empty.name().as_ref().to_vec()).unwrap()),
                Event::End(_) => depth -= 1,
                Event::Eof => break,
                _ => {}
            }
        }
        assert_eq!(depth, 0, "{xml}");
        names
    }

    #[test]
    fn outcomes_are_what_continuous_integration_calls_them() {
        let xml = junit(&run());
        let names = elements(&xml);
        let count = |name: &str| names.iter().filter(|n| *n == name).count();
        assert_eq!((count("testsuite"), count("testcase")), (4, 4));
        assert_eq!((count("failure"), count("error"), count("skipped")), (1, 1, 1));
        assert!(xml.contains(
            "<testsuites name=\"egm-guest validate\" tests=\"4\" failures=\"1\" errors=\"1\" skipped=\"1\" time=\"6.000\">"
        ), "{xml}");
        assert!(xml.contains("timestamp=\"2026-11-22T13:00:00\""), "{xml}");
    }

    #[test]
    fn hostile_texts_leave_it_well_formed() {
        let mut hostile = run();
        for text in ["\"/><x a='&", "]]>", "\u{0}\u{1b}[2J\u{fffe}", "<!--"] {
            hostile.verdicts[1].reason = text.into();
            hostile.verdicts[0].figures[0].series = text.into();
            hostile.machine.kernel = text.into();
            let xml = junit(&hostile);
            assert!(!elements(&xml).contains(&"x".to_owned()), "{xml}");
            assert!(xml.chars().all(|c| c == '\n' || !c.is_control()), "{xml:?}");
        }
    }
}
