//! The broker over real sockets, with well-behaved and misbehaving clients.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod broker_world;

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use broker_world::{Broker, G, OpensOnce, take};
use egm_address::{Offset, Span};
use egm_device::broker::{Client, ClientError, MAX_PACKET, Server, ServerError, SliceRequest};
use egm_device::policy::{Names, Policy, parse};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

/// Time enough for any machine.
const LIMIT: Duration = Duration::from_secs(20);
/// No wait is cancelled.
static NEVER: AtomicBool = AtomicBool::new(false);

fn raw(path: &Path) -> OwnedFd {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT)).unwrap();
    socket
}

fn send(socket: &OwnedFd, packet: &[u8]) {
    rustix::net::send(socket, packet, SendFlags::NOSIGNAL).unwrap();
}

/// The next answer; empty after the broker closed the connection.
fn receive(socket: &OwnedFd) -> String {
    let mut buffer = [0; 2 * MAX_PACKET];
    match rustix::net::recv(socket, &mut buffer, RecvFlags::empty()) {
        Ok((_, length)) => String::from_utf8(buffer[..length].to_vec()).unwrap(),
        Err(rustix::io::Errno::CONNRESET) => String::new(),
        Err(error) => panic!("{error}"),
    }
}

fn refused(result: Result<egm_device::broker::BrokerLease, ClientError>) -> String {
    match result {
        Err(ClientError::Refused { why, .. }) => why,
        other => panic!("{other:?}"),
    }
}

/// The broker still serves an honest client.
fn serves(broker: &Broker) {
    let lease = broker.client().take(&take("egm4", G), |_| ()).unwrap();
    lease.return_slice(&NEVER).unwrap();
}

