//! Tables in place of firmware's: the plan in the form of ACPI, and on Arm of EFI, SMBIOS and device trees.
//!
//! Pure: a plan goes in, bytes with their guest addresses come out. Nothing here decides anything: every table states
//! what the plan has decided.

#![forbid(unsafe_code)]

mod acpi;
mod bridges;
mod buffer;
mod efi;
mod smbios;
pub mod tree;

use egm_address::{Gpa, Guest, Span};

use buffer::{Contents, WindowBuffer};

use crate::arch::aarch64::layout::{MOST_REGIONS, REDISTRIBUTOR, TREE};
use crate::config::{Architecture, MAX_NODES, MAX_VCPUS};
use crate::error::{Blame, Remedy, Report};
use crate::plan::{MemoryPlan, Plan, WindowKind};

/// Bytes at the end of the firmware window that no table uses: on x86 the BIOS's reset vector is there.
pub const RESET_VECTOR_SIZE: u64 = 16;
/// The sleep type that `\_S5` names.
pub(crate) const SLEEP_TYPE_S5: u8 = 5;
/// Value that the FADT has the guest write into the reset register.
pub(crate) const RESET_VALUE: u8 = 1;
/// Most sections of a record in the error block: HEST states the number, and the machine keeps to it.
pub const ERROR_SECTIONS: u32 = 26;

/// The bytes of all tables and where the guest finds them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Where the first of [`Image::bytes`] goes: the start of the plan's firmware window, a multiple of 16.
    pub base: Gpa,
    /// Everything, at most the window's size. Bytes between tables are zero.
    pub bytes: Vec<u8>,
    /// ACPI root system description pointer; boot protocols pass it on (`acpi_rsdp_addr`, `rsdp_paddr`).
    pub rsdp: Gpa,
    /// The tables, ascending by address, the pointer itself not counted.
    pub tables: Vec<Table>,
    /// EFI structures of an aarch64 guest.
    pub efi: Option<Efi>,
    /// Error status block of a guest with a HEST; clear at the start.
    pub errors: Option<Span<Guest>>,
}

/// EFI's structures inside an [`Image`], which lead to everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Efi {
    /// The system table (UEFI 2.10, 4.3).
    pub system_table: Gpa,
    /// The memory map: entries of `tree::DESCRIPTOR_SIZE` bytes.
    pub memory_map: Span<Guest>,
}

/// One table inside an [`Image`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    /// Its signature, for instance `SRAT`.
    pub signature: [u8; 4],
    /// Where the guest sees it.
    pub span: Span<Guest>,
}

/// Why the tables cannot describe a plan.
///
/// [`Self::TooLarge`] and [`Self::NoInitiator`] come from the configuration; planning never causes the others.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum FirmwareError {
    /// The tables do not fit.
    #[error("firmware tables need {need:#x} bytes, {over:#x} more than the window {window} holds")]
    TooLarge { need: u64, over: u64, window: Span<Guest> },
    /// More pieces of RAM than a kernel keeps.
    #[error("guest memory is in {regions} pieces, and a kernel keeps {MOST_REGIONS} at most")]
    MemoryMap { regions: usize },
    /// Memory that does not begin and end on boundaries of a guest's largest page.
    #[error("guest memory {0} does not begin and end on 64 KiB boundaries")]
    Memory(Span<Guest>),
    /// A device tree that the format cannot hold.
    #[error("the device tree: {0}")]
    Tree(#[from] vm_fdt::Error),
    /// A stub tree for tables without EFI structures.
    #[error("the tables have no EFI system table: only those of an aarch64 plan have")]
    NoEfi,
    /// Access figures of a node that has no processors to look from.
    #[error("node {node} has access figures from node {from}, which has no vCPUs to look from")]
    NoInitiator {
        /// Node of the memory.
        node: u32,
        /// Node without vCPUs that the figures are given for.
        from: u32,
    },
    /// The plan has no such window, or it has a place or size that its table cannot express.
    #[error("the plan's {what} window is {found}, but {rule}")]
    Window {
        /// Name of the window, for the message.
        what: &'static str,
        /// The window's span, or "missing".
        found: String,
        rule: &'static str,
    },
    /// The plan has too few I/O ports for this owner.
    #[error("the plan has no {count} I/O ports for \"{owner}\"")]
    Ports {
        /// Device that should answer at the ports.
        owner: &'static str,
        count: u8,
    },
    /// More processors than names for them.
    #[error("the plan has {0} vCPUs, more than {MAX_VCPUS}")]
    Vcpus(usize),
    /// A node number beyond the distance table.
    #[error("the plan has a NUMA node {0}: node ids are below {MAX_NODES}")]
    Node(u32),
    /// The distance matrix is not square.
    #[error("the plan has no distance from node {from} to node {to}")]
    Distance { from: u32, to: u32 },
}

