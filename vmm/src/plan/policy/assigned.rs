//! Plan of the host functions: the kernel's interface that opens them, and which functions reach each other.

use std::collections::BTreeMap;

use egm_device::region::{Region, RegionKind};
use egm_vfio::host::HostFunction;
use egm_vfio::topology;
use egm_vfio::variant::Variant;

use crate::config::{DeviceKind, MAX_NODES, Spec, VfioBackend};
use crate::facts::Facts;
use crate::plan::demand::Demand;
use crate::plan::policy::cliques;
use crate::plan::{
    AssignedPlan, AssignedRule, BackingPlan, GPU_NODES, GpuMemoryPlan, GroupPlan, Interface, PassthroughPlan,
    PlanError,
};

/// First kernel with an iommufd that maps BARs of other functions, as dma-bufs (71db84a092c3).
const IOMMUFD_BARS: (u32, u32) = (6, 19);

/// Decisions for all host functions, and notes for the operator.
#[derive(Default)]
pub(super) struct Decided {
    /// By id of the device.
    pub(super) functions: BTreeMap<String, AssignedPlan>,
    pub(super) passthrough: Option<PassthroughPlan>,
    pub(super) notes: Vec<String>,
}

/// Decides for all host functions of the machine.
pub(super) fn decide(demand: &Demand<'_>) -> Result<Decided, PlanError> {
    let hosts: Vec<&HostFunction> = demand.hosts().collect();
    if hosts.is_empty() && !takes_functions(demand) {
        return Ok(Decided::default());
    }
    check_pins(demand)?;
    let Choice { interface, why } = interface(demand, &hosts)?;
    let shares = shares_bars(interface, demand.facts);
    let cliques = cliques::decide(demand, shares)?;
    let mut notes: Vec<String> = hosts.iter().filter_map(|host| unusable(demand.facts, host)).collect();
    if !shares && hosts.len() > 1 && demand.devices.iter().any(|one| one.allows_p2p()) {
        notes.push(format!(
            "assigned functions do not reach each other's BARs: iommufd of Linux {} cannot map them, 6.19 can, and so can \
             \"backend\": \"legacy\"",
            demand.facts.kernel
        ));
    }
    let guest_memfd = demand.backings.iter().filter(|backing| backing.guest_memfd);
    notes.extend(guest_memfd.map(|backing| by_address(backing, interface)));
    notes.extend(cliques.warnings);
    let mut functions = BTreeMap::new();
    let mut nodes = free_nodes(demand.spec);
    for (one, clique) in demand.devices.iter().zip(cliques.numbers) {
        let Some(host) = one.host else { continue };
        let memory = memory_bars(host).map(|bars| {
            let first_node = nodes.next().unwrap_or(u32::MAX);
            GpuMemoryPlan { bars, first_node, egm: egm_backing(host, demand, &mut notes) }
        });
        if let Some(GpuMemoryPlan { first_node: first, .. }) = memory
            && first.saturating_add(GPU_NODES) > MAX_NODES
        {
            return Err(AssignedRule::Nodes { device: one.device.id.clone(), first }.into());
        }
        let assigned = AssignedPlan {
            function: host.address,
            group: host.iommu_group,
            node: one.node,
            clique,
            p2p: shares && one.allows_p2p(),
            memory,
            partner: one.partner,
        };
        functions.insert(one.device.id.clone(), assigned);
    }
    let pinned = demand.backings.iter().filter(|backing| !is_invisible(backing, demand.facts));
    let pinned = pinned.map(|backing| backing.size).sum();
    let passthrough = Some(PassthroughPlan { interface, why, groups: groups(&hosts), pinned });
    Ok(Decided { functions, passthrough, notes })
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
fn takes_functions(demand: &Demand<'_>) -> bool {
    demand.spec.pcie.spare.is_some() && demand.facts.iommu.present().is_some()
}

/// The BARs of `host` that are memory; `None` without any.
fn memory_bars(host: &HostFunction) -> Option<Vec<u8>> {
    let shown: Vec<(u8, u64)> = host.memory.iter().map(|memory| (memory.bar, memory.size)).collect();
    let bars: Vec<u8> = Variant::memory(host, &shown).iter().map(|memory| memory.bar).collect();
    (!bars.is_empty()).then_some(bars)
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
fn check_pins(demand: &Demand<'_>) -> Result<(), AssignedRule> {
    for backing in demand.backings.iter().filter(|backing| !backing.device) {
        let region = region(backing, demand.facts).filter(|region| region.kind.has_slice_files());
        let Some(region) = region else { continue };
        let what = match demand.devices.iter().find(|one| one.host.is_some()) {
            Some(one) => format!("device \"{}\"", one.device.id),
            None => "a function that is plugged into a spare port".to_owned(),
        };
        let (backing, region) = (backing.id.clone(), region.name.clone());
        return Err(AssignedRule::FsdaxMemory { what, backing, region });
    }
    Ok(())
}

/// The region that a backing is of, where it is of one.
fn region<'a>(backing: &BackingPlan, facts: &'a Facts) -> Option<&'a Region> {
    facts.region(backing.region.as_ref()?).map(|host| &host.region)
}

