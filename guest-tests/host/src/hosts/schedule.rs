//! Emulated hosts side by side: which scenarios share one, and when each of them runs.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::engine::scenario::{GraceKernel, Scenario};
use crate::engine::shard::Shard;

/// Fewest scenarios for which a group gets one more host: a boot takes as long as one of them.
const LEAST: usize = 4;

/// Scenarios of one emulated host: a Grace one with this kernel, or a PC.
pub(super) struct Group {
    pub(super) scenarios: Vec<Scenario>,
    pub(super) on_grace: Option<GraceKernel>,
}

impl Group {
    /// Longest time that its scenarios may take.
    fn duration(&self) -> Duration {
        self.scenarios.iter().map(|scenario| scenario.deadline).sum()
    }

    /// The same scenarios in up to `most` groups of about the same duration; each keeps their order.
    fn split(self, most: usize) -> Vec<Self> {
        let count = most.min(self.scenarios.len() / LEAST).max(1);
        let part =
            |shard: Shard| Self { scenarios: shard.of(self.scenarios.clone()), on_grace: self.on_grace };
        Shard::all(count).map(part).collect()
    }
}

/// `scenarios` by host, for `jobs` hosts at a time; what takes longest comes first. One machine cannot have GPUs of other
/// processes and an SMMUv3, nor two kernels. RDMA on a Grace host has a machine of its own: no other scenario needs its
/// parts.
pub(super) fn groups(scenarios: &[Scenario], jobs: usize) -> Vec<Group> {
    let group = |on_grace, belongs: &dyn Fn(&Scenario) -> bool| Group {
        scenarios: scenarios.iter().copied().filter(|scenario| belongs(scenario)).collect(),
        on_grace,
    };
    let mut groups = vec![
        group(None, &|s| !s.grace && !s.needs_own_kernel()),
        group(None, &|s| !s.grace && s.needs_own_kernel()),
    ];
    for kernel in [GraceKernel::Debian, GraceKernel::Debian16k, GraceKernel::Own, GraceKernel::LargePages] {
        for (plugged, rdma) in [(false, false), (false, true), (true, false), (true, true)] {
            groups.push(group(Some(kernel), &|s| {
                s.grace && (s.grace_kernel, s.plugged, s.rdma) == (kernel, plugged, rdma)
            }));
        }
    }
    let mut groups: Vec<_> = groups
        .into_iter()
        .filter(|group| !group.scenarios.is_empty())
        .flat_map(|group| group.split(jobs))
        .collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.duration()));
    groups
}

/// Calls `run` for each of `groups` and its number, `jobs` at a time, in order. The results have no order.
pub(super) fn run_each<R: Send>(
    groups: Vec<Group>,
    jobs: usize,
    run: impl Fn(usize, Group) -> R + Sync,
) -> Vec<R> {
    let waiting = Mutex::new(groups.into_iter().enumerate());
    let results = Mutex::new(Vec::new());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((number, group)) = next() {
            let result = run(number, group);
            results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
        }
    };
    std::thread::scope(|scope| (0..jobs.max(1)).for_each(|_| drop(scope.spawn(work))));
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::scenarios::ALL;

    #[test]
    fn each_scenario_is_in_one_group_with_the_host_that_it_needs() {
        for jobs in [1, 2, 16] {
            let groups = groups(ALL, jobs);
            let mut grouped: Vec<_> =
                groups.iter().flat_map(|group| &group.scenarios).map(|s| s.name).collect();
            let mut all: Vec<_> = ALL.iter().map(|s| s.name).collect();
            grouped.sort_unstable();
            all.sort_unstable();
            assert_eq!(grouped, all);
            for Group { scenarios, on_grace } in &groups {
                for scenario in scenarios {
                    assert_eq!(
                        scenario.grace.then_some(scenario.grace_kernel),
                        *on_grace,
                        "{}",
                        scenario.name
                    );
                    let is_alike = scenario.needs_own_kernel() == scenarios[0].needs_own_kernel();
                    assert!(scenario.grace || is_alike, "{}", scenario.name);
                }
            }
        }
    }

    #[test]
    fn a_large_group_is_split_evenly_and_a_small_one_is_not() {
        let group = |count| Group { scenarios: ALL[..count].to_vec(), on_grace: None };
        let halves = group(16).split(2);
        let [one, other] = &halves[..] else { panic!("{} groups", halves.len()) };
        let longest = ALL[..16].iter().map(|s| s.deadline).max().unwrap();
        assert!(one.duration().abs_diff(other.duration()) <= longest);
        assert_eq!(group(LEAST * 2 - 1).split(2).len(), 1);
        assert_eq!(group(16).split(0).len(), 1);
    }

    #[test]
    fn no_more_hosts_run_at_a_time_than_requested_and_every_group_runs() {
        for jobs in [1, 2, 3] {
            let groups = groups(ALL, jobs);
            let (running, count) = (AtomicUsize::new(0), groups.len());
            let mut numbers = run_each(groups, jobs, |number, _| {
                let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                assert!(now <= jobs, "{now} of {jobs}");
                std::thread::yield_now();
                running.fetch_sub(1, Ordering::SeqCst);
                number
            });
            numbers.sort_unstable();
            assert_eq!(numbers, (0..count).collect::<Vec<_>>());
        }
    }
}
