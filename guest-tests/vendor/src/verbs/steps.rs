//! The two ends of a connection, and a queue pair's attributes for each step from *reset* to *ready to send*.

use crate::verbs::abi::{AhAttr, QpAttr};
use crate::verbs::memory::Access;
use crate::verbs::{Gid, Mtu, Port};

/// Numbers of queue pairs and of packets have 24 bits.
pub(crate) const MASK_24: u32 = 0xff_ffff;
/// 4.096 µs times two to this power, half a second: an emulated guest is slow.
const TIMEOUT: u8 = 17;
/// As often as there is; for a receiver that is not ready, for ever.
const RETRIES: u8 = 7;
/// 0.64 ms until a receiver is tried again.
const NOT_READY: u8 = 12;

/// One end of a connection, as it describes itself to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Of its queue pair, 24 bits.
    pub number: u32,
    /// Sequence number of its first packet, 24 bits.
    pub psn: u32,
    /// Its port's; 0 on Ethernet.
    pub lid: u16,
    /// GID of its port, in network byte order.
    pub gid: [u8; 16],
    /// Largest packet that its port takes.
    pub mtu: Mtu,
}

/// Local port and address of a connection, and how many reads and atomics it may have in flight.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct LocalPort {
    pub port: Port,
    pub gid: Gid,
    /// Reads and atomics of the other side that are served at once.
    pub max_dest_rd_atomic: u8,
    /// Reads and atomics of this side at once.
    pub max_rd_atomic: u8,
}

pub(crate) fn init(place: &LocalPort) -> QpAttr {
    QpAttr {
        qp_state: 1,
        port_num: place.port.number,
        qp_access_flags: Access::ALL.number(),
        ..QpAttr::default()
    }
}

pub(crate) fn ready_to_receive(place: &LocalPort, ours: &Endpoint, theirs: &Endpoint) -> QpAttr {
    let mut words = [0; 2];
    for (word, part) in words.iter_mut().zip(theirs.gid.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*part);
    }
    QpAttr {
        qp_state: 2,
        path_mtu: ours.mtu.min(theirs.mtu).number(),
        dest_qp_num: theirs.number & MASK_24,
        rq_psn: theirs.psn & MASK_24,
        max_dest_rd_atomic: place.max_dest_rd_atomic,
        min_rnr_timer: NOT_READY,
        ah_attr: AhAttr {
            dgid: words,
            sgid_index: place.gid.index,
            hop_limit: 64,
            dlid: theirs.lid,
            // InfiniBand has a way by the subnet's numbers alone, which needs no router.
            is_global: u8::from(place.port.ethernet || theirs.lid == 0),
            port_num: place.port.number,
            ..AhAttr::default()
        },
        ..QpAttr::default()
    }
}

pub(crate) fn ready_to_send(place: &LocalPort, ours: &Endpoint) -> QpAttr {
    QpAttr {
        qp_state: 3,
        sq_psn: ours.psn & MASK_24,
        max_rd_atomic: place.max_rd_atomic,
        timeout: TIMEOUT,
        retry_cnt: RETRIES,
        rnr_retry: RETRIES,
        ..QpAttr::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: Port =
        Port { number: 1, active: true, mtu: Mtu::B1024, largest_message: 1 << 20, lid: 0, ethernet: true };

    fn place() -> LocalPort {
        let kind = crate::verbs::GidKind::RoceV2;
        let gid = Gid { bytes: [7; 16], index: 3, port: 1, kind, interface: 2 };
        LocalPort { port: PORT, gid, max_dest_rd_atomic: 4, max_rd_atomic: 2 }
    }

    #[test]
    fn the_smaller_packet_of_both_ends_is_used_and_hostile_numbers_are_cut_to_24_bits() {
        let ours = Endpoint { number: 1, psn: 2, lid: 0, gid: [7; 16], mtu: Mtu::B1024 };
        let theirs = Endpoint { number: u32::MAX, psn: u32::MAX, lid: 0, gid: [9; 16], mtu: Mtu::B256 };
        let ready = ready_to_receive(&place(), &ours, &theirs);
        assert_eq!(ready.path_mtu, Mtu::B256.number());
        assert_eq!((ready.dest_qp_num, ready.rq_psn), (0xff_ffff, 0xff_ffff));
        assert_eq!((ready.ah_attr.is_global, ready.ah_attr.sgid_index), (1, 3));
        assert_eq!(ready.ah_attr.dgid, [u64::from_ne_bytes([9; 8]); 2]);
        assert_eq!(ready_to_send(&place(), &ours).sq_psn, 2);
        assert_eq!(init(&place()).qp_access_flags, 0b1111);
    }

    #[test]
    fn infiniband_within_a_subnet_needs_no_global_address() {
        let mut place = place();
        place.port.ethernet = false;
        let end = Endpoint { number: 1, psn: 2, lid: 5, gid: [7; 16], mtu: Mtu::B4096 };
        assert_eq!(ready_to_receive(&place, &end, &end).ah_attr.is_global, 0);
    }
}
