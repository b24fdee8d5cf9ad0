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
    let nodes = facts.nodes.iter().filter(|node| !node.cpus.is_empty());
    let sockets: Vec<SocketMemory<'_>> = nodes.map(|node| SocketMemory::of(node, regions)).collect();
    if !is_grace(facts) && sockets.iter().all(|socket| socket.egm == 0) {
        let is = if facts.product.is_empty() { facts.arch.clone() } else { facts.product.clone() };
        let needs = "the firmware of an NVIDIA Grace machine";
        return Err(AdviseError::Unsupported { how: "firmware", needs, is });
    }
    let keeps = share(request.hypervisor, request.per_node, sockets.len(), RESERVED_STEP);
    let nodes = sockets.iter().map(|socket| socket.split(keeps)).collect::<Result<Vec<_>, _>>()?;
    // One value serves all sockets, so the smallest decides. It is a minimum: the firmware gives what is there.
    let least = nodes.iter().map(|node| node.guests.get()).min().unwrap_or(0);
    Ok(Split { settings: settings(keeps, align_down(least, EGM_STEP)), nodes, ..Split::default() })
}

/// Memory of a socket, as the kernel and the firmware divide it now.
struct SocketMemory<'a> {
    node: &'a Node,
    /// Bytes of its EGM regions.
    egm: u64,
}

impl<'a> SocketMemory<'a> {
    fn of(node: &'a Node, regions: &[Region]) -> Self {
        let here = |r: &&Region| matches!(r.kind, RegionKind::Egm { .. }) && r.node == Some(node.id);
        Self { node, egm: regions.iter().filter(here).map(|region| region.size.get()).sum() }
    }

    /// The split in which the hypervisor has `keeps` bytes of it.
    fn split(&self, keeps: u64) -> Result<NodeSplit, AdviseError> {
        let total = self.node.total.get().saturating_add(self.egm);
        let (guests, node) = (total.saturating_sub(keeps), self.node.id);
        let keeps = ByteSize::new(keeps);
        if guests == 0 {
            return Err(AdviseError::NothingLeft { node, has: ByteSize::new(total), keeps });
        }
        Ok(NodeSplit { node, keeps, guests: ByteSize::new(guests), hidden: Vec::new() })
    }
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
