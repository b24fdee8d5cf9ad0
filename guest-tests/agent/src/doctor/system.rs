//! The machine: signs that it is virtual, its nodes and which is EGM, its kernel, and what that complained of.

use super::live::Live;
use super::{TopicReport, TopicState, lacks, line, not_applicable, ok, unknown};
use crate::kernel::{Config, PARTS, Part};
use crate::machine;
use crate::tree::{self, NODES, Tree};

/// Most messages that a line quotes.
const QUOTED: usize = 3;

pub(super) fn lines(tree: &Tree, live: &Live) -> Vec<TopicReport> {
    let mut lines = vec![hypervisor(tree), smbios(tree), nodes(tree), egm(tree, live), initiators(tree)];
    lines.extend(kernel(tree));
    lines.push(messages(live));
    lines
}

fn hypervisor(tree: &Tree) -> TopicReport {
    const TOPIC: &str = "hypervisor seen";
    let product = tree.word("/sys/class/dmi/id/sys_vendor").unwrap_or_default();
    let is_virtual =
        ["QEMU", "KVM", "Amazon EC2", "Google", "Xen", "VMware", "innotek", "Cloud Hypervisor", "egm-vmm"]
            .iter()
            .any(|name| product.contains(name));
    match (machine::cpu_flag(tree), machine::hypervisor(tree)) {
        (Some(true), _) => ok(TOPIC, "CPUID's hypervisor bit (/proc/cpuinfo)"),
        (Some(false), None) if is_virtual => lacks(
            TOPIC,
            format!("{product} (DMI), but CPUID hides it"),
            "NVIDIA's driver takes this for bare metal, and cliques do not count: let the VMM show the hypervisor (no kvm=off)",
        ),
        (_, Some(signs)) => ok(TOPIC, signs),
        (_, None) => not_applicable(TOPIC, "no sign of a virtual machine"),
    }
}

fn smbios(tree: &Tree) -> TopicReport {
    const TOPIC: &str = "SMBIOS virtual bit";
    const FILE: &str = "/sys/firmware/dmi/tables/DMI";
    let arm_needs = "on Arm the driver knows by it alone that this is a virtual machine";
    // Other processors have CPUID for that.
    let has_cpuid = machine::cpu_flag(tree).is_some();
    match machine::virtual_machine_bit(tree) {
        Some(true) => ok(TOPIC, format!("set ({FILE}, type 0, byte 0x13, bit 4)")),
        Some(false) if has_cpuid => {
            not_applicable(TOPIC, format!("clear ({FILE}); CPUID counts on this processor"))
        }
        Some(false) => lacks(
            TOPIC,
            format!("clear ({FILE})"),
            &format!("{arm_needs}: a VMM sets it; bare metal has it clear"),
        ),
        None if !tree.exists("/sys/firmware/dmi") && has_cpuid => {
            not_applicable(TOPIC, "no SMBIOS; CPUID counts on this processor")
        }
        None => unknown(TOPIC, format!("{FILE} cannot be read"), &format!("look as root; {arm_needs}")),
    }
}

fn nodes(tree: &Tree) -> TopicReport {
    const TOPIC: &str = "NUMA nodes";
    let nodes = machine::nodes(tree);
    if nodes.is_empty() {
        return lacks(TOPIC, format!("no {NODES}"), "a kernel with CONFIG_NUMA");
    }
    let said = |node: &egm_guest::findings::Node| {
        let cpus = if node.cpus.is_empty() {
            "no processors".to_owned()
        } else {
            format!("processors {}", node.cpus)
        };
        format!("{}: {} MiB, {cpus}", node.number, node.memory >> 20)
    };
    ok(TOPIC, nodes.iter().map(said).collect::<Vec<_>>().join("; "))
}

/// The address in the driver's message "EGM base PA: 0x…".
fn egm_base(message: &str) -> Option<u64> {
    let (_, rest) = message.split_once("EGM base PA")?;
    let (_, digits) = rest.split_once("0x")?;
    let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    u64::from_str_radix(digits.get(..end)?, 16).ok()
}

/// The node with the memory block at `address`.
fn node_at(tree: &Tree, address: u64) -> Option<u32> {
    let size = tree.word("/sys/devices/system/memory/block_size_bytes")?;
    let size = u64::from_str_radix(&size, 16).ok().filter(|size| *size > 0)?;
    let block = format!("memory{}", address / size);
    let online = tree.list(&format!("{NODES}/online"))?;
    online.iter().find(|node| tree.exists(&tree::node(*node, &block)))
}

