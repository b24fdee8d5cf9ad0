//! The way between GPUs and network cards: distance, link, ATS and ACS, BAR1, relaxed ordering, and the clique.

use egm_address::ByteSize;

use super::{Parts, TopicReport, TopicState, lacks, line, not_applicable, ok, unknown};
use crate::config_space::{self, PCI_EXPRESS, capability, extended};
use crate::tree::{self, Tree};
use crate::validate::pci::{link, memory_bars};

/// Ids of extended capabilities: ACS and ATS (PCI Express 6.0, 7.7.11 and 10.5.1).
const ACS: u16 = 0x000d;
const ATS: u16 = 0x000f;
/// A BAR1 below this reaches a part of any GPU's memory.
const SMALL_BAR1: u64 = 512 << 20;
const NO_GPU: &str = "no NVIDIA GPU among the PCI functions";

pub(super) fn lines(tree: &Tree, parts: &Parts) -> Vec<TopicReport> {
    let mut lines = distances(tree, parts);
    lines.push(links(tree, parts));
    lines.push(bar1(tree, parts));
    lines.push(clique(tree, parts));
    lines.push(relaxed_ordering(tree, parts));
    lines.push(ats(tree, parts));
    lines.push(acs(tree, parts));
    lines
}

/// Distance of two functions, in NCCL's and nvidia-smi's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Distance {
    Pix,
    Pxb,
    Phb,
    Node,
    Sys,
}

impl Distance {
    const fn word(self) -> &'static str {
        match self {
            Self::Pix => "PIX (one switch)",
            Self::Pxb => "PXB (several switches)",
            Self::Phb => "PHB (the host bridge)",
            Self::Node => "NODE (host bridges of one NUMA node)",
            Self::Sys => "SYS (NUMA nodes)",
        }
    }
}

/// The names of a function's path from its host bridge on: `pci0000:00`, ports, itself.
fn path(tree: &Tree, function: &str) -> Option<Vec<String>> {
    let names = tree.real(&tree::pci(function, ""))?;
    let bridge = names.iter().position(|name| name.starts_with("pci") && name.contains(':'))?;
    Some(names.get(bridge..)?.to_vec())
}

fn distance(tree: &Tree, one: &str, other: &str) -> Option<Distance> {
    let (a, b) = (path(tree, one)?, path(tree, other)?);
    let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
    // The rest of each path: ports below the last one in common, and the function itself.
    let (left, right) = (a.len() - common, b.len() - common);
    Some(match common {
        0 if tree.node_of(one).is_some() && tree.node_of(one) == tree.node_of(other) => Distance::Node,
        0 => Distance::Sys,
        1 => Distance::Phb,
        _ if left <= 2 && right <= 2 => Distance::Pix,
        _ => Distance::Pxb,
    })
}

fn distances(tree: &Tree, parts: &Parts) -> Vec<TopicReport> {
    const TOPIC: &str = "GPU-NIC distance";
    let nics: Vec<(&str, &str)> =
        parts.nics.iter().filter_map(|(name, address)| Some((name.as_str(), address.as_deref()?))).collect();
    if parts.gpus.is_empty() || nics.is_empty() {
        let seen = format!("{} GPUs, {} RDMA devices with a PCI function", parts.gpus.len(), nics.len());
        return vec![not_applicable(TOPIC, seen)];
    }
    let pairs = parts.gpus.iter().flat_map(|gpu| nics.iter().map(move |nic| (gpu, *nic)));
    let line = |(gpu, (name, nic)): (&String, (&str, &str))| match distance(tree, gpu, nic) {
        None => unknown(TOPIC, format!("{gpu} and {name}: no path in /sys/bus/pci/devices"), "look at /sys"),
        Some(distance) => {
            let seen = format!("{gpu} and {name} ({nic}): {}", distance.word());
            if distance <= Distance::Pxb {
                return ok(TOPIC, seen);
            }
            lacks(
                TOPIC,
                seen,
                "NCCL uses GPUDirect RDMA up to PXB: let the VMM show the host's switch, give NCCL_TOPO_FILE (`egm-vmm plan --nccl`), or set NCCL_NET_GDR_LEVEL=SYS",
            )
        }
    };
    pairs.map(line).collect()
}

/// All functions that this is about.
fn functions(parts: &Parts) -> Vec<&String> {
    parts.gpus.iter().chain(parts.nics.iter().filter_map(|(_, address)| address.as_ref())).collect()
}

