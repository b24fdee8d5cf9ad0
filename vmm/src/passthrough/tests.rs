//! A fake function in a guest's root complex.

mod hostile;
mod served;
mod slices;

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use egm_address::{BarOffset, Gpa, InBar, Span};
use egm_vfio::backend::{Backend, InterruptKind, RegionIndex};
use egm_vfio::fake::{Call, FakeDomain, FakeFunction};
use egm_vfio::memory::HostMemory;
use proptest::prelude::*;
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::kvm::{KvmError, Slot, SlotTable};
use crate::pci::msix::{MsiMessage, MsiRouter};
use crate::pci::{Bus, DecodedBar, PciFunction, Plugged, RootComplex};
use crate::plan::{BarKind, BarPlan};

const BAR: u64 = 0x80_0000_0000;
const BAR_SIZE: u64 = 0x8000;
const TABLE: u64 = 0x2000;
const PENDING: u64 = 0x3000;
const COMMAND: u16 = 4;
const MSI: u16 = 0x50;
const MSIX: u16 = 0x70;
const EXPRESS: u16 = 0x80;

fn put(space: &mut [u8], at: u16, data: &[u8]) {
    space[usize::from(at)..][..data.len()].copy_from_slice(data);
}

/// Configuration space of a network card with MSI (4 vectors, with masks), MSI-X (8 vectors) and function-level reset.
fn space() -> Vec<u8> {
    let mut space = vec![0; 0x1000];
    put(&mut space, 0, &[0xb3, 0x15, 0x1e, 0x10, 0, 0, 0x10, 0, 0, 0, 0, 2]);
    put(&mut space, 0x34, &[0x50]);
    put(&mut space, 0x3d, &[1]);
    put(&mut space, MSI, &[0x05, 0x70, 0x84, 0x01]);
    put(&mut space, MSIX, &[0x11, 0x80, 7, 0, 0, 0x20, 0, 0, 0, 0x30, 0, 0]);
    put(&mut space, EXPRESS, &[0x10, 0, 2, 0, 0, 0, 0, 0x10]);
    space
}

fn fake() -> FakeFunction {
    let all = Span::new(BarOffset::new(0), BAR_SIZE).unwrap();
    FakeFunction::default()
        .with_region(RegionIndex::Config, 0x1000, &space(), &[])
        .unwrap()
        .with_region(RegionIndex::Bar(0), BAR_SIZE, b"registers", &[all])
        .unwrap()
        .with_interrupts(InterruptKind::Intx, 1)
        .with_interrupts(InterruptKind::Msi, 4)
        .with_interrupts(InterruptKind::Msix, 8)
}

/// Slots by number: place and bytes.
#[derive(Default)]
pub(super) struct FakeSlots {
    slots: Mutex<Vec<Option<(u64, u64)>>>,
    /// Capabilities of this KVM.
    capabilities: Vec<u32>,
}

impl FakeSlots {
    pub(super) fn of(capabilities: Vec<u32>) -> Self {
        Self { capabilities, ..Self::default() }
    }

    pub(super) fn mapped(&self) -> Vec<(u64, u64)> {
        let mut mapped: Vec<_> = self.slots.lock().unwrap().iter().flatten().copied().collect();
        mapped.sort_unstable();
        mapped
    }
}

impl SlotTable for FakeSlots {
    fn add(&self, gpa: Gpa, memory: Arc<dyn HostMemory>) -> Result<Slot, KvmError> {
        let (mut slots, (start, size)) = (self.slots.lock().unwrap(), (gpa.get(), memory.size()));
        if slots.iter().flatten().any(|(at, bytes)| start < at + bytes && *at < start + size) {
            return Err(KvmError::Memory { gpa, size, source: kvm_ioctls::Error::new(libc::EEXIST) });
        }
        slots.push(Some((start, size)));
        Ok(Slot(slots.len() - 1))
    }
    fn supports(&self, capability: u32) -> bool {
        self.capabilities.contains(&capability)
    }
    fn remove(&self, slot: Slot) -> Result<(), KvmError> {
        self.slots.lock().unwrap()[slot.0] = None;
        Ok(())
    }
}

/// A router that records its connections: route and message.
#[derive(Default)]
pub(super) struct FakeRouter {
    next: AtomicU32,
    connected: Mutex<Vec<(u32, MsiMessage)>>,
}

impl FakeRouter {
    fn data(&self) -> Vec<u32> {
        self.connected.lock().unwrap().iter().map(|(_, message)| message.data).collect()
    }
}

