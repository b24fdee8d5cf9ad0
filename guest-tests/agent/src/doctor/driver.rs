//! The GPU's driver: flavour, parameters, peer memory, and the attributes that CUDA reports.

use super::live::{ATTRIBUTES, Attributes, DMA_BUF, Live, Takes};
use super::{Parts, TopicReport, lacks, not_applicable, ok, unknown};
use crate::sysfs;
use crate::tree::Tree;

const MODULE: &str = "/sys/module/nvidia";
const VERSION: &str = "/proc/driver/nvidia/version";
const PARAMS: &str = "/proc/driver/nvidia/params";
const NO_GPU: &str = "no NVIDIA GPU among the PCI functions";
/// Parameters of the driver that matter here.
const INTERESTING: [&str; 6] = [
    "GrdmaPciTopoCheckOverride",
    "EnablePCIERelaxedOrderingMode",
    "EnableResizableBar",
    "CoherentGPUMemoryMode",
    "CreateImexChannel0",
    "EnableUserNUMAManagement",
];

pub(super) fn lines(tree: &Tree, live: &Live, parts: &Parts) -> Vec<TopicReport> {
    let mut lines =
        vec![driver(tree, parts), flavour(tree, parts), params(tree, parts), peer_memory(tree, live, parts)];
    lines.push(imex(tree, parts));
    lines.extend(attributes(live, parts));
    lines
}

fn driver(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "NVIDIA driver";
    let [first, ..] = parts.gpus.as_slice() else { return not_applicable(TOPIC, NO_GPU) };
    if let Some(text) = tree.text(VERSION) {
        let version = tree.word(&format!("{MODULE}/version")).unwrap_or_default();
        return ok(
            TOPIC,
            format!("{version} ({VERSION}: {})", text.lines().next().unwrap_or_default().trim()),
        );
    }
    let other = tree.link(&crate::tree::pci(first, "driver")).unwrap_or_else(|| "no driver".to_owned());
    lacks(
        TOPIC,
        format!("{first} has {other}, and there is no {VERSION}"),
        "install NVIDIA's open kernel modules and load `nvidia`",
    )
}

fn flavour(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "driver flavour";
    let Some(text) = tree.text(VERSION) else {
        return not_applicable(
            TOPIC,
            if parts.gpus.is_empty() { NO_GPU } else { "no NVIDIA driver is loaded" },
        );
    };
    if text.contains("Open Kernel Module") {
        ok(TOPIC, format!("open ({VERSION})"))
    } else {
        lacks(
            TOPIC,
            format!("proprietary ({VERSION})"),
            "dma-buf, EGM and coherent GPUs need the open modules (nvidia-open)",
        )
    }
}

fn params(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "driver parameters";
    let Some(text) = tree.text(PARAMS) else {
        return match parts.gpus.as_slice() {
            [] => not_applicable(TOPIC, NO_GPU),
            _ => unknown(TOPIC, format!("no {PARAMS}"), "load the driver, look as root"),
        };
    };
    let value = |key: &str| sysfs::field(&text, key).map(|value| format!("{key}={value}"));
    let seen: Vec<String> = INTERESTING.into_iter().filter_map(value).collect();
    let seen = format!(
        "{PARAMS}: {}",
        if seen.is_empty() { "none of interest".to_owned() } else { seen.join(", ") }
    );
    if sysfs::field(&text, "GrdmaPciTopoCheckOverride") == Some("2") {
        return lacks(
            TOPIC,
            seen,
            "GPUDirect RDMA is denied: take NVreg_GrdmaPciTopoCheckOverride=2 from modprobe's configuration",
        );
    }
    ok(TOPIC, seen)
}