#[test]
fn an_exclusive_file_is_shared_by_two_clients_at_different_places() {
    let broker = Broker::start(Policy::root_only(), 4 * G);
    assert_eq!(broker.source.open_again().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    let first = broker.client().take(&take("egm4", G), |_| ()).unwrap();
    let second = broker.client().take(&take("egm4", 2 * G), |_| ()).unwrap();
    assert_ne!(first.offset(), second.offset());
    assert_eq!(first.region().name, "egm4");
    first.file().write_all_at(b"mine", first.offset()).unwrap();
    let mut seen = [0; 4];
    second.file().read_exact_at(&mut seen, first.offset()).unwrap();
    assert_eq!(&seen, b"mine", "one file");
    assert_eq!(broker.source.opened(), 1);
    let (offset, size) = (first.offset(), first.slice().size.get());
    first.return_slice(&NEVER).unwrap();
    assert!(broker.source.was_scrubbed(offset, size));
    second.return_slice(&NEVER).unwrap();
}

/// Another process with the ledger's lock may be stopped.
#[test]
fn a_ledger_that_does_not_answer_delays_only_requests_to_it() {
    let broker = Broker::start(Policy::root_only(), G);
    let locked = broker.source.ledger.lock().unwrap();
    let asks = raw(&broker.path);
    send(&asks, b"\"free\"");
    let hostile = raw(&broker.path);
    send(&hostile, b"{}");
    assert!(receive(&hostile).starts_with("{\"refused\":"));
    drop(locked);
    assert!(receive(&asks).starts_with("{\"free\":"));
    serves(&broker);
}

/// The source refuses to grant while the scrub runs.
#[test]
fn idle_memory_is_scrubbed_until_a_request_comes() {
    let broker = Broker::start(Policy::root_only(), G);
    while !broker.source.is_tidying() {
        std::thread::yield_now();
    }
    assert_eq!(broker.client().free().unwrap(), (G, G));
    let _loan = broker.client().take(&take("egm4", G), |_| ()).unwrap();
    assert!(!broker.source.is_tidying());
}

#[test]
fn a_waiting_client_is_served_when_a_slice_is_returned() {
    let broker = Broker::start(Policy::root_only(), 2 * G);
    let first = broker.client().take(&take("egm4", 2 * G), |_| ()).unwrap();
    let (reports, waits) = std::sync::mpsc::channel();
    let client = broker.client();
    let waiter = std::thread::spawn(move || {
        client.take(&take("egm4", G), |why| reports.send(why.to_owned()).unwrap())
    });
    let why = waits.recv().unwrap();
    assert_eq!(
        why,
        "rule \"root\": 1GiB does not fit in \"egm4\" now (available 0, largest contiguous block 0); nothing \
         else is available"
    );
    first.return_slice(&NEVER).unwrap();
    assert_eq!(waiter.join().unwrap().unwrap().slice().size.get(), G);
}

/// A GiB is free on each side of the held one, and two are requested at a multiple of two.
#[test]
fn a_request_for_an_aligned_place_is_not_refused_because_bytes_are_free_elsewhere() {
    let broker = Broker::start(Policy::root_only(), 3 * G);
    let first = broker.client().take(&take("egm4", G), |_| ()).unwrap();
    let aligned = SliceRequest { align: 2 * G, ..take("egm4", 2 * G) };
    let why = refused(broker.client().take(&SliceRequest { wait: false, ..aligned.clone() }, |_| ()));
    assert!(why.contains("2GiB does not fit in \"egm4\" now: the free memory is not so aligned"), "{why}");
    let (reports, waits) = std::sync::mpsc::channel();
    let client = broker.client();
    let waiter = std::thread::spawn(move || client.take(&aligned, |_| reports.send(()).unwrap()));
    waits.recv().unwrap();
    first.return_slice(&NEVER).unwrap();
    assert_eq!(waiter.join().unwrap().unwrap().offset(), 0);
}

#[test]
fn a_refusal_without_a_wait_names_the_rule_and_what_is_free_instead() {
    let broker = Broker::start(Policy::root_only(), 4 * G);
    let _held = broker.client().take(&take("egm4", 3 * G), |_| ()).unwrap();
    let now = SliceRequest { wait: false, ..take("egm4", 2 * G) };
    assert_eq!(
        refused(broker.client().take(&now, |_| ())),
        "rule \"root\": 2GiB does not fit in \"egm4\" now (available 1GiB, largest contiguous block 1GiB); \
         available: 1GiB, largest contiguous block: 1GiB (egm4 1GiB)"
    );
    let elsewhere = SliceRequest { regions: vec!["dax9".into()], ..now };
    assert!(refused(broker.client().take(&elsewhere, |_| ())).contains("this host has no region dax9"));
    assert_eq!(broker.client().free().unwrap(), (G, G));
    let asks = ["carve", "free", "--broker"];
    let output =
        Command::new(env!("CARGO_BIN_EXE_egm-device")).args(asks).arg(&broker.path).output().unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "available: 1 GiB; largest contiguous block: 1 GiB\n"
    );
}

#[test]
fn malformed_packets_cost_the_connection_and_nothing_else() {
    let broker = Broker::start(Policy::root_only(), 4 * G);
    let whole =
        br#"{"take":{"name":"v","regions":["egm4"],"size":1073741824,"align":0,"class":null,"wait":true}}"#;
    let cases: [&[u8]; 5] = [&whole[..40], &[0xff; 100], b"{}", b"[[[[[[[[", &[b'x'; MAX_PACKET + 1]];
    for packet in cases {
        let hostile = raw(&broker.path);
        send(&hostile, packet);
        assert!(receive(&hostile).starts_with("{\"refused\":"), "{packet:?}");
        assert_eq!(receive(&hostile), "", "cut off");
    }
    let empty = raw(&broker.path);
    send(&empty, b"");
    assert_eq!(receive(&empty), "");
    serves(&broker);
}

#[test]
fn descriptors_that_a_client_sends_are_dropped() {
    let broker = Broker::start(Policy::root_only(), 4 * G);
    let hostile = raw(&broker.path);
    let (mut reader, writer) = std::io::pipe().unwrap();
    for _ in 0..20 {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let many = [writer.as_fd(); 8];
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let packet = [IoSlice::new(b"\"free\"")];
        match rustix::net::sendmsg(&hostile, &packet, &mut control, SendFlags::empty()) {
            Err(rustix::io::Errno::PERM) => continue, // a kernel that can refuse them was asked to
            sent => assert!(sent.is_ok(), "{sent:?}"),
        }
        assert!(receive(&hostile).starts_with("{\"free\":"));
    }
    drop(writer);
    // The pipe ends only when no process has its other end open: the broker, which still runs, does not.
    assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
    send(&hostile, b"\"free\"");
    assert!(receive(&hostile).starts_with("{\"free\":"));
    serves(&broker);
}

