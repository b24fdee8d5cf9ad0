use proptest::prelude::*;

use super::*;

fn encoded(request: &Request<'_>) -> Vec<u8> {
    let mut body = Vec::new();
    request.encode(&mut body);
    body.extend_from_slice(request.data());
    body
}

fn requests() -> Vec<Request<'static>> {
    let query = Query { room: 32, index: 2 };
    let access = Access { offset: 0x1000, region: 2, count: 3 };
    let part = Migration { room: 64, size: 2, data: &[7, 8] };
    let set = SetIrqs { index: 2, start: 1, count: 2, action: IrqAction::Trigger, data: IrqData::None };
    vec![
        Request::Version(Version { major: 0, minor: 1, capabilities: Capabilities::default() }),
        Request::DmaMap(DmaMap {
            read: true,
            write: false,
            offset: 1,
            address: 2,
            size: 3,
            by_file: ByFile::Any,
        }),
        Request::DmaUnmap(DmaUnmap::Window { address: 2, size: 3 }),
        Request::DmaUnmap(DmaUnmap::All),
        Request::DeviceInfo(16),
        Request::RegionInfo(query),
        Request::RegionIoFds(query),
        Request::IrqInfo(query),
        Request::SetIrqs(set),
        Request::SetIrqs(SetIrqs { action: IrqAction::Mask, data: IrqData::Bool(&[1, 0]), ..set }),
        Request::SetIrqs(SetIrqs { action: IrqAction::Unmask, data: IrqData::Eventfd, ..set }),
        Request::RegionRead(access),
        Request::RegionWrite(Write { access, data: &[1, 2, 3] }),
        Request::Reset,
        Request::DirtyPages,
        Request::Feature(Feature { room: 8, index: 2, get: true, set: false, probe: false, data: &[1] }),
        Request::MigrationRead(Migration { data: &[], ..part }),
        Request::MigrationWrite(part),
    ]
}

#[test]
fn every_request_is_read_back_as_it_was_written() {
    for request in requests() {
        let body = encoded(&request);
        assert_eq!(Request::decode(request.command().number(), &body), Ok(request));
    }
}

#[test]
fn a_request_cut_short_is_refused_at_every_length() {
    for request in requests() {
        let whole = encoded(&request);
        // The text of a version and the data of a feature have no length of their own, and may be left out.
        let least = match request {
            Request::Version(_) => 4,
            Request::Feature(_) => 8,
            _ => whole.len(),
        };
        for length in 0..least {
            let cut = Request::decode(request.command().number(), &whole[..length]);
            assert!(matches!(cut, Err(Wrong::Short { .. })), "{request:?} {length} {cut:?}");
        }
    }
}

#[test]
fn writes_of_eight_bytes_at_most_travel_together() {
    let access = Access { offset: 8, region: 0, count: 2 };
    let writes =
        [Write { access, data: &[1, 2] }, Write { access: Access { offset: 16, ..access }, data: &[3, 4] }];
    let entries = Writes::entries(&writes);
    let request = Request::WriteMulti(Writes::of(&entries).unwrap());
    let body = encoded(&request);
    let Ok(Request::WriteMulti(read)) = Request::decode(15, &body) else { panic!("refused") };
    assert_eq!((read.count(), read.iter().collect::<Vec<_>>()), (2, writes.to_vec()));

    let mut long = body.clone();
    long[8 + 12] = 9;
    assert!(matches!(Request::decode(15, &long), Err(Wrong::Value { value: 9, .. })));
    let mut many = body;
    many[7] = 0xff;
    assert!(matches!(Request::decode(15, &many), Err(Wrong::Short { .. })));
}

#[test]
fn the_server_s_own_commands_and_unknown_ones_are_no_requests() {
    for command in [0, 11, 12, 19, u16::MAX] {
        assert_eq!(Request::decode(command, &[0; 64]), Err(Wrong::Command { command }));
    }
    assert!(COMMANDS.iter().all(|command| Command::try_from(command.number()) == Ok(*command)));
}

