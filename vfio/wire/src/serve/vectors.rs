//! The eventfds that a client connects to the vectors of one kind of interrupt.

use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::message::{IrqAction, IrqData, SetIrqs};

/// The vectors of one kind of interrupt, as many as the device said. They cannot be masked here: a client that masks a
/// vector keeps the event to itself.
#[derive(Debug, Default)]
pub struct Vectors(Vec<Option<OwnedFd>>);

impl Vectors {
    /// So many, none of which is connected.
    #[must_use]
    pub fn new(count: u32) -> Self {
        Self((0..count).map(|_| None).collect())
    }

    /// Does what a client asks for. There are as many `eventfds` as the set names vectors, or none.
    ///
    /// # Errors
    /// `EINVAL` for vectors that there are not, or to mask one.
    pub fn set(&mut self, set: SetIrqs<'_>, eventfds: Vec<OwnedFd>) -> Result<(), Errno> {
        if set.action != IrqAction::Trigger {
            return Err(Errno::INVAL);
        }
        if (set.count, set.data) == (0, IrqData::None) {
            self.clear();
            return Ok(());
        }
        let (start, count) = (usize::try_from(set.start), usize::try_from(set.count));
        let (start, count) = (start.map_err(|_| Errno::INVAL)?, count.map_err(|_| Errno::INVAL)?);
        let vectors = self.0.get_mut(start..).and_then(|from| from.get_mut(..count)).ok_or(Errno::INVAL)?;
        match set.data {
            IrqData::Eventfd => {
                let mut eventfds = eventfds.into_iter();
                vectors.iter_mut().for_each(|vector| *vector = eventfds.next());
            }
            IrqData::None => vectors.iter().for_each(fire),
            IrqData::Bool(flags) => {
                vectors
                    .iter()
                    .zip(flags)
                    .filter(|(_, flag)| **flag != 0)
                    .for_each(|(vector, _)| fire(vector));
            }
        }
        Ok(())
    }

    /// The device raises a vector; nothing happens when it is not connected.
    pub fn fire(&self, vector: u32) {
        usize::try_from(vector).ok().and_then(|vector| self.0.get(vector)).into_iter().for_each(fire);
    }

    /// Disconnects all.
    pub fn clear(&mut self) {
        self.0.fill_with(|| None);
    }
}

fn fire(vector: &Option<OwnedFd>) {
    if let Some(eventfd) = vector {
        // A client could hand us a full pipe, and it must not block who fires. The description is the client's too, which
        // may have changed that since the last time. A full or strange descriptor is its own loss.
        let _ = rustix::io::ioctl_fionbio(eventfd, true);
        let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    const SET: SetIrqs<'_> =
        SetIrqs { index: 2, start: 0, count: 1, action: IrqAction::Trigger, data: IrqData::Eventfd };

    fn event() -> (OwnedFd, OwnedFd) {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        (event.try_clone().unwrap(), event)
    }

    fn fired(event: &OwnedFd) -> bool {
        rustix::io::read(event, &mut [0; 8]).is_ok()
    }

    #[test]
    fn vectors_fire_where_they_are_connected_until_they_are_not() {
        let mut vectors = Vectors::new(3);
        let ((a, theirs_a), (b, theirs_b)) = (event(), event());
        vectors.set(SetIrqs { start: 1, count: 2, ..SET }, vec![theirs_a, theirs_b]).unwrap();
        vectors.fire(0);
        vectors.fire(2);
        vectors.fire(3);
        assert_eq!((fired(&a), fired(&b)), (false, true));
        vectors.set(SetIrqs { count: 3, data: IrqData::Bool(&[1, 1, 0]), ..SET }, vec![]).unwrap();
        assert_eq!((fired(&a), fired(&b)), (true, false));
        vectors.set(SetIrqs { start: 1, count: 1, ..SET }, vec![]).unwrap();
        vectors.set(SetIrqs { count: 3, data: IrqData::None, ..SET }, vec![]).unwrap();
        assert_eq!((fired(&a), fired(&b)), (false, true));
        vectors.set(SetIrqs { count: 0, data: IrqData::None, ..SET }, vec![]).unwrap();
        vectors.fire(2);
        assert!(!fired(&b));
    }

    #[test]
    fn a_full_pipe_does_not_block_who_fires() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let mut vectors = Vectors::new(1);
        vectors.set(SET, vec![writer.try_clone().unwrap()]).unwrap();
        rustix::io::ioctl_fionbio(&writer, false).unwrap();
        (0..100_000).for_each(|_| vectors.fire(0));
    }

    #[test]
    fn vectors_that_there_are_not_and_masks_are_refused() {
        let mut vectors = Vectors::new(3);
        for set in [
            SetIrqs { start: 3, ..SET },
            SetIrqs { start: 2, count: 2, ..SET },
            SetIrqs { action: IrqAction::Mask, ..SET },
        ] {
            assert_eq!(vectors.set(set, vec![]), Err(Errno::INVAL), "{set:?}");
        }
    }
}
