//! Capabilities of the list at 0x34.

use super::{Masks, Register, Registers, Rule, Treatment, zero};
use crate::pci::capability::CapabilityId;
use crate::pci::registers::id;

const fn plain(id: u8, name: &'static str, treatment: Treatment, reason: &'static str) -> Rule {
    Rule { id: CapabilityId::Standard(id), name, treatment, registers: Registers::At(&[]), reason }
}

const fn emulated(id: u8, name: &'static str, registers: Registers, reason: &'static str) -> Rule {
    Rule { registers, ..plain(id, name, Treatment::Emulated, reason) }
}

use Treatment::{Hidden, PassThrough};

const OLD_BUS: &str = "of a bus that the guest's function is not on";

pub(super) static STANDARD: &[Rule] = &[
    plain(0x00, "null", Hidden, "it has no content"),
    emulated(id::POWER, "power management", Registers::At(POWER), "the host decides when the device sleeps"),
    plain(0x02, "AGP", Hidden, OLD_BUS),
    emulated(
        id::VPD,
        "vital product data",
        Registers::At(VPD),
        "drivers read it, mlx5 finds its Data Direct function by it; a write would outlive the guest",
    ),
    plain(0x04, "slot identification", Hidden, OLD_BUS),
    emulated(
        id::MSI,
        "MSI",
        Registers::Msi,
        "the host's kernel programs the real one; the guest's messages are the machine's",
    ),
    plain(0x06, "CompactPCI hot swap", Hidden, OLD_BUS),
    plain(0x07, "PCI-X", Hidden, OLD_BUS),
    plain(0x08, "HyperTransport", Hidden, OLD_BUS),
    Rule {
        registers: Registers::At(VENDOR),
        ..plain(
            id::VENDOR,
            "vendor-specific",
            PassThrough,
            "drivers need it: on ConnectX it is the door to the firmware",
        )
    },
    plain(0x0a, "debug port", Hidden, "it points into a BAR for the host's own debugger"),
    plain(0x0b, "CompactPCI resource control", Hidden, OLD_BUS),
    plain(0x0c, "hot-plug", Hidden, "slots are the machine's"),
    plain(0x0d, "bridge subsystem ids", Hidden, "of a bridge"),
    plain(0x0e, "AGP 8x", Hidden, OLD_BUS),
    plain(0x0f, "secure device", Hidden, "it could lock the device against its next user"),
    emulated(
        id::EXPRESS,
        "PCI Express",
        Registers::At(EXPRESS),
        "what both ends of the real link must agree on is the host's",
    ),
    emulated(
        id::MSIX,
        "MSI-X",
        Registers::At(MSIX),
        "as MSI; table and pending bits are trapped in their BAR",
    ),
    plain(0x12, "SATA data and index", PassThrough, "the driver's own registers"),
    emulated(
        id::ADVANCED,
        "advanced features",
        Registers::At(ADVANCED),
        "a function-level reset goes through the host",
    ),
    plain(0x14, "enhanced allocation", Hidden, "it names host addresses that the guest does not have"),
    plain(0x15, "flattening portal bridge", Hidden, "of a bridge"),
];

static POWER: &[Register] = &[
    Register {
        value: |device| device & 0x0027,
        ..Register::constant(0x02, 2, "capabilities", "no wake-up and no D1 or D2: they are not carried out")
    },
    Register {
        value: |_| NO_SOFT_RESET,
        ..Register::kept(
            0x04,
            2,
            "control and status",
            POWER_STATE,
            "D0 and D3hot are noted, the device stays awake and loses nothing",
        )
    },
    Register::zero(0x06, 2, "data", "figures of the host's power supply"),
];

const NO_SOFT_RESET: u32 = 1 << 3;
const POWER_STATE: u32 = 0b11;

static VENDOR: &[Register] = &[Register::constant(0x02, 1, "length", "the guest's list is cut by it")];

static VPD: &[Register] = &[
    Register {
        masks: Masks { live: 0xffff, store: 0, forward: 0x7fff },
        fill: zero,
        ..Register::constant(
            0x02,
            2,
            "address",
            "the write flag never reaches the device: every access is a read",
        )
    },
    Register::live(0x04, 4, "data", "the answer"),
];

