//! The two lists of capabilities, walked.

use egm_vfio::pci::capability::{self, CapabilityId, ListEnd};

use crate::space::{add_extended, endpoint, put, with_standard};

const POWER: u8 = 0x01;
const MSI: u8 = 0x05;
const VENDOR: u8 = 0x09;
const EXPRESS: u8 = 0x10;
const MSIX: u8 = 0x11;

fn places(list: &capability::List) -> Vec<(u16, u16, bool)> {
    list.capabilities.iter().map(|c| (c.offset, c.end(), c.exact)).collect()
}

#[test]
fn a_list_is_in_the_order_of_its_links() {
    let space = with_standard(&[(0x80, POWER, &[3, 0]), (0x40, MSIX, &[7, 0]), (0xa0, EXPRESS, &[2, 0])]);
    let list = capability::standard(&space);
    let ids: Vec<_> = list.capabilities.iter().map(|c| c.id).collect();
    assert_eq!(ids, [POWER, MSIX, EXPRESS].map(CapabilityId::Standard));
    assert_eq!(list.end, ListEnd::Null);
    assert_eq!(capability::msix_vectors(&space), 8);
}

#[test]
fn lengths_are_the_specifications() {
    let msi = |control: u16| {
        let space = with_standard(&[(0x40, MSI, &control.to_le_bytes())]);
        capability::standard(&space).capabilities[0].length
    };
    assert_eq!([0, 1 << 7, 1 << 8, 1 << 7 | 1 << 8].map(msi), [10, 14, 20, 24], "7.7.1");
    let express = |version| {
        let space = with_standard(&[(0x40, EXPRESS, &[version, 0])]);
        capability::standard(&space).capabilities[0].length
    };
    assert_eq!([1, 2, 0x91].map(express), [0x14, 0x3c, 0x0c], "7.5.3");
    let vendor = |length| {
        let space = with_standard(&[(0x40, VENDOR, &[length])]);
        capability::standard(&space).capabilities[0].length
    };
    assert_eq!([0, 3, 0x14].map(vendor), [3, 3, 0x14], "a length includes id, link and itself");
}

/// Each capability in a space of its own; a list with nothing behind it would give an undefined length 0xc0.
#[test]
fn capabilities_of_one_length_have_it() {
    let standard = |id| {
        let list = capability::standard(&with_standard(&[(0x40, id, &[])]));
        (list.capabilities[0].length, list.capabilities[0].exact)
    };
    let lengths: [(u8, u16); 8] =
        [(POWER, 8), (0x02, 12), (0x03, 8), (0x04, 4), (0x06, 4), (0x0d, 8), (MSIX, 12), (0x13, 6)];
    for (id, length) in lengths {
        assert_eq!(standard(id), (length, true), "{id:#x}");
    }
    assert_eq!(standard(0x08), (0xc0, false), "HyperTransport has several forms");
    let extended = |id, body: &[u8]| {
        let mut space = endpoint(4096);
        add_extended(&mut space, &[(0x100, id, body)]);
        let list = capability::extended(&space);
        (list.capabilities[0].length, list.capabilities[0].exact)
    };
    let lengths: [(u16, u16); 13] = [
        (0x03, 12),
        (0x1f, 12),
        (0x25, 12),
        (0x04, 16),
        (0x1e, 16),
        (0x0e, 8),
        (0x0f, 8),
        (0x18, 8),
        (0x1b, 8),
        (0x10, 64),
        (0x13, 16),
        (0x2e, 24),
        (0x00, 4),
    ];
    for (id, length) in lengths {
        assert_eq!(extended(id, &[]), (length, true), "{id:#x}");
    }
    // §7.8.6 and §7.8.7: the first control register, at 8, counts 1 to 6 entries in its bits 5 to 7.
    for id in [0x15, 0x24] {
        let of = |entries: u8| extended(id, &[0, 0, 0, 0, entries << 5]);
        assert_eq!([0, 1, 2, 6, 7].map(of), [12, 12, 20, 52, 52].map(|length| (length, true)), "{id:#x}");
    }
    assert_eq!(extended(0x01, &[]), (0xf00, false), "error reporting has two lengths");
}

#[test]
fn a_capability_of_unknown_length_ends_where_the_next_begins() {
    const HYPERTRANSPORT: u8 = 0x08;
    let space =
        with_standard(&[(0x60, HYPERTRANSPORT, &[]), (0x40, HYPERTRANSPORT, &[]), (0xa0, POWER, &[])]);
    assert_eq!(
        places(&capability::standard(&space)),
        [(0x60, 0xa0, false), (0x40, 0x60, false), (0xa0, 0xa8, true)]
    );
}

#[test]
fn a_list_that_comes_back_ends() {
    let mut space = with_standard(&[(0x40, POWER, &[]), (0x50, MSIX, &[])]);
    space[0x51] = 0x40;
    let list = capability::standard(&space);
    assert_eq!((list.capabilities.len(), list.end), (2, ListEnd::Loop(0x40)));
    space[0x41] = 0x40;
    assert_eq!(capability::standard(&space).end, ListEnd::Loop(0x40), "to itself");
}

#[test]
fn a_capability_in_another_is_none() {
    let space = with_standard(&[(0x40, MSIX, &[]), (0x44, POWER, &[])]);
    let list = capability::standard(&space);
    assert_eq!((places(&list), list.end), (vec![(0x40, 0x4c, true)], ListEnd::Overlap(0x44)));
    let space = with_standard(&[(0x44, POWER, &[]), (0x40, MSIX, &[])]);
    assert_eq!(capability::standard(&space).end, ListEnd::Overlap(0x40), "also where it begins below");
    let space = with_standard(&[(0xf8, MSIX, &[])]);
    assert_eq!(capability::standard(&space).end, ListEnd::Overlap(0xf8), "nor may it leave the space");
}

#[test]
fn links_to_the_header_and_to_nothing_end_a_list() {
    let mut space = with_standard(&[(0x40, POWER, &[])]);
    space[0x41] = 0x10;
    assert_eq!(capability::standard(&space).end, ListEnd::Outside(0x10));
    space[0x41] = 0x80;
    put(&mut space, 0x80, &[0xff; 0x80]);
    assert_eq!(capability::standard(&space).end, ListEnd::Dead(0x80));
    space[6] = 0;
    assert_eq!(capability::standard(&space).capabilities, [], "the status register says that there are none");
    let short = &with_standard(&[(0x40, MSIX, &[])])[..0x40];
    assert_eq!(capability::msix_vectors(short), 0);
}

#[test]
fn extended_capabilities_begin_at_0x100_and_have_their_lengths() {
    let mut space = endpoint(4096);
    assert_eq!(capability::extended(&space).capabilities, []);
    let vendor = (0x18u32 << 20).to_le_bytes();
    add_extended(
        &mut space,
        &[(0x100, 0x03, &[]), (0x200, 0x10, &[]), (0x140, 0x0b, &vendor), (0x240, 0x01, &[])],
    );
    let list = capability::extended(&space);
    assert_eq!(list.end, ListEnd::Null);
    assert_eq!(
        places(&list),
        [(0x100, 0x10c, true), (0x200, 0x240, true), (0x140, 0x158, true), (0x240, 0x1000, false)]
    );
    assert_eq!(capability::extended(&space[..256]).capabilities, [], "there is no such list in 256 bytes");
}

#[test]
fn a_dead_function_has_no_capabilities() {
    let dead = [0xff; 4096];
    assert_eq!(capability::standard(&dead).capabilities, []);
    let list = capability::extended(&dead);
    assert_eq!((list.capabilities.len(), list.end), (0, ListEnd::Dead(0x100)));
}
