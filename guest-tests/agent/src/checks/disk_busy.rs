//! Claim: a block that was flushed is on the disk, however the machine ends.
//!
//! Block `N` (4 KiB at offset `N` modulo the disk's blocks) of the first writable virtio disk is filled with the little-endian
//! 64-bit number `N`, flushed, and only then `egm-busy N` goes to the console. The host ends the VMM at any moment and looks
//! for the last `N` it read in the image. Stops after `busy.seconds` (default 60) or never when that is 0.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::{Context, virtio_blk};
use crate::error::Broken;
use crate::expect::DeviceKind;
use crate::finding::{Claim, Finding};
use crate::sys::Mapping;
use crate::sysfs;

const BLOCK: usize = 4096;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let writable = DeviceKind::VirtioBlk { read_only: false };
    let disk = context.plan.devices().find(|(_, device)| device.kind == writable);
    let Some(name) = disk.and_then(|(function, _)| virtio_blk::name(function.address)) else {
        return Ok(Finding::skipped("no writable virtio disk is there"));
    };
    let seconds = context.args.get("busy.seconds", 60)?;
    let blocks = sysfs::number(format!("/sys/block/{name}/size"))? / (BLOCK as u64 / 512);
    let file = virtio_blk::open(&name, true)?;
    let mut buffer = Mapping::new(BLOCK).map_err(Broken::system("no memory for a block"))?;
    let begun = Instant::now();
    let mut number = 0u64;
    while seconds == 0 || begun.elapsed() < Duration::from_secs(seconds) {
        block(buffer.bytes_mut(), number);
        let offset = number.checked_rem(blocks).unwrap_or(0) * BLOCK as u64;
        file.write_all_at(buffer.bytes(), offset)
            .and_then(|()| file.sync_data())
            .map_err(Broken::system(format!("cannot write block {number} of {name}")))?;
        // Standard error is the console; standard output is the report.
        let _ = std::io::stderr().write_all(format!("egm-busy {number}\n").as_bytes());
        number += 1;
    }
    let mut claim = Claim::default();
    claim.holds(number > 0, || "not one block was written");
    Ok(claim.finish().with_value(number as f64, "blocks"))
}

/// Fills a block with its number.
fn block(bytes: &mut [u8], number: u64) {
    for word in bytes.as_chunks_mut::<8>().0 {
        *word = number.to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_holds_its_number_everywhere() {
        let mut bytes = [9; BLOCK];
        block(&mut bytes, 0x0102);
        assert!(bytes.chunks(8).all(|word| word == [2, 1, 0, 0, 0, 0, 0, 0]));
    }
}
