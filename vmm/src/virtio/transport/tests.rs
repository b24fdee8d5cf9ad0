use std::sync::atomic::{AtomicBool, Ordering};

use egm_address::{Gpa, Span};
use event_manager::{EventOps, Events, MutEventSubscriber};
use proptest::prelude::*;
use vm_memory::GuestAddress;

use super::*;
use crate::eventfd;
use crate::pci::msix::{MsiMessage, MsiRouter};
use crate::pci::{COMMAND, COMMAND_BUS_MASTER, COMMAND_MEMORY, Plugged};
use crate::plan::{BarKind, BarPlan, FunctionRole};
use crate::virtio::saved::QueuePosition;
use crate::virtio::{ActivateError, DeviceState};

/// Two queues and eight bytes of configuration; remembers what it was given.
struct Fake {
    kicks: Vec<Arc<EventFd>>,
    refuse: Arc<AtomicBool>,
    active: Option<Activation>,
    resets: u32,
    /// Queues with a changed vector, and where they interrupt now.
    vectors: Vec<(u16, Option<Arc<EventFd>>)>,
    written: Vec<(u64, Vec<u8>)>,
}

impl MutEventSubscriber for Fake {
    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {}
    fn init(&mut self, _ops: &mut EventOps<'_>) {}
}

impl VirtioDevice for Fake {
    fn device_type(&self) -> u16 {
        2
    }
    fn features(&self) -> u64 {
        crate::virtio::RING_EVENT_IDX | 1
    }
    fn queue_sizes(&self) -> &[u16] {
        &[16, 16]
    }
    fn kicks(&self) -> &[Arc<EventFd>] {
        &self.kicks
    }
    fn config_read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xa0 + u8::try_from(offset & 0xf).unwrap());
    }
    fn config_write(&mut self, offset: u64, data: &[u8]) {
        self.written.push((offset, data.to_vec()));
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if self.refuse.load(Ordering::Relaxed) {
            return Err(ActivateError { what: "test", source: io::Error::other("refused") });
        }
        self.active = Some(activation);
        Ok(())
    }
    fn vector_changed(&mut self, index: u16) -> Result<(), ActivateError> {
        let Some(active) = &self.active else { return Ok(()) };
        self.vectors.push((index, active.interrupt.queue_eventfd(index)));
        if self.refuse.load(Ordering::Relaxed) {
            return Err(ActivateError { what: "test", source: io::Error::other("refused") });
        }
        Ok(())
    }
    fn uses_vhost(&self) -> bool {
        true
    }
    fn resume_vhost(&mut self) -> Result<(), ActivateError> {
        if self.refuse.load(Ordering::Relaxed) {
            return Err(ActivateError { what: "test", source: io::Error::other("refused") });
        }
        Ok(())
    }
    fn saved(&self) -> Option<DeviceState> {
        let position =
            |queue: &Queue| QueuePosition { available: queue.next_avail(), used: queue.next_used() };
        let queues = self.active.as_ref()?.queues.iter().map(|queue| queue.as_ref().map(position));
        Some(DeviceState::of_queues(queues.collect()))
    }

    fn counters(&self) -> Vec<Counter> {
        vec![("resets", self.resets.into())]
    }
    fn reset(&mut self) {
        self.active = None;
        self.resets += 1;
    }
}

/// As in KVM, an address has one ioeventfd.
#[derive(Default)]
struct FakeDoorbell(Mutex<Vec<u64>>);

impl Doorbell for FakeDoorbell {
    fn attach(&self, gpa: u64, _fd: &EventFd) -> io::Result<()> {
        let mut ioeventfds = self.0.lock().unwrap();
        if ioeventfds.contains(&gpa) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        ioeventfds.push(gpa);
        Ok(())
    }
    fn detach(&self, gpa: u64, _fd: &EventFd) -> io::Result<()> {
        let mut ioeventfds = self.0.lock().unwrap();
        let at = ioeventfds.iter().position(|address| *address == gpa).ok_or(io::ErrorKind::NotFound)?;
        ioeventfds.remove(at);
        Ok(())
    }
}

