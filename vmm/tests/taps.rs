//! Interfaces over descriptors that a client passes with `vm.add-net`, as libvirt and kata-containers do.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use egm_fixtures::payload::{Ports, halt};
use egm_vmm::virtio::net::tap::{self, TapError};
use rustix::cmsg_space;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");

/// A tap of this test, removed with this value.
struct Tap(String);

impl Tap {
    /// Prints why not where none can be made.
    fn new(letter: char, form: &[&str]) -> Option<Self> {
        let name = format!("egm{letter}{}", std::process::id());
        let made = Command::new("ip").args(["tuntap", "add", &name, "mode", "tap"]).args(form).output();
        match made {
            Ok(output) if output.status.success() => Some(Self(name)),
            Ok(output) => {
                println!(
                    "skipped: no tap can be made here: {}",
                    String::from_utf8_lossy(&output.stderr).trim()
                );
                None
            }
            Err(error) => {
                println!("skipped: no tap can be made here: {error}");
                None
            }
        }
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).status();
    }
}

/// `egm-vmm serve` with a created machine that sleeps, without devices of a client.
struct Serve {
    folder: TempDir,
    child: Child,
}

impl Serve {
    fn created() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("halt.elf"), halt(Ports::USUAL)).unwrap();
        let child = Command::new(PROGRAM)
            .args(["serve", "--api", "vm.sock"])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut serve = Self { folder, child };
        while UnixStream::connect(serve.folder.path().join("vm.sock")).is_err() {
            assert_eq!(serve.child.try_wait().unwrap(), None, "it ends");
            std::thread::yield_now();
        }
        let document = json!({
            "cpus": { "boot_vcpus": 1, "max_vcpus": 1 },
            "memory": { "size": 64 << 20 },
            "payload": { "kernel": "halt.elf" },
            "serial": { "mode": "Null" },
            "console": { "mode": "Off" },
        });
        serve.done("vm.create", &document);
        serve
    }

    /// Status and body of the answer to `request` with `body` and `descriptors`.
    fn ask(&self, request: &str, body: &Value, descriptors: &[BorrowedFd<'_>]) -> (u16, String) {
        let mut client = UnixStream::connect(self.folder.path().join("vm.sock")).unwrap();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let length = body.len();
        let text =
            format!("{request} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let sent =
            sendmsg(&client, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, text.len());
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        (head.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap(), body.to_owned())
    }

    #[track_caller]
    fn done(&self, request: &str, body: &Value) {
        assert_eq!(self.put(request, body, &[]), (204, String::new()), "{request}");
    }

    fn put(&self, request: &str, body: &Value, descriptors: &[BorrowedFd<'_>]) -> (u16, String) {
        self.ask(&format!("PUT /api/v1/{request}"), body, descriptors)
    }

    fn wait_until_running(&self) {
        loop {
            let (_, body) = self.ask("GET /egm/v1/machine", &Value::Null, &[]);
            let state = serde_json::from_str::<Value>(&body).unwrap()["state"].clone();
            assert_ne!(state, "created", "the start failed: {body}");
            if state == "running" {
                return;
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_busy(tap: &Tap) -> bool {
    matches!(tap::open(&tap.0, 1), Err(TapError::Busy { .. }))
}

/// The machine starts with the tap, starts again after an execution of the program, and closes it when it is removed.
#[test]
fn a_passed_tap_is_the_machines_until_its_removal_also_over_a_reboot() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return println!("skipped: /dev/kvm: {error}");
    }
    let Some(tap) = Tap::new('a', &[]) else { return };
    let serve = Serve::created();
    let queue = tap::open(&tap.0, 1).unwrap();
    let net = json!({ "id": "net0", "mac": "52:54:00:00:00:01", "num_queues": 2, "queue_size": 256 });
    assert_eq!(serve.put("vm.add-net", &net, &[queue[0].as_fd()]), (204, String::new()));
    drop(queue);
    assert!(is_busy(&tap), "the program has it");
    for request in ["vm.boot", "vm.reboot"] {
        serve.done(request, &Value::Null);
        serve.wait_until_running();
        assert!(is_busy(&tap), "{request}");
    }
    serve.done("vm.shutdown", &Value::Null);
    assert!(is_busy(&tap), "it stays created");
    serve.done("vm.remove-device", &json!({ "id": "net0" }));
    assert!(!is_busy(&tap), "it is closed");
    serve.done("vm.boot", &Value::Null);
    serve.wait_until_running();
}

/// As libvirt restores a domain: each of two interfaces gets its own taps again, in the client's order.
#[test]
fn a_saved_machine_gets_its_taps_again_with_the_request_of_its_restore() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return println!("skipped: /dev/kvm: {error}");
    }
    let (Some(one), Some(two)) = (Tap::new('d', &[]), Tap::new('e', &["multi_queue"])) else { return };
    let serve = Serve::created();
    let queues: Vec<File> =
        tap::open(&one.0, 1).unwrap().into_iter().chain(tap::open(&two.0, 2).unwrap()).collect();
    let fds = |order: &[usize]| order.iter().map(|at| queues[*at].as_fd()).collect::<Vec<_>>();
    let net = |id: &str, queues: u32| json!({ "id": id, "num_queues": queues });
    assert_eq!(serve.put("vm.add-net", &net("one", 2), &fds(&[0])), (204, String::new()));
    assert_eq!(serve.put("vm.add-net", &net("two", 4), &fds(&[1, 2])), (204, String::new()));
    serve.done("vm.boot", &Value::Null);
    serve.done("vm.pause", &Value::Null);
    let folder = format!("file://{}", serve.folder.path().join("saved").display());
    serve.done("vm.snapshot", &json!({ "destination_url": folder }));
    serve.done("vm.delete", &Value::Null);
    let restore = |nets: Value, order: &[usize]| {
        serve.put("vm.restore", &json!({ "source_url": folder, "net_fds": nets }), &fds(order))
    };
    let net = |id: &str, count: u32| json!({ "id": id, "num_fds": count });
    for (nets, order, words) in [
        (json!([]), &[][..], "cannot restore \"one\" without 1 descriptors"),
        (json!([net("one", 1)]), &[0], "cannot restore \"two\" without 2 descriptors"),
        (json!([net("one", 1), net("two", 2)]), &[0, 1], "cannot take 3 descriptors: 2 came"),
        (json!([net("one", 2), net("two", 1)]), &[0, 1, 2], "cannot restore \"one\""),
        (json!([net("two", 2), net("one", 1), net("three", 0)]), &[1, 2, 0], "cannot find each"),
        (json!([net("one", 1), net("one", 0), net("two", 2)]), &[0, 1, 2], "cannot find each"),
    ] {
        let (status, text) = restore(nets, order);
        assert!(status == 400 && text.contains(&words.replace('"', "\\\"")), "{words}: {text}");
    }
    let (status, text) =
        restore(json!([net("two", 2), { "id": "one", "num_fds": 1, "fds": [-1] }]), &[1, 2, 0]);
    assert_eq!((status, text), (204, String::new()));
    drop(queues);
    serve.done("vm.resume", &Value::Null);
    serve.wait_until_running();
    assert!(is_busy(&one), "the machine has it");
    serve.done("vm.delete", &Value::Null);
    while is_busy(&one) {
        std::thread::yield_now(); // the program executes itself, which closes it
    }
}

/// A machine of our own language has spare ports.
#[test]
fn a_tap_that_is_passed_to_a_running_machine_leaves_with_it() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return println!("skipped: /dev/kvm: {error}");
    }
    let Some(tap) = Tap::new('c', &[]) else { return };
    let serve = Serve::created();
    serve.done("vm.delete", &Value::Null);
    let config = json!({
        "memory": { "size": "16MiB" },
        "boot": { "kernel": "halt.elf" },
        "console": "null",
        "pcie": { "spare": { "ports": 1 } },
    });
    assert_eq!(serve.ask("PUT /egm/v1/machine", &config, &[]).0, 204);
    serve.done("vm.boot", &Value::Null);
    let queue = tap::open(&tap.0, 1).unwrap();
    let (status, body) = serve.put("vm.add-net", &json!({ "id": "net0" }), &[queue[0].as_fd()]);
    assert!(status == 200 && body.contains("net0"), "{status} {body}");
    drop(queue);
    assert!(is_busy(&tap), "the machine has it");
    serve.done("vm.reboot", &Value::Null);
    serve.wait_until_running();
    assert!(!is_busy(&tap), "the next start is without it");
}

