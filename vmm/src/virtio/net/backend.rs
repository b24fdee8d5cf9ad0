//! The packet path of a network device, and the switching of kernel workers.

use std::fs::File;
use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use vmm_sys_util::eventfd::EventFd;

use super::spec;
use crate::virtio::ActivateError;
use crate::virtio::Activation;
use crate::virtio::Interrupt;
use crate::virtio::vhost::VhostError;
use crate::virtio::vhost::VhostQueues;
use crate::virtio::vhost::Vring;
use crate::virtio::vhost::Worker;

/// Implementation of the packet path.
pub enum Backend {
    /// This process, by readv(2) and writev(2) on the tap.
    Userspace,
    /// The kernel: one worker a queue pair.
    Vhost(Vec<Worker>),
}

impl Backend {
    /// Claims open descriptors of `/dev/vhost-net`, one a queue pair.
    ///
    /// # Errors
    /// [`VhostError::Setup`].
    pub fn vhost(files: Vec<File>) -> Result<Self, VhostError> {
        files
            .into_iter()
            .map(|file| Worker::new(file, "/dev/vhost-net"))
            .collect::<Result<_, _>>()
            .map(Self::Vhost)
    }

    /// Features that the device may offer; all that a worker has no part in are among them.
    pub(super) fn features(&self) -> u64 {
        match self {
            Self::Userspace => u64::MAX,
            Self::Vhost(workers) => workers
                .iter()
                .fold(u64::MAX, |all, worker| all & (!spec::SERVED_BY_VHOST | worker.features())),
        }
    }

    /// Queue `index` has another vector.
    pub(super) fn vector_changed(&self, index: u16, interrupt: &dyn Interrupt) -> Result<(), ActivateError> {
        let Self::Vhost(workers) = self else { return Ok(()) };
        let queue = usize::from(index);
        // A control queue may be taken for the first ring of a pair that rests, which does no harm.
        workers.get(queue / 2).map_or(Ok(()), |worker| worker.set_call(queue % 2, index, interrupt))
    }

    /// Stops workers: they touch guest memory no more when this returns.
    pub(super) fn stop(&self) {
        if let Self::Vhost(workers) = self {
            for worker in workers {
                // Fails only for a ring that was never set up, which the kernel does not serve.
                let _ = worker.set_net_backend(0, None);
                let _ = worker.set_net_backend(1, None);
            }
        }
    }
}

/// Prepares a worker for each pair of queues that the driver enabled: [`run`] starts them.
pub(super) fn start(
    workers: &[Worker],
    kicks: &[Arc<EventFd>],
    activation: &Activation,
) -> Result<(), ActivateError> {
    let features = (activation.features & spec::SERVED_BY_VHOST) | (1 << VIRTIO_F_VERSION_1);
    for (pair, worker) in workers.iter().enumerate() {
        let vring = |index: usize| {
            let queue = activation.queues.get(index)?.as_ref()?;
            Some(Vring { index: u16::try_from(index).ok()?, queue, kick: kicks.get(index)? })
        };
        let (Some(receive), Some(transmit)) = (vring(2 * pair), vring(2 * pair + 1)) else { continue };
        worker.start(&activation.memory, features, &[receive, transmit], &*activation.interrupt)?;
    }
    Ok(())
}

/// Starts the workers of `queues`, each between its rings and its tap. On error some may run: see [`Backend::stop`].
pub(super) fn run(workers: &[Worker], taps: &[File], queues: &VhostQueues) -> Result<(), ActivateError> {
    let pairs = workers.iter().zip(taps).enumerate().filter(|(pair, _)| queues.pair(*pair).is_some());
    let start = |(_, (worker, tap)): (usize, (&Worker, &File))| {
        (0..2).try_for_each(|ring| worker.set_net_backend(ring, Some(tap)))
    };
    // Each one is started, whatever the others do.
    let started: Vec<io::Result<()>> = pairs.map(start).collect();
    let started = started.into_iter().collect::<io::Result<()>>();
    started.map_err(|source| ActivateError { what: "VHOST_NET_SET_BACKEND", source })
}
