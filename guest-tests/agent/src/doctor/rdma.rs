//! RDMA: devices, ports, GIDs, dma-bufs, and what may be locked.

use egm_address::ByteSize;

use super::live::Live;
use super::{Parts, TopicReport, TopicState, lacks, line, not_applicable, ok, unknown};
use crate::machine;
use crate::tree::Tree;

const CLASS: &str = "/sys/class/infiniband";
const NO_DEVICE: &str = "no RDMA device in /sys/class/infiniband";
/// Most GIDs of a port that are looked at.
const MOST_GIDS: usize = 512;

pub(super) fn lines(tree: &Tree, live: &Live, parts: &Parts) -> Vec<TopicReport> {
    let mut lines = vec![devices(tree, parts), verbs(tree, parts)];
    let names: Vec<&String> = parts.nics.iter().map(|(name, _)| name).collect();
    for name in &names {
        for port in tree.names(&format!("{CLASS}/{name}/ports")) {
            lines.push(self::port(tree, name, &port));
            lines.push(gids(tree, name, &port));
        }
        lines.push(mtu(tree, name));
    }
    if names.is_empty() {
        lines.extend(["RDMA port", "GID table", "MTU"].map(|topic| not_applicable(topic, NO_DEVICE)));
    }
    lines.push(dmabuf(live, parts));
    lines.push(memlock(tree, live, parts));
    lines
}

fn devices(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "RDMA devices";
    if parts.nics.is_empty() {
        return line(
            TOPIC,
            TopicState::NotApplicable,
            NO_DEVICE,
            "for RDMA give the guest a function of a NIC, and load its driver (mlx5_ib); over any network card: modprobe rdma_rxe, rdma link add rxe0 type rxe netdev eth0",
        );
    }
    let said = |(name, address): &(String, Option<String>)| {
        let driver = address.as_ref().and_then(|a| tree.link(&crate::tree::pci(a, "driver")));
        format!(
            "{name} ({}, {})",
            address.as_deref().unwrap_or("no PCI function"),
            driver.as_deref().unwrap_or("software")
        )
    };
    ok(TOPIC, parts.nics.iter().map(said).collect::<Vec<_>>().join(", "))
}

fn verbs(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "uverbs";
    let nodes: Vec<String> =
        tree.names("/dev/infiniband").into_iter().filter(|name| name.starts_with("uverbs")).collect();
    match (parts.nics.is_empty(), nodes.as_slice()) {
        (true, _) => not_applicable(TOPIC, NO_DEVICE),
        (false, []) => lacks(
            TOPIC,
            "no /dev/infiniband/uverbs*",
            "modprobe ib_uverbs; a container needs the device nodes",
        ),
        (false, nodes) => ok(TOPIC, format!("/dev/infiniband: {}", nodes.join(", "))),
    }
}

fn port(tree: &Tree, name: &str, port: &str) -> TopicReport {
    const TOPIC: &str = "RDMA port";
    let word = |file: &str| tree.word(&format!("{CLASS}/{name}/ports/{port}/{file}"));
    let state = word("state").unwrap_or_else(|| "unknown".to_owned());
    let seen = format!(
        "{name} port {port}: {state}, {}, {}",
        word("rate").unwrap_or_else(|| "rate unknown".to_owned()),
        word("link_layer").unwrap_or_else(|| "link unknown".to_owned())
    );
    if state.contains("ACTIVE") {
        ok(TOPIC, seen)
    } else {
        lacks(
            TOPIC,
            seen,
            "bring its network device up (`ip link set DEV up`), see cable and switch; InfiniBand needs a subnet manager",
        )
    }
}

fn gids(tree: &Tree, name: &str, port: &str) -> TopicReport {
    const TOPIC: &str = "GID table";
    let folder = format!("{CLASS}/{name}/ports/{port}");
    let is_set = |gid: &String| gid.bytes().any(|byte| byte != b'0' && byte != b':');
    let entry = |index: String| {
        let gid = tree.word(&format!("{folder}/gids/{index}")).filter(is_set)?;
        let kind = tree
            .word(&format!("{folder}/gid_attrs/types/{index}"))
            .unwrap_or_else(|| "type unknown".to_owned());
        Some((index.parse::<u32>().ok()?, gid, kind))
    };
    let mut set: Vec<(u32, String, String)> =
        tree.names(&format!("{folder}/gids")).into_iter().take(MOST_GIDS).filter_map(entry).collect();
    set.sort_unstable();
    // One that others on the network reach: RoCE v2 with an IPv4 address, or with one of IPv6 beyond the link.
    let best = set.iter().find(|(_, gid, kind)| kind.contains("v2") && !gid.starts_with("fe80"));
    match (best, set.first()) {
        (Some((index, gid, kind)), _) | (None, Some((index, gid, kind))) => {
            ok(TOPIC, format!("{name} port {port}: {} entries, {gid} ({kind}) at index {index}", set.len()))
        }
        (None, None) => lacks(
            TOPIC,
            format!("{name} port {port}: all entries are zero ({folder}/gids)"),
            "give its network device an address",
        ),
    }
}

