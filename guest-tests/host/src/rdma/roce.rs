//! RDMA over Ethernet on a wire: counts the packets of reliable connections (RoCE v2) in a recording of libpcap's
//! format by direction and kind. Pure. The recording is untrusted input; other packets are ignored.
//!
//! Sources: draft-ietf-opsawg-pcap; `InfiniBand` Architecture Specification 1.4, chapter 9 and annex A17 (packets).

use std::collections::BTreeMap;

pub(crate) type Mac = [u8; 6];

/// Sizes of the file's header and of each packet's record header.
const FILE_HEADER: usize = 24;
const RECORD_HEADER: usize = 16;
/// First word of a file with times in microseconds, in the writer's byte order, and the link type of Ethernet.
const MAGIC: u32 = 0xa1b2_c3d4;
const ETHERNET: u32 = 1;
/// Bytes of the headers of Ethernet, UDP and InfiniBand's base, and of the check sum at the end.
const ETHERNET_HEADER: usize = 14;
const UDP_HEADER: usize = 8;
const BASE_HEADER: usize = 12;
const CHECK_SUM: usize = 4;
/// The UDP port of RoCE v2.
const PORT: u16 = 4791;
/// Number of last pieces of data, and of last whole packets of each direction, that are kept.
const KEPT: usize = 32;

/// Drivers copy smaller packets on arrival (e1000e's `copybreak`): only larger ones stay where DMA put them.
const COPIED: usize = 256;

/// Operation codes of packets with data in the middle of a write, and of an answer to a read.
const MIDDLES: [u8; 2] = [0x07, 0x0e];

/// Traffic of one direction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Flow {
    /// Bytes of data in writes.
    pub(crate) written: u64,
    /// Bytes of data in answers to reads.
    pub(crate) answered: u64,
    /// Bytes of data in sends.
    pub(crate) sent: u64,
    /// Number of requests to compare and swap, or to fetch and add.
    pub(crate) atomics: u64,
    /// The last packets that drivers do not copy, from the first byte of Ethernet's header on.
    pub(crate) packets: Vec<Vec<u8>>,
}

/// Traffic of a wire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Wire {
    /// Directions, by source and destination.
    pub(crate) ways: BTreeMap<(Mac, Mac), Flow>,
    /// The data of the last packets that were in the middle of a write or of an answer to a read, each once, oldest first.
    pub(crate) pieces: Vec<Vec<u8>>,
}

/// Parses a recording; one that ends within a packet is still being written.
pub(crate) fn read(recording: &[u8]) -> Result<Wire, String> {
    let (magic, link) = (little(recording, 0), little(recording, 20));
    if (magic, link) != (Some(MAGIC), Some(ETHERNET)) {
        return Err(format!(
            "no recording of Ethernet: it begins with {magic:x?}, and its link is {link:x?}"
        ));
    }
    let (mut wire, mut at) = (Wire::default(), FILE_HEADER);
    while let Some(length) = little(recording, at.saturating_add(8)) {
        let begin = at.saturating_add(RECORD_HEADER);
        let end = begin.saturating_add(usize::try_from(length).unwrap_or(usize::MAX));
        let Some(packet) = recording.get(begin..end) else { break };
        at = end;
        if let Some(Packet { from, to, code, data }) = packet_of(packet) {
            let way = wire.ways.entry((from, to)).or_default();
            way.count(code, data);
            if packet.len() >= COPIED {
                keep(&mut way.packets, packet);
            }
            if MIDDLES.contains(&code) && !wire.pieces.iter().any(|kept| kept == data) {
                keep(&mut wire.pieces, data);
            }
        }
    }
    Ok(wire)
}

impl Flow {
    /// Counts a packet by its operation code on a reliable connection.
    fn count(&mut self, code: u8, data: &[u8]) {
        let bytes = data.len() as u64;
        match code {
            0x00..=0x05 => self.sent += bytes,
            0x06..=0x0b => self.written += bytes,
            0x0d..=0x10 => self.answered += bytes,
            0x13 | 0x14 => self.atomics += 1,
            _ => {}
        }
    }
}

/// Adds `bytes` to the last ones.
fn keep(kept: &mut Vec<Vec<u8>>, bytes: &[u8]) {
    if kept.len() == KEPT {
        kept.remove(0);
    }
    kept.push(bytes.to_vec());
}

/// A packet of RoCE v2.
struct Packet<'a> {
    from: Mac,
    to: Mac,
    code: u8,
    data: &'a [u8],
}

/// Parses `packet`; `None` if it is none of RoCE v2.
fn packet_of(packet: &[u8]) -> Option<Packet<'_>> {
    let (to, from) = (packet.get(..6)?.try_into().ok()?, packet.get(6..12)?.try_into().ok()?);
    let ip = packet.get(ETHERNET_HEADER..).filter(|_| big(packet, 12) == Some(0x0800))?;
    let (first, protocol) = (*ip.first()?, *ip.get(9)?);
    // Ethernet pads short packets, so their end is IP's.
    let ip = ip.get(..usize::from(big(ip, 2)?)).filter(|_| first >> 4 == 4 && protocol == 17)?;
    let udp = ip.get(usize::from(first & 0xf) * 4..)?;
    let base = udp.get(UDP_HEADER..).filter(|_| big(udp, 2) == Some(PORT))?;
    let (code, padding) = (*base.first()?, usize::from(*base.get(1)? >> 4 & 3));
    let begin = BASE_HEADER + extended(code);
    let end = base.len().checked_sub(CHECK_SUM + padding)?;
    Some(Packet { from, to, code, data: base.get(begin..end)? })
}

