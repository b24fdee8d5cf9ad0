//! JUnit XML, as continuous integration reads it: of a run a suite for each group and a case for each validation.

use std::collections::BTreeMap;
use std::io::{self, Write};

use quick_xml::Writer;
use quick_xml::events::BytesText;

use crate::findings::text::{number, size};
use crate::findings::{Outcome, Run, Verdict, visible};

/// Cases that belong together.
#[derive(Debug)]
pub struct Suite {
    /// The `name` attribute of the `testsuite` element.
    pub name: String,
    /// When it began, as ISO 8601 without a zone.
    pub timestamp: Option<String>,
    /// Facts of the machine, by name.
    pub properties: Vec<(&'static str, String)>,
    /// Its duration in milliseconds.
    pub millis: u64,
    /// Its cases, in order.
    pub cases: Vec<Case>,
}

/// One case. Its texts may come from a hostile guest.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Case {
    pub name: String,
    pub outcome: Outcome,
    /// Why it has this outcome; unused when it passed.
    pub reason: String,
    /// Its duration in milliseconds.
    pub millis: u64,
    /// What else it reports.
    pub output: Option<String>,
}

/// The document of `run`.
pub fn junit(run: &Run) -> String {
    let mut groups: BTreeMap<&str, Vec<&Verdict>> = BTreeMap::new();
    for verdict in &run.verdicts {
        let group = verdict.name.split_once('.').map_or(verdict.name.as_str(), |(group, _)| group);
        groups.entry(group).or_default().push(verdict);
    }
    let suites = groups.into_iter().map(|(group, verdicts)| suite_of(run, group, &verdicts));
    junit_of("egm-guest validate", &suites.collect::<Vec<_>>())
}

/// The document of `suites`, all of the program `name`.
pub fn junit_of(name: &str, suites: &[Suite]) -> String {
    let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
    // Writing to memory does not fail.
    let _ = document(&mut writer, name, suites);
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    text.push_str(&String::from_utf8_lossy(&writer.into_inner()));
    text.push('\n');
    text
}

fn suite_of(run: &Run, group: &str, verdicts: &[&Verdict]) -> Suite {
    let machine = &run.machine;
    let case = |verdict: &&Verdict| Case {
        name: verdict.name.clone(),
        outcome: verdict.outcome,
        reason: verdict.reason.clone(),
        millis: verdict.millis,
        output: Some(output(verdict)),
    };
    Suite {
        name: group.to_owned(),
        timestamp: Some(run.date.trim_end_matches('Z').to_owned()),
        properties: vec![
            ("seed", run.seed.to_string()),
            ("program", run.program.clone()),
            ("kernel", machine.kernel.clone()),
            ("hypervisor", machine.hypervisor.clone().unwrap_or_else(|| "none seen".to_owned())),
            ("driver", machine.driver.clone().unwrap_or_else(|| "none".to_owned())),
        ],
        millis: verdicts.iter().fold(0, |sum, verdict| sum.saturating_add(verdict.millis)),
        cases: verdicts.iter().map(case).collect(),
    }
}

/// Claim, seed and figures, a line each.
fn output(verdict: &Verdict) -> String {
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

fn document<W: Write>(writer: &mut Writer<W>, name: &str, all: &[Suite]) -> io::Result<()> {
    let mut suites = writer.create_element("testsuites").with_attribute(("name", name));
    for (key, value) in &counts(all) {
        suites = suites.with_attribute((*key, value.as_str()));
    }
    suites.write_inner_content(|writer| all.iter().try_for_each(|one| suite(writer, one)))?;
    Ok(())
}

/// The attributes that suites have.
fn counts(suites: &[Suite]) -> [(&'static str, String); 5] {
    let cases = || suites.iter().flat_map(|suite| &suite.cases);
    let count = |outcome| cases().filter(|case| case.outcome == outcome).count().to_string();
    [
        ("tests", cases().count().to_string()),
        ("failures", count(Outcome::Failed)),
        ("errors", count(Outcome::Error)),
        ("skipped", count(Outcome::Skipped)),
        ("time", seconds(suites.iter().fold(0, |sum, suite| sum.saturating_add(suite.millis)))),
    ]
}

fn seconds(millis: u64) -> String {
    format!("{}.{:03}", millis / 1000, millis % 1000)
}

fn suite<W: Write>(writer: &mut Writer<W>, suite: &Suite) -> io::Result<()> {
    let mut element =
        writer.create_element("testsuite").with_attribute(("name", visible(&suite.name).as_str()));
    if let Some(timestamp) = &suite.timestamp {
        element = element.with_attribute(("timestamp", visible(timestamp).as_str()));
    }
    for (key, value) in &counts(std::slice::from_ref(suite)) {
        element = element.with_attribute((*key, value.as_str()));
    }
    element.write_inner_content(|writer| {
        if !suite.properties.is_empty() {
            properties(writer, &suite.properties)?;
        }
        suite.cases.iter().try_for_each(|one| case(writer, &suite.name, one))
    })?;
    Ok(())
}

fn properties<W: Write>(writer: &mut Writer<W>, facts: &[(&'static str, String)]) -> io::Result<()> {
    writer.create_element("properties").write_inner_content(|writer| {
        facts.iter().try_for_each(|(name, value)| {
            let property = writer.create_element("property").with_attribute(("name", *name));
            property.with_attribute(("value", visible(value).as_str())).write_empty().map(|_| ())
        })
    })?;
    Ok(())
}

fn case<W: Write>(writer: &mut Writer<W>, class: &str, case: &Case) -> io::Result<()> {
    let element = writer
        .create_element("testcase")
        .with_attribute(("classname", visible(class).as_str()))
        .with_attribute(("name", visible(&case.name).as_str()))
        .with_attribute(("time", seconds(case.millis).as_str()));
    element.write_inner_content(|writer| {
        let reason = visible(&case.reason);
        let element = match case.outcome {
            Outcome::Passed => None,
            Outcome::Failed => Some("failure"),
            Outcome::Error => Some("error"),
            Outcome::Skipped => Some("skipped"),
        };
        if let Some(element) = element {
            let element = writer.create_element(element).with_attribute(("message", reason.as_str()));
            element.write_text_content(BytesText::new(&reason))?;
        }
        if let Some(output) = &case.output {
            writer.create_element("system-out").write_text_content(BytesText::new(output))?;
        }
        Ok(())
    })?;
    Ok(())
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
