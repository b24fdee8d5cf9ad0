//! How KVM numbers interrupts.

use std::ops::Range;

use kvm_bindings::{KVM_IRQCHIP_IOAPIC, kvm_irq_routing_irqchip};

/// Lines: the pins of the I/O APIC. Message interrupts have the numbers above.
pub const LINES: Range<u32> = 0..24;
/// Whether KVM needs the sender of a message.
pub const NEEDS_SENDER: bool = false;

/// Where line `gsi` ends.
pub const fn pin(gsi: u32) -> kvm_irq_routing_irqchip {
    kvm_irq_routing_irqchip { irqchip: KVM_IRQCHIP_IOAPIC, pin: gsi }
}

/// Line `gsi` as `KVM_IRQ_LINE` has it.
pub const fn wire(gsi: u32) -> u32 {
    gsi
}
