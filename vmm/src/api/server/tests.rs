//! The real thread and real sockets, without a machine.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;

use serde_json::Value;
use tempfile::TempDir;

use super::*;
use crate::api::MachineEvent;
use crate::machine::ExitReason;

/// An API, and where it listens.
struct Api {
    path: PathBuf,
    machine: Arc<Published>,
    server: Option<Server>,
    _folder: TempDir,
}

impl Api {
    fn new() -> Self {
        Self::with(Limits::USUAL)
    }

    fn with(limits: Limits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let machine = Arc::new(Published::new("vm.json".into()));
        let server = Server::start_with(&path, Arc::clone(&machine), limits).unwrap();
        Self { path, machine, server: Some(server), _folder: folder }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }

    /// The answer to `bytes` of a client that then closes its side.
    fn exchange(&self, bytes: &[u8]) -> String {
        let mut client = self.connect();
        let _ = client.write_all(bytes); // the answer may come before all is sent
        let _ = client.shutdown(Shutdown::Write);
        rest(client)
    }

    /// Whether a well-behaved client is answered.
    fn is_well(&self) -> bool {
        let answer = self.exchange(b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n");
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("\"pid\"")
    }

    /// A client that reads events, after the head of its answer.
    fn reader(&self) -> BufReader<UnixStream> {
        let mut client = self.connect();
        client.write_all(b"GET /egm/v1/events HTTP/1.1\r\n\r\n").unwrap();
        let mut reader = BufReader::new(client);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            assert!(reader.read_line(&mut line).unwrap() > 0, "no answer");
        }
        reader
    }
}

/// All bytes until the connection ends or fails.
fn rest(mut client: UnixStream) -> String {
    let mut bytes = Vec::new();
    let _ = client.read_to_end(&mut bytes);
    String::from_utf8(bytes).unwrap()
}

fn event(line: &str) -> Value {
    serde_json::from_str(line).unwrap()
}

#[test]
fn one_connection_carries_many_requests_also_in_one_piece() {
    let api = Api::new();
    let answers = api.exchange(&b"GET /egm/v1/machine HTTP/1.1\r\n\r\n".repeat(1000));
    assert_eq!(answers.matches("HTTP/1.1 200 OK\r\n").count(), 1000);
    let mut client = api.connect();
    for _ in 0..3 {
        client.write_all(b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}").unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"]") {
            let mut piece = [0; 256];
            let count = client.read(&mut piece).unwrap();
            assert!(count > 0, "{answer:?}");
            answer.extend(&piece[..count]);
        }
        assert!(answer.starts_with(b"HTTP/1.1 501 "), "{answer:?}");
    }
}

#[test]
fn hostile_requests_get_their_status_and_harm_no_other_client() {
    let api = Api::new();
    let long = |count: usize| "a".repeat(count);
    for (request, status) in [
        ("GET /nowhere HTTP/1.1\r\n\r\n".to_owned(), "404"),
        ("BREW /api/v1/vmm.ping HTTP/1.1\r\n\r\n".to_owned(), "405"),
        ("PUT /api/v1/vm.coredump HTTP/1.1\r\n\r\n".to_owned(), "501"),
        ("PUT /api/v1/vm.shutdown HTTP/1.1\r\n\r\n".to_owned(), "409"),
        ("\u{0}\u{1}\u{2}\r\n\r\n".to_owned(), "400"),
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), "505"),
        (format!("GET /{} HTTP/1.1\r\n\r\n", long(9000)), "431"),
        (format!("PUT / HTTP/1.1\r\nContent-Length: 65537\r\n\r\n{}", long(65537)), "413"),
        ("PUT / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n".to_owned(), "411"),
        (format!("PUT /api/v1/vm.shutdown HTTP/1.1\r\nContent-Length: 65536\r\n\r\n{}", long(65536)), "400"),
    ] {
        let answer = api.exchange(request.as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {answer}");
        assert!(api.is_well(), "after {status}");
    }
    assert_eq!(api.exchange(b"GET /api/v1/vmm.ping HT"), "", "half a request has no answer");
    assert!(api.is_well());
}

