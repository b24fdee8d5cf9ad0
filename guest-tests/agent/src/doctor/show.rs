//! The lines of `egm-guest doctor` for a person: by group, with the topics of a missing device in one line.

use egm_guest::findings::{visible, wrapped};
use egm_report::show::{Screen, Style};

use super::{Device, Group, Parts, TopicReport, TopicState, not_applicable};

/// All groups, and the number of topics in each state.
pub(super) fn report(groups: &[Group], parts: &Parts, screen: Screen) -> String {
    let mut out = String::new();
    for Group { title, device, lines } in groups {
        out.push_str(&screen.paint(Style::Strong, title));
        out.push('\n');
        let lines = match device {
            Device::Gpu if parts.gpus.is_empty() => folded(lines, "GPU topics", "no NVIDIA GPU"),
            Device::Rdma if parts.nics.is_empty() => folded(lines, "RDMA topics", "no RDMA device"),
            _ => lines.clone(),
        };
        lines.iter().for_each(|line| out.push_str(&text(line, screen)));
        out.push('\n');
    }
    let all: Vec<&TopicReport> = groups.iter().flat_map(|group| &group.lines).collect();
    out + &sum(&all) + "\n"
}

/// The lines, with one line in place of those that apply to a missing device only.
fn folded(lines: &[TopicReport], topic: &str, missing: &str) -> Vec<TopicReport> {
    let is_idle = |line: &&TopicReport| line.state == TopicState::NotApplicable && line.remedy.is_empty();
    let idle = lines.iter().filter(is_idle).count();
    let mut kept: Vec<TopicReport> = lines.iter().filter(|line| !is_idle(line)).cloned().collect();
    kept.push(not_applicable(topic, format!("{missing}; not applicable: {idle} (--json lists them)")));
    kept
}

/// Column in which the observation begins.
const SEEN: usize = 32;

/// A line and its remedy; on a terminal in as many lines as it takes, with the state in colour.
pub(super) fn text(line: &TopicReport, screen: Screen) -> String {
    let word = line.state.word();
    let text = plain(line, screen.columns());
    let rest = text.strip_prefix(word).unwrap_or_default();
    format!("{}{rest}", screen.paint(line.state.style(), word))
}

/// The same without colour.
fn plain(line: &TopicReport, columns: Option<usize>) -> String {
    let (topic, seen, remedy) = (visible(&line.topic), visible(&line.seen), visible(&line.remedy));
    let mut text = format!("{:<8} {topic:<22} ", line.state.word());
    let fits = |text: &str, more: &str| {
        columns.is_none_or(|columns| text.chars().count() + more.chars().count() <= columns)
    };
    if fits(&text, &seen) {
        text.push_str(&seen);
        text.push('\n');
    } else {
        let below = wrapped(&seen, SEEN, columns.unwrap_or(usize::MAX));
        // Beside a topic that leaves room, below a longer one.
        match below.get(SEEN..) {
            Some(beside) if text.chars().count() <= SEEN => text.push_str(beside),
            _ => text = format!("{}\n{below}", text.trim_end()),
        }
    }
    if !remedy.is_empty() {
        text.push_str(&wrapped(&format!("=> {remedy}"), SEEN, columns.unwrap_or(usize::MAX)));
    }
    text
}

fn sum(lines: &[&TopicReport]) -> String {
    let count = |state| lines.iter().filter(|line| line.state == state).count();
    let (good, missing) = (count(TopicState::Ok), count(TopicState::Lacks));
    let (open, idle) = (count(TopicState::Unknown), count(TopicState::NotApplicable));
    format!("{good} ok, {missing} lacking, {open} unknown, {idle} not applicable")
}

#[cfg(test)]
mod tests {
    use super::super::{lacks, ok};
    use super::*;

    fn groups() -> [Group; 3] {
        let remedy =
            TopicReport { remedy: "load mlx5_ib".to_owned(), ..not_applicable("RDMA devices", "none") };
        let system = vec![ok("EGM", "node 1"), not_applicable("SMBIOS", "none")];
        let gpus = vec![not_applicable("CUDA", "no GPU"), not_applicable("ACS", "no GPU")];
        [
            Group { title: "System", device: Device::None, lines: system },
            Group { title: "GPUs and their paths to NICs", device: Device::Gpu, lines: gpus },
            Group { title: "RDMA", device: Device::Rdma, lines: vec![remedy, not_applicable("MTU", "none")] },
        ]
    }

    #[test]
    fn topics_of_missing_devices_are_one_line_and_count_in_the_sum() {
        assert_eq!(
            report(&groups(), &Parts::default(), Screen::FILE),
            "System\n\
             ok       EGM                    node 1\n\
             -        SMBIOS                 none\n\
             \n\
             GPUs and their paths to NICs\n\
             -        GPU topics             no NVIDIA GPU; not applicable: 2 (--json lists them)\n\
             \n\
             RDMA\n\
             -        RDMA devices           none\n\
             \u{20}                               => load mlx5_ib\n\
             -        RDMA topics            no RDMA device; not applicable: 1 (--json lists them)\n\
             \n\
             1 ok, 0 lacking, 0 unknown, 5 not applicable\n"
        );
    }

    #[test]
    fn with_its_device_every_topic_has_a_line() {
        let parts = Parts { gpus: vec!["0000:01:00.0".into()], nics: vec![("mlx5_0".into(), None)] };
        let text = report(&groups(), &parts, Screen::FILE);
        assert!(text.contains("CUDA  ") && text.contains("MTU  ") && !text.contains("topics"), "{text}");
    }

    #[test]
    fn a_terminal_gets_titles_and_states_in_colour() {
        let text = report(&groups(), &Parts::default(), Screen::coloured(80));
        assert!(text.starts_with("\u{1b}[1mSystem\u{1b}[0m\n\u{1b}[32mok\u{1b}[0m       EGM  "), "{text}");
    }

    #[test]
    fn on_a_terminal_a_line_is_as_wide_as_that() {
        let long = lacks(
            "CONFIG_INFINIBAND_ON_DEMAND_PAGING",
            "not set: RDMA without locked memory",
            "another kernel",
        );
        for line in
            [long, ok("EGM", "node 1, as the driver said when it was loaded some time ago, in its own words")]
        {
            let shown = text(&line, Screen::plain(60));
            assert!(shown.lines().all(|line| line.chars().count() <= 60), "{shown}");
            assert!(shown.contains(&line.topic) && text(&line, Screen::FILE).lines().count() <= 2, "{shown}");
        }
    }

    #[test]
    fn what_is_printed_has_no_control_characters() {
        let hostile = lacks("topic", "\u{1b}[2Jname\n", "do\u{202e}this");
        assert!(
            text(&hostile, Screen::FILE).chars().all(|c| c == '\n' || (!c.is_control() && c != '\u{202e}'))
        );
        assert_eq!(sum(&[&hostile]), "0 ok, 1 lacking, 0 unknown, 0 not applicable");
    }
}
