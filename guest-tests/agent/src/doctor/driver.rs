//! The GPU's driver: flavour, parameters, peer memory, and what CUDA says that it can.

use super::live::Live;
use super::{Line, Parts, lacks, not_applicable, ok, unknown};
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

/// CUDA's attributes: number, name, whether 0 is a lack, and the remedy.
pub(super) const ATTRIBUTES: [(i32, &str, bool, &str); 10] = [
    (
        110,
        "GPUDirect RDMA with VMM",
        true,
        "needs the open modules (515 and later) and a GPU that is no vGPU",
    ),
    (116, "GPUDirect RDMA", true, "needs a data-centre or professional GPU; in a guest a whole function"),
    (117, "flush options", false, ""),
    (118, "writes ordering", false, ""),
    (
        124,
        "dma-buf",
        true,
        "needs the open modules, a kernel from 5.12 on with CONFIG_DMA_SHARED_BUFFER, CUDA from 11.7 on",
    ),
    (128, "fabric handles", false, ""),
    (134, "host NUMA node", false, ""),
    (141, "HOST_NUMA memory", true, "needs a newer driver; EGM is allocated by it"),
    (142, "HOST_NUMA pools", true, "needs a newer driver"),
    (143, "HOST_NUMA over nodes", false, ""),
];

pub(super) fn lines(tree: &Tree, live: &Live, parts: &Parts) -> Vec<Line> {
    let mut lines =
        vec![driver(tree, parts), flavour(tree, parts), params(tree, parts), peer_memory(tree, parts)];
    lines.push(imex(tree, parts));
    lines.extend(attributes(live, parts));
    lines
}

fn driver(tree: &Tree, parts: &Parts) -> Line {
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

fn flavour(tree: &Tree, parts: &Parts) -> Line {
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

fn params(tree: &Tree, parts: &Parts) -> Line {
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

fn peer_memory(tree: &Tree, parts: &Parts) -> Line {
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
    let (ours, old) = (version("nvidia_peermem"), version("nv_peer_mem"));
    let peers = tree.names(PEERS);
    match (ours, old) {
        (_, Some(old)) => lacks(
            TOPIC,
            format!("nv_peer_mem {old} (/sys/module/nv_peer_mem)"),
            "it takes the name that nvidia-peermem registers: unload it, then `modprobe nvidia-peermem`",
        ),
        (Some(version), None) if !peers.is_empty() => {
            ok(TOPIC, format!("nvidia-peermem {version}, registered as {} ({PEERS})", peers.join(", ")))
        }
        (Some(version), None) => lacks(
            TOPIC,
            format!("nvidia-peermem {version}, but ib_core has no {PEERS}"),
            "only MOFED and DOCA-OFED have peer memory; the kernel's own RDMA takes dma-bufs",
        ),
        (None, None) => lacks(
            TOPIC,
            "nvidia_peermem is not loaded (/sys/module)",
            "none is needed where dma-buf works; otherwise `modprobe nvidia-peermem`, over MOFED or DOCA-OFED",
        ),
    }
}

fn imex(tree: &Tree, parts: &Parts) -> Line {
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

fn attributes(live: &Live, parts: &Parts) -> Vec<Line> {
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

    use super::super::State;
    use super::*;
    use crate::tree::tests::recorded;

    fn parts() -> Parts {
        Parts { gpus: vec!["0000:01:00.0".into()], nics: Vec::new() }
    }

    #[test]
    fn the_open_driver_is_told_from_the_proprietary_one() {
        for (text, state) in [
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159", State::Ok),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159", State::Lacks),
        ] {
            let (_folder, tree) = recorded(&format!("== {VERSION}\n{text}\n"));
            assert_eq!(flavour(&tree, &parts()).state, state, "{text}");
            assert_eq!(driver(&tree, &parts()).state, State::Ok);
        }
        let (_folder, tree) = recorded("");
        assert_eq!(
            (driver(&tree, &parts()).state, flavour(&tree, &parts()).state),
            (State::Lacks, State::NotApplicable)
        );
    }

    #[test]
    fn two_modules_for_one_name_are_in_each_others_way() {
        let judged = |record: &str| {
            let (_folder, tree) = recorded(record);
            let nics = vec![("mlx5_0".to_owned(), None)];
            peer_memory(&tree, &Parts { nics, ..parts() })
        };
        let ours = "== /sys/module/nvidia_peermem/version\n580.159\n";
        assert!(
            judged(&format!("{ours}== /sys/module/nv_peer_mem/version\n1.3\n")).remedy.contains("unload")
        );
        assert_eq!(
            judged(&format!("{ours}== /sys/kernel/mm/memory_peers/nv_mem/version\n1\n")).state,
            State::Ok
        );
        assert!(judged(ours).seen.contains("no /sys/kernel/mm/memory_peers"));
        assert!(judged("").remedy.contains("dma-buf"));
    }

    #[test]
    fn without_an_rdma_device_nobody_needs_peer_memory() {
        let (_folder, tree) = recorded("");
        let line = peer_memory(&tree, &parts());
        assert!(line.state == State::NotApplicable && line.seen.contains("no RDMA device"), "{line:?}");
    }

    #[test]
    fn a_parameter_that_denies_rdma_is_a_lack() {
        let judged = |value: u8| {
            let (_folder, tree) =
                recorded(&format!("== {PARAMS}\nGrdmaPciTopoCheckOverride: {value}\nEnableMSI: 1\n"));
            params(&tree, &parts())
        };
        assert_eq!((judged(0).state, judged(2).state), (State::Ok, State::Lacks));
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
        assert_eq!(state("attribute 124: a: 1, b: 0"), Some(State::Lacks));
        assert_eq!((state("attribute 143"), state("attribute 110")), (Some(State::Ok), Some(State::Unknown)));
    }
}
