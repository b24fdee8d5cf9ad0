//! Claim: each planned virtio disk keeps what is written and flushed, discards where it offers to, and refuses writes when
//! it is read-only.
//!
//! Transfers bypass the page cache (`O_DIRECT`), so what is read back came from the device. A disk with a mounted file
//! system is only read. The argument `blk.signature` is written to the last 4 KiB of each disk, padded with zeros, for the
//! host to find in the image; `blk.size.<id>` is the size in bytes that disk `<id>` must have.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use egm_address::PciAddress;
use rustix::fs::OFlags;

use super::Context;
use crate::cmdline::Arguments;
use crate::error::Broken;
use crate::expect::{Device, DeviceKind};
use crate::finding::{Claim, Finding};
use crate::sys::{self, Mapping};
use crate::{pattern, sysfs};

/// Bytes of the last block, which carries the signature.
const BLOCK: usize = 4096;
/// Most bytes of one transfer.
const CHUNK: usize = 1 << 20;
/// Bytes of a virtio-blk serial number (virtio 1.2, 5.2.6.1).
const SERIAL: usize = 20;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut claim = Claim::default();
    let mut disks = 0u32;
    for (function, device) in context.plan.devices() {
        let DeviceKind::VirtioBlk { read_only } = device.kind else { continue };
        disks += 1;
        match name(function.address) {
            Some(name) => disk(&mut claim, &name, device, read_only, &context.args)?,
            None => claim.untrue(format!("disk {} at {} has no driver", device.id, function.address)),
        }
    }
    if disks == 0 {
        return Ok(Finding::skipped("no virtio disk is planned"));
    }
    Ok(claim.finish().with_value(f64::from(disks), "disks"))
}

/// The kernel's name of the disk at `address`, `vda`.
pub(super) fn name(address: PciAddress) -> Option<String> {
    sysfs::virtio_child(address, "block")
}

/// Opens a disk so that transfers go to the device.
pub(super) fn open(name: &str, write: bool) -> Result<File, Broken> {
    let path = Path::new("/dev").join(name);
    let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap_or(0);
    File::options()
        .read(true)
        .write(write)
        .custom_flags(direct)
        .open(&path)
        .map_err(Broken::file("open", path))
}

/// Size in bytes of the open disk `name`.
fn end_of(mut file: &File, name: &str) -> Result<u64, Broken> {
    file.seek(SeekFrom::End(0)).map_err(Broken::system(format!("cannot find the end of {name}")))
}

fn disk(
    claim: &mut Claim,
    name: &str,
    device: &Device,
    read_only: bool,
    args: &Arguments,
) -> Result<(), Broken> {
    let folder = Path::new("/sys/block").join(name);
    let id = &device.id;
    let serial = sysfs::text(folder.join("serial")).unwrap_or_default();
    claim.holds(serial_matches(&serial, id), || format!("the serial of {id} is {:?}", serial.trim()));
    let sectors = sysfs::number(folder.join("size"))?;
    let file = open(name, false)?;
    let size = end_of(&file, name)?;
    claim.equal(format!("the size of {id}"), &size, &(sectors * 512));
    let wanted = args.get(&format!("blk.size.{id}"), size)?;
    claim.equal(format!("the size of {id}"), &size, &wanted);
    claim.equal(format!("read-only of {id}"), &(sysfs::number(folder.join("ro"))? == 1), &read_only);

    let mut buffer = Mapping::new(CHUNK).map_err(Broken::system("no memory for transfers"))?;
    let bytes = buffer.bytes_mut();
    if read_only {
        refuses_writes(claim, name, id, bytes);
        return Ok(());
    }
    if sysfs::text("/proc/mounts")?.lines().any(|line| line.starts_with(&format!("/dev/{name}"))) {
        let done = file.read_at(bytes, 0);
        claim.holds(done.is_ok(), || format!("{id} cannot be read: {done:?}"));
        claim.seen(format!("{id} is mounted: only read"));
        return Ok(());
    }
    keeps(claim, name, id, args)
}

/// Disk `name`, which is `id` in the configuration, keeps what is written, and carries the signature afterwards.
pub(super) fn keeps(claim: &mut Claim, name: &str, id: &str, args: &Arguments) -> Result<(), Broken> {
    let file = open(name, true)?;
    let size = end_of(&file, name)?;
    let mut buffer = Mapping::new(CHUNK).map_err(Broken::system("no memory for transfers"))?;
    let bytes = buffer.bytes_mut();
    let folder = Path::new("/sys/block").join(name);
    let discards = sysfs::number(folder.join("queue/discard_max_bytes"))? > 0;
    if let Err(error) = write_and_read(claim, &file, id, size, discards, bytes) {
        claim.untrue(format!("{id}: {error}"));
    }
    if let Some(text) = args.text("blk.signature") {
        sign(&file, size, text, bytes).map_err(Broken::system(format!("cannot sign {id}")))?;
    }
    Ok(())
}

/// The text in the last whole block of disk `name`, up to its first zero.
pub(super) fn last_text(name: &str) -> Result<String, Broken> {
    let file = open(name, false)?;
    let last = (end_of(&file, name)? / BLOCK as u64).saturating_sub(1);
    let mut buffer = Mapping::new(BLOCK).map_err(Broken::system("no memory for a block"))?;
    file.read_exact_at(buffer.bytes_mut(), last * BLOCK as u64)
        .map_err(Broken::system(format!("cannot read the last block of {name}")))?;
    Ok(text(buffer.bytes()))
}