fn mtu(tree: &Tree, name: &str) -> TopicReport {
    const TOPIC: &str = "MTU";
    let folder = format!("{CLASS}/{name}/device/net");
    let mut devices = tree.names(&folder);
    if let Some(parent) = tree.word(&format!("{CLASS}/{name}/parent")) {
        devices.push(parent); // of rxe: the network device that it is on
    }
    let mtu = |device: &String| {
        let path = if tree.exists(&format!("{folder}/{device}")) {
            format!("{folder}/{device}/mtu")
        } else {
            format!("/sys/class/net/{device}/mtu")
        };
        Some((device.clone(), tree.number(&path)?))
    };
    let mtus: Vec<(String, u64)> = devices.iter().filter_map(mtu).collect();
    let seen =
        mtus.iter().map(|(device, mtu)| format!("{name} on {device}: {mtu}")).collect::<Vec<_>>().join(", ");
    match mtus.iter().map(|(_, mtu)| *mtu).min() {
        None => unknown(
            TOPIC,
            format!("{name} has no network device in /sys"),
            "InfiniBand: ibv_devinfo prints active_mtu",
        ),
        // RoCE's packets of 4096 bytes and their headers.
        Some(mtu) if mtu < 4200 => lacks(
            TOPIC,
            seen,
            "RoCE cuts into packets of 1024 or 2048 bytes: `ip link set DEV mtu 9000`, on both ends and all switches",
        ),
        Some(_) => ok(TOPIC, seen),
    }
}

fn dmabuf(live: &Live, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "RDMA dma-buf";
    if parts.nics.is_empty() {
        return not_applicable(TOPIC, NO_DEVICE);
    }
    let devices = match &live.dmabuf {
        Err(why) => {
            return unknown(TOPIC, why.clone(), "build `cargo guest` and run it where libibverbs.so.1 is");
        }
        Ok(devices) => devices,
    };
    let word = |takes: &Result<bool, String>| match takes {
        Ok(true) => "takes them".to_owned(),
        Ok(false) => "does not".to_owned(),
        Err(why) => format!("does not say: {why}"),
    };
    let seen: Vec<String> = devices.iter().map(|(name, takes)| format!("{name} {}", word(takes))).collect();
    let seen = format!("ibv_reg_dmabuf_mr with descriptor -1: {}", seen.join(", "));
    if devices.is_empty() {
        unknown(
            TOPIC,
            "libibverbs finds no device that it can use",
            "the driver's part in user space comes with rdma-core (ibverbs-providers); modprobe ib_uverbs",
        )
    } else if devices.iter().all(|(_, takes)| *takes == Ok(true)) {
        ok(TOPIC, seen)
    } else if devices.iter().all(|(_, takes)| takes.is_err()) {
        unknown(TOPIC, seen, "see /dev/infiniband and the kernel's log; a container needs the device nodes")
    } else {
        lacks(
            TOPIC,
            seen,
            "GPU memory needs dma-bufs or nvidia-peermem: mlx5 has them from kernel 5.12 on, rdma_rxe has not; memory of the EGM node needs neither",
        )
    }
}