static MSIX: &[Register] = &[
    Register {
        value: |device| device & 0x07ff,
        ..Register::kept(0x02, 2, "control", 0xc000, "enable and function mask are the machine's")
    },
    Register::constant(0x04, 4, "table", "where it is"),
    Register::constant(0x08, 4, "pending bits", "where they are"),
];

static ADVANCED: &[Register] = &[
    Register::constant(0x02, 2, "length and capabilities", "which resets there are"),
    Register::zero(0x04, 1, "control", "initiates a reset, reads as zero"),
    Register::live(0x05, 1, "status", "transactions that are on their way"),
];

const LINK: &str = "the link has a second end, which is the host's";
const PORT_ONLY: &str = "of ports";

// Device control: what reaches the device.
const RELAXED_ORDERING: u32 = 1 << 4;
const NO_SNOOP: u32 = 1 << 11;
const READ_REQUEST: u32 = 0b111 << 12;
const RESET: u32 = 1 << 15;
const PHANTOM: u32 = 1 << 9;

static EXPRESS: &[Register] = &[
    Register {
        // An integrated endpoint has no link, and the guest's function is behind a port. In version 1 it is also
        // shorter, and stays what it is.
        value: |device| if device & 0xff == 0x92 { device & !0xf0 } else { device },
        ..Register::constant(0x02, 2, "capabilities", "an endpoint behind a port of the machine")
    },
    Register {
        value: |device| device & !0x18,
        ..Register::constant(
            0x04,
            4,
            "device capabilities",
            "no phantom functions: the IOMMU knows one requester id",
        )
    },
    Register {
        masks: Masks {
            live: 0,
            store: 0xffff & !(PHANTOM | RESET),
            forward: RELAXED_ORDERING | READ_REQUEST,
        },
        value: |device| device & !(PHANTOM | RESET),
        fill: |device| device & !(NO_SNOOP | PHANTOM | RESET),
        ..Register::constant(
            0x08,
            2,
            "device control",
            "relaxed ordering and read request size reach the device: its own requests, and its bandwidth. Payload size, \
             extended tags and error reporting do not: every port above must agree with them. No-snoop is off: a read \
             past the caches could see what memory held before it was scrubbed. A function-level reset is an effect",
        )
    },
    Register::live(
        0x0a,
        2,
        "device status",
        "a driver waits here for transactions; errors are the host's to clear",
    ),
    Register {
        value: |device| device & !(0b11 << 10 | 1 << 18),
        ..Register::constant(
            0x0c,
            4,
            "link capabilities",
            "speed and width as they are, but no sleeping link",
        )
    },
    Register { value: |device| device & 0x00c8, ..Register::kept(0x10, 2, "link control", 0x00c8, LINK) },
    Register::live(0x12, 2, "link status", "NCCL reads speed and width here"),
    Register::zero(0x14, 4, "slot capabilities", PORT_ONLY),
    Register::zero(0x18, 4, "slot control and status", PORT_ONLY),
    Register::zero(0x1c, 4, "root control", PORT_ONLY),
    Register::zero(0x20, 4, "root status", PORT_ONLY),
    Register {
        value: |device| device & !(1 << 5 | 1 << 11 | 0b11 << 12 | 0b11 << 18 | 0xff << 24),
        ..Register::constant(
            0x24,
            4,
            "device capabilities 2",
            "without what needs the platform: alternative routing ids, latency tolerance, processing hints, OBFF",
        )
    },
    Register {
        value: |device| device & 0x13df,
        ..Register::kept(
            0x28,
            2,
            "device control 2",
            0x13df,
            "time-outs, atomic requests and tags depend on the host's ports",
        )
    },
    Register::zero(0x2a, 2, "device status 2", "reserved"),
    Register::constant(0x2c, 4, "link capabilities 2", "which speeds there are"),
    Register::constant(0x30, 2, "link control 2", LINK),
    Register::live(0x32, 2, "link status 2", "how the link trained"),
];