#[test]
fn a_window_that_is_empty_or_ends_beyond_2_to_the_64_is_refused() {
    let map = DmaMap {
        read: true,
        write: true,
        offset: 0,
        address: u64::MAX - 0xfff,
        size: 0x1000,
        by_file: ByFile::Any,
    };
    let read = |map: DmaMap| Request::decode(2, &encoded(&Request::DmaMap(map))).is_ok();
    assert!(read(map));
    assert!(!read(DmaMap { size: 0, ..map }));
    assert!(!read(DmaMap { size: 0x1001, ..map }));
    assert!(!read(DmaMap { offset: u64::MAX, ..map }));
}

#[test]
fn interrupts_have_one_action_one_kind_of_data_and_2048_vectors_at_most() {
    let set = SetIrqs { index: 2, start: 0, count: 1, action: IrqAction::Trigger, data: IrqData::None };
    let body = encoded(&Request::SetIrqs(set));
    let good = (0..=0xff_u8).filter(|flags| {
        let mut body = [&body[..], &[1]].concat();
        body[4] = *flags;
        SetIrqs::decode(&body).is_ok()
    });
    assert_eq!(good.collect::<Vec<_>>(), [9, 10, 12, 17, 18, 20, 33, 34, 36]);
    let with =
        |start, count| SetIrqs::decode(&encoded(&Request::SetIrqs(SetIrqs { start, count, ..set }))).is_ok();
    assert!(with(0, 2048) && with(2047, 1) && with(0, 0));
    assert!(!with(2048, 1) && !with(0, 2049) && !with(u32::MAX, u32::MAX) && !with(1, 0));
    let with_argsz = |argsz: u8| SetIrqs::decode(&[&[argsz, 0, 0, 0], &body[4..]].concat()).is_ok();
    assert!(with_argsz(20) && with_argsz(21) && !with_argsz(19) && !with_argsz(0));
}

#[test]
fn descriptors_come_only_with_what_has_use_for_them() {
    let set = SetIrqs { index: 2, start: 0, count: 3, action: IrqAction::Trigger, data: IrqData::Eventfd };
    let takes = |request: &Request<'_>| (0..5).filter(|fds| request.takes(*fds)).collect::<Vec<_>>();
    assert_eq!(takes(&Request::SetIrqs(set)), [0, 3]);
    assert_eq!(takes(&Request::SetIrqs(SetIrqs { data: IrqData::None, ..set })), [0]);
    assert_eq!(takes(&requests()[1]), [0, 1]);
    let by_file = DmaMap { read: true, write: false, offset: 1, address: 2, size: 3, by_file: ByFile::Mmap };
    assert_eq!(takes(&Request::DmaMap(by_file)), [1]);
    assert_eq!(takes(&Request::Reset), [0]);
}

fn region() -> RegionInfo {
    let areas = vec![Area { offset: 0, size: 0x1000 }, Area { offset: 0x3000, size: 0x5000 }];
    RegionInfo { index: 2, size: 0x8000, offset: 0x1_0000, read: true, write: true, mmap: true, areas }
}

#[test]
fn a_region_is_read_back_and_asked_for_again_when_there_was_no_room() {
    let mut body = Vec::new();
    assert!(!region().encode(32, &mut body));
    assert_eq!((body.len(), RegionInfo::decode(&body, 32)), (32, Ok(RegionReply::NeedsRoom(80))));
    body.clear();
    assert!(region().encode(80, &mut body));
    assert_eq!((body.len(), RegionInfo::decode(&body, 80)), (80, Ok(RegionReply::Whole(region()))));
}

#[test]
fn a_list_of_capabilities_that_loops_or_leads_out_is_refused() {
    let mut good = Vec::new();
    region().encode(80, &mut good);
    let with = |at: usize, value: u8| {
        let mut body = good.clone();
        body[at] = value;
        RegionInfo::decode(&body, 80)
    };
    // The first offset into the head, outside; the next one to itself; more areas than bytes.
    assert!(matches!(with(12, 16), Err(Wrong::Value { .. })));
    assert!(matches!(with(12, 78), Err(Wrong::Short { .. })));
    assert!(matches!(with(36, 32), Err(Wrong::Value { .. })));
    assert!(matches!(with(40, 3), Err(Wrong::Short { .. })));
    assert!(matches!(with(42, 1), Err(Wrong::Value { .. })));
    // An unknown capability (0x8001) is ignored.
    let Ok(RegionReply::Whole(info)) = with(33, 0x80) else { panic!("refused") };
    assert_eq!(info.areas, []);
}

