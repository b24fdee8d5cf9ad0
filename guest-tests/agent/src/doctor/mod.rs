//! `egm-guest doctor`: what this machine has and lacks for GPUDirect and EGM, a line each, with the remedy.
//!
//! The judgements are pure: files of a [`Tree`] and what was [`Live`] go in, lines come out. So a recorded machine can be
//! looked at anywhere (`--root`), and a machine without GPU or network card has lines, not errors.

mod console;
mod driver;
mod live;
mod path;
mod rdma;
mod show;
mod system;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use egm_report::show::{Screen, Style};
use serde::Serialize;

use crate::output;
use crate::tree::{self, NVIDIA, Tree};

pub(crate) use console::on_console;
use live::Live;
pub(crate) use live::{Probe, probe_in_this_process};

/// Arguments of `egm-guest doctor`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print JSON instead of lines.
    #[arg(long)]
    json: bool,
    /// Folder with the files of a recorded machine to examine; libraries and limits are then unknown.
    #[arg(long, value_name = "FOLDER")]
    root: Option<PathBuf>,
}

/// State of one topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum TopicState {
    /// There, and as it should be.
    Ok,
    /// Missing, or in the way.
    Lacks,
    /// Not to be seen from here.
    Unknown,
    /// Nothing here needs it.
    NotApplicable,
}

impl TopicState {
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Lacks => "lacks",
            Self::Unknown => "unknown",
            Self::NotApplicable => "-",
        }
    }

    const fn style(self) -> Style {
        match self {
            Self::Ok => Style::Green,
            Self::Lacks => Style::Yellow,
            Self::Unknown => Style::Cyan,
            Self::NotApplicable => Style::Faint,
        }
    }
}

/// A topic with its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct TopicReport {
    topic: String,
    state: TopicState,
    /// Observation, with its source.
    seen: String,
    /// Remedy; empty when nothing is to be done.
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
}

fn line(topic: &str, state: TopicState, seen: impl Into<String>, remedy: &str) -> TopicReport {
    TopicReport { topic: topic.to_owned(), state, seen: seen.into(), remedy: remedy.to_owned() }
}

fn ok(topic: &str, seen: impl Into<String>) -> TopicReport {
    line(topic, TopicState::Ok, seen, "")
}

fn lacks(topic: &str, seen: impl Into<String>, remedy: &str) -> TopicReport {
    line(topic, TopicState::Lacks, seen, remedy)
}

fn unknown(topic: &str, seen: impl Into<String>, remedy: &str) -> TopicReport {
    line(topic, TopicState::Unknown, seen, remedy)
}

fn not_applicable(topic: &str, seen: impl Into<String>) -> TopicReport {
    line(topic, TopicState::NotApplicable, seen, "")
}

/// Prints the lines. What a machine lacks is no failure of this program.
pub(crate) fn main(options: &Options) -> ExitCode {
    let (tree, live) = match &options.root {
        None => (Tree::live(), Live::look()),
        Some(root) if root.is_dir() => {
            let tree = Tree::at(root);
            let live = Live::recorded(&tree);
            (tree, live)
        }
        Some(root) => return output::misused(&format!("--root {} is no folder", root.display()).into()),
    };
    output::printed(&if options.json {
        serde_json::to_string_pretty(&examine(&tree, &live)).unwrap_or_default() + "\n"
    } else {
        let parts = Parts::of(&tree);
        show::report(&groups(&tree, &live, &parts), &parts, Screen::of_stdout())
    })
}

/// Device that the topics of a group are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Device {
    None,
    Gpu,
    Rdma,
}

/// Topics that belong together.
#[derive(Debug)]
struct Group {
    title: &'static str,
    device: Device,
    lines: Vec<TopicReport>,
}

/// All lines, by group.
fn groups(tree: &Tree, live: &Live, parts: &Parts) -> [Group; 3] {
    let mut gpus = driver::lines(tree, live, parts);
    gpus.extend(path::lines(tree, parts));
    [
        Group { title: "System", device: Device::None, lines: system::lines(tree, live) },
        Group { title: "GPUs and their paths to NICs", device: Device::Gpu, lines: gpus },
        Group { title: "RDMA", device: Device::Rdma, lines: rdma::lines(tree, live, parts) },
    ]
}

fn examine(tree: &Tree, live: &Live) -> Vec<TopicReport> {
    groups(tree, live, &Parts::of(tree)).into_iter().flat_map(|group| group.lines).collect()
}

/// The functions that GPUDirect is about.
#[derive(Debug, Default, PartialEq, Eq)]
struct Parts {
    /// PCI addresses of NVIDIA's GPUs.
    gpus: Vec<String>,
    /// RDMA devices, and the PCI address of each that has one.
    nics: Vec<(String, Option<String>)>,
}