#[test]
fn a_body_of_100_mib_is_refused_while_it_comes() {
    let api = Api::new();
    let mut client = api.connect();
    client.write_all(b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 104857600\r\n\r\n").unwrap();
    let piece = vec![b'x'; 1 << 20];
    let _ = (0..100).try_for_each(|_| client.write_all(&piece)); // ends early where the server drops the connection
    let answer = rest(client);
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(api.is_well());
}

#[test]
fn a_thousand_connections_take_all_places_and_the_others_are_refused_at_once() {
    let api = Api::new();
    let mut kept: Vec<_> = (0..places(geteuid().as_raw())).map(|_| api.connect()).collect();
    // Each is answered, so each has been accepted.
    for client in &mut kept {
        client.write_all(b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n").unwrap();
        let _ = client.read(&mut [0; 1024]).unwrap();
        client.write_all(b"GET").unwrap(); // one that is idle would lose its place
    }
    for number in 0..1000 {
        let answer = rest(api.connect());
        assert!(answer.starts_with("HTTP/1.1 503 "), "{number}: {answer}");
    }
    kept.truncate(3);
    // The thread may see their end a moment later.
    while !api.is_well() {
        thread::yield_now();
    }
}

#[test]
fn places_are_left_for_root() {
    assert_eq!((places(0), places(1000)), (16, 12));
}

#[test]
fn a_user_closes_its_own_idle_connections_only_and_root_closes_any() {
    let folder = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&folder.path().join("s")).unwrap();
    let machine = Arc::new(Published::new("vm.json".into()));
    let wake = machine.journal().open().unwrap();
    let mut serving = Serving::new(listener, &wake, machine, Limits::USUAL).unwrap();
    let now = Instant::now();
    let client = |user: u32, is_idle: bool| {
        let mut connection = Connection::new(Limits::USUAL, now);
        if is_idle {
            connection.receive(b"GET / HTTP/1.1\r\n\r\n", now);
            let _ = connection.next_request(now).unwrap();
            connection.answer(&Answer::done(), true, now);
            connection.sent(connection.output().len(), now);
        }
        Client::new(UnixStream::pair().unwrap().0, user, connection, EventFlags::IN)
    };
    let busy = (0..12).map(|key| (key, client(1000, false)));
    serving.clients.extend(busy.chain([(12, client(0, true))]));
    assert!(!serving.make_room(1000), "root's connection is no room for a user");
    serving.clients.insert(0, client(1000, true));
    assert!(!serving.make_room(1000), "13 without one are 12");
    assert_eq!(serving.clients.len(), 12);
    serving.clients.extend((20..24).map(|key| (key, client(1000, true))));
    assert!(serving.make_room(0), "of 16 one is closed");
    assert_eq!(serving.clients.len(), 15);
}

#[test]
fn a_client_that_pipelines_gets_8_answers_before_others_have_their_turn() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = Listener::bind(&path).unwrap();
    let machine = Arc::new(Published::new("vm.json".into()));
    let wake = machine.journal().open().unwrap();
    let mut serving = Serving::new(listener, &wake, machine, Limits::USUAL).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(&b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n".repeat(20)).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    serving.turn().unwrap(); // accepts it
    for expected in [8, 8, 4] {
        serving.turn().unwrap();
        let mut bytes = vec![0; 64 << 10];
        let count = client.read(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
        assert_eq!(text.matches("HTTP/1.1 200 OK\r\n").count(), expected, "{text}");
    }
}

#[test]
fn a_client_that_sends_half_a_request_is_closed_after_its_time() {
    let soon = Duration::from_millis(20);
    let api = Api::with(Limits { request: soon, ..Limits::USUAL });
    for sent in ["", "GET", "GET / HTTP/1.1\r\n", "PUT / HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf"] {
        let mut client = api.connect();
        client.write_all(sent.as_bytes()).unwrap();
        assert_eq!(rest(client), "", "{sent:?}");
    }
}

/// kata-containers keeps one connection as long as its machine, and makes no other.
#[test]
fn an_idle_client_keeps_its_connection_until_another_needs_its_place() {
    const PING: &[u8] = b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n";
    let api = Api::new();
    let mut ping = |client: &mut UnixStream| {
        client.write_all(PING).unwrap();
        let count = client.read(&mut [0; 1024]).unwrap();
        count > 0
    };
    let mut clients: Vec<_> = (0..MOST_CLIENTS).map(|_| api.connect()).collect();
    assert!(clients.iter_mut().all(&mut ping));
    let mut further = api.connect();
    assert!(ping(&mut further));
    let mut first = clients.remove(0);
    assert_eq!(first.read(&mut [0; 1024]).unwrap(), 0, "the longest idle is closed");
    assert!(clients.iter_mut().all(&mut ping));
}

#[test]
fn an_idle_api_waits_without_a_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&folder.path().join("s")).unwrap();
    let machine = Arc::new(Published::new("vm.json".into()));
    let wake = machine.journal().open().unwrap();
    let serving = Serving::new(listener, &wake, machine, Limits::USUAL).unwrap();
    assert_eq!(serving.deadline(), None);
}

