//! The configuration space and the features of a disk (virtio 1.3 §5.2.3, §5.2.4).

use super::disk::{Disk, SECTOR};
use crate::virtio::{RING_EVENT_IDX, RING_INDIRECT};

/// VIRTIO_BLK_F_FLUSH: without it, a completed write is durable.
pub(super) const FLUSH: u64 = 1 << 9;
const SEG_MAX: u64 = 1 << 2;
const READ_ONLY: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
const TOPOLOGY: u64 = 1 << 10;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;

/// Entries of the queue.
pub(super) const QUEUE_SIZE: u16 = 256;

/// log2 of the sectors in what file systems and disks really write: 4 KiB.
const PHYSICAL_EXPONENT: u8 = 3;
/// Most sectors of one discard or write-zeroes request: 2 GiB.
const MAX_RANGE: u32 = 1 << 22;

pub(super) fn features(disk: &Disk) -> u64 {
    let writable = if disk.read_only() { READ_ONLY } else { DISCARD | WRITE_ZEROES };
    RING_INDIRECT | RING_EVENT_IDX | FLUSH | SEG_MAX | BLK_SIZE | TOPOLOGY | writable
}

/// The bytes of `struct virtio_blk_config`, up to the last field of an offered feature.
pub(super) fn bytes(disk: &Disk) -> [u8; 60] {
    let mut config = [0; 60];
    let mut put = |at: usize, data: &[u8]| {
        for (to, from) in config.iter_mut().skip(at).zip(data) {
            *to = *from;
        }
    };
    let physical = 1u32 << PHYSICAL_EXPONENT;
    let sector = u32::try_from(SECTOR).unwrap_or(512);
    put(0, &disk.sectors().to_le_bytes());
    put(12, &u32::from(QUEUE_SIZE.saturating_sub(2)).to_le_bytes()); // seg_max: less header and status
    put(20, &sector.to_le_bytes()); // blk_size
    put(24, &[PHYSICAL_EXPONENT]); // physical_block_exp; alignment_offset is 0
    put(26, &[1 << PHYSICAL_EXPONENT]); // min_io_size, in blocks
    put(34, &[1]); // num_queues
    if !disk.read_only() {
        put(36, &MAX_RANGE.to_le_bytes()); // max_discard_sectors
        put(40, &[1]); // max_discard_seg
        put(44, &physical.to_le_bytes()); // discard_sector_alignment
        put(48, &MAX_RANGE.to_le_bytes()); // max_write_zeroes_sectors
        put(52, &[1]); // max_write_zeroes_seg
        put(56, &[1]); // write_zeroes_may_unmap
    }
    config
}
