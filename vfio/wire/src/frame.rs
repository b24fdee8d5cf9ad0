//! Bytes to frames and back: the header that precedes every message (QEMU docs/interop/vfio-user.rst, "Header").
//!
//! ```text
//!  0        2        4                 8                 12                16
//!  ├ id ────┼ command┼ size, all of it ┼ flags           ┼ error           ┼ body …
//!                                        0-3 type: 0 command, 1 reply
//!                                        4 no reply    5 error
//! ```
//! Numbers are in the host's byte order, which is little-endian on every machine that we run on.

/// Most descriptors in one message: the kernel's own limit (SCM_MAX_FD).
pub(crate) const MOST_FDS: usize = 253;

/// Bytes of a header.
pub const HEADER: u32 = 16;

const TYPE: u32 = 0xf;
const COMMAND: u32 = 0;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// Error in a message's header. The next message cannot be found, so the connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The size does not cover the header.
    #[error("a message of {size:#x} bytes is shorter than its header of {HEADER:#x}")]
    TooShort {
        /// As the peer wrote it.
        size: u32,
    },
    /// More than was agreed on.
    #[error("a message of {size:#x} bytes is longer than the agreed {most:#x}")]
    TooLong {
        /// As the peer wrote it.
        size: u32,
        /// Most bytes of a message.
        most: u32,
    },
    /// Neither a command nor a reply, or flags that its type does not have.
    #[error("flags {flags:#x} are neither a command's (0x0, 0x10) nor a reply's (0x1, 0x21)")]
    Flags {
        /// As the peer wrote them.
        flags: u32,
    },
}

/// Kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A request, message type 0.
    Command {
        /// Whether the sender waits for no reply.
        no_reply: bool,
    },
    /// The answer to the command with the same id.
    Reply {
        /// `None` when the command was carried out; else the peer's errno, 0 when it gives none.
        error: Option<u32>,
    },
}

/// The header of a message, its size left out: that is the body's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Chosen by the sender of the command; it may be in use already, and proves nothing.
    pub id: u16,
    /// Command number, known or not.
    pub command: u16,
    /// Type of the message, from its flags.
    pub kind: Kind,
}

/// A whole message: its header and its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The first [`HEADER`] bytes, decoded.
    pub header: Header,
    /// Bytes after the header: at most the agreed size less [`HEADER`].
    pub body: &'a [u8],
}

impl Header {
    /// The header in `bytes` and how many bytes of body follow it. `most` is the largest size of a message, header
    /// included.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8; HEADER as usize], most: u32) -> Result<(Self, usize), Malformed> {
        let [i0, i1, c0, c1, s0, s1, s2, s3, f0, f1, f2, f3, e0, e1, e2, e3] = *bytes;
        let size = u32::from_le_bytes([s0, s1, s2, s3]);
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        let length = size.checked_sub(HEADER).ok_or(Malformed::TooShort { size })?;
        if size > most && !egm_address::fault!("length-of-a-message-unchecked") {
            return Err(Malformed::TooLong { size, most });
        }
        let kind = match (flags & TYPE, flags & !TYPE) {
            (COMMAND, rest @ (0 | NO_REPLY)) => Kind::Command { no_reply: rest != 0 },
            (REPLY, 0) => Kind::Reply { error: None },
            (REPLY, ERROR) => Kind::Reply { error: Some(u32::from_le_bytes([e0, e1, e2, e3])) },
            _ => return Err(Malformed::Flags { flags }),
        };
        let header = Self { id: u16::from_le_bytes([i0, i1]), command: u16::from_le_bytes([c0, c1]), kind };
        Ok((header, usize::try_from(length).unwrap_or(usize::MAX)))
    }

    /// The header of a message with `body` bytes after it.
    ///
    /// # Errors
    /// [`Malformed::TooLong`] when the message has more than `most` bytes: our own mistake, found before the peer
    /// finds it.
    pub fn encode(&self, body: usize, most: u32) -> Result<[u8; HEADER as usize], Malformed> {
        let size = u32::try_from(body).unwrap_or(u32::MAX).saturating_add(HEADER);
        if size > most {
            return Err(Malformed::TooLong { size, most });
        }
        let (flags, error) = match self.kind {
            Kind::Command { no_reply } => (COMMAND | if no_reply { NO_REPLY } else { 0 }, 0),
            Kind::Reply { error: None } => (REPLY, 0),
            Kind::Reply { error: Some(error) } => (REPLY | ERROR, error),
        };
        let ([i0, i1], [c0, c1]) = (self.id.to_le_bytes(), self.command.to_le_bytes());
        let [s0, s1, s2, s3] = size.to_le_bytes();
        let [f0, f1, f2, f3] = u32::to_le_bytes(flags);
        let [e0, e1, e2, e3] = error.to_le_bytes();
        Ok([i0, i1, c0, c1, s0, s1, s2, s3, f0, f1, f2, f3, e0, e1, e2, e3])
    }
}

/// The first frame of `bytes` and what follows it, or `None` while it is not all there. `most` is the largest size of
/// a message, header included. A header that is wrong is refused before its body has come.
///
/// # Errors
/// [`Malformed`].
pub fn split(bytes: &[u8], most: u32) -> Result<Option<(Frame<'_>, &[u8])>, Malformed> {
    let Some((header, after)) = bytes.split_first_chunk() else { return Ok(None) };
    let (header, length) = Header::decode(header, most)?;
    Ok(after.split_at_checked(length).map(|(body, rest)| (Frame { header, body }, rest)))
}

