//! A controller without its thread, with cards that write down what becomes of them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use egm_address::{Gpa, PciAddress, Span};
use proptest::prelude::*;
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::config::Device;
use crate::hotplug::{Candidate, Member, PlugMemory};
use crate::passed::Passed;
use crate::pci::msix::{MsiMessage, MsiRouter};
use crate::pci::{Bus, PciFunction, Plugged, PortConfig, PortKind};
use crate::reserve::Servers;

struct NoRouter;

impl MsiRouter for NoRouter {
    fn connect(&self, _slot: &mut Option<u32>, _message: MsiMessage, _trigger: &EventFd) -> io::Result<()> {
        Ok(())
    }
    fn disconnect(&self, _slot: u32, _trigger: &EventFd) {}
}

#[derive(Default)]
struct Card {
    name: String,
    done: Mutex<Vec<String>>,
    lost: AtomicBool,
}

impl Card {
    fn new(name: &str) -> Arc<Self> {
        Arc::new(Self { name: name.to_owned(), ..Self::default() })
    }

    fn done(&self) -> Vec<String> {
        std::mem::take(&mut self.done.lock().unwrap())
    }
}

impl PciFunction for Card {
    fn config_read(&self, _offset: u16, data: &mut [u8]) {
        data.fill(0x5a);
    }
    fn config_write(&self, _offset: u16, _data: &[u8]) -> bool {
        false
    }
}