/// Whether every GPU gives dma-bufs and every RDMA device takes them, those that did not answer among them. GPU memory
/// is then registered so, by NCCL too, and peer memory is not needed.
fn has_dma_buf_path(live: &Live, parts: &Parts) -> bool {
    let gives =
        |gpus: &Vec<Attributes>| gpus.iter().all(|(_, values)| values.get(&DMA_BUF).is_some_and(|v| *v != 0));
    let takes = |devices: &Vec<Takes>| devices.iter().all(|(_, takes)| *takes == Ok(true));
    live.cuda.as_ref().is_ok_and(|gpus| gpus.len() >= parts.gpus.len().max(1) && gives(gpus))
        && live
            .dmabuf
            .as_ref()
            .is_ok_and(|devices| devices.len() >= parts.nics.len().max(1) && takes(devices))
}

fn peer_memory(tree: &Tree, live: &Live, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "peer memory";
    const PEERS: &str = "/sys/kernel/mm/memory_peers";
    if parts.gpus.is_empty() {
        return not_applicable(TOPIC, NO_GPU);
    }
    if parts.nics.is_empty() {
        return not_applicable(TOPIC, "no RDMA device in /sys/class/infiniband that would reach GPU memory");
    }
    let version = |module: &str| {
        let folder = format!("/sys/module/{module}");
        tree.exists(&folder)
            .then(|| tree.word(&format!("{folder}/version")).unwrap_or_else(|| "loaded".to_owned()))
    };
    if let Some(old) = version("nv_peer_mem") {
        return lacks(
            TOPIC,
            format!("nv_peer_mem {old} (/sys/module/nv_peer_mem)"),
            "it takes the name that nvidia-peermem registers: unload it, then `modprobe nvidia-peermem`",
        );
    }
    let peers = tree.names(PEERS);
    let (seen, remedy) = match version("nvidia_peermem") {
        Some(version) if !peers.is_empty() => {
            let names = peers.join(", ");
            return ok(TOPIC, format!("nvidia-peermem {version}, registered as {names} ({PEERS})"));
        }
        Some(version) if tree.exists(PEERS) => (
            format!("nvidia-peermem {version}, but it has not registered itself in {PEERS}"),
            "it was built without MOFED's or DOCA-OFED's ib_core: install that first, then the driver's modules again",
        ),
        Some(version) => (
            format!("nvidia-peermem {version}, but ib_core has no {PEERS}"),
            "only MOFED and DOCA-OFED have peer memory; the kernel's own RDMA takes dma-bufs",
        ),
        None => (
            "nvidia_peermem is not loaded (/sys/module)".to_owned(),
            "none is needed where dma-buf works; otherwise `modprobe nvidia-peermem`, over MOFED or DOCA-OFED",
        ),
    };
    if has_dma_buf_path(live, parts) {
        let path = "not needed, because GPUs give dma-bufs and RDMA devices take them";
        return not_applicable(TOPIC, format!("{seen}: {path}"));
    }
    lacks(TOPIC, seen, remedy)
}

fn imex(tree: &Tree, parts: &Parts) -> TopicReport {
    const TOPIC: &str = "IMEX channel";
    const FOLDER: &str = "/dev/nvidia-caps-imex-channels";
    match (parts.gpus.as_slice(), tree.names(FOLDER).as_slice()) {
        ([], _) => not_applicable(TOPIC, NO_GPU),
        (_, []) => not_applicable(
            TOPIC,
            format!("no {FOLDER}: fabric handles, which several machines on one NVLink need, do not work"),
        ),
        (_, channels) => ok(TOPIC, format!("{} channels in {FOLDER}", channels.len())),
    }
}

