//! Any bytes as a device, any accesses as a guest.

use egm_vfio::pci::capability::{self, CapabilityId, ListEnd};
use egm_vfio::pci::shadow::{BarKind, Options, Shadow, Treatment};
use proptest::prelude::*;

use crate::space::{bar, put, read_all, span};

/// Bytes without a pattern (xorshift).
fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..4096).map(|_| next()).collect()
}

/// A space of a hostile device: capabilities with known ids, linked correctly or not, in noise or zeros.
fn any_device() -> impl Strategy<Value = Vec<u8>> {
    let noise = prop::option::of(any::<u64>()).prop_map(|seed| seed.map_or_else(|| vec![0; 4096], noise));
    let standard = prop::collection::vec((16u8..64, 0u8..0x16, 0u8..64, any::<[u8; 10]>()), 0..8);
    let extended = prop::collection::vec((64u16..1024, 0u16..0x34, 0u16..1024, any::<[u8; 12]>()), 0..12);
    (noise, any::<[u8; 2]>(), standard, extended, any::<bool>()).prop_map(
        |(mut space, ids, list, more, whole)| {
            put(&mut space, 0, &[ids[0], ids[1] & 0x7f]);
            space[6] |= 0x10;
            space[0x0e] &= 0x80;
            if let Some((first, ..)) = list.first() {
                space[0x34] = first * 4;
            }
            for (index, (at, id, next, body)) in list.iter().enumerate() {
                let next = list.get(index + 1).map_or(*next, |(next, ..)| *next);
                put(&mut space, usize::from(*at) * 4, &[*id, next * 4]);
                let room = 256 - usize::from(*at) * 4 - 2;
                put(&mut space, usize::from(*at) * 4 + 2, &body[..room.min(10)]);
            }
            for (index, (at, id, next, body)) in more.iter().enumerate() {
                let at = if index == 0 { 0x40 } else { usize::from(*at) };
                let next = more.get(index + 1).map_or(*next, |(next, ..)| *next);
                let header = u32::from(*id) | 1 << 16 | u32::from(next) << 22;
                put(&mut space, at * 4, &header.to_le_bytes());
                let room = 4096 - at * 4 - 4;
                put(&mut space, at * 4 + 4, &body[..room.min(12)]);
            }
            space.truncate(if whole { 4096 } else { 256 });
            space
        },
    )
}

fn options(msix: bool) -> Options {
    Options {
        bars: (0..6).step_by(2).map(|index| bar(index, BarKind::Memory64, 0, 1 << 40)).collect(),
        rom: Some(span(0, 2048)),
        pin: Some(1),
        msi: true,
        msix,
        ..Options::default()
    }
}

/// Options with MSI-X if its structures lie somewhere.
fn shadow(device: &[u8]) -> Shadow {
    Shadow::new(device, &options(true)).or_else(|_| Shadow::new(device, &options(false))).unwrap()
}

fn any_writes() -> impl Strategy<Value = Vec<(u16, Vec<u8>)>> {
    let offset = prop_oneof![0u16..0x104, 0u16..4104, any::<u16>()];
    let bytes = prop_oneof![prop::collection::vec(any::<u8>(), 0..9), Just(vec![0xff; 4])];
    prop::collection::vec((offset, bytes), 1..40)
}

