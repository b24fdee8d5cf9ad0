//! The split that NVIDIA's firmware makes on Grace: setup form TH500 of edk2-nvidia.

use egm_address::{ByteSize, align_down};
use serde_json::json;

use crate::carve::advise::ram::share;
use crate::carve::advise::{AdviseError, NodeSplit, Setting, Split, SplitRequest};
use crate::region::{HostFacts, Node, Region, RegionKind};

/// The form counts in MB of 2^20 bytes. The hypervisor's memory has steps of 64, the others of 65536.
const MB: u64 = 1 << 20;
const RESERVED_STEP: u64 = 64 * MB;
const EGM_STEP: u64 = 65536 * MB;

/// Whether the machine calls itself one of NVIDIA's with Grace processors.
pub(super) fn is_grace(facts: &HostFacts) -> bool {
    ["Grace", "GH200", "GB200", "GB300"].iter().any(|name| facts.product.contains(name))
}

/// The checkbox and the three sizes, which count per socket.
pub(super) fn firmware(
    facts: &HostFacts,
    regions: &[Region],
    request: &SplitRequest,
) -> Result<Split, AdviseError> {
    let egm_of = |node: &Node| -> u64 {
        let here = |r: &&Region| matches!(r.kind, RegionKind::Egm { .. }) && r.node == Some(node.id);
        regions.iter().filter(here).map(|region| region.size.get()).sum()
    };
    let sockets: Vec<(&Node, u64)> = facts
        .nodes
        .iter()
        .filter(|node| !node.cpus.is_empty())
        .map(|node| (node, node.total.get().saturating_add(egm_of(node))))
        .collect();
    if !is_grace(facts) && sockets.iter().all(|(node, _)| egm_of(node) == 0) {
        let is = if facts.product.is_empty() { facts.arch.clone() } else { facts.product.clone() };
        let needs = "the firmware of an NVIDIA Grace machine";
        return Err(AdviseError::Unsupported { how: "firmware", needs, is });
    }
    let keeps = share(request.hypervisor, request.per_node, sockets.len(), RESERVED_STEP);
    let split = |&(node, total): &(&Node, u64)| {
        let guests = total.saturating_sub(keeps);
        if guests == 0 {
            let (has, keeps) = (ByteSize::new(total), ByteSize::new(keeps));
            return Err(AdviseError::NothingLeft { node: node.id, has, keeps });
        }
        let (keeps, guests) = (ByteSize::new(keeps), ByteSize::new(guests));
        Ok(NodeSplit { node: node.id, keeps, guests, hidden: Vec::new() })
    };
    let nodes: Vec<NodeSplit> = sockets.iter().map(split).collect::<Result<_, _>>()?;
    // One value serves all sockets, so the smallest decides. It is a minimum: the firmware gives what is there.
    let least = nodes.iter().map(|node| node.guests.get()).min().unwrap_or(0);
    Ok(Split { settings: settings(keeps, align_down(least, EGM_STEP)), nodes, ..Split::default() })
}

fn settings(reserved: u64, least: u64) -> Vec<Setting> {
    let setting = |form: &str, attribute: &str, value| Setting {
        form: form.to_owned(),
        attribute: attribute.to_owned(),
        value,
    };
    vec![
        setting("EGM", "EGM", json!(true)),
        setting(
            "Hypervisor reserved memory per socket (MB, step 64)",
            "EGMHypervisorReservedMemory",
            json!(reserved / MB),
        ),
        setting(
            "Minimum EGM memory per socket (MB, step 65536)",
            "EGMHypervisorMinimumEgmMemory",
            json!(least / MB),
        ),
        setting(
            "Minimum vUEFI memory per socket (MB, step 65536)",
            "EGMHypervisorVirtualUefiMemory",
            json!(0),
        ),
    ]
}
