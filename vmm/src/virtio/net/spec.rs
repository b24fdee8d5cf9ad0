//! The network device of virtio 1.3 §5.1: features, configuration space, queue numbers, control commands. Pure.

use virtio_bindings::virtio_net as net;

use crate::virtio::RING_EVENT_IDX;
use crate::virtio::RING_INDIRECT;

/// Device type number (virtio 1.3 §5).
pub(super) const DEVICE_TYPE: u16 = 1;
/// Entries of a receive or transmit queue.
pub(super) const QUEUE_SIZE: u16 = 256;
/// Entries of the control queue.
pub(super) const CONTROL_QUEUE_SIZE: u16 = 64;
/// Largest packet that a tap hands over, header included: 64 KiB of segments to cut, Ethernet, and [`super::tap::HEADER`].
pub(super) const LARGEST_PACKET: u64 = 65562;
/// Room for an ordinary packet and its header (virtio 1.3 §5.1.6.3.1).
pub(super) const ORDINARY_PACKET: u64 = 1526;

const fn bit(feature: u32) -> u64 {
    1 << feature
}

/// VIRTIO_NET_F_MRG_RXBUF: a packet may take several receive buffers.
pub(super) const MERGEABLE: u64 = bit(net::VIRTIO_NET_F_MRG_RXBUF);
/// VIRTIO_NET_F_MQ: more than one queue pair.
pub(super) const MULTIQUEUE: u64 = bit(net::VIRTIO_NET_F_MQ);
/// VIRTIO_NET_F_CTRL_VQ: there is a control queue.
pub(super) const CONTROL: u64 = bit(net::VIRTIO_NET_F_CTRL_VQ);
/// Any of the features by which the guest takes packets larger than its MTU.
pub(super) const GUEST_LARGE: u64 = bit(net::VIRTIO_NET_F_GUEST_TSO4) | bit(net::VIRTIO_NET_F_GUEST_TSO6);
/// Features that vhost-net itself must have for the device to offer them.
pub(super) const SERVED_BY_VHOST: u64 = MERGEABLE | RING_INDIRECT | RING_EVENT_IDX;

/// Features that a device with this many queue pairs offers.
pub(super) fn features(queue_pairs: u16) -> u64 {
    let one = bit(net::VIRTIO_NET_F_MAC)
        | bit(net::VIRTIO_NET_F_STATUS)
        | bit(net::VIRTIO_NET_F_CSUM)
        | bit(net::VIRTIO_NET_F_HOST_TSO4)
        | bit(net::VIRTIO_NET_F_HOST_TSO6)
        | bit(net::VIRTIO_NET_F_GUEST_CSUM)
        | GUEST_LARGE
        | MERGEABLE
        | RING_INDIRECT
        | RING_EVENT_IDX;
    // A control queue has no other use here than to choose the number of pairs.
    if queue_pairs > 1 { one | CONTROL | MULTIQUEUE } else { one }
}

