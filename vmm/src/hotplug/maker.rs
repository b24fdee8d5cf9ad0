//! Makes devices that are plugged in.

use super::{HotplugError, New, PlugMemory};
use crate::config::Device;
use crate::plan::{BridgePlan, FunctionPlan};
use crate::reserve::{GrantedMemory, Servers};

/// The machine as a maker of devices.
pub(crate) trait Maker: Send {
    /// The function that `device`, with the memory of `slice` if it is one, becomes behind one of `bridges`. Opens nothing but the connection to a vfio-user server,
    /// which alone reports the registers of its device.
    ///
    /// # Errors
    /// [`HotplugError`]: the machine cannot take it, or its BARs fit behind no bridge.
    fn plan(
        &self,
        device: &Device,
        slice: Option<&PlugMemory>,
        bridges: &[BridgePlan],
    ) -> Result<Candidate, HotplugError>;

    /// Opens a device that [`Maker::plan`] planned, just reset.
    ///
    /// # Errors
    /// [`HotplugError`]; nothing stays open.
    fn make(&self, candidate: Candidate) -> Result<New, HotplugError>;
}

/// A device that is planned and not made.
pub(crate) struct Candidate {
    /// Index of the bridge that it is behind.
    pub(crate) bridge: usize,
    pub(crate) function: FunctionPlan,
    /// Its vfio-user server, if it has one.
    pub(crate) servers: Servers,
    /// Its memory, if it is a slice that was granted.
    pub(crate) memory: Option<Box<GrantedMemory>>,
}
