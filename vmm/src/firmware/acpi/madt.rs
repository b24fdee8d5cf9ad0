//! MADT: interrupt controllers and processors (ACPI 6.5, clause 5.2.12).

use acpi_tables::AmlSink;
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};

use super::{bytes, reserved, table};
use crate::firmware::{FirmwareError, window_error};
use crate::plan::{Plan, VcpuPlan, WindowKind};

const REVISION: u8 = 6;
/// Where every x86 processor has its local APIC after reset.
const LOCAL_APIC: u32 = 0xfee0_0000;
/// Label of the window that holds the I/O APIC's registers.
const IO_APIC: &str = "I/O APIC";

/// Local APIC id and processor UID as bytes, when both have that size; 255 is the broadcast id. Processors with
/// larger ids appear in the x2APIC structures of MADT (clause 5.2.12.12) and SRAT.
pub(super) fn short_ids(vcpu: &VcpuPlan) -> Option<(u8, u8)> {
    let id = u8::try_from(vcpu.hardware_id).ok().filter(|id| *id != u8::MAX)?;
    Some((id, u8::try_from(vcpu.index).ok()?))
}

/// The table. There is no 8259: PCAT_COMPAT is clear, and no interrupt is overridden.
pub(super) fn madt(plan: &Plan) -> Result<Vec<u8>, FirmwareError> {
    let io_apic =
        plan.windows.iter().find(|w| w.kind == WindowKind::Interrupts && w.label == IO_APIC).map(|w| w.span);
    let address = io_apic
        .and_then(|span| u32::try_from(span.start().get()).ok())
        .ok_or_else(|| window_error(io_apic, IO_APIC, "it has to lie below 4 GiB"))?;
    let mut body = Vec::new();
    body.dword(LOCAL_APIC);
    body.dword(0);
    for vcpu in &plan.vcpus {
        match short_ids(vcpu) {
            Some((id, uid)) => {
                body.extend(bytes(&ProcessorLocalApic::new(uid, id, EnabledStatus::Enabled)));
            }
            None => local_x2apic(&mut body, vcpu),
        }
    }
    body.extend(bytes(&IoApic::new(0, address, 0)));
    Ok(table(*b"APIC", REVISION, &body))
}

/// Processor local x2APIC structure, clause 5.2.12.12.
fn local_x2apic(sink: &mut dyn AmlSink, vcpu: &VcpuPlan) {
    sink.vec(&[9, 16]);
    reserved(sink, 2);
    sink.dword(vcpu.hardware_id);
    sink.dword(1); // enabled
    sink.dword(vcpu.index);
}
