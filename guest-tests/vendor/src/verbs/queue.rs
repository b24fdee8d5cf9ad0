//! The unsafe module of queues: completions, and reliable connections in their states.
//!
//! Callers rely on this: a queue pair borrows its domain and its completion queue, so it is gone before them; requests
//! are posted only to one that is connected ([`Connected`]), each with one [`Sge`] of memory that is registered; every
//! number that the library returns is checked against a bound before it is used.
#![expect(unsafe_code, reason = "calls of libibverbs about queues")]

use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use crate::verbs::VerbsError;
use crate::verbs::abi::{self, QpAttr};
use crate::verbs::device::{Context, check};
use crate::verbs::error::{status_hint, status_name};
use crate::verbs::library::context::{PollCq, PostRecv, PostSend};
use crate::verbs::memory::{Domain, Remote, Sge};
use crate::verbs::steps::{Endpoint, LocalPort, MASK_24, init, ready_to_receive, ready_to_send};

/// Completions that are taken at once.
const AT_ONCE: usize = 32;
/// `IBV_QPT_RC`: the type of a reliable connection.
const RELIABLE: u32 = 2;
/// `IBV_SEND_SIGNALED`: a request that succeeds gives a completion too.
const SIGNALED: u32 = 1 << 1;

/// Queue in which completions arrive.
#[derive(Debug)]
pub struct CompletionQueue<'c> {
    context: &'c Context<'c>,
    pointer: NonNull<abi::Cq>,
    poll: PollCq,
}

impl Context<'_> {
    /// Makes a completion queue for `entries`, at least 1.
    ///
    /// # Errors
    ///
    /// When the device refuses that many.
    pub fn completion_queue(&self, entries: u32) -> Result<CompletionQueue<'_>, VerbsError> {
        // SAFETY: the context is open.
        let poll = unsafe { (*self.pointer.as_ptr()).ops.poll_cq };
        let poll = poll.ok_or(VerbsError::NoCall { call: "ibv_poll_cq" })?;
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let (none, create) = (ptr::null_mut(), self.verbs.functions.create_cq);
        // SAFETY: the context is open; without a channel nothing else is asked for.
        let pointer = unsafe { create(self.pointer.as_ptr(), entries, none, none, 0) };
        let pointer = NonNull::new(pointer).ok_or_else(|| VerbsError::last("ibv_create_cq"))?;
        Ok(CompletionQueue { context: self, pointer, poll })
    }
}

/// A request that was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Id of the request.
    pub id: u64,
    /// Bytes that arrived, of receives, reads and atomics.
    pub bytes: u32,
}

impl CompletionQueue<'_> {
    /// Takes what has arrived, 32 at most, without waiting.
    ///
    /// # Errors
    ///
    /// When a request was not carried out, or the library's answer cannot be.
    pub fn poll(&self, mut each: impl FnMut(Completion)) -> Result<usize, VerbsError> {
        let mut completed = [abi::Wc::default(); AT_ONCE];
        let most = c_int::try_from(AT_ONCE).unwrap_or(1);
        // SAFETY: the queue lives, and the array has as many entries as the library is asked for.
        let count = unsafe { (self.poll)(self.pointer.as_ptr(), most, completed.as_mut_ptr()) };
        let completed = usize::try_from(count).ok().and_then(|count| completed.get(..count));
        let completed = completed.ok_or_else(|| VerbsError::Bound {
            what: "the number of completions",
            value: u64::from(count.cast_unsigned()),
            rule: "32 at most",
        })?;
        for completion in completed {
            if completion.status != 0 {
                return Err(VerbsError::Work {
                    id: completion.wr_id,
                    status: completion.status,
                    name: status_name(completion.status),
                    vendor: completion.vendor_err,
                    hint: status_hint(completion.status),
                });
            }
            each(Completion { id: completion.wr_id, bytes: completion.byte_len });
        }
        Ok(completed.len())
    }

    /// Waits for `count` completions.
    ///
    /// # Errors
    ///
    /// As [`CompletionQueue::poll`], and when none came for `timeout`.
    pub fn wait(&self, count: usize, timeout: Duration) -> Result<Vec<Completion>, VerbsError> {
        let mut seen = Vec::with_capacity(count.min(AT_ONCE));
        let mut last = Instant::now();
        while seen.len() < count {
            if self.poll(|completion| seen.push(completion))? > 0 {
                last = Instant::now();
            } else if last.elapsed() >= timeout {
                return Err(VerbsError::Silent { seconds: timeout.as_secs() });
            } else {
                // A device that is software needs the processor to get anywhere.
                std::thread::yield_now();
            }
        }
        Ok(seen)
    }
}