impl MsiRouter for FakeRouter {
    fn connect(&self, slot: &mut Option<u32>, message: MsiMessage, _trigger: &EventFd) -> io::Result<()> {
        let slot = *slot.get_or_insert_with(|| self.next.fetch_add(1, Ordering::Relaxed));
        self.connected.lock().unwrap().push((slot, message));
        Ok(())
    }
    fn disconnect(&self, slot: u32, _trigger: &EventFd) {
        self.connected.lock().unwrap().retain(|(other, _)| *other != slot);
    }
}

/// Whether the line is connected.
#[derive(Default, Clone)]
struct FakeLine(Arc<Mutex<bool>>);

impl InterruptLine for FakeLine {
    fn connect(&self, _trigger: &EventFd, _resample: &EventFd) -> io::Result<()> {
        *self.0.lock().unwrap() = true;
        Ok(())
    }
    fn disconnect(&self, _trigger: &EventFd) {
        *self.0.lock().unwrap() = false;
    }
}

/// A guest with one assigned function at 00:01.0.
struct Machine {
    fake: Arc<FakeFunction>,
    function: Arc<AssignedFunction>,
    root: RootComplex,
    slots: Arc<FakeSlots>,
    router: Arc<FakeRouter>,
    line: FakeLine,
    domain: Arc<FakeDomain>,
}

fn bars() -> Vec<BarPlan> {
    let span = Span::new(Gpa::new(BAR), BAR_SIZE).unwrap();
    vec![BarPlan { index: 0, kind: BarKind::Memory64Prefetchable, span }]
}

impl Machine {
    fn new(fake: FakeFunction) -> Self {
        let fake = Arc::new(fake);
        let (slots, router) = (Arc::new(FakeSlots::default()), Arc::new(FakeRouter::default()));
        let (line, domain) = (FakeLine::default(), Arc::new(FakeDomain::default()));
        let connections = Connections {
            router: Arc::clone(&router) as _,
            line: Some(Box::new(line.clone())),
            slots: Arc::clone(&slots) as _,
            peers: Arc::new(Peers::new(vec![Arc::clone(&domain) as _])),
            reachable: true,
            memory: Vec::new(),
        };
        let backend = Arc::clone(&fake) as Arc<dyn Backend>;
        let function = AssignedFunction::new(backend, &bars(), Vec::new(), connections).unwrap();
        function.share_bars(&bars()).unwrap();
        let mut bus = Bus::default();
        bus.add(8, Arc::clone(&function) as _);
        let root = RootComplex::new(bus);
        Self { fake, function, root, slots, router, line, domain }
    }

    fn config(&self, offset: u16, data: &[u8]) {
        self.root.config_write(0, 8, offset, data);
    }

    fn config_u32(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.root.config_read(0, 8, offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.root.memory_write(Gpa::new(BAR + offset), data);
    }

    fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.root.memory_read(Gpa::new(BAR + offset), &mut data);
        data
    }

    /// Programs a vector of the table with `data` as its message.
    fn vector(&self, vector: u64, data: u32, masked: bool) {
        self.write(TABLE + vector * 16, &0xfee0_0000u64.to_le_bytes());
        self.write(TABLE + vector * 16 + 8, &data.to_le_bytes());
        self.write(TABLE + vector * 16 + 12, &u32::from(masked).to_le_bytes());
    }

    fn interrupt_calls(&self) -> Vec<Call> {
        let calls = self.fake.take_calls().into_iter();
        calls.filter(|call| matches!(call, Call::Connect(..) | Call::Disable(_))).collect()
    }
}

fn connect(kind: InterruptKind, first: u32, given: &[bool]) -> Call {
    Call::Connect(kind, first, given.to_vec())
}

#[test]
fn it_does_no_dma_before_bus_mastering() {
    let machine = Machine::new(fake());
    let calls = machine.fake.take_calls();
    let command = calls.iter().find_map(|call| match call {
        Call::Write(RegionIndex::Config, 4, data) => Some(data[0] & 6),
        _ => None,
    });
    assert_eq!(command, Some(2), "memory decoding on, bus mastering off");
    assert_eq!(machine.config_u32(0), 0x101e_15b3);
}