#[test]
fn areas_are_in_the_region_and_apart() {
    let with = |areas: &[(u64, u64)]| {
        let areas = areas.iter().map(|&(offset, size)| Area { offset, size }).collect();
        let mut body = Vec::new();
        RegionInfo { areas, ..region() }.encode(4096, &mut body);
        RegionInfo::decode(&body, 4096).is_ok()
    };
    assert!(with(&[(0x7000, 0x1000), (0, 0x7000)]));
    assert!(!with(&[(0x7000, 0x1001)]));
    assert!(!with(&[(0, 0x1001), (0x1000, 1)]));
    assert!(!with(&[(0x1000, 0)]));
    assert!(!with(&[(u64::MAX, 2)]));
}

fn version(data: &[u8]) -> Result<Capabilities, Wrong> {
    Version::decode(&[&[0, 0, 1, 0], data].concat()).map(|version| version.capabilities)
}

#[test]
fn a_version_s_text_ends_with_a_nul_and_is_a_json_object() {
    assert_eq!(version(b""), Ok(Capabilities::default()));
    assert_eq!(version(b"{}\0"), Ok(Capabilities::default()));
    let known =
        version(b"{\"capabilities\":{\"max_msg_fds\":8,\"twin_socket\":{\"supported\":true},\"new\":[1]}}\0");
    let twin_socket = Some(TwinSocket { supported: true, fd_index: None });
    assert_eq!(known, Ok(Capabilities { max_msg_fds: Some(8), twin_socket, ..Capabilities::default() }));
    let wrong: [&[u8]; 9] = [
        b"[]\0",
        b"{\"capabilities\":[8]}\0",
        b"{}",
        b"\0",
        b"{}\0\0",
        b"{\"capabilities\":7}\0",
        b"{\"capabilities\":{\"max_msg_fds\":-1}}\0",
        b"{\"capabilities\":{\"pgsizes\":1e400}}\0",
        b"{\"capabilities\":{\"a\xff\":0}}\0",
    ];
    for data in wrong {
        assert_eq!(version(data), Err(Wrong::Version), "{}", String::from_utf8_lossy(data));
    }
}

#[test]
fn a_version_s_text_is_bounded_in_length_and_its_depth_costs_no_stack() {
    let long = |length: usize| format!("{{{}}}\0", " ".repeat(length - 3)).into_bytes();
    assert!(version(&long(4096)).is_ok());
    assert_eq!(version(&long(4097)), Err(Wrong::Version));
    let deep = |name: &str| format!("{{\"{name}\":{}{}}}\0", "[".repeat(1900), "]".repeat(1900));
    assert_eq!(version(deep("new").as_bytes()), Ok(Capabilities::default()));
    assert_eq!(version(deep("capabilities").as_bytes()), Err(Wrong::Version));
}

#[test]
fn limits_have_the_documented_defaults_and_ends_of_our_own() {
    let limits = Capabilities::default().limits().unwrap();
    let defaults = Limits { fds: 1, data: 1 << 20, maps: 0xffff, page_sizes: 0x1000, write_multiple: false };
    assert_eq!(limits, defaults);
    let all = Some(u64::MAX);
    let greedy = Capabilities { max_msg_fds: all, max_data_xfer_size: all, ..Capabilities::default() };
    assert_eq!(greedy.limits().map(|limits| (limits.fds, limits.data)), Ok((253, 16 << 20)));
    let none = Capabilities { max_data_xfer_size: Some(7), ..Capabilities::default() };
    assert!(matches!(none.limits(), Err(Wrong::Value { value: 7, .. })));
}