impl Drop for CompletionQueue<'_> {
    fn drop(&mut self) {
        // SAFETY: queue pairs borrow the queue, and are gone. An error could only be logged.
        let _ = unsafe { (self.context.verbs.functions.destroy_cq)(self.pointer.as_ptr()) };
    }
}

/// An end of a reliable connection, not connected.
#[derive(Debug)]
pub struct QueuePair<'q> {
    context: &'q Context<'q>,
    pointer: NonNull<abi::Qp>,
    number: u32,
    /// Keeps the domain and the completion queue until after the queue pair.
    _of: (&'q Domain<'q>, &'q CompletionQueue<'q>),
}

impl<'d> Domain<'d> {
    /// Makes a queue pair for `requests` that are under way and as many receives.
    ///
    /// # Errors
    ///
    /// When the device refuses.
    pub fn queue_pair<'q>(
        &'q self,
        completions: &'q CompletionQueue<'q>,
        requests: u32,
    ) -> Result<QueuePair<'q>, VerbsError>
    where
        'd: 'q,
    {
        let mut wanted = abi::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: completions.pointer.as_ptr(),
            recv_cq: completions.pointer.as_ptr(),
            srq: ptr::null_mut(),
            cap: abi::QpCap {
                max_send_wr: requests,
                max_recv_wr: requests,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: RELIABLE,
            sq_sig_all: 0,
        };
        let create = self.context.verbs.functions.create_qp;
        // SAFETY: domain and queue live, and the library reads and writes one structure.
        let pointer = unsafe { create(self.pointer.as_ptr(), &raw mut wanted) };
        let pointer = NonNull::new(pointer).ok_or_else(|| VerbsError::last("ibv_create_qp"))?;
        // SAFETY: the library returned a queue pair, which is its own until it is destroyed.
        let number = unsafe { (*pointer.as_ptr()).qp_num };
        Ok(QueuePair { context: self.context, pointer, number: number & MASK_24, _of: (self, completions) })
    }
}

impl<'q> QueuePair<'q> {
    /// Parameters of this side for the other end, with `psn` as the first packet's number.
    #[must_use]
    pub fn endpoint(&self, place: &LocalPort, psn: u32) -> Endpoint {
        Endpoint {
            number: self.number,
            psn: psn & MASK_24,
            lid: place.port.lid,
            gid: place.gid.bytes,
            mtu: place.port.mtu,
        }
    }

    /// Takes it from *reset* by *init* and *ready to receive* to *ready to send*.
    ///
    /// # Errors
    ///
    /// When the device refuses a step.
    pub fn connect(
        self,
        place: &LocalPort,
        ours: &Endpoint,
        theirs: &Endpoint,
    ) -> Result<Connected<'q>, VerbsError> {
        // State, partition key, port, access.
        self.modify(&mut init(place), 1 | 1 << 4 | 1 << 5 | 1 << 3)?;
        // State, address, MTU, the other's number and packet sequence number, reads served, wait of the receiver.
        let steps = 1 | 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12 | 1 << 17 | 1 << 15;
        self.modify(&mut ready_to_receive(place, ours, theirs), steps)?;
        // State, timeout, both retries, our packet, reads made.
        self.modify(&mut ready_to_send(place, ours), 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 16 | 1 << 13)?;
        let context = self.context.pointer.as_ptr();
        // SAFETY: the context is open.
        let send = unsafe { (*context).ops.post_send };
        // SAFETY: as above.
        let receive = unsafe { (*context).ops.post_recv };
        let send = send.ok_or(VerbsError::NoCall { call: "ibv_post_send" })?;
        let receive = receive.ok_or(VerbsError::NoCall { call: "ibv_post_recv" })?;
        Ok(Connected { pair: self, send, receive })
    }

    fn modify(&self, wanted: &mut QpAttr, mask: c_int) -> Result<(), VerbsError> {
        let modify = self.context.verbs.functions.modify_qp;
        // SAFETY: the queue pair lives, and the library reads one structure.
        let done = unsafe { modify(self.pointer.as_ptr(), wanted, mask) };
        let step = match wanted.qp_state {
            1 => "ibv_modify_qp to init",
            2 => "ibv_modify_qp to ready to receive",
            _ => "ibv_modify_qp to ready to send",
        };
        check(step, done)
    }
}

