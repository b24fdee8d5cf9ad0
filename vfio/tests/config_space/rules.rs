//! One test for each thing that a guest must, or must not, be able to do to a function.

use egm_vfio::pci::shadow::{
    BarKind, ConfigError, Effects, Forward, Message, MsixControl, Options, PowerState, ROM_REGION, Resizable,
    Shadow,
};
use egm_vfio::variant::clique::Clique;

use crate::space::{
    add_extended, bar, endpoint, options, put, read, read_all, read_u16, read_u32, shadow, span,
    with_standard, write_u16, write_u32,
};

const COMMAND: u16 = 0x04;
const MEMORY: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const INTX_DISABLE: u16 = 1 << 10;

const POWER: u8 = 0x01;
const VPD: u8 = 0x03;
const MSI: u8 = 0x05;
const EXPRESS: u8 = 0x10;
const MSIX: u8 = 0x11;
const ADVANCED: u8 = 0x13;

fn forward(offset: u16, data: &[u8]) -> Vec<Forward> {
    vec![Forward { offset, data: data.to_vec() }]
}

#[test]
fn only_endpoints_that_answer_are_shown() {
    let new = |space: &[u8]| Shadow::new(space, &options()).unwrap_err().to_string();
    assert!(new(&[0; 64]).starts_with("its configuration space has 0x40 bytes, not 0x100 or 0x1000"));
    assert!(new(&[0xff; 4096]).starts_with("its configuration space reads as all ones"));
    let mut bridge = endpoint(256);
    bridge[0x0e] = 0x81;
    let bridge = new(&bridge);
    assert_eq!(
        bridge,
        "its header type is 0x1, a bridge: give the guest the functions behind it, not the bridge"
    );
}

#[test]
fn other_functions_of_the_host_do_not_show() {
    let mut device = endpoint(4096);
    device[0x0e] = 0x80;
    device[0x3d] = 2;
    let one = shadow(&device);
    assert_eq!(read(&one, &device, 0x0e), [0], "the multi-function bit is clear");
    assert_eq!(read(&one, &device, 0x3d), [1], "the pin is the machine's");
    let none = Shadow::new(&device, &Options { pin: None, ..options() }).unwrap();
    assert_eq!(read(&none, &device, 0x3d), [0]);
    let error = Shadow::new(&device, &Options { pin: Some(5), ..options() }).unwrap_err();
    assert_eq!(error, ConfigError::Pin { pin: 5 });
}

#[test]
fn a_bar_is_sized_by_ones_and_decodes_where_it_is_put() {
    let kinds =
        [BarKind::Memory32, BarKind::Memory32Prefetchable, BarKind::Memory64, BarKind::Memory64Prefetchable];
    for (kind, flags) in kinds.into_iter().zip([0u64, 8, 4, 12]) {
        for size in [16, 4096, 1 << 31] {
            let device = endpoint(4096);
            let bars = vec![bar(2, kind, 0, size)];
            let mut shadow = Shadow::new(&device, &Options { bars, ..Options::default() }).unwrap();
            assert!(!write_u32(&mut shadow, 0x18, u32::MAX).effects.decoding, "not decoded yet");
            write_u32(&mut shadow, 0x1c, u32::MAX).effects.decoding.then(|| panic!("not decoded yet"));
            let mask = u64::from_le_bytes(read(&shadow, &device, 0x18));
            let width = if kind.is_64() { u64::MAX } else { u64::from(u32::MAX) };
            assert_eq!(mask, (!(size - 1) | flags) & width, "{kind:?} {size:#x}");
            let _ = write_u32(&mut shadow, 0x18, 0x8000_0000);
            let _ = write_u32(&mut shadow, 0x1c, 0x12);
            assert_eq!(shadow.decoded(), []);
            assert!(write_u16(&mut shadow, COMMAND, MEMORY).effects.decoding);
            let start = if kind.is_64() { 0x12_8000_0000 } else { 0x8000_0000 };
            assert_eq!(shadow.decoded(), [(2, span(start, size))]);
        }
    }
}

