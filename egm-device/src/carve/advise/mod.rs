//! Advice on how to split this host's memory between its kernel and its guests, computed from its facts.
//!
//! ```text
//!  HostFacts ─ram─► RAM of each node ─keep─► hidden spans ─► words of the command line, or firmware settings
//! ```
//! The hypervisor keeps the lowest memory of each node, because kernels and old devices need low addresses; what is above
//! is hidden from the first multiple of 1 GiB on, so that the largest mappings fit.

mod firmware;
mod kernel;
mod need;
mod ram;
mod undo;

use egm_address::{ByteSize, Host, Span};
use egm_report::show::size;
use egm_report::{Blame, Remedy, Report};
use serde::{Deserialize, Serialize};

use crate::region::{HostFacts, Region, RegionKind, ReservedSpan};

pub use need::Need;
pub use undo::{Undo, undo};

/// Version of the JSON form of [`Split`].
pub(crate) const SPLIT_VERSION: u32 = 1;

/// Ways to split a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitMethod {
    /// `mem=`: the kernel sees nothing above an address.
    Mem,
    /// `memmap=nn$ss`: spans are reserved (x86).
    Memmap,
    /// A pool of huge pages: visible, but for guests only.
    Hugetlb,
    /// `memmap=nn!ss`: persistent memory, mapped as device-DAX (x86).
    Dax,
    /// NVIDIA's firmware hides memory before anything boots (Grace).
    Firmware,
}

impl SplitMethod {
    /// As operators write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mem => "mem",
            Self::Memmap => "memmap",
            Self::Hugetlb => "hugetlb",
            Self::Dax => "dax",
            Self::Firmware => "firmware",
        }
    }

    /// Whether it gives places: the others give amounts.
    pub(super) const fn has_places(self) -> bool {
        matches!(self, Self::Mem | Self::Memmap | Self::Dax)
    }
}

/// A way, and how much of each node's memory goes by it; the last of several ways takes what is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitPart {
    /// Method that hides the memory.
    pub how: SplitMethod,
    /// Bytes, a multiple of 2 MiB; `None` for the last.
    pub size: Option<ByteSize>,
}

/// Wishes of an operator.
#[derive(Debug, Clone)]
pub struct SplitRequest {
    /// Memory that the hypervisor keeps.
    pub hypervisor: ByteSize,
    /// Whether each node keeps that much, instead of all nodes together.
    pub per_node: bool,
    /// By which ways; for none, the host decides.
    pub parts: Vec<SplitPart>,
}

/// A split of a host, and the expected result.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    /// Always `SPLIT_VERSION` in this version.
    pub version: u32,
    /// Methods of the split, by address from low to high.
    pub ways: Vec<SplitMethod>,
    /// Words to take from the kernel's command line.
    pub remove: Vec<String>,
    /// Words to add to it.
    pub words: Vec<String>,
    /// Settings of the firmware.
    pub settings: Vec<Setting>,
    /// Commands to run after each boot.
    pub commands: Vec<String>,
    /// Regions for the host file.
    pub regions: Vec<ReservedSpan>,
    /// The expected memory of each node.
    pub nodes: Vec<NodeSplit>,
}

/// A setting of the firmware.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// Its name in the setup form.
    pub form: String,
    /// Its name below Redfish `Bios/Attributes`.
    pub attribute: String,
    /// Value to set: a number or a boolean.
    pub value: serde_json::Value,
}

/// A node after the split.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeSplit {
    /// Number of the node.
    pub node: u32,
    /// Memory that the hypervisor keeps; its kernel counts a little less as `MemTotal`.
    pub keeps: ByteSize,
    /// Memory that guests get at this node.
    pub guests: ByteSize,
    /// Its addresses, unless pages of a pool or the firmware decide.
    pub hidden: Vec<HiddenPiece>,
}

/// Memory that one way hides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HiddenPiece {
    /// Method that hides the memory.
    pub how: SplitMethod,
    /// Host physical addresses of the hidden memory.
    pub span: Span<Host>,
}

