//! Queues that a kernel worker serves (`/dev/vhost-net`, `/dev/vhost-vsock`).
//!
//! The kernel reads guest memory through our own mapping, takes kicks and raises interrupts by eventfd, so after
//! [`Worker::start`] no packet passes through this process. What a guest writes into the rings is the kernel's to
//! check, as for any user of vhost.
//!
//! This is an unsafe module: three ioctls that the `vhost` crate offers only on descriptors that it opened by
//! path itself. Each passes an integer or a plain struct by reference and the kernel copies it.
#![expect(
    unsafe_code,
    reason = "VHOST_NET_SET_BACKEND, VHOST_VSOCK_SET_GUEST_CID and _SET_RUNNING are ioctls"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::vhost_kern::{VhostKernBackend, vhost_binding as binding};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::ioctl_with_ref;

use super::saved::QueuePosition;
use super::{ActivateError, Interrupt};
use crate::error::{Blame, Remedy, Report};
use crate::eventfd;

/// Path of the kernel's vhost-net.
pub(crate) const NET: &str = "/dev/vhost-net";
/// Path of the kernel's vhost-vsock.
pub(crate) const VSOCK: &str = "/dev/vhost-vsock";

/// Opens a worker of [`NET`] or [`VSOCK`], which no process has claimed yet.
///
/// # Errors
/// Those of open(2): the node is missing, or forbidden.
pub(crate) fn open(path: &str) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// The kernel's vhost does not do what a device needs.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum VhostError {
    /// The worker could not be claimed for this process.
    #[error("cannot use {device}: {step} failed")]
    Setup {
        /// Path of the character device, for people; it was opened elsewhere.
        device: &'static str,
        /// The request that failed.
        step: &'static str,
        #[source]
        source: io::Error,
    },
    /// The context id belongs to another VM on this host.
    #[error("vsock context id {cid} is used by another VM on this host, and must be its own")]
    CidTaken { cid: u32 },
}

impl Report for VhostError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Setup { device: NET, .. } => Blame::Host
                .help("set \"vhost\": false for this device, or load the module: modprobe vhost_net"),
            Self::Setup { .. } => {
                Blame::Host.help("give the device a \"socket\", or load the module: modprobe vhost_vsock")
            }
            Self::CidTaken { cid } => Blame::Configuration
                .help(format!("set another \"cid\" from 3 on, such as {}", cid.saturating_add(1))),
        }
    }
}

/// One open vhost device, owned by this process.
pub struct Worker {
    file: File,
    features: u64,
    /// The kernel writes here when a ring made no sense to it.
    error: EventFd,
}

/// Setup of one queue for a worker.
pub struct Vring<'a> {
    /// The queue's number on the virtio device, for interrupts.
    pub index: u16,
    /// Where the rings are.
    pub queue: &'a Queue,
    /// Written by the guest's notifications.
    pub kick: &'a EventFd,
}

impl Worker {
    /// Claims an open vhost device for this process. `device` is its path, for messages.
    ///
    /// # Errors
    /// [`VhostError::Setup`].
    pub fn new(file: File, device: &'static str) -> Result<Self, VhostError> {
        let failed = |step| move |e| VhostError::Setup { device, step, source: io_error(e) };
        let memory = GuestMemoryMmap::new();
        let bound = Bound { file: &file, memory: &memory };
        bound.set_owner().map_err(failed("VHOST_SET_OWNER"))?;
        let features = bound.get_features().map_err(failed("VHOST_GET_FEATURES"))?;
        let error = eventfd::new().map_err(|source| VhostError::Setup { device, step: "eventfd", source })?;
        Ok(Self { file, features, error })
    }

    /// Feature bits that the kernel's side has.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Becomes readable when the kernel gave up on a ring.
    pub fn error(&self) -> &EventFd {
        &self.error
    }

