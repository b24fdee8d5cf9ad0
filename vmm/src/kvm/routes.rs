//! Message interrupts: the kernel's table from interrupt number to message, and the eventfds that use it.

use std::io;
use std::sync::{Arc, Mutex};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_irqchip, kvm_irq_routing_msi,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use crate::lock::lock;
use crate::pci::msix::{MsiMessage, MsiRouter};

/// Pins of the I/O APIC; message interrupts have the numbers above.
const LINES: u32 = 24;
/// Numbers of the kernel's table (KVM_MAX_IRQ_ROUTES).
const MAX_ROUTES: usize = 4096;

/// The routes of one machine. The kernel takes the whole table at once, so this keeps a copy.
pub struct Routes {
    fd: Arc<VmFd>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// Message of interrupt `LINES + index`.
    messages: Vec<MsiMessage>,
    /// Of them, those that nobody has.
    free: Vec<usize>,
}

impl Routes {
    pub(super) fn new(fd: Arc<VmFd>) -> Self {
        Self { fd, table: Mutex::default() }
    }

    fn upload(&self, messages: &[MsiMessage]) -> io::Result<()> {
        let lines = (0..LINES).map(line_entry);
        let entries: Vec<_> =
            lines.chain((LINES..).zip(messages).map(|(gsi, m)| message_entry(gsi, *m))).collect();
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        self.fd.set_gsi_routing(&table).map_err(super::into_io)
    }
}

impl MsiRouter for Routes {
    fn connect(&self, slot: &mut Option<u32>, message: MsiMessage, trigger: &EventFd) -> io::Result<()> {
        let mut table = lock(&self.table);
        let Table { messages, free } = &mut *table;
        let index = slot.and_then(index_of).or_else(|| free.last().copied()).unwrap_or(messages.len());
        let gsi = u32::try_from(index).ok().and_then(|index| index.checked_add(LINES));
        let gsi = gsi
            .filter(|_| index < MAX_ROUTES)
            .ok_or_else(|| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        match messages.get_mut(index) {
            Some(old) if *old == message => {}
            Some(old) => {
                // What was not uploaded must not be remembered: the next connection would find nothing to upload,
                // and its interrupts would go where the old message says.
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

    fn disconnect(&self, slot: u32, trigger: &EventFd) {
        // Fails only for a pair that is not connected.
        let _ = self.fd.unregister_irqfd(trigger, slot);
    }

    fn release(&self, slot: u32) {
        lock(&self.table).free.extend(index_of(slot));
    }
}

fn index_of(gsi: u32) -> Option<usize> {
    usize::try_from(gsi.checked_sub(LINES)?).ok()
}

fn line_entry(gsi: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip = kvm_irq_routing_irqchip { irqchip: KVM_IRQCHIP_IOAPIC, pin: gsi };
    entry
}

fn message_entry(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    let [low, high] = [message.address & 0xffff_ffff, message.address >> 32].map(|half| {
        // The mask and the shift leave 32 bits.
        u32::try_from(half).unwrap_or(u32::MAX)
    });
    entry.u.msi =
        kvm_irq_routing_msi { address_lo: low, address_hi: high, data: message.data, ..Default::default() };
    entry
}