impl Frame<'_> {
    /// The message as bytes.
    ///
    /// # Errors
    /// As [`Header::encode`].
    pub fn encode(&self, most: u32) -> Result<Vec<u8>, Malformed> {
        let header = self.header.encode(self.body.len(), most)?;
        Ok([&header, self.body].concat())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MOST: u32 = 4096;

    fn header(size: u32, flags: u32) -> Vec<u8> {
        let words = [0x0003_0102, size, flags, 22].into_iter().flat_map(u32::to_le_bytes);
        words.collect()
    }

    #[test]
    fn a_header_is_laid_out_as_documented() {
        let kind = Kind::Reply { error: Some(22) };
        let frame = Frame { header: Header { id: 0x0102, command: 3, kind }, body: &[] };
        assert_eq!(split(&header(16, 0x21), MOST), Ok(Some((frame, &[][..]))));
        assert_eq!(frame.encode(MOST).unwrap(), header(16, 0x21));
    }

    #[test]
    fn a_size_below_the_header_or_above_the_agreed_one_is_refused_before_the_body() {
        assert_eq!(split(&header(15, 0), MOST), Err(Malformed::TooShort { size: 15 }));
        assert_eq!(split(&header(4096, 0), MOST), Ok(None));
        assert_eq!(split(&header(4097, 0), MOST), Err(Malformed::TooLong { size: 4097, most: MOST }));
        assert_eq!(split(&header(u32::MAX, 0), u32::MAX), Ok(None));
    }

    #[test]
    fn only_four_values_of_the_flags_have_a_meaning() {
        let good = |flags: &u32| split(&header(16, *flags), MOST).is_ok();
        let bits = (0..32).map(|bit| 1 << bit);
        assert_eq!((0..256).chain(bits).filter(good).collect::<Vec<u32>>(), [0, 1, 0x10, 0x21, 1, 0x10]);
    }

    #[test]
    fn a_message_may_have_the_agreed_size_and_no_byte_more() {
        let header = Header { id: 1, command: 9, kind: Kind::Command { no_reply: false } };
        let sized =
            |body: usize| Frame { header, body: &vec![7; body] }.encode(MOST).map(|bytes| bytes.len());
        assert_eq!(sized(4080), Ok(4096));
        assert_eq!(sized(4081), Err(Malformed::TooLong { size: 4097, most: MOST }));
    }

    /// 82 sizes, 49 lengths and six limits: 24,108 cases.
    #[test]
    fn every_small_size_field_yields_exactly_its_bytes_or_is_refused() {
        let body: Vec<u8> = (0..32).collect();
        for size in (0..=80).chain([u32::MAX]) {
            let message = [header(size, 0), body.clone()].concat();
            for most in [0, 15, 16, 32, 48, u32::MAX] {
                for length in 0..=message.len() {
                    let (got, bytes) = (split(&message[..length], most), &message[..length]);
                    let end = usize::try_from(size).unwrap();
                    let whole = length >= 16 && size >= 16 && size <= most && length >= end;
                    match got {
                        Ok(Some((frame, rest))) => {
                            assert!(whole, "size {size}, most {most}, {length} bytes");
                            assert_eq!((frame.body, rest), (&bytes[16..end], &bytes[end..]));
                        }
                        Ok(None) => assert!(length < 16 || (16..=most).contains(&size) && length < end),
                        Err(Malformed::TooShort { size: named }) => {
                            assert!(length >= 16 && size < 16 && named == size);
                        }
                        Err(Malformed::TooLong { .. }) => assert!(length >= 16 && size >= 16 && size > most),
                        Err(Malformed::Flags { .. }) => panic!("flags 0 are a command's"),
                    }
                }
            }
        }
    }

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![
            any::<bool>().prop_map(|no_reply| Kind::Command { no_reply }),
            any::<Option<u32>>().prop_map(|error| Kind::Reply { error }),
        ]
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_and_a_rest_or_refused_or_not_yet_all_there(
            bytes in prop::collection::vec(prop_oneof![Just(0_u8), 0..34_u8, any::<u8>()], 0..64), most in 0..64_u32
        ) {
            if let Ok(Some((frame, rest))) = split(&bytes, most) {
                prop_assert_eq!(16 + frame.body.len() + rest.len(), bytes.len());
                prop_assert!(16 + frame.body.len() <= most as usize);
                prop_assert!(bytes[16..].starts_with(frame.body) && bytes.ends_with(rest));
            }
        }

        #[test]
        fn what_was_encoded_is_read_back_and_only_when_all_of_it_is_there(
            id: u16, command: u16, kind in kind(), body in prop::collection::vec(any::<u8>(), 0..64), next: Vec<u8>
        ) {
            let frame = Frame { header: Header { id, command, kind }, body: &body };
            let mut bytes = frame.encode(MOST).unwrap();
            prop_assert_eq!(split(&bytes[..bytes.len() - 1], MOST), Ok(None));
            bytes.extend(&next);
            prop_assert_eq!(split(&bytes, MOST), Ok(Some((frame, &next[..]))));
            prop_assert!(frame.encode(15).is_err());
        }
    }
}
