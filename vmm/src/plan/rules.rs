//! Reasons that a [`PlanError`](crate::plan::PlanError) quotes: rules of host functions and BARs, regions without room.

use std::collections::BTreeSet;

use egm_address::{Gpa, Guest, PciAddress, Span};
use egm_device::carve::plan::PlacementError;
use egm_device::trust::Conflict;
use egm_report::Report;
use egm_report::show::first_of;
use egm_vfio::variant::data_direct::PairingProblem;

use crate::config::{GUEST_MEMFD, LOCAL, MAX_NODES, nearest};
use crate::facts::HeldSpan;
use crate::plan::{AddressBits, GPU_NODES};

/// A rule that the keys of a host function break.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum AssignedRule {
    /// A BAR that cannot be where the configuration wants it.
    #[error("device \"{device}\": BAR {index} cannot have the address that \"bars\" gives it: {why}")]
    FixedBar {
        /// Id of the device.
        device: String,
        index: u8,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// A fixed address range that is taken or not usable.
    #[error("device \"{device}\": {what} cannot lie at {span}: {rule}")]
    Place {
        /// Id of the device.
        device: String,
        /// Name of the range: `BAR 2`.
        what: String,
        span: Span<Guest>,
        /// The rule that it breaks.
        rule: PlacementRule,
        /// Whether Data Direct requires that range.
        data_direct: bool,
    },
    /// A function of a pair that its driver in the guest would not find the other for.
    #[error("device \"{device}\": Data Direct function {function} is of no use: {why}")]
    DataDirect {
        /// Id of the device.
        device: String,
        function: PciAddress,
        why: PairingProblem,
        /// The missing function, where the facts have it.
        partner: Option<PciAddress>,
    },
    /// The other function of the pair is missing.
    #[error(
        "device \"{device}\" reaches the machine's GPUs by Data Direct, and {partner}, the function of its card that does so, \
         is not given to this guest"
    )]
    NoDataDirect {
        /// Id of the device.
        device: String,
        partner: PciAddress,
    },
    /// A GPU's BAR that cannot have its host's address.
    #[error("device \"{device}\": Data Direct uses the host's address of BAR {index}, and {why}")]
    DataDirectBar {
        /// Id of the device.
        device: String,
        index: u8,
        why: &'static str,
    },
    /// Two interfaces of the kernel in one machine.
    #[error(
        "devices \"{first}\" and \"{second}\" ask for different backends, and guest memory is mapped by one"
    )]
    Interfaces {
        /// Id of a device.
        first: String,
        /// Id of the other.
        second: String,
    },
    /// iommufd with memory that it does not map.
    #[error(
        "device \"{device}\" asks for iommufd, which on stock kernels does not map {backing}, memory of region {region} without struct pages"
    )]
    IommufdMemory {
        /// Id of the device.
        device: String,
        backing: String,
        region: String,
    },
    /// Host functions with memory that the kernel pins for no DMA.
    #[error(
        "{what} reaches guest memory by DMA, and {backing} is of region {region}: the kernel pins no page of a file on a DAX \
         file system (EOPNOTSUPP)"
    )]
    FsdaxMemory {
        /// Subject of the message: `device "gpu0"`.
        what: String,
        backing: String,
        region: String,
    },
    /// A vfio-user server, and memory that cannot be shared with it.
    #[error(
        "device \"{device}\": cannot share {backing} with its vfio-user server: the file of region {region} holds all slices of \
         the region"
    )]
    ServerMemory {
        /// Id of the device.
        device: String,
        backing: String,
        region: String,
    },
    /// Nodes of a GPU's memory that have no numbers.
    #[error(
        "device \"{device}\": the nodes of its memory would be {first} to {}, and node ids are below {MAX_NODES}",
        first.saturating_add(GPU_NODES - 1)
    )]
    Nodes {
        /// Id of the device.
        device: String,
        /// The first of them.
        first: u32,
    },
    /// A clique for something else than an NVIDIA GPU.
    #[error("device \"{device}\" has a \"clique\", and is no NVIDIA GPU")]
    Clique {
        /// Id of the device.
        device: String,
    },
}

/// Why a place that a configuration names is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum PlacementRule {
    #[error("guest memory ends at {0}, and BARs come after it")]
    Memory(Gpa),
    #[error("guest addresses end at {limit:#x}, the end of {bits}")]
    Beyond {
        /// One past the last.
        limit: u64,
        /// Source of that limit.
        bits: AddressBits,
    },
    #[error("the host's processor or IOMMU reserves {0}")]
    Reserved(Span<Guest>),
    #[error("device \"{0}\" has BARs there")]
    Shared(String),
}

