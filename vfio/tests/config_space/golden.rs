//! Recorded functions, and the guest's view of them. After an intended change, write the views again and read the
//! difference:
//! ```text
//! EGM_GOLDEN=write cargo test -p egm-vfio --test config_space && git diff vfio/tests/data
//! ```

use std::fmt::Write;
use std::fs;

use egm_address::{Gpa, Span};
use egm_vfio::pci::capability::{self, CapabilityId};
use egm_vfio::pci::shadow::{BarKind, Options, Shadow, rules};
use egm_vfio::variant::clique::Clique;

use crate::space::{bar, read, read_all};

/// Bytes of a file of `lspci -xxxx`: rows `offset: sixteen bytes`, missing rows are zero.
fn recorded(name: &str, length: usize) -> Vec<u8> {
    let mut space = vec![0; length];
    let text = fs::read_to_string(format!("tests/data/{name}.txt")).unwrap();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (offset, bytes) = line.split_once(": ").unwrap();
        let offset = usize::from_str_radix(offset, 16).unwrap();
        let bytes = bytes.split(' ').map(|byte| u8::from_str_radix(byte, 16).unwrap());
        for (to, byte) in space[offset..].iter_mut().zip(bytes) {
            *to = byte;
        }
    }
    space
}

/// The guest's view: the treatment of each capability, and the bytes as `lspci -xxxx` in the guest prints them.
fn view(shadow: &Shadow, device: &[u8]) -> String {
    let mut text = String::new();
    for shown in shadow.capabilities() {
        let c = shown.capability;
        let place = format!("{:#05x}..{:#05x}{}", c.offset, c.end(), if c.exact { "" } else { "?" });
        writeln!(text, "{place:14} {:16} {}: {}: {}", c.id, shown.name, shown.treatment, shown.reason)
            .unwrap();
    }
    for remark in shadow.remarks() {
        writeln!(text, "{remark}").unwrap();
    }
    if let Some(msix) = shadow.msix() {
        let (table, pending) = (msix.table, msix.pending);
        let places = format!(
            "table in BAR {} at {}, pending bits in BAR {} at {}",
            table.bar, table.span, pending.bar, pending.span
        );
        writeln!(text, "{} MSI-X vectors: {places}", msix.vectors).unwrap();
    }
    writeln!(text).unwrap();
    for (row, bytes) in read_all(shadow, device).chunks(16).enumerate() {
        if bytes.iter().any(|byte| *byte != 0) {
            let bytes: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(text, "{:02x}: {}", row * 16, bytes.join(" ")).unwrap();
        }
    }
    text
}

#[track_caller]
fn agrees(name: &str, text: &str) {
    let path = format!("tests/data/{name}.golden.txt");
    if std::env::var_os("EGM_GOLDEN").is_some_and(|value| value == "write") {
        fs::write(&path, text).unwrap();
    }
    assert_eq!(fs::read_to_string(&path).unwrap_or_default(), text, "{path}");
}

#[test]
fn an_h200_looks_as_reviewed() {
    let device = recorded("h200", 4096);
    let kind = BarKind::Memory64Prefetchable;
    let bars = vec![
        bar(0, kind, 0x80_0000_0000, 16 << 20),
        bar(2, kind, 0x40_0000_0000, 256 << 30),
        bar(4, kind, 0x80_0200_0000, 32 << 20),
    ];
    let added = vec![Clique::new(3).unwrap().capability()];
    let options = Options { bars, msi: true, msix: true, added, ..Options::default() };
    let shadow = Shadow::new(&device, &options).unwrap();
    assert_eq!(shadow.msix().map(|msix| msix.vectors), Some(9), "as lspci counts them");
    assert_eq!(read::<8>(&shadow, &device, 0xc8), [0x09, 0, 0x08, b'P', b'2', b'P', 3 << 3, 0]);
    agrees("h200", &view(&shadow, &device));
}

#[test]
fn a_connectx_looks_as_reviewed() {
    let device = recorded("connectx5", 256);
    let bars = vec![bar(0, BarKind::Memory64Prefetchable, 0x80_0000_0000, 32 << 20)];
    let rom = Some(Span::new(Gpa::new(0xc000_0000), 1 << 20).unwrap());
    let options = Options { bars, rom, pin: Some(1), msi: true, msix: true, ..Options::default() };
    let shadow = Shadow::new(&device, &options).unwrap();
    assert_eq!(shadow.msix().map(|msix| msix.vectors), Some(64));
    assert_eq!(capability::msix_vectors(&device), 64);
    agrees("connectx5", &view(&shadow, &device));
}

/// The whole 4 KiB of an older card of the family.
#[test]
fn the_extended_list_of_a_connectx_looks_as_reviewed() {
    let device = recorded("connectx3", 4096);
    let kind = BarKind::Memory32;
    let bars = vec![bar(0, kind, 0xc010_0000, 1 << 20), bar(2, kind, 0xbe00_0000, 32 << 20)];
    let options = Options { bars, msi: true, msix: true, ..Options::default() };
    let shadow = Shadow::new(&device, &options).unwrap();
    assert_eq!(shadow.msix().map(|msix| msix.vectors), Some(256));
    agrees("connectx3", &view(&shadow, &device));
}

#[test]
fn a_function_that_has_virtual_ones_looks_as_reviewed() {
    let device = recorded("igb", 4096);
    let kind = BarKind::Memory32;
    let bars = vec![
        bar(0, kind, 0xe080_0000, 128 << 10),
        bar(1, kind, 0xe000_0000, 4 << 20),
        bar(3, kind, 0xe084_0000, 16 << 10),
    ];
    let options = Options { bars, pin: Some(1), msi: true, msix: true, ..Options::default() };
    let shadow = Shadow::new(&device, &options).unwrap();
    assert_eq!(read::<4>(&shadow, &device, 0x160)[..2], [0, 0], "no guest makes virtual functions");
    agrees("igb", &view(&shadow, &device));
}

#[test]
fn a_function_that_asks_for_translations_looks_as_reviewed() {
    let device = recorded("dsa", 4096);
    let kind = BarKind::Memory64Prefetchable;
    let bars = vec![bar(0, kind, 0x80_0000_0000, 64 << 10), bar(2, kind, 0x80_0002_0000, 128 << 10)];
    let options = Options { bars, msi: true, msix: true, ..Options::default() };
    let shadow = Shadow::new(&device, &options).unwrap();
    let shown = shadow.capabilities();
    for id in [0x000f, 0x0013, 0x001b] {
        let hidden = shown.iter().find(|shown| shown.capability.id == CapabilityId::Extended(id)).unwrap();
        assert_eq!(read::<2>(&shadow, &device, hidden.capability.offset), [0, 0], "{}", hidden.name);
    }
    agrees("dsa", &view(&shadow, &device));
}

#[test]
fn a_cxl_device_looks_as_reviewed() {
    let device = recorded("cxl", 4096);
    let kind = BarKind::Memory64Prefetchable;
    let bars = vec![bar(0, kind, 0x80_0000_0000, 1 << 20), bar(2, kind, 0x80_0010_0000, 1 << 20)];
    let options = Options { bars, msi: true, msix: true, ..Options::default() };
    let shadow = Shadow::new(&device, &options).unwrap();
    agrees("cxl", &view(&shadow, &device));
}

/// The tables themselves: a person has read the reason of every rule.
#[test]
fn the_rules_are_as_reviewed() {
    let text: String = rules().map(|row| format!("{row}\n")).collect();
    assert!(rules().all(|row| !row.reason.is_empty() && !row.name.is_empty()));
    agrees("rules", &text);
}
