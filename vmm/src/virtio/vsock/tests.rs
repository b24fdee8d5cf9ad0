//! The userspace device from the guest's side, with real Unix sockets on the host's.
//!
//! Unix sockets deliver at once, so no test waits: what a call of `pump` does not see is not there.

use std::io::Read;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use event_manager::EventManager;
use event_manager::SubscriberOps;
use proptest::prelude::*;
use tempfile::TempDir;
use vm_memory::Bytes;
use vm_memory::GuestAddress;

use super::connection::BUFFER;
use super::packet::HEADER;
use super::*;
use crate::virtio::testing::CountingInterrupt;
use crate::virtio::testing::Driver;
use crate::virtio::testing::EventInterrupt;
use crate::virtio::testing::Part;
use crate::virtio::testing::memory;

const CID: u64 = 3;
const REQUEST: u16 = 1;
const RESPONSE: u16 = 2;
const RST: u16 = 3;
const SHUTDOWN: u16 = 4;
const RW: u16 = 5;
const CREDIT_UPDATE: u16 = 6;

/// Where the guest keeps what it sends and receives.
const OUTBOX: u64 = 0x1_0000;
const INBOX: u64 = 0x4_0000;
/// Bytes of a receive buffer.
const SLOT: u32 = 0x1000;

/// A packet as the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    op: u16,
    host_port: u32,
    guest_port: u32,
    flags: u32,
    forwarded: u32,
    payload: Vec<u8>,
}

struct Guest {
    folder: TempDir,
    memory: GuestMemoryMmap,
    receive: Driver,
    transmit: Driver,
    device: Arc<Mutex<Vsock>>,
    /// Receive buffers given so far.
    given: u64,
    /// Bytes that the guest took, for its credit.
    taken: u32,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn header(guest_port: u32, host_port: u32, op: u16, length: u32, taken: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(CID.to_le_bytes());
    bytes.extend(2u64.to_le_bytes());
    bytes.extend(guest_port.to_le_bytes());
    bytes.extend(host_port.to_le_bytes());
    bytes.extend(length.to_le_bytes());
    bytes.extend(1u16.to_le_bytes());
    bytes.extend(op.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(0x10000u32.to_le_bytes());
    bytes.extend(taken.to_le_bytes());
    bytes
}

impl Guest {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let sockets = HostSockets::bind(&folder.path().join("v")).unwrap();
        let device = Vsock::new(3, Backend::Userspace(sockets)).unwrap();
        let memory = memory();
        let receive = Driver::new(&memory, 0x1000, 64);
        let transmit = Driver::new(&memory, 0x2000, 64);
        let guest = Self {
            folder,
            memory,
            receive,
            transmit,
            device: Arc::new(Mutex::new(device)),
            given: 0,
            taken: 0,
        };
        guest.activate();
        guest
    }

    fn activate(&self) {
        let activation = Activation {
            memory: self.memory.clone(),
            queues: vec![Some(self.receive.queue()), Some(self.transmit.queue()), None],
            features: 0,
            interrupt: Arc::new(CountingInterrupt::default()),
        };
        self.device.lock().unwrap().activate(activation).unwrap();
    }

    /// With 32 receive buffers.
    fn with_buffers() -> Self {
        let mut guest = Self::new();
        guest.give_buffers(32);
        guest
    }

    fn give_buffers(&mut self, count: u64) {
        for _ in 0..count {
            self.receive.offer(&[Part::Write(INBOX + self.given % 32 * u64::from(SLOT), SLOT)]);
            self.given += 1;
        }
    }

    fn pump(&self) {
        self.device.lock().unwrap().pump();
    }

    fn serve(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.folder.path().join(format!("v_{port}"))).unwrap()
    }

    fn dial(&self, handshake: &[u8]) -> UnixStream {
        let mut stream = UnixStream::connect(self.folder.path().join("v")).unwrap();
        stream.write_all(handshake).unwrap();
        stream.set_nonblocking(true).unwrap();
        self.pump();
        stream
    }

    /// Sends a packet with its payload in buffers of `piece` bytes, and lets the device work.
    fn send_in_pieces(&mut self, bytes: &[u8], piece: u32) {
        self.memory.write_slice(bytes, GuestAddress(OUTBOX)).unwrap();
        let length = u32::try_from(bytes.len()).unwrap();
        let parts: Vec<_> = (0..length)
            .step_by(piece as usize)
            .map(|at| Part::Read(OUTBOX + u64::from(at), piece.min(length - at)))
            .collect();
        self.transmit.offer(&parts);
        self.pump();
    }

