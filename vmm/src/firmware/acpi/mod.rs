//! ACPI 6.5 tables of a guest.
//!
//! ```text
//! window start ─► RSDP ──► XSDT ─┬─► FADT ──► DSDT     fixed registers; devices and methods
//!                                ├─► MADT              interrupt controllers, processors
//!                                ├─► MCFG              PCI Express configuration space
//!                                ├─► SRAT, SLIT        affinity, distances
//!                                ├─► HMAT              nanoseconds and megabytes a second, when the plan has some
//!                                ├─► GTDT, SPCR, IORT, PPTT   Arm: timers, console, message routes, topology
//!                                └─► HEST              Arm: where the guest finds reports of bad memory
//! ```
//!
//! The pointer is first so that an x86 kernel finds it without a boot parameter: it searches 0xe0000..0x100000 on
//! 16-byte boundaries (clause 5.2.5.1). Each table has one builder; architectures differ by data, or by a `match` in
//! it. Tables that the `acpi_tables` crate gives a revision in which Linux reads fewer fields (SRAT 1, HMAT 1), or
//! cannot express (asymmetric SLIT, HMAT that is not square), are laid out here.

mod dsdt;
mod fadt;
mod gtdt;
mod hest;
mod hmat;
mod iort;
mod madt;
mod mcfg;
mod pptt;
mod slit;
mod spcr;
mod srat;

use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use egm_address::{Gpa, Guest, Span};

use super::FirmwareError;
use super::buffer::WindowBuffer;
use crate::config::{Architecture, MAX_NODES, MAX_VCPUS};
use crate::plan::{ERRORS, Plan};

const OEM_ID: [u8; 6] = *b"EGMVMM";
const OEM_TABLE_ID: [u8; 8] = *b"EGMVMM  ";
const OEM_REVISION: u32 = 1;

/// Places of tables that others need.
pub(super) struct Roots {
    /// The root pointer, at the start of the buffer.
    pub(super) rsdp: Gpa,
    /// The error block, if any.
    pub(super) errors: Option<Span<Guest>>,
}

/// Puts the tables of a plan into an empty buffer.
pub(super) fn place(plan: &Plan, buffer: &mut WindowBuffer) -> Result<Roots, FirmwareError> {
    if usize::try_from(MAX_VCPUS).is_ok_and(|most| plan.vcpus.len() > most) {
        return Err(FirmwareError::Vcpus(plan.vcpus.len()));
    }
    if let Some(node) = plan.nodes.iter().find(|n| n.id >= MAX_NODES) {
        return Err(FirmwareError::Node(node.id));
    }
    let rsdp = buffer.place(&vec![0; Rsdp::len()]);
    let dsdt = buffer.table(&dsdt::dsdt(plan)?);
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let common = [
        Some(fadt::fadt(plan, dsdt)?),
        Some(madt::madt(plan)?),
        Some(mcfg::mcfg(plan)?),
        (!plan.nodes.is_empty()).then(|| srat::srat(plan)),
        (!plan.nodes.is_empty()).then(|| slit::slit(plan)).transpose()?,
        hmat::hmat(plan)?,
    ];
    let own = match plan.arch {
        Architecture::X86_64 => Vec::new(),
        Architecture::Aarch64 => {
            vec![Some(gtdt::gtdt()), spcr::spcr(plan)?, Some(iort::iort()), Some(pptt::pptt(plan))]
        }
    };
    let errors = plan.line(ERRORS).map(|_| hest::place(buffer));
    let block = errors.as_ref().and_then(|errors| errors.block);
    for table in common.into_iter().chain(own).flatten().chain(errors.map(|errors| errors.table)) {
        xsdt.add_entry(buffer.table(&table).get());
    }
    let xsdt = buffer.table(&bytes(&xsdt));
    buffer.begin_with(&bytes(&Rsdp::new(OEM_ID, xsdt.get())));
    Ok(Roots { rsdp, errors: block })
}

fn bytes(aml: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    aml.to_aml_bytes(&mut bytes);
    bytes
}

/// A table with the common header (clause 5.2.6) before `body`.
fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut table = Sdt::new(signature, 36, revision, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.append_slice(body); // once: every append sums the whole table
    let mut bytes = table.as_slice().to_vec();
    if egm_address::fault!("acpi-checksum-wrong") && signature == *b"HMAT" {
        bytes.iter_mut().skip(9).take(1).for_each(|sum| *sum = sum.wrapping_add(1));
    }
    bytes
}

/// `count` zero bytes: reserved fields.
fn reserved(sink: &mut dyn AmlSink, count: usize) {
    (0..count).for_each(|_| sink.byte(0));
}
