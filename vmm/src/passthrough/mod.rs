//! Host functions in the guest: what their registers, memory and interrupts become.
//!
//! ```text
//!  guest ── config access ─► function ─► egm_vfio::pci::Shadow ── what is the device's ─► Backend
//!        ── BAR access ────► function ─► MSI-X structures (ours), or ─────────────────► Backend
//!        ── BAR moved ─────► windows  ─► memory slots; peers ─► Domain of every function
//!        ◄─ MSI-X, MSI ───── vectors  ── connected when the guest opens them ─────────► Backend
//!        ◄─ INTx ─────────── intx     ── a level with resampling ─────────────────────► Backend
//!  hotplug  ◄─────────────── events   ◄─ errors, requests to give it back
//! ```
//! Lock order: a function's shadow, then its interrupts or its decoded BARs. vCPUs that access other functions take the
//! latter only. `windows` and `peers` have their own, and no access of the guest waits for these: memory slots and I/O
//! page tables change slowly.

mod access;
mod coherent;
mod error;
mod function;
mod host_events;
mod interrupts;
mod intx;
mod parts;
mod peers;
mod vectors;
mod windows;

pub(crate) use coherent::NEEDS_CACHING;
pub(crate) use error::PassthroughError;
pub(crate) use function::{AssignedFunction, Connections};
pub(crate) use host_events::HostEvents;
pub(crate) use intx::InterruptLine;
pub(crate) use peers::Peers;

#[cfg(test)]
mod grace_tests;
#[cfg(test)]
mod tests;