    fn send(&mut self, guest_port: u32, host_port: u32, op: u16, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap();
        let mut bytes = header(guest_port, host_port, op, length, self.taken);
        if op == SHUTDOWN {
            bytes[32] = 3;
        }
        bytes.extend(payload);
        self.send_in_pieces(&bytes, 0x1_0000);
        assert_eq!(self.transmit.used().len(), 1);
    }

    /// Takes the packets that reached the guest.
    fn seen(&mut self) -> Vec<Seen> {
        self.pump();
        let packet = |(head, written): (u16, u32)| {
            let mut bytes = vec![0; written as usize];
            let at = INBOX + u64::from(head % 32) * u64::from(SLOT);
            self.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
            assert_eq!((bytes[0], bytes[8], bytes[28]), (2, 3, 1), "from the host, to the guest, a stream");
            assert_eq!(u32_at(&bytes, 24) as usize, bytes.len() - HEADER);
            Seen {
                op: u16::from_le_bytes([bytes[30], bytes[31]]),
                host_port: u32_at(&bytes, 16),
                guest_port: u32_at(&bytes, 20),
                flags: u32_at(&bytes, 32),
                forwarded: u32_at(&bytes, 40),
                payload: bytes[HEADER..].to_vec(),
            }
        };
        let seen: Vec<Seen> = self.receive.used().into_iter().map(packet).collect();
        self.taken += seen.iter().map(|s| u32::try_from(s.payload.len()).unwrap()).sum::<u32>();
        seen
    }

    fn ops(&mut self) -> Vec<u16> {
        self.seen().into_iter().map(|seen| seen.op).collect()
    }

    /// A connection from port 1000 of the guest to port 52 of the host.
    fn connected() -> (Self, UnixStream) {
        let mut guest = Self::with_buffers();
        let listener = guest.serve(52);
        guest.send(1000, 52, REQUEST, b"");
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        assert_eq!(guest.ops(), [RESPONSE]);
        (guest, stream)
    }
}

fn read_all(stream: &mut UnixStream) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    let ended = stream.read_to_end(&mut bytes).is_ok();
    (bytes, ended)
}

#[test]
fn a_guest_reaches_a_host_program_and_both_get_the_end() {
    let (mut guest, mut host) = Guest::connected();
    guest.send(1000, 52, RW, b"ping");
    assert_eq!(read_all(&mut host), (b"ping".to_vec(), false));
    host.write_all(b"pong").unwrap();
    let seen = guest.seen();
    assert_eq!((seen[0].op, &seen[0].payload[..]), (RW, &b"pong"[..]));
    assert_eq!((seen[0].host_port, seen[0].guest_port, seen[0].forwarded), (52, 1000, 4));
    guest.send(1000, 52, SHUTDOWN, b"");
    assert_eq!(guest.ops(), [RST], "the answer to a complete shutdown");
    assert_eq!(read_all(&mut host), (vec![], true));
}

#[test]
fn a_port_without_a_server_resets() {
    let mut guest = Guest::with_buffers();
    guest.send(1000, 52, REQUEST, b"");
    assert_eq!(guest.ops(), [RST]);
}

#[test]
fn a_host_program_reaches_the_guest_and_what_follows_the_handshake_is_for_it() {
    let mut guest = Guest::with_buffers();
    let mut host = guest.dial(b"CONNECT 1000\nearly");
    let seen = guest.seen();
    assert_eq!((seen.len(), seen[0].op, seen[0].guest_port), (1, REQUEST, 1000));
    let port = seen[0].host_port;
    assert_eq!(read_all(&mut host), (vec![], false));
    guest.send(1000, port, RESPONSE, b"");
    assert_eq!(read_all(&mut host), (format!("OK {port}\n").into_bytes(), false));
    assert_eq!(guest.seen()[0].payload, b"early");
}

#[test]
fn a_host_program_that_the_guest_refuses_or_with_a_wrong_handshake_sees_its_stream_end() {
    let mut guest = Guest::with_buffers();
    let mut refused = guest.dial(b"CONNECT 1000\n");
    let port = guest.seen()[0].host_port;
    guest.send(1000, port, RST, b"");
    assert_eq!(read_all(&mut refused), (vec![], true));
    let mut wrong = guest.dial(b"GET / HTTP/1.1\r\n\r\n");
    assert!(guest.ops().is_empty(), "the guest hears of neither");
    let end = wrong.read(&mut [0]);
    assert!(matches!(&end, Ok(0)) || end.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset));
}

