//! The hot-plug part of a port: its slot with the function in it, and its interrupt.

use std::io;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use super::express::{self, SLOT_CONTROL};
use super::slot::{Change, Duty, Effects, Slot};
use super::{Port, PortConfig, Registers};
use crate::lock::lock;
use crate::pci::msix::{MsiMessage, MsiRouter, Msix};
use crate::pci::saved::SlotState;
use crate::pci::{COMMAND, COMMAND_BUS_MASTER, ConfigSpace, PciFunction};
use crate::snapshot::{Mismatch, ensure};

const CAPABILITY_MSI: u8 = 0x05;
/// Message Control: a 64-bit address, one vector (§7.7.1.2).
const MSI_64_BIT: u16 = 1 << 7;
const MSI_ENABLE: u16 = 1;

/// A function that can be inserted and removed while the guest runs.
pub trait Plugged: PciFunction {
    /// Resets it to the state after power-on: quiet, BARs nowhere. `together` are the [`Plugged::name`]s of all that are
    /// reset at the same time. The guest does not reach it meanwhile.
    fn reset(&self, together: &[&str]);

    /// Quiesces, unmaps and resets the function, which has left the guest for good. Its resources are freed when the
    /// last reference is dropped.
    fn end(&self);

    /// Name, for messages and to distinguish it from other functions.
    fn name(&self) -> &str;

    /// Whether the device behind it is gone, as far as is known.
    fn is_lost(&self) -> bool {
        false
    }

    /// Whether it is gone, after a look at the device.
    fn look_if_lost(&self) -> bool {
        self.is_lost()
    }

    /// Marks the device as gone without notice to the guest, which finds nothing where the device was.
    fn lose(&self) {}

    /// Sets the callback for loss of the device, called once, from any thread. Only the first callback is kept.
    fn on_lost(&self, _tell: Box<dyn Fn() + Send + Sync>) {}

    /// Counted failures, for the operator.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// The part of a hot-plug port that other ports do not have.
pub(super) struct Hot {
    /// Offset of its MSI capability in configuration space.
    msi: u16,
    interrupt: Msix,
    function: RwLock<Option<Arc<dyn Plugged>>>,
    /// Called when there is a duty.
    controller: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Hot {
    pub(super) fn new(
        config: &mut ConfigSpace,
        function: Option<Arc<dyn Plugged>>,
        router: Arc<dyn MsiRouter>,
    ) -> io::Result<Self> {
        let msi = add_msi(config);
        let interrupt = Msix::new(1, router)?;
        Ok(Self { msi, interrupt, function: RwLock::new(function), controller: OnceLock::new() })
    }

    /// The message that the guest has programmed.
    fn program(&self, config: &ConfigSpace) {
        let at = |offset: u16| self.msi.saturating_add(offset);
        let address = u64::from(config.u32(at(4))) | u64::from(config.u32(at(8))) << 32;
        let message = MsiMessage { address, data: config.u16(at(12)).into() };
        let enabled = config.u16(at(2)) & MSI_ENABLE != 0 && config.u16(COMMAND) & COMMAND_BUS_MASTER != 0;
        self.interrupt.program(0, message, false);
        self.interrupt.set_control(enabled, false);
    }

    fn plugged(&self) -> Option<Arc<dyn Plugged>> {
        self.function.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, function: Option<Arc<dyn Plugged>>) -> Option<Arc<dyn Plugged>> {
        std::mem::replace(&mut *self.function.write().unwrap_or_else(PoisonError::into_inner), function)
    }
}

/// Adds the MSI capability to `config`; returns its offset.
fn add_msi(config: &mut ConfigSpace) -> u16 {
    let mut body = [0; 12];
    let [low, high] = MSI_64_BIT.to_le_bytes();
    (body[0], body[1]) = (low, high);
    let msi = config.add_capability(CAPABILITY_MSI, &body).unwrap_or_default(); // the second capability: it fits
    config.allow(msi.saturating_add(2), &MSI_ENABLE.to_le_bytes());
    config.allow(msi.saturating_add(4), &[0xfc, 0xff, 0xff, 0xff]);
    config.allow(msi.saturating_add(8), &[0xff; 6]);
    msi
}

impl Port {
    /// A hot-plug port with `function` in its slot. Interrupts go by way of `router`.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn hot(
        port: &PortConfig,
        function: Option<Arc<dyn Plugged>>,
        router: Arc<dyn MsiRouter>,
    ) -> io::Result<Self> {
        let occupied = function.is_some();
        let mut made = Self::with(&PortConfig { occupied, ..*port }, Some(Slot::new(occupied)));
        let registers = made.registers.get_mut().unwrap_or_else(PoisonError::into_inner);
        made.hot = Some(Hot::new(&mut registers.config, function, router)?);
        Ok(made)
    }