fn memlock(tree: &Tree, live: &Live, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "locked memory";
    const REMEDY: &str = "`ulimit -l unlimited`, or `* - memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK=infinity for a unit";
    if parts.nics.is_empty() {
        return not_applicable(TOPIC, format!("{NO_DEVICE} that would register memory"));
    }
    let limit = match &live.memlock {
        Err(why) => return unknown(TOPIC, why.clone(), "ulimit -l"),
        Ok(None) => return ok(TOPIC, "no limit (ulimit -l)"),
        Ok(Some(limit)) => *limit,
    };
    let bytes = ByteSize::new(limit);
    if machine::meminfo(tree, "MemTotal").is_some_and(|total| limit >= total) {
        ok(TOPIC, format!("{bytes}, all of memory (ulimit -l)"))
    } else if live.locks_all {
        let seen =
            format!("{bytes} (ulimit -l), which does not count for this user (CAP_IPC_LOCK), as for root");
        line(TOPIC, TopicState::NotApplicable, seen, &format!("for other users {REMEDY}"))
    } else {
        lacks(TOPIC, format!("{bytes} (ulimit -l), which registered memory counts against"), REMEDY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::recorded;

    const PORT: &str = "\
== /sys/class/infiniband/rxe0/parent
eth0
== /sys/class/net/eth0/mtu
1500
== /sys/class/infiniband/rxe0/ports/1/state
4: ACTIVE
== /sys/class/infiniband/rxe0/ports/1/rate
2.5 Gb/sec (1X SDR)
== /sys/class/infiniband/rxe0/ports/1/link_layer
Ethernet
== /sys/class/infiniband/rxe0/ports/1/gids/0
fe80:0000:0000:0000:5054:00ff:fe12:3456
== /sys/class/infiniband/rxe0/ports/1/gid_attrs/types/0
RoCE v2
== /sys/class/infiniband/rxe0/ports/1/gids/1
0000:0000:0000:0000:0000:ffff:c0a8:6402
== /sys/class/infiniband/rxe0/ports/1/gid_attrs/types/1
RoCE v2
== /sys/class/infiniband/rxe0/ports/1/gids/2
0000:0000:0000:0000:0000:0000:0000:0000
";

    #[test]
    fn a_software_device_has_its_port_gid_and_mtu() {
        let (_folder, tree) = recorded(PORT);
        let parts = Parts::of(&tree);
        assert_eq!(parts.nics, [("rxe0".to_owned(), None)]);
        let lines = lines(&tree, &Live::recorded(&tree), &parts);
        let line = |topic: &str| lines.iter().find(|line| line.topic == topic).unwrap();
        assert_eq!(line("RDMA port").seen, "rxe0 port 1: 4: ACTIVE, 2.5 Gb/sec (1X SDR), Ethernet");
        assert!(
            line("GID table")
                .seen
                .contains("2 entries, 0000:0000:0000:0000:0000:ffff:c0a8:6402 (RoCE v2) at index 1")
        );
        assert_eq!((line("MTU").state, line("MTU").seen.as_str()), (TopicState::Lacks, "rxe0 on eth0: 1500"));
        assert_eq!(line("uverbs").state, TopicState::Lacks);
    }

    #[test]
    fn a_port_that_is_down_and_an_empty_table_are_lacks() {
        let (_folder, tree) = recorded(
            "== /sys/class/infiniband/a/ports/1/state\n1: DOWN\n== /sys/class/infiniband/a/ports/1/gids/0\n0000:0000\n",
        );
        assert_eq!(
            (port(&tree, "a", "1").state, gids(&tree, "a", "1").state),
            (TopicState::Lacks, TopicState::Lacks)
        );
    }

    #[test]
    fn what_may_be_locked_is_held_against_all_memory_where_it_counts() {
        let (_folder, tree) = recorded("== /proc/meminfo\nMemTotal: 1024 kB\n");
        let with = Parts { gpus: Vec::new(), nics: vec![("rxe0".into(), None)] };
        let judged = |limit, locks_all, parts: &Parts| {
            let live = Live { memlock: Ok(limit), locks_all, ..Live::recorded(&tree) };
            memlock(&tree, &live, parts)
        };
        let states = [None, Some(1 << 20), Some(65536)].map(|limit| judged(limit, false, &with).state);
        assert_eq!(states, [TopicState::Ok, TopicState::Ok, TopicState::Lacks]);
        let root = judged(Some(65536), true, &with);
        assert!(root.state == TopicState::NotApplicable && root.seen.contains("CAP_IPC_LOCK"), "{root:?}");
        let none = judged(Some(65536), false, &Parts::default());
        assert!(none.state == TopicState::NotApplicable && none.seen.contains("no RDMA device"), "{none:?}");
    }

    #[test]
    fn a_device_that_takes_no_dma_buf_is_named() {
        let (_folder, tree) = recorded("");
        let parts = Parts { gpus: Vec::new(), nics: vec![("rxe0".into(), None)] };
        let live = |devices: &[super::super::live::Takes]| Live {
            dmabuf: Ok(devices.to_vec()),
            ..Live::recorded(&tree)
        };
        let of = |takes| dmabuf(&live(&[("rxe0".into(), takes)]), &parts);
        assert_eq!(of(Ok(true)).state, TopicState::Ok);
        let lacks = of(Ok(false));
        assert!(lacks.state == TopicState::Lacks && lacks.seen.contains("rxe0 does not"), "{lacks:?}");
        let unclear = of(Err("ibv_open_device: EACCES".into()));
        assert!(unclear.state == TopicState::Unknown && unclear.seen.contains("EACCES"), "{unclear:?}");
        assert_eq!(dmabuf(&live(&[]), &parts).state, TopicState::Unknown);
        let some = dmabuf(&live(&[("a".into(), Ok(true)), ("b".into(), Err("shut".into()))]), &parts);
        assert!(some.state == TopicState::Lacks && some.seen.contains("b does not say: shut"), "{some:?}");
    }
}
