//! HEST: where the guest finds reports of memory errors (ACPI 6.5, clause 18.3.2).
//!
//! ```text
//! HEST ──► address ──► error block: written by the machine, its status cleared by the guest
//! \_SB.GED0: the interrupt "errors" ──► Notify ──► \_SB.ERRD: "look there"
//! ```

use acpi_tables::AmlSink;
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use egm_address::{Gpa, Guest, Span};

use super::{bytes, reserved, table};
use crate::firmware::ERROR_SECTIONS;
use crate::firmware::buffer::WindowBuffer;

const REVISION: u8 = 1;
/// Type of a generic hardware error source (clause 18.3.2.7), and its length.
const GENERIC: u16 = 9;
/// No source that this one is the other side of.
const UNRELATED: u16 = 0xffff;
/// Notification by an event of a device (clause 18.3.2.9): Linux waits for one of PNP0C33 then.
const BY_EVENT: u8 = 7;
const NOTIFICATION_LENGTH: u8 = 28;
/// Bytes of the error block.
const BLOCK: u32 = 4096;

/// The error block in the buffer, and the table that leads to it.
pub(super) struct Errors {
    pub(super) table: Vec<u8>,
    pub(super) block: Option<Span<Guest>>,
}

/// Puts the error block into the buffer.
pub(super) fn place(buffer: &mut WindowBuffer) -> Errors {
    let block = buffer.place(&[0; BLOCK as usize]);
    let address = buffer.place(&block.get().to_le_bytes());
    Errors { table: hest(address), block: Span::new(block, BLOCK.into()).ok() }
}

/// The table; `address` is that of the block's address.
fn hest(address: Gpa) -> Vec<u8> {
    let mut body = Vec::new();
    body.dword(1); // sources
    body.word(GENERIC);
    body.word(0); // id
    body.word(UNRELATED);
    body.vec(&[0, 1]); // flags; enabled
    body.dword(1); // records that the guest keeps room for
    body.dword(ERROR_SECTIONS); // in a record, at most
    body.dword(0); // raw data
    body.vec(&bytes(&GAS::new(AddressSpace::SystemMemory, 64, 0, AccessSize::QwordAccess, address.get())));
    body.vec(&[BY_EVENT, NOTIFICATION_LENGTH]);
    reserved(&mut body, usize::from(NOTIFICATION_LENGTH) - 2);
    body.dword(BLOCK);
    table(*b"HEST", REVISION, &body)
}
