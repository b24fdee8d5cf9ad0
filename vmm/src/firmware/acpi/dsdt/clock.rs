//! The clock of an Arm guest as ACPI's time and alarm device (ACPI 6.5, clause 9.17): Linux has no ACPI name for a PL031, and
//! with no EFI runtime services either it would begin in 1970.

use acpi_tables::aml::{
    Add, BufferData, CreateDWordField, Device, Else, Field, FieldAccessType, FieldEntry, FieldLockRule,
    FieldUpdateRule, If, LessEqual, LessThan, Local, Method, Mod, Multiply, Name, OpRegion, OpRegionSpace,
    Or, Path, Return, ShiftLeft, Store, Subtract, ZERO,
};
use acpi_tables::{Aml, AmlSink};
use egm_address::{Guest, Span};

/// `_GCP`: it has real time (bit 2), and no alarms.
const CAPABILITIES: u8 = 1 << 2;
/// Registers of a PL031 that are read: the data register, seconds since 1970 in UTC (ARM DDI 0224, 3.3.1).
const DATA: u8 = 4;

/// The device; `span` has a PL031.
pub(super) fn write(sink: &mut dyn AmlSink, span: Span<Guest>) {
    let seconds = Field::new(
        "REGS".into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::Preserve,
        vec![FieldEntry::Named(*b"SECS", 32)],
    );
    Device::new(
        "CLCK".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI000E"),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_GCP".into(), &CAPABILITIES),
            &OpRegion::new("REGS".into(), OpRegionSpace::SystemMemory, &span.start().get(), &DATA),
            &seconds,
            &GetRealTime,
        ],
    )
    .to_aml_bytes(sink);
}

/// `_GRT`: 16 bytes with the year, month, day, hour, minute and second. Years begin in March here, so that the day
/// that comes and goes is their last; 400 of them have 146,097 days, and five months 153.
struct GetRealTime;

impl Aml for GetRealTime {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        const DAY: u32 = 86_400;
        const SINCE_MARCH_0: u32 = 719_468;
        const ERA: u32 = 146_097;
        const VALID: u32 = 1 << 24;
        let [seconds, days, years, months, era] = [Local(0), Local(1), Local(2), Local(3), Local(4)];
        let buffer = Local(5);
        let [register, date, time] = ["SECS", "DATE", "TIME"].map(Path::new);
        Method::new(
            "_GRT".into(),
            0,
            true, // it names fields, so it must not run twice at a time
            vec![
                &Store::new(&seconds, &register),
                &Add::new(&days, &Divide(&ZERO, &seconds, &DAY), &SINCE_MARCH_0),
                &Divide(&era, &days, &ERA),
                &Mod::new(&days, &days, &ERA),
                // Days less those that leap years have too many, of this era.
                &Subtract::new(&years, &days, &Divide(&ZERO, &days, &1460u32)),
                &Add::new(&years, &years, &Divide(&ZERO, &days, &36_524u32)),
                &Subtract::new(&years, &years, &Divide(&ZERO, &days, &146_096u32)),
                &Divide(&years, &years, &365u32),
                // Days of this year.
                &Subtract::new(&days, &days, &Multiply::new(&ZERO, &years, &365u32)),
                &Subtract::new(&days, &days, &Divide(&ZERO, &years, &4u8)),
                &Add::new(&days, &days, &Divide(&ZERO, &years, &100u8)),
                &Divide(&months, &Add::new(&ZERO, &Multiply::new(&ZERO, &days, &5u8), &2u8), &153u8),
                &Subtract::new(
                    &days,
                    &days,
                    &Divide(&ZERO, &Add::new(&ZERO, &Multiply::new(&ZERO, &months, &153u8), &2u8), &5u8),
                ),
                &Add::new(&days, &days, &1u8),
                &Add::new(&years, &years, &Multiply::new(&ZERO, &era, &400u32)),
                &If::new(&LessThan::new(&months, &10u8), vec![&Add::new(&months, &months, &3u8)]),
                &Else::new(vec![&Subtract::new(&months, &months, &9u8)]),
                &If::new(&LessEqual::new(&months, &2u8), vec![&Add::new(&years, &years, &1u8)]),
                &Store::new(&buffer, &BufferData::new(vec![0; 16])),
                &CreateDWordField::new(&date, &buffer, &0u8),
                &CreateDWordField::new(&time, &buffer, &4u8),
                &Or::new(&date, &years, &ShiftLeft::new(&ZERO, &months, &16u8)),
                &Or::new(&date, &date, &ShiftLeft::new(&ZERO, &days, &24u8)),
                &Mod::new(&time, &Divide(&ZERO, &seconds, &3600u32), &24u8),
                &Or::new(
                    &time,
                    &time,
                    &ShiftLeft::new(&ZERO, &Mod::new(&ZERO, &Divide(&ZERO, &seconds, &60u8), &60u8), &8u8),
                ),
                &Or::new(&time, &time, &ShiftLeft::new(&ZERO, &Mod::new(&ZERO, &seconds, &60u8), &16u8)),
                &Or::new(&time, &time, &VALID),
                &Return::new(&buffer),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// A quotient and where it goes (clause 20.2.5.4, `DefDivide`), which `acpi_tables` does not have.
struct Divide<'a>(&'a dyn Aml, &'a dyn Aml, &'a dyn Aml);

impl Aml for Divide<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        const DIVIDE: u8 = 0x78;
        let Self(target, dividend, divisor) = self;
        sink.byte(DIVIDE);
        dividend.to_aml_bytes(sink);
        divisor.to_aml_bytes(sink);
        sink.byte(0); // the remainder goes nowhere
        target.to_aml_bytes(sink);
    }
}
