//! A network device in a snapshot.

use std::io;

use super::backend::{self, Backend};
use super::{ActivateError, Active, DeviceState, Net, Served};

impl Net {
    /// Stops the workers, and reads their positions.
    pub(super) fn stop(&mut self) -> io::Result<()> {
        self.backend.stop();
        match (&self.backend, &mut self.active) {
            (Backend::Vhost(workers), Some(Active { served: Some(served), .. })) => served.stopped(workers),
            _ => Ok(()),
        }
    }

    /// Lets the workers go on, with a kick for what the driver has offered meanwhile.
    pub(super) fn resume(&self) -> Result<(), ActivateError> {
        let (Backend::Vhost(workers), Some(Active { served: Some(served), .. })) =
            (&self.backend, &self.active)
        else {
            return Ok(());
        };
        for (pair, (worker, tap)) in workers.iter().zip(&self.taps).enumerate() {
            if served.of(pair).is_some() {
                backend::run(worker, tap)?;
            }
        }
        self.kicks.iter().for_each(|kick| drop(kick.write(1))); // full is as good as written
        Ok(())
    }

    pub(super) fn state(&self) -> Option<DeviceState> {
        let active = self.active.as_ref()?;
        let mut queues = vec![None; self.queue_sizes.len()];
        let pairs = active.pairs.iter().flat_map(|pair| match pair {
            Some(pair) => [Some(pair.receive.position()), Some(pair.transmit.position(0))],
            None => [None; 2],
        });
        let served = active.served.iter().flat_map(Served::positions).copied();
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
