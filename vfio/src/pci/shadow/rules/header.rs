//! The first 64 bytes (PCI Express Base 6.0 §7.5.1), without what the options decide: base address registers, ROM, pin.

use super::{Masks, Register, zero};
use crate::pci::registers::{COMMAND, COMMAND_BUS_MASTER, COMMAND_INTX_DISABLE, COMMAND_MEMORY, STATUS};

const IDS: &str = "a driver finds its device by them";
const PCI_ONLY: &str = "without a meaning in PCI Express";

pub(in super::super) static HEADER: &[Register] = &[
    Register::constant(0x00, 4, "vendor and device id", IDS),
    Register {
        masks: Masks { live: 0, store: COMMAND_KEPT, forward: COMMAND_BUS_MASTER as u32 },
        value: zero,
        // The function decodes as long as it is ours, so that nothing that is mapped goes away under a vCPU.
        fill: |device| device & !COMMAND_PORTS | COMMAND_MEMORY as u32,
        ..Register::constant(
            COMMAND,
            2,
            "command",
            "bus mastering is the device's; decoding and INTx are the machine's mappings and lines; parity and SERR \
             reporting stay as the host set them",
        )
    },
    Register {
        masks: Masks { live: 0xffef, store: 0, forward: 0 },
        value: zero,
        ..Register::constant(
            STATUS,
            2,
            "status",
            "the device's, errors are the host's to clear; whether there are capabilities is ours",
        )
    },
    Register::constant(0x08, 4, "revision and class", IDS),
    Register::kept(0x0c, 1, "cache line size", 0xff, PCI_ONLY),
    Register::zero(0x0d, 1, "latency timer", PCI_ONLY),
    Register::zero(
        0x0e,
        1,
        "header type",
        "an endpoint, alone: the host's other functions there are not the guest's",
    ),
    Register::zero(0x0f, 1, "built-in self test", "it would take the device away for seconds"),
    Register::zero(0x28, 4, "CardBus pointer", PCI_ONLY),
    Register::constant(0x2c, 4, "subsystem ids", IDS),
    Register {
        value: zero,
        ..Register::kept(
            0x3c,
            1,
            "interrupt line",
            0xff,
            "a note of the firmware to the driver; the host's means nothing to a guest",
        )
    },
    Register::zero(0x3e, 2, "minimum grant, maximum latency", PCI_ONLY),
];

const COMMAND_PORTS: u32 = 1;
const COMMAND_PARITY: u32 = 1 << 6;
const COMMAND_SERR: u32 = 1 << 8;
const COMMAND_KEPT: u32 = COMMAND_MEMORY as u32
    | COMMAND_BUS_MASTER as u32
    | COMMAND_PARITY
    | COMMAND_SERR
    | COMMAND_INTX_DISABLE as u32;
