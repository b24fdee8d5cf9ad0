//! States of the vCPUs in a snapshot.

use std::collections::BTreeMap;
use std::sync::Mutex;

use kvm_ioctls::VcpuFd;

use crate::arch::native::state::{VcpuInterface, VcpuState};
use crate::kvm::KvmError;
use crate::lock::lock;

/// States that the vCPUs have saved, each on its own thread.
pub(super) struct VcpuStates {
    pub(super) interface: VcpuInterface,
    saved: Mutex<BTreeMap<u32, Result<VcpuState, KvmError>>>,
}

impl VcpuStates {
    pub(super) fn new(interface: VcpuInterface) -> Self {
        Self { interface, saved: Mutex::default() }
    }

    /// Saves vCPU `index`, on its own thread.
    pub(super) fn save(&self, index: u32, fd: &VcpuFd) {
        let state = VcpuState::save(fd, &self.interface);
        lock(&self.saved).insert(index, state);
    }

    /// The states, in the order of the vCPUs.
    ///
    /// # Errors
    /// The first one that the kernel refused.
    pub(super) fn take(&self) -> Result<Vec<VcpuState>, KvmError> {
        std::mem::take(&mut *lock(&self.saved)).into_values().collect()
    }
}