#[test]
fn a_bar_is_memory_but_for_the_pages_of_msix_and_follows_the_guest() {
    let machine = Machine::new(fake());
    assert_eq!(machine.slots.mapped(), [], "decoding is off");
    machine.config(COMMAND, &[2, 0]);
    let at = |base: u64| [(base, 0x2000), (base + 0x4000, 0x4000)];
    assert_eq!(machine.slots.mapped(), at(BAR));
    machine.config(0x10, &0x10_0000u32.to_le_bytes());
    assert_eq!(machine.slots.mapped(), at(BAR + 0x10_0000));
    let iovas: Vec<u64> = machine.domain.mapped().iter().map(|(iova, _)| iova.start().get()).collect();
    assert_eq!(iovas, [BAR + 0x10_0000, BAR + 0x10_4000], "other functions reach it there too");
    machine.config(COMMAND, &[0, 0]);
    assert_eq!(machine.slots.mapped(), []);
    assert_eq!(machine.domain.mapped().len(), 2, "to map a large one again takes time");
}

#[test]
fn trapped_accesses_reach_the_device_in_natural_pieces_and_the_table_does_not() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[2, 0]);
    machine.fake.take_calls();
    machine.write(0x3ffe, &[1, 2, 3, 4]);
    machine.write(TABLE, &[0xff; 8]);
    machine.write(PENDING, &[0xff; 8]);
    let bar = RegionIndex::Bar(0);
    assert_eq!(
        machine.fake.take_calls(),
        [Call::Write(bar, 0x3ffe, vec![1, 2]), Call::Write(bar, 0x4000, vec![3, 4])]
    );
    assert_eq!(machine.read::<4>(0), *b"regi");
    assert_eq!(machine.read::<4>(TABLE), [0xfc, 0xff, 0xff, 0xff]);
}

#[test]
fn a_vector_is_connected_in_the_device_when_the_guest_first_opens_it() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[6, 4]);
    assert!(!*machine.line.0.lock().unwrap(), "INTx is disabled");
    machine.fake.take_calls();
    machine.config(MSIX + 2, &[7, 0xc0]);
    machine.vector(5, 0x45, false);
    assert_eq!(machine.interrupt_calls(), [connect(InterruptKind::Msix, 0, &[false])]);
    machine.config(MSIX + 2, &[7, 0x80]);
    assert_eq!(machine.interrupt_calls(), [connect(InterruptKind::Msix, 5, &[true])]);
    assert_eq!(machine.router.data(), [0x45]);
    machine.vector(5, 0x45, true);
    assert!(machine.fake.fire(InterruptKind::Msix, 5));
    assert_eq!(machine.read::<8>(PENDING), [1 << 5, 0, 0, 0, 0, 0, 0, 0]);
    machine.vector(5, 0x46, false);
    assert_eq!((machine.interrupt_calls(), machine.router.data()), (vec![], vec![0x46]));
    machine.config(MSIX + 2, &[7, 0]);
    assert_eq!(machine.interrupt_calls(), [Call::Disable(InterruptKind::Msix)]);
}

/// As with Linux before 6.5 (`VFIO_IRQ_INFO_NORESIZE`).
#[test]
fn a_device_that_cannot_add_vectors_gets_more_by_off_and_on_and_none_of_them_is_lost() {
    let machine = Machine::new(fake().with_fixed_interrupts(InterruptKind::Msix, 8));
    machine.config(COMMAND, &[6, 4]);
    machine.config(MSIX + 2, &[7, 0x80]);
    machine.vector(0, 0x40, false);
    machine.fake.take_calls();
    machine.vector(2, 0x42, false);
    assert_eq!(
        machine.interrupt_calls(),
        [
            Call::Disable(InterruptKind::Msix),
            connect(InterruptKind::Msix, 0, &[true, false, false, false]),
            connect(InterruptKind::Msix, 2, &[true]),
        ]
    );
    machine.vector(0, 0x40, true);
    assert_eq!(machine.read::<8>(PENDING)[0], 1, "one too many rather than one too few");
}

#[test]
fn msi_gives_the_device_as_many_vectors_as_the_guest_allows_and_masks_each() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[6, 4]);
    machine.fake.take_calls();
    machine.config(MSI + 4, &0xfee0_1000u32.to_le_bytes());
    machine.config(MSI + 12, &0x60u16.to_le_bytes());
    machine.config(MSI + 16, &0b10u32.to_le_bytes());
    machine.config(MSI + 2, &[0x11, 0]);
    assert_eq!(
        machine.interrupt_calls(),
        [connect(InterruptKind::Msi, 0, &[false, false]), connect(InterruptKind::Msi, 0, &[true])]
    );
    assert_eq!(machine.router.data(), [0x60]);
    machine.config(MSI + 16, &0u32.to_le_bytes());
    assert_eq!(machine.router.data(), [0x60, 0x61]);
    machine.config(MSI + 16, &1u32.to_le_bytes());
    assert!(machine.fake.fire(InterruptKind::Msi, 0));
    assert_eq!(machine.config_u32(MSI + 20), 1, "it is pending");
    machine.config(MSI + 2, &[0, 0]);
    assert!(machine.router.data().is_empty());
}

