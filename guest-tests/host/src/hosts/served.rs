//! vfio-user servers: of slices (`egm-device serve`), and of the lab's own functions (`vfio/fixtures`), which are GPUs
//! and a network card for a guest or for the emulated host.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::engine::error::LabError;
use crate::engine::process::bound_to_us;

/// A function that is served.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Card {
    pub(crate) kind: Kind,
    /// MiB of its memory BAR.
    pub(crate) bar: u64,
    /// MiB of memory in it.
    pub(crate) memory: u64,
}

/// Kinds of functions that are served.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// The configuration space of a real one.
    Recorded(&'static str),
    /// A GPU for the emulated Grace host, with the host's own memory: ready some reads after each reset.
    Grace {
        /// Name of the file that is its socket's EGM, in the folder of the server's socket.
        egm: &'static str,
    },
}

/// An H200 with half of its BAR, so that two of them and a guest fit into an emulated processor's 40 address bits. It
/// needs Linux 6.15: before, type 1 maps BARs for other devices in pages of 4 KiB, too many for this BAR.
pub(crate) const GPU: Card = Card {
    kind: Kind::Recorded(include_str!("../../../../vfio/tests/data/h200.txt")),
    bar: 64 << 10,
    memory: 2 << 10,
};
/// A ConnectX-5: unlike newer cards, it has a public record of its configuration space.
pub(crate) const NIC: Card = Card {
    kind: Kind::Recorded(include_str!("../../../../vfio/tests/data/connectx5.txt")),
    bar: 32,
    memory: 32,
};
/// A Grace GPU: in addition to its own memory BAR, its driver shows the memory that processors share.
const fn grace(egm: &'static str) -> Card {
    Card { kind: Kind::Grace { egm }, bar: 64, memory: 64 }
}
/// A card of an emulated host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plugged {
    /// Name of its socket.
    socket: &'static str,
    pub(crate) card: Card,
}

/// The cards of an emulated PC that has some.
pub(crate) const PLUGGED: &[Plugged] = &[
    Plugged { socket: "gpu0.sock", card: GPU },
    Plugged { socket: "gpu1.sock", card: GPU },
    Plugged { socket: "nic.sock", card: NIC },
];
/// Those of an emulated Grace host.
pub(crate) const PLUGGED_GRACE: &[Plugged] = &[
    Plugged { socket: "gpu0.sock", card: grace("egm4.ram") },
    Plugged { socket: "gpu1.sock", card: grace("egm5.ram") },
];

/// A server, which is killed with this value.
#[derive(Debug)]
pub(crate) struct Server(Child);

/// The cards of an emulated host.
#[derive(Debug)]
pub(crate) struct Cards {
    pub(crate) servers: Vec<Server>,
    /// Memory of sockets, which QEMU and the servers open through this process.
    #[expect(dead_code, reason = "held")]
    pub(crate) egm: Vec<File>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // This fails for a server that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    /// Sends it SIGTERM; a slice's server then requests the slice from its guest.
    pub(crate) fn request_slice(&self) -> io::Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), Signal::TERM)?)
    }

    /// Its exit code, once it has ended.
    pub(crate) fn wait(&mut self) -> io::Result<Option<i32>> {
        Ok(self.0.wait()?.code())
    }

    /// Path of its open file that begins with `prefix`.
    pub(crate) fn open_file(&self, prefix: &str) -> Option<PathBuf> {
        let open = fs::read_dir(format!("/proc/{}/fd", self.0.id())).ok()?;
        let mut links = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links.find(|link| link.to_string_lossy().starts_with(prefix))
    }

    /// Its memory of `size` bytes, which is a file without a name.
    pub(crate) fn memory(&self, size: u64) -> io::Result<Vec<u8>> {
        for entry in fs::read_dir(format!("/proc/{}/fd", self.0.id()))? {
            let path = entry?.path();
            let is_memory =
                fs::read_link(&path).is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:"));
            if is_memory && fs::metadata(&path)?.len() == size {
                return fs::read(path);
            }
        }
        Err(io::Error::other("the server has no memory of the slice's size"))
    }
}

/// Starts `function` as `card`; it serves at `socket` when this returns.
pub(crate) fn start(function: &Path, card: Card, socket: &Path) -> Result<Server, LabError> {
    let mut command = Command::new(function);
    command.args(["--bar", &card.bar.to_string(), "--memory", &card.memory.to_string()]);
    match card.kind {
        Kind::Grace { egm } => command.arg("--grace").arg("--egm").arg(socket.with_file_name(egm)),
        Kind::Recorded(text) => {
            let recorded = socket.with_extension("txt");
            fs::write(&recorded, text).map_err(LabError::file("write", &recorded))?;
            command.arg("--recorded").arg(recorded)
        }
    };
    command.arg("--socket").arg(socket);
    let log = socket.with_extension("log");
    let said = File::create(&log).map_err(LabError::file("write", &log))?;
    serve(command, said.into())
}

/// Starts `command`; it serves when this returns, and prints a line then. Its messages about clients go to `stderr`.
pub(crate) fn serve(command: Command, stderr: Stdio) -> Result<Server, LabError> {
    let mut command = bound_to_us(command);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr).spawn();
    let program = Path::new(command.get_program());
    let mut server = Server(child.map_err(LabError::file("run", program))?);
    let mut line = String::new();
    match server.0.stdout.take().map(|out| BufReader::new(out).read_line(&mut line)) {
        Some(Ok(1..)) => Ok(server),
        _ => Err(LabError::Content {
            what: format!("{command:?}"),
            problem: "it does not serve: run it by hand".into(),
        }),
    }
}

/// Sockets of `cards` in `folder`.
pub(crate) fn sockets(cards: &[Plugged], folder: &Path) -> Vec<PathBuf> {
    cards.iter().map(|plugged| folder.join(plugged.socket)).collect()
}

/// Starts `cards` of an emulated host, with their [`sockets`] in `folder`.
pub(crate) fn plug(cards: &[Plugged], function: &Path, folder: &Path) -> Result<Vec<Server>, LabError> {
    cards.iter().map(|plugged| start(function, plugged.card, &folder.join(plugged.socket))).collect()
}