/// Size of the headers between the base and the data: a write's target in its first packet; an acknowledgement in a
/// response's first and last; a word for the receiver in sends and writes with immediate data.
const fn extended(code: u8) -> usize {
    match code {
        0x03 | 0x05 | 0x09 | 0x0d | 0x0f | 0x10 | 0x11 => 4,
        0x06 | 0x0a | 0x0c => 16,
        0x0b => 20,
        0x12 => 12,
        0x13 | 0x14 => 28,
        _ => 0,
    }
}

fn little(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn big(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: Mac = [2, 0, 0, 0, 0, 1];
    const B: Mac = [2, 0, 0, 0, 0, 2];

    /// A packet as it is on the wire.
    fn packet(from: Mac, to: Mac, code: u8, padding: u8, data: &[u8]) -> Vec<u8> {
        let base = [&[code, padding << 4][..], &[0; 10], &vec![0; extended(code)], data].concat();
        let base = [base, vec![0; usize::from(padding) + CHECK_SUM]].concat();
        let total = u16::try_from(20 + UDP_HEADER + base.len()).unwrap();
        let mut ip = vec![0u8; 20];
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&total.to_be_bytes());
        ip[9] = 17;
        let mut udp = vec![0u8; UDP_HEADER];
        udp[2..4].copy_from_slice(&PORT.to_be_bytes());
        [&to[..], &from, &[8, 0], &ip, &udp, &base].concat()
    }

    fn recording(packets: &[Vec<u8>]) -> Vec<u8> {
        let mut file = vec![0; FILE_HEADER];
        file[..4].copy_from_slice(&MAGIC.to_le_bytes());
        file[20] = 1;
        for packet in packets {
            let length = u32::try_from(packet.len()).unwrap().to_le_bytes();
            file.extend([&[0; 8][..], &length, &length, packet].concat());
        }
        file
    }

    #[test]
    fn each_kind_is_counted_by_its_data_and_its_direction() {
        let packets = [
            packet(A, B, 0x06, 0, &[1; 1024]),
            packet(A, B, 0x07, 0, &[2; 1024]),
            packet(A, B, 0x07, 0, &[2; 1024]), // sent once more: a packet was lost
            packet(A, B, 0x08, 3, &[3; 5]),
            packet(B, A, 0x11, 0, &[]),
            packet(A, B, 0x0c, 0, &[]),
            packet(B, A, 0x10, 1, &[4; 7]),
            packet(B, A, 0x0e, 0, &[6; 1024]),
            packet(A, B, 0x14, 0, &[]),
            packet(B, A, 0x12, 0, &[]),
            packet(A, B, 0x13, 0, &[]),
            packet(B, A, 0x04, 0, &[5; 12]),
        ];
        let Wire { mut ways, pieces } = read(&recording(&packets)).unwrap();
        let kept: Vec<_> = ways.values_mut().map(|way| std::mem::take(&mut way.packets)).collect();
        let large = packets.into_iter().filter(|packet| packet.len() >= COPIED);
        let (back, there): (Vec<_>, Vec<_>) = large.partition(|packet| packet[..6] == A);
        assert!(kept == [there, back]);
        let there = Flow { written: 3 * 1024 + 5, atomics: 2, ..Flow::default() };
        assert_eq!(ways[&(A, B)], there);
        assert_eq!(ways[&(B, A)], Flow { answered: 7 + 1024, sent: 12, ..Flow::default() });
        assert_eq!(pieces, [vec![2; 1024], vec![6; 1024]]);
    }

    #[test]
    fn ethernets_padding_is_no_data_and_other_packets_are_passed_over() {
        let mut short = packet(A, B, 0x04, 0, &[5; 1]);
        short.extend([9; 20]);
        let mut arp = packet(A, B, 0x04, 0, &[5; 1]);
        arp[13] = 6;
        let mut other_port = packet(A, B, 0x04, 0, &[5; 1]);
        other_port[ETHERNET_HEADER + 20 + 3] ^= 1;
        let ways = read(&recording(&[short, arp, other_port])).unwrap().ways;
        assert_eq!(ways[&(A, B)].sent, 1);
    }

    #[test]
    fn the_last_pieces_are_kept_and_no_more() {
        let pieces: Vec<_> = (0..100u8).map(|number| packet(A, B, 0x07, 0, &[number; 1024])).collect();
        let last = read(&recording(&pieces)).unwrap().pieces;
        let kept: Vec<_> = last.iter().map(|piece| usize::from(piece[0])).collect();
        assert_eq!(kept, (100 - KEPT..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_recording_that_goes_on_is_read_as_far_as_it_is_whole_and_another_file_is_refused() {
        let whole = recording(&[packet(A, B, 0x0a, 0, &[1; 64]), packet(A, B, 0x0a, 0, &[1; 64])]);
        let ways = read(&whole[..whole.len() - 1]).unwrap().ways;
        assert_eq!(ways[&(A, B)].written, 64);
        assert!(read(b"").is_err() && read(&[0; 100]).unwrap_err().contains("no recording"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_recording_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..400), cut in 0usize..400) {
            let _ = read(&bytes);
            let mut file = recording(&[packet(A, B, 0x0a, 0, &[1; 64]), bytes]);
            file.truncate(file.len() - cut.min(file.len()));
            let _ = read(&file);
        }
    }
}
