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
