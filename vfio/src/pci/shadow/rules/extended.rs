//! Capabilities of the list at 0x100. A hidden one becomes a null capability, so that no other moves.

use super::{Masks, Register, Registers, Rule, Treatment};
use crate::pci::capability::CapabilityId;
use crate::pci::registers::extended as id;

use Treatment::{Hidden, PassThrough, ReadOnly};

const fn plain(id: u16, name: &'static str, treatment: Treatment, reason: &'static str) -> Rule {
    Rule { id: CapabilityId::Extended(id), name, treatment, registers: Registers::At(&[]), reason }
}

const FABRIC: &str = "it routes traffic of the host's switches and ports";
const LINK: &str = "the link has a second end, which is the host's";
const ROOT: &str = "of a root complex";

pub(super) static EXTENDED: &[Rule] = &[
    plain(id::NULL, "null", Hidden, "it has no content"),
    plain(
        id::AER,
        "advanced error reporting",
        ReadOnly,
        "errors are shown, but the host must be the one to mask and clear them",
    ),
    plain(0x02, "virtual channel", ReadOnly, "traffic classes are mapped by the host, at both ends"),
    plain(0x03, "serial number", ReadOnly, "drivers and tools identify devices by it"),
    Rule {
        treatment: Treatment::Emulated,
        registers: Registers::At(POWER_BUDGET),
        ..plain(0x04, "power budgeting", ReadOnly, "a table to be read")
    },
    plain(0x05, "root complex link declaration", Hidden, ROOT),
    plain(0x06, "root complex internal link", Hidden, ROOT),
    plain(0x07, "root complex event collector", Hidden, ROOT),
    plain(
        0x08,
        "multi-function virtual channel",
        Hidden,
        "it divides a link among functions that are not all the guest's",
    ),
    plain(0x09, "virtual channel with MFVC", Hidden, "as multi-function virtual channel"),
    plain(0x0a, "root complex register block", Hidden, ROOT),
    Rule {
        registers: Registers::At(VENDOR),
        ..plain(id::VENDOR, "vendor-specific", PassThrough, "drivers need it")
    },
    plain(
        0x0d,
        "access control",
        Hidden,
        "whether peers reach each other past the IOMMU is the host's to say",
    ),
    plain(0x0e, "alternative routing id", Hidden, "the guest's function is number 0 of its device, alone"),
    plain(
        0x0f,
        "address translation",
        Hidden,
        "the guest has no IOMMU to ask; the host uses it where it may",
    ),
    plain(0x10, "SR-IOV", Hidden, "virtual functions would appear on the host, not in the guest"),
    plain(0x11, "multi-root", Hidden, FABRIC),
    plain(0x12, "multicast", Hidden, FABRIC),
    plain(0x13, "page request", Hidden, "as address translation"),
    Rule {
        treatment: Treatment::Emulated,
        registers: Registers::Resizable,
        ..plain(
            id::REBAR,
            "resizable BAR",
            Hidden,
            "the present size is the only one: addresses were planned with it",
        )
    },
    plain(0x16, "dynamic power allocation", Hidden, "power is the host's"),
    plain(0x17, "processing hints", Hidden, "steering tags name the host's CPUs"),
    plain(0x18, "latency tolerance", Hidden, "power is the host's"),
    plain(0x19, "secondary PCI Express", ReadOnly, LINK),
    plain(0x1b, "process address space", Hidden, "as address translation"),
    plain(0x1d, "downstream port containment", Hidden, "of ports"),
    plain(0x1e, "L1 substates", Hidden, LINK),
    plain(0x1f, "precision time", Hidden, "time comes from the host's ports"),
    plain(0x22, "readiness time", ReadOnly, "how long to wait after a reset"),
    Rule {
        registers: Registers::At(VENDOR),
        ..plain(
            id::DVSEC,
            "designated vendor-specific",
            ReadOnly,
            "a CXL device's decoders are in it; readiness is read from it",
        )
    },
    plain(0x24, "resizable BAR of virtual functions", Hidden, "as SR-IOV"),
    plain(0x25, "data link feature", ReadOnly, LINK),
    plain(0x26, "16 GT/s link", ReadOnly, LINK),
    plain(0x27, "lane margining", Hidden, "measuring a link disturbs it"),
    plain(0x29, "enclosure management", Hidden, "lamps of the host's case"),
    plain(0x2a, "32 GT/s link", ReadOnly, LINK),
    plain(0x2c, "shadow functions", Hidden, "requests in the name of functions that are not the guest's"),
    plain(0x2e, "data object exchange", Hidden, "attestation and key exchange with the host's link partner"),
    plain(0x30, "link encryption", Hidden, LINK),
    plain(0x31, "64 GT/s link", ReadOnly, LINK),
    plain(0x32, "flit logging", Hidden, LINK),
];

static VENDOR: &[Register] =
    &[Register::constant(0x04, 4, "vendor's header", "the guest's list is cut by the length in it")];

static POWER_BUDGET: &[Register] = &[
    Register {
        masks: Masks { live: 0xff, store: 0, forward: 0xff },
        ..Register::constant(0x04, 1, "data select", "which row of the table is shown")
    },
    Register::live(0x08, 4, "data", "the row"),
    Register::live(0x0c, 1, "capability", "whether it counts in the system's budget"),
];