/// Bits of the byte at `at` that a guest's writes may change in the device, said in another way than the tables say it.
fn may_reach(shadow: &Shadow, device: &[u8], at: u16) -> u8 {
    if at < 0x40 {
        return if at == 0x04 { 1 << 2 } else { 0 };
    }
    let holds = |c: &capability::Capability| (c.offset..c.end()).contains(&at);
    let Some(shown) = shadow.capabilities().iter().find(|shown| holds(&shown.capability)) else {
        let whole = capability::standard(device).end == ListEnd::Null;
        return if at < 0x100 && whole { 0xff } else { 0 };
    };
    let within = at - shown.capability.offset;
    match (shown.capability.id, shown.treatment) {
        (CapabilityId::Standard(0x12), Treatment::PassThrough) if within >= 2 => 0xff,
        (CapabilityId::Standard(0x09), Treatment::PassThrough) if within >= 3 => 0xff,
        (CapabilityId::Extended(0x0b), Treatment::PassThrough) if within >= 8 => 0xff,
        (CapabilityId::Standard(0x03), _) => {
            [0, 0, 0xff, 0x7f].get(usize::from(within)).copied().unwrap_or(0)
        }
        (CapabilityId::Standard(0x10), _) => match within {
            8 => 1 << 4,
            9 => 7 << 4,
            _ => 0,
        },
        (CapabilityId::Extended(0x04), _) if within == 4 => 0xff,
        _ => 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// A guest's walk ends with a null link, whatever the device's bytes are.
    #[test]
    fn the_guest_finds_finite_lists(recorded in any_device(), now in any_device()) {
        let shadow = shadow(&recorded);
        let view = read_all(&shadow, &now);
        let (standard, extended) = (capability::standard(&view), capability::extended(&view));
        prop_assert_eq!((standard.end, extended.end), (ListEnd::Null, ListEnd::Null));
        let mut places: Vec<_> = standard.capabilities.iter().map(|c| (c.offset, c.end())).collect();
        places.sort_unstable();
        prop_assert!(places.windows(2).all(|two| two[0].1 <= two[1].0));
        let kept = shadow.capabilities().iter().filter(|shown| shown.treatment != Treatment::Hidden);
        let kept: Vec<_> = kept.map(|shown| (shown.capability.id, shown.capability.offset)).collect();
        let seen = standard.capabilities.iter().chain(&extended.capabilities);
        let seen = seen.filter(|c| c.id != CapabilityId::Extended(0)).map(|c| (c.id, c.offset));
        prop_assert_eq!(seen.collect::<Vec<_>>(), kept);
    }

    /// No write reaches a bit of the device that it must not, and ids and lists stay.
    #[test]
    fn a_guest_cannot_write_past_the_table(device in any_device(), writes in any_writes()) {
        let mut shadow = shadow(&device);
        let starts: Vec<_> = shadow.start().into_iter().map(|f| (f.offset, f.data)).collect();
        let at_start = |at: u16| starts.iter().find_map(|(from, data)| data.get(usize::from(at.checked_sub(*from)?)));
        let before = read_all(&shadow, &device);
        for (offset, bytes) in &writes {
            let written = shadow.write(*offset, bytes);
            for forward in &written.forward {
                for (at, byte) in (forward.offset..).zip(&forward.data) {
                    prop_assert!(at >= *offset && usize::from(at - offset) < bytes.len(), "only what was written");
                    let may = may_reach(&shadow, &device, at);
                    let fixed = at_start(at).copied().unwrap_or(0);
                    prop_assert_eq!(byte & !may, fixed & !may, "{:#x}", at);
                    prop_assert_eq!(byte & may, bytes[usize::from(at - offset)] & may, "{:#x}", at);
                    prop_assert!(may != 0, "{:#x}", at);
                }
            }
        }
        let after = read_all(&shadow, &device);
        let headers = |view: &[u8]| (view[..4].to_vec(), view[8..12].to_vec(), view[0x0e], view[0x2c..0x30].to_vec());
        prop_assert_eq!(headers(&before), headers(&after));
        prop_assert_eq!(capability::standard(&before), capability::standard(&after));
        prop_assert_eq!(capability::extended(&before), capability::extended(&after));
        shadow.reset();
        prop_assert_eq!(read_all(&shadow, &device), before);
    }

    /// Each decoded span has the size that it was made with, and is aligned to it.
    #[test]
    fn decoded_bars_keep_their_size(device in any_device(), writes in any_writes()) {
        let mut shadow = shadow(&device);
        for (offset, bytes) in &writes {
            let before = shadow.decoded();
            let written = shadow.write(*offset, bytes);
            prop_assert_eq!(written.effects.decoding, before != shadow.decoded());
            for (region, span) in shadow.decoded() {
                prop_assert_eq!(span.size(), if region == 6 { 2048 } else { 1 << 40 });
                prop_assert!(span.start().is_aligned(span.size()));
            }
        }
    }

    /// Invalid bytes make an error or a shadow, never more.
    #[test]
    fn any_bytes_are_judged(bytes in prop::collection::vec(any::<u8>(), 0..5000), length in 0usize..5000) {
        let mut bytes = bytes;
        bytes.resize(if length % 2 == 0 { length } else { 4096 }, 0xff);
        if let Ok(shadow) = Shadow::new(&bytes, &options(false)) {
            prop_assert_eq!(read_all(&shadow, &bytes).len(), 4096);
        }
    }
}
