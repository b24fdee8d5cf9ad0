//! ACPI 6.5 tables of an x86 guest.
//!
//! ```text
//! window start ─► RSDP ──► XSDT ─┬─► FADT ──► DSDT     fixed registers; devices and methods
//!                                ├─► MADT              interrupt controllers, processors
//!                                ├─► MCFG              PCI Express configuration space
//!                                ├─► SRAT, SLIT        what is near to what, and how near
//!                                └─► HMAT              nanoseconds and megabytes a second, when the plan has some
//! ```
//!
//! The pointer is first so that a kernel that is told nothing finds it too: it searches 0xe0000..0x100000 on
//! 16-byte boundaries (clause 5.2.5.1). Tables that the `acpi_tables` crate gives a revision in which Linux reads
//! fewer fields (SRAT 1, HMAT 1), or cannot express (asymmetric SLIT, HMAT that is not square), are laid out here.

mod dsdt;
mod fadt;
mod hmat;
mod madt;
mod mcfg;
mod slit;
mod srat;

use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use egm_address::{Gpa, Guest, Span};

use super::{FirmwareError, Image, Table, window};
use crate::config::{MAX_NODES, MAX_VCPUS};
use crate::plan::{Plan, WindowKind};

const OEM_ID: [u8; 6] = *b"EGMVMM";
const OEM_TABLE_ID: [u8; 8] = *b"EGMVMM  ";
const OEM_REVISION: u32 = 1;

/// Tables start on a cache line; the pointer needs 16 bytes only.
const ALIGN: usize = 64;

/// All tables of an x86 plan.
pub(super) fn build(plan: &Plan) -> Result<Image, FirmwareError> {
    if usize::try_from(MAX_VCPUS).is_ok_and(|most| plan.vcpus.len() > most) {
        return Err(FirmwareError::Vcpus(plan.vcpus.len()));
    }
    if let Some(node) = plan.nodes.iter().find(|n| n.id >= MAX_NODES) {
        return Err(FirmwareError::Node(node.id));
    }
    let rule = "it has to exist and to start on a 16-byte boundary";
    let span = window(plan, WindowKind::Firmware, "firmware", rule, |s| s.start().is_aligned(16))?;
    let mut room = Room::new(span);

    let dsdt = room.place(dsdt::dsdt(plan)?);
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let described = [
        Some(fadt::fadt(plan, dsdt)?),
        Some(madt::madt(plan)?),
        Some(mcfg::mcfg(plan)?),
        (!plan.nodes.is_empty()).then(|| srat::srat(plan)),
        (!plan.nodes.is_empty()).then(|| slit::slit(plan)).transpose()?,
        hmat::hmat(plan)?,
    ];
    for table in described.into_iter().flatten() {
        xsdt.add_entry(room.place(table).get());
    }
    let xsdt = room.place(bytes(&xsdt));
    room.finish(&Rsdp::new(OEM_ID, xsdt.get()))
}

/// The bytes of `aml`.
fn bytes(aml: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    aml.to_aml_bytes(&mut bytes);
    bytes
}

/// A table with the common header (clause 5.2.6) before `body`.
fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut table = Sdt::new(signature, 36, revision, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.append_slice(body); // once: every append sums the whole table
    table.as_slice().to_vec()
}

/// `count` zero bytes: reserved fields.
fn reserved(sink: &mut dyn AmlSink, count: usize) {
    (0..count).for_each(|_| sink.byte(0));
}

/// The window being filled. It may grow past the window: then [`Room::finish`] says by how much.
struct Room {
    window: Span<Guest>,
    bytes: Vec<u8>,
    tables: Vec<Placed>,
}

/// A table inside [`Room::bytes`].
struct Placed {
    signature: [u8; 4],
    start: usize,
    size: usize,
}

impl Room {
    /// An empty window, but for the root pointer's place at its start.
    fn new(window: Span<Guest>) -> Self {
        Self { window, bytes: vec![0; Rsdp::len()], tables: Vec::new() }
    }

    /// Puts a table behind the others and says where the guest sees it.
    fn place(&mut self, table: Vec<u8>) -> Gpa {
        let start = self.bytes.len().next_multiple_of(ALIGN);
        let signature = table.first_chunk().copied().unwrap_or_default();
        self.tables.push(Placed { signature, start, size: table.len() });
        self.bytes.resize(start, 0);
        self.bytes.extend(table);
        self.address(start)
    }

    /// The guest address of a byte; beyond the window it means nothing, and [`Room::finish`] fails.
    fn address(&self, offset: usize) -> Gpa {
        let start = self.window.start();
        u64::try_from(offset).ok().and_then(|offset| start.checked_add(offset)).unwrap_or(start)
    }

    fn finish(mut self, rsdp: &Rsdp) -> Result<Image, FirmwareError> {
        let need = u64::try_from(self.bytes.len()).unwrap_or(u64::MAX);
        let room = self.window.size().saturating_sub(crate::firmware::RESET_VECTOR_SIZE);
        let over = need.saturating_sub(room);
        if over > 0 {
            return Err(FirmwareError::TooLarge { need, over, window: self.window });
        }
        self.bytes.splice(..Rsdp::len(), bytes(rsdp));
        let placed = |t: &Placed| {
            let span = Span::between(self.address(t.start), self.address(t.start.saturating_add(t.size)))?;
            Some(Table { signature: t.signature, span })
        };
        let tables = self.tables.iter().filter_map(placed).collect();
        Ok(Image {
            base: self.window.start(),
            rsdp: self.window.start(),
            bytes: self.bytes,
            tables,
            efi: None,
        })
    }
}
