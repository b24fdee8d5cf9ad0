//! A network device in a snapshot.

use std::io;

use super::{ActivateError, DeviceState, Net, VhostQueues};

impl Net {
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
