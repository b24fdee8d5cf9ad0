//! Attributes that a device reports, as bounded numbers and enums.

use std::net::Ipv6Addr;

use crate::verbs::abi::{DeviceAttrEx, PortAttr};

/// Capabilities and limits of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abilities {
    /// Firmware, as the driver prints it.
    pub firmware: String,
    /// The vendor's number, per IEEE (`vendor_id` of ibv_query_device(3)).
    pub vendor: u32,
    /// PCI device, or the driver's own number.
    pub part: u32,
    /// Ports, from number 1.
    pub ports: u8,
    /// Largest memory region in bytes.
    pub largest_region: u64,
    /// Requests that one queue holds, at least 1.
    pub max_qp_wr: u32,
    /// Completions that one queue holds, at least 1.
    pub max_cqe: u32,
    /// Reads and atomics that a queue pair serves at once, at least 1.
    pub max_dest_rd_atomic: u8,
    /// Reads and atomics that a queue pair has under way at once, at least 1.
    pub max_rd_atomic: u8,
    /// Scope within which its atomics are atomic.
    pub atomics: Atomics,
    /// On-demand paging on reliable connections.
    pub odp: Odp,
}

/// Scope of atomics (`enum ibv_atomic_cap`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Atomics {
    /// No atomics (`IBV_ATOMIC_NONE`), or a value that is not known.
    None,
    /// Among queue pairs of the device.
    Device,
    /// Also against processors (`IBV_ATOMIC_GLOB`).
    Global,
}

/// On-demand paging that the device supports on reliable connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Odp {
    /// Regions of any memory.
    pub explicit: bool,
    /// One region for all of the address space.
    pub implicit: bool,
    /// Send operations on such memory (`IBV_ODP_SUPPORT_SEND`).
    pub send: bool,
    /// Receive operations on such memory (`IBV_ODP_SUPPORT_RECV`).
    pub receive: bool,
    /// RDMA writes of such memory (`IBV_ODP_SUPPORT_WRITE`).
    pub write: bool,
    /// RDMA reads of such memory (`IBV_ODP_SUPPORT_READ`).
    pub read: bool,
    /// Atomic operations on such memory (`IBV_ODP_SUPPORT_ATOMIC`).
    pub atomic: bool,
}

impl Odp {
    /// Names of the capabilities that data checks use and the device lacks; empty if it has all.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        let all = [
            (self.explicit, "regions"),
            (self.send, "send"),
            (self.receive, "receive"),
            (self.write, "write"),
            (self.read, "read"),
        ];
        all.into_iter().filter(|(there, _)| !there).map(|(_, name)| name).collect()
    }
}

impl Abilities {
    pub(crate) fn from_attr(firmware: String, extended: &DeviceAttrEx) -> Self {
        let attr = &extended.orig;
        let positive = |number: i32| u32::try_from(number).unwrap_or(0).clamp(1, 1 << 20);
        let few = |number: i32| u8::try_from(number.clamp(1, 255)).unwrap_or(1);
        let has = |word: u32, bit: u32| word & (1 << bit) != 0;
        let (general, rc) = (extended.odp.general, extended.odp.rc);
        Self {
            firmware,
            vendor: attr.vendor_id,
            part: attr.vendor_part_id,
            ports: attr.phys_port_cnt,
            largest_region: attr.max_mr_size,
            max_qp_wr: positive(attr.max_qp_wr),
            max_cqe: positive(attr.max_cqe),
            max_dest_rd_atomic: few(attr.max_qp_rd_atom),
            max_rd_atomic: few(attr.max_qp_init_rd_atom),
            atomics: match attr.atomic_cap {
                1 => Atomics::Device,
                2 => Atomics::Global,
                _ => Atomics::None,
            },
            odp: Odp {
                explicit: general & 1 != 0,
                implicit: general & 2 != 0,
                send: has(rc, 0),
                receive: has(rc, 1),
                write: has(rc, 2),
                read: has(rc, 3),
                atomic: has(rc, 4),
            },
        }
    }
}

