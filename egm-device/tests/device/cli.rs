//! `egm-device serve` as a process, on a host that is a folder.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use egm_device::device::registers::{Event, MAGIC, Register};
use egm_vfio_wire::client::Client;
use egm_vfio_wire::message::{ByFile, DmaMap, DmaUnmap, IrqData, SetIrqs};
use egm_vfio_wire::socket::{BusyPoll, Connection};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tempfile::TempDir;

use crate::small_host;
use crate::world::{BAR0, BAR2, LIMIT, REQUEST, SET, event, fired, register, vectors};

pub(crate) struct Host(TempDir);

impl Host {
    pub(crate) fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        small_host::make(host.0.path());
        host
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn command(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_egm-device"));
        command.args(words.split(' ')).arg("--root").arg(self.0.path()).current_dir(self.0.path());
        command
    }

    /// Standard error of a command that must end with `code`.
    #[track_caller]
    fn refuses(&self, code: i32, words: &str) -> String {
        let output = self.command(words).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{error}");
        error
    }

    /// A server that serves.
    pub(crate) fn serve(&self, words: &str) -> Server {
        Server::started(self.command(words))
    }

    /// Checks that the ledger's record has no grant left without its owner.
    #[track_caller]
    pub(crate) fn owes_nothing(&self) {
        let output = self.command("ledger repair").output().unwrap().stdout;
        assert_eq!(String::from_utf8(output).unwrap(), "The record is sound.\n");
    }

    pub(crate) fn ledger(&self) -> String {
        String::from_utf8(self.command("ledger show --json").output().unwrap().stdout).unwrap()
    }
}

pub(crate) struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already, where the test went well.
        let _ = self.0.kill();
        self.code_in_time();
    }
}

impl Server {
    /// Waits for the first line, which reports that the sockets are there.
    fn started(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("device "), "{line:?}");
        Self(child)
    }

    /// Ends it as systemd does; its exit code.
    fn end(mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        self.0.wait().unwrap().code()
    }

    /// As [`Server::end`], but of a server that may hang: the wait ends after [`LIMIT`].
    pub(crate) fn end_in_time(mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        let code = self.code_in_time();
        std::mem::forget(self);
        code
    }

    /// Its exit code. A server that hangs in the kernel, beyond SIGKILL, has none in time.
    fn code_in_time(&mut self) -> Option<i32> {
        if let Ok(Some(ended)) = self.0.try_wait() {
            return ended.code();
        }
        let process = pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty()).ok()?;
        let limit = Timespec::try_from(LIMIT).ok()?;
        let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)).ok()?;
        if ended > 0 { self.0.wait().ok()?.code() } else { None }
    }

    /// Descriptors, and KiB of memory in use.
    fn costs(&self) -> (usize, u64) {
        let process = PathBuf::from(format!("/proc/{}", self.0.id()));
        let status = fs::read_to_string(process.join("status")).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let resident = resident.trim().trim_end_matches(" kB").parse().unwrap();
        (fs::read_dir(process.join("fd")).unwrap().count(), resident)
    }
}

pub(crate) fn client(path: &Path) -> Client {
    Client::new(Connection::connect(path, LIMIT, BusyPoll::NONE).unwrap()).unwrap()
}

#[test]
fn a_slice_is_served_until_sigterm_which_gives_it_back() {
    let host = Host::new();
    let server = host.serve("serve --region local --size 6MiB --socket vm.sock --name vm1 --pxm 2");
    let mut vm = client(&host.path("vm.sock"));
    let seen = [Register::Magic, Register::Size, Register::Pxm].map(|seen| register(&mut vm, seen));
    assert_eq!(seen, [MAGIC.into(), 6 << 20, 2]);
    assert_eq!(vm.region_info(BAR2).unwrap().0.size, 8 << 20);
    assert!(host.ledger().contains("vm1"));
    drop(vm);
    assert_eq!(server.end(), Some(0));
    assert!(!host.ledger().contains("vm1") && !host.path("vm.sock").exists());
}

#[test]
fn sigterm_asks_the_guest_and_does_not_wait_for_ever() {
    let host = Host::new();
    let server = host.serve("serve --region local --size 2MiB --socket vm.sock --patience 600");
    let mut vm = client(&host.path("vm.sock"));
    let events = vectors(&mut vm);
    kill_process(Pid::from_child(&server.0), Signal::TERM).unwrap();
    assert_eq!(poll(&mut [PollFd::new(&events[2], PollFlags::IN)], None), Ok(1));
    // Its answer may be lost: the server waits for nothing more.
    let _ = vm.write(0, Register::Doorbell.offset(), &2_u32.to_le_bytes());
    assert_eq!(server.end(), Some(0));
    let server = host.serve("serve --region local --size 2MiB --socket vm.sock --timeout 0");
    let mut deaf = client(&host.path("vm.sock"));
    assert_eq!(server.end(), Some(0));
    assert!(deaf.reset().is_err(), "its connection is closed");
}

