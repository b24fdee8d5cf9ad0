//! MADT: interrupt controllers and processors (ACPI 6.5, clause 5.2.12).

use acpi_tables::AmlSink;
use acpi_tables::madt::{
    EnabledStatus, GicIts, GicVersion, Gicc, Gicd, Gicr, IoApic, ProcessorLocalApic, Trigger,
};

use super::{bytes, reserved, table};
use crate::arch::aarch64::layout::PERFORMANCE;
use crate::config::Architecture;
use crate::firmware::{FirmwareError, Gic, labelled, window_error};
use crate::plan::{Plan, VcpuPlan, WindowKind};

const REVISION: u8 = 6;
/// Where every x86 processor has its local APIC after reset.
const LOCAL_APIC: u32 = 0xfee0_0000;
/// Label of the window that holds the I/O APIC's registers.
const IO_APIC: &str = "I/O APIC";
/// Number of the one ITS, by which IORT names it.
pub(super) const ITS: u32 = 0;

pub(super) fn madt(plan: &Plan) -> Result<Vec<u8>, FirmwareError> {
    let body = match plan.arch {
        Architecture::X86_64 => apics(plan)?,
        Architecture::Aarch64 => gic(plan)?,
    };
    Ok(table(*b"APIC", REVISION, &body))
}

/// Local APIC id and processor UID as bytes, when both have that size; 255 is the broadcast id. Processors with
/// larger ids appear in the x2APIC structures of MADT (clause 5.2.12.12) and SRAT.
pub(super) fn short_ids(vcpu: &VcpuPlan) -> Option<(u8, u8)> {
    let id = u8::try_from(vcpu.hardware_id).ok().filter(|id| *id != u8::MAX)?;
    Some((id, u8::try_from(vcpu.index).ok()?))
}

/// There is no 8259: PCAT_COMPAT is clear, and no interrupt is overridden.
fn apics(plan: &Plan) -> Result<Vec<u8>, FirmwareError> {
    let io_apic = labelled(plan, WindowKind::Interrupts, IO_APIC);
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
    Ok(body)
}

/// Processor local x2APIC structure, clause 5.2.12.12.
fn local_x2apic(sink: &mut dyn AmlSink, vcpu: &VcpuPlan) {
    sink.vec(&[9, 16]);
    reserved(sink, 2);
    sink.dword(vcpu.hardware_id);
    sink.dword(1); // enabled
    sink.dword(vcpu.index);
}

/// Distributor, processor interfaces, redistributors, ITS (clauses 5.2.12.14 to 5.2.12.18). Redistributors are in one range.
fn gic(plan: &Plan) -> Result<Vec<u8>, FirmwareError> {
    let Gic { distributor, its, redistributors } = Gic::of(plan)?;
    let mut body = Vec::new();
    body.dword(0); // no local APIC
    body.dword(0);
    body.extend(bytes(&Gicd::new(0, distributor.start().get(), GicVersion::GICv3)));
    for vcpu in &plan.vcpus {
        let interface = Gicc::new(EnabledStatus::Enabled)
            .cpu_interface_number(vcpu.index)
            .acpi_processor_uid(vcpu.index)
            .performance_interrupt(PERFORMANCE, Trigger::Level)
            .mpidr(vcpu.hardware_id.into());
        body.extend(bytes(&interface));
    }
    let size = u32::try_from(redistributors.size()).unwrap_or(u32::MAX);
    body.extend(bytes(&Gicr::new(redistributors.start().get(), size)));
    body.extend(bytes(&GicIts::new(ITS, its.start().get())));
    Ok(body)
}
