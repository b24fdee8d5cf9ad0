//! Plan of the host functions: the kernel's interface that opens them, and which functions reach each other.

use egm_device::region::{Region, RegionKind};
use egm_vfio::host::HostFunction;
use egm_vfio::topology;
use egm_vfio::variant::Variant;

use crate::config::{Device, DeviceKind, MAX_NODES, Spec, VfioBackend};
use crate::facts::Facts;
use crate::plan::demand::wanted::Wanted;
use crate::plan::policy::cliques;
use crate::plan::{
    AssignedPlan, AssignedRule, BackingPlan, GPU_NODES, GpuMemoryPlan, GroupPlan, Interface, PassthroughPlan,
    PlanError,
};

/// First kernel with an iommufd that maps BARs of other functions, as dma-bufs (71db84a092c3).
const IOMMUFD_BARS: (u32, u32) = (6, 19);

/// Decisions for all host functions, and notes for the operator.
pub(in crate::plan) struct Decided {
    /// By device.
    pub(in crate::plan) functions: Vec<Option<AssignedPlan>>,
    pub(in crate::plan) passthrough: Option<PassthroughPlan>,
    pub(in crate::plan) notes: Vec<String>,
}

/// Decides for all host functions of the machine.
pub(in crate::plan) fn decide(
    spec: &Spec,
    facts: &Facts,
    wanted: &[Wanted<'_>],
    backings: &[BackingPlan],
) -> Result<Decided, PlanError> {
    let hosts: Vec<&HostFunction> = wanted.iter().filter_map(|one| one.host).collect();
    if hosts.is_empty() && !takes_functions(spec, facts) {
        return Ok(Decided { functions: Vec::new(), passthrough: None, notes: Vec::new() });
    }
    check_pins(wanted, facts, backings)?;
    let (interface, why) = interface(spec, facts, &hosts, backings)?;
    let mut notes: Vec<String> = hosts.iter().filter_map(|host| unusable(facts, host)).collect();
    let lends = lends_bars(interface, facts);
    if !lends && hosts.len() > 1 && wanted.iter().any(wants_p2p) {
        notes.push(format!(
            "assigned functions do not reach each other's BARs: iommufd of Linux {} cannot map them, 6.19 can, and so can \
             \"backend\": \"legacy\"",
            facts.kernel
        ));
    }
    notes.extend(
        backings.iter().filter(|backing| backing.guest_memfd).map(|backing| by_address(backing, interface)),
    );
    let peers: Vec<bool> = wanted.iter().map(|one| lends && wants_p2p(one)).collect();
    let (cliques, warnings) = cliques::decide(facts, wanted, &peers)?;
    notes.extend(warnings);
    let mut nodes = free_nodes(spec);
    let one = |((one, p2p), clique): ((&Wanted<'_>, bool), Option<u8>)| {
        let host = one.host?;
        let memory = gpu_memory(host).map(|bars| {
            let egm = own_egm(host, facts, backings).and_then(|own| match own {
                (index, BackingPlan { offset: 0, .. }) => Some(index),
                (_, backing) => {
                    notes.push(no_egm(host, backing));
                    None
                }
            });
            GpuMemoryPlan { bars, first_node: nodes.next().unwrap_or(u32::MAX), egm }
        });
        let (function, group, node) = (host.address, host.iommu_group, one.node);
        let partner = one.partner;
        Some(AssignedPlan { function, group, node, clique, p2p, memory, partner })
    };
    let functions: Vec<Option<AssignedPlan>> = wanted.iter().zip(peers).zip(cliques).map(one).collect();
    for (one, assigned) in wanted.iter().zip(&functions) {
        let first =
            assigned.as_ref().and_then(|assigned| assigned.memory.as_ref()).map(|memory| memory.first_node);
        if let Some(first) = first.filter(|first| first.saturating_add(GPU_NODES) > MAX_NODES) {
            return Err(AssignedRule::Nodes { device: one.device.id.clone(), first }.into());
        }
    }
    let pinned =
        backings.iter().filter(|backing| !is_invisible(backing, facts)).map(|backing| backing.size).sum();
    let passthrough = PassthroughPlan { interface, why, groups: groups(&hosts), pinned };
    Ok(Decided { functions, passthrough: Some(passthrough), notes })
}

/// First numbers of as many free ones as a GPU has nodes, above the ordinary ones. Linux counts memory of slices
/// behind GPUs, so a configuration that leaves numbers for them below its slices has the same numbers in the guest.
fn free_nodes(spec: &Spec) -> impl Iterator<Item = u32> {
    let ordinary = spec.memory.nodes.iter().map(|node| node.id);
    let mut first = ordinary.max().map_or(0, |last| last.saturating_add(1));
    let mut taken: Vec<u32> = spec.egm.iter().map(|slice| slice.node).collect();
    taken.sort_unstable();
    std::iter::from_fn(move || {
        for node in &taken {
            if (first..first.saturating_add(GPU_NODES)).contains(node) {
                first = node.saturating_add(1);
            }
        }
        let found = first;
        first = first.saturating_add(GPU_NODES);
        Some(found)
    })
}

/// Whether functions of the host can be plugged into the machine's spare ports.
fn takes_functions(spec: &Spec, facts: &Facts) -> bool {
    spec.pcie.spare.is_some() && facts.iommu.present().is_some()
}

/// The BARs of `host` that are memory; `None` without any.
fn gpu_memory(host: &HostFunction) -> Option<Vec<u8>> {
    let shown: Vec<(u8, u64)> = host.memory.iter().map(|memory| (memory.bar, memory.size)).collect();
    let bars: Vec<u8> = Variant::memory(host, &shown).iter().map(|memory| memory.bar).collect();
    (!bars.is_empty()).then_some(bars)
}

fn wants_p2p(one: &Wanted<'_>) -> bool {
    matches!(one.device.kind, DeviceKind::Vfio { p2p: true, .. })
}

/// Reason why the host would not hand over `host` in its present state.
fn unusable(facts: &Facts, host: &HostFunction) -> Option<String> {
    let error = topology::usable(&facts.functions, host.address).err()?;
    Some(format!("{error}; {}", error.help()))
}

/// Whether a backing has no struct pages, so that nothing is pinned and only type 1 maps it.
fn is_invisible(backing: &BackingPlan, facts: &Facts) -> bool {
    region(backing, facts)
        .is_some_and(|region| matches!(region.kind, RegionKind::Egm { .. } | RegionKind::Reserved { .. }))
}

/// Refuses guest memory that no function of the host can reach: files of DAX file systems have no long-term pins.
fn check_pins(wanted: &[Wanted<'_>], facts: &Facts, backings: &[BackingPlan]) -> Result<(), AssignedRule> {
    for backing in backings.iter().filter(|backing| !backing.device) {
        let Some(region) = region(backing, facts).filter(|region| region.kind.has_slice_files()) else {
            continue;
        };
        let assigned = wanted.iter().find(|one| one.host.is_some());
        let what = assigned.map_or_else(
            || "a function that is plugged into a spare port".to_owned(),
            |one| format!("device \"{}\"", one.device.id),
        );
        return Err(AssignedRule::FsdaxMemory {
            what,
            backing: backing.id.clone(),
            region: region.name.clone(),
        });
    }
    Ok(())
}

/// The region that a backing is of, where it is of one.
fn region<'a>(backing: &BackingPlan, facts: &'a Facts) -> Option<&'a Region> {
    facts.region(backing.region.as_ref()?).map(|host| &host.region)
}

/// The first backing that is memory of the guest and of the EGM region of GPU `host`.
fn own_egm<'a>(
    host: &HostFunction,
    facts: &Facts,
    backings: &'a [BackingPlan],
) -> Option<(usize, &'a BackingPlan)> {
    backings.iter().enumerate().find(|(_, backing)| {
        region(backing, facts).is_some_and(|region| {
            let is_egm = matches!(region.kind, RegionKind::Egm { .. });
            is_egm && region.functions.contains(&host.address) && !backing.device
        })
    })
}

