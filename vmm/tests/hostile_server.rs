//! The program with a hostile vfio-user server, which answers with files of a FUSE file system that has stopped
//! answering: every read, page fault and close of such a file waits for ever, beyond SIGKILL.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../egm-device/tests/device/fuse.rs"]
mod fuse;

use std::fs::{self, File};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use egm_fixtures::function::config::Identity;
use egm_fixtures::function::device::{Function, Setup};
use egm_fixtures::payload::{Entry, Ports};
use egm_vfio_wire::message::Command as Request;
use egm_vfio_wire::receiver::FileKind;
use egm_vfio_wire::serve::serve;
use egm_vfio_wire::socket::{BusyPoll, Connection};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::json;

use crate::fuse::Fuse;

/// Time enough for any machine.
const LIMIT: Duration = Duration::from_secs(20);
/// Largest message, in bytes.
const MOST: u32 = 1 << 21;

/// A descriptor of an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    /// The function's own: memory of BAR 2.
    Own,
    /// A file of the silent file system.
    Silent,
}

/// Descriptors in the replies to one command.
type Attack = (Request, &'static [Sent]);

fn connection(socket: UnixStream) -> Connection {
    Connection::new(socket.into(), LIMIT, BusyPoll::NONE).unwrap()
}

/// Kind of the descriptors that come with a command or its reply.
fn kind(command: u16) -> FileKind {
    match Request::try_from(command) {
        Ok(Request::SetIrqs) => FileKind::Event,
        Ok(Request::DmaMap | Request::RegionInfo) => FileKind::Memory,
        _ => FileKind::Nothing,
    }
}

/// Sends the next message of `from` to `to`; in the place of its descriptors those of the attack, if it is a target.
fn forward(from: &mut Connection, to: &Connection, attack: Option<(Attack, &File)>) -> Option<()> {
    from.receive(MOST).ok()?;
    let command = from.frame().header.command;
    let own: Vec<OwnedFd> = from.take_fds(kind(command)).ok()?;
    let body = from.frame().body;
    // One description of a region has a file: that of BAR 2.
    let is_target =
        |attack: Request| attack.number() == command && (attack != Request::RegionInfo || !own.is_empty());
    let mut fds: Vec<_> = own.iter().map(AsFd::as_fd).collect();
    if let Some(((_, sent), silent)) = attack.filter(|((command, _), _)| is_target(*command)) {
        let one = |sent: &Sent| if *sent == Sent::Own { own[0].as_fd() } else { silent.as_fd() };
        fds = sent.iter().map(one).collect();
    }
    to.send(from.frame().header, [body, &[]], &fds, u32::MAX).ok()
}

/// Serves one client: an honest function, with a relay between it and the client that makes the attack.
fn serve_one(client: UnixStream, attack: Attack, silent: &File) {
    const SETUP: Setup = Setup {
        identity: Identity { vendor: 0x10de, device: 0x2342, class: 0x03_0200 },
        bar: 1 << 20,
        memory: 1 << 20,
        vectors: 4,
    };
    let (near, far) = UnixStream::pair().unwrap();
    let function = thread::spawn(move || {
        let _ = serve(&mut connection(far), &mut Function::new(SETUP).unwrap());
    });
    let (mut client, mut inner) = (connection(client), connection(near));
    while forward(&mut client, &inner, None).is_some()
        && forward(&mut inner, &client, Some((attack, silent))).is_some()
    {}
    drop(inner);
    function.join().unwrap();
}

/// Exit code and messages of the program when its vfio-user server attacks.
enum Outcome {
    Ended(Option<i32>, String),
    Hangs,
    /// This user may mount no file system.
    Skipped,
}

fn outcome(folder: &Path, arguments: &[&str], attack: Attack) -> Outcome {
    // A program that starts while this process has files of the file system would wait for it when it closes them.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let (socket, messages) = (folder.join("fn.sock"), folder.join("messages"));
    let _ = fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_egm-vmm"))
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&messages).unwrap())
        .spawn()
        .unwrap();
    let process = pidfd_open(Pid::from_child(&program), PidfdFlags::empty()).unwrap();
    let limit = Timespec::try_from(LIMIT).unwrap();
    let (client, _) = listener.accept().unwrap();
    let Some(fuse) = Fuse::mount() else {
        program.kill().unwrap();
        program.wait().unwrap();
        return Outcome::Skipped;
    };
    let closer = client.try_clone().unwrap();
    let ended = thread::scope(|scope| {
        scope.spawn(|| serve_one(client, attack, fuse.file()));
        let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)).unwrap();
        // A receiver that waits for the file system has the other end still.
        let _ = closer.shutdown(Shutdown::Both);
        ended
    });
    program.kill().unwrap();
    // A program that hangs in the kernel ends when the file system is unmounted.
    drop(fuse);
    let code = program.wait().unwrap().code();
    if ended == 0 { Outcome::Hangs } else { Outcome::Ended(code, fs::read_to_string(&messages).unwrap()) }
}

/// Checks that the program refuses the server, with `reason`, and ends; false where this host cannot decide that.
#[track_caller]
fn is_refused(folder: &Path, arguments: &[&str], attack: Attack, reason: &str) -> bool {
    match outcome(folder, arguments, attack) {
        Outcome::Ended(Some(3), messages) if messages.contains(reason) => true,
        Outcome::Ended(code, messages) => panic!("{attack:?}: exit code {code:?}: {messages}"),
        Outcome::Hangs => panic!("{attack:?}: the program hangs"),
        Outcome::Skipped => false,
    }
}

#[test]
fn a_bar_that_is_a_file_of_a_silent_file_system_is_refused_and_hangs_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let facts = ["facts", "--server", "fn.sock"];
    let attacks: [(&[Sent], &str); 4] = [
        (&[Sent::Silent], "the file of region 2 is neither memory"),
        (&[Sent::Silent, Sent::Own], "2 file descriptors"),
        (&[Sent::Own, Sent::Silent], "2 file descriptors"),
        (&[Sent::Silent; 16], "16 file descriptors"),
    ];
    for (sent, reason) in attacks {
        is_refused(folder.path(), &facts, (Request::RegionInfo, sent), reason);
    }
}

#[test]
fn files_of_a_silent_file_system_with_a_reply_that_has_none_are_refused_and_hang_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let commands = [Request::Version, Request::DeviceInfo, Request::IrqInfo, Request::RegionRead];
    let facts = ["facts", "--server", "fn.sock"];
    let decided = commands
        .iter()
        .all(|command| is_refused(folder.path(), &facts, (*command, &[Sent::Silent]), "descriptors"));
    if !decided {
        return;
    }
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return println!("skipped: /dev/kvm: {error}");
    }
    let config = json!({
        "memory": { "size": "16MiB" },
        "boot": { "kernel": "kernel" },
        "console": "null",
        "devices": [{ "type": "vfio-user", "socket": "fn.sock" }],
    });
    fs::write(folder.path().join("vm.json"), config.to_string()).unwrap();
    fs::write(folder.path().join("kernel"), egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh)).unwrap();
    for command in [Request::DmaMap, Request::Reset] {
        is_refused(folder.path(), &["run", "vm.json"], (command, &[Sent::Silent]), "descriptors");
    }
}