impl Plugged for Card {
    fn reset(&self, together: &[&str]) {
        self.done.lock().unwrap().push(format!("reset with {}", together.join(" ")));
    }
    fn end(&self) {
        self.done.lock().unwrap().push("end".to_owned());
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

/// Leaves when it may, with the loss of what a guest wrote.
#[derive(Default)]
struct Slow {
    may_leave: Arc<AtomicBool>,
    asked: Arc<AtomicBool>,
}

impl Member for Slow {
    fn has_left(&mut self) -> bool {
        self.asked.store(true, Ordering::Relaxed);
        self.may_leave.load(Ordering::Relaxed)
    }
    fn take_loss(&mut self) -> Option<io::Error> {
        Some(io::Error::other("disk full"))
    }
}

/// What is plugged in next.
type Next = Arc<Mutex<Option<New>>>;

/// Makes what is next, behind the first bridge.
struct Waiting(Next);

impl Maker for Waiting {
    fn plan(
        &self,
        device: &Device,
        _slice: Option<&PlugMemory>,
        bridges: &[BridgePlan],
    ) -> Result<Candidate, HotplugError> {
        let function = crate::plan::plug(device, None, &bridges[0])?;
        Ok(Candidate { bridge: 0, function, servers: Servers::default(), memory: None })
    }
    fn make(&self, _candidate: Candidate) -> Result<New, HotplugError> {
        self.0.lock().unwrap().take().ok_or(HotplugError::Unprepared)
    }
}

fn new(card: &Arc<Card>) -> New {
    New { function: Arc::clone(card) as _, host_events: None, member: None }
}

/// A device of the configuration `text`.
fn device(text: &str) -> NewDevice {
    NewDevice::parse(text.as_bytes().to_vec()).unwrap()
}

const CONTROL: u16 = 0x58;
const ON: u16 = 0x1731 & !POWER_OFF;
const POWER_OFF: u16 = 1 << 10;
const BRIDGE_CONTROL: u16 = 0x3e;

/// Two hot-plug ports at 00:01.0 and 00:02.0, buses 1 and 2.
struct Machine {
    controller: Controller,
    start: Instant,
    said: Arc<Mutex<Vec<EventKind>>>,
    next: Next,
}

impl Machine {
    fn new() -> Self {
        let (mut bus, mut slots) = (Bus::default(), Vec::new());
        for number in 1..=2u8 {
            let config = PortConfig {
                kind: PortKind::Root,
                slot: number.into(),
                primary: 0,
                secondary: number,
                subordinate: number,
                window32: None,
                window64: None,
                occupied: false,
                acs: None,
            };
            let port = Arc::new(Port::hot(&config, None, Arc::new(NoRouter)).unwrap());
            let window64 = Span::new(Gpa::new(0x80_0000_0000), 1 << 20).ok();
            let (window32, acs) = (None, None);
            let bridge = BridgePlan { secondary: number, subordinate: number, window32, window64, acs };
            slots.push(Slot { port: Arc::clone(&port), number: number.into(), bridge, occupant: None });
            bus.add_port(number << 3, port, Bus::default());
        }
        let said = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&said);
        let report = Box::new(move |event: &Event| hears.lock().unwrap().push(event.what.clone()));
        let next = Next::default();
        let maker = Box::new(Waiting(Arc::clone(&next)));
        let root = Arc::new(RootComplex::new(bus));
        let disk = PciAddress::new(0, 0, 9, 0).unwrap();
        let devices = Devices {
            machine: "vm".to_owned(),
            addresses: [("disk".to_owned(), disk)].into(),
            owners: [("disk /d".to_owned(), "disk".to_owned())].into(),
        };
        let controller = Controller::new(root, slots, Vec::new(), devices, maker, report).unwrap();
        Self { controller, start: Instant::now(), said, next }
    }

    /// Plugs `card` in; returns the bus on which the guest finds it.
    fn plug(&mut self, id: &str, card: &Arc<Card>) -> Result<u8, HotplugError> {
        self.plug_new(&format!(r#"{{"type":"virtio-rng","id":"{id}"}}"#), new(card))
    }

    /// Plugs in the device `text`, which `new` becomes.
    fn plug_new(&mut self, text: &str, new: New) -> Result<u8, HotplugError> {
        *self.next.lock().unwrap() = Some(new);
        let plugged = self.ask(text, false);
        self.next.lock().unwrap().take();
        plugged.map(|device| device.function.address.bus())
    }

    fn ask(&mut self, text: &str, is_dry_run: bool) -> Result<PluggedDevice, HotplugError> {
        self.controller.plug(&Plug {
            device: device(text),
            is_dry_run,
            passed: Passed::default(),
            slice: None,
        })
    }

    fn unplug(&mut self, id: &str) -> Result<(), HotplugError> {
        self.controller.unplug(id, self.start)
    }

    fn has(&self, id: &str) -> bool {
        self.controller.handle.devices().contains_key(id)
    }

    fn turn(&mut self, seconds: u64) -> Option<Instant> {
        self.controller.turn(self.start + Duration::from_secs(seconds))
    }

    fn control(&self, port: u8, value: u16) {
        self.controller.root.config_write(0, port << 3, CONTROL, &value.to_le_bytes());
    }

    fn answers(&self, port: u8) -> bool {
        let mut data = [0; 2];
        self.controller.root.config_read(port, 0, 0, &mut data);
        data == [0x5a; 2]
    }
}

#[test]
fn a_function_answers_once_its_slot_has_power_and_leaves_when_the_guest_lets_it_go() {
    let (mut machine, card) = (Machine::new(), Card::new("card"));
    assert_eq!(machine.plug("one", &card).unwrap(), 1);
    assert!(!machine.answers(1), "the guest has not given power");
    machine.control(1, ON);
    assert!(machine.answers(1) && !machine.answers(2) && machine.has("one"));
    machine.unplug("one").unwrap();
    assert_eq!(machine.turn(1), Some(machine.start + UNPLUG_TIMEOUT));
    assert!(machine.answers(1) && machine.has("one"));
    machine.control(1, ON | POWER_OFF);
    assert!(!machine.answers(1));
    assert_eq!(machine.turn(2), None);
    assert!(!machine.has("one") && machine.has("disk"));
    assert_eq!(card.done(), ["end"]);
    assert_eq!(Arc::strong_count(&card), 1, "nobody holds it any more");
    assert_eq!(*machine.said.lock().unwrap(), [EventKind::Plugged(1), EventKind::Removed(Removal::Orderly)]);
    assert_eq!(machine.plug("one", &card).unwrap(), 1, "it can come again");
}

#[test]
fn a_guest_that_does_not_let_it_go_in_time_loses_it() {
    let (mut machine, card) = (Machine::new(), Card::new("card"));
    machine.plug("one", &card).unwrap();
    machine.control(1, ON);
    machine.unplug("one").unwrap();
    assert!(machine.turn(59).is_some() && machine.answers(1));
    assert!(machine.turn(60).is_none() && !machine.answers(1));
    assert_eq!(machine.said.lock().unwrap().last(), Some(&EventKind::Removed(Removal::Surprise)));
    assert_eq!((card.done(), Arc::strong_count(&card)), (vec!["end".to_owned()], 1));
}

#[test]
fn a_function_that_is_gone_is_taken_and_the_other_stays() {
    let (mut machine, cards) = (Machine::new(), [Card::new("a"), Card::new("b")]);
    for (id, card) in ["one", "two"].iter().zip(&cards) {
        machine.plug(id, card).unwrap();
    }
    machine.control(1, ON);
    machine.control(2, ON);
    cards[0].lost.store(true, Ordering::Relaxed);
    machine.turn(0);
    assert!(!machine.answers(1) && machine.answers(2));
    assert_eq!(machine.said.lock().unwrap()[2..], [EventKind::Lost, EventKind::Removed(Removal::Surprise)]);
}

#[test]
fn the_loss_of_a_function_that_stays_is_reported_once() {
    let (mut machine, card) = (Machine::new(), Card::new("a"));
    machine.controller.fixed.push(Occupant::new("one", new(&card)));
    machine.turn(0);
    assert!(machine.said.lock().unwrap().is_empty());
    card.lost.store(true, Ordering::Relaxed);
    machine.turn(1);
    machine.turn(2);
    assert_eq!(*machine.said.lock().unwrap(), [EventKind::LostFixed]);
}

#[test]
fn functions_that_are_reset_at_once_get_the_names_of_all() {
    let (mut machine, cards) = (Machine::new(), [Card::new("a"), Card::new("b")]);
    for (id, card) in ["one", "two"].iter().zip(&cards) {
        machine.plug(id, card).unwrap();
    }
    for port in [1, 2] {
        machine.control(port, ON);
        machine.controller.root.config_write(0, port << 3, BRIDGE_CONTROL, &[0x40]);
    }
    machine.turn(0);
    assert!(cards.iter().all(|card| card.done() == ["reset with a b"]));
    assert!(!machine.answers(1), "the bit is still set");
    machine.controller.root.config_write(0, 8, BRIDGE_CONTROL, &[0]);
    assert!(machine.answers(1) && !machine.answers(2));
}

#[test]
fn a_guests_reset_resets_all_functions_together_and_removes_one_with_a_pending_unplug() {
    let (mut machine, cards) = (Machine::new(), [Card::new("a"), Card::new("b"), Card::new("fixed")]);
    for (id, card) in ["one", "two"].iter().zip(&cards) {
        machine.plug(id, card).unwrap();
    }
    machine.controller.fixed.push(Occupant::new("three", new(&cards[2])));
    machine.control(1, ON);
    machine.unplug("one").unwrap();
    let (replies, reply) = channel();
    machine.controller.handle.reset(Box::new(move || replies.send(()).unwrap())).unwrap();
    assert!(reply.try_recv().is_err());
    assert_eq!(machine.turn(1), None, "no device is waited for");
    assert_eq!(reply.try_recv(), Ok(()));
    assert_eq!(
        cards.each_ref().map(|card| card.done()),
        [vec!["end"], vec!["reset with b fixed"], vec!["reset with b fixed"]]
    );
    assert!(!machine.answers(1) && machine.answers(2) && !machine.has("one"));
    assert_eq!(machine.said.lock().unwrap().last(), Some(&EventKind::Removed(Removal::Orderly)));
    machine.control(2, ON | POWER_OFF);
    assert!(!machine.answers(2), "the guest has its slots as before");
}

#[test]
fn a_function_that_is_gone_is_not_reset_with_the_guest() {
    let (mut machine, card) = (Machine::new(), Card::new("card"));
    machine.controller.fixed.push(Occupant::new("one", new(&card)));
    card.lost.store(true, Ordering::Relaxed);
    machine.controller.handle.reset(Box::new(|| ())).unwrap();
    machine.turn(0);
    assert!(card.done().is_empty());
}

#[test]
fn what_cannot_be_done_is_refused_and_changes_nothing() {
    let (mut machine, card) = (Machine::new(), Card::new("card"));
    machine.plug("one", &card).unwrap();
    for id in ["one", "disk"] {
        assert!(matches!(machine.plug(id, &card), Err(HotplugError::Taken { .. })), "{id}");
    }
    assert!(matches!(
        machine.ask(r#"{"type":"virtio-rng","id":"two"}"#, false),
        Err(HotplugError::Unprepared)
    ));
    assert!(!machine.has("two"));
    machine.plug("two", &Card::new("b")).unwrap();
    assert!(matches!(machine.plug("three", &Card::new("c")), Err(HotplugError::NoSlot { slots: 2, .. })));
    assert!(matches!(machine.unplug("three"), Err(HotplugError::Unknown { .. })));
    assert!(matches!(machine.unplug("disk"), Err(HotplugError::Unknown { .. })));
    machine.unplug("one").unwrap();
    assert!(matches!(machine.unplug("one"), Err(HotplugError::Leaving { .. })));
}

#[test]
fn what_one_device_has_for_itself_is_not_opened_again_while_it_is_there() {
    let mut machine = Machine::new();
    let function = r#"{"type":"vfio","function":"0000:01:00.0"}"#;
    let other = r#"{"type":"virtio-blk","path":"/other","id":"other"}"#;
    machine.plug_new(other, new(&Card::new("a"))).unwrap();
    for (text, expected) in [
        (
            r#"{"type":"virtio-blk","path":"/d"}"#,
            "cannot plug in disk /d: the machine has it already, as \"disk\"",
        ),
        (
            r#"{"type":"virtio-blk","path":"/other"}"#,
            "cannot plug in disk /other: the machine has it already, as \"other\"",
        ),
    ] {
        for is_dry_run in [true, false] {
            *machine.next.lock().unwrap() = Some(new(&Card::new("never")));
            assert_eq!(machine.ask(text, is_dry_run).unwrap_err().to_string(), expected);
            assert!(machine.next.lock().unwrap().take().is_some(), "it was not opened");
        }
    }
    assert_eq!(machine.plug_new(function, new(&Card::new("b"))).unwrap(), 2);
    machine.control(1, ON);
    machine.unplug("other").unwrap();
    machine.control(1, ON | POWER_OFF);
    machine.turn(1);
    assert_eq!(machine.plug_new(other, new(&Card::new("c"))).unwrap(), 1, "it left");
}

#[test]
fn a_device_without_an_id_gets_the_first_of_its_kind_that_no_device_has() {
    let mut machine = Machine::new();
    machine.plug("rng0", &Card::new("a")).unwrap();
    *machine.next.lock().unwrap() = Some(new(&Card::new("b")));
    let device = machine.ask(r#"{"type":"virtio-rng"}"#, false).unwrap();
    assert_eq!((device.id.as_str(), device.slot), ("rng1", 2));
    assert_eq!(device.function.address.to_string(), "0000:02:00.0");
}

#[test]
fn a_dry_run_has_the_answer_of_a_plug_and_does_nothing() {
    let (mut machine, card) = (Machine::new(), Card::new("card"));
    let planned = machine.ask(r#"{"type":"virtio-rng","id":"one"}"#, true).unwrap();
    assert!(!machine.has("one") && machine.said.lock().unwrap().is_empty());
    *machine.next.lock().unwrap() = Some(new(&card));
    assert_eq!(machine.ask(r#"{"type":"virtio-rng","id":"one"}"#, false).unwrap(), planned);
    assert_eq!((planned.slot, planned.function.bars.len()), (1, 1));
    assert!(machine.has("one"));
    let served = r#"{"type":"vfio-user","socket":"/s"}"#;
    assert!(matches!(machine.ask(served, true), Err(HotplugError::Unplannable { .. })));
    assert_eq!(machine.plug_new(served, new(&Card::new("b"))).unwrap(), 2);
}

#[test]
fn a_plug_is_under_way_until_it_is_answered_and_its_device_is_listed_by_its_slot_until_it_left() {
    let mut machine = Machine::new();
    let handle = machine.controller.handle.clone();
    let request = |text: &str, is_dry_run| {
        let plug = Plug { device: device(text), is_dry_run, passed: Passed::default(), slice: None };
        handle.plug(plug, Box::new(|_| ())).unwrap();
        handle.is_plugging()
    };
    let first = r#"{"type":"virtio-rng","id":"first"}"#;
    assert!(!request(first, true), "a dry run is no plug");
    *machine.next.lock().unwrap() = Some(new(&Card::new("a")));
    assert!(request(first, false) && handle.plugged().is_empty());
    machine.turn(0);
    assert!(!handle.is_plugging());
    assert!(request(first, false), "its name is taken");
    machine.turn(0);
    assert!(!handle.is_plugging(), "a refusal is an answer");
    machine.plug("second", &Card::new("b")).unwrap();
    let ids = || handle.plugged().into_iter().map(|device| device.id).collect::<Vec<_>>();
    assert_eq!(ids(), ["first", "second"]);
    machine.unplug("first").unwrap();
    machine.turn(61);
    assert_eq!(ids(), ["second"]);
    machine.plug("third", &Card::new("c")).unwrap();
    assert_eq!(ids(), ["third", "second"]);
}

#[test]
fn a_device_that_something_uses_departs_before_it_is_removed_and_its_loss_is_reported() {
    let (mut machine, card, slow) = (Machine::new(), Card::new("card"), Slow::default());
    let (may_leave, asked) = (Arc::clone(&slow.may_leave), Arc::clone(&slow.asked));
    let text = r#"{"type":"virtio-blk","path":"/other","id":"one"}"#;
    machine.plug_new(text, New { member: Some(Box::new(slow)), ..new(&card) }).unwrap();
    machine.control(1, ON);
    machine.unplug("one").unwrap();
    machine.turn(1);
    assert!(!asked.load(Ordering::Relaxed), "the guest has it");
    machine.control(1, ON | POWER_OFF);
    assert_eq!(machine.turn(2), Some(machine.start + Duration::from_secs(2) + DEPARTURE));
    assert!(asked.load(Ordering::Relaxed) && machine.has("one") && card.done() == ["end"]);
    assert!(matches!(machine.ask(text, true), Err(HotplugError::Taken { .. })));
    let again = machine.ask(r#"{"type":"virtio-blk","path":"/other"}"#, true);
    assert!(matches!(again, Err(HotplugError::Present { .. })));
    assert!(matches!(machine.unplug("one"), Err(HotplugError::Leaving { .. })));
    assert_eq!(machine.plug("two", &Card::new("b")).unwrap(), 1, "its slot is free");
    may_leave.store(true, Ordering::Relaxed);
    assert_eq!(machine.turn(3), None);
    assert!(!machine.has("one") && Arc::strong_count(&card) == 1);
    let said = machine.said.lock().unwrap().clone();
    let expected = [
        EventKind::Departing,
        EventKind::Plugged(1),
        EventKind::Unflushed("disk full".to_owned()),
        EventKind::Removed(Removal::Orderly),
    ];
    assert_eq!(said[1..], expected);
    assert!(machine.ask(text, true).is_ok());
}

#[test]
fn at_the_end_of_the_machine_everything_ends() {
    let (mut machine, card) = (Machine::new(), Card::new("card"));
    machine.plug("one", &card).unwrap();
    let mut running = machine.controller.start().unwrap();
    let handle = running.handle.clone();
    assert!(running.end().is_empty());
    assert_eq!(card.done(), ["end"]);
    assert!(matches!(handle.unplug("one".to_owned(), Box::new(|_| ())), Err(HotplugError::Ended)));
}

#[derive(Debug, Clone)]
enum Step {
    Write(u8, u16, Vec<u8>),
    Plug(bool),
    Unplug(bool),
    Lose(bool),
    Turn(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let offset = prop_oneof![4 => CONTROL..CONTROL + 4, 1 => Just(BRIDGE_CONTROL), 1 => 0..0x100u16];
    let data =
        prop_oneof![Just(1), Just(2), Just(4)].prop_flat_map(|n| prop::collection::vec(any::<u8>(), n));
    prop_oneof![
        6 => (1..=2u8, offset, data).prop_map(|(port, offset, data)| Step::Write(port, offset, data)),
        2 => any::<bool>().prop_map(Step::Plug),
        2 => any::<bool>().prop_map(Step::Unplug),
        1 => any::<bool>().prop_map(Step::Lose),
        3 => (0..100u64).prop_map(Step::Turn),
    ]
}

proptest! {
    /// Whatever the guest writes and the host wants, a function is in the machine, or it was ended and has no holder.
    #[test]
    fn no_function_is_left_half_plugged(steps in prop::collection::vec(step(), 0..48)) {
        let mut machine = Machine::new();
        let mut cards = [Card::new("a"), Card::new("b")];
        let id = |second: bool| if second { "two" } else { "one" };
        for step in steps {
            match step {
                Step::Write(port, offset, data) => {
                    machine.controller.root.config_write(0, port << 3, offset, &data);
                }
                Step::Plug(second) => {
                    let card = &mut cards[usize::from(second)];
                    if Arc::strong_count(card) == 1 {
                        *card = Card::new(id(second));
                        prop_assert!(machine.plug(id(second), card).is_ok());
                    }
                }
                Step::Unplug(second) => drop(machine.unplug(id(second))),
                Step::Lose(second) => cards[usize::from(second)].lost.store(true, Ordering::Relaxed),
                Step::Turn(seconds) => drop(machine.turn(seconds)),
            }
        }
        machine.turn(1000);
        for (card, name) in cards.iter().zip(["one", "two"]) {
            let inside = machine.controller.occupants().any(|occupant| occupant.id == name);
            let ended = card.done().contains(&"end".to_owned());
            prop_assert_eq!(inside, Arc::strong_count(card) > 1);
            prop_assert_eq!(inside, machine.has(name));
            prop_assert!(!(inside && ended));
        }
        for slot in &machine.controller.slots {
            prop_assert_eq!(slot.port.plugged().is_some(), slot.occupant.is_some());
            prop_assert_eq!(slot.port.duty(), None);
        }
    }
}