#[test]
fn a_host_program_that_gives_up_before_the_guest_answers_leaves_nothing() {
    let mut guest = Guest::with_buffers();
    let host = guest.dial(b"CONNECT 1000\n");
    let port = guest.seen()[0].host_port;
    drop(host);
    assert_eq!(guest.ops(), [RST], "the guest hears of it");
    guest.send(1000, port, RESPONSE, b"");
    assert_eq!(guest.ops(), [RST], "too late: there is no such connection");
    // More than there are slots, by programs that are gone before the first look and ones that shut one side only.
    let mut half = guest.dial(b"CONNECT 1000\n");
    half.shutdown(std::net::Shutdown::Write).unwrap();
    let port = guest.seen()[0].host_port;
    for _ in 0..=muxer::MAX_CONNECTIONS {
        let path = guest.folder.path().join("v");
        UnixStream::connect(path).unwrap().write_all(b"CONNECT 1000\n").unwrap();
        assert!(guest.ops().is_empty(), "a connection that the guest has no packet of needs no reset");
    }
    guest.send(1000, port, RESPONSE, b"");
    assert_eq!(read_all(&mut half), (format!("OK {port}\n").into_bytes(), false));
}

#[test]
fn a_direction_that_the_host_ends_leaves_the_other_open() {
    let (mut guest, mut host) = Guest::connected();
    host.write_all(b"last").unwrap();
    host.shutdown(std::net::Shutdown::Write).unwrap();
    let seen = guest.seen();
    assert_eq!((seen[0].op, &seen[0].payload[..]), (RW, &b"last"[..]));
    assert_eq!((seen[1].op, seen[1].flags), (SHUTDOWN, 2), "the host sends no more");
    guest.send(1000, 52, RW, b"answer");
    assert_eq!(read_all(&mut host).0, b"answer");
    drop(host);
    guest.send(1000, 52, RW, b"nobody");
    assert_eq!(guest.ops(), [RST]);
}

