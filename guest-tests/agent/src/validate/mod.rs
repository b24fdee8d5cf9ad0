//! `egm-guest validate`: does this machine do what CUDA and RDMA need of it, and how fast. No plan is needed, so it
//! runs in any guest and on bare metal.
//!
//! A validation is a claim with a name, `group.what`; each runs in a process of its own ([`process`]), because a
//! vendor's library may end the process that it is loaded into. One file a group.

mod cli;
mod cuda;
mod gdr;
mod memory;
mod numa;
mod nvshmem;
mod odp;
mod p2p;
pub(crate) mod pci;
mod process;
mod progress;
mod rdma;
mod report;
mod required;
mod select;
mod show;

pub(crate) use cli::{Options, main};
pub(crate) use process::{Given, part_in_this_process, validation_in_this_process};
pub(crate) use report::{Again, again, read_run};

use egm_guest::findings::Check;

use crate::cmdline::Arguments;
use crate::error::Broken;
use crate::finding::Finding;

/// A claim and what decides it.
#[derive(Debug)]
pub(crate) struct Validation {
    /// Name, the group first, such as `memory.pattern`.
    pub(crate) name: &'static str,
    /// The claim, in one line.
    pub(crate) claim: &'static str,
    pub(crate) run: fn(&Setting) -> Result<Finding, Broken>,
}

/// Input of a validation.
#[derive(Debug)]
pub(crate) struct Setting {
    /// For whatever is random; of this validation alone, derived from the run's (`--seed`).
    pub(crate) seed: u64,
    /// The largest size, in bytes (`--size`).
    pub(crate) most: u64,
    /// `--arg KEY=VALUE`; `deadline` is the seconds that the validation may take.
    pub(crate) args: Arguments,
}

/// A process that a validation starts beside itself: the other end of something. `egm-guest part NAME WORD…` runs it.
#[derive(Debug)]
pub(crate) struct Part {
    /// Name, the group first, such as `nvshmem.pe`.
    pub(crate) name: &'static str,
    /// Its work, with the words as arguments; its standard output has any form.
    pub(crate) run: fn(&[String]) -> Result<(), Broken>,
}

/// Validations of one subject.
struct Group {
    /// First part of their names.
    name: &'static str,
    /// In the order in which they run.
    validations: &'static [Validation],
    /// Names of those that need only what the group as a whole needs. The group is required by them (`--require`): the
    /// others also need a second machine, a setting or a feature that a good machine may lack.
    core: &'static [&'static str],
}

/// The groups, in the order in which they run.
static GROUPS: &[Group] = &[
    Group {
        name: "memory",
        validations: memory::ALL,
        core: &["memory.pattern", "memory.bandwidth", "memory.latency"],
    },
    Group { name: "numa", validations: numa::ALL, core: &["numa.placement", "numa.distances"] },
    Group { name: "pci", validations: pci::ALL, core: &["pci.bars"] },
    Group {
        name: "cuda",
        validations: cuda::ALL,
        core: &["cuda.attributes", "cuda.device.bytes", "cuda.host_numa.bytes", "cuda.pinned.bytes"],
    },
    Group { name: "p2p", validations: p2p::ALL, core: &["p2p.access", "p2p.bytes"] },
    Group { name: "rdma", validations: rdma::ALL, core: &["rdma.device", "rdma.memory", "rdma.nodes"] },
    Group { name: "gdr", validations: gdr::ALL, core: &["gdr.bandwidth", "gdr.latency"] },
    Group {
        name: "nvshmem",
        validations: nvshmem::ALL,
        core: &["nvshmem.start", "nvshmem.put", "nvshmem.get"],
    },
    Group { name: "odp", validations: odp::ALL, core: &["odp.explicit"] },
];

/// The parts of all groups.
static PARTS: &[&[Part]] = &[cuda::PARTS, p2p::PARTS, rdma::PARTS, nvshmem::PARTS];

