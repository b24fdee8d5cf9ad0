//! Claim: the kernel's log shows that it took the planned nodes from ACPI: each processor's, each range of memory's;
//! and sysfs shows which nodes have processors, memory, and a device that is to bring memory (a generic initiator).

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;

use egm_address::CpuSet;
use rustix::fs::OFlags;

use super::Context;
use crate::error::Broken;
use crate::expect::Plan;
use crate::finding::{Claim, Finding};
use crate::sysfs;

const LOG: &str = "/dev/kmsg";
/// A record is shorter (`PRINTKRB_RECORD_MAX`, with a line's prefix).
const RECORD: usize = 8 << 10;
/// More records than a kernel keeps.
const MOST_RECORDS: usize = 1 << 16;
const NODES: &str = "/sys/devices/system/node";

/// Message of a kernel that was built for fewer nodes (`CONFIG_NODES_SHIFT`) than the SRAT has; it keeps the first
/// ones. Debian's for arm64 keeps 16 at most.
const FULL: &str = "SRAT: Too many proximity domains";

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let plan = &kept(&context.plan)?;
    let mut claim = Claim::default();
    let log = log()?;
    for line in planned_lines(plan) {
        claim.holds(log.iter().any(|said| said.contains(&line)), || {
            format!("the kernel did not say {line:?}")
        });
    }
    for (file, planned) in planned_sets(plan) {
        let is = sysfs::list(format!("{NODES}/{file}"))?;
        claim.equal(format!("nodes of {file}"), &is.to_string(), &planned.to_string());
    }
    // The argument gives this kernel's maximum of nodes; without it there is room for all.
    let room = context.args.get("numa.room", context.plan.nodes.len())?;
    claim.equal("the number of nodes that the kernel keeps", &plan.nodes.len(), &room);
    let initiators = plan.nodes.iter().filter(|node| node.initiator.is_some()).count();
    claim.seen(format!("{} nodes by ACPI, {initiators} of them generic initiators", plan.nodes.len()));
    if plan.nodes.len() < context.plan.nodes.len() {
        claim.seen(format!("this kernel has no room for the {} of the plan", context.plan.nodes.len()));
    }
    Ok(claim.finish())
}

/// The plan with the nodes that the kernel has room for: all, unless its log reports too many.
pub(super) fn kept(plan: &Plan) -> Result<Cow<'_, Plan>, Broken> {
    let online = sysfs::list(format!("{NODES}/online"))?.len();
    if online >= plan.nodes.len() || !log()?.iter().any(|said| said.contains(FULL)) {
        return Ok(Cow::Borrowed(plan));
    }
    Ok(Cow::Owned(cut(plan, online)))
}

/// `plan` with the nodes that a kernel with `room` for so many finds first; a kernel's room is a power of two.
fn cut(plan: &Plan, room: usize) -> Plan {
    let meets = |id: u32| plan.linux_node(id).and_then(|number| usize::try_from(number).ok());
    let stays = |id: u32| !room.is_power_of_two() || meets(id).is_some_and(|number| number < room);
    let all: Vec<bool> = plan.nodes.iter().map(|node| stays(node.id)).collect();
    let kept = |index: usize| all.get(index).copied().unwrap_or(false);
    let mut cut = plan.clone();
    let rows = cut.distances.into_iter().enumerate().filter(|(row, _)| kept(*row));
    let columns = |row: Vec<u8>| {
        row.into_iter()
            .enumerate()
            .filter(|(column, _)| kept(*column))
            .map(|(_, distance)| distance)
            .collect()
    };
    cut.distances = rows.map(|(_, row)| columns(row)).collect();
    cut.nodes.retain(|node| stays(node.id));
    cut
}