/// Index of the first backing that is memory of the guest and of the EGM region of GPU `host`, if the GPU can use it; a note
/// where not.
fn egm_backing(host: &HostFunction, demand: &Demand<'_>, notes: &mut Vec<String>) -> Option<usize> {
    let is_own = |backing: &BackingPlan| {
        let region = region(backing, demand.facts).filter(|_| !backing.device);
        region.is_some_and(|region| {
            matches!(region.kind, RegionKind::Egm { .. }) && region.functions.contains(&host.address)
        })
    };
    let (index, backing) = demand.backings.iter().enumerate().find(|(_, backing)| is_own(backing))?;
    if backing.offset == 0 {
        return Some(index);
    }
    notes.push(no_egm(host, backing));
    None
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

/// Whether functions that `interface` opens reach each other's BARs.
fn shares_bars(interface: Interface, facts: &Facts) -> bool {
    interface == Interface::Legacy || release(&facts.kernel) >= IOMMUFD_BARS
}

/// `6.12.0-1-amd64` is (6, 12); what is no release is (0, 0).
fn release(kernel: &str) -> (u32, u32) {
    let mut numbers = kernel.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The interface for all functions, and why.
struct Choice {
    interface: Interface,
    why: String,
}

/// The interface that a device of the configuration asks for.
struct Asked<'a> {
    device: &'a str,
    interface: Interface,
}

fn interface(demand: &Demand<'_>, hosts: &[&HostFunction]) -> Result<Choice, PlanError> {
    let asked = asked(demand.spec);
    let invisible = demand.backings.iter().find(|backing| is_invisible(backing, demand.facts));
    if let Some(first) = asked.first() {
        if let Some(second) = asked.iter().find(|other| other.interface != first.interface) {
            let (first, second) = (first.device.to_owned(), second.device.to_owned());
            return Err(AssignedRule::Interfaces { first, second }.into());
        }
        if first.interface == Interface::Iommufd
            && let Some(backing) = invisible
            && !maps_invisible(demand.facts)
        {
            let (device, region) = (first.device.to_owned(), backing.region.clone().unwrap_or_default());
            return Err(AssignedRule::IommufdMemory { device, backing: backing.id.clone(), region }.into());
        }
        let why = format!("device \"{}\" asks for it", first.device);
        return Ok(Choice { interface: first.interface, why });
    }
    Ok(match legacy_only(demand, hosts, invisible) {
        Some(why) => Choice { interface: Interface::Legacy, why },
        None => {
            let why = "the host has it, and it maps all of the machine's memory".to_owned();
            Choice { interface: Interface::Iommufd, why }
        }
    })
}

fn asked(spec: &Spec) -> Vec<Asked<'_>> {
    let mut asked = Vec::new();
    for device in &spec.devices {
        let interface = match device.kind {
            DeviceKind::Vfio { backend: VfioBackend::Legacy, .. } => Interface::Legacy,
            DeviceKind::Vfio { backend: VfioBackend::Iommufd, .. } => Interface::Iommufd,
            _ => continue,
        };
        asked.push(Asked { device: &device.id, interface });
    }
    asked
}

/// Why iommufd does not do for the machine, where the configuration leaves the choice.
fn legacy_only(
    demand: &Demand<'_>,
    hosts: &[&HostFunction],
    invisible: Option<&BackingPlan>,
) -> Option<String> {
    let facts = demand.facts;
    if let Some(backing) = invisible {
        let region = backing.region.as_deref().unwrap_or_default();
        return Some(format!(
            "{} is of {region}, memory without struct pages, which iommufd of stock kernels does not map",
            backing.id
        ));
    }
    if !facts.iommu.present().is_some_and(|iommu| iommu.iommufd) {
        return Some("the host has no /dev/iommu".to_owned());
    }
    if let Some(without) = hosts.iter().find(|host| host.place.cdev.is_none()) {
        return Some(format!("{} has no file in /dev/vfio/devices", without.address));
    }
    let more = demand.spec.pcie.spare.map_or(0, |spare| usize::from(spare.ports));
    if hosts.len().saturating_add(more) > 1 && !shares_bars(Interface::Iommufd, facts) {
        return Some(format!(
            "functions reach each other's BARs, for which iommufd needs Linux 6.19: this is {}",
            facts.kernel
        ));
    }
    None
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
