//! PCI Express functions of the guest and the root complex that finds them.

mod access;
mod config_space;
mod host_bridge;
pub mod msix;
mod port;
mod root;
mod saved;

pub use access::Ecam;
pub(crate) use access::{CONFIG_PORT, CONFIG_PORTS, ConfigPorts, PciMemory};
pub use config_space::*;
use egm_address::{Guest, Span};
pub use host_bridge::HostBridge;
pub(crate) use port::Duty;
pub use port::{Plugged, Port, PortConfig, PortKind};
pub(crate) use root::RootBus;
pub use root::{Bus, RootComplex};
pub use saved::{BridgeState, ConfigState, MsixTable};

use crate::snapshot::Mismatch;

/// A base address register of a function, and where it decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodedBar {
    /// Register number, 0 to 5; the first of two for a 64-bit BAR.
    pub index: u8,
    /// Guest addresses that the BAR answers at.
    pub span: Span<Guest>,
}

impl DecodedBar {
    /// The BAR `index` at `span`.
    pub const fn new(index: u8, span: Span<Guest>) -> Self {
        Self { index, span }
    }
}

/// A PCI function behind the root complex. All methods run on vCPU threads, several at once.
///
/// The defaults are those of a function without base address registers.
///
/// Kept out: interrupts (a function owns its [`msix::Msix`]), hot-plug ([`Plugged`]), and where the function sits in the tree.
pub trait PciFunction: Send + Sync {
    /// Reads 1, 2 or 4 bytes of configuration space; never crosses a doubleword.
    fn config_read(&self, offset: u16, data: &mut [u8]);

    /// Writes 1, 2 or 4 bytes of configuration space; whether address decoding may have changed.
    fn config_write(&self, offset: u16, data: &[u8]) -> bool;

    /// Where each base address register decodes now.
    fn decoded(&self) -> Vec<DecodedBar> {
        Vec::new()
    }

    /// Called after every change of what reaches the function, with the spans that now do: a function with ioeventfds
    /// or memory slots in the kernel moves them here.
    fn place(&self, _bars: &[DecodedBar]) {}

    /// Reads from a base address register, by its number.
    fn bar_read(&self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    /// Writes to a base address register.
    fn bar_write(&self, _bar: u8, _offset: u64, _data: &[u8]) {}

    /// Returns to the state at the machine's start, while no vCPU is in the guest. Those that implement
    /// [`Plugged::reset`] are reset by that.
    fn warm_reset(&self) {}

    /// The state that the guest has written, while no vCPU is in the guest; `None` where another owner saves it.
    fn saved(&self) -> Option<BridgeState> {
        None
    }

    /// Takes the state of a function like it, before a vCPU runs.
    ///
    /// # Errors
    /// [`Mismatch`].
    fn restore(&self, _saved: &BridgeState) -> Result<(), Mismatch> {
        Ok(())
    }
}