/// Messages of the kernel's log so far.
fn log() -> Result<Vec<String>, Broken> {
    let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let mut file =
        File::options().read(true).custom_flags(nonblocking).open(LOG).map_err(Broken::file("open", LOG))?;
    let mut said = Vec::new();
    let mut record = vec![0; RECORD];
    for _ in 0..MOST_RECORDS {
        match file.read(&mut record) {
            Ok(size) => {
                let text = String::from_utf8_lossy(record.get(..size).unwrap_or_default());
                said.push(text.split_once(';').map_or(&*text, |(_, message)| message).to_owned());
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // A record that was overwritten meanwhile: the next one follows.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) => return Err(Broken::file("read", LOG)(error)),
        }
    }
    Ok(said)
}

/// Lines that Linux logs for each processor (on Arm) and each range of memory in the SRAT.
fn planned_lines(plan: &Plan) -> Vec<String> {
    let number = |id| plan.linux_node(id).unwrap_or(id);
    let arm = plan.arch == "aarch64";
    let processors = plan.vcpus.iter().filter(|_| arm).map(|vcpu| {
        let (node, id) = (number(vcpu.node), vcpu.hardware_id);
        format!("ACPI: NUMA: SRAT: PXM {} -> MPIDR {id:#x} -> Node {node}", vcpu.node)
    });
    let with_memory: BTreeSet<u32> = plan.memory.iter().map(|memory| memory.node).collect();
    let memory = with_memory.into_iter().map(|id| {
        let first = plan.memory.iter().find(|memory| memory.node == id);
        let start = first.map_or(0, |memory| memory.span.start().get());
        format!("SRAT: Node {} PXM {id} [mem {start:#010x}-", number(id))
    });
    processors.chain(memory).collect()
}

/// Files of sysfs and the nodes that they should list.
fn planned_sets(plan: &Plan) -> [(&'static str, CpuSet); 4] {
    let of = |has: &dyn Fn(&crate::expect::Node) -> bool| -> CpuSet {
        plan.nodes.iter().filter(|node| has(node)).filter_map(|node| plan.linux_node(node.id)).collect()
    };
    [
        ("online", of(&|_| true)),
        ("has_cpu", of(&|node| !node.cpus.is_empty())),
        ("has_memory", of(&|node| plan.memory.iter().any(|memory| memory.node == node.id))),
        ("has_generic_initiator", of(&|node| node.initiator.is_some())),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::tests::grace;

    #[test]
    fn each_processor_and_each_nodes_memory_has_its_line() {
        let lines = planned_lines(&grace());
        assert_eq!(lines.len(), 8 + 4);
        assert_eq!(lines[7], "ACPI: NUMA: SRAT: PXM 1 -> MPIDR 0x7 -> Node 1");
        assert_eq!(lines[8], "SRAT: Node 0 PXM 0 [mem 0x40000000-");
        assert!(lines[11].starts_with("SRAT: Node 35 PXM 35 [mem 0x"), "{lines:?}");
    }

    #[test]
    fn a_kernel_with_room_for_fewer_nodes_keeps_those_that_it_meets_first() {
        let cut = cut(&grace(), 16);
        assert!(cut.nodes.iter().map(|node| node.id).eq(0..16));
        assert!(cut.distances.len() == 16 && cut.distances.iter().all(|row| row.len() == 16));
        assert_eq!((cut.distances[2][9], cut.distances[2][10]), (11, 40));
        let [(_, online), .., (_, initiators)] = planned_sets(&cut);
        assert_eq!((online.to_string(), initiators.to_string()), ("0-15".into(), "2-15".into()));
        assert_eq!(super::cut(&grace(), 33).nodes.len(), 36, "no kernel has such a room");
    }

    #[test]
    fn nodes_of_gpus_are_initiators_without_memory() {
        let sets = planned_sets(&grace()).map(|(file, set)| (file, set.to_string()));
        let text = |set: &str| set.to_owned();
        assert_eq!(
            sets,
            [
                ("online", text("0-35")),
                ("has_cpu", text("0-1")),
                ("has_memory", text("0-1,34-35")),
                ("has_generic_initiator", text("2-33")),
            ]
        );
    }
}