/// Counts what is connected.
#[derive(Default)]
struct Router(Mutex<u32>);

impl MsiRouter for Router {
    fn connect(&self, slot: &mut Option<u32>, _message: MsiMessage, _trigger: &EventFd) -> io::Result<()> {
        *slot = Some(0);
        *self.0.lock().unwrap() += 1;
        Ok(())
    }
    fn disconnect(&self, _slot: u32, _trigger: &EventFd) {
        *self.0.lock().unwrap() -= 1;
    }
}

struct Rig {
    function: VirtioPci,
    fake: Arc<Mutex<Fake>>,
    doorbell: Arc<FakeDoorbell>,
    router: Arc<Router>,
    msix: Arc<Msix>,
    refuse: Arc<AtomicBool>,
}

const BAR: u64 = 0x80_0000_0000;

fn rig(bus: u8) -> Rig {
    let kick = || Arc::new(eventfd::new().unwrap());
    let refuse = Arc::new(AtomicBool::new(false));
    let fake = Fake {
        kicks: vec![kick(), kick()],
        refuse: refuse.clone(),
        active: None,
        resets: 0,
        vectors: vec![],
        written: vec![],
    };
    let fake = Arc::new(Mutex::new(fake));
    let plan = FunctionPlan {
        address: PciAddress::new(0, bus, 1, 0).unwrap(),
        role: FunctionRole::HostBridge, // not looked at
        bars: vec![BarPlan {
            index: 0,
            kind: BarKind::Memory64Prefetchable,
            span: Span::new(Gpa::new(BAR), BAR_SIZE).unwrap(),
        }],
        msix_vectors: 3,
    };
    let (doorbell, router) = (Arc::new(FakeDoorbell::default()), Arc::new(Router::default()));
    let msix = Arc::new(Msix::new(3, router.clone()).unwrap());
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
    let function = VirtioPci::new(fake.clone(), &plan, msix.clone(), memory, doorbell.clone()).unwrap();
    Rig { function, fake, doorbell, router, msix, refuse }
}

impl Rig {
    fn read(&self, offset: u64, length: usize) -> u64 {
        let mut data = [0; 8];
        self.function.bar_read(0, offset, &mut data[..length]);
        u64::from_le_bytes(data)
    }
    fn write(&self, offset: u64, length: usize, value: u64) {
        self.function.bar_write(0, offset, &value.to_le_bytes()[..length]);
    }
    fn config<const N: usize>(&self, offset: u16) -> [u8; N] {
        let mut data = [0; N];
        self.function.config_read(offset, &mut data);
        data
    }
    /// Capabilities as (id, offset).
    fn capabilities(&self) -> Vec<(u8, u16)> {
        let mut found = Vec::new();
        let [mut at] = self.config::<1>(0x34);
        while at != 0 {
            let [id, next] = self.config::<2>(at.into());
            found.push((id, at.into()));
            at = next;
        }
        found
    }
    fn window(&self) -> u16 {
        let is_window = |c: &&(u8, u16)| c.0 == 9 && self.config::<1>(c.1 + 3) == [5];
        self.capabilities().iter().find(is_window).unwrap().1
    }
    /// Up to FEATURES_OK, with queue 0 enabled at `descriptor`.
    fn negotiate(&self, descriptor: u64) {
        self.write(0x14, 1, 0);
        self.write(0x14, 1, 3);
        self.write(0x08, 4, 1);
        self.write(0x0c, 4, 1);
        self.write(0x08, 4, 0);
        self.write(0x0c, 4, crate::virtio::RING_EVENT_IDX);
        self.write(0x14, 1, 11);
        self.write(0x16, 2, 0);
        self.write(0x1a, 2, 1);
        self.write(0x20, 4, descriptor);
        self.write(0x28, 4, 0x2000);
        self.write(0x30, 4, 0x3000);
        self.write(0x1c, 2, 1);
    }
}