#[test]
fn a_bar_that_cannot_be_is_refused_with_the_rule() {
    let device = endpoint(256);
    let rule = |bars: Vec<_>| match Shadow::new(&device, &Options { bars, ..Options::default() }) {
        Err(ConfigError::Bar { rule, .. }) => rule,
        other => panic!("{other:?}"),
    };
    use BarKind::{Memory32, Memory64};
    assert!(rule(vec![bar(5, Memory64, 0, 4096)]).starts_with("there are six registers"));
    assert!(rule(vec![bar(6, Memory32, 0, 4096)]).starts_with("there are six registers"));
    assert!(rule(vec![bar(0, Memory64, 0, 4096), bar(1, Memory32, 0, 16)]).starts_with("another BAR"));
    assert!(rule(vec![bar(0, Memory32, 0, 24)]).starts_with("its size"));
    assert!(rule(vec![bar(0, Memory32, 0x800, 0x1000)]).starts_with("its start"));
    assert!(rule(vec![bar(0, Memory32, 0x1_0000_0000, 0x1000)]).starts_with("a 32-bit register"));
}

#[test]
fn a_rom_decodes_when_both_switches_are_on() {
    let device = endpoint(4096);
    let rom = Some(span(0xc000_0000, 0x1_0000));
    let mut shadow = Shadow::new(&device, &Options { rom, ..Options::default() }).unwrap();
    let _ = write_u32(&mut shadow, 0x30, u32::MAX);
    assert_eq!(read_u32(&shadow, &device, 0x30), 0xffff_0001);
    let _ = write_u32(&mut shadow, 0x30, 0xc001_0001);
    assert_eq!(shadow.decoded(), [], "memory decoding is off");
    let _ = write_u16(&mut shadow, COMMAND, MEMORY);
    assert_eq!(shadow.decoded(), [(ROM_REGION, span(0xc001_0000, 0x1_0000))]);
    assert!(write_u32(&mut shadow, 0x30, 0xc001_0000).effects.decoding);
    assert_eq!(shadow.decoded(), []);
}

/// Mapped memory must not disappear under a vCPU, so the device decodes as long as it is ours.
#[test]
fn the_device_gets_bus_mastering_and_keeps_decoding() {
    let mut device = endpoint(4096);
    put(&mut device, 4, &0x0541u16.to_le_bytes());
    let mut shadow = shadow(&device);
    assert_eq!(shadow.start(), forward(COMMAND, &[0x42, 0x05]), "no ports, no bus mastering");
    let written = write_u16(&mut shadow, COMMAND, MEMORY | BUS_MASTER | INTX_DISABLE);
    assert_eq!(written.forward, forward(COMMAND, &[0x46]), "and no more of it than the byte");
    let Effects { decoding, bus_master, intx_disabled, .. } = written.effects;
    assert_eq!((decoding, bus_master, intx_disabled), (true, Some(true), Some(true)));
    let written = write_u16(&mut shadow, COMMAND, !MEMORY);
    assert_eq!((written.forward, written.effects.decoding), (forward(COMMAND, &[0x46]), true));
    assert_eq!(read_u16(&shadow, &device, COMMAND), 0x0544);
    assert!(shadow.bus_master() && shadow.intx_disabled());
}

#[test]
fn a_sleeping_function_decodes_nothing_and_the_device_stays_awake() {
    let device = with_standard(&[(0x40, POWER, &[0xc3, 0xff, 0x08, 0x01, 0, 0x55])]);
    let mut shadow = shadow(&device);
    assert_eq!(read_u16(&shadow, &device, 0x42), 0x0003, "version 3, no wake-up, no D1, no D2");
    assert_eq!(read_u32(&shadow, &device, 0x44), 8, "D0, and nothing is lost on the way back");
    let _ = write_u16(&mut shadow, COMMAND, MEMORY);
    let written = write_u16(&mut shadow, 0x44, 3);
    assert_eq!((written.effects.power, written.effects.decoding), (Some(PowerState::D3Hot), true));
    assert_eq!((written.forward, shadow.decoded()), (vec![], vec![]));
    let written = write_u16(&mut shadow, 0x44, 1);
    assert_eq!((written.effects, shadow.power()), (Effects::default(), PowerState::D3Hot), "there is no D1");
    assert_eq!(write_u16(&mut shadow, 0x44, 0).effects.power, Some(PowerState::D0));
    assert_eq!(shadow.decoded().len(), 1);
}