    /// The registers of a hot-plug port after a reset: a function in its slot has power. Its message is masked.
    pub(super) fn initial_hot_registers(&self) -> Option<Registers> {
        let hot = self.hot.as_ref()?;
        hot.interrupt.reset();
        let occupied = hot.plugged().is_some();
        let port = PortConfig { occupied, ..self.start };
        let mut registers = Registers::new(&port, Some(Slot::new(occupied)));
        add_msi(&mut registers.config);
        Some(registers)
    }

    /// State of the slot, of a hot-plug port.
    pub(super) fn saved_slot(&self, registers: &Registers) -> Option<SlotState> {
        let (hot, slot) = (self.hot.as_ref()?, registers.slot.as_ref()?);
        Some(SlotState { pending: hot.interrupt.is_waiting(0), ..slot.saved() })
    }

    /// Takes the state of an empty slot like it, after that of configuration space.
    ///
    /// # Errors
    /// [`Mismatch`].
    pub(super) fn restore_slot(
        &self,
        registers: &mut Registers,
        saved: Option<&SlotState>,
    ) -> Result<(), Mismatch> {
        ensure(saved.is_some() == self.hot.is_some(), || "only one of them has a hot-plug slot".to_owned())?;
        let (Some(saved), Some(hot)) = (saved, &self.hot) else { return Ok(()) };
        let slot = Slot::restored(saved, hot.plugged().is_some())?;
        express::show(&mut registers.config, registers.express, &slot);
        registers.slot = Some(slot);
        if saved.pending {
            hot.interrupt.signal(0);
        }
        hot.program(&registers.config);
        Ok(())
    }

    /// Sets the callback for a new [`Port::duty`], called from any thread. Only the first callback is kept.
    pub(crate) fn on_duty(&self, controller: impl Fn() + Send + Sync + 'static) {
        if let Some(hot) = &self.hot {
            let _ = hot.controller.set(Box::new(controller));
        }
    }

    /// The function in the slot, and whether it answers.
    pub(crate) fn plugged(&self) -> Option<(Arc<dyn Plugged>, bool)> {
        let function = self.hot.as_ref()?.plugged()?;
        let up = lock(&self.registers).slot.as_ref().is_some_and(Slot::is_up);
        Some((function, up))
    }

    /// The pending duty for the function in the slot.
    pub(crate) fn duty(&self) -> Option<Duty> {
        lock(&self.registers).slot.as_ref().and_then(Slot::duty)
    }

    /// Presses the attention button: requests the function back from the guest.
    pub fn press(&self) {
        self.slot_changes(Change::Press);
    }

    /// Puts `function` into the slot, just reset; false when something is in it.
    pub fn insert(&self, function: Arc<dyn Plugged>) -> bool {
        let Some(hot) = self.hot.as_ref().filter(|hot| hot.plugged().is_none()) else { return false };
        hot.replace(Some(function));
        self.slot_changes(Change::Insert);
        true
    }

    /// Removes the function from the slot, with or without the guest's consent.
    pub fn pull(&self) -> Option<Arc<dyn Plugged>> {
        self.slot_changes(Change::Pull);
        self.hot.as_ref()?.replace(None)
    }

    /// Reports that the function was reset for the `Duty::Reset` with this number.
    pub fn fresh(&self, times: u32) {
        self.slot_changes(Change::Fresh(times));
    }

    /// Begins or ends a secondary bus reset for what is behind this port.
    pub(super) fn hold(&self, begins: bool) {
        self.slot_changes(if begins { Change::Hold } else { Change::Release });
        self.below.iter().for_each(|port| port.hold(begins));
    }

    fn slot_changes(&self, change: Change) {
        if let Some(hot) = &self.hot {
            let mut registers = lock(&self.registers);
            let effects = registers.change(change);
            drop(registers);
            hot.follow(effects);
        }
    }

