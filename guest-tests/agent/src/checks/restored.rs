//! Claim: when a machine is saved, and restored in another process, its guest goes on: memory has the bytes of before,
//! requests to the disk are answered, and its time moves forward.
//!
//! The guest fills memory of its own and of each EGM node, prints `egm-restored ready`, and then reads the last block of the
//! first writable virtio disk again and again, until it has the text `restored.text`. The reader of the console saves the
//! machine, writes that text and restores it; or upgrades it, and writes that text. An upgrade loses no packet: with the
//! argument `restored.echo`, the guest sends datagrams after each read, and all must come back in order.

use std::io::{self, Write};
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use super::{Context, virtio_blk, virtio_net};
use crate::error::Broken;
use crate::expect::DeviceKind;
use crate::finding::{Claim, Finding};
use crate::sys::Mapping;
use crate::{pattern, sysfs};

const READY: &str = "egm-restored ready";
/// Bytes of each piece of memory.
const SIZE: usize = 16 << 20;
const SEED: u64 = 0x5245_5354_4f52_4544;
/// Guest time: what passes while the machine is saved does not count. A read by an emulated processor takes milliseconds.
const TIMEOUT: Duration = Duration::from_secs(240);
/// Datagrams sent before the first answer is read.
const WINDOW: u32 = 32;
/// Longest wait for one datagram, in guest time.
const ECHO_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let Some(disk) = disk(context) else {
        return Ok(Finding::skipped("no virtio disk that could be written is there"));
    };
    let Some(awaited) = context.args.text("restored.text") else {
        return Ok(Finding::skipped("the argument restored.text is missing"));
    };
    let pieces = fill(context)?;
    let echo = context.args.text("restored.echo").map(|_| echo(context)).transpose()?;
    // Standard error is the console; standard output is the report.
    let _ = io::stderr().write_all(format!("{READY}\n").as_bytes());
    let (start, mut last, mut reads) = (Instant::now(), Duration::ZERO, 0_u32);
    let mut claim = Claim::default();
    loop {
        let text = virtio_blk::last_text(&disk)?;
        let now = start.elapsed();
        claim.holds(now >= last, || format!("time went from {last:?} back to {now:?}"));
        (last, reads) = (now, reads.saturating_add(1));
        if let Some(socket) = &echo {
            let lost = exchange(socket, reads.saturating_mul(WINDOW)).err();
            claim.holds(lost.is_none(), || lost.unwrap_or_default());
        }
        if text == awaited || now > TIMEOUT || !claim.is_true() {
            claim.equal("the last block of the disk", &text.as_str(), &awaited);
            break;
        }
    }
    claim.holds(start.elapsed() > last, || "time stands still".to_owned());
    for (number, piece) in pieces.iter().enumerate() {
        let wrong = pattern::difference(piece.bytes(), SEED, first_word(number), 0);
        claim.holds(wrong.is_none(), || format!("byte {wrong:x?} of piece {number} of memory was lost"));
    }
    claim.seen(format!("{} pieces of {SIZE:#x} bytes, {reads} reads of {disk}", pieces.len()));
    Ok(claim.finish().with_value(f64::from(reads), "reads"))
}

/// A socket to the echo, by the first network device.
fn echo(context: &Context) -> Result<UdpSocket, Broken> {
    let mut devices = context.plan.devices();
    let found = devices.find(|(_, device)| matches!(device.kind, DeviceKind::VirtioNet { .. }));
    let name = found.and_then(|(function, _)| sysfs::virtio_child(function.address, "net"));
    let no_device = Broken::system("no network device has a driver");
    let name = name.ok_or(io::ErrorKind::NotFound).map_err(no_device)?;
    let peer = virtio_net::configure(context, &name)?;
    // Each side has the other's hardware address then: packets that wait for that may be dropped.
    virtio_net::datagram(peer, 4, ECHO_TIMEOUT)
        .map_err(|why| Broken::system(why)(io::Error::from(io::ErrorKind::TimedOut)))?;
    let socket = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect(peer)?;
        socket.set_read_timeout(Some(ECHO_TIMEOUT))?;
        Ok(socket)
    });
    socket.map_err(Broken::system("no socket to the echo"))
}

/// Sends [`WINDOW`] numbers from `first` on, each in a datagram; the error names the first that does not come back.
fn exchange(socket: &UdpSocket, first: u32) -> Result<(), String> {
    let numbers = || first..first.saturating_add(WINDOW);
    let lost = |number, error| format!("datagram {number} did not come back: {error}");
    for number in numbers() {
        socket.send(&number.to_be_bytes()).map_err(|error| lost(number, error))?;
    }
    for number in numbers() {
        let mut answer = [0; 4];
        socket.recv(&mut answer).map_err(|error| lost(number, error))?;
        let answer = u32::from_be_bytes(answer);
        if answer != number {
            return Err(format!("datagram {answer} came in place of {number}"));
        }
    }
    Ok(())
}

/// Memory of the guest's choice and of each EGM node, filled.
fn fill(context: &Context) -> Result<Vec<Mapping>, Broken> {
    let nodes = context.plan.egm_nodes().filter_map(|node| context.plan.linux_node(node.id));
    let on_nodes = nodes.map(|node| Mapping::on_node(SIZE, node));
    let pieces: Result<Vec<Mapping>, _> = std::iter::once(Mapping::new(SIZE)).chain(on_nodes).collect();
    let mut pieces = pieces.map_err(Broken::system("no memory for a pattern"))?;
    for (number, piece) in pieces.iter_mut().enumerate() {
        pattern::fill(piece.bytes_mut(), SEED, first_word(number), 0);
    }
    Ok(pieces)
}

/// Index of the first word of a piece in the pattern: no word of two pieces is the same.
fn first_word(piece: usize) -> u64 {
    u64::try_from(piece * SIZE / 8).unwrap_or(u64::MAX)
}

fn disk(context: &Context) -> Option<String> {
    let writable = DeviceKind::VirtioBlk { read_only: false };
    let (function, _) = context.plan.devices().find(|(_, device)| device.kind == writable)?;
    virtio_blk::name(function.address)
}