#[test]
fn a_driver_finds_every_structure_by_its_capabilities() {
    for (bus, kind) in [(0, 0x92), (1, 0x02)] {
        let rig = rig(bus);
        assert_eq!(rig.config::<4>(0), [0xf4, 0x1a, 0x42, 0x10]);
        let mut structures = Vec::new();
        for (id, at) in rig.capabilities() {
            match id {
                0x09 => {
                    let [length, kind, bar] = rig.config::<3>(at + 2);
                    let offset = u32::from_le_bytes(rig.config(at + 8));
                    structures.push((kind, length, bar, offset));
                }
                0x10 => assert_eq!(rig.config::<2>(at + 2), [kind, 0]),
                0x11 => assert_eq!(rig.config::<10>(at + 2), [2, 0, 0, 0x40, 0, 0, 0, 0x60, 0, 0]),
                _ => panic!("capability {id:#x}"),
            }
        }
        let expected =
            [(1, 16, 0, 0), (2, 20, 0, 0x3000), (3, 16, 0, 0x1000), (4, 16, 0, 0x2000), (5, 20, 0, 0)];
        assert_eq!(structures, expected);
        assert_eq!(rig.config::<4>(0x100), [0; 4], "no extended capability, but there is extended space");
    }
}

#[test]
fn driver_ok_hands_over_the_enabled_queues_and_reset_takes_them_back() {
    let rig = rig(1);
    rig.negotiate(0x1000);
    rig.write(0x14, 1, 15);
    assert_eq!(rig.read(0x14, 1), 15);
    {
        let fake = rig.fake.lock().unwrap();
        let active = fake.active.as_ref().unwrap();
        let queue = active.queues[0].as_ref().unwrap();
        assert_eq!((queue.desc_table(), queue.size(), queue.event_idx_enabled()), (0x1000, 16, true));
        assert!(active.queues[1].is_none());
        assert_eq!(active.features, 1 << 32 | 1 << 29);
        active.interrupt.queue(0);
        active.interrupt.queue(9);
    }
    assert_eq!((rig.read(0x1000, 1), rig.read(0x1000, 1)), (1, 0), "reading the interrupt status clears it");
    assert_eq!(rig.msix.trigger(1).unwrap().read().unwrap(), 1);
    rig.write(0x14, 1, 0);
    assert_eq!((rig.read(0x14, 1), rig.read(0x1a, 2), rig.fake.lock().unwrap().resets), (0, 0xffff, 2));
    assert!(rig.fake.lock().unwrap().active.is_none());
    assert_eq!(rig.function.mistakes(), 0);
}

#[test]
fn a_queue_outside_memory_or_a_device_that_refuses_needs_a_reset() {
    let rig = rig(1);
    rig.write(0x10, 2, 2);
    for (descriptor, refuse) in [(0xff_f000, false), (0x1008, false), (0x1000, true)] {
        rig.negotiate(descriptor);
        rig.write(0x10, 2, 2);
        rig.refuse.store(refuse, Ordering::Relaxed);
        let generation = rig.read(0x15, 1);
        rig.write(0x14, 1, 15);
        assert_eq!(rig.read(0x14, 1), 15 | 64, "descriptor table {descriptor:#x}");
        assert_eq!(rig.read(0x15, 1), generation + 1);
        assert_eq!(rig.msix.trigger(2).unwrap().read().unwrap(), 1);
        assert!(rig.fake.lock().unwrap().active.is_none());
    }
}

#[test]
fn a_running_device_is_notified_that_a_queue_has_another_vector() {
    let rig = rig(1);
    rig.negotiate(0x1000);
    rig.write(0x14, 1, 15);
    rig.write(0x1a, 2, 2);
    rig.write(0x1a, 2, 0xffff);
    {
        let fake = rig.fake.lock().unwrap();
        let [(0, Some(now)), (0, None)] = fake.vectors.as_slice() else { panic!("{:?}", fake.vectors) };
        assert!(Arc::ptr_eq(now, rig.msix.trigger(2).unwrap()));
    }
    assert_eq!(rig.read(0x14, 1), 15);
    rig.refuse.store(true, Ordering::Relaxed);
    rig.write(0x1a, 2, 1);
    assert_eq!(rig.read(0x14, 1), 15 | 64, "a device that cannot follow needs a reset");
}

