//! Host functions and what their DMA reaches, opened.

use std::sync::Arc;

use egm_address::{CpuSet, Iova, PciAddress, Span};
use egm_vfio::backend::Backend;
use egm_vfio::dma::{Access, DmaError, Domain, Memlock, Piece, locked_bytes, map_all, order};
use egm_vfio::kernel::{Container, Fault, Iommufd, KernelDomain, KernelFunction, OpenError, Track};
use egm_vfio::memory::HostMemory;
use egm_vfio::topology::GroupError;

use crate::error::{Blame, Report};
use crate::facts::Facts;
use crate::kvm::{KvmError, Vm};
use crate::memory::GuestRam;
use crate::plan::{Interface, Plan};

/// Why a machine's host functions cannot have their memory.
#[derive(Debug, thiserror::Error)]
pub enum PassedError {
    /// The kernel's interface to them.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// KVM's part.
    #[error("KVM cannot be told of host functions")]
    Kvm(#[from] KvmError),
    /// Guest memory.
    #[error("guest memory cannot be reached by host functions")]
    Dma(#[from] DmaError),
}

impl Report for PassedError {
    fn blame(&self) -> Blame {
        match self {
            Self::Open(error) => blame(error),
            Self::Kvm(error) => error.blame(),
            Self::Dma(_) => Blame::Host,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Open(error) => error.remedy(),
            Self::Kvm(_) => Some("load KVM's part of VFIO: modprobe vfio kvm".to_owned()),
            Self::Dma(error) => error.remedy(),
        }
    }
}

/// Whose turn it is.
pub(super) fn blame(error: &OpenError) -> Blame {
    match error.fault() {
        Fault::Configuration => Blame::Configuration,
        Fault::Host => Blame::Host,
    }
}

/// The I/O address spaces of a machine: one for all functions of the kernel, so that memory is pinned once.
#[derive(Default)]
pub struct AddressSpaces {
    kernel: Option<KernelDomain>,
}

impl AddressSpaces {
    /// Those that the functions of `plan` need, empty. `vm` hears of what is opened in them.
    ///
    /// # Errors
    /// [`PassedError`].
    pub(super) fn open(plan: &Plan, vm: &Vm) -> Result<Self, PassedError> {
        let Some(passthrough) = &plan.passthrough else { return Ok(Self::default()) };
        let track: Track = Arc::new(vm.vfio_files()?);
        let kernel = match passthrough.interface {
            Interface::Legacy => KernelDomain::Legacy(Container::new(Some(track))?),
            Interface::Iommufd => KernelDomain::Iommufd(Iommufd::new(Some(track))?),
        };
        Ok(Self { kernel: Some(kernel) })
    }

    /// Whether no function needs one.
    pub fn is_empty(&self) -> bool {
        self.kernel.is_none()
    }

    /// All of them.
    pub fn domains(&self) -> Vec<Arc<dyn Domain>> {
        self.kernel.iter().map(KernelDomain::domain).collect()
    }

    /// Opens the function at `address` of the host.
    pub(super) fn function(&self, address: PciAddress) -> Result<Arc<dyn Backend>, OpenError> {
        match &self.kernel {
            Some(domain) => Ok(Arc::new(KernelFunction::open(address, domain)?)),
            None => Err(GroupError::NoGroup { function: address }.into()), // a plan that was not asked for it
        }
    }

    /// How the functions come to reach all RAM of `plan`, slices among it, where the guest has it.
    ///
    /// # Errors
    /// [`PassedError::Dma`] when that can be known not to work.
    pub(super) fn maps(&self, plan: &Plan, ram: &GuestRam) -> Result<Maps, PassedError> {
        let maps = self.domains().into_iter().map(|domain| {
            let pieces = order(pieces(plan, ram), &domain.limits())?;
            Memlock::of_process().check(locked_bytes(&pieces))?;
            Ok((domain, pieces))
        });
        maps.collect::<Result<_, DmaError>>().map(Maps).map_err(PassedError::from)
    }
}

/// What is to be mapped, and where.
pub(super) struct Maps(Vec<(Arc<dyn Domain>, Vec<Piece>)>);

impl Maps {
    /// Maps it, each node's memory on a thread near it.
    ///
    /// # Errors
    /// [`PassedError::Dma`].
    pub(super) fn make(self, facts: &Facts) -> Result<(), PassedError> {
        self.0.into_iter().try_for_each(|(domain, pieces)| {
            map_all(domain.as_ref(), pieces, &|node| {
                let node = facts.nodes.iter().find(|known| Some(known.id) == node);
                egm_device::pin(node.map(|node| &node.cpus));
            })
            .map_err(PassedError::from)
        })
    }
}

/// The plan's RAM as devices are to find it: at guest addresses.
fn pieces(plan: &Plan, ram: &GuestRam) -> Vec<Piece> {
    let piece = |memory: &crate::plan::MemoryPlan| {
        let (start, size) = (memory.span.start(), memory.span.size());
        let holder = ram.pieces.iter().rfind(|piece| piece.gpa <= start)?;
        let node = plan.backings.get(memory.backing)?.host_nodes.as_ref().and_then(only);
        Some(Piece {
            iova: Span::new(Iova::new(start.get()), size).ok()?,
            memory: Arc::clone(&holder.lent) as Arc<dyn HostMemory>,
            offset: start.offset_from(holder.gpa)?,
            access: Access::ReadWrite,
            node,
        })
    };
    plan.memory.iter().filter_map(piece).collect()
}

/// The node, where there is one.
fn only(nodes: &CpuSet) -> Option<u32> {
    nodes.iter().next().filter(|_| nodes.len() == 1)
}
