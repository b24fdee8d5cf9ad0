//! Memory of each socket of the guest, drawn to one scale.

use egm_address::CpuSet;
use egm_report::show::page::{self, ScaledBar};
use egm_report::show::size;

use crate::plan::{MemoryKind, MemoryPlan, NodePlan, Plan};

/// A socket, or several that share nodes.
struct Socket {
    name: String,
    pieces: Vec<Piece>,
}

/// Memory of one node and one backing.
struct Piece {
    node: u32,
    backing: usize,
    kind: MemoryKind,
    bytes: u64,
}

impl Socket {
    /// The socket as a bar, `Socket 0: 16 GiB`.
    fn bar(&self) -> ScaledBar {
        let pieces: Vec<page::ScaledPiece> = self.pieces.iter().map(Piece::drawn).collect();
        let bytes = pieces.iter().fold(0u64, |sum, piece| sum.saturating_add(piece.bytes));
        ScaledBar { title: format!("{}: {}", self.name, size(bytes)), pieces }
    }

    /// Adds `memory`, to the piece of the same node and backing where there is one.
    fn add(&mut self, memory: &MemoryPlan) {
        let MemoryPlan { node, backing, kind, .. } = *memory;
        let bytes = memory.span.size();
        match self.pieces.iter_mut().find(|piece| (piece.node, piece.backing) == (node, backing)) {
            Some(piece) => piece.bytes = piece.bytes.saturating_add(bytes),
            None => self.pieces.push(Piece { node, backing, kind, bytes }),
        }
    }
}

impl Piece {
    fn drawn(&self) -> page::ScaledPiece {
        let (class, label) = (self.class(), self.label());
        page::ScaledPiece { class, bytes: self.bytes, label, hint: String::new() }
    }

    /// Name of its class in the page.
    const fn class(&self) -> &'static str {
        match self.kind {
            MemoryKind::Ram => "ram",
            MemoryKind::Egm => "egm",
        }
    }

    /// `RAM, node 0: 16 GiB`
    fn label(&self) -> String {
        let kind = match self.kind {
            MemoryKind::Ram => "RAM",
            MemoryKind::Egm => "EGM",
        };
        format!("{kind}, node {}: {}", self.node, size(self.bytes))
    }
}

/// The sockets side by side, lowest address at the bottom.
pub(super) fn html(plan: &Plan) -> String {
    let bars: Vec<ScaledBar> = sockets(plan).iter().map(Socket::bar).collect();
    page::bars("Memory by socket", &bars)
}

/// Sockets in the order of their lowest node, each with its memory by address.
fn sockets(plan: &Plan) -> Vec<Socket> {
    let mut nodes: Vec<(usize, &NodePlan)> = plan.nodes.iter().enumerate().collect();
    nodes.sort_by_key(|(_, node)| node.id);
    let mut sockets: Vec<Socket> = Vec::new();
    for (at, node) in nodes {
        let name = socket_name(plan, home(plan, at).unwrap_or(node));
        let position = sockets.iter().position(|socket| socket.name == name).unwrap_or_else(|| {
            sockets.push(Socket { name, pieces: Vec::new() });
            sockets.len().saturating_sub(1)
        });
        if let Some(socket) = sockets.get_mut(position) {
            plan.memory.iter().filter(|m| m.node == node.id).for_each(|memory| socket.add(memory));
        }
    }
    sockets
}

/// The node with processors that is nearest to the node at this position.
fn home(plan: &Plan, at: usize) -> Option<&NodePlan> {
    let row = plan.distances.get(at)?;
    let with_cpus = plan.nodes.iter().zip(row).filter(|(node, _)| !node.cpus.is_empty());
    with_cpus.min_by_key(|(node, distance)| (**distance, node.id)).map(|(node, _)| node)
}

/// `Socket 0`, or `Sockets 0-1` of a node with processors of both.
fn socket_name(plan: &Plan, node: &NodePlan) -> String {
    let sockets: CpuSet =
        plan.vcpus.iter().filter(|vcpu| vcpu.node == node.id).map(|vcpu| vcpu.socket).collect();
    match sockets.len() {
        0 => "No socket".to_owned(),
        1 => format!("Socket {sockets}"),
        _ => format!("Sockets {sockets}"),
    }
}
