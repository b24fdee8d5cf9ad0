//! SMBIOS 3 (DMTF DSP0134 3.4): the maker of the machine, and that it is virtual.
//!
//! NVIDIA's driver recognises a virtual machine on Arm by bit 4 of the second extension byte of type 0.

use acpi_tables::AmlSink;
use egm_address::Gpa;

use super::buffer::WindowBuffer;
use crate::plan::Plan;

const VENDOR: &str = "egm-vmm";
const VERSION: &str = env!("CARGO_PKG_VERSION");
const PRODUCT: &str = "Virtual Machine";

/// BIOS characteristics: the field is not used.
const CHARACTERISTICS_UNSUPPORTED: u64 = 1 << 3;
/// Second extension byte: targeted content distribution, EFI, virtual machine.
const VIRTUAL_MACHINE: u8 = 1 << 2 | 1 << 3 | 1 << 4;
/// A release without a number.
const NO_RELEASE: u8 = 0xff;
/// Wake-up type: power switch.
const POWER_SWITCH: u8 = 6;
/// Type of a chassis: other.
const OTHER: u8 = 1;
/// State of a chassis: safe.
const SAFE: u8 = 3;
/// Security status of a chassis: none.
const NO_LOCK: u8 = 3;

/// Writes structures and entry point; the address is the entry point's.
pub(super) fn place(plan: &Plan, buffer: &mut WindowBuffer) -> Gpa {
    let mut all = Vec::new();
    let mut firmware = vec![1, 2, 0, 0, 0, 0]; // vendor, version; no segment, date, size of a ROM
    firmware.qword(CHARACTERISTICS_UNSUPPORTED);
    firmware.extend([0, VIRTUAL_MACHINE, NO_RELEASE, NO_RELEASE, NO_RELEASE, NO_RELEASE, 0, 0]);
    structure(&mut all, 0, &firmware, &[VENDOR, VERSION]);
    let mut system = vec![1, 2, 3, 4]; // manufacturer, product, version, serial number
    system.extend([0; 16]); // no UUID
    system.extend([POWER_SWITCH, 0, 0]); // no SKU, no family
    structure(&mut all, 1, &system, &[VENDOR, PRODUCT, VERSION, &plan.name]);
    let mut chassis = vec![1, OTHER, 0, 0, 0, SAFE, SAFE, SAFE, NO_LOCK];
    chassis.extend([0; 9]); // vendor's word, height, power cords, contained elements, SKU
    structure(&mut all, 3, &chassis, &[VENDOR]);
    structure(&mut all, 127, &[], &[]);

    let mut entry = b"_SM3_\0".to_vec();
    entry.extend([24, 3, 4, 0, 1, 0]); // length, version 3.4.0, revision of the entry point
    entry.dword(u32::try_from(all.len()).unwrap_or(u32::MAX));
    entry.qword(buffer.place(&all).get());
    let sum = entry.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(checksum) = entry.get_mut(5) {
        *checksum = sum.wrapping_neg();
    }
    buffer.place(&entry)
}

/// Type, length, handle, fields, strings (clause 6.1). Strings are counted from 1; a plan's name has no NUL.
fn structure(all: &mut Vec<u8>, kind: u8, fields: &[u8], strings: &[&str]) {
    let length = fields.len().saturating_add(4);
    all.extend([kind, u8::try_from(length).unwrap_or(u8::MAX)]);
    all.word(kind.into()); // a handle of its own
    all.extend(fields);
    for string in strings {
        all.extend(string.as_bytes());
        all.push(0);
    }
    all.extend(if strings.is_empty() { [0, 0].as_slice() } else { &[0] });
}