fn egm(tree: &Tree, live: &Live) -> TopicReport {
    const TOPIC: &str = "EGM";
    const REMEDY: &str =
        "EGM comes from the VMM: a slice as a node, and egm-base-pa, egm-size and egm-pxm in _DSD of the GPU";
    if let Ok(log) = &live.log
        && let Some((message, base)) = log.iter().find_map(|message| Some((message, egm_base(message)?)))
    {
        return match node_at(tree, base) {
            Some(node) => ok(TOPIC, format!("node {node} (dmesg: {message})")),
            None => lacks(TOPIC, format!("no node has memory at {base:#x} (dmesg: {message})"), REMEDY),
        };
    }
    let only_memory: Vec<String> = machine::nodes(tree)
        .into_iter()
        .filter(|node| node.cpus.is_empty() && node.memory > 0)
        .map(|node| node.number.to_string())
        .collect();
    let log = live.log.as_ref().map_or_else(Clone::clone, |_| "dmesg has no \"EGM base PA\"".to_owned());
    match only_memory.as_slice() {
        [] => line(
            TOPIC,
            TopicState::NotApplicable,
            format!("no node has memory and no processors; {log}"),
            REMEDY,
        ),
        nodes => unknown(
            TOPIC,
            format!(
                "node {} has memory and no processors: EGM, CXL, or a GPU's own; {log}",
                nodes.join(", ")
            ),
            "the VMM's plan names it; NVIDIA's driver prints it on a Grace GPU",
        ),
    }
}

fn initiators(tree: &Tree) -> TopicReport {
    const TOPIC: &str = "generic initiators";
    let list = tree.list(&format!("{NODES}/has_generic_initiator")).unwrap_or_default();
    if list.is_empty() {
        return not_applicable(
            TOPIC,
            format!("no node in {NODES}/has_generic_initiator; a coherent GPU (Grace) needs eight"),
        );
    }
    ok(TOPIC, format!("nodes {list} ({NODES}/has_generic_initiator)"))
}

fn kernel(tree: &Tree) -> Vec<TopicReport> {
    let Some(config) = Config::of(tree) else {
        return vec![unknown(
            "kernel options",
            "neither /proc/config.gz nor /boot/config-RELEASE can be read",
            "look at the distribution's package of the kernel",
        )];
    };
    let path = &config.path;
    let line = |Part { option, what }: &Part| match config.value(option) {
        Some(value) => ok(option, format!("{value} ({path}): {what}")),
        None => lacks(
            option,
            format!("not set ({path}): {what}"),
            "another kernel, where this is needed; plain memory registration and nvidia.ko do without",
        ),
    };
    PARTS.iter().map(line).collect()
}

