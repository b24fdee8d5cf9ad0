//! Message interrupts: the kernel's table from interrupt number to message, and the eventfds that use it.

use std::io;
use std::sync::{Arc, Mutex};

use egm_address::PciAddress;
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_MSI_VALID_DEVID, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_msi,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::KvmError;
use crate::arch::native::interrupts::{LINES, NEEDS_SENDER, pin};
use crate::lock::lock;
use crate::pci::msix::{MsiMessage, MsiRouter};

/// Number of the first message interrupt: those below are lines.
const FIRST: u32 = LINES.end;
/// Numbers of the kernel's table (KVM_MAX_IRQ_ROUTES).
const MAX_ROUTES: usize = 4096;

/// A message and its sender: an ITS has a table for each sender.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Sent {
    message: MsiMessage,
    /// As on the bus: bus, device and function number.
    sender: u16,
}

/// A message interrupt that a vector uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Number of the interrupt.
    pub gsi: u32,
    /// Function that sends it: bus, device and function number as on the bus.
    pub sender: u16,
    /// Address that the function writes to.
    pub address: u64,
    /// Number that it writes there.
    pub data: u32,
}

/// The routes of one machine. The kernel takes the whole table at once, so this keeps a copy.
pub struct Routes {
    fd: Arc<VmFd>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// Message of interrupt `FIRST + index`.
    messages: Vec<Sent>,
    /// Indexes of the messages that no vector uses.
    free: Vec<usize>,
}

impl Routes {
    /// A table with the lines only, numbered as in the plan.
    pub(super) fn new(fd: Arc<VmFd>) -> Result<Arc<Self>, KvmError> {
        let routes = Self { fd, table: Mutex::default() };
        if !LINES.contains(&0) {
            // The kernel's own table begins with 0 on every architecture.
            let refused = |error: io::Error| kvm_ioctls::Error::new(error.raw_os_error().unwrap_or(0));
            routes.upload(&[]).map_err(|e| KvmError::call("KVM_SET_GSI_ROUTING", refused(e)))?;
        }
        Ok(Arc::new(routes))
    }

    /// Routes of the messages that `function` sends.
    pub fn of(self: &Arc<Self>, function: PciAddress) -> Arc<dyn MsiRouter> {
        let sender = u16::from_be_bytes([function.bus(), function.devfn()]);
        Arc::new(FunctionRoutes { routes: Arc::clone(self), sender })
    }

    /// The messages that vectors use.
    pub fn messages(&self) -> Vec<Message> {
        lock(&self.table).messages()
    }

    fn upload(&self, messages: &[Sent]) -> io::Result<()> {
        let lines = LINES.map(line_entry);
        let entries: Vec<_> =
            lines.chain((FIRST..).zip(messages).map(|(gsi, m)| message_entry(gsi, *m))).collect();
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        self.fd.set_gsi_routing(&table).map_err(super::into_io)
    }
}

impl Table {
    fn messages(&self) -> Vec<Message> {
        let used = self.messages.iter().enumerate().filter(|(index, _)| !self.free.contains(index));
        let message = |(index, Sent { message, sender }): (usize, &Sent)| Message {
            gsi: u32::try_from(index).unwrap_or(u32::MAX).saturating_add(FIRST),
            sender: *sender,
            address: message.address,
            data: message.data,
        };
        used.map(message).collect()
    }
}

/// The routes of one function's messages.
pub(crate) struct FunctionRoutes {
    routes: Arc<Routes>,
    sender: u16,
}

impl MsiRouter for FunctionRoutes {
    fn connect(&self, slot: &mut Option<u32>, message: MsiMessage, trigger: &EventFd) -> io::Result<()> {
        self.routes.connect(slot, Sent { message, sender: self.sender }, trigger)
    }

    fn disconnect(&self, slot: u32, trigger: &EventFd) {
        // Fails only for a pair that is not connected.
        let _ = self.routes.fd.unregister_irqfd(trigger, slot);
    }

    fn release(&self, slot: u32) {
        lock(&self.routes.table).free.extend(index_of(slot));
    }
}

impl Routes {
    fn connect(&self, slot: &mut Option<u32>, message: Sent, trigger: &EventFd) -> io::Result<()> {
        let mut table = lock(&self.table);
        let Table { messages, free } = &mut *table;
        let index = slot.and_then(index_of).or_else(|| free.last().copied()).unwrap_or(messages.len());
        let gsi = u32::try_from(index).ok().and_then(|index| index.checked_add(FIRST));
        let gsi = gsi
            .filter(|_| index < MAX_ROUTES)
            .ok_or_else(|| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        match messages.get_mut(index) {
            Some(old) if *old == message => {}
            Some(old) => {
                // The copy must not keep a message that was not uploaded: the next connection would find nothing to
                // upload, and its interrupts would follow the old message.
                let before = std::mem::replace(old, message);
                if let Err(error) = self.upload(messages) {
                    if let Some(old) = messages.get_mut(index) {
                        *old = before;
                    }
                    return Err(error);
                }
            }
            None => {
                messages.push(message);
                self.upload(messages).inspect_err(|_| messages.truncate(index))?;
            }
        }
        free.retain(|other| *other != index);
        *slot = Some(gsi);
        self.fd.register_irqfd(trigger, gsi).map_err(super::into_io)
    }
}

fn index_of(gsi: u32) -> Option<usize> {
    usize::try_from(gsi.checked_sub(FIRST)?).ok()
}

fn line_entry(gsi: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip = pin(gsi);
    entry
}

fn message_entry(gsi: u32, Sent { message, sender }: Sent) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    let [low, high] = [message.address & 0xffff_ffff, message.address >> 32].map(|half| {
        // The mask and the shift leave 32 bits.
        u32::try_from(half).unwrap_or(u32::MAX)
    });
    entry.u.msi =
        kvm_irq_routing_msi { address_lo: low, address_hi: high, data: message.data, ..Default::default() };
    if NEEDS_SENDER {
        entry.flags = KVM_MSI_VALID_DEVID;
        entry.u.msi.__bindgen_anon_1.devid = sender.into();
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_no_vector_uses_is_not_shown() {
        let sent = |data| Sent { message: MsiMessage { address: 0xfee0_0000, data }, sender: 0x18 };
        let table = Table { messages: [1, 2, 3].map(sent).to_vec(), free: vec![1] };
        let shown: Vec<_> =
            table.messages().iter().map(|message| (message.gsi - FIRST, message.data)).collect();
        assert_eq!(shown, [(0, 1), (2, 3)]);
    }
}
