//! The lines of `egm-guest doctor` on the console of a guest that has this program as its init.

use egm_guest::findings::Check;

use super::live::Live;
use super::{TopicReport, TopicState, examine};
use crate::finding::Finding;
use crate::tree::Tree;

/// Hands each line over as a check `doctor.topic`; how many there were.
pub(crate) fn on_console(mut each: impl FnMut(&Check)) -> usize {
    let lines = examine(&Tree::live(), &Live::look());
    lines.iter().for_each(|line| each(&check(line)));
    lines.len()
}

/// A line that is as it should be has passed, and a lack is no failure. An empty line has failed, and so has a lack
/// without a remedy.
fn check(line: &TopicReport) -> Check {
    let name = format!("doctor.{}", line.topic.to_lowercase().replace(' ', "_"));
    let said = match (line.state, line.remedy.as_str()) {
        (TopicState::NotApplicable, _) => format!("not applicable: {}", line.seen),
        (state, "") => format!("{}: {}", state.word(), line.seen),
        (state, remedy) => format!("{}: {} => {remedy}", state.word(), line.seen),
    };
    let useless = line.seen.is_empty() || (line.state == TopicState::Lacks && line.remedy.is_empty());
    let finding = match line.state {
        _ if useless => Finding::failed(format!("a line without use: {said}")),
        TopicState::Ok => Finding::passed(line.seen.clone()),
        _ => Finding::skipped(said),
    };
    finding.into_check(&name, 0)
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::super::{lacks, not_applicable, ok, unknown};
    use super::*;

    #[test]
    fn a_lack_is_reported_with_its_remedy_and_is_no_failure() {
        let parts = |line| {
            let check = check(&line);
            (check.name, check.outcome, check.reason)
        };
        assert_eq!(
            parts(ok("GID table", "2 entries")),
            ("doctor.gid_table".into(), Outcome::Passed, "2 entries".into())
        );
        assert_eq!(
            parts(lacks("MTU", "1500", "raise it")),
            ("doctor.mtu".into(), Outcome::Skipped, "lacks: 1500 => raise it".into())
        );
        assert_eq!(parts(not_applicable("GPU BAR1", "no GPU")).2, "not applicable: no GPU");
        assert_eq!(parts(unknown("memlock", "shut", "ulimit -l")).1, Outcome::Skipped);
    }

    #[test]
    fn a_line_without_use_is_a_failure() {
        for line in [lacks("MTU", "1500", ""), ok("MTU", "")] {
            assert_eq!(check(&line).outcome, Outcome::Failed, "{line:?}");
        }
    }
}