    /// Hands memory and rings to the worker, numbered from 0 in the order given. It starts to work when the device's
    /// own switch is set.
    ///
    /// # Errors
    /// [`ActivateError`] names the request that failed.
    pub fn start(
        &self,
        memory: &GuestMemoryMmap,
        features: u64,
        vrings: &[Vring<'_>],
        interrupt: &dyn Interrupt,
    ) -> Result<(), ActivateError> {
        let failed = |what| move |e| ActivateError { what, source: io_error(e) };
        let bound = Bound { file: &self.file, memory };
        bound.set_features(features & self.features).map_err(failed("VHOST_SET_FEATURES"))?;
        bound.set_mem_table(&regions(memory)).map_err(failed("VHOST_SET_MEM_TABLE"))?;
        for (number, vring) in vrings.iter().enumerate() {
            let queue = vring.queue;
            let config = VringConfigData {
                queue_max_size: queue.max_size(),
                queue_size: queue.size(),
                desc_table_addr: queue.desc_table(),
                used_ring_addr: queue.used_ring(),
                avail_ring_addr: queue.avail_ring(),
                flags: 0,
                log_addr: None,
            };
            bound.set_vring_num(number, queue.size()).map_err(failed("VHOST_SET_VRING_NUM"))?;
            bound.set_vring_base(number, queue.next_avail()).map_err(failed("VHOST_SET_VRING_BASE"))?;
            bound.set_vring_addr(number, &config).map_err(failed("VHOST_SET_VRING_ADDR"))?;
            self.set_call(number, vring.index, interrupt)?;
            bound.set_vring_err(number, &self.error).map_err(failed("VHOST_SET_VRING_ERR"))?;
            bound.set_vring_kick(number, vring.kick).map_err(failed("VHOST_SET_VRING_KICK"))?;
        }
        Ok(())
    }

    /// Ring `number` interrupts by the vector that queue `index` has now, whether the worker runs or not.
    ///
    /// # Errors
    /// [`ActivateError`] names the request that failed.
    pub(crate) fn set_call(
        &self,
        number: usize,
        index: u16,
        interrupt: &dyn Interrupt,
    ) -> Result<(), ActivateError> {
        // A driver that gave the queue no vector polls: the kernel then signals a descriptor without a reader.
        let call = match interrupt.queue_eventfd(index) {
            Some(call) => call,
            None => Arc::new(eventfd::new().map_err(|source| ActivateError { what: "eventfd", source })?),
        };
        let bound = Bound { file: &self.file, memory: &GuestMemoryMmap::new() };
        bound
            .set_vring_call(number, &call)
            .map_err(|e| ActivateError { what: "VHOST_SET_VRING_CALL", source: io_error(e) })
    }

    /// Connects ring `number` of a vhost-net worker to a tap, or with `None` stops it: the kernel touches guest
    /// memory no more when this returns.
    ///
    /// # Errors
    /// The error of the ioctl VHOST_NET_SET_BACKEND.
    pub(crate) fn set_net_backend(&self, number: u32, tap: Option<&File>) -> io::Result<()> {
        let backend = binding::vhost_vring_file { index: number, fd: tap.map_or(-1, AsRawFd::as_raw_fd) };
        // SAFETY: the kernel copies the struct, which lives through the call.
        let result = unsafe { ioctl_with_ref(&self.file, binding::VHOST_NET_SET_BACKEND(), &backend) };
        check(result)
    }

    /// Reads where the stopped worker is in ring `number`, which is `queue` in `memory`.
    fn position(&self, number: usize, queue: &Queue, memory: &GuestMemoryMmap) -> io::Result<QueuePosition> {
        let bound = Bound { file: &self.file, memory };
        let next = bound.get_vring_base(number).map_err(io_error)?;
        let available = u16::try_from(next).map_err(io::Error::other)?;
        // vhost keeps no used index of its own: a worker reads it from the ring when it starts.
        let used = queue.used_idx(memory, Ordering::Relaxed).map_err(io::Error::other)?.0;
        Ok(QueuePosition { available, used })
    }

    /// Gives a vhost-vsock worker its guest's context id.
    ///
    /// # Errors
    /// [`VhostError::CidTaken`] or [`VhostError::Setup`].
    pub(crate) fn set_guest_cid(&self, cid: u32) -> Result<(), VhostError> {
        let value = u64::from(cid);
        // SAFETY: the kernel copies the integer, which lives through the call.
        let result = unsafe { ioctl_with_ref(&self.file, binding::VHOST_VSOCK_SET_GUEST_CID(), &value) };
        check(result).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => VhostError::CidTaken { cid },
            _ => VhostError::Setup { device: VSOCK, step: "VHOST_VSOCK_SET_GUEST_CID", source },
        })
    }

    /// Starts or stops a vhost-vsock worker; stopped, it touches guest memory no more when this returns.
    ///
    /// # Errors
    /// The error of the ioctl VHOST_VSOCK_SET_RUNNING.
    pub(crate) fn set_vsock_running(&self, running: bool) -> io::Result<()> {
        let value = libc::c_int::from(running);
        // SAFETY: the kernel copies the integer, which lives through the call.
        let result = unsafe { ioctl_with_ref(&self.file, binding::VHOST_VSOCK_SET_RUNNING(), &value) };
        check(result)
    }
}

/// Queues that vhost workers serve: receive and transmit of each worker.
pub(crate) struct VhostQueues {
    memory: GuestMemoryMmap,
    queues: Vec<Option<Queue>>,
    /// Positions in the rings, by queue; empty until the workers have stopped.
    positions: Vec<Option<QueuePosition>>,
}

impl VhostQueues {
    /// All or some of `queues`, in `memory`.
    pub(crate) fn new(memory: GuestMemoryMmap, queues: Vec<Option<Queue>>) -> Self {
        Self { memory, queues, positions: Vec::new() }
    }