/// Note that the GPU would take other bytes of the region for those of the slice.
fn no_egm(host: &HostFunction, backing: &BackingPlan) -> String {
    format!(
        "{} does not use {} as EGM: it counts from the beginning of {}, and the slice begins {:#x} behind that; let it be the \
         region's first",
        host.address,
        backing.id,
        backing.region.as_deref().unwrap_or_default(),
        backing.offset
    )
}

/// NVIDIA's kernels carry a patch with which iommufd maps memory without struct pages.
fn maps_invisible(facts: &Facts) -> bool {
    facts.kernel.contains("nvidia")
}

fn lends_bars(interface: Interface, facts: &Facts) -> bool {
    interface == Interface::Legacy || release(&facts.kernel) >= IOMMUFD_BARS
}

/// `6.12.0-1-amd64` is (6, 12); what is no release is (0, 0).
fn release(kernel: &str) -> (u32, u32) {
    let mut numbers = kernel.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The interface for all functions, and why.
fn interface(
    spec: &Spec,
    facts: &Facts,
    hosts: &[&HostFunction],
    backings: &[BackingPlan],
) -> Result<(Interface, String), PlanError> {
    let asked = |device: &Device| match device.kind {
        DeviceKind::Vfio { backend: VfioBackend::Legacy, .. } => Some((device.id.clone(), Interface::Legacy)),
        DeviceKind::Vfio { backend: VfioBackend::Iommufd, .. } => {
            Some((device.id.clone(), Interface::Iommufd))
        }
        _ => None,
    };
    let asked: Vec<(String, Interface)> = spec.devices.iter().filter_map(asked).collect();
    let invisible = backings.iter().find(|backing| is_invisible(backing, facts));
    if let Some((first, interface)) = asked.first() {
        if let Some((second, _)) = asked.iter().find(|(_, other)| other != interface) {
            return Err(AssignedRule::Interfaces { first: first.clone(), second: second.clone() }.into());
        }
        if *interface == Interface::Iommufd
            && let Some(backing) = invisible
            && !maps_invisible(facts)
        {
            let region = backing.region.clone().unwrap_or_default();
            return Err(AssignedRule::IommufdMemory {
                device: first.clone(),
                backing: backing.id.clone(),
                region,
            }
            .into());
        }
        return Ok((*interface, format!("device \"{first}\" asks for it")));
    }
    let legacy = |why: String| Ok((Interface::Legacy, why));
    if let Some(backing) = invisible {
        let region = backing.region.as_deref().unwrap_or_default();
        let id = &backing.id;
        return legacy(format!(
            "{id} is of {region}, memory without struct pages, which iommufd of stock kernels does not map"
        ));
    }
    if !facts.iommu.present().is_some_and(|iommu| iommu.iommufd) {
        return legacy("the host has no /dev/iommu".to_owned());
    }
    if let Some(without) = hosts.iter().find(|host| host.place.cdev.is_none()) {
        return legacy(format!("{} has no file in /dev/vfio/devices", without.address));
    }
    let more = spec.pcie.spare.map_or(0, |spare| usize::from(spare.ports));
    if hosts.len().saturating_add(more) > 1 && !lends_bars(Interface::Iommufd, facts) {
        return legacy(format!(
            "functions reach each other's BARs, for which iommufd needs Linux 6.19: this is {}",
            facts.kernel
        ));
    }
    Ok((Interface::Iommufd, "the host has it, and it maps all of the machine's memory".to_owned()))
}

/// Note on how devices reach guest_memfd: both interfaces pin what the machine's process has mapped.
fn by_address(backing: &BackingPlan, interface: Interface) -> String {
    let id = &backing.id;
    match interface {
        Interface::Legacy => format!("{id} is guest_memfd: type 1 pins its pages by address"),
        Interface::Iommufd => format!(
            "{id} is guest_memfd: iommufd pins its pages by address, since it maps only memfd and hugetlb by file"
        ),
    }
}

fn groups(hosts: &[&HostFunction]) -> Vec<GroupPlan> {
    let mut groups: Vec<GroupPlan> = Vec::new();
    for (id, function) in hosts.iter().filter_map(|host| Some((host.iommu_group?, host.address))) {
        match groups.iter_mut().find(|group| group.id == id) {
            Some(group) => group.functions.push(function),
            None => groups.push(GroupPlan { id, functions: vec![function] }),
        }
    }
    groups.iter_mut().for_each(|group| group.functions.sort_unstable());
    groups.sort_by_key(|group| group.id);
    groups
}