#[test]
fn replies_are_read_back_as_they_were_written() {
    let mut body = Vec::new();
    let info = DeviceInfo { resettable: true, regions: 9, irqs: 5 };
    info.encode(&mut body);
    assert_eq!(DeviceInfo::decode(&body), Ok(info));
    body[4] = 1;
    assert!(matches!(DeviceInfo::decode(&body), Err(Wrong::Value { .. })), "not a PCI function");

    body.clear();
    let irq =
        IrqInfo { index: 2, count: 2048, eventfd: true, maskable: false, automasked: false, noresize: true };
    irq.encode(&mut body);
    assert_eq!(IrqInfo::decode(&body), Ok(irq));
    body[13] = 9;
    assert!(matches!(IrqInfo::decode(&body), Err(Wrong::Value { .. })), "more vectors than there can be");

    body.clear();
    let access = DmaAccess { address: 0x1000, count: 2 };
    access.encode(&mut body);
    body.extend([1, 2]);
    assert_eq!(DmaAccess::split(&body), Ok((access, &[1, 2][..])));
}

/// A body of 32-bit little-endian words.
fn words(words: &[u32]) -> Vec<u8> {
    words.iter().copied().flat_map(u32::to_le_bytes).collect()
}

/// `body` with its word at byte `at` replaced.
fn with_word(body: &[u8], at: usize, word: u32) -> Vec<u8> {
    [&body[..at], &word.to_le_bytes(), &body[at + 4..]].concat()
}

#[test]
fn only_data_that_the_message_counts_must_end_with_it() {
    for request in requests() {
        let longer = [&encoded(&request)[..], &[0]].concat();
        let read = Request::decode(request.command().number(), &longer);
        match &request {
            Request::RegionWrite(_) => assert!(matches!(read, Err(Wrong::Value { value: 1, .. }))),
            Request::SetIrqs(SetIrqs { data: IrqData::Bool(_), .. }) => {
                assert!(matches!(read, Err(Wrong::Value { value: 1, .. })));
            }
            // A byte after the text's NUL, and one more byte of data.
            Request::Version(_) => assert_eq!(read, Err(Wrong::Version)),
            Request::Feature(_) => assert!(read.is_ok()),
            _ => assert_eq!(read, Ok(request)),
        }
    }
}

#[test]
fn one_of_several_writes_keeps_eight_bytes() {
    let access = |count| Access { offset: 0x10, region: 1, count };
    let long = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let entries = Writes::entries(&[
        Write { access: access(9), data: &long },
        Write { access: access(8), data: &long[..8] },
        Write { access: access(0), data: &[] },
    ]);
    let body = encoded(&Request::WriteMulti(Writes::of(&entries).unwrap()));
    let Ok(Request::WriteMulti(read)) = Request::decode(15, &body) else { panic!("refused") };
    let read: Vec<_> = read.iter().collect();
    let eight = Write { access: access(8), data: &long[..8] };
    assert_eq!(read, [eight, eight, Write { access: access(0), data: &[] }]);
    assert!(Writes::of(&entries[..23]).is_err());
}

#[test]
fn a_server_s_call_has_a_range_and_for_a_write_its_data() {
    let access = DmaAccess { address: 0x1000, count: 2 };
    let mut body = Vec::new();
    access.encode(&mut body);
    let read = Call::decode(11, &body).unwrap();
    assert_eq!((read.command(), read.access(), read.data()), (Command::DmaRead, access, &[][..]));
    assert!(matches!(Call::decode(12, &body), Err(Wrong::Short { have: 0, need: 2, .. })));
    body.extend([7, 8]);
    let write = Call::decode(12, &body).unwrap();
    assert_eq!((write.command(), write.access(), write.data()), (Command::DmaWrite, access, &[7, 8][..]));
    assert_eq!(Call::decode(9, &body), Err(Wrong::Command { command: 9 }));
}

