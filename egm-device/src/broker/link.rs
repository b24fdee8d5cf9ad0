//! Descriptors of one client: its connection, its process, its slice.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_address::{InRegion, Offset, Span, SpanSet};
use rustix::event::epoll;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::refusal::ReturnFailure;
use super::session::Key;
use super::source::{GrantedSlice, StillUsed};
use super::wire::{self, RefusalReply, SliceRequest};
use crate::audit::{Actor, Event, Refusal};

/// Descriptors and claims of a session, outside the state machine.
pub(super) struct Link {
    /// `None` once it is closed.
    pub(super) socket: Option<OwnedFd>,
    /// `None` once the process has ended.
    pub(super) process: Option<OwnedFd>,
    pub(super) lease: Option<Box<dyn GrantedSlice>>,
    /// Bytes of the slice that its client claims to be bad.
    bad: SpanSet<InRegion>,
    /// The process, for the audit log.
    by: Actor,
    /// Its last request for a slice.
    pub(super) asked: Option<SliceRequest>,
    /// Set when the slice that is being made is no longer wanted.
    pub(super) cancel: Arc<AtomicBool>,
}

/// A slice that stays with its client although it was to be returned.
pub(super) struct UnreturnedSlice {
    slice: Box<dyn GrantedSlice>,
    bad: SpanSet<InRegion>,
    why: ReturnFailure,
}

/// A slice on its way back to its source.
pub(super) struct ReturnedSlice {
    slice: Box<dyn GrantedSlice>,
    /// Bytes that its client found bad.
    bad: SpanSet<InRegion>,
}

impl ReturnedSlice {
    pub(super) fn return_slice(self) -> Result<(), UnreturnedSlice> {
        self.slice.return_slice(&self.bad).map_err(|StillUsed { why, held }| UnreturnedSlice {
            slice: held,
            bad: SpanSet::default(),
            why: ReturnFailure::Used(why),
        })
    }

    /// Keeps the slice, because no thread could start to return it.
    pub(super) fn without_thread(self, error: &io::Error) -> UnreturnedSlice {
        let why = ReturnFailure::NoThread(error.to_string());
        UnreturnedSlice { slice: self.slice, bad: self.bad, why }
    }
}

impl Link {
    /// A client that has connected.
    pub(super) fn new(socket: OwnedFd, process: OwnedFd, by: Actor) -> Self {
        let (socket, process, bad) = (Some(socket), Some(process), SpanSet::default());
        Self { socket, process, lease: None, bad, by, asked: None, cancel: Arc::default() }
    }

    /// The audit event that the client was `refused`.
    pub(super) fn refusal(&self, refused: &RefusalReply) -> Event {
        Event::Refusal(Refusal {
            by: self.by(),
            region: self.asked.as_ref().map(|take| take.regions.join(" ")),
            bytes: self.asked.as_ref().map(|take| take.size),
            reason: refused.cause.as_ref().unwrap_or(&refused.why).clone(),
        })
    }

    /// Its claims, with the part of `spans` that lies in its slice.
    pub(super) fn with_claims(&self, spans: &[(u64, u64)]) -> SpanSet<InRegion> {
        let slice = self.lease.as_ref().and_then(|slice| slice.slice().span());
        let inside = spans.iter().filter_map(|(start, size)| {
            Span::new(Offset::new(*start), *size).ok().and_then(|span| span.intersection(slice?))
        });
        self.bad.iter().chain(inside).collect()
    }

    /// Bytes that it claims to be bad, until the slice is returned.
    pub(super) const fn claims(&self) -> &SpanSet<InRegion> {
        &self.bad
    }

    pub(super) fn set_claims(&mut self, bad: SpanSet<InRegion>) {
        self.bad = bad;
    }

    pub(super) fn region(&self) -> Option<&str> {
        self.lease.as_ref().map(|slice| slice.slice().region.as_str())
    }

    pub(super) const fn uid(&self) -> u32 {
        self.by.uid
    }

    /// Its process, for the audit log.
    pub(super) fn by(&self) -> Actor {
        let owner = self.asked.as_ref().map(|take| take.name.clone());
        Actor { owner: owner.unwrap_or_default(), ..self.by.clone() }
    }

    /// Takes the lease to return it.
    pub(super) fn take_lease(&mut self) -> Option<ReturnedSlice> {
        Some(ReturnedSlice { slice: self.lease.take()?, bad: std::mem::take(&mut self.bad) })
    }

    /// Undoes [`Link::take_lease`]; returns the reason.
    pub(super) fn keep_lease(&mut self, kept: UnreturnedSlice) -> ReturnFailure {
        (self.lease, self.bad) = (Some(kept.slice), kept.bad);
        kept.why
    }

    /// Adds the connection and its process to the epoll set.
    pub(super) fn watch(&self, epoll: &OwnedFd, key: Key) -> io::Result<()> {
        if let Some(process) = &self.process {
            watch(epoll, process.as_fd(), key.saturating_mul(2).saturating_add(1))?;
        }
        self.listen(epoll, key)
    }

    /// Adds the connection to the epoll set.
    pub(super) fn listen(&self, epoll: &OwnedFd, key: Key) -> io::Result<()> {
        let socket = self.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        watch(epoll, socket.as_fd(), key.saturating_mul(2))
    }
}

/// The region of a slice as JSON in a sealed file: its retired pages may be more than a packet holds.
pub(super) fn describe(lease: &dyn GrantedSlice) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"region", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    io::Write::write_all(&mut file, &wire::encode(lease.region()))?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Adds `descriptor` to the epoll set; its events carry `name`.
pub(super) fn watch(epoll: &OwnedFd, descriptor: BorrowedFd<'_>, name: u64) -> io::Result<()> {
    Ok(epoll::add(epoll, descriptor, epoll::EventData::new_u64(name), epoll::EventFlags::IN)?)
}