#[test]
fn sigusr1_asks_guest_and_vmm_and_serves_on() {
    let host = Host::new();
    let server = host.serve("serve --region local --size 2MiB --socket vm.sock");
    let mut vm = client(&host.path("vm.sock"));
    let ([_, _, guest], vmm) = (vectors(&mut vm), event());
    vm.set_irqs(SetIrqs { index: REQUEST, count: 1, ..SET }, &[vmm.as_fd()]).unwrap();
    kill_process(Pid::from_child(&server.0), Signal::USR1).unwrap();
    for asked in [&guest, &vmm] {
        assert_eq!(poll(&mut [PollFd::new(asked, PollFlags::IN)], None), Ok(1));
    }
    assert_eq!(register(&mut vm, Register::Pending), u64::from(Event::Wanted.bit()));
    drop(vm);
    assert_eq!(register(&mut client(&host.path("vm.sock")), Register::Magic), u64::from(MAGIC));
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_file_has_many_devices_and_a_word_picks_one() {
    let host = Host::new();
    let device = |name: &str| {
        format!(r#"{{"name": "{name}", "region": "memfd", "size": "2MiB", "socket": "{name}.sock"}}"#)
    };
    let file = format!(r#"{{"devices": [{}, {}]}}"#, device("a"), device("b"));
    fs::write(host.path("serve.json"), &file).unwrap();
    let server = host.serve("serve --config serve.json");
    let (mut a, mut b) = (client(&host.path("a.sock")), client(&host.path("b.sock")));
    a.write(BAR2, 0, b"a").unwrap();
    b.write(BAR2, 0, b"b").unwrap();
    let mut data = [0];
    a.read(BAR2, 0, &mut data).unwrap();
    assert_eq!(&data, b"a");
    drop((a, b));
    assert_eq!(server.end(), Some(0));
    let server = host.serve("serve --config serve.json --slice b");
    assert!(!host.path("a.sock").exists() && host.path("b.sock").exists());
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_server_without_a_reader_of_its_messages_serves_on() {
    let host = Host::new();
    let mut command = host.command("serve --region local --size 2MiB --socket vm.sock");
    let (reader, writer) = std::io::pipe().unwrap();
    command.stderr(writer);
    let server = Server::started(command);
    drop(reader);
    for _ in 0..3 {
        // It breaks the protocol, which the server logs.
        let mut strange = UnixStream::connect(host.path("vm.sock")).unwrap();
        strange.write_all(&[0xff; 64]).unwrap();
        let _ = strange.read(&mut [0; 1]);
    }
    assert_eq!(register(&mut client(&host.path("vm.sock")), Register::Magic), u64::from(MAGIC));
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_socket_of_systemd_s_is_used_by_its_name_and_stays() {
    let host = Host::new();
    let listener = UnixListener::bind(host.path("passed.sock")).unwrap();
    let server = |name: &str| {
        let mut command = Command::new("/bin/sh");
        let exec = "exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\"";
        let words = "serve --region local --size 2MiB --name vm1 --root";
        command
            .args(["-c", exec, "sh", env!("CARGO_BIN_EXE_egm-device")])
            .args(words.split(' '))
            .arg(host.0.path());
        command.env("LISTEN_FDNAMES", name).stdin(OwnedFd::from(listener.try_clone().unwrap()));
        command
    };
    let serving = Server::started(server("vm1"));
    assert_eq!(register(&mut client(&host.path("passed.sock")), Register::Magic), u64::from(MAGIC));
    assert_eq!(serving.end(), Some(0));
    assert!(host.path("passed.sock").exists());
    let output = server("another").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("cannot serve device \"vm1\": it has no socket"), "{error}");
}

#[test]
fn what_was_granted_before_serving_fails_goes_back() {
    let host = Host::new();
    fs::write(host.path("precious"), "bytes").unwrap();
    let long = "s".repeat(108);
    for (code, socket, remedy) in [
        (3, "nowhere/vm.sock", "make the folder nowhere"),
        (3, "precious", "remove the file at that path, which is no socket"),
        (2, &long, "name a path of 107 bytes at most"),
    ] {
        let error =
            host.refuses(code, &format!("serve --region local --size 2MiB --name vm1 --socket {socket}"));
        assert!(error.contains(&format!("error: cannot listen at {socket}\n")), "{error}");
        assert!(error.contains(&format!("help: {remedy}")), "{error}");
        host.owes_nothing();
    }
    assert_eq!(fs::read(host.path("precious")).unwrap(), b"bytes");
    let two = |second: &str| {
        let first = r#"{"name": "a", "region": "local", "size": "2MiB", "socket": "a.sock"}"#;
        fs::write(host.path("serve.json"), format!(r#"{{"devices": [{first}, {second}]}}"#)).unwrap();
        host.refuses(3, "serve --config serve.json");
        host.owes_nothing();
        assert!(!host.path("a.sock").exists());
    };
    two(r#"{"name": "b", "region": "local", "size": "2MiB", "socket": "nowhere/b.sock"}"#);
    two(r#"{"name": "b", "region": "local", "size": "64MiB", "socket": "b.sock"}"#);
}

#[test]
fn an_error_is_reported_with_an_exit_code() {
    let host = Host::new();
    let error = host.refuses(3, "serve --region nowhere --size 2MiB --socket vm.sock");
    assert!(error.contains("no region or kind named \"nowhere\" on this host"), "{error}");
    assert!(error.contains("help: egm-device regions lists them"), "{error}");
    let error = host.refuses(2, "serve --region local --size 2MiB");
    assert!(
        error.contains("device \"slice\": it has no socket") && error.contains("help: name one"),
        "{error}"
    );
    let error = host.refuses(2, "serve --region local --size 0 --socket vm.sock");
    assert!(error.contains("its slice has 0 bytes"), "{error}");
    let error = host.refuses(3, "serve --region local --size 1TiB --socket vm.sock");
    assert!(
        error.contains("cannot get the slice of device \"slice\"\n  caused by: cannot place "),
        "{error}"
    );
    fs::write(host.path("serve.json"), "{\"devices\": [{\"nmae\": \"a\"}]}").unwrap();
    let error = host.refuses(2, "serve --config serve.json");
    assert!(error.ends_with("help: write \"name\" instead of \"nmae\"\n"), "{error}");
    fs::write(host.path("serve.json"), "{\"devices\":\n[}").unwrap();
    let error = host.refuses(2, "serve --config serve.json");
    assert!(error.contains("serve.json:2:2: not devices to serve") && error.contains("help: "), "{error}");
    let error = host.refuses(2, "serve --config typo.json");
    assert!(error.contains("cannot read typo.json") && error.contains("help: "), "{error}");
    let _first = host.serve("serve --region local --size 2MiB --socket vm.sock");
    let error = host.refuses(3, "serve --region local --size 2MiB --socket vm.sock");
    assert!(error.contains("vm.sock: another program does"), "{error}");
    assert!(error.contains("help: end that program, or name another path"), "{error}");
}

/// One client's life: memory mapped, vectors that fire, a write, a reset.
fn round(path: &Path, number: u64) {
    let mut vm = client(path);
    let (_, file) = vm.region_info(BAR2).unwrap();
    let events = vectors(&mut vm);
    vm.set_irqs(SetIrqs { data: IrqData::Bool(&[0, 1, 0]), ..SET }, &[]).unwrap();
    assert_eq!(events.each_ref().map(fired), [false, true, false]);
    let map = DmaMap { read: true, write: true, offset: 0, address: 0, size: 0x1000, by_file: ByFile::Any };
    for window in 0..8 {
        let map = DmaMap { address: window << 12, ..map };
        vm.dma_map(map, file.as_ref().map(AsFd::as_fd)).unwrap();
    }
    vm.dma_unmap(DmaUnmap::Window { address: 0, size: 0x1000 }).unwrap();
    let mut before = [0; 8];
    vm.read(BAR2, 0, &mut before).unwrap();
    assert_eq!(u64::from_le_bytes(before), number, "the slice stays");
    vm.write(BAR2, 0, &(number + 1).to_le_bytes()).unwrap();
    vm.write(BAR0, Register::Doorbell.offset(), &[2, 0, 0, 0]).unwrap();
    vm.reset().unwrap();
}

#[test]
fn a_thousand_clients_leave_neither_descriptors_nor_memory_behind() {
    let host = Host::new();
    let server = host.serve("serve --region local --size 2MiB --socket vm.sock");
    let path = host.path("vm.sock");
    (0..100).for_each(|number| round(&path, number));
    // One client at a time is connected: while one is served, no state of those before it is left.
    let costs = || {
        let _vm = client(&path);
        server.costs()
    };
    let (descriptors, resident) = costs();
    (100..1000).for_each(|number| round(&path, number));
    let after = costs();
    assert_eq!(after.0, descriptors);
    assert!(after.1 <= resident + 512, "{resident} KiB became {}", after.1);
    assert_eq!(server.end(), Some(0));
}