#[test]
fn each_flag_of_a_dma_window_means_one_thing() {
    let map = |flags| DmaMap::decode(&words(&[32, flags, 0, 0, 0x1000, 0, 0x1000, 0]));
    for (flags, by_file) in [(0, ByFile::Any), (4, ByFile::Mmap), (8, ByFile::Io)] {
        for rights in 0..4 {
            let read = map(flags | rights).unwrap();
            let (readable, writable) = (rights & 1 == 1, rights >> 1 == 1);
            assert_eq!((read.read, read.write, read.by_file), (readable, writable, by_file));
            let again = encoded(&Request::DmaMap(read));
            assert_eq!(Request::decode(2, &again), Ok(Request::DmaMap(read)));
        }
    }
    for flags in [12, 13, 15, 16, 1 << 31] {
        assert!(map(flags).is_err(), "{flags:#x}");
    }
}

#[test]
fn argsz_covers_the_structure_of_a_dma_window_and_stays_within_a_transfer() {
    let map = |argsz| DmaMap::decode(&words(&[argsz, 3, 0, 0, 0, 0, 0x1000, 0])).is_ok();
    assert_eq!([31, 32, 33, u32::MAX].map(map), [false, true, true, true]);
    let unmap = |argsz| DmaUnmap::decode(&words(&[argsz, 0, 0, 0, 0x1000, 0])).is_ok();
    assert_eq!([23, 24, 1 << 20, (1 << 20) + 1].map(unmap), [false, true, true, false]);
}

#[test]
fn all_windows_are_released_without_a_range() {
    let unmap = |flags, address, size| DmaUnmap::decode(&words(&[24, flags, address, 0, size, 0]));
    assert_eq!(unmap(2, 0, 0), Ok(DmaUnmap::All));
    assert_eq!(unmap(0, 0, 1), Ok(DmaUnmap::Window { address: 0, size: 1 }));
    for (flags, address, size) in
        [(2, 1, 0), (2, 0, 1), (2, 1, 2), (2, 1, 1), (0, 1, 0), (1, 0, 1), (3, 0, 0)]
    {
        assert!(unmap(flags, address, size).is_err(), "{flags} {address} {size}");
    }
}

#[test]
fn a_feature_is_read_or_set_or_both_are_probed() {
    for bits in 0..8_u32 {
        let body = words(&[8, bits << 16 | 0x8001]);
        let feature = Feature::decode(&body);
        if bits == 0b011 {
            assert!(matches!(feature, Err(Wrong::Value { .. })));
            continue;
        }
        let feature = feature.unwrap();
        let meant = (feature.get, feature.set, feature.probe);
        assert_eq!((meant, feature.index), ((bits & 1 != 0, bits & 2 != 0, bits & 4 != 0), 0x8001));
        assert_eq!(encoded(&Request::Feature(feature)), body);
    }
}

#[test]
fn a_query_for_eventfds_has_neither_flags_nor_a_count() {
    let query = |flags, count| Query::decode_io_fds(&words(&[32, flags, 2, count])).is_ok();
    assert_eq!(
        [query(0, 0), query(1, 0), query(0, 1), query(1, 1), query(1, 2)],
        [true, false, false, false, false]
    );
}

#[test]
fn each_flag_of_a_reply_means_one_thing() {
    for resettable in [false, true] {
        let info = DeviceInfo { resettable, regions: 9, irqs: 5 };
        let mut body = Vec::new();
        info.encode(&mut body);
        assert_eq!(body, words(&[16, 2 | u32::from(resettable), 9, 5]));
        assert_eq!(DeviceInfo::decode(&body), Ok(info));
    }
    for flags in 0..16_u32 {
        let [eventfd, maskable, automasked, noresize] = [1, 2, 4, 8].map(|flag| flags & flag != 0);
        let info = IrqInfo { index: 1, count: 1, eventfd, maskable, automasked, noresize };
        let mut body = Vec::new();
        info.encode(&mut body);
        assert_eq!((&body, IrqInfo::decode(&body)), (&words(&[16, flags, 1, 1]), Ok(info)));
    }
    for flags in 0..8_u32 {
        let [read, write, mmap] = [1, 2, 4].map(|flag| flags & flag != 0);
        let info = RegionInfo { read, write, mmap, areas: Vec::new(), ..region() };
        let mut body = Vec::new();
        assert!(info.encode(32, &mut body));
        assert_eq!(body, words(&[32, flags, 2, 0, 0x8000, 0, 0x1_0000, 0]));
        assert_eq!(RegionInfo::decode(&body, 32), Ok(RegionReply::Whole(info)));
    }
}