fn links(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "PCIe links";
    let functions = functions(parts);
    if functions.is_empty() {
        return not_applicable(TOPIC, "neither GPUs nor RDMA devices");
    }
    let (mut seen, mut slow) = (Vec::new(), false);
    for function in functions {
        match link(tree, function) {
            None => seen.push(format!("{function} does not say")),
            Some(link) => {
                slow |= link.speed < link.max_speed || link.width < link.max_width;
                seen.push(format!(
                    "{function} {} GT/s x{} of {} GT/s x{}",
                    link.speed, link.width, link.max_speed, link.max_width
                ));
            }
        }
    }
    if slow {
        return lacks(
            TOPIC,
            seen.join("; "),
            "look again under load (an idle GPU lowers its speed), then at the slot, its bifurcation and the riser",
        );
    }
    ok(TOPIC, seen.join("; "))
}

fn bar1(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "GPU BAR1";
    if parts.gpus.is_empty() {
        return not_applicable(TOPIC, NO_GPU);
    }
    let largest = |gpu: &String| {
        let bars = memory_bars(tree, gpu).into_iter().filter(|bar| bar.is_prefetchable());
        (gpu.clone(), bars.max_by_key(|bar| bar.size))
    };
    let bars: Vec<_> = parts.gpus.iter().map(largest).collect();
    let said = |(gpu, bar): &(String, Option<crate::validate::pci::Bar>)| match bar {
        Some(bar) => format!("{gpu} BAR {} {} at {:#x}", bar.index, ByteSize::new(bar.size), bar.start),
        None => format!("{gpu} has no prefetchable BAR"),
    };
    let seen = bars.iter().map(said).collect::<Vec<_>>().join("; ");
    match bars.iter().map(|(_, bar)| bar.map_or(0, |bar| bar.size)).min() {
        Some(size) if size >= SMALL_BAR1 => ok(TOPIC, seen),
        _ => lacks(
            TOPIC,
            seen,
            "GPUDirect RDMA reaches what is in BAR1: let the VMM show the largest size, with a window for it; NVreg_EnableResizableBar=1",
        ),
    }
}

fn clique(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "P2P clique";
    const REMEDY: &str = "GPUs that reach each other over PCIe need one number in the VMM's configuration: egm-vmm \"clique\", QEMU x-nv-gpudirect-clique, cloud-hypervisor x_nv_gpudirect_clique; NVLink needs none";
    match parts.gpus.as_slice() {
        [] => return not_applicable(TOPIC, NO_GPU),
        [gpu] => return not_applicable(TOPIC, format!("{gpu} is the only GPU: it has no peer")),
        _ => {}
    }
    if crate::machine::hypervisor(tree).is_none() {
        return not_applicable(TOPIC, "no sign of a virtual machine, and it counts only there");
    }
    let clique = |gpu: &String| {
        let config = tree.bytes(&tree::pci(gpu, "config")).unwrap_or_default();
        (gpu.clone(), config.len(), config_space::clique(&config))
    };
    let cliques: Vec<(String, usize, Option<u8>)> = parts.gpus.iter().map(clique).collect();
    let said = |(gpu, _, clique): &(String, usize, Option<u8>)| {
        format!("{gpu}: {}", clique.map_or_else(|| "none".to_owned(), |clique| clique.to_string()))
    };
    let seen = cliques.iter().map(said).collect::<Vec<_>>().join(", ");
    let announced = cliques.iter().filter(|(_, _, clique)| clique.is_some()).count();
    if cliques.iter().any(|(_, size, clique)| clique.is_none() && *size < 256) {
        return unknown(TOPIC, format!("{seen}; configuration space cannot be read"), "look as root");
    }
    match announced {
        0 => line(
            TOPIC,
            TopicState::NotApplicable,
            format!(
                "not announced in the configuration space of any of {} GPUs: that matters only between those that do not \
                 reach each other otherwise (`egm-guest validate --select p2p` tries it)",
                cliques.len()
            ),
            REMEDY,
        ),
        all if all == cliques.len() => ok(TOPIC, seen),
        _ => lacks(TOPIC, seen, REMEDY),
    }
}

fn relaxed_ordering(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "relaxed ordering";
    const ENABLE: u8 = 1 << 4; // of Device Control, at 8 (PCI Express 6.0, 7.5.3.4)
    let functions = functions(parts);
    if functions.is_empty() {
        return not_applicable(TOPIC, "neither GPUs nor RDMA devices");
    }
    let enabled = |function: &&String| {
        let config = tree.bytes(&tree::pci(function, "config"))?;
        let at = capability(&config, PCI_EXPRESS)?;
        config.get(at + 8).map(|control| control & ENABLE != 0)
    };
    let states: Vec<(&&String, Option<bool>)> = functions.iter().map(|f| (f, enabled(f))).collect();
    let word = |state: &Option<bool>| match state {
        Some(true) => "on",
        Some(false) => "off",
        None => "cannot be read",
    };
    let seen = states.iter().map(|(f, state)| format!("{f} {}", word(state))).collect::<Vec<_>>().join(", ");
    if states.iter().any(|(_, state)| *state == Some(false)) {
        return lacks(
            TOPIC,
            seen,
            "Device Control bit 4: the VMM or `setpci -s FUNCTION CAP_EXP+8.w=10:10` on the host; IBV_ACCESS_RELAXED_ORDERING needs it",
        );
    }
    if states.iter().any(|(_, state)| state.is_none()) {
        unknown(TOPIC, seen, "look as root")
    } else {
        ok(TOPIC, seen)
    }
}

