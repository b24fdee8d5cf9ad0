//! Memory of each socket of the guest, drawn to one scale.

use std::fmt::Write;

use egm_address::CpuSet;
use egm_report::show::{escape, size};

use crate::plan::{MemoryKind, MemoryPlan, NodePlan, Plan};

/// Height in pixels of the socket with the most memory.
const HEIGHT: u64 = 280;

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
    fn bytes(&self) -> u64 {
        self.pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.bytes))
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

/// The sockets side by side: a bar to scale and its pieces by name, lowest address at the bottom.
pub(super) fn html(plan: &Plan) -> String {
    let sockets = sockets(plan);
    let most = sockets.iter().map(Socket::bytes).max().unwrap_or(0).max(1);
    let mut out = "<section>\n<h2>Memory by socket</h2>\n<div class=\"sockets\">\n".to_owned();
    for socket in &sockets {
        figure(socket, most, &mut out);
    }
    out.push_str("</div>\n<p class=\"note\">Drawn to one scale.</p>\n</section>\n");
    out
}

/// A socket as a figure; `most` bytes have [`HEIGHT`].
fn figure(socket: &Socket, most: u64, out: &mut String) {
    let (name, bytes) = (escape(&socket.name), size(socket.bytes()));
    let _ = write!(
        out,
        "<figure>\n<figcaption>{name}: {bytes}</figcaption>\n<div class=\"bar\" aria-hidden=\"true\">"
    );
    for piece in socket.pieces.iter().rev() {
        let (class, height) = (piece.class(), height(piece.bytes, most));
        let _ = write!(out, "<i class=\"{class}\" style=\"height: {height}px\"></i>");
    }
    out.push_str("</div>\n<ul>");
    for piece in socket.pieces.iter().rev() {
        let _ = write!(out, "<li class=\"{}\">{}</li>", piece.class(), escape(&piece.label()));
    }
    out.push_str("</ul>\n</figure>\n");
}

/// Pixels of `bytes`, at least one.
fn height(bytes: u64, most: u64) -> u64 {
    let pixels = u128::from(bytes) * u128::from(HEIGHT) / u128::from(most);
    u64::try_from(pixels).unwrap_or(HEIGHT).max(1)
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