#[test]
fn vhost_goes_on_with_a_kick_of_each_queue_or_its_driver_is_requested_to_reset_the_device() {
    let rig = rig(1);
    rig.negotiate(0x1000);
    rig.write(0x10, 2, 2);
    rig.write(0x14, 1, 15);
    let kicked = || rig.fake.lock().unwrap().kicks.iter().all(|kick| kick.read().is_ok());
    assert!(!kicked());
    rig.function.resume_vhost();
    assert!(kicked() && rig.read(0x14, 1) == 15);
    rig.refuse.store(true, Ordering::Relaxed);
    rig.function.resume_vhost();
    assert_eq!((rig.read(0x14, 1), rig.msix.trigger(2).unwrap().read().unwrap()), (15 | 64, 1));
}

#[test]
fn doors_follow_the_bar() {
    let rig = rig(1);
    let ioeventfds = || rig.doorbell.0.lock().unwrap().clone();
    assert!(rig.function.config_write(COMMAND, &COMMAND_MEMORY.to_le_bytes()));
    rig.function.place(&rig.function.decoded());
    assert_eq!(ioeventfds(), [BAR + 0x3000, BAR + 0x3004]);
    rig.function.place(&rig.function.decoded());
    assert_eq!(ioeventfds(), [BAR + 0x3000, BAR + 0x3004]);
    assert!(rig.function.config_write(0x10, &0x10_0000_u32.to_le_bytes()));
    rig.function.place(&rig.function.decoded());
    assert_eq!(ioeventfds(), [BAR + 0x10_3000, BAR + 0x10_3004]);
    assert!(rig.function.config_write(COMMAND, &[0, 0]));
    rig.function.place(&rig.function.decoded());
    assert!(ioeventfds().is_empty());
}

#[test]
fn a_reset_of_the_slot_is_a_power_on_and_a_removed_function_comes_back_by_no_late_access() {
    let rig = rig(1);
    let initial: [u8; 64] = rig.config(0);
    let bars = [DecodedBar::new(0, Span::new(Gpa::new(BAR), BAR_SIZE).unwrap())];
    let start = || {
        let _ = rig.function.config_write(COMMAND, &(COMMAND_MEMORY | COMMAND_BUS_MASTER).to_le_bytes());
        rig.function.place(&bars);
        rig.negotiate(0x1000);
        rig.write(0x14, 1, 0xf);
        assert!(rig.fake.lock().unwrap().active.is_some());
        assert_eq!(rig.doorbell.0.lock().unwrap().len(), 2);
    };
    start();
    rig.function.reset(&[]);
    assert!(rig.fake.lock().unwrap().active.is_none());
    assert_eq!((rig.config::<64>(0), rig.read(0x14, 1)), (initial, 0));
    start();
    rig.function.end();
    assert!(rig.doorbell.0.lock().unwrap().is_empty());
    // As vCPUs that found it before have it.
    assert!(!rig.function.config_write(COMMAND, &COMMAND_MEMORY.to_le_bytes()));
    rig.function.place(&bars);
    rig.negotiate(0x1000);
    rig.write(0x14, 1, 0xf);
    assert!(rig.fake.lock().unwrap().active.is_none() && rig.function.decoded().is_empty());
    assert!(rig.doorbell.0.lock().unwrap().is_empty() && *rig.router.0.lock().unwrap() == 0);
}