fn attributes(live: &Live, parts: &Parts) -> Vec<TopicReport> {
    let gpus = match (&live.cuda, parts.gpus.as_slice()) {
        (_, []) => return vec![not_applicable("CUDA", NO_GPU)],
        (Err(why), _) => {
            return vec![unknown(
                "CUDA",
                why.clone(),
                "its attributes say what the driver can: run `cargo guest`'s program where libcuda.so.1 is",
            )];
        }
        (Ok(gpus), _) if gpus.is_empty() => {
            return vec![lacks(
                "CUDA",
                "libcuda sees no GPU",
                "look at CUDA_VISIBLE_DEVICES, /dev/nvidia0 and dmesg",
            )];
        }
        (Ok(gpus), _) => gpus,
    };
    let line = |(number, name, needed, remedy): &(i32, &str, bool, &str)| {
        let value = |(gpu, values): &(String, std::collections::BTreeMap<i32, i32>)| {
            let value = values.get(number).map_or_else(|| "not known".to_owned(), i32::to_string);
            format!("{gpu}: {value}")
        };
        let seen = format!("attribute {number}: {}", gpus.iter().map(value).collect::<Vec<_>>().join(", "));
        let topic = format!("CUDA {name}");
        match gpus.iter().map(|(_, values)| values.get(number)).min() {
            Some(Some(0)) if *needed => lacks(&topic, seen, remedy),
            Some(None) | None => {
                unknown(&topic, seen, "the driver does not know this attribute: a newer one does")
            }
            Some(Some(_)) => ok(&topic, seen),
        }
    };
    ATTRIBUTES.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::TopicState;
    use super::*;
    use crate::tree::tests::recorded;

    fn parts() -> Parts {
        Parts { gpus: vec!["0000:01:00.0".into()], nics: Vec::new() }
    }

    #[test]
    fn the_open_driver_is_distinguished_from_the_proprietary_one() {
        for (text, state) in [
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159", TopicState::Ok),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159", TopicState::Lacks),
        ] {
            let (_folder, tree) = recorded(&format!("== {VERSION}\n{text}\n"));
            assert_eq!(flavour(&tree, &parts()).state, state, "{text}");
            assert_eq!(driver(&tree, &parts()).state, TopicState::Ok);
        }
        let (_folder, tree) = recorded("");
        assert_eq!(
            (driver(&tree, &parts()).state, flavour(&tree, &parts()).state),
            (TopicState::Lacks, TopicState::NotApplicable)
        );
    }

    #[test]
    fn two_modules_for_one_name_are_in_each_others_way() {
        let judged = |record: &str| {
            let (_folder, tree) = recorded(record);
            let nics = vec![("mlx5_0".to_owned(), None)];
            peer_memory(&tree, &Live::recorded(&tree), &Parts { nics, ..parts() })
        };
        let ours = "== /sys/module/nvidia_peermem/version\n580.159\n";
        assert!(
            judged(&format!("{ours}== /sys/module/nv_peer_mem/version\n1.3\n")).remedy.contains("unload")
        );
        assert_eq!(
            judged(&format!("{ours}== /sys/kernel/mm/memory_peers/nv_mem/version\n1\n")).state,
            TopicState::Ok
        );
        assert!(judged(ours).seen.contains("no /sys/kernel/mm/memory_peers"));
        let (folder, tree) = recorded(ours);
        std::fs::create_dir_all(folder.path().join("sys/kernel/mm/memory_peers")).unwrap();
        let nics = vec![("mlx5_0".to_owned(), None)];
        let unregistered = peer_memory(&tree, &Live::recorded(&tree), &Parts { nics, ..parts() });
        assert!(unregistered.remedy.contains("built without"), "{unregistered:?}");
        assert!(judged("").remedy.contains("dma-buf"));
    }

    #[test]
    fn peer_memory_is_not_needed_where_gpus_give_dma_bufs_and_rdma_devices_take_them() {
        let judged = |record: &str, gives: &[i32], takes: &[Result<bool, String>]| {
            let (_folder, tree) = recorded(record);
            let gpu = |value: &i32| (String::new(), BTreeMap::from([(DMA_BUF, *value)]));
            let cuda = Ok(gives.iter().map(gpu).collect());
            let dmabuf = Ok(takes.iter().map(|takes| ("mlx5_0".to_owned(), takes.clone())).collect());
            let live = Live { cuda, dmabuf, ..Live::recorded(&tree) };
            peer_memory(&tree, &live, &Parts { nics: vec![("mlx5_0".to_owned(), None)], ..parts() })
        };
        let loaded = "== /sys/module/nvidia_peermem/version\n580.159\n";
        for record in ["", loaded] {
            let line = judged(record, &[1, 1], &[Ok(true)]);
            assert!(line.state == TopicState::NotApplicable && line.seen.contains("not needed"), "{line:?}");
            for (gives, takes) in [
                (&[1, 0][..], &[Ok(true)][..]),
                (&[1], &[Ok(true), Ok(false)]),
                (&[1], &[Err("shut".to_owned())]),
                (&[], &[Ok(true)]),
                (&[1], &[]),
            ] {
                let line = judged(record, gives, takes);
                assert!(
                    line.state == TopicState::Lacks && !line.remedy.is_empty(),
                    "{gives:?} {takes:?}: {line:?}"
                );
            }
        }
        // What is there stays there, and what is in the way stays in the way.
        let there = format!("{loaded}== /sys/kernel/mm/memory_peers/nv_mem/version\n1\n");
        assert_eq!(judged(&there, &[1], &[Ok(true)]).state, TopicState::Ok);
        let old = "== /sys/module/nv_peer_mem/version\n1.3\n";
        assert_eq!(judged(old, &[1], &[Ok(true)]).state, TopicState::Lacks);
    }

    #[test]
    fn peer_memory_may_be_needed_where_a_gpu_or_an_rdma_device_did_not_answer() {
        let judged = |gpus: usize, nics: usize| {
            let (_folder, tree) = recorded("");
            let cuda = Ok(vec![(String::new(), BTreeMap::from([(DMA_BUF, 1)]))]);
            let live = Live { cuda, dmabuf: Ok(vec![("mlx5_0".into(), Ok(true))]), ..Live::recorded(&tree) };
            let gpus = (1..=gpus).map(|bus| format!("0000:{bus:02x}:00.0")).collect();
            let nics = (0..nics).map(|index| (format!("mlx5_{index}"), None)).collect();
            peer_memory(&tree, &live, &Parts { gpus, nics }).state
        };
        assert_eq!(judged(1, 1), TopicState::NotApplicable);
        assert_eq!((judged(1, 2), judged(2, 1)), (TopicState::Lacks, TopicState::Lacks));
    }

    #[test]
    fn without_an_rdma_device_peer_memory_is_not_needed() {
        let (_folder, tree) = recorded("");
        let line = peer_memory(&tree, &Live::recorded(&tree), &parts());
        assert!(line.state == TopicState::NotApplicable && line.seen.contains("no RDMA device"), "{line:?}");
    }

    #[test]
    fn a_parameter_that_denies_rdma_is_a_lack() {
        let judged = |value: u8| {
            let (_folder, tree) =
                recorded(&format!("== {PARAMS}\nGrdmaPciTopoCheckOverride: {value}\nEnableMSI: 1\n"));
            params(&tree, &parts())
        };
        assert_eq!((judged(0).state, judged(2).state), (TopicState::Ok, TopicState::Lacks));
        assert!(judged(0).seen.ends_with("GrdmaPciTopoCheckOverride=0"), "{}", judged(0).seen);
    }

    #[test]
    fn an_attribute_that_one_gpu_has_not_is_a_lack() {
        let (_folder, tree) = recorded("");
        let mut live = Live::recorded(&tree);
        live.cuda = Ok(vec![
            ("a".into(), BTreeMap::from([(124, 1), (143, 0)])),
            ("b".into(), BTreeMap::from([(124, 0), (143, 0)])),
        ]);
        let lines = attributes(&live, &parts());
        let state =
            |number: &str| lines.iter().find(|line| line.seen.contains(number)).map(|line| line.state);
        assert_eq!(state("attribute 124: a: 1, b: 0"), Some(TopicState::Lacks));
        assert_eq!(
            (state("attribute 143"), state("attribute 110")),
            (Some(TopicState::Ok), Some(TopicState::Unknown))
        );
    }
}