#[test]
fn a_client_that_does_not_read_is_cut_off() {
    let broker = Broker::start(Policy::root_only(), 4 * G);
    let hostile = raw(&broker.path);
    // The broker answers until the socket is full and then hangs up, which ends the sending.
    let ended = loop {
        match rustix::net::send(&hostile, b"\"free\"", SendFlags::NOSIGNAL) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(ended, rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET), "{ended}");
    serves(&broker);
}

#[test]
fn a_user_has_a_bounded_number_of_connections() {
    let broker = Broker::start(Policy::root_only(), 4 * G);
    let mut open: Vec<OwnedFd> = (0..64).map(|_| raw(&broker.path)).collect();
    send(&open[63], b"\"free\"");
    assert!(receive(&open[63]).starts_with("{\"free\":"), "all are served");
    let more = raw(&broker.path);
    assert!(receive(&more).contains("user 0 has 64 connections, the most: close one"));
    assert_eq!(receive(&more), "");
    open.truncate(1);
    // A closed connection counts until the broker has seen its end; it looks at its sockets in turn.
    while Client::connect(&broker.path).unwrap().free().is_err() {}
    serves(&broker);
}

#[test]
fn a_waiting_client_that_hangs_up_is_out_of_the_queue() {
    let broker = Broker::start(Policy::root_only(), 2 * G);
    let held = broker.client().take(&take("egm4", 2 * G), |_| ()).unwrap();
    let gone = raw(&broker.path);
    send(
        &gone,
        br#"{"take":{"name":"v","regions":["egm4"],"size":2147483648,"align":0,"class":null,"wait":true}}"#,
    );
    assert!(receive(&gone).starts_with("{\"waiting\":"));
    drop(gone);
    held.return_slice(&NEVER).unwrap();
    serves(&broker);
}

#[test]
fn one_connection_has_one_slice_in_its_life() {
    let broker = Broker::start(Policy::root_only(), 4 * G);
    let socket = raw(&broker.path);
    let wanted =
        br#"{"take":{"name":"v","regions":["egm4"],"size":1073741824,"align":0,"class":null,"wait":true}}"#;
    send(&socket, b"\"return\"");
    assert!(receive(&socket).contains("no slice to return"));
    send(&socket, wanted);
    assert!(receive(&socket).starts_with("{\"granted\":"));
    send(&socket, wanted);
    assert!(receive(&socket).contains("a connection has one slice"));
    send(&socket, b"\"return\"");
    assert_eq!(receive(&socket), "\"returned\"");
    // A process that inherits the connection has the rights of the process that opened it, so it gets nothing more.
    send(&socket, wanted);
    assert!(receive(&socket).contains("this connection has returned its slice"));
    assert_eq!(receive(&socket), "", "the connection is closed");
    serves(&broker);
}

