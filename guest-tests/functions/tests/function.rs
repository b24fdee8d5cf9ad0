//! The function as its clients see it.
#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use egm_function::config::Identity;
use egm_function::device::{Function, Setup};
use egm_function::registers::{EGM, OWN};
use egm_vfio_wire::client::Client;
use egm_vfio_wire::frame::{Header, Kind};
use egm_vfio_wire::message::{
    Access, ByFile, Call, DmaAccess, DmaMap, DmaUnmap, IrqAction, IrqData, Request, SetIrqs, Write,
};
use egm_vfio_wire::serve::serve;
use egm_vfio_wire::session::client::{Client as Session, Heard};
use egm_vfio_wire::socket::{Connection, Patience};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;

const LIMIT: Duration = Duration::from_secs(20);
const SETUP: Setup = Setup {
    identity: Identity { vendor: 0x15b3, device: 0x101e, class: 0x02_0000 },
    bar: 4 << 20,
    memory: 1 << 20,
    vectors: 4,
};

/// A connection to a new function.
fn served() -> Connection {
    connected(|| Function::new(SETUP).unwrap())
}

fn connected(function: fn() -> Function) -> Connection {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let mut function = function();
        serve(&mut Connection::new(theirs.into(), LIMIT, Patience::NONE).unwrap(), &mut function)
    });
    Connection::new(ours.into(), LIMIT, Patience::NONE).unwrap()
}

/// A client of a function that may do DMA.
fn client() -> Client {
    let mut client = Client::new(served()).unwrap();
    client.write(7, 4, &[6, 0]).unwrap();
    client
}

fn get(client: &mut Client, offset: u64) -> u32 {
    let mut data = [0; 4];
    client.read(0, offset, &mut data).unwrap();
    u32::from_le_bytes(data)
}

fn get_64(client: &mut Client, offset: u64) -> u64 {
    let mut data = [0; 8];
    client.read(0, offset, &mut data).unwrap();
    u64::from_le_bytes(data)
}

/// The status that a copy ends with.
fn copy(client: &mut Client, from: u64, to: u64, count: u64) -> u32 {
    for (offset, value) in [(0x10, from), (0x18, to), (0x20, count)] {
        client.write(0, offset, &value.to_le_bytes()).unwrap();
    }
    client.write(0, 0x2c, &1_u32.to_le_bytes()).unwrap();
    get(client, 0x30)
}

