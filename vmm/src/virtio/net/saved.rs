//! A network device in a snapshot, and in another program.

use std::io;
use std::os::fd::AsFd;

use super::backend::{self, Backend};
use super::{ActivateError, Active, DeviceState, Net, VhostQueues, tap};
use crate::kept::KeptPart;
use crate::virtio::{VirtioDevice, vhost};

impl Net {
    pub(super) fn stop(&mut self) -> io::Result<()> {
        self.is_held = true;
        self.backend.stop();
        match (&self.backend, &mut self.active) {
            (Backend::Vhost(workers), Some(Active { served: Some(served), .. })) => {
                served.read_positions(workers)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn resume(&mut self) -> Result<(), ActivateError> {
        self.is_held = false;
        match (&self.backend, &self.active) {
            (Backend::Vhost(workers), Some(Active { served: Some(served), .. })) => {
                backend::run(workers, &self.taps, served)
            }
            _ => Ok(()),
        }
    }

    /// Its taps, and whether vhost workers serve them.
    pub(super) fn files(&self) -> io::Result<KeptPart> {
        for (number, tap) in (0..).zip(&self.taps) {
            tap::check_adopted(number, tap.as_fd()).map_err(io::Error::other)?;
        }
        if self.uses_vhost() {
            vhost::open(vhost::NET)?; // as the next program will
        }
        Ok(KeptPart::of(self.taps.iter().map(AsFd::as_fd))?.with_vhost(self.uses_vhost()))
    }

    pub(super) fn state(&self) -> Option<DeviceState> {
        let active = self.active.as_ref()?;
        let mut queues = vec![None; self.queue_sizes.len()];
        let pairs = active.pairs.iter().flat_map(|pair| match pair {
            Some(pair) => [Some(pair.receive.position()), Some(pair.transmit.position(0))],
            None => [None; 2],
        });
        let served = active.served.iter().flat_map(VhostQueues::positions).copied();
        queues.iter_mut().zip(pairs.chain(served)).for_each(|(queue, position)| *queue = position);
        if let Some((index, ring)) = &active.control
            && let Some(queue) = queues.get_mut(*index)
        {
            *queue = Some(ring.position(0));
        }
        Some(DeviceState { queues, queue_pairs: Some(active.used_pairs) })
    }

    pub(super) fn take_state(&mut self, saved: &DeviceState) -> Result<(), ActivateError> {
        let pairs = saved.queue_pairs.unwrap_or(1);
        if !(1..=self.queue_pairs()).contains(&pairs) {
            let source = io::ErrorKind::InvalidInput.into();
            return Err(ActivateError { what: "it has fewer queue pairs", source });
        }
        let used = self.use_pairs(pairs);
        used.map_err(|source| ActivateError { what: "TUNSETQUEUE", source })?;
        self.active.iter_mut().for_each(|active| active.used_pairs = pairs);
        Ok(())
    }
}