impl Parts {
    fn of(tree: &Tree) -> Self {
        let is_gpu = |function: &String| {
            tree.is_of(function, NVIDIA) && tree.class(function).is_some_and(tree::is_display)
        };
        let address = |device: &str| tree.link(&format!("/sys/class/infiniband/{device}/device"));
        let is_pci = |name: &String| tree.exists(&tree::pci(name, ""));
        let nic = |device: String| (device.clone(), address(&device).filter(is_pci));
        Self {
            gpus: tree.functions().into_iter().filter(is_gpu).collect(),
            nics: tree.names("/sys/class/infiniband").into_iter().map(nic).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::recorded;

    /// The state of a topic's line.
    #[track_caller]
    pub(super) fn find<'a>(lines: &'a [TopicReport], topic: &str) -> &'a TopicReport {
        lines.iter().find(|line| line.topic == topic).unwrap_or_else(|| panic!("no {topic} in {lines:#?}"))
    }

    /// What is missing or cannot be seen comes with what to do about it.
    fn needs_remedy(line: &TopicReport) -> bool {
        matches!(line.state, TopicState::Lacks | TopicState::Unknown)
    }

    /// The topics of a machine with nothing, each of which is also of one with something.
    const TOPICS: [&str; 26] = [
        "hypervisor seen",
        "SMBIOS virtual bit",
        "NUMA nodes",
        "EGM",
        "generic initiators",
        "kernel options",
        "GPU errors in dmesg",
        "NVIDIA driver",
        "driver flavour",
        "driver parameters",
        "peer memory",
        "IMEX channel",
        "CUDA",
        "GPU-NIC distance",
        "PCIe links",
        "GPU BAR1",
        "P2P clique",
        "relaxed ordering",
        "ATS",
        "ACS",
        "RDMA devices",
        "uverbs",
        "GID table",
        "MTU",
        "RDMA dma-buf",
        "locked memory",
    ];

    #[test]
    fn a_machine_without_anything_has_lines_and_no_line_without_words() {
        let (_folder, tree) = recorded("");
        let lines = examine(&tree, &Live::recorded(&tree));
        for line in &lines {
            assert!(!line.seen.is_empty(), "{line:?}");
            assert!(!needs_remedy(line) || !line.remedy.is_empty(), "{line:?}");
        }
        // What doctor is to look at: none of it goes away unnoticed.
        for topic in TOPICS {
            find(&lines, topic);
        }
        for topic in ["NVIDIA driver", "GPU BAR1", "P2P clique", "GPU-NIC distance"] {
            assert_eq!(find(&lines, topic).state, TopicState::NotApplicable, "{topic}");
        }
    }

    /// Files of a machine with a GPU and a network card.
    const FILES: [&str; 24] = [
        "proc/cpuinfo",
        "proc/config.gz",
        "proc/driver/nvidia/params",
        "proc/driver/nvidia/version",
        "proc/sys/kernel/osrelease",
        "sys/bus/pci/devices/0000:01:00.0/class",
        "sys/bus/pci/devices/0000:01:00.0/config",
        "sys/bus/pci/devices/0000:01:00.0/current_link_speed",
        "sys/bus/pci/devices/0000:01:00.0/numa_node",
        "sys/bus/pci/devices/0000:01:00.0/resource",
        "sys/bus/pci/devices/0000:01:00.0/vendor",
        "sys/class/dmi/id/sys_vendor",
        "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0",
        "sys/class/infiniband/mlx5_0/ports/1/gids/0",
        "sys/class/infiniband/mlx5_0/ports/1/state",
        "sys/devices/system/memory/block_size_bytes",
        "sys/devices/system/node/has_generic_initiator",
        "sys/devices/system/node/node0/cpulist",
        "sys/devices/system/node/node0/meminfo",
        "sys/devices/system/node/online",
        "sys/firmware/dmi/tables/DMI",
        "sys/kernel/mm/memory_peers/nv_mem/version",
        "sys/module/nvidia/version",
        "var/log/dmesg",
    ];

    /// Writes a file; `class` and `vendor` are always those of a GPU of NVIDIA, or the lines about it are never reached.
    fn written(folder: &std::path::Path, file: &str, bytes: &[u8]) {
        let path = folder.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let bytes: &[u8] = match file.rsplit_once('/') {
            Some((_, "class")) => b"0x030200",
            Some((_, "vendor")) => b"0x10de",
            _ => bytes,
        };
        std::fs::write(path, bytes).unwrap();
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(16))]
        #[test]
        fn rubbish_in_every_file_gives_lines_without_control_characters(
            rubbish in proptest::collection::vec(proptest::collection::vec(proptest::num::u8::ANY, 0..300), FILES.len()),
        ) {
            let folder = tempfile::tempdir().unwrap();
            FILES.iter().zip(&rubbish).for_each(|(file, bytes)| written(folder.path(), file, bytes));
            let tree = Tree::at(folder.path());
            for line in examine(&tree, &Live::recorded(&tree)) {
                proptest::prop_assert!(!line.seen.is_empty());
                proptest::prop_assert!(!needs_remedy(&line) || !line.remedy.is_empty(), "{:?}", line);
                for screen in [Screen::FILE, Screen::plain(40)] {
                    proptest::prop_assert!(show::text(&line, screen).chars().all(|c| c == '\n' || !c.is_control()));
                }
            }
        }
    }
}