#[test]
fn a_kick_without_a_door_reaches_its_queue() {
    let rig = rig(1);
    rig.write(0x3004, 2, 1);
    rig.write(0x3008, 2, 2);
    let fake = rig.fake.lock().unwrap();
    assert_eq!(fake.kicks[1].read().unwrap(), 1);
    assert!(fake.kicks[0].read().is_err());
    drop(fake);
    assert_eq!(rig.function.mistakes(), 1);
}

#[test]
fn messages_need_msix_enable_and_bus_master() {
    let rig = rig(1);
    let msix = rig.capabilities().iter().find(|c| c.0 == 0x11).unwrap().1;
    let connected = || *rig.router.0.lock().unwrap();
    rig.write(0x4000 + 12, 4, 0);
    let _ = rig.function.config_write(msix + 2, &[0, 0x80]);
    assert_eq!(connected(), 0);
    let _ = rig.function.config_write(COMMAND, &(COMMAND_BUS_MASTER | COMMAND_MEMORY).to_le_bytes());
    assert_eq!(connected(), 1);
    let _ = rig.function.config_write(msix + 2, &[0, 0xc0]);
    assert_eq!((connected(), rig.config::<2>(msix + 2)), (0, [2, 0xc0]), "table size is read-only");
}

#[test]
fn a_read_of_all_of_configuration_space_is_no_mistake() {
    let rig = rig(0);
    for offset in (0..0x1000).step_by(4) {
        rig.config::<4>(offset);
    }
    assert_eq!(rig.function.mistakes(), 0);
    let _ = rig.function.config_write(rig.window() + 12, &3_u32.to_le_bytes());
    rig.config::<4>(rig.window() + 16);
    assert_eq!(rig.function.mistakes(), 1, "a length that no access has");
}

#[test]
fn the_configuration_window_reads_and_writes_the_bar() {
    let rig = rig(0);
    let window = rig.window();
    let select = |bar: u8, offset: u32, length: u32| {
        let _ = rig.function.config_write(window + 4, &[bar]);
        let _ = rig.function.config_write(window + 8, &offset.to_le_bytes());
        let _ = rig.function.config_write(window + 12, &length.to_le_bytes());
    };
    select(0, 0x2003, 1);
    assert_eq!(rig.config::<4>(window + 16), [0xa3, 0, 0, 0]);
    select(0, 0x14, 1);
    let _ = rig.function.config_write(window + 16, &[3, 9, 9, 9]);
    assert_eq!(rig.read(0x14, 1), 3);
    for (bar, offset, length) in [(1, 0x14, 1), (0, 0x13, 2), (0, 0x10, 8), (0, 0, 0), (0, 0, 3)] {
        let before = rig.function.mistakes();
        select(bar, offset, length);
        let _ = rig.function.config_write(window + 16, &[0; 4]);
        assert_eq!((rig.function.mistakes(), rig.read(0x14, 1)), (before + 1, 3));
    }
}

#[test]
fn device_configuration_passes_through() {
    let rig = rig(0);
    rig.write(0x2ff8, 4, 0x0403_0201);
    assert_eq!(rig.fake.lock().unwrap().written, [(0xff8, vec![1, 2, 3, 4])]);
    assert_eq!(rig.read(0x2001, 2), 0xa1a1);
}

proptest! {
    #[test]
    fn no_access_panics_or_changes_the_identity(
        accesses in prop::collection::vec((any::<bool>(), 0u64..0x8010, 1usize..9, any::<u64>()), 0..100)
    ) {
        let rig = rig(1);
        for (space, offset, length, value) in accesses {
            let data = &value.to_le_bytes()[..length];
            if space {
                let offset = u16::try_from(offset).unwrap() & 0x1ff;
                let _ = rig.function.config_write(offset, data);
                rig.function.place(&rig.function.decoded());
                let _ = rig.config::<4>(offset);
            } else {
                rig.write(offset, length, value);
                let _ = rig.read(offset, length);
            }
        }
        prop_assert_eq!(rig.config::<4>(0), [0xf4, 0x1a, 0x42, 0x10]);
        prop_assert!(rig.doorbell.0.lock().unwrap().len() <= 2);
    }
}