#[test]
fn msi_is_the_machines() {
    // 16 vectors, 64-bit addresses, masks, extended message data.
    let device = with_standard(&[(0x48, MSI, &[0x88, 0x03])]);
    let mut shadow = shadow(&device);
    assert_eq!(read_u16(&shadow, &device, 0x4a), 0x0188);
    assert_eq!(shadow.msi_vectors(), Some(16));
    let _ = write_u32(&mut shadow, 0x4c, 0xfee0_1003);
    let _ = write_u32(&mut shadow, 0x50, 1);
    let _ = write_u16(&mut shadow, 0x54, 0x4030);
    let written = write_u16(&mut shadow, 0x4a, !(4 << 4));
    let msi = written.effects.msi.unwrap();
    assert_eq!((written.forward, msi.enabled, msi.vectors), (vec![], true, 8));
    assert_eq!(msi.vector(5), Message { address: 0x1_fee0_1000, data: 0x4035 });
    let masked = write_u32(&mut shadow, 0x58, u32::MAX).effects.msi.unwrap();
    assert_eq!(masked.mask, 0xffff, "as many masks as vectors");
    assert!(masked.is_masked(15) && !masked.is_masked(16) && !masked.is_masked(200));
    shadow.set_msi_pending(0x20);
    assert_eq!(write_u32(&mut shadow, 0x5c, u32::MAX), Default::default(), "pending bits are read only");
    assert_eq!(read_u32(&shadow, &device, 0x5c), 0x20);
    let _ = write_u16(&mut shadow, 0x4a, 7 << 4);
    assert_eq!(shadow.msi().unwrap().vectors, 16, "no more than there are");
}

#[test]
fn msi_without_masks_and_with_short_addresses_is_shorter() {
    let device = with_standard(&[(0x48, MSI, &[0, 0]), (0x54, POWER, &[])]);
    let mut shadow = shadow(&device);
    let _ = write_u32(&mut shadow, 0x4c, 0xfee0_0000);
    let _ = write_u32(&mut shadow, 0x50, 0xffff_0041);
    let msi = shadow.msi().unwrap();
    assert_eq!((msi.message, msi.mask), (Message { address: 0xfee0_0000, data: 0x41 }, 0));
}

#[test]
fn msix_is_the_machines() {
    let device = with_standard(&[(0xb0, MSIX, &[0x08, 0x80, 0, 0, 0xb9, 0, 0, 0, 0xba, 0])]);
    let mut shadow = shadow(&device);
    assert_eq!(read_u16(&shadow, &device, 0xb2), 8, "enabled on the host is not enabled in the guest");
    let layout = shadow.msix().unwrap();
    assert_eq!((layout.vectors, layout.table.span.to_string()), (9, "0xb90000..0xb90090".to_owned()));
    assert_eq!(layout.in_bar(0).count(), 2);
    assert_eq!(layout.in_bar(1).count(), 0);
    let written = write_u16(&mut shadow, 0xb2, 0xffff);
    assert_eq!(written.effects.msix, Some(MsixControl { enabled: true, masked: true }));
    assert_eq!((written.forward, read_u16(&shadow, &device, 0xb2)), (vec![], 0xc008));
}

