//! State of a function that the machine reads from its guest's view: one bit of a register at a time.

use egm_vfio::pci::shadow::{AddedCapability, BarKind, MsixControl, Options, PowerState, Shadow, Treatment};

use crate::space::{bar, options, read, shadow, with_standard, write_u16};

const COMMAND: u16 = 0x04;
const MEMORY: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const INTX_DISABLE: u16 = 1 << 10;

const POWER: u8 = 0x01;
const MSI: u8 = 0x05;
const MSIX: u8 = 0x11;

#[test]
fn bars_are_those_of_the_options() {
    assert_eq!(shadow(&with_standard(&[])).bars(), options().bars);
}

#[test]
fn each_bit_of_the_command_register_has_one_meaning() {
    let mut shadow = shadow(&with_standard(&[]));
    for bits in 0..8_u16 {
        let [memory, master, intx] = [1, 2, 4].map(|bit| bits & bit != 0);
        let command = [(memory, MEMORY), (master, BUS_MASTER), (intx, INTX_DISABLE)];
        let _ =
            write_u16(&mut shadow, COMMAND, command.iter().filter(|(is, _)| *is).map(|(_, bit)| bit).sum());
        let state = (!shadow.decoded().is_empty(), shadow.bus_master(), shadow.intx_disabled());
        assert_eq!(state, (memory, master, intx));
    }
}

/// §7.7.2.2: bit 15 enables MSI-X, bit 14 masks the function.
#[test]
fn msix_is_enabled_and_masked_by_a_bit_each() {
    let mut shadow = shadow(&with_standard(&[(0xb0, MSIX, &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0])]));
    for (control, enabled, masked) in
        [(0, false, false), (0x8000, true, false), (0x4000, false, true), (0xc000, true, true)]
    {
        let _ = write_u16(&mut shadow, 0xb2, control);
        assert_eq!(shadow.msix_control(), Some(MsixControl { enabled, masked }), "{control:#x}");
    }
}

/// §7.7.1.2: bit 0 enables MSI, bits 4 to 6 hold the logarithm of the vectors.
#[test]
fn msi_is_enabled_by_its_lowest_bit_only() {
    let mut shadow = shadow(&with_standard(&[(0x48, MSI, &[0x08, 0])]));
    for (control, enabled, vectors) in [(0, false, 1), (1, true, 1), (0x20, false, 4), (0x41, true, 16)] {
        let _ = write_u16(&mut shadow, 0x4a, control);
        let msi = shadow.msi().unwrap();
        assert_eq!((msi.enabled, msi.vectors), (enabled, vectors), "{control:#x}");
    }
}

/// §7.5.2.2: a write of a state that the function lacks leaves the state and the rest of the register as they are.
#[test]
fn a_power_state_that_there_is_not_changes_no_bit() {
    let device = with_standard(&[(0x40, POWER, &[3, 0, 8])]);
    let mut shadow = shadow(&device);
    for (state, register) in [(PowerState::D0, 0x08), (PowerState::D3Hot, 0x0b)] {
        let _ = write_u16(&mut shadow, 0x44, register);
        for missing in [1, 2] {
            let _ = write_u16(&mut shadow, 0x44, missing);
            assert_eq!(shadow.power(), state);
            assert_eq!(read(&shadow, &device, 0x44), register.to_le_bytes(), "{state:?}, write of {missing}");
        }
    }
}

fn treatments(shadow: &Shadow) -> Vec<(u16, Treatment)> {
    shadow.capabilities().iter().map(|shown| (shown.capability.offset, shown.treatment)).collect()
}

#[test]
fn the_second_of_a_kind_and_what_is_not_offered_are_hidden() {
    let device = with_standard(&[(0x48, MSI, &[0x08, 0]), (0x60, MSI, &[0, 0]), (0x40, POWER, &[3, 0])]);
    let hidden = [(0x48, Treatment::Emulated), (0x60, Treatment::Hidden), (0x40, Treatment::Emulated)];
    let offered = shadow(&device);
    assert_eq!((treatments(&offered), offered.msi_vectors()), (hidden.to_vec(), Some(16)));
    let without = Shadow::new(&device, &Options { msi: false, ..options() }).unwrap();
    let hidden = [(0x48, Treatment::Hidden), (0x60, Treatment::Hidden), (0x40, Treatment::Emulated)];
    assert_eq!((treatments(&without), without.msi()), (hidden.to_vec(), None));
}

#[test]
fn a_capability_of_ours_goes_behind_the_last_where_its_place_is_taken() {
    let device = with_standard(&[(0x80, POWER, &[3, 0]), (0x60, MSI, &[0, 0])]);
    let added = |preferred: &'static [u16]| {
        let added = AddedCapability { id: 9, name: "ours", body: vec![4, 7], preferred, reason: "a test" };
        let shadow = Shadow::new(&device, &Options { added: vec![added], ..options() }).unwrap();
        treatments(&shadow).last().copied()
    };
    assert_eq!(added(&[0xd4]), Some((0xd4, Treatment::Added)));
    assert_eq!(added(&[0x84]), Some((0x88, Treatment::Added)));
    assert_eq!(added(&[]), Some((0x88, Treatment::Added)));
    assert_eq!(added(&[0x38]), Some((0x88, Treatment::Added)), "the header has no room");
}

#[test]
fn the_last_register_and_the_last_bytes_below_4_gib_hold_a_bar() {
    let with =
        |bar| Shadow::new(&with_standard(&[]), &Options { bars: vec![bar], ..Options::default() }).is_ok();
    assert!(with(bar(5, BarKind::Memory32, 0xffff_f000, 0x1000)));
    assert!([6, 7, 8, 255].iter().all(|index| !with(bar(*index, BarKind::Memory32, 0, 0x1000))));
    assert!(!with(bar(5, BarKind::Memory32, 0x1_0000_0000, 0x1000)));
    assert!(with(bar(4, BarKind::Memory64, 0x1_0000_0000, 0x1000)));
}