/// Offloads (`TUN_F_*`) with which the tap may hand over unfinished packets to a driver with these features.
pub(super) fn offload(features: u64) -> u32 {
    let flags = [
        (net::VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
        (net::VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
        (net::VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
    ];
    let wanted = flags
        .iter()
        .filter(|(feature, _)| features & bit(*feature) != 0)
        .fold(0, |all, (_, flag)| all | flag);
    // The kernel refuses segments without checksums, which a driver may not choose either (virtio 1.3 §5.1.3.1).
    if wanted & libc::TUN_F_CSUM == 0 { 0 } else { wanted }
}

/// The queues of a device: receive 0, transmit 0, receive 1, ..., control.
pub(super) fn queue_sizes(queue_pairs: u16) -> Vec<u16> {
    let mut sizes = vec![QUEUE_SIZE; 2 * usize::from(queue_pairs)];
    if queue_pairs > 1 {
        sizes.push(CONTROL_QUEUE_SIZE);
    }
    sizes
}

/// Number of the control queue, if the driver wants one: it comes after all pairs only when the driver knows that
/// there are several (virtio 1.3 §5.1.2).
pub(super) fn control_queue(features: u64, queue_pairs: u16) -> Option<usize> {
    match (features & CONTROL != 0, features & MULTIQUEUE != 0) {
        (false, _) => None,
        (true, false) => Some(2),
        (true, true) => Some(2 * usize::from(queue_pairs)),
    }
}

/// `struct virtio_net_config` up to `max_virtqueue_pairs` (virtio 1.3 §5.1.4). The link is always up.
pub(super) fn config_space(mac: [u8; 6], queue_pairs: u16) -> [u8; 10] {
    let mut space = [0; 10];
    let status = net::VIRTIO_NET_S_LINK_UP.to_le_bytes();
    let fields = mac.into_iter().chain(status.into_iter().take(2)).chain(queue_pairs.to_le_bytes());
    for (to, from) in space.iter_mut().zip(fields) {
        *to = from;
    }
    space
}

/// A control command that the device supports (virtio 1.3 §5.1.6.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command {
    /// VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET: use this many pairs, from 1 to what the device has.
    SetPairs(u16),
}

/// Bytes of the longest command that the device supports.
pub(super) const COMMAND_LENGTH: usize = 4;

impl Command {
    /// Reads a command; `None` for one that is refused.
    pub(super) fn parse(bytes: &[u8], queue_pairs: u16) -> Option<Self> {
        let [class, command, low, high] = *bytes.first_chunk()?;
        let pairs = u16::from_le_bytes([low, high]);
        let set = u32::from(class) == net::VIRTIO_NET_CTRL_MQ
            && u32::from(command) == net::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET;
        (set && (1..=queue_pairs).contains(&pairs)).then_some(Self::SetPairs(pairs))
    }
}

pub(super) const ACCEPTED: u8 = 0;
pub(super) const REFUSED: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pair_has_no_control_queue_and_several_have_it_last() {
        assert_eq!(queue_sizes(1), [256, 256]);
        assert_eq!(queue_sizes(2), [256, 256, 256, 256, 64]);
        assert_eq!(features(1) & (CONTROL | MULTIQUEUE), 0);
        assert_eq!(features(2) & (CONTROL | MULTIQUEUE), CONTROL | MULTIQUEUE);
    }

    #[test]
    fn the_control_queue_is_number_2_for_a_driver_without_multiqueue() {
        assert_eq!(control_queue(CONTROL, 4), Some(2));
        assert_eq!(control_queue(CONTROL | MULTIQUEUE, 4), Some(8));
        assert_eq!(control_queue(MULTIQUEUE, 4), None);
    }

    #[test]
    fn the_configuration_space_is_mac_status_and_pairs() {
        assert_eq!(config_space([2, 0, 0, 0, 0, 9], 3), [2, 0, 0, 0, 0, 9, 1, 0, 3, 0]);
    }

    #[test]
    fn the_tap_is_asked_for_segments_only_with_checksums() {
        assert_eq!(offload(features(1)), libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6);
        assert_eq!(offload(bit(net::VIRTIO_NET_F_GUEST_CSUM)), libc::TUN_F_CSUM);
        assert_eq!(offload(GUEST_LARGE), 0);
    }

    #[test]
    fn only_a_right_number_of_pairs_is_a_command() {
        assert_eq!(Command::parse(&[4, 0, 2, 0], 2), Some(Command::SetPairs(2)));
        assert_eq!(Command::parse(&[4, 0, 2, 0, 9], 2), Some(Command::SetPairs(2)));
        for refused in [&[4, 0, 3, 0][..], &[4, 0, 0, 0], &[4, 1, 1, 0], &[0, 0, 1, 0], &[4, 0, 1], &[]] {
            assert_eq!(Command::parse(refused, 2), None, "{refused:?}");
        }
    }
}