fn messages(live: &Live) -> TopicReport {
    const TOPIC: &str = "GPU errors in dmesg";
    let log = match &live.log {
        Err(why) => return unknown(TOPIC, why.clone(), "look as root, or set kernel.dmesg_restrict=0"),
        Ok(log) => log,
    };
    let is_error = |message: &&String| {
        let lower = message.to_ascii_lowercase();
        message.contains("NVRM: Xid")
            || message.contains("NVRM:")
                && ["error", "fail", "fallen off"].iter().any(|word| lower.contains(word))
    };
    let errors: Vec<&String> = log.iter().filter(is_error).collect();
    if errors.is_empty() {
        return ok(TOPIC, format!("none in {} messages", log.len()));
    }
    let last: Vec<&str> = errors.iter().rev().take(QUOTED).map(|message| message.as_str()).collect();
    lacks(
        TOPIC,
        format!("{}, the last: {}", errors.len(), last.join(" | ")),
        "NVIDIA's list of Xid errors explains each; report one that comes back after a reset to the operator of the host",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::recorded;

    const EGM: &str = "\
== /sys/devices/system/node/online
0-1
== /sys/devices/system/node/node0/cpulist
0-3
== /sys/devices/system/node/node1/meminfo
Node 1 MemTotal: 4096 kB
== /sys/devices/system/node/node1/memory32/state
online
== /sys/devices/system/memory/block_size_bytes
8000000
";

    fn live(log: &[&str]) -> Live {
        let (_folder, tree) = recorded("");
        Live { log: Ok(log.iter().map(|line| (*line).to_owned()).collect()), ..Live::recorded(&tree) }
    }

    #[test]
    fn the_drivers_word_on_egm_names_its_node() {
        let (_folder, tree) = recorded(EGM);
        let seen = egm(&tree, &live(&["NVRM: EGM base PA: 0x100000000, size: 0x1"]));
        assert_eq!((seen.state, &seen.seen[..6]), (TopicState::Ok, "node 1"));
        assert_eq!(egm(&tree, &live(&["EGM base PA 0x900000000"])).state, TopicState::Lacks);
        let quiet = egm(&tree, &live(&[]));
        assert!(
            quiet.state == TopicState::Unknown && quiet.seen.contains("node 1 has memory and no processors"),
            "{quiet:?}"
        );
        assert_eq!(egm_base("EGM base PA 0xzz"), None);
    }

    #[test]
    fn a_hidden_hypervisor_is_a_lack_and_bare_metal_is_none() {
        let judged = |record: &str| {
            let (_folder, tree) = recorded(record);
            hypervisor(&tree).state
        };
        assert_eq!(judged("== /proc/cpuinfo\nflags : fpu hypervisor\n"), TopicState::Ok);
        assert_eq!(
            judged("== /proc/cpuinfo\nflags : fpu\n== /sys/class/dmi/id/sys_vendor\nQEMU\n"),
            TopicState::Lacks
        );
        assert_eq!(
            judged("== /proc/cpuinfo\nflags : fpu\n== /sys/class/dmi/id/sys_vendor\nDell Inc.\n"),
            TopicState::NotApplicable
        );
    }

    #[test]
    fn the_bit_of_smbios_counts_where_there_is_no_cpuid() {
        let judged = |processor: &str, characteristics: u8| {
            // BIOS information (type 0), 0x18 bytes and two zeros; the bit is in byte 0x13.
            let mut table = [0_u8; 0x1a];
            (table[1], table[0x13]) = (0x18, characteristics);
            let hex: String = table.iter().map(|byte| format!("{byte:02x}")).collect();
            let (_folder, tree) =
                recorded(&format!("== /proc/cpuinfo\n{processor}\n## /sys/firmware/dmi/tables/DMI\n{hex}\n"));
            smbios(&tree)
        };
        let (arm, x86) = ("Features : fp asimd", "flags : fpu");
        assert_eq!((judged(arm, 0x10).state, judged(x86, 0x10).state), (TopicState::Ok, TopicState::Ok));
        let clear = judged(arm, 0x08);
        assert!(clear.state == TopicState::Lacks && clear.remedy.contains("a VMM sets it"), "{clear:?}");
        assert_eq!(judged(x86, 0x08).state, TopicState::NotApplicable);
        let (_folder, nothing) = recorded("== /proc/cpuinfo\nFeatures : fp\n");
        assert_eq!(smbios(&nothing).state, TopicState::Unknown);
    }

    #[test]
    fn nodes_are_listed_with_what_each_has() {
        let (_folder, tree) = recorded(EGM);
        let line = nodes(&tree);
        assert_eq!(line.state, TopicState::Ok);
        assert_eq!(line.seen, "0: 0 MiB, processors 0-3; 1: 4 MiB, no processors");
        let (_folder, nothing) = recorded("");
        assert_eq!(nodes(&nothing).state, TopicState::Lacks);
    }

    #[test]
    fn an_option_that_is_not_set_is_a_lack_and_no_configuration_is_unknown() {
        let release = "== /proc/sys/kernel/osrelease\n6.12\n";
        let text = "CONFIG_HMM_MIRROR=y\n# CONFIG_DEVICE_PRIVATE is not set\nCONFIG_ZONE_DEVICE=y\n";
        let (_folder, tree) = recorded(&format!("{release}== /boot/config-6.12\n{text}"));
        let states: Vec<TopicState> = kernel(&tree).iter().map(|line| line.state).collect();
        assert_eq!(
            states,
            [TopicState::Lacks, TopicState::Lacks, TopicState::Ok, TopicState::Lacks, TopicState::Ok]
        );
        let (_folder, without) = recorded(release);
        assert_eq!(kernel(&without)[0].state, TopicState::Unknown);
    }

    #[test]
    fn xids_are_counted_and_the_last_is_quoted() {
        let line = messages(&live(&[
            "NVRM: Xid (PCI:0000:01:00): 79, fallen off",
            "usb 1-1: error",
            "NVRM: loading",
        ]));
        assert!(
            line.state == TopicState::Lacks && line.seen.starts_with("1, the last: NVRM: Xid"),
            "{line:?}"
        );
        assert_eq!(messages(&live(&["NVRM: loading"])).state, TopicState::Ok);
    }
}
