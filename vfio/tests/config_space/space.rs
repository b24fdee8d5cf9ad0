//! Configuration spaces made for tests, and a guest's way to read and write a shadow.

use egm_address::{Gpa, Guest, Span};
use egm_vfio::pci::shadow::{Bar, BarKind, Options, Shadow, Written};

/// An endpoint without capabilities.
pub(crate) fn endpoint(length: usize) -> Vec<u8> {
    let mut space = vec![0; length];
    space[..4].copy_from_slice(&[0xde, 0x10, 0x35, 0x23]);
    space[0x0b] = 0x03;
    space
}

pub(crate) fn put(space: &mut [u8], at: usize, bytes: &[u8]) {
    space[at..at + bytes.len()].copy_from_slice(bytes);
}

/// An endpoint of 4096 bytes with these capabilities in its standard list, each without id and link, in this order.
pub(crate) fn with_standard(capabilities: &[(u8, u8, &[u8])]) -> Vec<u8> {
    let mut space = endpoint(4096);
    space[6] = 0x10;
    let mut link = 0x34;
    for (at, id, body) in capabilities {
        space[link] = *at;
        put(&mut space, usize::from(*at), &[*id, 0]);
        put(&mut space, usize::from(*at) + 2, body);
        link = usize::from(*at) + 1;
    }
    space
}

/// Adds an extended list: offset, id, bytes behind the header. The first must be at 0x100.
pub(crate) fn add_extended(space: &mut [u8], capabilities: &[(u16, u16, &[u8])]) {
    for (index, (at, id, body)) in capabilities.iter().enumerate() {
        let next = capabilities.get(index + 1).map_or(0, |next| u32::from(next.0));
        let header = u32::from(*id) | 1 << 16 | next << 20;
        put(space, usize::from(*at), &header.to_le_bytes());
        put(space, usize::from(*at) + 4, body);
    }
}

pub(crate) fn span(start: u64, size: u64) -> Span<Guest> {
    Span::new(Gpa::new(start), size).unwrap()
}

pub(crate) fn bar(index: u8, kind: BarKind, start: u64, size: u64) -> Bar {
    Bar { index, kind, span: span(start, size) }
}

/// MSI and MSI-X offered, a 64-bit BAR 0 of 16 MiB.
pub(crate) fn options() -> Options {
    let bars = vec![bar(0, BarKind::Memory64Prefetchable, 0x80_0000_0000, 16 << 20)];
    Options { bars, pin: Some(1), msi: true, msix: true, ..Options::default() }
}

pub(crate) fn shadow(space: &[u8]) -> Shadow {
    Shadow::new(space, &options()).unwrap()
}

/// Bytes that the guest reads of a device that returns its recorded bytes.
pub(crate) fn read<const N: usize>(shadow: &Shadow, device: &[u8], at: u16) -> [u8; N] {
    let mut data = [0; N];
    shadow.read(at, &mut data, |offset, data| {
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = device.get(usize::from(offset) + index).copied().unwrap_or(0xff);
        }
    });
    data
}

pub(crate) fn read_u16(shadow: &Shadow, device: &[u8], at: u16) -> u16 {
    u16::from_le_bytes(read(shadow, device, at))
}

pub(crate) fn read_u32(shadow: &Shadow, device: &[u8], at: u16) -> u32 {
    u32::from_le_bytes(read(shadow, device, at))
}

/// All 4096 bytes, as the guest reads them.
pub(crate) fn read_all(shadow: &Shadow, device: &[u8]) -> Vec<u8> {
    (0..4096).step_by(4).flat_map(|at| read::<4>(shadow, device, at)).collect()
}

pub(crate) fn write_u16(shadow: &mut Shadow, at: u16, value: u16) -> Written {
    shadow.write(at, &value.to_le_bytes())
}

pub(crate) fn write_u32(shadow: &mut Shadow, at: u16, value: u32) -> Written {
    shadow.write(at, &value.to_le_bytes())
}