/// The broker has a client's reports when the slice comes back: by a message, or by the process's end.
#[test]
fn pages_that_a_client_found_bad_are_retired_before_the_next_client_has_them() {
    let broker = Broker::start(Policy::root_only(), 4 * G);
    let _first = broker.client().take(&take("egm4", G), |_| ()).unwrap();
    let lease = broker.client().take(&take("egm4", G), |_| ()).unwrap();
    let page = |at: u64| Span::new(Offset::new(at), 0x1000).unwrap();
    // More than fit in one packet, and one of another client's slice.
    let mut bad: Vec<_> = (0..200).map(|n| page(lease.offset() + n * 0x2000)).collect();
    lease.retire(&bad.iter().copied().chain([page(0)]).collect()).unwrap();
    lease.return_slice(&NEVER).unwrap();
    let mut reported = broker.source.bad();
    reported.sort_by_key(|span| span.start());
    bad.sort_by_key(|span| span.start());
    assert_eq!(reported, bad);
    let socket = raw(&broker.path);
    send(&socket, br#"{"bad":[[0,4096]]}"#);
    assert!(receive(&socket).contains("no slice that could go bad"));
    serves(&broker);
}

/// A connection may be lost while a process still maps the slice: only the end of the process frees it.
#[test]
fn a_closed_connection_alone_frees_nothing() {
    let broker = Broker::start(Policy::root_only(), 2 * G);
    drop(broker.client().take(&take("egm4", 2 * G), |_| ()).unwrap());
    let now = SliceRequest { wait: false, ..take("egm4", G) };
    assert!(refused(broker.client().take(&now, |_| ())).contains("does not fit"));
}

#[test]
fn a_second_broker_is_refused_and_a_dead_ones_socket_replaced() {
    let broker = Broker::start(Policy::root_only(), G);
    let source = OpensOnce::new(G);
    let second = Server::listen(&broker.path, Policy::root_only(), source.clone());
    assert!(matches!(second, Err(ServerError::Taken { .. })));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    drop(Server::listen(&path, Policy::root_only(), source.clone()).unwrap());
    assert!(path.exists() && Server::listen(&path, Policy::root_only(), source.clone()).is_ok());
    let plain = folder.path().join("plain");
    std::fs::write(&plain, "precious").unwrap();
    assert!(Server::listen(&plain, Policy::root_only(), source).is_err());
    assert_eq!(std::fs::read(&plain).unwrap(), b"precious");
}

/// flock(2) works on a descriptor that can only be read: a lock file that others may open protects nothing.
#[test]
fn only_the_broker_can_open_its_lock() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let (path, lock) = (folder.path().join("socket"), folder.path().join("socket.lock"));
    let listen = || Server::listen(&path, Policy::root_only(), OpensOnce::new(G));
    drop(listen().unwrap());
    assert_eq!(lock.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
    std::fs::set_permissions(&lock, PermissionsExt::from_mode(0o644)).unwrap();
    assert!(matches!(listen(), Err(ServerError::NotOurs { mode: 0o644, .. })));
    if rustix::process::geteuid().is_root() {
        std::fs::set_permissions(&lock, PermissionsExt::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(&lock, Some(4001), None).unwrap();
        assert!(matches!(listen(), Err(ServerError::NotOurs { uid: 4001, .. })));
    }
    std::fs::remove_file(&lock).unwrap();
    std::os::unix::fs::symlink(folder.path().join("elsewhere"), &lock).unwrap();
    assert!(matches!(listen(), Err(ServerError::Listen { .. })));
}

/// `egm-device carve grant --broker` as user `uid` with group `gid`.
fn grant(broker: &Broker, uid: u32, gid: u32, more: &[&str]) -> Output {
    let binary = broker.folder.path().join("egm-device");
    if !binary.exists() {
        std::fs::copy(env!("CARGO_BIN_EXE_egm-device"), &binary).unwrap();
    }
    let mut command = Command::new(binary);
    command.args(["carve", "grant", "--region", "egm4", "--broker"]).arg(&broker.path).args(more);
    if rustix::process::geteuid().is_root() {
        use std::os::unix::process::CommandExt;
        command.uid(uid).gid(gid);
    }
    command.output().unwrap()
}

/// The kernel reports the user of a peer: two users of one policy get what each may have. (Needs root.)
#[test]
fn the_kernels_word_for_the_user_decides() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be two users");
        return;
    }
    let text = r#"{"rules": [
        {"name": "alice", "user": 4001, "regions": ["egm4"], "quota": "1GiB", "whole_device": true},
        {"name": "team", "group": 4500, "regions": ["egm"], "class": "small", "whole_device": true}
    ]}"#;
    let broker = Broker::start(parse(text, &Names::default()).unwrap(), 4 * G);
    let stderr = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let print = ["--", "/bin/sh", "-c", "echo $EGM_SLICE_SIZE"];

    let alice = grant(&broker, 4001, 4001, &[&["--size", "1GiB"], &print[..]].concat());
    assert_eq!(String::from_utf8_lossy(&alice.stdout), "1073741824\n", "{}", stderr(&alice));
    let more = grant(&broker, 4001, 4001, &[&["--size", "2GiB"], &print[..]].concat());
    assert!(
        stderr(&more).contains("rule \"alice\": 2GiB is more than the quota of 1GiB"),
        "{}",
        stderr(&more)
    );
    for part in
        ["error: cannot get slice \"carve-grant\" from the broker: rule", "help: egm-device carve free"]
    {
        assert!(stderr(&more).contains(part), "{}", stderr(&more));
    }
    assert_eq!(more.status.code(), Some(3));

    let class = ["--size", "2GiB", "--class", "small"];
    let team = grant(&broker, 4002, 4500, &[&class[..], &print].concat());
    assert!(team.status.success(), "{}", stderr(&team));
    let without = grant(&broker, 4002, 4500, &[&["--size", "2GiB"], &print[..]].concat());
    assert!(stderr(&without).contains("no rule lets user 4002 take from \"egm4\""), "{}", stderr(&without));
    let unruled = grant(&broker, 4003, 4003, &[&["--size", "1GiB"], &print[..]].concat());
    assert!(stderr(&unruled).contains("no rule for user 4003"), "{}", stderr(&unruled));
}

