//! The packet header of virtio 1.3 §5.10.6, as the guest alleges it and as the host writes it. Pure.
//!
//! Payload is not looked at, and may lie in any number of buffers: Linux has sent a packet in several since 6.17.

use zerocopy::FromBytes;
use zerocopy::Immutable;
use zerocopy::IntoBytes;
use zerocopy::KnownLayout;
use zerocopy::little_endian::U16;
use zerocopy::little_endian::U32;
use zerocopy::little_endian::U64;

/// VIRTIO_VSOCK_CID_HOST: the host's context id.
pub(super) const HOST_CID: u64 = 2;
/// Bytes of a header.
pub(super) const HEADER: usize = size_of::<Wire>();
/// VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE: the sender receives no more.
pub(super) const NO_RECEIVE: u32 = 1;
/// VIRTIO_VSOCK_SHUTDOWN_F_SEND: the sender sends no more.
pub(super) const NO_SEND: u32 = 2;

const STREAM: u16 = 1;

/// `struct virtio_vsock_hdr` (virtio 1.3 §5.10.6), without padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Wire {
    src_cid: U64,
    dst_cid: U64,
    src_port: U32,
    dst_port: U32,
    len: U32,
    kind: U16,
    op: U16,
    flags: U32,
    buf_alloc: U32,
    fwd_cnt: U32,
}

const _: () = assert!(HEADER == 44);

/// Purpose of a packet (`VIRTIO_VSOCK_OP_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Op {
    Request = 1,
    Response = 2,
    Reset = 3,
    Shutdown = 4,
    Data = 5,
    CreditUpdate = 6,
    CreditRequest = 7,
}

impl Op {
    fn from_wire(op: u16) -> Option<Self> {
        Some(match op {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }
}

/// The name of a connection: the host's and the guest's context ids are fixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) guest_port: u32,
    pub(super) host_port: u32,
}

/// How much a side can take: its buffer, and what it took out of it so far (virtio 1.3 §5.10.6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Credit {
    /// Bytes of buffer (`buf_alloc`).
    pub(super) buffer: u32,
    /// Bytes taken out of it, modulo 2^32 (`fwd_cnt`).
    pub(super) forwarded: u32,
}

/// A packet from the guest to the host with a stream operation; nothing is known of its connection yet, nor whether
/// its payload is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) key: Key,
    pub(super) op: Op,
    /// Payload bytes that the header alleges; 0 unless it carries data.
    pub(super) length: u32,
    pub(super) flags: u32,
    pub(super) credit: Credit,
}

/// A header that is no [`Packet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Not from this guest to this host, or itself a refusal: there is no peer to answer.
    Drop,
    /// Unknown type or operation: answered by a reset (virtio 1.3 §5.10.6.4.2).
    Reset(Key),
}

impl Packet {
    /// Reads a header that the guest `guest_cid` sent.
    pub(super) fn parse(bytes: &[u8; HEADER], guest_cid: u32) -> Result<Self, Refusal> {
        let wire: Wire = zerocopy::transmute!(*bytes);
        if wire.src_cid != u64::from(guest_cid) || wire.dst_cid != HOST_CID {
            return Err(Refusal::Drop);
        }
        let key = Key { guest_port: wire.src_port.get(), host_port: wire.dst_port.get() };
        let op = Op::from_wire(wire.op.get()).ok_or(Refusal::Reset(key))?;
        if wire.kind != STREAM {
            return Err(if op == Op::Reset { Refusal::Drop } else { Refusal::Reset(key) });
        }
        Ok(Self {
            key,
            op,
            length: if op == Op::Data { wire.len.get() } else { 0 },
            flags: wire.flags.get(),
            credit: Credit { buffer: wire.buf_alloc.get(), forwarded: wire.fwd_cnt.get() },
        })
    }
}

/// A packet from the host to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) op: Op,
    /// Bytes of payload that follow the header.
    pub(super) length: u32,
    pub(super) flags: u32,
    pub(super) credit: Credit,
}

impl Outgoing {
    /// A reset, which belongs to no connection.
    pub(super) const RESET: Self =
        Self { op: Op::Reset, length: 0, flags: 0, credit: Credit { buffer: 0, forwarded: 0 } };

    /// The bytes of the header.
    pub(super) fn header(&self, key: Key, guest_cid: u32) -> [u8; HEADER] {
        zerocopy::transmute!(Wire {
            src_cid: HOST_CID.into(),
            dst_cid: u64::from(guest_cid).into(),
            src_port: key.host_port.into(),
            dst_port: key.guest_port.into(),
            len: self.length.into(),
            kind: STREAM.into(),
            op: (self.op as u16).into(),
            flags: self.flags.into(),
            buf_alloc: self.credit.buffer.into(),
            fwd_cnt: self.credit.forwarded.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A header as a guest writes it, field by field as the specification lists them.
    fn guest_header(cids: [u64; 2], key: Key, len: u32, kind: u16, op: u16) -> [u8; HEADER] {
        let mut bytes = Vec::new();
        bytes.extend(cids[0].to_le_bytes());
        bytes.extend(cids[1].to_le_bytes());
        bytes.extend(key.guest_port.to_le_bytes());
        bytes.extend(key.host_port.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(op.to_le_bytes());
        bytes.extend([3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0]);
        bytes.try_into().unwrap()
    }

    const KEY: Key = Key { guest_port: 1000, host_port: 52 };

    #[test]
    fn a_header_is_read_field_by_field() {
        let packet = Packet::parse(&guest_header([3, 2], KEY, 9, 1, 5), 3).unwrap();
        let credit = Credit { buffer: 4, forwarded: 5 };
        assert_eq!(packet, Packet { key: KEY, op: Op::Data, length: 9, flags: 3, credit });
    }

    #[test]
    fn packets_of_others_are_dropped_and_unknown_ones_reset() {
        assert_eq!(Packet::parse(&guest_header([4, 2], KEY, 0, 1, 1), 3), Err(Refusal::Drop));
        assert_eq!(Packet::parse(&guest_header([3, 1], KEY, 0, 1, 1), 3), Err(Refusal::Drop));
        assert_eq!(Packet::parse(&guest_header([3, 2], KEY, 0, 1, 0), 3), Err(Refusal::Reset(KEY)));
        assert_eq!(Packet::parse(&guest_header([3, 2], KEY, 0, 1, 8), 3), Err(Refusal::Reset(KEY)));
        assert_eq!(Packet::parse(&guest_header([3, 2], KEY, 0, 2, 1), 3), Err(Refusal::Reset(KEY)));
    }

    #[test]
    fn a_reset_is_never_answered_by_a_reset() {
        assert_eq!(Packet::parse(&guest_header([3, 2], KEY, 0, 2, 3), 3), Err(Refusal::Drop));
    }

    #[test]
    fn only_data_has_a_length() {
        assert_eq!(Packet::parse(&guest_header([3, 2], KEY, 9, 1, 4), 3).unwrap().length, 0);
    }

    #[test]
    fn what_is_sent_names_the_host_first() {
        let out = Outgoing { op: Op::Data, length: 9, flags: 3, credit: Credit { buffer: 4, forwarded: 5 } };
        let swapped = Key { guest_port: KEY.host_port, host_port: KEY.guest_port };
        assert_eq!(out.header(KEY, 3), guest_header([2, 3], swapped, 9, 1, 5));
    }

    proptest! {
        #[test]
        fn any_header_is_read_or_refused(bytes in any::<[u8; HEADER]>(), cid in any::<u32>()) {
            let _ = Packet::parse(&bytes, cid);
        }
    }
}
