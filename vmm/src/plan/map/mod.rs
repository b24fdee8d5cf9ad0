//! Step 2: addresses, nodes, the PCI tree and its windows.

pub(super) mod blocks;
pub(super) mod fixed;
pub(super) mod functions;
pub(super) mod intx;
pub(super) mod memory;
pub(super) mod nodes;
pub(super) mod place;
pub(super) mod plug;
pub(super) mod retired;
pub(super) mod space;
pub(super) mod tree;