impl Report for FirmwareError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::TooLarge { .. } => {
                Blame::Configuration.help("use fewer vCPUs, NUMA nodes or root ports, or smaller node ids")
            }
            Self::NoInitiator { from, .. } => Blame::Configuration
                .help(format!("give node {from} vCPUs, or take its \"access\" figures out")),
            _ => Blame::Internal.into(),
        }
    }
}

/// Writes every table of `plan`.
///
/// # Errors
/// [`FirmwareError`] names the part of the plan that the tables cannot express.
pub fn build(plan: &Plan) -> Result<Image, FirmwareError> {
    let (rule, align, kept) = match plan.arch {
        Architecture::X86_64 => ("it has to exist and to start on a 16-byte boundary", 16, RESET_VECTOR_SIZE),
        Architecture::Aarch64 => {
            ("it has to exist and to start on a 64 KiB boundary", efi::PAGE, TREE.size())
        }
    };
    let fits = |s: Span<Guest>| s.start().is_aligned(align) && s.size() > kept;
    let window = window(plan, WindowKind::Firmware, "firmware", rule, fits)?;
    let mut buffer = WindowBuffer::new(window);
    let acpi::Roots { rsdp, errors } = acpi::place(plan, &mut buffer)?;
    let efi = match plan.arch {
        Architecture::X86_64 => None,
        Architecture::Aarch64 => {
            let smbios = smbios::place(plan, &mut buffer);
            Some(efi::place(plan, &mut buffer, window, efi::Tables { rsdp, smbios })?)
        }
    };
    let Contents { bytes, tables } = buffer.finish(kept)?;
    Ok(Image { base: window.start(), bytes, rsdp, tables, efi, errors })
}

/// The parts of the interrupt controller of an Arm guest.
struct Gic {
    distributor: Span<Guest>,
    its: Span<Guest>,
    /// One for each vCPU, in their order.
    redistributors: Span<Guest>,
}

impl Gic {
    fn of(plan: &Plan) -> Result<Self, FirmwareError> {
        let part = |label| {
            let found = labelled(plan, WindowKind::Interrupts, label);
            found.ok_or_else(|| window_error(None, label, "an Arm guest needs it"))
        };
        let all = part("GIC redistributors")?;
        let vcpus = u64::try_from(plan.vcpus.len()).unwrap_or(u64::MAX);
        let redistributors = Span::new(all.start(), vcpus.saturating_mul(REDISTRIBUTOR));
        let redistributors = redistributors.ok().filter(|span| all.covers(*span));
        let too_few =
            || window_error(Some(all), "GIC redistributors", "it has to have 128 KiB for each vCPU");
        Ok(Self {
            distributor: part("GIC distributor")?,
            its: part("GIC ITS")?,
            redistributors: redistributors.ok_or_else(too_few)?,
        })
    }
}

/// The first window of `kind`, when `fits` accepts it: its table can express it.
fn window(
    plan: &Plan,
    kind: WindowKind,
    what: &'static str,
    rule: &'static str,
    fits: impl Fn(Span<Guest>) -> bool,
) -> Result<Span<Guest>, FirmwareError> {
    let found = plan.window(kind);
    found.filter(|span| fits(*span)).ok_or_else(|| window_error(found, what, rule))
}

fn labelled(plan: &Plan, kind: WindowKind, label: &str) -> Option<Span<Guest>> {
    plan.windows.iter().find(|w| w.kind == kind && w.label == label).map(|w| w.span)
}

/// The firmware window and RAM, with their nodes: the window is in the node of the RAM above it.
fn memory_of_nodes(plan: &Plan) -> impl Iterator<Item = MemoryPlan> {
    let window = plan.window(WindowKind::Firmware).zip(plan.memory.first());
    let window = window.map(|(span, first)| MemoryPlan { span, ..first.clone() });
    window.into_iter().chain(plan.memory.iter().cloned())
}

/// The registers of a platform device.
fn device(plan: &Plan, label: &'static str) -> Result<Span<Guest>, FirmwareError> {
    let found = labelled(plan, WindowKind::Device, label);
    found.ok_or_else(|| window_error(None, label, "a device needs registers"))
}

fn window_error(found: Option<Span<Guest>>, what: &'static str, rule: &'static str) -> FirmwareError {
    let found = found.map_or_else(|| "missing".to_owned(), |span| span.to_string());
    FirmwareError::Window { what, found, rule }
}

/// The first port of `owner`, which has at least `count` of them.
fn ports(plan: &Plan, owner: &'static str, count: u8) -> Result<u16, FirmwareError> {
    let fits = |first: u16, have: u16| {
        have >= u16::from(count) && first.checked_add(u16::from(count).saturating_sub(1)).is_some()
    };
    plan.ports
        .iter()
        .find(|p| p.owner == owner && fits(p.first, p.count))
        .map(|p| p.first)
        .ok_or(FirmwareError::Ports { owner, count })
}