#[test]
fn each_queue_pair_has_a_descriptor_and_an_interface_that_stays_keeps_its_own() {
    let Some(tap) = Tap::new('b', &["multi_queue"]) else { return };
    let serve = Serve::created();
    let queues = tap::open(&tap.0, 3).unwrap();
    let net = |id: &str, queues: u32| json!({ "id": id, "num_queues": queues });
    let add = |net: &Value, of: &[&File]| {
        let descriptors: Vec<_> = of.iter().map(|queue| queue.as_fd()).collect();
        serve.put("vm.add-net", net, &descriptors)
    };
    let [first, second, third] = &queues[..] else { panic!() };
    let (status, body) = add(&net("a", 2), &[first, second]);
    assert!(status == 400 && body.contains("2 descriptors for 1 queue pair"), "{body}");
    assert_eq!(add(&net("a", 4), &[first, second]), (204, String::new()));
    assert_eq!(add(&net("b", 2), &[third]), (204, String::new()));
    serve.done("vm.remove-device", &json!({ "id": "a" }));
    // The remaining interface has another place in the document now, and a number of the client names none.
    let (status, body) = serve.put("vm.add-net", &json!({ "id": "c", "fds": [0] }), &[]);
    assert!(status == 400 && body.contains("no meaning in another process"), "{body}");
    assert_eq!(add(&net("a", 4), &[first, second]), (204, String::new()));
    serve.done("vm.delete", &Value::Null);
    drop(queues);
    assert_eq!(tap::open(&tap.0, 1).unwrap().len(), 1, "all are closed");
}

#[test]
fn descriptors_that_are_no_taps_and_those_of_other_requests_are_refused_and_closed() {
    let serve = Serve::created();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let net = json!({ "id": "net0" });
    for (request, body, count, words) in [
        ("vm.add-net", &net, 1, "cannot use descriptor 0: it is not open, or is no tap"),
        ("vm.add-disk", &json!({ "path": "/d" }), 1, "it takes no descriptors"),
        ("vm.boot", &Value::Null, 1, "it takes no descriptors"),
        ("vm.add-net", &net, 17, "some of its descriptors did not arrive"),
        ("vm.add-net", &net, 64, "some of its descriptors did not arrive"),
    ] {
        let descriptors = vec![writer.as_fd(); count];
        let (status, text) = serve.put(request, body, &descriptors);
        assert!(status == 400 && text.contains(words), "{request}, {count}: {text}");
    }
    drop(writer);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0, "every copy is closed");
    serve.done("vm.delete", &Value::Null);
}
