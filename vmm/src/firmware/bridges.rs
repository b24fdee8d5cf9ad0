//! Host bridges, each with its part of the machine's buses and windows.

use std::collections::BTreeMap;

use egm_address::{Guest, Span, SpanSet};

use super::{FirmwareError, window, window_error};
use crate::plan::{BridgePlan, Plan, RootPin, WindowKind};

/// Bytes of configuration space of one bus (PCI Express Base 7.2.2).
pub(super) const BUS: u64 = 1 << 20;

/// A host bridge, with its part of the machine's buses and windows.
pub(super) struct HostBridge {
    /// First and last bus.
    pub(super) buses: (u8, u8),
    /// The node that its devices are near to.
    pub(super) near: Option<u32>,
    /// Address ranges that it forwards.
    pub(super) windows: Vec<BridgeWindow>,
}

/// A range of addresses that a host bridge forwards.
#[derive(Clone, Copy)]
pub(super) struct BridgeWindow {
    pub(super) prefetchable: bool,
    pub(super) span: Span<Guest>,
}

impl HostBridge {
    /// That of bus 0, then the expanders. The last has the buses that are left, the first the parts of the windows that
    /// no expander has. Devices get the node of their host bridge; without one Linux warns of reduced performance.
    /// Emulated devices have no node of their own, so the first node is as good as any.
    pub(super) fn all(plan: &Plan, last_bus: u8) -> Vec<Self> {
        let starts = plan.expanders.iter().map(|expander| expander.bridge.secondary);
        let starts: Vec<u8> = std::iter::once(0).chain(starts).collect();
        let end = |index: usize| starts.get(index).map_or(last_bus, |next| next.saturating_sub(1));
        let taken: SpanSet<Guest> =
            plan.expanders.iter().flat_map(|e| [e.bridge.window32, e.bridge.window64]).flatten().collect();
        let prefetchable = |kind| match kind {
            WindowKind::PciMemory32 => Some(false),
            WindowKind::PciMemory64 => Some(true),
            _ => None,
        };
        let first = plan.windows.iter().filter_map(|w| Some((prefetchable(w.kind)?, w.span)));
        let left = |(prefetchable, span): (bool, Span<Guest>)| {
            let left = SpanSet::from_iter([span]).minus(&taken);
            left.iter().map(|span| BridgeWindow { prefetchable, span }).collect::<Vec<_>>()
        };
        let mut all = vec![Self {
            buses: (0, end(1)),
            near: plan.nodes.first().map(|node| node.id),
            windows: first.flat_map(left).collect(),
        }];
        all.extend(plan.expanders.iter().zip(2..).map(|(expander, next)| {
            let BridgePlan { secondary, window32, window64, .. } = expander.bridge;
            let low = window32.map(|span| BridgeWindow { prefetchable: false, span });
            let high = window64.map(|span| BridgeWindow { prefetchable: true, span });
            Self {
                buses: (secondary, end(next)),
                near: Some(expander.node),
                windows: low.into_iter().chain(high).collect(),
            }
        }));
        all
    }

    /// The line of each pin at which host functions of this bridge end, or would end.
    pub(super) fn pins(&self, plan: &Plan) -> BTreeMap<RootPin, u32> {
        let pins = plan.intx_lines().map(|(function, line)| (RootPin::of(&plan.pci, function), line));
        pins.filter(|(pin, _)| pin.bus == self.buses.0).collect()
    }
}

/// PCI Express configuration space.
pub(super) struct Ecam {
    pub(super) span: Span<Guest>,
    pub(super) last_bus: u8,
}

/// The configuration space of `plan`.
pub(super) fn ecam(plan: &Plan) -> Result<Ecam, FirmwareError> {
    const RULE: &str = "it has to be 1 to 256 MiB on a 1 MiB boundary";
    let fits = |s: Span<Guest>| s.size().is_multiple_of(BUS) && s.start().is_aligned(BUS);
    let span = window(plan, WindowKind::Ecam, "ECAM", RULE, fits)?;
    let last_bus = u8::try_from((span.size() / BUS).saturating_sub(1));
    let last_bus = last_bus.map_err(|_| window_error(Some(span), "ECAM", RULE))?;
    Ok(Ecam { span, last_bus })
}