/// The kernel's `vfio_region_info_cap_sparse_mmap`: id 1, version 1, the next capability, the number of areas.
#[test]
fn areas_travel_in_version_1_of_their_capability_and_only_with_its_flag() {
    let mut body = Vec::new();
    region().encode(80, &mut body);
    assert_eq!(body[4], 0b1111);
    assert_eq!(body[32..48], words(&[1 << 16 | 1, 0, 2, 0]));
    let without = with_word(&body, 4, 0b0111);
    let info = RegionInfo { areas: Vec::new(), ..region() };
    assert_eq!(RegionInfo::decode(&without, 80), Ok(RegionReply::Whole(info)));
}

#[test]
fn a_region_has_4096_areas_at_most() {
    let with = |count: u64| {
        let areas = (0..count).map(|index| Area { offset: index * 0x1000, size: 0x1000 }).collect();
        let mut body = Vec::new();
        RegionInfo { size: u64::MAX >> 1, areas, ..region() }.encode(u32::MAX, &mut body);
        RegionInfo::decode(&body, u32::MAX)
    };
    assert!(matches!(with(4096), Ok(RegionReply::Whole(info)) if info.areas.len() == 4096));
    assert!(matches!(with(4097), Err(Wrong::Value { value: 4097, .. })));
}

#[test]
fn limits_end_where_a_register_and_a_page_begin() {
    let data = |size| Capabilities { max_data_xfer_size: Some(size), ..Capabilities::default() };
    assert_eq!(data(8).limits().map(|limits| limits.data), Ok(8));
    let migration = |size| {
        let migration = Some(MigrationPages { pgsize: Some(size) });
        Capabilities { migration, ..Capabilities::default() }.limits().is_ok()
    };
    assert_eq!([0x1000, 0x2000, 1 << 63].map(migration), [true; 3]);
    assert_eq!([0, 0x800, 0xfff, 0x1001, 0x1800, u64::MAX].map(migration), [false; 6]);
    let pages = |sizes| Capabilities { pgsizes: Some(sizes), ..Capabilities::default() }.limits();
    assert_eq!(pages(0x1000).map(|limits| limits.page_sizes), Ok(0x1000));
    assert_eq!(pages(0x20_1000).map(|limits| limits.page_sizes), Ok(0x20_1000));
    assert!([0, 0x800, 0xfff].iter().all(|sizes| pages(*sizes).is_err()));
}

proptest! {
    #[test]
    fn any_bytes_are_a_request_or_refused(command in 0..20_u16, body in prop::collection::vec(any::<u8>(), 0..128)) {
        if let Ok(request) = Request::decode(command, &body) {
            prop_assert_eq!(request.command().number(), command);
            // The decoded value is the same after it is encoded again.
            let again = encoded(&request);
            prop_assert_eq!(Request::decode(command, &again), Ok(request));
        }
    }

    #[test]
    fn any_bytes_are_a_region_or_refused(
        // Small numbers, so that flags and offsets often lead somewhere.
        body in prop::collection::vec(prop_oneof![4 => Just(0_u8), 4 => 0..64_u8, 1 => any::<u8>()], 32..200)
    ) {
        if let Ok(RegionReply::Whole(region)) = RegionInfo::decode(&body, u32::MAX) {
            let mut again = Vec::new();
            prop_assert!(region.encode(u32::MAX, &mut again));
            prop_assert_eq!(RegionInfo::decode(&again, u32::MAX), Ok(RegionReply::Whole(region)));
        }
    }

    #[test]
    fn any_text_is_a_version_or_refused(text in ".{0,200}") {
        let _ = version(format!("{text}\0").as_bytes());
    }
}
