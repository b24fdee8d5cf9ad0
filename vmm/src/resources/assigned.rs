//! Host functions and what their DMA reaches, opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use egm_address::{CpuSet, Iova, PciAddress, Span};
use egm_vfio::backend::Backend;
use egm_vfio::dma::{Access, DmaError, Domain, Memlock, Piece, locked_bytes, map_all, order};
use egm_vfio::kernel::{Container, Iommufd, KernelDomain, KernelFunction, OpenError, Track};
use egm_vfio::memory::HostMemory;
use egm_vfio::topology::GroupError;

use crate::error::{Blame, Remedy, Report, opening};
use crate::facts::Facts;
use crate::kvm::{KvmError, Vm};
use crate::memory::GuestRam;
use crate::plan::{Interface, MemoryPlan, Plan};
use crate::reserve::Servers;

/// Why a machine's host functions cannot have their memory.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum AssignedError {
    /// The kernel's interface to them.
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("cannot register host functions with KVM")]
    Kvm(#[from] KvmError),
    #[error("cannot map guest memory for host functions")]
    Dma(#[from] DmaError),
    /// Guest memory, for the device of a server.
    #[error("cannot share guest memory with the vfio-user server {}", socket.display())]
    Share {
        socket: PathBuf,
        #[source]
        source: DmaError,
    },
}

impl Report for AssignedError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Open(error) => opening(error),
            Self::Kvm(_) => Blame::Host.help("load KVM's part of VFIO: modprobe vfio kvm"),
            Self::Dma(error) => Remedy { blame: Blame::Host, help: error.remedy() },
            Self::Share { source: DmaError::NoWay { .. }, .. } => Blame::Host.help(
                "remove the device, or take the machine's memory from where it is a file: \"region\": \"memfd\" or \
                 \"hugetlb\"",
            ),
            Self::Share { .. } => Blame::Host.help("read the server's log, and start it again"),
        }
    }
}

/// The I/O address spaces of a machine: one for all functions of the kernel, so that memory is pinned once, and one a
/// vfio-user server.
#[derive(Default)]
pub struct AddressSpaces {
    kernel: Option<KernelDomain>,
    servers: Servers,
}

impl AddressSpaces {
    /// The empty address spaces of `plan`'s functions, and those of `servers`. `vm` tracks what is opened in them.
    ///
    /// # Errors
    /// [`AssignedError`].
    pub(super) fn open(plan: &Plan, vm: &Vm, servers: Servers) -> Result<Self, AssignedError> {
        let Some(passthrough) = &plan.passthrough else { return Ok(Self { kernel: None, servers }) };
        let track: Track = Arc::new(vm.vfio_files()?);
        let kernel = match passthrough.interface {
            Interface::Legacy => Container::new(Some(track)).map(KernelDomain::Legacy),
            Interface::Iommufd => Iommufd::new(Some(track)).map(KernelDomain::Iommufd),
        };
        let kernel = kernel.or_else(|error| {
            // A fault of a function is the cause of a fault of all of VFIO.
            plan.assigned_functions().try_for_each(KernelFunction::check)?;
            Err(error)
        })?;
        Ok(Self { kernel: Some(kernel), servers })
    }

    /// Whether no function needs one.
    pub fn is_empty(&self) -> bool {
        self.kernel.is_none() && self.servers.is_empty()
    }

    /// Whether what they reach is pinned: all of it is made present then.
    pub(super) fn pin(&self) -> bool {
        self.kernel.is_some()
    }

    /// Where functions of the host are opened, if they can be.
    pub(crate) fn kernel(&self) -> Option<KernelDomain> {
        self.kernel.clone()
    }

    /// All I/O address spaces: the kernel's and the servers'.
    pub fn domains(&self) -> Vec<Arc<dyn Domain>> {
        let servers = self.servers.domains().map(|(_, domain)| domain);
        self.kernel.iter().map(KernelDomain::domain).chain(servers).collect()
    }

    /// The device of the server at `socket`, if it is connected.
    pub(super) fn served(&self, socket: &Path) -> Option<Arc<dyn Backend>> {
        self.servers.function(socket)
    }

    /// Opens the function at `address` of the host.
    pub(super) fn function(&self, address: PciAddress) -> Result<Arc<dyn Backend>, OpenError> {
        match &self.kernel {
            Some(domain) => Ok(Arc::new(KernelFunction::open(address, domain)?)),
            None => Err(GroupError::NoGroup { function: address }.into()), // a plan that was not asked for it
        }
    }

    /// The mappings by which the functions reach all RAM of `plan`, slices included, where the guest has it.
    ///
    /// # Errors
    /// [`AssignedError::Dma`] and [`AssignedError::Share`] when that can be known not to work.
    pub(super) fn maps(&self, plan: &Plan, ram: &GuestRam) -> Result<Maps, AssignedError> {
        let all = |domain: &Arc<dyn Domain>| order(pieces(plan, ram), &domain.limits());
        let kernel = self.kernel.iter().map(|kernel| {
            let domain = kernel.domain();
            let pieces = all(&domain)?;
            Memlock::of_process().check(locked_bytes(&pieces))?;
            Ok(Map { socket: None, domain, pieces })
        });
        let servers = self.servers.domains().map(|(socket, domain)| {
            let share = |source| AssignedError::Share { socket: socket.to_owned(), source };
            let pieces = all(&domain).map_err(share)?;
            Ok(Map { socket: Some(socket.to_owned()), domain, pieces })
        });
        kernel.chain(servers).collect::<Result<_, AssignedError>>().map(Maps)
    }
}

/// Memory to map, by address space.
pub(super) struct Maps(Vec<Map>);

