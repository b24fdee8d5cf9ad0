//! The copy engine, piece by piece. Pure: memory is a trait, and a request to the client is a value.

use egm_vfio_wire::message::{Call, DmaAccess};

/// Bytes of a piece.
const PIECE: u64 = 64 << 10;

/// Memory for the engine's copies.
pub trait Memory {
    /// Number of bytes from `address` on with the same kind of access, and that kind; `None` where the function may not
    /// read, or write.
    fn reach(&self, address: u64, write: bool) -> Option<(u64, Way)>;

    /// Reads bytes that need no request; false on failure.
    fn read(&self, address: u64, data: &mut [u8]) -> bool;

    /// Writes bytes that need no request; false on failure.
    fn write(&self, address: u64, data: &[u8]) -> bool;
}

/// Kind of access to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Directly.
    File,
    /// By a request to the client.
    Client,
}

/// A running copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// Next address to read.
    pub from: u64,
    /// Next address to write.
    pub to: u64,
    /// Bytes left.
    pub left: u64,
    /// A piece that was read and is not yet written.
    piece: Vec<u8>,
    /// Bytes of the client's open request.
    asked: Option<usize>,
}

/// Progress of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// All of it is copied.
    Done,
    /// This address could not be reached.
    Fault(u64),
    /// The copy needs a request to the client: see [`Copy::call`].
    Waits,
}

impl Copy {
    /// A copy that has not begun.
    #[must_use]
    pub fn new(from: u64, to: u64, count: u64) -> Self {
        Self { from, to, left: count, piece: Vec::new(), asked: None }
    }

    /// Goes on as far as it can.
    pub fn run(&mut self, memory: &impl Memory) -> Progress {
        loop {
            if self.left == 0 {
                return Progress::Done;
            }
            let write = !self.piece.is_empty();
            let address = if write { self.to } else { self.from };
            let Some((reach, way)) = memory.reach(address, write).filter(|(reach, _)| *reach > 0) else {
                return Progress::Fault(address);
            };
            if way == Way::Client {
                return Progress::Waits;
            }
            let went = if write {
                let length = usize::try_from(reach).unwrap_or(usize::MAX).min(self.piece.len());
                let went = memory.write(address, &self.piece[..length]);
                self.written(if went { length } else { 0 });
                went
            } else {
                let length = self.left.min(reach).min(PIECE);
                self.piece.resize(usize::try_from(length).unwrap_or_default(), 0);
                memory.read(address, &mut self.piece)
            };
            if !went {
                return Progress::Fault(address);
            }
        }
    }

    /// The request for the client, when [`Copy::run`] waits and none is open yet.
    pub fn call(&mut self, memory: &impl Memory) -> Option<Call<'_>> {
        if self.asked.is_some() || self.left == 0 {
            return None;
        }
        let write = !self.piece.is_empty();
        let address = if write { self.to } else { self.from };
        let (reach, _) = memory.reach(address, write).filter(|(_, way)| *way == Way::Client)?;
        let most =
            if write { self.piece.len() } else { usize::try_from(self.left.min(PIECE)).unwrap_or_default() };
        let length = usize::try_from(reach).unwrap_or(usize::MAX).min(most);
        self.asked = Some(length);
        let access = DmaAccess { address, count: length as u64 };
        Some(if write { Call::Write(access, &self.piece[..length]) } else { Call::Read(access) })
    }

    /// Takes the client's answer: the bytes of a read, none for a write, or a failure.
    ///
    /// # Errors
    /// The address that could not be reached.
    pub fn answered(&mut self, answer: Option<&[u8]>) -> Result<(), u64> {
        // An answer to an abandoned copy does not affect the next one.
        let Some(asked) = self.asked.take() else { return Ok(()) };
        match (answer, self.piece.is_empty()) {
            (Some(bytes), true) => self.piece = bytes.to_vec(),
            (Some(_), false) => self.written(asked),
            (None, read) => return Err(if read { self.from } else { self.to }),
        }
        Ok(())
    }

    fn written(&mut self, length: usize) {
        let bytes = length as u64;
        self.piece.drain(..length);
        self.from = self.from.wrapping_add(bytes);
        self.to = self.to.wrapping_add(bytes);
        self.left = self.left.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::*;

    /// Bytes at 0; the client's from 100 on; `reach` at a time; nothing may be written below 10 or reached from 200 on.
    struct Flat(RefCell<Vec<u8>>, u64);

    impl Memory for Flat {
        fn reach(&self, address: u64, write: bool) -> Option<(u64, Way)> {
            let (end, way) = if address < 100 { (100_u64, Way::File) } else { (200, Way::Client) };
            let left = end.checked_sub(address).filter(|_| !write || address >= 10)?;
            Some((left.min(self.1), way))
        }

        fn read(&self, address: u64, data: &mut [u8]) -> bool {
            data.copy_from_slice(&self.0.borrow()[usize::try_from(address).unwrap()..][..data.len()]);
            true
        }

        fn write(&self, address: u64, data: &[u8]) -> bool {
            self.0.borrow_mut()[usize::try_from(address).unwrap()..][..data.len()].copy_from_slice(data);
            true
        }
    }

    /// Runs a copy with a client that answers by the same memory.
    fn end(mut copy: Copy, memory: &Flat) -> Progress {
        loop {
            match copy.run(memory) {
                Progress::Waits => {}
                other => return other,
            }
            let answer = match copy.call(memory).unwrap() {
                Call::Read(access) => {
                    let mut data = vec![0; usize::try_from(access.count).unwrap()];
                    assert!(memory.read(access.address, &mut data));
                    data
                }
                Call::Write(access, data) => {
                    assert!(memory.write(access.address, data));
                    Vec::new()
                }
            };
            assert_eq!(copy.call(memory), None, "one question at a time");
            copy.answered(Some(&answer)).unwrap();
        }
    }

    #[test]
    fn what_cannot_be_reached_is_named_and_what_came_before_is_copied() {
        let memory = Flat(RefCell::new((0..200).collect()), 16);
        assert_eq!(end(Copy::new(0, 5, 1), &memory), Progress::Fault(5));
        assert_eq!(end(Copy::new(190, 20, 20), &memory), Progress::Fault(200));
        assert_eq!(memory.0.borrow()[20..32], [190, 191, 192, 193, 194, 195, 196, 197, 198, 199, 30, 31]);
        let mut copy = Copy::new(150, 20, 4);
        assert_eq!(copy.run(&memory), Progress::Waits);
        assert!(copy.call(&memory).is_some());
        assert_eq!(copy.answered(None), Err(150));
    }

    proptest! {
        #[test]
        fn a_copy_is_a_copy_however_small_its_pieces(
            from in 0..90_u64, to in 100..190_u64, count in 0..10_u64, back: bool, reach in 1..20_u64
        ) {
            let memory = Flat(RefCell::new((0..200).collect()), reach);
            let (from, to) = if back { (to, from.max(10)) } else { (from, to) };
            prop_assert_eq!(end(Copy::new(from, to, count), &memory), Progress::Done);
            let mut expected: Vec<u8> = (0..200).collect();
            let range = |at: u64| usize::try_from(at).unwrap()..usize::try_from(at + count).unwrap();
            expected.copy_within(range(from), range(to).start);
            prop_assert_eq!(memory.0.into_inner(), expected);
        }
    }
}
