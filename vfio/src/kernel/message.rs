//! The argument of a VFIO ioctl: a structure that begins with its total size (32 bits, in bytes), and data after it.

/// Bytes for and from the kernel. The first four always hold their number: the kernel accesses no more than that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message(Vec<u8>);

/// Most bytes that an answer may request: 2048 descriptors, 4096 sparse areas, are far below it.
const MOST: usize = 1 << 20;

impl Message {
    /// A zeroed structure `T` of vfio-bindings, and `tail` bytes after it.
    pub(super) fn of<T>(tail: usize) -> Self {
        let mut message = Self(vec![0; size_of::<T>().saturating_add(tail).clamp(4, MOST)]);
        message.seal();
        message
    }

    /// Bytes that an answer needs; `None` if it has them, or needs too many.
    pub(super) fn bytes_needed(&self) -> Option<usize> {
        let needed = usize::try_from(self.get(0)?).ok()?;
        (needed > self.0.len() && needed <= MOST).then_some(needed)
    }

    /// Resizes the message to `length` bytes in all.
    pub(super) fn resized(mut self, length: usize) -> Self {
        self.0.resize(length.clamp(4, MOST), 0);
        self
    }

    /// Writes the size again, which an answer may have changed, and returns the bytes for the kernel.
    pub(super) fn seal(&mut self) -> &mut [u8] {
        let length = u32::try_from(self.0.len()).unwrap_or(0); // at most MOST
        if let Some(size) = self.0.first_chunk_mut() {
            *size = length.to_ne_bytes();
        }
        &mut self.0
    }

    /// With the 32-bit field at `offset` set.
    pub(super) fn with(mut self, offset: usize, value: u32) -> Self {
        self.put(offset, &value.to_ne_bytes());
        self
    }

    /// With the 64-bit field at `offset` set.
    pub(super) fn with_long(mut self, offset: usize, value: u64) -> Self {
        self.put(offset, &value.to_ne_bytes());
        self
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        if let Some(place) = self.0.get_mut(offset..).and_then(|rest| rest.get_mut(..bytes.len())) {
            place.copy_from_slice(bytes);
        }
    }

    /// The 16-bit field at `offset`.
    pub(super) fn get_short(&self, offset: usize) -> Option<u16> {
        self.0.get(offset..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
    }

    /// The 32-bit field at `offset`.
    pub(super) fn get(&self, offset: usize) -> Option<u32> {
        self.0.get(offset..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
    }

    /// The 64-bit field at `offset`.
    pub(super) fn get_long(&self, offset: usize) -> Option<u64> {
        self.0.get(offset..)?.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_is_the_number_of_bytes_whatever_an_answer_wrote_there() {
        let mut message = Message::of::<[u32; 4]>(8).with(4, 0xdead).with_long(16, 1 << 40);
        assert_eq!(message.get(0), Some(24));
        message = message.with(0, 64);
        assert_eq!(message.bytes_needed(), Some(64));
        message.seal();
        assert_eq!((message.get(0), message.bytes_needed()), (Some(24), None));
        assert_eq!((message.get(4), message.get_long(16)), (Some(0xdead), Some(1 << 40)));
    }

    #[test]
    fn fields_outside_are_not_there_and_absurd_sizes_are_refused() {
        let message = Message::of::<[u32; 2]>(0).with(8, 1).with(6, 1);
        assert_eq!(message, Message::of::<[u32; 2]>(0));
        assert_eq!((message.get(5), message.get_long(4), message.get(usize::MAX)), (None, None, None));
        assert_eq!(message.with(0, u32::MAX).bytes_needed(), None);
    }
}
