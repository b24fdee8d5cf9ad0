//! The root complex: configuration accesses and memory accesses find their function.
//!
//! Both follow what the guest has programmed: a function behind a root port is reached through the port's current
//! bus numbers and windows, so a guest that rewrites them gets what hardware would give it.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use egm_address::{Gpa, Guest, Span};

use super::{PciFunction, RootPort};
use crate::lock::lock;

/// Something on bus 0.
enum Slot {
    Function(Arc<dyn PciFunction>),
    Port { port: Arc<RootPort>, behind: Vec<(u8, Arc<dyn PciFunction>)> },
}

/// What answers at a span of memory.
#[derive(Clone)]
struct Window {
    span: Span<Guest>,
    bar: u8,
    function: Arc<dyn PciFunction>,
}

/// All PCI functions of a guest.
#[derive(Default)]
pub struct RootComplex {
    /// By device and function number on bus 0, ascending.
    slots: Vec<(u8, Slot)>,
    /// Taken while decoding is recomputed, so that two vCPUs do not interleave their moves.
    moving: Mutex<()>,
    /// Sorted by start. Where two overlap the lower start wins.
    decoded: RwLock<Vec<Window>>,
}

impl RootComplex {
    /// Puts a function on the root bus.
    pub fn add(&mut self, devfn: u8, function: Arc<dyn PciFunction>) {
        self.insert(devfn, Slot::Function(function));
    }

    /// Puts a root port on the root bus, with what is behind it by device and function number.
    pub fn add_port(&mut self, devfn: u8, port: Arc<RootPort>, behind: Vec<(u8, Arc<dyn PciFunction>)>) {
        self.insert(devfn, Slot::Port { port, behind });
    }

    fn insert(&mut self, devfn: u8, slot: Slot) {
        let at = self.slots.partition_point(|(taken, _)| *taken < devfn);
        self.slots.insert(at, (devfn, slot));
    }

    fn find(&self, bus: u8, devfn: u8) -> Option<Arc<dyn PciFunction>> {
        if bus == 0 {
            let at = self.slots.binary_search_by_key(&devfn, |(number, _)| *number).ok()?;
            return self.slots.get(at).map(|(_, slot)| match slot {
                Slot::Function(function) => Arc::clone(function),
                Slot::Port { port, .. } => Arc::clone(port) as Arc<dyn PciFunction>,
            });
        }
        self.slots.iter().find_map(|(_, slot)| match slot {
            Slot::Port { port, behind } if port.secondary_bus() == bus => {
                behind.iter().find(|(number, _)| *number == devfn).map(|(_, function)| Arc::clone(function))
            }
            _ => None,
        })
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

    /// Writes configuration space.
    pub fn config_write(&self, bus: u8, devfn: u8, offset: u16, data: &[u8]) {
        if is_config_access(offset, data.len())
            && let Some(function) = self.find(bus, devfn)
            && function.config_write(offset, data)
        {
            self.update();
        }
    }

    /// Recomputes what answers where, and tells the functions.
    pub fn update(&self) {
        let _moving = lock(&self.moving);
        let mut all: Vec<Window> = Vec::new();
        for (_, slot) in &self.slots {
            match slot {
                Slot::Function(function) => collect(function, |_| true, &mut all),
                Slot::Port { port, behind } => {
                    let port_function = Arc::clone(port) as Arc<dyn PciFunction>;
                    collect(&port_function, |_| true, &mut all);
                    for (_, function) in behind {
                        collect(function, |span| port.forwards(span), &mut all);
                    }
                }
            }
        }
        all.sort_by_key(|window| window.span);
        *self.decoded.write().unwrap_or_else(PoisonError::into_inner) = all;
    }

    /// Reads PCI memory; what no function decodes reads all ones.
    pub fn memory_read(&self, address: Gpa, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((window, offset)) = self.decode(address, data.len()) {
            window.function.bar_read(window.bar, offset, data);
        }
    }

    /// Writes PCI memory.
    pub fn memory_write(&self, address: Gpa, data: &[u8]) {
        if let Some((window, offset)) = self.decode(address, data.len()) {
            window.function.bar_write(window.bar, offset, data);
        }
    }

    /// The window is cloned so that no lock is held while the device works.
    fn decode(&self, address: Gpa, length: usize) -> Option<(Window, u64)> {
        let access = Span::new(address, u64::try_from(length).ok()?).ok()?;
        let decoded = self.decoded.read().unwrap_or_else(PoisonError::into_inner);
        let window = decoded.iter().find(|window| window.span.covers(access))?;
        Some((window.clone(), address.offset_from(window.span.start())?))
    }
}

fn collect(function: &Arc<dyn PciFunction>, reaches: impl Fn(Span<Guest>) -> bool, all: &mut Vec<Window>) {
    let mut bars = function.decoded();
    bars.retain(|(_, span)| reaches(*span));
    function.place(&bars);
    all.extend(bars.into_iter().map(|(bar, span)| Window { span, bar, function: Arc::clone(function) }));
}

fn is_config_access(offset: u16, length: usize) -> bool {
    matches!(length, 1 | 2 | 4) && usize::from(offset).is_multiple_of(length)
}
