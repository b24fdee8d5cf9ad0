//! A vsock device in a snapshot, and in another program.

use std::io;

use super::{ActivateError, Active, DeviceState, EVENT, Mover, Vsock, run};
use crate::kept::KeptPart;
use crate::virtio::vhost;

impl Vsock {
    pub(super) fn stop(&mut self) -> io::Result<()> {
        self.is_held = true;
        let Mover::Vhost(worker) = &self.mover else { return Ok(()) };
        let _ = worker.set_vsock_running(false); // fails only when it does not run
        let served = self.active.as_mut().and_then(|active| active.served.as_mut());
        served.map_or(Ok(()), |served| served.read_positions(std::slice::from_ref(worker)))
    }

    pub(super) fn resume(&mut self) -> Result<(), ActivateError> {
        self.is_held = false;
        match (&self.mover, &self.active) {
            (Mover::Vhost(worker), Some(Active { served: Some(served), .. })) => {
                served.pair(0).map_or(Ok(()), |_| run(worker))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn files(&self) -> io::Result<KeptPart> {
        match &self.mover {
            Mover::Userspace(muxer) => muxer.sockets.kept(),
            // As the next program will.
            Mover::Vhost(_) => vhost::open(vhost::VSOCK).map(|_| KeptPart::default().with_vhost(true)),
        }
    }

    pub(super) fn state(&self) -> Option<DeviceState> {
        let Active { rings, served, events, .. } = self.active.as_ref()?;
        let mut queues = match (rings, served) {
            (Some((receive, transmit)), _) => vec![Some(receive.position(0)), Some(transmit.position(0))],
            (None, Some(served)) => served.positions().to_vec(),
            (None, None) => Vec::new(),
        };
        queues.resize(EVENT, None);
        queues.push(events.as_ref().map(|ring| ring.position(0)));
        Some(DeviceState::of_queues(queues))
    }
}