/// Attributes of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// Number of the port, from 1.
    pub number: u8,
    /// Whether it is up (`IBV_PORT_ACTIVE`).
    pub active: bool,
    /// Bytes of a packet.
    pub mtu: Mtu,
    /// Largest message in bytes, at least 4096.
    pub largest_message: u32,
    /// The subnet manager's number; 0 on Ethernet.
    pub lid: u16,
    /// Ethernet rather than InfiniBand.
    pub ethernet: bool,
}

impl Port {
    pub(crate) fn from_attr(number: u8, attr: &PortAttr) -> Self {
        Self {
            number,
            active: attr.state == 4,
            mtu: Mtu::from_number(attr.active_mtu),
            largest_message: attr.max_msg_sz.max(4096),
            lid: attr.lid,
            ethernet: attr.link_layer == 2,
        }
    }
}

/// Bytes of a packet (`enum ibv_mtu`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mtu {
    /// At most 256 bytes (`IBV_MTU_256`); stands for unknown numbers, too.
    B256 = 1,
    /// At most 512 bytes (`IBV_MTU_512`).
    B512 = 2,
    /// At most 1024 bytes (`IBV_MTU_1024`).
    B1024 = 3,
    /// At most 2048 bytes (`IBV_MTU_2048`).
    B2048 = 4,
    /// At most 4096 bytes (`IBV_MTU_4096`).
    B4096 = 5,
}

impl Mtu {
    /// By C's number; one that is not known is the smallest.
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        match number {
            2 => Self::B512,
            3 => Self::B1024,
            4 => Self::B2048,
            5 => Self::B4096,
            _ => Self::B256,
        }
    }

    /// Largest payload of a packet, in bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        128 << self.number()
    }

    /// Its number in `enum ibv_mtu`.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// An address of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    /// The address, in network byte order.
    pub bytes: [u8; 16],
    /// Its place in the port's table.
    pub index: u8,
    /// The port, from 1.
    pub port: u8,
    /// Protocol of the address.
    pub kind: GidKind,
    /// Index of the network interface that it came from, 0 without one.
    pub interface: u32,
}

impl Gid {
    /// As an IPv6 address, which its bytes are on Ethernet.
    #[must_use]
    pub fn address(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.bytes)
    }
}

/// Protocol of a GID (`enum ibv_gid_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, or RDMA over Ethernet without IP.
    InfiniBand,
    /// RDMA over Ethernet without IP.
    RoceV1,
    /// RDMA over UDP and IP (`IBV_GID_TYPE_ROCE_V2`).
    RoceV2,
    /// A number that is none of these.
    Other,
}

impl GidKind {
    pub(crate) const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::InfiniBand,
            1 => Self::RoceV1,
            2 => Self::RoceV2,
            _ => Self::Other,
        }
    }
}

