//! The root complex: configuration accesses and memory accesses find their function.
//!
//! Both follow what the guest has programmed: a function behind ports is reached through their current bus numbers and
//! windows, so a guest that rewrites them gets what hardware would give it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use egm_address::{Gpa, Guest, Span};

use super::saved::BridgeState;
use super::{DecodedBar, PciFunction, Port};
use crate::lock::lock;
use crate::snapshot::{Mismatch, ensure};

/// Occupant of a device and function number.
enum Slot {
    Function(Arc<dyn PciFunction>),
    Port { port: Arc<Port>, behind: Bus },
}

/// Functions and ports of one bus.
#[derive(Default)]
pub struct Bus {
    /// By device and function number, ascending.
    slots: Vec<(u8, Slot)>,
}

impl Bus {
    /// Puts a function at `devfn`.
    pub fn add(&mut self, devfn: u8, function: Arc<dyn PciFunction>) {
        self.insert(devfn, Slot::Function(function));
    }

    /// Puts a port at `devfn`, with the bus behind it.
    pub(crate) fn add_port(&mut self, devfn: u8, port: Arc<Port>, behind: Self) {
        self.insert(devfn, Slot::Port { port, behind });
    }

    /// The ports on it.
    pub fn ports(&self) -> Vec<Arc<Port>> {
        let port = |(_, slot): &(u8, Slot)| match slot {
            Slot::Port { port, .. } => Some(Arc::clone(port)),
            Slot::Function(_) => None,
        };
        self.slots.iter().filter_map(port).collect()
    }

    /// Whether nothing is on it.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    fn insert(&mut self, devfn: u8, slot: Slot) {
        let at = self.slots.partition_point(|(taken, _)| *taken < devfn);
        self.slots.insert(at, (devfn, slot));
    }

    /// Finds the function at `devfn` of `bus`; this is bus `number`. Each port on the way must forward the access.
    fn find(&self, number: u8, bus: u8, devfn: u8) -> Option<Arc<dyn PciFunction>> {
        if bus == number {
            let at = self.slots.binary_search_by_key(&devfn, |(number, _)| *number).ok()?;
            return self.slots.get(at).map(|(_, slot)| match slot {
                Slot::Function(function) => Arc::clone(function),
                Slot::Port { port, .. } => Arc::clone(port) as Arc<dyn PciFunction>,
            });
        }
        self.slots.iter().find_map(|(_, slot)| match slot {
            Slot::Port { port, behind } if port.forwards_bus(bus) => match port.plugged() {
                Some((function, up)) => {
                    let here = up && bus == port.secondary_bus() && devfn == 0;
                    here.then_some(function as Arc<dyn PciFunction>)
                }
                None => behind.find(port.secondary_bus(), bus, devfn),
            },
            _ => None,
        })
    }

    /// Returns its bridges, and those behind them, to their state at the start.
    fn warm_reset(&self) {
        for (_, slot) in &self.slots {
            match slot {
                Slot::Function(function) => function.warm_reset(),
                Slot::Port { port, behind } => {
                    port.warm_reset();
                    behind.warm_reset();
                }
            }
        }
    }

    /// Calls `visit` with its functions, and those behind its bridges, each with its place: the numbers of the devices and
    /// functions on the way from `place`, which a guest cannot change.
    fn visit(&self, place: &str, visit: &mut dyn FnMut(String, &dyn PciFunction)) {
        for (devfn, slot) in &self.slots {
            let place = format!("{place}/{:02x}.{}", devfn >> 3, devfn & 7);
            match slot {
                Slot::Function(function) => visit(place, function.as_ref()),
                Slot::Port { port, behind } => {
                    visit(place.clone(), port.as_ref());
                    behind.visit(&place, visit);
                }
            }
        }
    }

    /// Collects what each function decodes by way of `ports`, and notifies the functions of that.
    fn collect<'a>(&'a self, ports: &mut Vec<&'a Port>, all: &mut Vec<Window>) {
        for (_, slot) in &self.slots {
            match slot {
                Slot::Function(function) => collect(function, ports, all),
                Slot::Port { port, behind } => {
                    collect(&(Arc::clone(port) as Arc<dyn PciFunction>), ports, all);
                    ports.push(port);
                    match port.plugged() {
                        Some((function, true)) => collect(&(function as Arc<dyn PciFunction>), ports, all),
                        Some((function, false)) => function.place(&[]),
                        None => {}
                    }
                    behind.collect(ports, all);
                    ports.pop();
                }
            }
        }
    }
}

/// The BAR that answers at a span of memory.
#[derive(Clone)]
struct Window {
    span: Span<Guest>,
    bar: u8,
    function: Arc<dyn PciFunction>,
}

/// The BAR that an access reaches, and the offset of the access in it.
struct Decoded {
    window: Window,
    offset: u64,
}