#[test]
fn readers_of_events_leave_places_for_control() {
    let api = Api::new();
    let readers: Vec<_> = (0..MOST_READERS).map(|_| api.reader()).collect();
    assert!(api.exchange(b"GET /egm/v1/events HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 503 "));
    assert!(api.is_well());
    drop(readers);
}

#[test]
fn a_reader_that_is_slow_loses_events_gets_their_number_and_holds_up_no_publisher() {
    const EVENTS: u64 = 50_000;
    let api = Api::new();
    let mut slow = api.reader();
    for _ in 0..EVENTS {
        api.machine.journal().publish(&MachineEvent::Started);
    }
    api.machine.ended(&ExitReason::PoweredOff);
    let (mut lost, mut got, mut next) = (0, 0, 0);
    loop {
        let mut line = String::new();
        assert!(slow.read_line(&mut line).unwrap() > 0, "the stream ended");
        let event = event(&line);
        if event["event"] == "lost" {
            lost += event["events"].as_u64().unwrap();
            continue;
        }
        got += 1;
        let sequence = event["sequence"].as_u64().unwrap();
        assert!(sequence >= next && sequence == got + lost - 1, "{line}: {got} and {lost}");
        next = sequence + 1;
        if event["event"] == "stopped" {
            break;
        }
    }
    assert_eq!(got + lost, EVENTS + 1);
    assert!(lost > 0, "all {got} events fit into a socket");
    assert!(api.is_well());
}

#[test]
fn the_end_of_the_api_sends_the_last_event_and_removes_the_socket() {
    let mut api = Api::new();
    let mut reader = api.reader();
    let idle = api.connect();
    api.machine.ended(&ExitReason::Panicked);
    drop(api.server.take());
    assert!(!api.path.exists());
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    let last = event(text.lines().last().unwrap());
    assert_eq!((&last["event"], &last["reason"]), (&Value::from("stopped"), &Value::from("panicked")));
    assert_eq!(rest(idle), "");
}

#[test]
fn an_api_that_ends_early_refuses_clients_and_leaves_its_file_to_another_thread() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("api.sock");
    let machine = Arc::new(Published::new("vm.json".into()));
    let wake = machine.journal().open().unwrap();
    let listener = Server::listen(&path).unwrap();
    let mut serving = Serving::new(listener, &wake, machine, Limits::USUAL).unwrap();
    serving.epoll = std::fs::File::open("/dev/null").unwrap().into();
    let left = serving.run(&AtomicBool::new(false)).unwrap_err();
    assert_eq!(UnixStream::connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    assert!(path.exists());
    drop(left);
    assert!(!path.exists());
}

#[test]
fn a_socket_of_an_ended_process_is_replaced_and_others_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let start = || Server::start(&path, Arc::new(Published::new("vm.json".into())));
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = start().unwrap();
    let error = start().err().unwrap();
    assert_eq!((error.blame(), error.help().is_some()), (Blame::Host, true), "{error}");
    drop(server);
    std::fs::write(&path, "precious").unwrap();
    assert_eq!(start().err().unwrap().blame(), Blame::Configuration);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn the_machines_user_and_root_may_use_the_api_and_no_other_user() {
    assert!(may_use(1000, 1000) && may_use(0, 1000) && may_use(0, 0));
    assert!(!may_use(1001, 1000) && !may_use(1000, 0) && !may_use(65534, 0));
}