/// A split that this host cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum AdviseError {
    #[error("/proc/iomem shows no addresses, so where this host's memory lies is not known")]
    IomemHidden,
    /// The map of a host that is split already does not show what is hidden.
    #[error("this host is split already ({}) and its firmware's memory map is not shown", words.join(" "))]
    AlreadySplit { words: Vec<String> },
    /// Several nodes, and no record of the memory of each.
    #[error("cannot assign memory to {nodes} nodes: the ACPI table SRAT has no entry for it")]
    NoAffinity { nodes: usize },
    #[error("node {node} has {}: nothing is left for guests when the hypervisor keeps {}", size(has.get()), size(keeps.get()))]
    NothingLeft { node: u32, has: ByteSize, keeps: ByteSize },
    #[error("{} can be hidden at node {node}, and {} of it are wanted with more to come", size(has.get()), size(wants.get()))]
    Short { node: u32, has: ByteSize, wants: ByteSize },
    /// Ways that exclude each other, or the wrong one with a size.
    #[error(
        "--how {0}: several ways are mem, memmap and dax, each once, all but the last with a size in steps of 2MiB"
    )]
    Parts(String),
    #[error("--how {how} needs {needs}, and this is {is}")]
    Unsupported { how: &'static str, needs: &'static str, is: String },
    #[error("mem= has one limit for the whole host, so it cannot leave {} to each of {nodes} nodes", size(keeps.get()))]
    OneLimit { keeps: ByteSize, nodes: usize },
}

impl Report for AdviseError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::IomemHidden => Blame::Host.help("run it as root"),
            Self::AlreadySplit { .. } => Blame::Host
                .help("take the host back first (egm-device carve advise --undo), reboot, and run this command again"),
            Self::NoAffinity { .. } => {
                Blame::Host.help("run it as root; without the table, use --how mem or --how hugetlb")
            }
            Self::NothingLeft { .. } => Blame::Configuration.help("ask for less with --hypervisor"),
            Self::Short { .. } => {
                Blame::Configuration.help("ask for less with --how, or keep less with --hypervisor")
            }
            Self::Parts(_) => Blame::Configuration.help("write for instance --how memmap=1GiB,mem"),
            Self::OneLimit { .. } => Blame::Configuration.help("use --how memmap, or leave --per-node out"),
            Self::Unsupported { how: "firmware", .. } => {
                Blame::Host.help("use --how mem or --how hugetlb, on x86 also memmap or dax")
            }
            Self::Unsupported { .. } => Blame::Host.help("use --how mem or --how hugetlb"),
        }
    }
}

/// Computes the split that `request` describes.
pub fn advise(facts: &HostFacts, regions: &[Region], request: &SplitRequest) -> Result<Split, AdviseError> {
    let usual = [SplitPart { how: usual(facts, regions), size: None }];
    let parts: &[SplitPart] = if request.parts.is_empty() { &usual } else { &request.parts };
    let split = match parts {
        [SplitPart { how: SplitMethod::Hugetlb, size: None }] => kernel::hugetlb(facts, request)?,
        [SplitPart { how: SplitMethod::Firmware, size: None }] => {
            firmware::firmware(facts, regions, request)?
        }
        parts if may_be_combined(parts) => kernel::map(facts, request, parts)?,
        parts => return Err(AdviseError::Parts(text(parts))),
    };
    Ok(Split { version: SPLIT_VERSION, ways: parts.iter().map(|part| part.how).collect(), ..split })
}

/// Whether each way comes once, has places, and all but the last one have a size.
fn may_be_combined(parts: &[SplitPart]) -> bool {
    parts.iter().enumerate().all(|(i, part)| {
        let last = i.saturating_add(1) == parts.len();
        let aligned = part.size.is_none_or(|size| size.get() > 0 && size.get().is_multiple_of(2 << 20));
        let once = parts.iter().filter(|other| other.how == part.how).count() == 1;
        part.how.has_places() && part.size.is_none() == last && aligned && once
    })
}

fn text(parts: &[SplitPart]) -> String {
    let part = |part: &SplitPart| match part.size {
        Some(size) => format!("{}={size}", part.how.name()),
        None => part.how.name().to_owned(),
    };
    parts.iter().map(part).collect::<Vec<_>>().join(",")
}

/// The way that hides most and costs least on this kind of host. On Arm, `/dev/mem` maps what `mem=` hides uncached.
fn usual(facts: &HostFacts, regions: &[Region]) -> SplitMethod {
    let egm = regions.iter().any(|region| matches!(region.kind, RegionKind::Egm { .. }));
    match (egm || firmware::is_grace(facts), is_x86(facts)) {
        (true, _) => SplitMethod::Firmware,
        (false, true) => SplitMethod::Memmap,
        (false, false) => SplitMethod::Hugetlb,
    }
}

/// Whether the kernel knows `memmap=` and `mem=` is an address.
fn is_x86(facts: &HostFacts) -> bool {
    facts.arch == "x86_64"
}

/// A size as the kernel reads it: `64G`, `1536M`.
fn memparse(bytes: u64) -> String {
    [(30, "G"), (20, "M"), (10, "K")]
        .into_iter()
        .find(|(shift, _)| bytes != 0 && bytes.trailing_zeros() >= *shift)
        .map_or_else(|| format!("{bytes:#x}"), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests;