/// The text in a block, up to its first zero.
fn text(block: &[u8]) -> String {
    let end = block.iter().position(|byte| *byte == 0).unwrap_or(block.len());
    String::from_utf8_lossy(&block[..end]).into_owned()
}

/// A device may offer no serial; one that it offers is the beginning of the id.
fn serial_matches(serial: &str, id: &str) -> bool {
    let serial = serial.trim_end_matches(['\n', '\0', ' ']);
    serial.is_empty() || serial.as_bytes() == id.as_bytes().get(..SERIAL).unwrap_or(id.as_bytes())
}

/// Fails at once or when written to: Linux asks the device and then refuses in its place.
fn refuses_writes(claim: &mut Claim, name: &str, id: &str, bytes: &[u8]) {
    let written = open(name, true).is_ok_and(|file| file.write_at(&bytes[..BLOCK], 0).is_ok());
    claim.holds(!written, || format!("{id} is read-only but took a write"));
    claim.seen(format!("{id} refuses writes"));
}

/// Offsets of the chunks: the beginning, the middle and the end, without the block of the signature.
fn places(size: u64) -> Vec<(u64, usize)> {
    let (block, chunk) = (BLOCK as u64, CHUNK as u64);
    let end = (size / block * block).saturating_sub(block);
    let length = chunk.min(end / 4 / block * block);
    let middle = end / 2 / block * block;
    let Ok(bytes) = usize::try_from(length) else { return Vec::new() };
    if bytes == 0 { Vec::new() } else { vec![(0, bytes), (middle, bytes), (end - length, bytes)] }
}

fn write_and_read(
    claim: &mut Claim,
    file: &File,
    id: &str,
    size: u64,
    discards: bool,
    bytes: &mut [u8],
) -> std::io::Result<()> {
    let places = places(size);
    if places.is_empty() {
        claim.untrue(format!("{id} is too small to be tested: {size} bytes"));
        return Ok(());
    }
    for (offset, length) in &places {
        pattern::fill(&mut bytes[..*length], *offset, 0, 0);
        file.write_all_at(&bytes[..*length], *offset)?;
    }
    file.sync_all()?;
    if discards {
        // Between the first two chunks when there is room: what is discarded is not read again.
        let gap = places[1].0.saturating_sub(places[0].1 as u64);
        if gap > 0 {
            sys::discard(file, places[0].1 as u64, gap)?;
        }
    }
    for (offset, length) in &places {
        bytes[..*length].fill(0xa5);
        file.read_exact_at(&mut bytes[..*length], *offset)?;
        if let Some(at) = pattern::difference(&bytes[..*length], *offset, 0, 0) {
            claim.untrue(format!("byte {:#x} of {id} reads back wrong", offset + at as u64));
        }
    }
    claim.seen(format!(
        "{id}: {} x {} bytes{}",
        places.len(),
        places[0].1,
        if discards { ", discard" } else { "" }
    ));
    Ok(())
}

/// Writes `text`, cut to a block and padded with zeros, to the last whole block.
fn sign(file: &File, size: u64, text: &str, bytes: &mut [u8]) -> std::io::Result<()> {
    let block = &mut bytes[..BLOCK];
    block.fill(0);
    block.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
    let last = (size / BLOCK as u64).checked_sub(1).ok_or(std::io::ErrorKind::InvalidInput)?;
    file.write_all_at(block, last * BLOCK as u64)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str, size: u64) -> File {
        let file = File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(size).unwrap();
        file
    }

    #[test]
    fn a_serial_is_the_beginning_of_the_id() {
        assert!(serial_matches("", "disk0") && serial_matches("disk0\n", "disk0"));
        assert!(serial_matches("a-name-that-is-longe\n", "a-name-that-is-longer-than-20"));
        assert!(!serial_matches("disk1\n", "disk0") && !serial_matches("disk\n", "disk0"));
    }

    #[test]
    fn chunks_lie_inside_apart_and_before_the_signature() {
        for size in [0, 4096, 5 * 4096, 1 << 20, 3 << 20, 64 << 20, (1 << 40) + 512] {
            let places = places(size);
            for pair in places.windows(2) {
                assert!(pair[0].0 + pair[0].1 as u64 <= pair[1].0, "{size}");
            }
            assert!(places.iter().all(|(offset, n)| offset % 4096 == 0 && offset + *n as u64 + 4096 <= size));
            assert_eq!(places.is_empty(), size <= 4096);
        }
    }

    #[test]
    fn a_disk_that_keeps_its_bytes_passes_and_the_signature_survives() {
        let (file, mut bytes, mut claim) = (image("disk", 8 << 20), vec![0; CHUNK], Claim::default());
        sign(&file, 8 << 20, "from the host", &mut bytes).unwrap();
        write_and_read(&mut claim, &file, "disk0", 8 << 20, false, &mut bytes).unwrap();
        assert!(claim.is_true());
        let mut block = [1; BLOCK];
        file.read_exact_at(&mut block, (8 << 20) - 4096).unwrap();
        assert!(block.starts_with(b"from the host\0") && block[4095] == 0);
        assert_eq!((text(&block).as_str(), text(b"no zero").as_str()), ("from the host", "no zero"));
    }

    #[test]
    fn a_disk_that_ends_early_fails() {
        let (file, mut bytes, mut claim) =
            (File::open("/dev/null").unwrap(), vec![0; CHUNK], Claim::default());
        assert!(write_and_read(&mut claim, &file, "disk0", 8 << 20, false, &mut bytes).is_err());
    }
}