#[test]
fn intx_is_on_unless_the_guest_disables_it_or_uses_messages() {
    let machine = Machine::new(fake());
    let on = || *machine.line.0.lock().unwrap();
    assert!(on());
    assert!(machine.fake.take_calls().contains(&Call::Resample));
    machine.config(COMMAND, &[0, 4]);
    assert!(!on());
    machine.config(COMMAND, &[0, 0]);
    assert!(on());
    machine.config(MSIX + 2, &[7, 0x80]);
    assert!(!on());
    assert_eq!(
        machine.interrupt_calls().last(),
        Some(&connect(InterruptKind::Msix, 0, &[false])),
        "one kind is on at a time"
    );
    machine.config(MSIX + 2, &[7, 0]);
    assert!(on());
}

#[test]
fn a_reset_by_the_guest_is_one_of_the_device_and_forgets_what_was_programmed() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[6, 4]);
    machine.config(MSIX + 2, &[7, 0x80]);
    machine.vector(0, 0x40, false);
    machine.fake.take_calls();
    machine.config(EXPRESS + 8, &[0, 0x80]);
    assert!(machine.fake.take_calls().contains(&Call::Reset));
    assert_eq!((machine.slots.mapped(), machine.router.data()), (vec![], vec![]));
    assert!(*machine.line.0.lock().unwrap());
    machine.config(COMMAND, &[2, 0]);
    assert_eq!(machine.read::<4>(TABLE + 12), [1, 0, 0, 0]);
}

#[test]
fn a_reset_connects_intx_and_its_resampling_anew() {
    let machine = Machine::new(fake());
    let resets: [fn(&Machine); 2] =
        [|machine| machine.config(EXPRESS + 8, &[0, 0x80]), |machine| machine.function.reset(&[])];
    for reset in resets {
        machine.fake.take_calls();
        reset(&machine);
        let calls = machine.fake.take_calls();
        let at = |wanted: &Call| calls.iter().position(|call| call == wanted).unwrap();
        assert!(at(&Call::Disable(InterruptKind::Intx)) < at(&Call::Reset), "{calls:?}");
        assert!(at(&Call::Reset) < at(&Call::Resample), "{calls:?}");
    }
}

#[test]
fn at_the_end_it_is_quiet_reset_and_nowhere() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[6, 4]);
    machine.config(MSIX + 2, &[7, 0x80]);
    machine.fake.take_calls();
    machine.function.end();
    let calls = machine.fake.take_calls();
    let at = |wanted: &Call| calls.iter().position(|call| call == wanted).unwrap();
    assert!(at(&Call::Disable(InterruptKind::Msix)) < at(&Call::Reset));
    assert_eq!(calls.last(), Some(&Call::Reset));
    assert_eq!((machine.slots.mapped(), machine.domain.mapped()), (vec![], vec![]));
}

#[test]
fn what_the_guest_writes_to_a_function_that_has_just_gone_brings_nothing_back() {
    let machine = Machine::new(fake());
    machine.vector(0, 0x40, false);
    machine.function.end();
    machine.config(COMMAND, &[6, 0]);
    machine.config(MSIX + 2, &[7, 0x80]);
    machine.vector(0, 0x40, false);
    machine.root.update();
    assert_eq!((machine.slots.mapped(), machine.domain.mapped()), (vec![], vec![]));
    assert!(machine.router.data().is_empty());
}

#[test]
fn a_function_that_ended_is_closed_with_its_last_reference() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[6, 0]);
    machine.config(MSIX + 2, &[7, 0x80]);
    machine.vector(0, 0x40, false);
    let Machine { fake, function, root, .. } = machine;
    function.end();
    drop((function, root));
    assert_eq!(Arc::strong_count(&fake), 1);
}

#[test]
fn a_reset_from_above_leaves_it_as_at_the_start() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[6, 4]);
    machine.config(MSIX + 2, &[7, 0x80]);
    machine.vector(0, 0x40, false);
    machine.fake.take_calls();
    machine.function.reset(&["0000:01:00.0"]);
    assert!(machine.fake.take_calls().contains(&Call::Reset));
    machine.root.update();
    assert_eq!((machine.slots.mapped(), machine.domain.mapped()), (vec![], vec![]));
    assert!(machine.router.data().is_empty() && *machine.line.0.lock().unwrap());
}