fn ats(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "ATS";
    let nics: Vec<&String> = parts.nics.iter().filter_map(|(_, address)| address.as_ref()).collect();
    if parts.gpus.is_empty() || nics.is_empty() {
        return not_applicable(TOPIC, "no pair of GPU and RDMA device");
    }
    let (mut seen, mut off, mut unread) = (Vec::new(), false, false);
    for nic in nics {
        let config = tree.bytes(&tree::pci(nic, "config")).unwrap_or_default();
        let control = extended(&config, ATS).and_then(|at| config.get(at + 7)); // the enable bit is 15 of the word at 6
        seen.push(match control {
            _ if config.len() < 4096 => {
                unread = true;
                format!("{nic} shows {} bytes of configuration space", config.len())
            }
            None => format!("{nic} has none"),
            Some(control) if control & 0x80 != 0 => format!("{nic} on"),
            Some(_) => {
                off = true;
                format!("{nic} off")
            }
        });
    }
    let seen = seen.join(", ");
    if off {
        return lacks(
            TOPIC,
            seen,
            "without ATS, requests of a virtualized NIC to the GPU go through the root complex: `mlxconfig -d DEVICE set ATS_ENABLED=true` and a reboot, on the host",
        );
    }
    if unread {
        unknown(TOPIC, seen, "look as root; extended capabilities need PCI Express in the guest")
    } else {
        ok(TOPIC, seen)
    }
}