#[test]
fn payload_in_many_buffers_arrives_whole() {
    let (mut guest, mut host) = Guest::connected();
    let payload: Vec<u8> = (0..1000u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let mut bytes = header(1000, 52, RW, 1000, 0);
    bytes.extend(&payload);
    guest.send_in_pieces(&bytes, 30);
    assert_eq!(read_all(&mut host).0, payload);
}

#[test]
fn what_a_slow_host_program_does_not_take_is_kept_in_order_up_to_the_credit() {
    let (mut guest, mut host) = Guest::connected();
    let mut sent = Vec::new();
    // Socket and buffer fill up; the guest sends until its last credit update leaves no credit.
    let mut reported = 0;
    for number in 0u32.. {
        for seen in guest.seen() {
            assert_eq!(seen.op, CREDIT_UPDATE);
            reported = seen.forwarded;
            guest.give_buffers(1);
        }
        let in_flight = u32::try_from(sent.len()).unwrap() - reported;
        if in_flight + 0x8000 > BUFFER {
            break;
        }
        let payload: Vec<u8> = number.to_le_bytes().repeat(0x2000);
        guest.send(1000, 52, RW, &payload);
        sent.extend(payload);
    }
    let mut received = Vec::new();
    while received.len() < sent.len() {
        let (bytes, _) = read_all(&mut host);
        assert!(!bytes.is_empty());
        received.extend(bytes);
        guest.pump();
    }
    assert_eq!(received, sent);
    assert_eq!(guest.seen().last().unwrap().op, CREDIT_UPDATE);
}

#[test]
fn a_guest_that_overruns_its_credit_is_reset() {
    let (mut guest, _host) = Guest::connected();
    // No program reads: at most the socket's own buffer and ours are filled.
    let mut last = Vec::new();
    for _ in 0..1000 {
        guest.send(1000, 52, RW, &[0; 0x8000]);
        last = guest.ops();
        if last.contains(&RST) {
            break;
        }
        guest.give_buffers(last.len() as u64);
    }
    assert!(last.contains(&RST));
}

#[test]
fn a_host_that_sends_more_than_the_guest_has_room_for_waits() {
    let (mut guest, mut host) = Guest::connected();
    let mut sent = 0;
    while let Ok(bytes) = host.write(&[7; 0x4000]) {
        sent += bytes;
    }
    assert!(sent > 0x1_0000);
    let seen = guest.seen();
    let payload: usize = seen.iter().map(|s| s.payload.len()).sum();
    assert_eq!(payload, 0x1_0000, "the credit of the guest");
    assert_eq!(seen.last().unwrap().op, 7, "a request for credit");
    guest.send(1000, 52, CREDIT_UPDATE, b"");
    guest.give_buffers(10);
    assert_eq!(guest.seen()[0].op, RW);
}

#[test]
fn nonsense_is_answered_by_resets_and_these_are_bounded() {
    let mut guest = Guest::new();
    let (mut offered, mut used) = (0, 0);
    for port in 0..400 {
        let bytes = header(port, 52, RW, 0, 0);
        guest.memory.write_slice(&bytes, GuestAddress(OUTBOX + u64::from(port) * 64)).unwrap();
        guest.transmit.offer(&[Part::Read(OUTBOX + u64::from(port) * 64, 44)]);
        offered += 1;
        guest.pump();
        used += guest.transmit.used().len();
        if offered - used == 64 {
            break;
        }
    }
    assert_eq!(used, 256, "without receive buffers no more is taken");
    let mut resets = 0;
    while resets < offered {
        guest.give_buffers(32);
        let ops = guest.ops();
        assert!(!ops.is_empty() && ops.iter().all(|op| *op == RST));
        resets += ops.len();
        used += guest.transmit.used().len();
    }
    assert_eq!(used, offered);
}

#[test]
fn a_request_for_a_connection_that_exists_ends_it() {
    let (mut guest, mut host) = Guest::connected();
    guest.send(1000, 52, REQUEST, b"");
    assert_eq!(guest.ops(), [RST]);
    assert_eq!(read_all(&mut host), (vec![], true));
    guest.send(1000, 52, RW, b"x");
    assert_eq!(guest.ops(), [RST], "it is gone");
}

#[test]
fn host_programs_without_a_handshake_hold_few_places_and_the_last_to_come_is_served() {
    let mut guest = Guest::new();
    guest.give_buffers(32);
    let path = guest.folder.path().join("v");
    let connect = || {
        let stream = UnixStream::connect(&path).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let mut silent: Vec<_> = (0..100).map(|_| connect()).collect();
    (0..4).for_each(|_| guest.pump());
    let ended = silent.iter_mut().map(read_all).filter(|(_, ended)| *ended).count();
    assert_eq!(ended, 100 - handshakes::MAX_HANDSHAKES);
    let mut last = connect();
    last.write_all(b"CONNECT 7\n").unwrap();
    (0..4).for_each(|_| guest.pump()); // each looks at a part of the news, as the event loop has it
    assert_eq!(guest.ops(), [REQUEST]);
}

#[test]
fn a_payload_that_is_not_there_ends_the_connection() {
    let (mut guest, mut host) = Guest::connected();
    guest.send_in_pieces(&header(1000, 52, RW, 1, 0), 44);
    assert_eq!(guest.ops(), [RST]);
    assert_eq!(read_all(&mut host), (vec![], true));
    assert!(guest.device.lock().unwrap().counters().contains(&("wrong chains", 1)));
}

#[test]
fn a_reset_of_the_device_ends_connections_and_the_event_loop_serves_new_ones() {
    let (mut guest, mut host) = Guest::connected();
    let mut events: EventManager<Arc<Mutex<Vsock>>> = EventManager::new().unwrap();
    events.add_subscriber(guest.device.clone());
    guest.device.lock().unwrap().reset();
    assert_eq!(read_all(&mut host), (vec![], true));
    while events.run_with_timeout(0).unwrap() > 0 {}

    guest.receive = Driver::new(&guest.memory, 0x1000, 64);
    guest.transmit = Driver::new(&guest.memory, 0x2000, 64);
    guest.receive.clear();
    guest.transmit.clear();
    guest.give_buffers(32);
    // A program that connects before the driver is ready is not forgotten.
    let mut early = UnixStream::connect(guest.folder.path().join("v")).unwrap();
    early.write_all(b"CONNECT 7\n").unwrap();
    while events.run_with_timeout(0).unwrap() > 0 {}
    guest.activate();
    while events.run_with_timeout(0).unwrap() > 0 {}
    assert_eq!(guest.receive.used(), [(0, 44)]);
}

#[test]
fn the_configuration_space_is_the_guests_context_id() {
    let guest = Guest::new();
    let mut data = [0xff; 10];
    guest.device.lock().unwrap().config_read(0, &mut data);
    assert_eq!(data, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn whatever_the_guest_sends_the_device_stays_within_its_bounds(
        packets in prop::collection::vec(
            (0u32..4, 50u32..54, any::<u8>(), 0u32..0x2_0000, any::<[u8; 12]>(), 44u32..300), 1..80),
    ) {
        let mut guest = Guest::new();
        let _listener = guest.serve(52);
        for (guest_port, host_port, op, length, credit, present) in packets {
            let mut bytes = header(guest_port, host_port, u16::from(op % 9), length % 256, 0);
            bytes[32..44].copy_from_slice(&credit);
            bytes.resize(present as usize, 1);
            guest.send_in_pieces(&bytes, 50);
            prop_assert_eq!(guest.transmit.used().len(), 1);
        }
        let mut drained = 0;
        for _ in 0..200 {
            guest.give_buffers(32);
            let ops = guest.ops();
            drained += ops.len();
            if ops.is_empty() {
                break;
            }
        }
        prop_assert!(drained < 200 * 32, "the device runs out of things to say");
    }
}

#[test]
fn the_kernel_answers_a_guest_until_the_device_is_reset() {
    let open = || File::options().read(true).write(true).open("/dev/vhost-vsock");
    let file = match open() {
        Ok(file) => file,
        Err(error) => return println!("skipped: /dev/vhost-vsock: {error}"),
    };
    let cid = std::process::id().saturating_add(1000);
    let mut device = Vsock::new(cid, Backend::vhost(file).unwrap()).unwrap();
    let taken = Vsock::new(cid, Backend::vhost(open().unwrap()).unwrap()).err().unwrap();
    assert!(matches!(taken, VsockError::Vhost(VhostError::CidTaken { .. })), "{taken}");

    for _ in 0..2 {
        let memory = memory();
        let interrupt = Arc::new(EventInterrupt::new());
        let (mut receive, mut transmit) =
            (Driver::new(&memory, 0x1000, 64), Driver::new(&memory, 0x2000, 64));
        let activation = Activation {
            memory: memory.clone(),
            queues: vec![Some(receive.queue()), Some(transmit.queue()), None],
            features: device.features() & !RING_EVENT_IDX,
            interrupt: interrupt.clone(),
        };
        device.activate(activation).unwrap();
        let mut request = header(1000, 54321, REQUEST, 0, 0);
        request[..8].copy_from_slice(&u64::from(cid).to_le_bytes());
        memory.write_slice(&request, GuestAddress(OUTBOX)).unwrap();
        for head in 0..2 {
            receive.offer(&[Part::Write(INBOX, SLOT)]);
            transmit.offer(&[Part::Read(OUTBOX, 44)]);
            device.kicks()[TRANSMIT].write(1).unwrap();
            interrupt.wait(0);
            assert_eq!(receive.used(), [(head, 44)]);
            let op: u16 = memory.read_obj(GuestAddress(INBOX + 30)).unwrap();
            assert_eq!(op, RST, "nobody listens on that port of the host");
            interrupt.change(0);
            device.vector_changed(0).unwrap();
        }

        device.reset();
        transmit.used();
        transmit.offer(&[Part::Read(OUTBOX, 44)]);
        device.kicks()[TRANSMIT].write(1).unwrap();
        assert!(transmit.used().is_empty(), "memory is left alone after a reset");
    }
}

#[test]
fn a_guest_that_opens_more_connections_than_there_are_slots_is_reset() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    if limit.maximum.is_some_and(|most| most < 3 * muxer::MAX_CONNECTIONS as u64) {
        return println!("skipped: this process may not have {} open files", 3 * muxer::MAX_CONNECTIONS);
    }
    let mut guest = Guest::with_buffers();
    let listener = guest.serve(52);
    let last = 1000 + u32::try_from(muxer::MAX_CONNECTIONS).unwrap();
    let mut open = Vec::new();
    for port in 1000..last {
        guest.send(port, 52, REQUEST, b"");
        open.push(listener.accept().unwrap());
        assert_eq!(guest.ops(), [RESPONSE], "{port}");
        guest.give_buffers(1);
    }
    guest.send(last, 52, REQUEST, b"");
    assert_eq!(guest.ops(), [RST]);
}
