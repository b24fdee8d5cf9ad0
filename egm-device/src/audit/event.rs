//! The events of the audit log. This file alone decides what is logged.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use egm_address::{InRegion, Span, SpanSet};
use serde::Serialize;

use crate::owner::{Owner, started};

/// An event. Its kind is the key `event` of the line, in the words below.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A slice was granted; dirty bytes of it were scrubbed before.
    Grant(Action),
    /// A slice came back.
    Return(Action),
    /// A request for a slice was refused.
    Refusal(Refusal),
    /// Bytes were made zero and recorded clean.
    Scrub(Action),
    /// Bad bytes were taken out of use.
    Retire(Finding),
    /// An operator put retired bytes back into use.
    Unretire(Finding),
    /// Bytes that a client reported as bad were not retired.
    ClaimRefused(Finding),
    /// Bytes are kept from all owners because a process, device or queue may still reach them.
    Quarantine(Finding),
    /// Bytes left quarantine; the duration is the age of their grant.
    Release(Action),
    /// Bytes that a scrub wrote did not read back as zero.
    Mismatch(Finding),
}

/// An operation on bytes of a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Action {
    /// The process that it served.
    #[serde(flatten)]
    pub by: Actor,
    /// Bytes of the operation.
    #[serde(flatten)]
    pub at: RegionBytes,
    /// Duration of the operation, in milliseconds.
    pub duration_ms: u64,
}

/// A finding about bytes of a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The process it concerns.
    #[serde(flatten)]
    pub by: Actor,
    /// Bytes that the finding concerns.
    #[serde(flatten)]
    pub at: RegionBytes,
    /// The evidence or the cause.
    pub reason: String,
}

/// A request that was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The process that asked.
    #[serde(flatten)]
    pub by: Actor,
    /// The region or kind it asked for; absent for a connection that was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Bytes it asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Reason of the refusal.
    pub reason: String,
}

/// A process, as the kernel describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Actor {
    /// Name of the machine or job, in its own words.
    pub owner: String,
    /// User id of the process.
    pub uid: u32,
    /// Process id in the host's first process namespace.
    pub pid: u32,
    /// Its program; empty for a process that has ended.
    pub program: Program,
}

/// Program of a process. Both names can hold any byte but zero.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Program {
    /// `/proc/PID/comm`, which the process can set.
    pub comm: String,
    /// Target of `/proc/PID/exe`; empty where this process may not read it.
    pub exe: String,
}

/// Bytes of a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RegionBytes {
    /// Name of the region.
    pub region: String,
    /// From the first byte to the last.
    pub span: Extent,
    /// Bytes of that extent.
    pub bytes: u64,
}

/// First byte and length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Extent {
    /// Offset in the region.
    pub offset: u64,
    /// Length in bytes, gaps included.
    pub size: u64,
}

impl Event {
    /// Its name in the log.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Grant(_) => "grant",
            Self::Return(_) => "return",
            Self::Refusal(_) => "refusal",
            Self::Scrub(_) => "scrub",
            Self::Retire(_) => "retire",
            Self::Unretire(_) => "unretire",
            Self::ClaimRefused(_) => "claim-refused",
            Self::Quarantine(_) => "quarantine",
            Self::Release(_) => "release",
            Self::Mismatch(_) => "mismatch",
        }
    }

    /// Whether it is about the memory, and not only about a request.
    #[must_use]
    pub(crate) const fn is_finding(&self) -> bool {
        matches!(
            self,
            Self::Retire(_) | Self::Unretire(_) | Self::Quarantine(_) | Self::Release(_) | Self::Mismatch(_)
        )
    }

    /// The process it concerns.
    #[must_use]
    pub const fn by(&self) -> &Actor {
        match self {
            Self::Grant(Action { by, .. })
            | Self::Return(Action { by, .. })
            | Self::Scrub(Action { by, .. })
            | Self::Release(Action { by, .. })
            | Self::Retire(Finding { by, .. })
            | Self::Unretire(Finding { by, .. })
            | Self::ClaimRefused(Finding { by, .. })
            | Self::Quarantine(Finding { by, .. })
            | Self::Mismatch(Finding { by, .. })
            | Self::Refusal(Refusal { by, .. }) => by,
        }
    }
}

impl Action {
    /// An operation on `at` for `by` that took `duration`.
    #[must_use]
    pub fn new(by: Actor, at: RegionBytes, duration: Duration) -> Self {
        Self { by, at, duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX) }
    }
}

impl Finding {
    /// A finding about `at` that concerns `by`.
    pub fn new(by: Actor, at: RegionBytes, reason: impl Into<String>) -> Self {
        Self { by, at, reason: reason.into() }
    }
}

impl RegionBytes {
    /// `bytes` of `region`; `None` for no bytes.
    #[must_use]
    pub(crate) fn of_set(region: &str, bytes: &SpanSet<InRegion>) -> Option<Self> {
        let (first, last) = (bytes.iter().next()?, bytes.iter().last()?);
        let hull = Span::between(first.start(), last.end())?;
        Some(Self { bytes: bytes.size(), ..Self::of(region, hull) })
    }

    /// All of `span` of `region`.
    #[must_use]
    pub fn of(region: &str, span: Span<InRegion>) -> Self {
        let extent = Extent { offset: span.start().get(), size: span.size() };
        Self { region: region.to_owned(), span: extent, bytes: span.size() }
    }
}

impl Actor {
    /// `owner`, with the program that its process runs now.
    #[must_use]
    pub fn of(owner: &Owner) -> Self {
        Self {
            owner: owner.name.clone(),
            uid: owner.uid,
            pid: owner.pid,
            program: Program::of(owner.pid, owner.started).unwrap_or_default(),
        }
    }
}

impl Program {
    /// Program of process `pid`, which started at `start`; `None` when it has ended.
    fn of(pid: u32, start: u64) -> Option<Self> {
        let comm = fs::read(format!("/proc/{pid}/comm")).ok()?;
        let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        let program = Self {
            comm: text(comm.strip_suffix(b"\n").unwrap_or(&comm)),
            exe: text(exe.as_os_str().as_bytes()),
        };
        // The number may belong to another process by now.
        (started(pid) == Some(start)).then_some(program)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
