//! The eventfds that a client connects to the vectors of one kind of interrupt.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use super::signals::Signals;
use crate::message::{IrqAction, IrqData, SetIrqs};

/// The vectors of one kind of interrupt, as many as the device reported. They cannot be masked here: a client that
/// masks a vector does not act on the event.
#[derive(Debug, Default)]
pub struct Vectors {
    eventfds: Vec<Option<Arc<OwnedFd>>>,
    signals: Mutex<Signals>,
}

impl Vectors {
    /// Creates `count` vectors, none of them connected.
    #[must_use]
    pub fn new(count: u32) -> Self {
        Self { eventfds: (0..count).map(|_| None).collect(), signals: Mutex::default() }
    }

    /// Carries out a client's request. There are as many `eventfds` as the set names vectors, or none.
    ///
    /// # Errors
    /// `EINVAL` for vectors that do not exist, or to mask one.
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
        let vectors =
            self.eventfds.get_mut(start..).and_then(|from| from.get_mut(..count)).ok_or(Errno::INVAL)?;
        match set.data {
            IrqData::Eventfd => {
                let mut eventfds = eventfds.into_iter().map(Arc::new);
                vectors.iter_mut().for_each(|vector| *vector = eventfds.next());
            }
            IrqData::None => self.signal(vectors_from(start, count)),
            IrqData::Bool(flags) => {
                let flagged = vectors_from(start, count).zip(flags).filter(|(_, flag)| **flag != 0);
                self.signal(flagged.map(|(vector, _)| vector));
            }
        }
        Ok(())
    }

    /// The device raises a vector; nothing happens when it is not connected.
    pub fn fire(&self, vector: u32) {
        self.signal(usize::try_from(vector).into_iter());
    }

    fn signal(&self, vectors: impl Iterator<Item = usize>) {
        let mut signals = self.signals.lock().unwrap_or_else(PoisonError::into_inner);
        let connected = vectors.filter_map(|vector| self.eventfds.get(vector)?.as_ref());
        connected.for_each(|eventfd| signals.write(eventfd));
    }

    /// Disconnects all vectors and drops their eventfds.
    pub fn clear(&mut self) {
        self.eventfds.fill_with(|| None);
    }
}

fn vectors_from(start: usize, count: usize) -> std::ops::Range<usize> {
    start..start.saturating_add(count)
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
    fn a_client_that_makes_writes_wait_does_not_hold_up_the_caller() {
        use std::sync::atomic::{AtomicBool, Ordering};

        // A pipe without room is what an eventfd with a full counter is.
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let mut vectors = Vectors::new(1);
        vectors.set(SET, vec![writer.try_clone().unwrap()]).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    rustix::io::ioctl_fionbio(&writer, false).unwrap();
                }
            });
            (0..20_000).for_each(|_| vectors.fire(0));
            done.store(true, Ordering::Relaxed);
        });
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
