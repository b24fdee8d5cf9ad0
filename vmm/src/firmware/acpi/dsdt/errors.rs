//! The device by which the guest hears that there is news in the error block of the HEST, and the event device that notifies it
//! (ACPI 6.5, clauses 18.3.2.7.2 and 5.6.9).

use acpi_tables::aml::{
    Arg, Device, EISAName, Equal, If, Interrupt, Method, Name, Notify, Path, ResourceTemplate, ZERO,
};
use acpi_tables::{Aml, AmlSink};

/// "Hardware error": what PNP0C33 is notified of.
const HARDWARE_ERROR: u8 = 0x80;

/// Both; `gsi` is an edge.
pub(super) fn write(sink: &mut dyn AmlSink, gsi: u32) {
    let interrupt = Interrupt::new(true, true, false, false, gsi);
    let device = Path::new("ERRD");
    Device::new(
        "ERRD".into(),
        vec![&Name::new("_HID".into(), &EISAName::new("PNP0C33")), &Name::new("_UID".into(), &ZERO)],
    )
    .to_aml_bytes(sink);
    Device::new(
        "GED0".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&interrupt])),
            &Method::new(
                "_EVT".into(),
                1,
                true,
                vec![&If::new(&Equal::new(&Arg(0), &gsi), vec![&Notify::new(&device, &HARDWARE_ERROR)])],
            ),
        ],
    )
    .to_aml_bytes(sink);
}