/// The bus of a host bridge.
pub(crate) struct RootBus {
    pub number: u8,
    /// What is on it.
    pub bus: Bus,
}

/// All PCI functions of a guest.
#[derive(Default)]
pub struct RootComplex {
    /// Buses of host bridges, bus 0 the first.
    roots: Vec<RootBus>,
    /// Taken while decoding is recomputed, so that two vCPUs do not interleave their moves.
    moving: Mutex<()>,
    /// Sorted by start. Where two overlap the lower start wins.
    decoded: RwLock<Vec<Window>>,
}

impl RootComplex {
    /// The root complex with `root` as its bus 0.
    pub fn new(root: Bus) -> Self {
        Self::with_expanders(root, Vec::new())
    }

    /// With the buses of further host bridges.
    pub(crate) fn with_expanders(root: Bus, expanders: Vec<RootBus>) -> Self {
        let roots = std::iter::once(RootBus { number: 0, bus: root }).chain(expanders).collect();
        let complex = Self { roots, ..Self::default() };
        complex.update();
        complex
    }

    /// Reads configuration space; a function that is not there, and an access that is not 1, 2 or 4 aligned bytes,
    /// read all ones.
    pub fn config_read(&self, bus: u8, devfn: u8, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        if is_config_access(offset, data.len())
            && let Some(function) = self.find(bus, devfn)
        {
            function.config_read(offset, data);
        }
    }

    pub(crate) fn config_write(&self, bus: u8, devfn: u8, offset: u16, data: &[u8]) {
        if is_config_access(offset, data.len())
            && let Some(function) = self.find(bus, devfn)
            && function.config_write(offset, data)
        {
            self.update();
        }
    }

    fn find(&self, bus: u8, devfn: u8) -> Option<Arc<dyn PciFunction>> {
        self.roots.iter().find_map(|root| root.bus.find(root.number, bus, devfn))
    }

    /// Returns bridges to their state at the machine's start, while no vCPU is in the guest and all other functions are
    /// reset.
    pub(crate) fn warm_reset(&self) {
        self.roots.iter().for_each(|root| root.bus.warm_reset());
        self.update();
    }

    fn visit(&self, mut visit: impl FnMut(String, &dyn PciFunction)) {
        for root in &self.roots {
            root.bus.visit(&format!("{:02x}", root.number), &mut visit);
        }
    }

    /// State of its bridges by their places.
    pub(crate) fn saved(&self) -> BTreeMap<String, BridgeState> {
        let mut all = BTreeMap::new();
        self.visit(|place, function| all.extend(function.saved().map(|saved| (place, saved))));
        all
    }

    /// Takes the state of the bridges of a root complex like this one. [`update`](Self::update) follows, when all functions
    /// have theirs.
    ///
    /// # Errors
    /// [`Mismatch`].
    pub(crate) fn restore(&self, saved: &BTreeMap<String, BridgeState>) -> Result<(), Mismatch> {
        let (mut count, mut result) = (0_usize, Ok(()));
        self.visit(|place, function| {
            if function.saved().is_none() || result.is_err() {
                return;
            }
            count = count.saturating_add(1);
            result = match saved.get(&place) {
                Some(saved) => {
                    function.restore(saved).map_err(|mismatch| mismatch.of(format!("bridge {place}")))
                }
                None => Err(Mismatch::new(format!("it has no bridge {place}"))),
            };
        });
        result?;
        ensure(saved.len() == count, || format!("{} bridges in place of {count}", saved.len()))
    }

    /// Recomputes which BAR answers where, and notifies the functions.
    pub fn update(&self) {
        let _moving = lock(&self.moving);
        let mut all: Vec<Window> = Vec::new();
        self.roots.iter().for_each(|root| root.bus.collect(&mut Vec::new(), &mut all));
        all.sort_by_key(|window| window.span);
        *self.decoded.write().unwrap_or_else(PoisonError::into_inner) = all;
    }

    /// Reads PCI memory; what no function decodes reads all ones.
    pub(crate) fn memory_read(&self, address: Gpa, data: &mut [u8]) {
        data.fill(0xff);
        if let Some(Decoded { window, offset }) = self.decode(address, data.len()) {
            window.function.bar_read(window.bar, offset, data);
        }
    }

    pub(crate) fn memory_write(&self, address: Gpa, data: &[u8]) {
        if let Some(Decoded { window, offset }) = self.decode(address, data.len()) {
            window.function.bar_write(window.bar, offset, data);
        }
    }

    /// The window is cloned so that no lock is held while the device works.
    fn decode(&self, address: Gpa, length: usize) -> Option<Decoded> {
        let access = Span::new(address, u64::try_from(length).ok()?).ok()?;
        let decoded = self.decoded.read().unwrap_or_else(PoisonError::into_inner);
        let window = decoded.iter().find(|window| window.span.covers(access))?;
        Some(Decoded { window: window.clone(), offset: address.offset_from(window.span.start())? })
    }
}