#[test]
fn msix_that_is_not_in_a_bar_is_refused() {
    let of = |table: u32, pending: u32, count: u16| {
        let [a, b] = count.to_le_bytes();
        let (t, p) = (table.to_le_bytes(), pending.to_le_bytes());
        let body = [&[a, b], t.as_slice(), &p].concat();
        Shadow::new(&with_standard(&[(0xb0, MSIX, &body)]), &options()).map(|shadow| shadow.msix().unwrap())
    };
    assert!(matches!(of(0, 1, 0), Err(ConfigError::Msix { structure: "pending bit array", bar: 1, .. })));
    assert!(
        matches!(of(0xff_fff0, 0, 1), Err(ConfigError::Msix { structure: "table", .. })),
        "two vectors, room for one"
    );
    assert!(matches!(of(0, 8, 0), Err(ConfigError::MsixOverlap { .. })));
    assert!(of(0xff_fff0, 0, 0).is_ok());
    let device = with_standard(&[(0xb0, MSIX, &[0; 10])]);
    let hidden = Shadow::new(&device, &Options { msix: false, ..options() }).unwrap();
    assert_eq!((hidden.msix(), read(&hidden, &device, 0x34)), (None, [0]), "not offered, not judged");
}

/// §7.5.3.4: which bits reach the device.
#[test]
fn device_control_reaches_the_device_in_part() {
    let mut body = [0u8; 0x3a];
    body[0] = 2;
    body[5] = 0x10; // FLR capable
    body[6..8].copy_from_slice(&0xae20u16.to_le_bytes());
    let device = with_standard(&[(0x60, EXPRESS, &body)]);
    let mut shadow = shadow(&device);
    assert_eq!(
        read_u16(&shadow, &device, 0x68),
        0x2c20,
        "phantom functions are off, and no reset is under way"
    );
    assert_eq!(shadow.start()[1], Forward { offset: 0x68, data: vec![0x20, 0x24] }, "no-snoop is off");
    // Relaxed ordering, payload 4096, extended tags, no-snoop, requests of 1024.
    let written = write_u16(&mut shadow, 0x68, 0x39b0);
    assert_eq!(written.forward, forward(0x68, &[0x30, 0x34]), "payload stays 256, snooping stays on");
    assert_eq!(read_u16(&shadow, &device, 0x68), 0x39b0);
    assert!(!written.effects.reset);
    let written = write_u16(&mut shadow, 0x68, 0xb9b0);
    assert!(written.effects.reset, "a function-level reset goes through the host");
    assert_eq!(written.forward, forward(0x68, &[0x30, 0x34]));
    assert_eq!(read_u16(&shadow, &device, 0x68), 0x39b0, "and its bit reads as zero");
}

#[test]
fn a_function_without_function_level_reset_has_none() {
    let mut body = [0u8; 0x3a];
    body[0] = 2;
    let mut express = shadow(&with_standard(&[(0x60, EXPRESS, &body)]));
    assert!(!write_u16(&mut express, 0x68, 0x8000).effects.reset);
    let mut advanced = shadow(&with_standard(&[(0x60, ADVANCED, &[6, 3, 0, 0])]));
    let written = advanced.write(0x64, &[1]);
    assert_eq!((written.effects.reset, written.forward), (true, vec![]));
    let mut without = shadow(&with_standard(&[(0x60, ADVANCED, &[6, 1, 0, 0])]));
    assert!(!without.write(0x64, &[1]).effects.reset);
}

#[test]
fn vital_product_data_are_read_and_never_written() {
    let device = with_standard(&[(0x48, VPD, &[0, 0x80, 1, 2, 3, 4])]);
    let mut shadow = shadow(&device);
    assert_eq!(read_u32(&shadow, &device, 0x4c), 0x0403_0201);
    assert_eq!(read_u16(&shadow, &device, 0x4a), 0x8000, "the device says when the data are there");
    assert_eq!(write_u16(&mut shadow, 0x4a, 0x8010).forward, forward(0x4a, &[0x10, 0x00]));
    assert_eq!(write_u32(&mut shadow, 0x4c, 0xdead_beef).forward, []);
}