/// Memory to map, by when that can be done.
pub(super) struct AroundPrefault {
    pub(super) early: Maps,
    pub(super) late: Maps,
}

/// Memory to map in one address space.
struct Map {
    /// Socket of the vfio-user server that owns this address space, if any.
    socket: Option<PathBuf>,
    domain: Arc<dyn Domain>,
    pieces: Vec<Piece>,
}

impl Maps {
    /// Splits the mappings around prefault.
    pub(super) fn around_prefault(self) -> AroundPrefault {
        let mut around = AroundPrefault { early: Self(Vec::new()), late: Self(Vec::new()) };
        for Map { socket, domain, pieces } in self.0 {
            let (early, late): (Vec<Piece>, Vec<Piece>) =
                pieces.into_iter().partition(|piece| domain.takes_unfilled(piece.memory.as_ref()));
            let late = Map { socket: socket.clone(), domain: Arc::clone(&domain), pieces: late };
            around.late.0.push(late);
            around.early.0.push(Map { socket, domain, pieces: early });
        }
        around
    }

    /// Maps it, each node's memory on a thread near it.
    ///
    /// # Errors
    /// [`AssignedError::Dma`] and [`AssignedError::Share`].
    pub(super) fn make(self, facts: &Facts) -> Result<(), AssignedError> {
        self.0.into_iter().try_for_each(|map| map.make(facts))
    }
}

impl Map {
    fn make(self, facts: &Facts) -> Result<(), AssignedError> {
        let Self { socket, domain, pieces } = self;
        let mapped = map_all(domain.as_ref(), pieces, &|node| {
            let node = facts.nodes.iter().find(|known| Some(known.id) == node);
            egm_device::pin(node.map(|node| &node.cpus));
        });
        mapped.map_err(|source| match socket {
            Some(socket) => AssignedError::Share { socket, source },
            None => source.into(),
        })
    }
}

/// Lets the devices of `servers` reach `memory`, all of the guest's.
///
/// # Errors
/// [`AssignedError::Share`].
pub(crate) fn share(servers: &Servers, memory: &[Piece]) -> Result<(), AssignedError> {
    for (socket, domain) in servers.domains() {
        let failed = |source| AssignedError::Share { socket: socket.to_owned(), source };
        let pieces = order(memory.to_vec(), &domain.limits()).map_err(failed)?;
        map_all(domain.as_ref(), pieces, &|_| ()).map_err(failed)?;
    }
    Ok(())
}

/// The plan's RAM as devices are to find it: at guest addresses.
pub(crate) fn pieces(plan: &Plan, ram: &GuestRam) -> Vec<Piece> {
    plan.memory.iter().filter_map(|memory| piece(memory, plan, ram)).collect()
}

fn piece(memory: &MemoryPlan, plan: &Plan, ram: &GuestRam) -> Option<Piece> {
    let (start, size) = (memory.span.start(), memory.span.size());
    let holder = ram.pieces.iter().rfind(|piece| piece.gpa <= start)?;
    Some(Piece {
        iova: Span::new(Iova::new(start.get()), size).ok()?,
        memory: Arc::clone(&holder.shared) as Arc<dyn HostMemory>,
        offset: start.offset_from(holder.gpa)?,
        access: Access::ReadWrite,
        node: plan.backings.get(memory.backing)?.host_nodes.as_ref().and_then(only),
    })
}

/// The node, where there is one.
fn only(nodes: &CpuSet) -> Option<u32> {
    nodes.iter().next().filter(|_| nodes.len() == 1)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use egm_address::Io;
    use egm_vfio::dma::Limits;
    use egm_vfio::mapping::{MadeOf, Mapping};
    use egm_vfio::memory::HostBacking;

    use super::*;

    /// Takes files when they are filled, and all else at once.
    struct FilledFiles;

    impl Domain for FilledFiles {
        fn limits(&self) -> Limits {
            Limits::default()
        }
        fn takes_unfilled(&self, memory: &dyn HostMemory) -> bool {
            !matches!(memory.backing(), HostBacking::File { .. })
        }
        fn map(&self, _: Span<Io>, _: &Arc<dyn HostMemory>, _: u64, _: Access) -> Result<(), DmaError> {
            Ok(())
        }
        fn unmap(&self, _: Span<Io>) -> Result<(), DmaError> {
            Ok(())
        }
    }

    #[test]
    fn what_an_address_space_takes_only_when_it_is_filled_waits_for_that_and_nothing_else_does() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x1000).unwrap();
        let of_file =
            Mapping::of(file.as_fd(), 0, 0x1000, 0, MadeOf::File(file.try_clone().unwrap().into(), 0));
        let memories: [Arc<dyn HostMemory>; 2] =
            [Arc::new(of_file.unwrap()), Arc::new(Mapping::pages(0x1000, 0).unwrap())];
        let piece = |(start, memory): (u64, Arc<dyn HostMemory>)| Piece {
            iova: Span::new(Iova::new(start * 0x1000), 0x1000).unwrap(),
            memory,
            offset: 0,
            access: Access::ReadWrite,
            node: None,
        };
        let pieces = (0..).zip(memories).map(piece).collect();
        let maps = Maps(vec![Map { socket: None, domain: Arc::new(FilledFiles), pieces }]);
        let AroundPrefault { early, late } = maps.around_prefault();
        let starts = |maps: &Maps| -> Vec<u64> {
            maps.0.iter().flat_map(|map| &map.pieces).map(|piece| piece.iova.start().get()).collect()
        };
        assert_eq!((starts(&early), starts(&late)), (vec![0x1000], vec![0]));
    }
}