/// Runs what `words` select for [`crate::init`]: each result, without its figures, goes to `each`; how many there were. With the
/// argument `json` the run's document, which has the figures, is printed too, in one line.
pub(crate) fn on_console(words: &[String], args: &Arguments, mut each: impl FnMut(&Check)) -> usize {
    let names: Vec<&str> = all().map(|validation| validation.name).collect();
    let chosen =
        if words.is_empty() { Ok(Vec::new()) } else { select::select("egm.validate", &names, words) };
    let (most, seed) = (args.get("size", 1u64 << 20), args.get("seed", 1u64));
    let (chosen, most, seed) = match (chosen, most, seed) {
        (Ok(chosen), Ok(most), Ok(seed)) => (chosen, most, seed),
        (Err(wrong), ..) => {
            each(&Finding::error(wrong).into_check("validate", 0));
            return 1;
        }
        (_, Err(wrong), _) | (_, _, Err(wrong)) => {
            each(&Finding::from(wrong).into_check("validate", 0));
            return 1;
        }
    };
    let mut verdicts = Vec::new();
    for validation in chosen.iter().filter_map(|name| find(name)) {
        let name = validation.name.to_owned();
        let given = Given { name, seed, most, args: args.pairs().collect() };
        let verdict = process::run(validation, &given, &mut |_| {});
        verdicts.push(verdict.clone());
        each(&Check {
            name: verdict.name,
            outcome: verdict.outcome,
            value: verdict.value,
            unit: verdict.unit,
            reason: verdict.reason,
            millis: verdict.millis,
        });
    }
    if args.text("json").is_some() {
        let given = Given { name: String::new(), seed, most, args: args.pairs().collect() };
        println!("{}", cli::document(&given, verdicts).to_line());
    }
    chosen.len()
}

/// All validations, in order.
fn all() -> impl Iterator<Item = &'static Validation> {
    GROUPS.iter().flat_map(|group| group.validations)
}

/// The core of the group called `name`.
fn core(name: &str) -> Option<&'static [&'static str]> {
    GROUPS.iter().find(|group| group.name == name).map(|group| group.core)
}

/// The validation called `name`.
fn find(name: &str) -> Option<&'static Validation> {
    all().find(|validation| validation.name == name)
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::group_title;

    use super::*;

    #[test]
    fn every_group_has_a_title_of_its_own() {
        let titles: Vec<_> = GROUPS.iter().map(|group| group_title(&format!("{}.x", group.name))).collect();
        let of_others = group_title("required");
        for (number, title) in titles.iter().enumerate() {
            assert!(*title != of_others && !titles[..number].contains(title), "{title} in {titles:?}");
        }
    }

    #[test]
    fn a_name_is_of_its_group_and_there_once() {
        for group in GROUPS {
            for validation in group.validations {
                let what = validation.name.strip_prefix(group.name).and_then(|rest| rest.strip_prefix('.'));
                assert!(what.is_some_and(|what| !what.is_empty()), "{} in {}", validation.name, group.name);
                assert!(std::ptr::eq(find(validation.name).unwrap(), validation), "{}", validation.name);
            }
        }
    }

    /// A user requires a group by its row in the page.
    #[test]
    fn a_core_is_of_its_group_and_in_the_page() {
        let page = include_str!("../../../../docs/validation.md");
        for group in GROUPS {
            assert!(!group.core.is_empty(), "{}", group.name);
            let is_its_own =
                |name: &&str| group.validations.iter().any(|validation| validation.name == *name);
            assert!(group.core.iter().all(is_its_own), "{:?}", group.core);
            let names: Vec<_> = group.core.iter().map(|name| format!("`{name}`")).collect();
            let row = format!("| `{}` | {} |", group.name, names.join(", "));
            assert!(page.lines().any(|line| line == row), "docs/validation.md has no row {row}");
        }
    }
}