#[test]
fn what_needs_the_host_is_hidden_and_nothing_moves() {
    const HIDDEN: [u16; 6] = [0x0d, 0x0e, 0x0f, 0x10, 0x13, 0x1b];
    let mut device = with_standard(&[(0x40, 0x14, &[1, 2, 3]), (0x60, POWER, &[]), (0x70, 0x42, &[7; 8])]);
    let body = [0xa5; 12];
    let list: Vec<(u16, u16, &[u8])> =
        HIDDEN.into_iter().zip((0x100..).step_by(0x80)).map(|(id, at)| (at, id, body.as_slice())).collect();
    add_extended(&mut device, &[list.as_slice(), &[(0x600, 0x03, &body)]].concat());
    let mut shadow = shadow(&device);
    let view = read_all(&shadow, &device);
    assert_eq!(
        (view[0x34], view[0x61]),
        (0x60, 0),
        "enhanced allocation and an unknown one are out of the list"
    );
    assert_eq!((&view[0x40..0x50], &view[0x70..0x7a]), ([0; 16].as_slice(), [0; 10].as_slice()));
    for (index, at) in (0x100..0x400).step_by(0x80).enumerate() {
        let next = if index + 1 < HIDDEN.len() { at + 0x80 } else { 0x600 };
        let header = u32::from_le_bytes(view[at..at + 4].try_into().unwrap());
        assert_eq!(header, u32::try_from(next).unwrap() << 20, "id 0, version 0, the link kept");
        assert_eq!(view[at + 4..at + 8], [0; 4]);
        let at = u16::try_from(at).unwrap();
        assert_eq!(write_u32(&mut shadow, at + 4, u32::MAX), Default::default());
    }
    assert_eq!(view[0x600..0x610], [&[0x03, 0, 1, 0], body.as_slice()].concat());
}

#[test]
fn a_resizable_bar_has_one_size() {
    let mut device = endpoint(4096);
    // BAR 2 of one register, 256 GiB (size 18) of up to 512 GiB; then BAR 4 of 2^28 MiB.
    let entry = |sizes: u32, control: u32| [sizes.to_le_bytes(), control.to_le_bytes()].concat();
    let body = [entry(0xff_fff0, 2 | 2 << 5 | 18 << 8), entry(0xf0, 4 | 28 << 8)].concat();
    add_extended(&mut device, &[(0x100, 0x15, &body)]);
    let mut fixed = shadow(&device);
    assert_eq!(read_u32(&fixed, &device, 0x104), 1 << 22);
    assert_eq!(read_u32(&fixed, &device, 0x108), 2 | 2 << 5 | 18 << 8);
    assert_eq!(
        (read_u32(&fixed, &device, 0x10c), read_u32(&fixed, &device, 0x110)),
        (0, 4 | 28 << 8 | 1 << 16)
    );
    assert_eq!(write_u32(&mut fixed, 0x108, u32::MAX), Default::default());
    let hidden = Shadow::new(&device, &Options { resizable: Resizable::Hidden, ..options() }).unwrap();
    assert_eq!(read_u32(&hidden, &device, 0x100), 0);
}

#[test]
fn errors_are_shown_and_not_cleared() {
    let mut device = endpoint(4096);
    add_extended(&mut device, &[(0x100, 0x01, &[0xff; 0x20])]);
    put(&mut device, 6, &0xf900u16.to_le_bytes());
    let mut shadow = shadow(&device);
    assert_eq!(read_u32(&shadow, &device, 0x104), u32::MAX);
    assert_eq!(read_u16(&shadow, &device, 6), 0xf900);
    for at in (0x100..0x124).step_by(4).chain([0x06]) {
        assert_eq!(write_u16(&mut shadow, at, 0xffff), Default::default(), "{at:#x}");
    }
}

#[test]
fn drivers_reach_what_their_vendor_put_below_0x100() {
    let mut device = with_standard(&[(0x60, 0x09, &[8, 1, 2, 3, 4, 5])]);
    device[0xe0] = 0x5a;
    let mut shadow = shadow(&device);
    assert_eq!(write_u32(&mut shadow, 0x64, 0x0403_0201).forward, forward(0x64, &[1, 2, 3, 4]));
    assert_eq!(
        write_u32(&mut shadow, 0x60, u32::MAX).forward,
        forward(0x63, &[0xff]),
        "not id, link and length"
    );
    assert_eq!(read(&shadow, &device, 0xe0), [0x5a]);
    assert_eq!(write_u32(&mut shadow, 0xe0, 7).forward, forward(0xe0, &[7, 0, 0, 0]));
    assert_eq!(write_u32(&mut shadow, 0x800, 7).forward, [], "above, nothing is written");
}

