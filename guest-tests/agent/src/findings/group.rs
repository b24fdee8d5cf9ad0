//! Groups of validations: their titles, and the verdicts of a run by group.

use crate::findings::{Outcome, Run, Verdict};

/// First word of the names in a group, and the group's title, in the order of reports.
const TITLES: [(&str, &str); 9] = [
    ("memory", "Memory"),
    ("numa", "NUMA"),
    ("pci", "PCI Express"),
    ("cuda", "CUDA"),
    ("p2p", "GPU peer-to-peer"),
    ("rdma", "RDMA"),
    ("gdr", "GPUDirect"),
    ("nvshmem", "NVSHMEM"),
    ("odp", "On-demand paging"),
];
/// Title of verdicts on the run itself, such as `required` and `baseline.least`.
const OTHERS: &str = "This run";

/// Title of the group that a validation is in.
pub fn group_title(validation: &str) -> &'static str {
    let word = validation.split('.').next().unwrap_or_default();
    TITLES.iter().find(|(group, _)| *group == word).map_or(OTHERS, |(_, title)| *title)
}

/// The verdicts of one group.
#[derive(Debug)]
pub struct Group<'a> {
    /// Title of the group, as [`group_title`] returns it.
    pub title: &'static str,
    /// Its verdicts, in the order in which they ran.
    pub verdicts: Vec<&'a Verdict>,
}

impl Group<'_> {
    /// Number of verdicts with this outcome.
    pub(crate) fn count(&self, outcome: Outcome) -> usize {
        self.verdicts.iter().filter(|verdict| verdict.outcome == outcome).count()
    }

    /// Whether a validation failed or ended with an error.
    pub(crate) fn is_bad(&self) -> bool {
        self.count(Outcome::Failed) + self.count(Outcome::Error) > 0
    }
}

/// The groups of a run that have a verdict, in the order of reports.
pub fn groups(run: &Run) -> Vec<Group<'_>> {
    let titles = TITLES.iter().map(|(_, title)| *title).chain([OTHERS]);
    let verdicts = |title| run.verdicts.iter().filter(|v| group_title(&v.name) == title).collect();
    titles
        .map(|title| Group { title, verdicts: verdicts(title) })
        .filter(|group| !group.verdicts.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::run::tests::run;

    #[test]
    fn every_verdict_is_in_one_group_and_groups_have_the_order_of_reports() {
        let mut mixed = run();
        mixed.verdicts.reverse();
        mixed.verdicts[0].name = "baseline.least".into();
        let groups = groups(&mixed);
        let titles: Vec<_> = groups.iter().map(|group| group.title).collect();
        assert_eq!(titles, ["Memory", "NUMA", "CUDA", "This run"]);
        assert_eq!(groups.iter().map(|group| group.verdicts.len()).sum::<usize>(), mixed.verdicts.len());
        let bad: Vec<_> = groups.iter().map(Group::is_bad).collect();
        assert_eq!(bad, [false, true, false, true]);
    }
}
