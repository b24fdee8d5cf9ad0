//! GTDT: the timer that every Arm processor has (ACPI 6.5, clause 5.2.25).

use acpi_tables::AmlSink;

use super::{reserved, table};
use crate::arch::aarch64::layout::{OTHER_TIMERS, PHYSICAL_TIMER, VIRTUAL_TIMER};

const REVISION: u8 = 3;
/// Level triggered, active high; it counts whatever the processor sleeps in.
const ALWAYS_ON: u32 = 1 << 2;
/// Of an address: there is no such block.
const NONE: u64 = u64::MAX;

/// The table. It has interrupts that no timer of the guest raises, since Linux takes 0 for an error.
pub(super) fn gtdt() -> Vec<u8> {
    let [secure, hypervisor] = OTHER_TIMERS;
    let mut body = Vec::new();
    body.qword(NONE); // counter control
    reserved(&mut body, 4);
    for interrupt in [secure, PHYSICAL_TIMER, VIRTUAL_TIMER, hypervisor] {
        body.dword(interrupt);
        body.dword(ALWAYS_ON);
    }
    body.qword(NONE); // counter
    body.dword(0); // no platform timers
    body.dword(0);
    body.dword(0); // virtual timer of EL2: none
    body.dword(0);
    table(*b"GTDT", REVISION, &body)
}