#[test]
fn its_loss_is_reported_once() {
    let machine = Machine::new(fake());
    let notified = Arc::new(AtomicU32::new(0));
    let notify = Arc::clone(&notified);
    machine.function.on_lost(Box::new(move || {
        notify.fetch_add(1, Ordering::Relaxed);
    }));
    machine.config(COMMAND, &[2, 0]);
    assert!(!machine.function.is_lost());
    machine.fake.remove();
    machine.config(COMMAND, &[0, 0]);
    machine.config(COMMAND, &[2, 0]);
    assert!(machine.function.is_lost());
    assert_eq!(notified.load(Ordering::Relaxed), 1);
}

#[test]
fn a_function_that_was_pulled_out_is_lost_when_it_is_asked() {
    let machine = Machine::new(fake());
    assert!(!machine.function.look_if_lost());
    // An absent function reads as all ones, without an error; the kernel makes up the vendor's id.
    machine.fake.memory(RegionIndex::Config).unwrap().write(8, &[0xff; 4]).unwrap();
    assert!(!machine.function.is_lost());
    assert!(machine.function.look_if_lost() && machine.function.is_lost());
}

#[test]
fn a_function_that_is_gone_reads_all_ones_and_is_counted() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[2, 0]);
    machine.fake.remove();
    assert_eq!(machine.read::<4>(0), [0xff; 4]);
    machine.config(MSIX + 2, &[7, 0x80]);
    machine.vector(0, 0x40, false);
    machine.function.end();
    assert!(machine.function.counters().iter().any(|(what, n)| *what == "unanswered accesses" && *n > 0));
}

#[derive(Debug, Clone)]
enum Access {
    Config(u16, Vec<u8>),
    Bar(u64, Vec<u8>),
}

fn access() -> impl Strategy<Value = Access> {
    let data = || prop::collection::vec(any::<u8>(), 1..9);
    // The registers with a meaning are few: most writes go there.
    let config = prop_oneof![0u16..0x98, any::<u16>()];
    prop_oneof![
        (config, data()).prop_map(|(offset, data)| Access::Config(offset, data)),
        (0..BAR_SIZE, data()).prop_map(|(offset, data)| Access::Bar(offset, data)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever the guest does, the device's own MSI-X structures are out of its reach, and the end is the same.
    #[test]
    fn no_guest_write_reaches_the_msix_structures_or_outlives_the_machine(
        accesses in prop::collection::vec(access(), 0..200)
    ) {
        let machine = Machine::new(fake());
        for access in accesses {
            match access {
                Access::Config(offset, data) => machine.config(offset & !3, &data[..data.len().min(4) & 6]),
                Access::Bar(offset, data) => machine.function.bar_write(0, offset, &data),
            }
            for (start, size) in machine.slots.mapped() {
                prop_assert!(start.is_multiple_of(0x1000) && size.is_multiple_of(0x1000));
            }
        }
        let own: [Span<InBar>; 2] =
            [(TABLE, 128), (PENDING, 8)].map(|(start, size)| Span::new(BarOffset::new(start), size).unwrap());
        for call in machine.fake.take_calls() {
            if let Call::Write(RegionIndex::Bar(0), offset, data) = call {
                let written = Span::new(BarOffset::new(offset), data.len() as u64).unwrap();
                prop_assert!(own.iter().all(|own| !own.overlaps(written)), "{written}");
            }
        }
        machine.function.end();
        prop_assert_eq!((machine.slots.mapped(), machine.domain.mapped(), machine.router.data()), (vec![], vec![], vec![]));
        prop_assert!(!*machine.line.0.lock().unwrap());
    }
}

#[test]
fn where_a_function_was_lost_the_guest_and_other_functions_find_nothing() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[2, 0]);
    assert!(!machine.slots.mapped().is_empty() && !machine.domain.mapped().is_empty());
    machine.fake.remove();
    machine.function.lose();
    assert_eq!((machine.slots.mapped(), machine.domain.mapped()), (vec![], vec![]));
    assert_eq!((machine.config_u32(0), machine.read::<4>(0)), (u32::MAX, [0xff; 4]));
    // What the guest still programs there changes nothing.
    for command in [0, 2] {
        machine.config(COMMAND, &[command, 0]);
    }
    machine.write(0, &[1]);
    assert_eq!(machine.slots.mapped(), vec![]);
    machine.function.end();
}

#[test]
fn a_span_of_the_guest_is_where_the_bar_decodes() {
    let machine = Machine::new(fake());
    machine.config(COMMAND, &[2, 0]);
    let expected = DecodedBar::new(0, Span::new(Gpa::new(BAR), BAR_SIZE).unwrap());
    assert_eq!(machine.function.decoded(), [expected]);
}
