//! Step 2: the map of the guest: addresses, nodes, the PCI tree and its windows.
//!
//! | file | content |
//! |---|---|
//! | `space` | which guest physical addresses may be used at all |
//! | `memory` | RAM and EGM slices in that space; `retired`: slices without retired pages |
//! | `nodes` | NUMA nodes, distances |
//! | `tree` | expanders, root ports, switches, bus numbers |
//! | `blocks` | BARs, and devices, as one range for a bridge; `place`: those ranges in the windows |
//! | `windows` | windows around those ranges |
//! | `functions` | PCI functions of the tree, with bus numbers and windows |
//! | `intx` | interrupt lines of their pins |

mod blocks;
mod functions;
pub(super) mod intx;
mod memory;
pub(super) mod nodes;
pub(super) mod placement;
mod retired;
mod space;
mod tree;
mod windows;

use self::functions::Functions;
use self::memory::PlacedMemory;
use self::nodes::Numa;
use self::placement::{Blocks, Placed, place};
use self::space::Space;
use crate::arch::Layout;
use crate::plan::demand::Demand;
use crate::plan::{ExpanderPlan, FunctionPlan, LinePlan, MemoryPlan, PlanError, PortPlan, WindowPlan};

/// Every address, number and node of a guest.
pub(super) struct Map {
    pub(super) windows: Vec<WindowPlan>,
    pub(super) memory: Vec<MemoryPlan>,
    /// Notes on good memory beside retired pages.
    pub(super) lost_memory: Vec<String>,
    /// Notes on memory that the host has, but not free.
    pub(super) not_free: Vec<String>,
    pub(super) numa: Numa,
    pub(super) functions: Vec<FunctionPlan>,
    pub(super) expanders: Vec<ExpanderPlan>,
    pub(super) lines: Vec<LinePlan>,
    pub(super) ports: Vec<PortPlan>,
}

impl Map {
    /// Places everything that `demand` needs.
    pub(super) fn of(demand: &Demand<'_>) -> Result<Self, PlanError> {
        let (layout, devices) = (demand.layout, &demand.devices);
        let mut space = Space::new(demand)?;
        let PlacedMemory { pieces: memory, notes: lost_memory } = memory::plan(demand, &mut space)?;
        let not_free = demand.check_memory()?;
        let numa = Numa::of(demand.spec, &memory);
        let tree = tree::tree(demand, numa.first())?;
        let (low, high) = (Blocks::new(devices, &tree, false)?, Blocks::new(devices, &tree, true)?);
        let windows = windows::choose(demand.spec, &high, tree.buses(), &mut space)?;
        let placed = Placed {
            low: place(&low, Some(windows.memory32), &space)?,
            high: place(&high, windows.memory64, &space)?,
        };
        let Functions { all: functions, expanders } = functions::functions(devices, &tree, &placed)?;
        let windows = space.windows(&windows);
        let lines = lines(layout, &functions);
        let ports = ports(layout);
        Ok(Self { windows, memory, lost_memory, not_free, numa, functions, expanders, lines, ports })
    }
}

/// Interrupt lines: those of `layout`, then those of PCI pins.
fn lines(layout: &Layout, functions: &[FunctionPlan]) -> Vec<LinePlan> {
    let own = layout.lines.iter().map(|&(owner, gsi)| LinePlan { gsi, owner: owner.to_owned() });
    own.chain(intx::lines(functions, layout.intx)).collect()
}

fn ports(layout: &Layout) -> Vec<PortPlan> {
    let port = |&(owner, first, count): &(&str, u16, u16)| PortPlan { first, count, owner: owner.to_owned() };
    layout.ports.iter().map(port).collect()
}