/// The ports above functions that redirect requests between peers to the root complex.
fn acs(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "ACS";
    const REDIRECTS: u8 = 1 << 2 | 1 << 3; // RR and CR of the control word at 6 (PCI Express 6.0, 7.7.11.3)
    let mut ports: Vec<String> = functions(parts)
        .into_iter()
        .filter_map(|function| path(tree, function))
        .flat_map(|path| path.into_iter().skip(1).rev().skip(1))
        .collect();
    ports.sort_unstable();
    ports.dedup();
    if ports.is_empty() {
        return not_applicable(TOPIC, "no ports above GPUs and RDMA devices");
    }
    let (mut redirecting, mut read) = (Vec::new(), 0);
    for port in &ports {
        let config = tree.bytes(&tree::pci(port, "config")).unwrap_or_default();
        read += usize::from(config.len() >= 4096);
        let control = extended(&config, ACS).and_then(|at| config.get(at + 6));
        if control.is_some_and(|control| control & REDIRECTS != 0) {
            redirecting.push(port.clone());
        }
    }
    if read < ports.len() {
        return unknown(
            TOPIC,
            format!("{read} of {} ports show all of configuration space", ports.len()),
            "look as root",
        );
    }
    if redirecting.is_empty() {
        return ok(TOPIC, format!("none of {} ports redirects requests between peers", ports.len()));
    }
    lacks(
        TOPIC,
        format!("{} send requests between peers to the root complex", redirecting.join(", ")),
        "in a guest the host's ports decide; on bare metal pci=config_acs= or pci=disable_acs_redir= for these ports, or ATS at the NIC",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::recorded;

    const GPU: &str = "0000:03:00.0";
    const NIC: &str = "0000:04:00.0";

    fn parts() -> Parts {
        Parts { gpus: vec![GPU.into()], nics: vec![("mlx5_0".into(), Some(NIC.into()))] }
    }

    /// A tree with both functions at these paths below `/sys/devices`.
    fn at(gpu: &str, nic: &str, more: &str) -> (tempfile::TempDir, Tree) {
        let mut text = more.to_owned();
        for (function, path) in [(GPU, gpu), (NIC, nic)] {
            text.push_str(&format!("== /sys/devices/{path}/{function}/numa_node\n1\n"));
            text.push_str(&format!(
                "-> /sys/bus/pci/devices/{function} ../../../devices/{path}/{function}\n"
            ));
        }
        recorded(&text)
    }

    #[test]
    fn distances_are_nccls() {
        let root = "pci0000:00/0000:00:01.0";
        let far = "pci0000:80/0000:80:01.0";
        for (gpu, nic, word) in [
            (format!("{root}/0000:01:00.0/0000:02:00.0"), format!("{root}/0000:01:00.0/0000:02:01.0"), "PIX"),
            (format!("{root}/0000:01:00.0"), format!("{root}/0000:01:00.0/0000:02:01.0/0000:05:00.0"), "PXB"),
            (root.to_owned(), "pci0000:00/0000:00:02.0".to_owned(), "PHB"),
            (root.to_owned(), far.to_owned(), "NODE"),
        ] {
            let (_folder, tree) = at(&gpu, &nic, "");
            let line = &distances(&tree, &parts())[0];
            assert!(line.seen.contains(word), "{}", line.seen);
            assert_eq!(line.state == TopicState::Ok, word.starts_with("PI") || word == "PXB");
        }
    }

    /// The clique's line for GPUs of a guest, each with or without a capability.
    fn judged(gpus: &[(&str, bool)]) -> TopicReport {
        let mut text = "== /proc/cpuinfo\nflags : hypervisor\n".to_owned();
        for (gpu, clique) in gpus {
            let mut config = vec![0u8; 256];
            config[0x34] = 0xc8;
            let first = if *clique { b'P' } else { 0 };
            config[0xc8..0xd0].copy_from_slice(&[
                config_space::VENDOR_SPECIFIC,
                0,
                8,
                first,
                b'2',
                b'P',
                0,
                0,
            ]);
            let hex: String = config.iter().map(|byte| format!("{byte:02x}")).collect();
            text.push_str(&format!("## /sys/bus/pci/devices/{gpu}/config\n{hex}\n"));
        }
        let (_folder, tree) = recorded(&text);
        let gpus = gpus.iter().map(|(gpu, _)| (*gpu).to_owned()).collect();
        clique(&tree, &Parts { gpus, nics: Vec::new() })
    }

    #[test]
    fn two_gpus_of_a_guest_have_a_clique_both_or_neither() {
        assert_eq!(judged(&[(GPU, true), (NIC, true)]).state, TopicState::Ok);
        assert_eq!(judged(&[(GPU, true), (NIC, false)]).state, TopicState::Lacks);
        let neither = judged(&[(GPU, false), (NIC, false)]);
        assert_eq!(neither.state, TopicState::NotApplicable, "they may have NVLink: {}", neither.seen);
        assert!(neither.seen.contains("not announced") && !neither.remedy.is_empty(), "{neither:?}");
    }

    #[test]
    fn one_gpu_needs_no_clique_whatever_can_be_read_of_it() {
        assert_eq!(judged(&[(GPU, false)]).state, TopicState::NotApplicable);
        let (_folder, tree) = recorded("== /proc/cpuinfo\nflags : hypervisor\n");
        let alone = clique(&tree, &Parts { gpus: vec![GPU.into()], nics: Vec::new() });
        assert!(alone.state == TopicState::NotApplicable && alone.seen.contains("no peer"), "{alone:?}");
    }

    #[test]
    fn a_small_bar1_and_ordering_that_is_off_are_lacks() {
        let mut config = vec![0u8; 256];
        config[0x34] = 0x40;
        config[0x40] = PCI_EXPRESS;
        let hex: String = config.iter().map(|byte| format!("{byte:02x}")).collect();
        let (_folder, tree) = recorded(&format!(
            "== /sys/bus/pci/devices/{GPU}/resource\n0x0 0x0 0x0\n0x1000000000 0x100fffffff 0x14220c\n\
             ## /sys/bus/pci/devices/{GPU}/config\n{hex}\n"
        ));
        let gpu = Parts { gpus: vec![GPU.into()], nics: Vec::new() };
        let small = bar1(&tree, &gpu);
        assert_eq!(
            (small.state, small.seen.as_str()),
            (TopicState::Lacks, "0000:03:00.0 BAR 1 256MiB at 0x1000000000")
        );
        assert_eq!(relaxed_ordering(&tree, &gpu).state, TopicState::Lacks);
    }

    #[test]
    fn ats_and_acs_are_read_from_extended_capabilities() {
        let space = |id: u16, at: usize, byte: u8| {
            let mut config = vec![0u8; 4096];
            config[0x100..0x104].copy_from_slice(&(u32::from(id) | 1 << 16).to_le_bytes());
            config[0x100 + at] = byte;
            config.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let judged = |ats_control: u8, acs_control: u8| {
            let port = "pci0000:00/0000:00:01.0";
            let more = format!(
                "## /sys/devices/{port}/{NIC}/config\n{}\n## /sys/devices/{port}/config\n{}\n\
                 -> /sys/bus/pci/devices/0000:00:01.0 ../../../devices/{port}\n",
                space(ATS, 7, ats_control),
                space(ACS, 6, acs_control)
            );
            let (_folder, tree) = at(port, port, &more);
            (ats(&tree, &parts()).state, acs(&tree, &parts()).state)
        };
        assert_eq!(judged(0x80, 0x00), (TopicState::Ok, TopicState::Ok));
        assert_eq!(judged(0x00, 0x1d), (TopicState::Lacks, TopicState::Lacks));
    }
}