/// All slices of an EGM device are one file: a user with the file for one slice can map every other tenant's bytes.
#[test]
fn a_slice_of_a_shared_file_is_refused_to_users_of_a_rule_without_whole_device() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let text = r#"{"rules": [
        {"name": "alice", "user": 4001, "regions": ["egm"]},
        {"name": "bob", "user": 4002, "regions": ["egm"], "whole_device": true}
    ]}"#;
    let broker = Broker::start(parse(text, &Names::default()).unwrap(), 2 * G);
    let one = ["--size", "1GiB", "--", "/bin/true"];
    let refused = grant(&broker, 4001, 4001, &one);
    let said =
        format!("{}{}", String::from_utf8_lossy(&refused.stdout), String::from_utf8_lossy(&refused.stderr));
    assert_eq!(refused.status.code(), Some(3), "{said}");
    for part in ["rule \"alice\"", "\"egm4\"", "\"whole_device\": true", "egm-vmm run --user"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let allowed = grant(&broker, 4002, 4002, &one);
    assert!(allowed.status.success(), "{}", String::from_utf8_lossy(&allowed.stderr));
}

/// A client that is killed keeps nothing: its slice is scrubbed and granted again.
#[test]
fn a_client_that_dies_gives_its_slice_back() {
    let broker = Broker::start(Policy::root_only(), 2 * G);
    let died = grant(&broker, 0, 0, &["--size", "2GiB", "--", "/bin/sh", "-c", "kill -9 $PPID"]);
    assert!(!died.status.success());
    let lease = broker.client().take(&take("egm4", 2 * G), |_| ()).unwrap(); // waits for the scrub
    assert!(broker.source.was_scrubbed(lease.offset(), 2 * G));
}

/// A command of another user must not send requests with the rights of the process that started it.
#[test]
fn a_command_does_not_inherit_the_connection() {
    let broker = Broker::start(Policy::root_only(), 2 * G);
    let script = "for fd in /proc/self/fd/*; do readlink $fd; done";
    let command = grant(&broker, 0, 0, &["--size", "2GiB", "--", "/bin/sh", "-c", script]);
    let found = String::from_utf8(command.stdout).unwrap();
    assert!(command.status.success() && !found.contains("socket:"), "{found}");
}

/// The command's end is not its children's: a background child still has the memory.
#[test]
fn a_slice_is_granted_until_the_commands_children_have_ended_too() {
    let broker = Broker::start(Policy::root_only(), 2 * G);
    let script = "sleep infinity >/dev/null 2>&1 & echo $!";
    let command = grant(&broker, 0, 0, &["--size", "2GiB", "--", "/bin/sh", "-c", script]);
    assert!(command.status.success(), "{command:?}");
    let child = String::from_utf8(command.stdout).unwrap();
    let now = SliceRequest { wait: false, ..take("egm4", 2 * G) };
    let meanwhile = broker.client().take(&now, |_| ());
    assert!(Command::new("/bin/kill").arg(child.trim()).status().unwrap().success());
    assert!(refused(meanwhile).contains("does not fit"));
    let lease = broker.client().take(&take("egm4", 2 * G), |_| ()).unwrap(); // waits for the child's end
    assert!(broker.source.was_scrubbed(lease.offset(), 2 * G));
}
