//! An EGM slice as a function of this process.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use egm_address::SpanSet;
use egm_device::device::config::{Id, VENDOR};
use egm_device::device::core::Facts;
use egm_device::device::registers::{Register, SCRUB_AT_RESET};
use egm_device::device::{Function, Setup};
use egm_device::{Anonymous, Backing};
use egm_vfio::local::LocalFunction;
use egm_vfio::mapping::MadeOf;

use super::*;

const REGISTERS: u64 = 0xc000_0000;
/// Bytes of the slice; its BAR has 4 MiB.
const SIZE: u64 = 3 << 20;
/// Offset of its retired page.
const RETIRED: u64 = 0x10_0000;
const MSIX_CONTROL: u16 = 0x92;
const DEVICE_CONTROL: u16 = 0x58;

struct Guest {
    slice: Function,
    memory: Anonymous,
    root: RootComplex,
    slots: Arc<FakeSlots>,
    domain: Arc<FakeDomain>,
}

fn bytes(start: u64, size: u64) -> SpanSet<InBar> {
    SpanSet::from_iter([Span::new(BarOffset::new(start), size).unwrap()])
}

fn guest() -> Guest {
    let memory = Anonymous::new("slice", SIZE, None).unwrap();
    let facts = Facts { size: SIZE, base: 0, page: 0x1000, pxm: Some(1), scrub_at_reset: false, msix: true };
    let setup = Setup {
        id: Id::default(),
        facts,
        retired: bytes(RETIRED, 0x1000),
        bad: Box::new(|_| {}),
        scrubbed: Box::new(|_| {}),
        near: None,
    };
    let slice = Function::new(setup, &memory).unwrap();
    let backend = LocalFunction::new("slice".to_owned(), slice.connect(), MadeOf::File).unwrap();
    let bar =
        |index, kind, start, size| BarPlan { index, kind, span: Span::new(Gpa::new(start), size).unwrap() };
    let bars =
        [bar(0, BarKind::Memory32, REGISTERS, 0x4000), bar(2, BarKind::Memory64Prefetchable, BAR, 4 << 20)];
    let (slots, domain) = (Arc::new(FakeSlots::default()), Arc::new(FakeDomain::default()));
    let connections = Connections {
        router: Arc::new(FakeRouter::default()),
        line: None,
        slots: Arc::clone(&slots) as _,
        peers: Arc::new(Peers::new(vec![Arc::clone(&domain) as _])),
        reachable: true,
        memory: Vec::new(),
    };
    let function = AssignedFunction::new(Arc::new(backend), &bars, Vec::new(), connections).unwrap();
    function.share_bars(&bars).unwrap();
    let mut bus = Bus::default();
    bus.add(8, function as _);
    let root = RootComplex::new(bus);
    root.config_write(0, 8, COMMAND, &[6, 0]);
    Guest { slice, memory, root, slots, domain }
}

impl Guest {
    fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut data = [0; N];
        self.root.memory_read(Gpa::new(address), &mut data);
        data
    }

    fn register(&self, register: Register) -> u32 {
        u32::from_le_bytes(self.read(REGISTERS + register.offset()))
    }

    fn write(&self, address: u64, value: u32) {
        self.root.memory_write(Gpa::new(address), &value.to_le_bytes());
    }
}

#[test]
fn the_guest_has_its_usable_bytes_as_memory_and_reads_ones_in_the_rest() {
    let guest = guest();
    let after = RETIRED + 0x1000;
    assert_eq!(guest.slots.mapped(), [(BAR, RETIRED), (BAR + after, SIZE - after)]);
    guest.memory.file().write_all_at(&[7; 8], RETIRED - 4).unwrap();
    assert_eq!(guest.read::<8>(BAR + RETIRED - 4), [7, 7, 7, 7, 0xff, 0xff, 0xff, 0xff]);
    assert_eq!(guest.read::<4>(BAR + SIZE), [0xff; 4], "the BAR's end is nobody's");
    let mapped: Vec<u64> = guest.domain.mapped().iter().map(|(iova, _)| iova.start().get()).collect();
    assert_eq!(mapped, [BAR, BAR + after], "other functions reach what the guest does");
}

#[test]
fn the_guest_finds_it_by_its_capability_and_reads_the_slice_from_its_registers() {
    let guest = guest();
    let word = |at: u16| {
        let mut data = [0; 4];
        guest.root.config_read(0, 8, u16::from(VENDOR) + at, &mut data);
        data
    };
    assert_eq!((word(0)[0], word(4), word(12)), (0x09, *b"EGMD", [1, 0, 0, 0]));
    assert_eq!(guest.register(Register::Size), u32::try_from(SIZE).unwrap());
    assert_eq!(guest.register(Register::RetiredBytes), 0x1000);
}

#[test]
fn pages_that_go_bad_are_reported_by_a_message_interrupt() {
    let guest = guest();
    let entry = REGISTERS + TABLE;
    guest.root.config_write(0, 8, MSIX_CONTROL, &[0, 0x80]);
    for (at, value) in [(0, 0xfee0_0000), (8, 0x41), (12, 0), (12, 1)] {
        guest.write(entry + at, value);
    }
    assert_eq!(guest.read(REGISTERS + PENDING), [0]);
    guest.slice.retire(&bytes(0x4000, 0x1000));
    assert_eq!(guest.read(REGISTERS + PENDING), [1], "it waits for the vector, which is masked again");
    assert_eq!(guest.register(Register::RetiredBytes), 0x2000);
}

#[test]
fn a_reset_of_the_guest_keeps_the_bytes_unless_it_asks_for_a_scrub() {
    let guest = guest();
    let first = || {
        let mut data = [0; 4];
        guest.memory.file().read_exact_at(&mut data, 0).unwrap();
        u32::from_le_bytes(data)
    };
    let reset = || {
        guest.root.config_write(0, 8, DEVICE_CONTROL, &[0, 0x80]);
        assert_eq!(guest.slots.mapped(), [], "decoding is off after a reset");
        guest.root.config_write(0, 8, COMMAND, &[6, 0]);
    };
    guest.memory.file().write_all_at(&7_u32.to_le_bytes(), 0).unwrap();
    reset();
    assert_eq!(first(), 7);
    guest.write(REGISTERS + Register::Control.offset(), SCRUB_AT_RESET);
    reset();
    assert_eq!(first(), 0);
}

#[test]
fn an_owner_request_is_answered_when_the_guest_has_gone() {
    let Guest { slice, root, slots, domain, .. } = guest();
    assert!(!slice.wait_unused(Duration::ZERO));
    drop((root, slots, domain));
    assert!(slice.wait_unused(Duration::ZERO));
}
