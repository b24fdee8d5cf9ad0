//! How KVM numbers interrupts.

use std::ops::Range;

use kvm_bindings::{KVM_ARM_IRQ_TYPE_SHIFT, KVM_ARM_IRQ_TYPE_SPI, kvm_irq_routing_irqchip};

use super::layout::{FIRST_SHARED, SHARED_INTERRUPTS};

/// Lines: the shared interrupts, by the number that the GIC gives them. Message interrupts have the numbers above.
pub const LINES: Range<u32> = FIRST_SHARED..FIRST_SHARED + SHARED_INTERRUPTS;
/// Whether KVM needs the sender of a message: the ITS has a table for each.
pub const NEEDS_SENDER: bool = true;

/// Where line `gsi` ends: the kernel counts shared interrupts from 0.
pub const fn pin(gsi: u32) -> kvm_irq_routing_irqchip {
    kvm_irq_routing_irqchip { irqchip: 0, pin: gsi.saturating_sub(FIRST_SHARED) }
}

/// Line `gsi` as `KVM_IRQ_LINE` has it (KVM api.rst 4.25).
pub const fn wire(gsi: u32) -> u32 {
    KVM_ARM_IRQ_TYPE_SPI << KVM_ARM_IRQ_TYPE_SHIFT | gsi
}
