//! Events that reach a guest by an interrupt: their devices, and the event device that notifies them (ACPI 6.5, clause
//! 5.6.9). There are two: news in the HEST's error block (18.3.2.7.2), and the power button (4.8.2.2.1.2).

use acpi_tables::aml::{
    Arg, Device, EISAName, Equal, If, Interrupt, Method, Name, Notify, Path, ResourceTemplate, ZERO,
};
use acpi_tables::{Aml, AmlSink};

use crate::plan::{ERRORS, POWER_BUTTON, Plan};

/// Owner of the line, name of the device, its `_HID`.
const DEVICES: [(&str, &str, &str); 2] = [(ERRORS, "ERRD", "PNP0C33"), (POWER_BUTTON, "PWRB", "PNP0C0C")];
/// Value of the notification: "hardware error", or "pressed".
const HAPPENED: u8 = 0x80;

/// Writes the devices that have a line in the plan; each interrupt is an edge.
pub(super) fn write(sink: &mut dyn AmlSink, plan: &Plan) {
    let devices: Vec<(u32, &str, &str)> = DEVICES
        .iter()
        .filter_map(|&(owner, name, hid)| plan.line(owner).map(|gsi| (gsi, name, hid)))
        .collect();
    if devices.is_empty() {
        return;
    }
    for &(_, name, hid) in &devices {
        Device::new(
            name.into(),
            vec![&Name::new("_HID".into(), &EISAName::new(hid)), &Name::new("_UID".into(), &ZERO)],
        )
        .to_aml_bytes(sink);
    }
    let interrupts: Vec<Interrupt> =
        devices.iter().map(|&(gsi, ..)| Interrupt::new(true, true, false, false, gsi)).collect();
    let paths: Vec<Path> = devices.iter().map(|&(_, name, _)| Path::new(name)).collect();
    let notes: Vec<Notify<'_>> = paths.iter().map(|path| Notify::new(path, &HAPPENED)).collect();
    let which: Vec<Equal<'_>> = devices.iter().map(|(gsi, ..)| Equal::new(&Arg(0), gsi)).collect();
    let cases: Vec<If<'_>> =
        which.iter().zip(&notes).map(|(which, note)| If::new(which, vec![note])).collect();
    Device::new(
        "GED0".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &ZERO),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(interrupts.iter().map(|i| i as &dyn Aml).collect()),
            ),
            &Method::new("_EVT".into(), 1, true, cases.iter().map(|case| case as &dyn Aml).collect()),
        ],
    )
    .to_aml_bytes(sink);
}