impl AssignedRule {
    pub(super) fn help(&self) -> String {
        match self {
            Self::Place { data_direct: true, rule, .. } => {
                let free = match rule {
                    PlacementRule::Memory(_) => "give the guest less memory",
                    PlacementRule::Beyond { .. } => "let the guest have the host's address bits",
                    PlacementRule::Reserved(_) => "let the host's firmware move that BAR",
                    PlacementRule::Shared(_) => "move the other device's BAR",
                };
                return format!(
                    "{free}, or leave the Data Direct functions (15b3:2100) out: they use the host's address of a GPU's \
                     second BAR"
                );
            }
            Self::DataDirect { partner: Some(partner), .. } | Self::NoDataDirect { partner, .. } => {
                return format!(
                    "add {{ \"type\": \"vfio\", \"function\": \"{partner}\" }} to \"devices\", bound to vfio-pci as \
                     \"egm-vmm bind {partner}\" does"
                );
            }
            Self::DataDirect { .. } => "leave it out of \"devices\"",
            Self::DataDirectBar { .. } => {
                "leave the BAR out of the device's \"bars\", or the Data Direct functions (15b3:2100) out of \"devices\""
            }
            Self::FixedBar { .. } | Self::Place { .. } => {
                "leave it out of the device's \"bars\", or write another address there"
            }
            Self::Interfaces { .. } => "give both the same \"backend\", or leave it out",
            Self::IommufdMemory { .. } => "set \"backend\" to \"legacy\" or leave it out",
            Self::FsdaxMemory { .. } => {
                "take the slice from \"devdax\", or leave host functions and \"spare\" of \"pcie\" out"
            }
            Self::ServerMemory { .. } => "take the slice from \"memfd\" or \"hugetlb\", or remove the device",
            Self::Nodes { .. } => "give \"nodes\" of \"memory\" smaller ids: those of GPUs come after the last of them",
            Self::Clique { .. } => "leave \"clique\" out",
        }
        .to_owned()
    }
}

/// Why a slice cannot come from a region.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum NoPlacement {
    /// The host has no such region.
    #[error("the host has none")]
    Unknown,
    /// KVM has no guest_memfd, or could not be opened to check.
    #[error(
        "no guest_memfd that the host can map: KVM lacks it (KVM_CAP_GUEST_MEMFD_FLAGS, Linux 6.18), or this user may not \
         open /dev/kvm"
    )]
    NoGuestMemfd,
    /// guest_memfd has base pages of any node, and the slice chooses pages or nodes.
    #[error("its pages are small and of any node, and the slice chooses \"{key}\"")]
    NoChoice {
        /// Configuration key of the slice's choice.
        key: &'static str,
    },
    /// Another trust domain's GPU reaches it.
    #[error(transparent)]
    Exclusive(#[from] Box<Conflict>),
    /// It has no free span for the slice.
    #[error("{short}{}", held_by(held))]
    Short {
        short: PlacementError,
        /// Holders of the region's bytes.
        held: Vec<HeldSpan>,
    },
}

impl NoPlacement {
    /// Remedy for a slice that none of the regions `tried` can give.
    pub(super) fn remedy(tried: &[(String, Self)]) -> String {
        let conflict = tried.iter().find_map(|(_, why)| match why {
            Self::Exclusive(conflict) => conflict.help(),
            _ => None,
        });
        let all = |is: fn(&Self) -> bool| tried.iter().all(|(_, why)| is(why));
        match conflict.filter(|_| all(|why| matches!(why, Self::Exclusive(_)))) {
            Some(help) => help,
            None if all(|why| !matches!(why, Self::Short { .. })) => {
                format!("give \"region\" a list that ends in \"{LOCAL}\"")
            }
            None => {
                format!("lower the slice's \"size\", or give \"region\" a list that ends in \"{LOCAL}\"")
            }
        }
    }

    /// Remedy for a region that the host does not have; it has those of `names`, and of `kinds`.
    pub(super) fn unknown(region: &str, names: &[String], kinds: &[&str]) -> String {
        let everywhere = ["hugetlb", GUEST_MEMFD, "memfd", LOCAL];
        let names = names.iter().map(String::as_str).chain(kinds.iter().copied()).chain(everywhere);
        let meant = nearest(region, names).filter(|near| *near != region);
        let question = meant.map_or_else(String::new, |near| format!("did you mean \"{near}\"? "));
        format!(
            "{question}\"egm-device regions\" shows what the host has, \"{LOCAL}\" is memory of egm-vmm itself"
        )
    }
}

/// `; held by vm1 (process 12, user 0), vm2 (process 13, user 0)`.
fn held_by(held: &[HeldSpan]) -> String {
    let owners: BTreeSet<&str> = held.iter().map(|held| held.owner.as_str()).collect();
    if owners.is_empty() {
        return String::new();
    }
    format!("; held by {}", first_of(owners.into_iter().map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_host_has_is_suggested() {
        let remedy = |kinds: &[&str]| NoPlacement::unknown("egm4", &["dax0.0".to_owned()], kinds);
        assert!(remedy(&["devdax"]).starts_with("\"egm-device regions\" shows"), "{}", remedy(&["devdax"]));
        assert!(remedy(&["devdax", "egm"]).starts_with("did you mean \"egm\"? "));
        let local = NoPlacement::unknown("locla", &[], &[]);
        assert!(local.starts_with("did you mean \"local\"? "), "{local}");
    }
}
