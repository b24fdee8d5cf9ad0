//! Evidence that memory is in use, as verdicts, records and messages have it.
#![forbid(unsafe_code)]

use std::fmt;

use egm_report::show::first_of;
use serde::{Deserialize, Serialize};

/// One reason that keeps memory in use.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// Kind of the reason.
    pub hold: Hold,
    /// The process that has it, where one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The program of that process, as the kernel names it, escaped.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub program: String,
}

impl Evidence {
    /// Evidence that belongs to no known process.
    pub(crate) const fn of(hold: Hold) -> [Self; 1] {
        [Self { hold, pid: None, program: String::new() }]
    }

    /// The first pieces of `evidence`, as text for messages.
    pub(crate) fn summary(evidence: &[Self]) -> String {
        first_of(evidence.iter().map(Self::to_string))
    }

    /// All pieces of `evidence`, as text for the audit log.
    pub(crate) fn list(evidence: &[Self]) -> String {
        evidence.iter().map(Self::to_string).collect::<Vec<_>>().join(", ")
    }
}

/// Kinds of use of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hold {
    /// A process maps it.
    Mapping,
    /// A process has a descriptor of its file.
    Descriptor,
    /// A descriptor is in flight in a Unix socket of the last owner's user.
    InFlight,
    /// An io_uring has its file registered.
    Registered,
    /// An io_uring of the last owner's user has buffers registered, which may be its pages.
    RingPin,
    /// A process has a VFIO group, device or iommufd that may be the last owner's.
    DmaPin,
    /// The kernel counts another open description of its file, which no process shows.
    Description,
    /// Something refers to its pages without a mapping or a descriptor: a pipe, or I/O that does not end.
    BusyPages,
    /// A process, or part of `/proc`, cannot be looked at.
    CannotLook,
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.hold {
            Hold::Mapping => "a mapping",
            Hold::Descriptor => "a descriptor",
            Hold::InFlight => "a descriptor in flight",
            Hold::Registered => "a file registered with io_uring",
            Hold::RingPin => "pages that an io_uring may have pinned",
            Hold::DmaPin => "a VFIO group, device or iommufd of the last owner",
            Hold::Description => "an open description",
            Hold::BusyPages => "busy pages: a pipe has them, or I/O that does not end",
            Hold::CannotLook => "what cannot be looked at",
        })?;
        match self.pid {
            Some(pid) => write!(f, " in process {pid} ({})", self.program),
            None => Ok(()),
        }
    }
}