#[test]
fn a_list_that_ends_wrong_is_remarked_and_closes_what_is_behind_it() {
    let mut device = with_standard(&[(0x40, POWER, &[])]);
    device[0x41] = 0x40;
    let mut shadow = shadow(&device);
    let remark = "its standard capabilities end at 0x40, to which it comes a second time: what comes after is not the \
                  guest's";
    assert_eq!(shadow.remarks(), [remark]);
    assert_eq!(read(&shadow, &device, 0x41), [0]);
    assert_eq!(write_u32(&mut shadow, 0xe0, 7).forward, []);
}

#[test]
fn a_capability_is_added_where_qemu_would_and_otherwise_where_there_is_room() {
    let clique = Clique::new(5).unwrap();
    let at = |device: &[u8]| {
        let options = Options { added: vec![clique.capability()], ..options() };
        Shadow::new(device, &options)
            .map(|shadow| (shadow.capabilities().last().unwrap().capability.offset, shadow))
    };
    let vendor = |length: u8| vec![length; usize::from(length) - 2];
    let plain = with_standard(&[(0x40, POWER, &[])]);
    let (offset, shadow) = at(&plain).unwrap();
    assert_eq!((offset, read(&shadow, &plain, 0x41)), (0xc8, [0xc8]), "linked behind the last");
    assert_eq!(read(&shadow, &plain, 0xc8), [0x09, 0, 8, b'P', b'2', b'P', 5 << 3, 0]);
    let turing = with_standard(&[(0xc8, 0x09, &vendor(12))]);
    assert_eq!(at(&turing).unwrap().0, 0xd4);
    let full = with_standard(&[(0xc8, 0x09, &vendor(16))]);
    assert_eq!(at(&full).unwrap().0, 0xd8, "behind the last capability");
    let mut used = with_standard(&[(0xc8, 0x09, &vendor(16))]);
    used[0xdb] = 1;
    assert_eq!(at(&used).unwrap().0, 0xdc, "registers that nobody explains are in use");
    let none = with_standard(&[(0xc0, 0x08, &[1; 0x3e])]);
    let error = at(&none).unwrap_err().to_string();
    assert_eq!(
        error,
        "0x8 bytes for the P2P approval capability fit nowhere in its configuration space: HyperTransport at \
         0xc0..0x100; leave it away"
    );
    let bare = endpoint(256);
    let (_, shadow) = at(&bare).unwrap();
    assert_eq!((read(&shadow, &bare, 0x34), read_u16(&shadow, &bare, 6)), ([0xc8], 0x10), "it makes a list");
}

#[test]
fn a_reset_forgets_what_the_guest_wrote() {
    let device = with_standard(&[(0x40, POWER, &[]), (0x48, MSI, &[0x80, 1])]);
    let mut shadow = shadow(&device);
    let before = read_all(&shadow, &device);
    for at in (0..4096).step_by(4) {
        let _ = write_u32(&mut shadow, at, u32::MAX);
    }
    shadow.set_msi_pending(1);
    assert_ne!(read_all(&shadow, &device), before);
    shadow.reset();
    assert_eq!(read_all(&shadow, &device), before);
}

#[test]
fn the_device_is_asked_once_and_only_for_what_is_its() {
    let device = with_standard(&[(0x40, POWER, &[])]);
    let shadow = shadow(&device);
    let mut data = [0; 4];
    shadow.read(0, &mut data, |_, _| panic!("ids are ours"));
    let mut asked = Vec::new();
    shadow.read(0x4, &mut data, |offset, data| asked.push((offset, data.len())));
    assert_eq!(asked, [(4, 4)], "the status register is the device's");
    let mut beyond = [0; 8];
    shadow.read(0xffc, &mut beyond, |_, _| {});
    assert_eq!(beyond, [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
}