    /// Both queues of worker `number`, if it serves them.
    pub(crate) fn pair(&self, number: usize) -> Option<[&Queue; 2]> {
        let queue = |index: usize| self.queues.get(index)?.as_ref();
        Some([queue(2 * number)?, queue(2 * number + 1)?])
    }

    /// Reads the positions of `workers`, which have stopped.
    ///
    /// # Errors
    /// The error of the ioctl VHOST_GET_VRING_BASE, or a queue outside of memory.
    pub(crate) fn read_positions(&mut self, workers: &[Worker]) -> io::Result<()> {
        let mut positions = Vec::new();
        for (number, worker) in workers.iter().enumerate() {
            let position = |ring, queue| worker.position(ring, queue, &self.memory).map(Some);
            positions.extend(match self.pair(number) {
                Some([first, second]) => [position(0, first)?, position(1, second)?],
                None => [None; 2],
            });
        }
        self.positions = positions;
        Ok(())
    }

    /// Positions of the workers when they stopped, by queue.
    pub(super) fn positions(&self) -> &[Option<QueuePosition>] {
        &self.positions
    }
}

/// A worker's descriptor together with the memory that ring addresses are in, as the `vhost` crate requires.
struct Bound<'a> {
    file: &'a File,
    memory: &'a GuestMemoryMmap,
}

impl AsRawFd for Bound<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl<'a> VhostKernBackend for Bound<'a> {
    type AS = &'a GuestMemoryMmap;

    fn mem(&self) -> &Self::AS {
        &self.memory
    }

    /// As the default, which refuses a ring that ends with its region.
    fn is_valid(&self, ring: &VringConfigData) -> bool {
        let entries = usize::from(ring.queue_size);
        let inside = |address, header: usize, entry: usize| {
            self.memory.check_range(GuestAddress(address), header + entries * entry)
        };
        ring.queue_size.is_power_of_two()
            && ring.queue_size <= ring.queue_max_size
            && inside(ring.desc_table_addr, 0, 16)
            && inside(ring.avail_ring_addr, 6, 2)
            && inside(ring.used_ring_addr, 6, 8)
    }
}

fn regions(memory: &GuestMemoryMmap) -> Vec<VhostUserMemoryRegionInfo> {
    memory
        .iter()
        .map(|region| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr().expose_provenance() as u64,
            ..VhostUserMemoryRegionInfo::default()
        })
        .collect()
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn io_error(error: vhost::Error) -> io::Error {
    match error {
        vhost::Error::IoctlError(source) | vhost::Error::IOError(source) => source,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::Driver;
    use crate::virtio::testing::memory;

    fn config(queue: &Queue) -> VringConfigData {
        VringConfigData {
            queue_max_size: queue.max_size(),
            queue_size: queue.size(),
            desc_table_addr: queue.desc_table(),
            avail_ring_addr: queue.avail_ring(),
            used_ring_addr: queue.used_ring(),
            flags: 0,
            log_addr: None,
        }
    }

    #[test]
    fn rings_may_end_with_memory_but_not_after_it() {
        let memory = memory();
        let file = tempfile::tempfile().unwrap();
        let bound = Bound { file: &file, memory: &memory };
        let good = config(&Driver::new(&memory, 0x1000, 16).queue());
        assert!(bound.is_valid(&good));
        let last = 0x10_0000 - (6 + 8 * 16);
        assert!(bound.is_valid(&VringConfigData { used_ring_addr: last, ..good }));
        assert!(!bound.is_valid(&VringConfigData { used_ring_addr: last + 4, ..good }));
        assert!(!bound.is_valid(&VringConfigData { desc_table_addr: u64::MAX - 15, ..good }));
        assert!(!bound.is_valid(&VringConfigData { queue_size: 0, ..good }));
        assert!(!bound.is_valid(&VringConfigData { queue_size: 32, ..good }));
    }

    #[test]
    fn the_memory_table_names_every_region() {
        let memory = memory();
        let regions = regions(&memory);
        let sizes: Vec<_> = regions.iter().map(|r| (r.guest_phys_addr, r.memory_size)).collect();
        assert_eq!(sizes, [(0, 0x8_0000), (0x8_0000, 0x8_0000)]);
        assert!(regions.iter().all(|r| r.userspace_addr != 0));
    }

    #[test]
    fn a_file_that_is_no_vhost_device_is_named_with_a_remedy() {
        let file = tempfile::tempfile().unwrap();
        let error = Worker::new(file, "/dev/vhost-net").err().unwrap();
        assert_eq!(error.to_string(), "cannot use /dev/vhost-net: VHOST_SET_OWNER failed");
        assert_eq!(error.blame(), Blame::Host);
        assert!(error.help().unwrap().contains("\"vhost\": false"));
    }
}