impl Drop for QueuePair<'_> {
    fn drop(&mut self) {
        // SAFETY: the queue pair lives until here. An error could only be logged.
        let _ = unsafe { (self.context.verbs.functions.destroy_qp)(self.pointer.as_ptr()) };
    }
}

/// Operation on a piece of local memory.
#[derive(Debug, Clone, Copy)]
pub enum Work {
    /// The piece is put into the other side's next receive.
    Send,
    /// The piece is written there.
    Write(Remote),
    /// The bytes there are read into the piece.
    Read(Remote),
    /// The word there is increased; its old value comes into the piece, of 8 bytes.
    FetchAdd(Remote, u64),
    /// If the word there is the first number, it becomes the second; its old value comes into the piece, of 8 bytes.
    CompareSwap(Remote, u64, u64),
}

impl Work {
    /// `enum ibv_wr_opcode` and what goes with it.
    const fn operation(self) -> (u32, abi::Target) {
        match self {
            Self::Send => (2, rdma(Remote { address: 0, rkey: 0 })),
            Self::Write(remote) => (0, rdma(remote)),
            Self::Read(remote) => (4, rdma(remote)),
            Self::CompareSwap(remote, is, becomes) => (5, atomic(remote, is, becomes)),
            Self::FetchAdd(remote, add) => (6, atomic(remote, add, 0)),
        }
    }
}

const fn rdma(remote: Remote) -> abi::Target {
    abi::Target { rdma: abi::Rdma { remote_addr: remote.address, rkey: remote.rkey } }
}

const fn atomic(remote: Remote, compare_add: u64, swap: u64) -> abi::Target {
    abi::Target { atomic: abi::Atomic { remote_addr: remote.address, compare_add, swap, rkey: remote.rkey } }
}

/// An end of a reliable connection that is ready to send.
#[derive(Debug)]
pub struct Connected<'q> {
    pair: QueuePair<'q>,
    send: PostSend,
    receive: PostRecv,
}

impl Connected<'_> {
    /// Posts a request with `local` memory; it is done when its completion has come.
    ///
    /// If the memory's registration ends earlier, the device leaves the memory alone and the request fails.
    ///
    /// # Errors
    ///
    /// When the queue is full (`ENOMEM`) or the request malformed.
    pub fn post(&self, id: u64, local: Sge<'_>, work: Work) -> Result<(), VerbsError> {
        let mut entry = local.entry();
        let (opcode, wr) = work.operation();
        let mut request = abi::SendWr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: &raw mut entry,
            num_sge: 1,
            opcode,
            send_flags: SIGNALED,
            imm_data: 0,
            wr,
            remote_srqn: 0,
            rest: [0; 6],
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; the library copies request and entry, and checks keys when it uses the memory.
        let done = unsafe { (self.send)(self.pair.pointer.as_ptr(), &raw mut request, &raw mut bad) };
        check("ibv_post_send", done)
    }

    /// Posts a receive into `local` memory.
    ///
    /// # Errors
    ///
    /// As [`Connected::post`].
    pub fn post_receive(&self, id: u64, local: Sge<'_>) -> Result<(), VerbsError> {
        let mut entry = local.entry();
        let mut request =
            abi::RecvWr { wr_id: id, next: ptr::null_mut(), sg_list: &raw mut entry, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // SAFETY: as in `post`.
        let done = unsafe { (self.receive)(self.pair.pointer.as_ptr(), &raw mut request, &raw mut bad) };
        check("ibv_post_recv", done)
    }
}