    /// Applies a finished write of configuration space to slot and interrupt; returns whether the link changed.
    pub(super) fn hot_write(&self, registers: &mut Registers, offset: u16, data: &[u8]) -> bool {
        let Some(hot) = &self.hot else { return false };
        hot.program(&registers.config);
        let at = registers.express.saturating_add(SLOT_CONTROL);
        let slot = registers.slot.as_ref().map_or(0, Slot::control);
        let inside = i32::from(offset).saturating_sub(at.into());
        let Some(write) = SlotWrite::of(inside, data, slot) else { return false };
        let cleared = registers.change(Change::Clear(write.status));
        let commanded = write.control.map(|control| registers.change(Change::Control(control)));
        let commanded = commanded.unwrap_or_default();
        hot.follow(Effects {
            interrupt: cleared.interrupt || commanded.interrupt,
            link: commanded.link,
            duty: commanded.duty,
        });
        commanded.link
    }
}

impl Hot {
    fn follow(&self, effects: Effects) {
        if effects.interrupt {
            self.interrupt.signal(0);
        }
        if let (true, Some(controller)) = (effects.duty, self.controller.get()) {
            controller();
        }
    }
}

impl Registers {
    fn change(&mut self, change: Change) -> Effects {
        let Some(slot) = &mut self.slot else { return Effects::default() };
        let effects = slot.change(change);
        express::show(&mut self.config, self.express, slot);
        effects
    }
}

/// A write that touches Slot Control, Slot Status or both.
#[derive(Debug, PartialEq, Eq)]
struct SlotWrite {
    /// The new value; bytes that were not written keep theirs.
    control: Option<u16>,
    /// Ones that were written.
    status: u16,
}

impl SlotWrite {
    /// `data` written at `inside`, counted from Slot Control, which is `control`.
    fn of(inside: i32, data: &[u8], control: u16) -> Option<Self> {
        let mut bytes = control.to_le_bytes().map(Some).to_vec();
        bytes.resize(4, None);
        let (mut commands, mut touched) = (false, false);
        for (at, byte) in (inside..).zip(data) {
            if let Some(place) = usize::try_from(at).ok().and_then(|at| bytes.get_mut(at)) {
                *place = Some(*byte);
                (commands, touched) = (commands || at < 2, true);
            }
        }
        let half = |at: usize| {
            let byte = |at: usize| bytes.get(at).copied().flatten().unwrap_or(0);
            u16::from_le_bytes([byte(at), byte(at.saturating_add(1))])
        };
        touched.then(|| Self { control: commands.then(|| half(0)), status: half(2) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::pci::PortKind;

    #[test]
    fn a_write_to_half_of_the_slot_registers_leaves_the_other_half() {
        let of = |inside, data: &[u8]| SlotWrite::of(inside, data, 0x1234);
        assert_eq!(of(0, &[0xff, 0x00]), Some(SlotWrite { control: Some(0xff), status: 0 }));
        assert_eq!(of(1, &[0x56]), Some(SlotWrite { control: Some(0x5634), status: 0 }));
        assert_eq!(of(2, &[0x10, 0x01]), Some(SlotWrite { control: None, status: 0x110 }));
        assert_eq!(of(0, &[1, 2, 3, 4]), Some(SlotWrite { control: Some(0x201), status: 0x403 }));
        assert_eq!(of(4, &[1]), None);
        assert_eq!(of(-2, &[1, 2]), None, "the register before it");
    }

    #[derive(Default)]
    struct Router(Mutex<Vec<MsiMessage>>);

    impl MsiRouter for Router {
        fn connect(&self, _slot: &mut Option<u32>, message: MsiMessage, trigger: &EventFd) -> io::Result<()> {
            if trigger.read().is_ok() {
                self.0.lock().unwrap().push(message);
            }
            Ok(())
        }
        fn disconnect(&self, _slot: u32, _trigger: &EventFd) {}
    }

    struct Card;

    impl PciFunction for Card {
        fn config_read(&self, _offset: u16, data: &mut [u8]) {
            data.fill(0x5a);
        }
        fn config_write(&self, _offset: u16, _data: &[u8]) -> bool {
            false
        }
    }

    impl Plugged for Card {
        fn reset(&self, _together: &[&str]) {}
        fn end(&self) {}
        fn name(&self) -> &'static str {
            "card"
        }
    }

    fn port(function: Option<Arc<dyn Plugged>>, router: &Arc<Router>) -> Port {
        let config = PortConfig {
            kind: PortKind::Root,
            slot: 1,
            primary: 0,
            secondary: 1,
            subordinate: 1,
            window32: None,
            window64: None,
            occupied: false,
            acs: None,
        };
        Port::hot(&config, function, Arc::clone(router) as _).unwrap()
    }

    fn u16_at(port: &Port, offset: u16) -> u16 {
        let mut data = [0; 2];
        port.config_read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    const EXPRESS: u16 = 0x40;
    const MSI: u16 = 0x7c;
    const CONTROL: u16 = EXPRESS + 0x18;
    const STATUS: u16 = EXPRESS + 0x1a;
    const LINK: u16 = EXPRESS + 0x12;

    #[test]
    fn the_ports_message_reports_a_function_that_came() {
        let router = Arc::new(Router::default());
        let port = port(None, &router);
        assert_eq!((u16_at(&port, MSI) & 0xff, u16_at(&port, STATUS)), (5, 0));
        assert!(port.insert(Arc::new(Card)) && !port.insert(Arc::new(Card)));
        let _ = port.config_write(MSI + 4, &0xfee0_0000_u32.to_le_bytes());
        let _ = port.config_write(MSI + 12, &[0x31, 0]);
        let _ = port.config_write(MSI + 2, &[1, 0]);
        let _ = port.config_write(CONTROL, &0x1728_u16.to_le_bytes());
        assert!(router.0.lock().unwrap().is_empty(), "a port that is no bus master sends nothing");
        let _ = port.config_write(COMMAND, &4_u16.to_le_bytes());
        assert_eq!(*router.0.lock().unwrap(), [MsiMessage { address: 0xfee0_0000, data: 0x31 }]);
    }

    #[test]
    fn power_and_the_reset_bit_decide_whether_what_is_in_the_slot_answers() {
        let port = port(Some(Arc::new(Card)), &Arc::new(Router::default()));
        let up = |port: &Port| (port.plugged().unwrap().1, u16_at(port, LINK) & 1 << 13 != 0);
        assert_eq!(up(&port), (true, true));
        assert!(port.config_write(CONTROL, &0x700_u16.to_le_bytes()));
        assert_eq!(up(&port), (false, false));
        assert!(!port.config_write(CONTROL, &0x100_u16.to_le_bytes()), "not before it is reset");
        let Some(Duty::Reset(times)) = port.duty() else { panic!() };
        port.fresh(times);
        assert_eq!(up(&port), (true, true));
        assert!(port.config_write(0x3e, &[0x40]));
        assert!(!up(&port).0);
        assert!(port.config_write(0x3e, &[0]));
        let Some(Duty::Reset(times)) = port.duty() else { panic!() };
        port.fresh(times);
        assert!(up(&port).0);
    }

    #[test]
    fn a_warm_reset_restores_the_registers_and_gives_power_to_what_is_in_the_slot() {
        let router = Arc::new(Router::default());
        let (full, empty) = (port(Some(Arc::new(Card)), &router), port(None, &router));
        let image = |port: &Port| -> Vec<u8> {
            let mut image = vec![0; 256];
            port.config_read(0, &mut image);
            image
        };
        for (port, occupied) in [(&full, true), (&empty, false)] {
            let start = image(port);
            for (at, data) in
                [(COMMAND, 7_u16), (0x18, 0x0505), (0x3e, 0x40), (MSI + 2, 1), (CONTROL, 0x1731)]
            {
                let _ = port.config_write(at, &data.to_le_bytes());
            }
            assert_ne!(image(port), start);
            port.warm_reset();
            assert_eq!((image(port), port.duty()), (start, None));
            assert_eq!(port.plugged().map(|(_, up)| up), occupied.then_some(true));
        }
        empty.insert(Arc::new(Card));
        empty.warm_reset();
        assert_eq!(image(&empty), image(&full), "what came while the guest ran is there at its next start");
    }

    #[test]
    fn a_bus_reset_of_the_port_above_reaches_every_port_below() {
        let below = Arc::new(port(Some(Arc::new(Card)), &Arc::new(Router::default())));
        let above = Port::new(&PortConfig {
            kind: PortKind::Upstream,
            slot: 0,
            primary: 0,
            secondary: 1,
            subordinate: 2,
            window32: None,
            window64: None,
            occupied: true,
            acs: None,
        })
        .above(vec![Arc::clone(&below)]);
        assert!(above.config_write(0x3e, &[0x40]));
        let Some(Duty::Reset(times)) = below.duty() else { panic!() };
        assert!(above.config_write(0x3e, &[0x40]));
        assert_eq!(below.duty(), Some(Duty::Reset(times)), "set already: no second reset");
        assert!(above.config_write(0x3e, &[0]));
        below.fresh(times);
        assert!(below.plugged().unwrap().1);
    }
}
