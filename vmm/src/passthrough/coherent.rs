//! GPU memory that processors share: what the host must have for it, and when it can be used.

use std::time::{Duration, Instant};

use egm_vfio::backend::{Backend, RegionIndex};
use egm_vfio::pci::capability::{CapabilityId, extended};
use egm_vfio::variant::nvgrace::{self, READY_WITHIN};
use egm_vfio::variant::{Caching, Variant};

use crate::pci::CONFIG_SIZE;

/// Interval of reads of a device's readiness; links train for seconds.
const EACH: Duration = Duration::from_millis(100);

/// Why a guest cannot have a function's memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryFault {
    /// KVM maps no such memory.
    #[error(
        "KVM of this host does not map the memory in BAR {bar} of {function} as cached: it lacks capability {capability}"
    )]
    NotCacheable {
        /// Name of the function.
        function: String,
        bar: u8,
        /// Number of the capability.
        capability: u32,
    },
    /// It did not become ready.
    #[error("{function} is not ready after {within:?}: its {what} reads {value:#x}, not 0xff")]
    NotReady {
        /// Name of the function.
        function: String,
        /// The register that is not ready.
        what: &'static str,
        value: u32,
        /// Time limit of the wait.
        within: Duration,
    },
}

/// Remedy where KVM does not map memory without pages as cached.
pub(crate) const NEEDS_CACHING: &str =
    "run Linux 6.17 or later on a processor with FEAT_S2FWB and CTR_EL0.DIC (Grace has both)";

impl MemoryFault {
    pub(super) const fn remedy(&self) -> &'static str {
        match self {
            Self::NotCacheable { .. } => NEEDS_CACHING,
            Self::NotReady { .. } => {
                "look for the driver's errors: dmesg | grep nvgrace; reset the GPU, or the host when that does not help"
            }
        }
    }
}

/// Checks that KVM has what the BARs `memory` of `backend` need; `supports` queries the machine's descriptor.
pub(super) fn check(
    backend: &dyn Backend,
    memory: &[u8],
    supports: impl Fn(u32) -> bool,
) -> Result<(), MemoryFault> {
    for &bar in memory {
        // The plan has found that they are memory, so the hardware's registers do not matter here.
        let policy = Variant::NvGrace.region(&[], bar, backend.region(RegionIndex::Bar(bar)).size);
        let needed = policy.kvm_capability.filter(|_| policy.caching == Caching::Cacheable);
        if let Some(capability) = needed.filter(|capability| !supports(*capability)) {
            return Err(MemoryFault::NotCacheable { function: backend.name().to_owned(), bar, capability });
        }
    }
    Ok(())
}

/// Waits until the function, which decodes memory, can be used. The driver waits too, but before it resets the
/// function and at the first access: a failure there would hit the running guest. A device that reports readiness by
/// a CXL capability is left to the driver.
pub(super) fn wait(
    backend: &dyn Backend,
    now: impl Fn() -> Instant,
    pause: impl Fn(Duration),
) -> Result<(), MemoryFault> {
    if is_cxl(backend) {
        return Ok(());
    }
    let read = |offset| {
        let mut value = [0; 4];
        // A function that does not answer reads all ones, which is not ready.
        let _ = backend.read(RegionIndex::Bar(0), offset, &mut value);
        u32::from_le_bytes(value)
    };
    let start = now();
    while let Some((register, value)) = nvgrace::waits_for(read) {
        if now().saturating_duration_since(start) >= READY_WITHIN {
            let (function, what) = (backend.name().to_owned(), register.name);
            return Err(MemoryFault::NotReady { function, what, value, within: READY_WITHIN });
        }
        pause(EACH);
    }
    Ok(())
}

/// Whether it has the capability of a CXL device (CXL 3.1 §8.1.3: DVSEC 0 of vendor 0x1e98).
fn is_cxl(backend: &dyn Backend) -> bool {
    const DVSEC: CapabilityId = CapabilityId::Extended(0x23);
    const CXL: [u8; 2] = [0x98, 0x1e];
    let mut space = vec![0; CONFIG_SIZE];
    if backend.read(RegionIndex::Config, 0, &mut space).is_err() {
        return false;
    }
    let list = extended(&space);
    let header = |at: u16| space.get(usize::from(at)..)?.first_chunk::<10>();
    let mut all = list.capabilities.iter().filter(|one| one.id == DVSEC);
    all.any(|one| {
        header(one.offset)
            .is_some_and(|[_, _, _, _, v0, v1, _, _, id0, id1]| [*v0, *v1] == CXL && [*id0, *id1] == [0, 0])
    })
}