/// Memory of a guest, 1 MiB, and its window.
fn lend(client: &mut Client, address: u64, write: bool) -> File {
    let file = File::from(rustix::fs::memfd_create(c"guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(2 << 20).unwrap();
    client
        .dma_map(
            DmaMap { read: true, write, offset: 1 << 20, address, size: 1 << 20, by_file: ByFile::Any },
            Some(file.as_fd()),
        )
        .unwrap();
    file
}

#[test]
fn the_function_says_what_it_is() {
    let mut client = client();
    let mut ids = [0; 4];
    client.read(7, 0, &mut ids).unwrap();
    assert_eq!(ids, [0xb3, 0x15, 0x1e, 0x10]);
    assert_eq!((get(&mut client, 0), get_64(&mut client, 8)), (0x464d_4745, 1 << 20));
    let (bar, file) = client.region_info(2).unwrap();
    assert_eq!((bar.size, bar.areas[0].size, file.is_some()), (4 << 20, 1 << 20, true));
    let mut tail = [0; 8];
    client.write(2, (1 << 20) - 4, &[7; 8]).unwrap();
    client.read(2, (1 << 20) - 4, &mut tail).unwrap();
    assert_eq!(tail, [7, 7, 7, 7, 0xff, 0xff, 0xff, 0xff]);
}

#[test]
fn a_copy_between_guest_memory_and_its_own_ends_with_an_interrupt() {
    let mut client = client();
    let guest = lend(&mut client, 0x8000_0000, true);
    let data: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).take(700_000).collect();
    guest.write_all_at(&data, (1 << 20) + 5).unwrap();
    let event: OwnedFd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let set = SetIrqs { index: 2, start: 3, count: 1, action: IrqAction::Trigger, data: IrqData::Eventfd };
    client.set_irqs(set, &[event.as_fd()]).unwrap();
    client.write(0, 0x28, &3_u32.to_le_bytes()).unwrap();
    assert_eq!(copy(&mut client, 0x8000_0005, OWN | 0x100, 700_000), 2);
    assert!(rustix::io::read(&event, &mut [0; 8]).is_ok());
    let mut own = vec![0; 700_000];
    client.read(2, 0x100, &mut own).unwrap();
    assert!(own == data);
    assert_eq!(copy(&mut client, OWN | 0x100, 0x8000_0000, 700_000), 2);
    let mut back = vec![0; 700_000];
    guest.read_exact_at(&mut back, 1 << 20).unwrap();
    assert!(back == data);
    assert_eq!(get(&mut client, 0x34), 2);
}

#[test]
fn what_the_function_may_not_reach_is_a_fault_with_its_address() {
    let mut client = client();
    drop(lend(&mut client, 0x8000_0000, false));
    assert_eq!(copy(&mut client, OWN, 0x8000_0000, 16), 3);
    assert_eq!(get_64(&mut client, 0x38), 0x8000_0000);
    assert_eq!(copy(&mut client, 0x800f_fff0, OWN, 32), 3);
    assert_eq!(get_64(&mut client, 0x38), 0x8010_0000);
    assert_eq!(copy(&mut client, OWN | 1 << 20, OWN, 1), 3);
    assert_eq!(copy(&mut client, 0x8000_0000, OWN, 16), 2);
    client.dma_unmap(DmaUnmap::Window { address: 0x8000_0000, size: 1 << 20 }).unwrap();
    assert_eq!(copy(&mut client, 0x8000_0000, OWN, 16), 3);
}

#[test]
fn without_bus_mastering_there_is_no_dma() {
    let mut client = client();
    drop(lend(&mut client, 0x8000_0000, true));
    client.write(7, 4, &[2, 0]).unwrap();
    assert_eq!(copy(&mut client, 0x8000_0000, OWN, 16), 3);
}

#[test]
fn a_function_level_reset_forgets_all_but_the_memory() {
    let mut client = client();
    client.write(2, 0, b"kept").unwrap();
    assert_eq!(copy(&mut client, OWN, OWN | 0x100, 4), 2);
    // Device control, in the PCI Express capability.
    client.write(7, 0x58, &[0, 0x80]).unwrap();
    assert_eq!((get(&mut client, 0x30), get(&mut client, 0x34), get_64(&mut client, 0x20)), (0, 0, 0));
    let mut data = [0; 4];
    client.read(2, 0x100, &mut data).unwrap();
    assert_eq!(&data, b"kept");
}

const GRACE: Setup =
    Setup { identity: Identity { vendor: 0x10de, device: 0x2342, class: 0x03_0200 }, ..SETUP };
/// The words of a Grace GPU that its driver waits for, and their value when it is ready.
const WORDS: [u64; 2] = [0x1498, 0x200bc];
const TRAINED: u32 = 0xff;

/// Rounds of the driver, which reads the second word only when the first is ready; at most a hundred.
fn rounds_until_ready(client: &mut Client) -> Option<usize> {
    (0..100).find(|_| WORDS.iter().all(|word| get(client, *word) == TRAINED))
}

#[test]
fn a_grace_gpu_is_ready_only_some_reads_after_each_reset() {
    let mut client = Client::new(connected(|| Function::grace(GRACE, 3).unwrap())).unwrap();
    let (bar, _) = client.region_info(0).unwrap();
    assert_eq!((bar.size, get(&mut client, 0), get_64(&mut client, 0x48)), (16 << 20, 0x464d_4745, 3));
    assert_eq!(rounds_until_ready(&mut client), Some(6));
    client.write(7, 0x58, &[0, 0x80]).unwrap();
    assert_eq!(rounds_until_ready(&mut client), Some(6), "after a function-level reset");
    client.write(0, 0x48, &u64::from(u32::MAX).to_le_bytes()).unwrap();
    assert_eq!(rounds_until_ready(&mut client), Some(0), "it is kept ready until it is reset");
    client.reset().unwrap();
    assert_eq!(rounds_until_ready(&mut client), None);
    client.write(0, 0x48, &1_u64.to_le_bytes()).unwrap();
    client.reset().unwrap();
    assert_eq!(rounds_until_ready(&mut client), Some(2));
    assert_eq!(get_64(&mut client, 0x50), 6 + 6 + 100 + 2);
}

#[test]
fn a_grace_gpu_has_the_engine_and_what_is_none_has_no_such_words() {
    let mut gpu = Client::new(connected(|| Function::grace(GRACE, 0).unwrap())).unwrap();
    gpu.write(7, 4, &[6, 0]).unwrap();
    gpu.write(2, 0, b"moved").unwrap();
    assert_eq!(copy(&mut gpu, OWN, OWN | 0x100, 5), 2);
    let mut data = [0; 5];
    gpu.read(2, 0x100, &mut data).unwrap();
    assert_eq!(&data, b"moved");
    let mut other = client();
    other.write(0, 0x48, &7_u64.to_le_bytes()).unwrap();
    assert_eq!(
        (get_64(&mut other, 0x48), get_64(&mut other, 0x50), get(&mut other, 0x1498)),
        (0, 0, u32::MAX)
    );
}

#[test]
fn the_aperture_of_a_grace_gpu_has_no_limit_but_the_end_of_its_sockets_memory() {
    let mut gpu = Client::new(connected(|| {
        let socket = File::from(rustix::fs::memfd_create(c"socket", MemfdFlags::CLOEXEC).unwrap());
        socket.set_len(1 << 20).unwrap();
        socket.write_all_at(b"first", 0).unwrap();
        socket.write_all_at(b"last.", (1 << 20) - 5).unwrap();
        Function::grace(GRACE, 0).unwrap().with_egm(socket).unwrap()
    }))
    .unwrap();
    // Neither a window nor bus mastering: this is no DMA.
    assert_eq!(get(&mut gpu, 0x40), 0);
    let mut data = [0; 5];
    for (from, expected) in [(0, b"first"), ((1 << 20) - 5, b"last.")] {
        assert_eq!(copy(&mut gpu, EGM | from, OWN, 5), 2);
        gpu.read(2, 0, &mut data).unwrap();
        assert_eq!(&data, expected);
    }
    gpu.write(2, 0, b"taken").unwrap();
    assert_eq!(copy(&mut gpu, OWN, EGM | 0x8_0000, 5), 2);
    assert_eq!(copy(&mut gpu, EGM | 0x8_0000, OWN | 0x100, 5), 2);
    gpu.read(2, 0x100, &mut data).unwrap();
    assert_eq!(&data, b"taken");
    assert_eq!(copy(&mut gpu, EGM | 1 << 20, OWN, 5), 3);
    assert_eq!(get_64(&mut gpu, 0x38), EGM | 1 << 20);
    let mut without = Client::new(connected(|| Function::grace(GRACE, 0).unwrap())).unwrap();
    assert_eq!(copy(&mut without, EGM, OWN, 5), 3);
}

/// A window without a file is, for instance, a BAR of another function: its bytes go through the client.
#[test]
fn where_there_is_no_file_the_client_is_asked() {
    let mut connection = served();
    let mut session = Session::new(egm_vfio_wire::client::capabilities());
    let (header, body) = session.greet();
    connection.send(header, [&body, &[]], &[], u32::MAX).unwrap();
    connection.receive(session.most()).unwrap();
    session.take(connection.frame(), 0).unwrap();

    let mut remote: Vec<u8> = (0..=255).cycle().take(0x4_0000).collect();
    let map =
        DmaMap { read: true, write: true, offset: 0, address: 0x1000, size: 0x4_0000, by_file: ByFile::Any };
    let access = |region, offset, count| Access { offset, region, count };
    let numbers = [0x1000_u64, 0x2_1000, 0x2_0000].map(u64::to_le_bytes);
    let [from, to, count] = &numbers;
    let requests = [
        Request::DmaMap(map),
        Request::RegionWrite(Write { access: access(7, 4, 2), data: &[6, 0] }),
        Request::RegionWrite(Write { access: access(0, 0x10, 8), data: from }),
        Request::RegionWrite(Write { access: access(0, 0x18, 8), data: to }),
        Request::RegionWrite(Write { access: access(0, 0x20, 8), data: count }),
        Request::RegionWrite(Write { access: access(0, 0x2c, 4), data: &[1, 0, 0, 0] }),
    ];
    // Sends all messages first; then come the answers, and between them the function's requests.
    for request in &requests {
        let header = session.ask(request, 0, false).unwrap();
        let mut body = Vec::new();
        request.encode(&mut body);
        connection.send(header, [&body, request.data()], &[], u32::MAX).unwrap();
    }
    let (mut answers, mut calls) = (0, 0);
    while answers < requests.len() || calls < 4 {
        connection.receive(session.most()).unwrap();
        let frame = connection.frame();
        let (ticket, call) = match session.take(frame, 0).unwrap() {
            Heard::Answer { outcome, .. } => {
                assert!(outcome.is_ok());
                answers += 1;
                continue;
            }
            Heard::Asked(ticket, call) => (ticket, call),
            other => panic!("{other:?}"),
        };
        calls += 1;
        let DmaAccess { address, count } = call.access();
        let range =
            usize::try_from(address - 0x1000).unwrap()..usize::try_from(address - 0x1000 + count).unwrap();
        let mut reply = Vec::new();
        call.access().encode(&mut reply);
        match call {
            Call::Read(_) => reply.extend_from_slice(&remote[range]),
            Call::Write(_, data) => remote[range].copy_from_slice(data),
        }
        let header: Header = ticket.done().unwrap();
        assert_eq!(header.kind, Kind::Reply { error: None });
        connection.send(header, [&reply, &[]], &[], u32::MAX).unwrap();
    }
    let (first, second) = remote.split_at(0x2_0000);
    assert!(first == second);
}