/// The GID that reaches farthest from `port`: of an IPv4 address over UDP, then any over UDP that is not link-local, then
/// any over UDP, then the first.
#[must_use]
pub fn best_gid(gids: &[Gid], port: u8) -> Option<Gid> {
    let rank = |gid: &&Gid| {
        let address = gid.address();
        let udp = gid.kind == GidKind::RoceV2;
        match (udp, address.to_ipv4_mapped().is_some(), address.is_unicast_link_local()) {
            (true, true, _) => 0,
            (true, false, false) => 1,
            (true, false, true) => 2,
            _ => 3,
        }
    };
    gids.iter().filter(|gid| gid.port == port && gid.bytes != [0; 16]).min_by_key(rank).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gid(address: &str, index: u8, kind: GidKind) -> Gid {
        let address: Ipv6Addr = address.parse().unwrap();
        Gid { bytes: address.octets(), index, port: 1, kind, interface: 2 }
    }

    #[test]
    fn the_gid_of_an_ipv4_address_over_udp_is_taken_first() {
        let gids = [
            gid("fe80::1", 0, GidKind::RoceV1),
            gid("fe80::1", 1, GidKind::RoceV2),
            gid("::ffff:10.0.0.2", 2, GidKind::RoceV1),
            gid("::ffff:10.0.0.2", 3, GidKind::RoceV2),
        ];
        assert_eq!(best_gid(&gids, 1).unwrap().index, 3);
        assert_eq!(best_gid(&gids[..2], 1).unwrap().index, 1);
        assert_eq!(best_gid(&gids[..1], 1).unwrap().index, 0);
        assert_eq!(best_gid(&gids, 2), None);
        assert_eq!(best_gid(&[gid("::", 0, GidKind::RoceV2)], 1), None);
    }

    #[test]
    fn an_mtu_is_its_bytes() {
        assert_eq!([1, 2, 3, 4, 5].map(|n| Mtu::from_number(n).bytes()), [256, 512, 1024, 2048, 4096]);
        assert_eq!(Mtu::from_number(77), Mtu::B256);
    }

    #[test]
    fn what_is_missing_of_paging_is_named() {
        let all =
            Odp { explicit: true, send: true, receive: true, write: true, read: true, ..Odp::default() };
        assert!(all.missing().is_empty());
        assert_eq!(Odp { read: false, ..all }.missing(), ["read"]);
    }

    proptest! {
        #[test]
        fn numbers_of_a_device_become_numbers_that_can_be(words in prop::array::uniform32(any::<i32>())) {
            let mut attr = DeviceAttrEx {
                orig: zeroed(), comp_mask: 0, odp: crate::verbs::abi::OdpCaps { general: 0, rc: 0, uc: 0, ud: 0 }, rest: [0; 17],
            };
            attr.orig.max_qp_wr = words[0];
            attr.orig.max_cqe = words[1];
            attr.orig.max_qp_rd_atom = words[2];
            attr.orig.max_qp_init_rd_atom = words[3];
            attr.orig.atomic_cap = words[4].cast_unsigned();
            let abilities = Abilities::from_attr(String::new(), &attr);
            prop_assert!((1..=1 << 20).contains(&abilities.max_qp_wr));
            prop_assert!((1..=1 << 20).contains(&abilities.max_cqe));
            prop_assert!(abilities.max_dest_rd_atomic >= 1 && abilities.max_rd_atomic >= 1);
        }
    }

    fn zeroed() -> crate::verbs::abi::DeviceAttr {
        crate::verbs::abi::DeviceAttr {
            fw_ver: [0; 64],
            node_guid: 0,
            sys_image_guid: 0,
            max_mr_size: 0,
            page_size_cap: 0,
            vendor_id: 0,
            vendor_part_id: 0,
            hw_ver: 0,
            max_qp: 0,
            max_qp_wr: 0,
            device_cap_flags: 0,
            max_sge: 0,
            max_sge_rd: 0,
            max_cq: 0,
            max_cqe: 0,
            max_mr: 0,
            max_pd: 0,
            max_qp_rd_atom: 0,
            max_ee_rd_atom: 0,
            max_res_rd_atom: 0,
            max_qp_init_rd_atom: 0,
            max_ee_init_rd_atom: 0,
            atomic_cap: 0,
            max_ee: 0,
            max_rdd: 0,
            max_mw: 0,
            max_raw_ipv6_qp: 0,
            max_raw_ethy_qp: 0,
            max_mcast_grp: 0,
            max_mcast_qp_attach: 0,
            max_total_mcast_qp_attach: 0,
            max_ah: 0,
            max_fmr: 0,
            max_map_per_fmr: 0,
            max_srq: 0,
            max_srq_wr: 0,
            max_srq_sge: 0,
            max_pkeys: 0,
            local_ca_ack_delay: 0,
            phys_port_cnt: 0,
        }
    }
}