fn collect(function: &Arc<dyn PciFunction>, ports: &[&Port], all: &mut Vec<Window>) {
    let mut bars = function.decoded();
    bars.retain(|bar| ports.iter().all(|port| port.forwards(bar.span)));
    function.place(&bars);
    let window = |bar: DecodedBar| Window { span: bar.span, bar: bar.index, function: Arc::clone(function) };
    all.extend(bars.into_iter().map(window));
}

fn is_config_access(offset: u16, length: usize) -> bool {
    matches!(length, 1 | 2 | 4) && usize::from(offset).is_multiple_of(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::{COMMAND, HostBridge, PortConfig, PortKind};

    /// Decodes one page, always.
    struct Page(Span<Guest>);

    impl PciFunction for Page {
        fn config_read(&self, _offset: u16, data: &mut [u8]) {
            data.fill(0x5a);
        }
        fn config_write(&self, _offset: u16, _data: &[u8]) -> bool {
            false
        }
        fn decoded(&self) -> Vec<DecodedBar> {
            vec![DecodedBar::new(0, self.0)]
        }
        fn bar_read(&self, _bar: u8, _offset: u64, data: &mut [u8]) {
            data.fill(0x77);
        }
    }

    const AT: Gpa = Gpa::new(0x80_0010_0000);

    fn port(kind: PortKind, primary: u8, subordinate: u8) -> Arc<Port> {
        let window64 = Span::new(Gpa::new(0x80_0000_0000), 2 << 20).ok();
        let secondary = primary + 1;
        let config = PortConfig {
            kind,
            slot: 1,
            primary,
            secondary,
            subordinate,
            window32: None,
            window64,
            occupied: true,
            acs: None,
        };
        Arc::new(Port::new(&config))
    }

    /// 00:01.0 root port, 01:00.0 upstream port, 02:04.0 downstream port, 03:00.0 function.
    fn below_a_switch() -> RootComplex {
        let mut buses = [Bus::default(), Bus::default(), Bus::default(), Bus::default()];
        let [root, first, internal, slot] = &mut buses;
        slot.add(0, Arc::new(Page(Span::new(AT, 0x1000).unwrap())));
        internal.add_port(0x20, port(PortKind::Downstream, 2, 3), std::mem::take(slot));
        first.add_port(0, port(PortKind::Upstream, 1, 3), std::mem::take(internal));
        root.add(0, Arc::new(HostBridge::default()));
        root.add_port(8, port(PortKind::Root, 0, 3), std::mem::take(first));
        RootComplex::new(std::mem::take(root))
    }

    fn vendor(root: &RootComplex, bus: u8, devfn: u8) -> u16 {
        let mut data = [0; 2];
        root.config_read(bus, devfn, 0, &mut data);
        u16::from_le_bytes(data)
    }

    #[test]
    fn a_function_behind_a_switch_is_found_through_every_port_and_not_past_one_that_does_not_lead_there() {
        let root = below_a_switch();
        assert_eq!(
            [(1, 0), (2, 0x20), (3, 0)].map(|(bus, at)| vendor(&root, bus, at)),
            [0x104c, 0x104c, 0x5a5a]
        );
        assert_eq!(vendor(&root, 3, 8), 0xffff);
        root.config_write(1, 0, 0x1a, &[2]);
        assert_eq!((vendor(&root, 2, 0x20), vendor(&root, 3, 0)), (0x104c, 0xffff));
    }

    #[test]
    fn memory_behind_a_switch_is_reached_when_every_port_forwards_it() {
        let root = below_a_switch();
        let read = || {
            let mut data = [0];
            root.memory_read(AT, &mut data);
            data[0]
        };
        for (bus, devfn) in [(0, 8), (1, 0), (2, 0x20)] {
            assert_eq!(read(), 0xff, "not before {bus}:{devfn:#x} forwards");
            root.config_write(bus, devfn, COMMAND, &[2, 0]);
        }
        assert_eq!(read(), 0x77);
        root.config_write(1, 0, 0x24, &[0xf0, 0xff]);
        assert_eq!(read(), 0xff);
    }

    #[test]
    fn functions_of_an_expander_are_found_on_its_own_bus() {
        let (mut root, mut expander) = (Bus::default(), Bus::default());
        root.add(0, Arc::new(HostBridge::default()));
        expander.add(8, Arc::new(Page(Span::new(AT, 0x1000).unwrap())));
        let complex = RootComplex::with_expanders(root, vec![RootBus { number: 0x15, bus: expander }]);
        assert_eq!([vendor(&complex, 0x15, 8), vendor(&complex, 0, 8)], [0x5a5a, 0xffff]);
        let mut data = [0];
        complex.memory_read(AT, &mut data);
        assert_eq!(data, [0x77]);
    }
}
