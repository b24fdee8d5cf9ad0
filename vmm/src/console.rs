//! Destinations of the guest's serial console: our own terminal, a file, a pseudo-terminal or a socket.

mod relay;

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use relay::Relay;
use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};

use crate::config;
use crate::error::{Blame, Remedy, Report};
use crate::kept::KeptPart;
use crate::listener::Listener;
use crate::lock::lock;

/// Why the console cannot be opened.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum ConsoleError {
    /// The file that output goes to.
    #[error("cannot open console file {}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Something that output is not appended to.
    #[error("cannot open console file {}: it is {found}, and must be a regular file or a pipe", path.display())]
    NotAFile {
        path: PathBuf,
        /// Kind of file at the path.
        found: &'static str,
    },
    /// The socket for a client.
    #[error("cannot listen on console socket {}", path.display())]
    Socket {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A process listens at the socket's path.
    #[error("cannot listen on console socket {}: a process listens there", path.display())]
    SocketInUse { path: PathBuf },
    /// A file of another kind is at the socket's path.
    #[error("cannot listen on console socket {}: a file that is no socket is there", path.display())]
    NotASocket { path: PathBuf },
    /// The host has no descriptor or thread left to carry output.
    #[error("cannot make the pipe and the thread that write the console's output")]
    Relay(#[source] io::Error),
    /// The host gives no pseudo-terminal.
    #[error("cannot open a pseudo-terminal for the console")]
    Pty(#[source] io::Error),
}

impl ConsoleError {
    /// The error of a console socket at `path` that is not made because of `source`.
    pub(crate) fn socket(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::AlreadyExists => Self::NotASocket { path },
            io::ErrorKind::AddrInUse => Self::SocketInUse { path },
            _ => Self::Socket { path, source },
        }
    }
}

impl Report for ConsoleError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::File { source, .. } if source.raw_os_error() == Some(libc::ENXIO) => {
                Blame::Configuration.help(
                    "start the reader of this pipe first; for a socket of ours, set \"console\".\"type\" to \"socket\"",
                )
            }
            Self::File { source, .. } if source.raw_os_error() == Some(libc::ELOOP) => Blame::Configuration
                .help("it is a symbolic link: set \"console\".\"path\" to the file itself"),
            Self::NotAFile { .. } => {
                Blame::Configuration.help("set \"console\".\"path\" to a file that may be made")
            }
            Self::File { .. } => Blame::Configuration
                .help("set \"console\".\"path\" to a file that you may write, in a folder that exists"),
            Self::SocketInUse { .. } => Blame::Configuration.help(
                "set \"console\".\"path\" to a path that does not exist yet, or end the process that listens there",
            ),
            Self::NotASocket { .. } => Blame::Configuration.help(
                "set \"console\".\"path\" to a path that does not exist yet; for a file, set \"console\".\"type\" to \"file\"",
            ),
            Self::Socket { .. } => Blame::Configuration.help(
                "set \"console\".\"path\" to a path in a folder that exists and that you may write",
            ),
            Self::Relay(_) => {
                Blame::Host.help("raise the limits of open files and of threads: ulimit -n 65536 -u 65536")
            }
            Self::Pty(_) => Blame::Host.help("mount devpts on /dev/pts, or set \"console\" to \"stdio\""),
        }
    }
}

/// Earlier settings of our terminal, while the guest has it.
static TERMINAL: Mutex<Option<Termios>> = Mutex::new(None);

/// Restores our terminal to its state before `Console::take_terminal`. The lock is held for no call, so that a panicking
/// thread can do this.
pub(crate) fn restore_terminal() {
    let before = lock(&TERMINAL).take();
    restore(before.as_ref());
}

/// As [`restore_terminal`], for the handler of a signal: waits for no lock. A thread that holds it restores the terminal
/// itself, or is the one that the signal interrupted.
pub(crate) fn try_restore_terminal() {
    let before = TERMINAL.try_lock().ok().and_then(|mut before| before.take());
    restore(before.as_ref());
}

fn restore(before: Option<&Termios>) {
    if let Some(before) = before {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
    }
}

/// An open console. Writing to it never waits for a reader or a disk. Dropping it waits for the last output, and prints
/// how much was lost.
#[derive(Debug)]
pub struct Console {
    kind: Kind,
    /// Bytes that a pseudo-terminal or a client did not take.
    lost: u64,
}

#[derive(Debug)]
enum Kind {
    Stdio { output: Relay, input: bool },
    File { output: Relay, file: File },
    Pty { master: File, slave: OwnedFd },
    Socket { listener: Listener, client: Option<UnixStream> },
    Null,
}

impl Console {
    /// Opens what the configuration names.
    ///
    /// # Errors
    /// [`ConsoleError`] naming the file or socket.
    pub fn open(config: &config::Console) -> Result<Self, ConsoleError> {
        Self::open_with(config, None)
    }

    /// The same; what is `kept` is not opened again.
    ///
    /// # Errors
    /// As [`Console::open`].
    pub(crate) fn open_with(config: &config::Console, kept: Option<&KeptPart>) -> Result<Self, ConsoleError> {
        let kind = match config {
            config::Console::Null => Kind::Null,
            config::Console::Stdio => stdio().map_err(ConsoleError::Relay)?,
            config::Console::File { path } => {
                let failed = |source| ConsoleError::File { path: path.clone(), source };
                let file = kept.map_or_else(|| file(path), |kept| kept.first().map_err(failed))?;
                let output =
                    Relay::start(file.try_clone().map_err(failed)?.into()).map_err(ConsoleError::Relay)?;
                Kind::File { output, file }
            }
            config::Console::Pty => kept.map_or_else(pty, kept_pty).map_err(ConsoleError::Pty)?,
            config::Console::Socket { path } => {
                let listener = kept.map_or_else(|| Listener::bind(path), |kept| Listener::kept(path, kept));
                let listener = listener.map_err(|source| ConsoleError::socket(path, source))?;
                Kind::Socket { listener, client: None }
            }
        };
        Ok(Self { kind, lost: 0 })
    }

    /// Files that another execution of the program needs.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn keep(&self) -> io::Result<KeptPart> {
        match &self.kind {
            Kind::Pty { master, slave } => KeptPart::of([master.as_fd(), slave.as_fd()]),
            Kind::Socket { listener, .. } => listener.keep(),
            Kind::File { file, .. } => KeptPart::of([file.as_fd()]),
            Kind::Stdio { .. } | Kind::Null => Ok(KeptPart::default()),
        }
    }

    /// Waits for some moments until the reader has all output so far. Returns whether it has.
    pub(crate) fn drain(&mut self) -> bool {
        match &mut self.kind {
            Kind::Stdio { output, .. } | Kind::File { output, .. } => output.drain(),
            Kind::Pty { .. } | Kind::Socket { .. } | Kind::Null => true,
        }
    }

    /// Passes our terminal, if it is one, to the guest until the console is dropped: every key goes there, Ctrl-C too.
    /// Before this call the operator can stop a start that takes long.
    pub(crate) fn take_terminal(&mut self) {
        let Kind::Stdio { .. } = &self.kind else { return };
        let stdin = io::stdin();
        let Ok(before) = tcgetattr(&stdin) else { return };
        let mut raw = before.clone();
        raw.make_raw();
        raw.output_modes = before.output_modes; // our own messages keep their line ends
        *lock(&TERMINAL) = Some(before);
        let _ = tcsetattr(&stdin, OptionalActions::Now, &raw);
    }

    /// Name of the pseudo-terminal, if it is one.
    pub(crate) fn pty_name(&self) -> Option<String> {
        match &self.kind {
            Kind::Pty { master, .. } => {
                Some(ptsname(master, Vec::new()).ok()?.to_string_lossy().into_owned())
            }
            _ => None,
        }
    }

    /// Writes the guest's output. Output that no reader takes is lost, as on a cable.
    pub fn write(&mut self, data: &[u8]) {
        match &mut self.kind {
            Kind::Stdio { output, .. } | Kind::File { output, .. } => output.write(data),
            Kind::Pty { master, .. } => self.lost = self.lost.saturating_add(left(data, &master.write(data))),
            Kind::Socket { client: Some(stream), .. } => {
                let written = stream.write(data);
                self.lost = self.lost.saturating_add(left(data, &written));
                if written.is_err() && !taken(written).1 {
                    // Not closed here: its number would be another file's while the event loop still waits for it.
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
            Kind::Socket { client: None, .. } | Kind::Null => {}
        }
    }

    /// Descriptors to wait for; they change when a client comes or goes.
    pub fn sources(&self) -> Vec<RawFd> {
        match &self.kind {
            Kind::Stdio { input: true, .. } => vec![io::stdin().as_raw_fd()],
            Kind::Pty { master, .. } => vec![master.as_raw_fd()],
            Kind::Socket { client: Some(stream), .. } => vec![stream.as_raw_fd()],
            Kind::Socket { listener, client: None, .. } => vec![listener.as_raw_fd()],
            _ => Vec::new(),
        }
    }

    /// Takes typed bytes, or a client; returns the number of bytes, 0 when there are none. May close a descriptor from
    /// [`sources`](Self::sources): do not wait for it any longer. An empty `buffer` would look like the end.
    pub fn read(&mut self, buffer: &mut [u8]) -> usize {
        match &mut self.kind {
            Kind::Stdio { input, .. } => {
                // Not through std's buffer: poll would never report the bytes that it reads ahead.
                let count;
                (count, *input) = taken(rustix::io::read(io::stdin().as_fd(), buffer).map_err(Into::into));
                count
            }
            Kind::Pty { master, .. } => master.read(buffer).unwrap_or(0),
            Kind::Socket { client: open @ Some(_), .. } => {
                let (count, goes_on) = open.as_mut().map_or((0, false), |stream| taken(stream.read(buffer)));
                open.take_if(|_| !goes_on);
                count
            }
            Kind::Socket { listener, client: client @ None } => {
                *client = listener.accept().ok().flatten();
                0
            }
            Kind::File { .. } | Kind::Null => 0,
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Kind::Stdio { .. } = &self.kind {
            restore_terminal();
        }
        let lost = match &mut self.kind {
            Kind::Stdio { output, .. } | Kind::File { output, .. } => output.finish(),
            _ => self.lost,
        };
        if lost > 0 {
            let why = "the reader was too slow, or the disk is full";
            tracing::info!("{lost} bytes of console output are lost: {why}");
        }
    }
}

/// Bytes of `data` that were not written.
fn left(data: &[u8], written: &io::Result<usize>) -> u64 {
    let written = written.as_ref().map_or(0, |written| *written);
    u64::try_from(data.len().saturating_sub(written)).unwrap_or(u64::MAX)
}

fn stdio() -> io::Result<Kind> {
    let output = Relay::start(io::stdout().as_fd().try_clone_to_owned()?)?;
    Ok(Kind::Stdio { output, input: is_waitable(io::stdin().as_fd()) })
}

/// Opens the file at `path`, made for this user alone, without following a link, waiting for a pipe's reader, or making a
/// terminal ours.
fn file(path: &Path) -> Result<File, ConsoleError> {
    let failed = |source| ConsoleError::File { path: path.to_owned(), source };
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_NOFOLLOW;
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(if egm_address::fault!("console-file-for-all") { 0o644 } else { 0o600 })
        .custom_flags(flags)
        .open(path);
    let file = file.map_err(failed)?;
    check_kind(path, file.metadata().map_err(failed)?.file_type())?;
    Ok(file)
}

/// Refuses a file at `path` of a `kind` that output is not appended to.
///
/// # Errors
/// [`ConsoleError::NotAFile`].
pub(crate) fn check_kind(path: &Path, kind: FileType) -> Result<(), ConsoleError> {
    if kind.is_file() || kind.is_fifo() {
        return Ok(());
    }
    let found = if kind.is_char_device() { "a character device" } else { "no file" };
    Err(ConsoleError::NotAFile { path: path.to_owned(), found })
}

/// Whether poll is meaningful for it: a regular file or /dev/null is always ready and would spin.
fn is_waitable(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|stat| {
        let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
        kind.is_fifo() || kind.is_socket() || (kind.is_char_device() && isatty(fd))
    })
}

fn pty() -> io::Result<Kind> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname(&master, Vec::new())?;
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    // Held open so that a reader that leaves does not hang the line up.
    let slave = rustix::fs::open(&name, flags, rustix::fs::Mode::empty())?;
    let mut raw = tcgetattr(&slave)?;
    raw.make_raw();
    tcsetattr(&slave, OptionalActions::Now, &raw)?;
    rustix::io::ioctl_fionbio(&master, true)?;
    Ok(Kind::Pty { master: File::from(master), slave })
}

/// The pseudo-terminal of the execution before this one.
fn kept_pty(kept: &KeptPart) -> io::Result<Kind> {
    let [master, slave] = kept.files() else { return Err(io::ErrorKind::NotFound.into()) };
    Ok(Kind::Pty { master: File::from(master.try_clone()?), slave: slave.try_clone()? })
}

/// Bytes read, and whether more can come. A signal, or a source that has nothing now, is not the end.
fn taken(read: io::Result<usize>) -> (usize, bool) {
    match read {
        Ok(count) => (count, count > 0),
        Err(error) => (0, matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_pty_carries_both_ways() {
        let mut console = Console::open(&config::Console::Pty).unwrap();
        let name = console.pty_name().unwrap();
        let mut other = OpenOptions::new().read(true).write(true).open(name).unwrap();
        console.write(b"login: ");
        let mut buffer = [0; 16];
        assert_eq!(other.read(&mut buffer).unwrap(), 7);
        other.write_all(b"root").unwrap();
        assert_eq!(console.read(&mut buffer), 4);
        assert_eq!(&buffer[..4], b"root");
    }

    #[test]
    fn a_signal_handler_does_not_wait_for_the_terminal_s_lock() {
        let held = lock(&TERMINAL);
        let (done, restored) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            try_restore_terminal();
            let _ = done.send(());
        });
        restored.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
        drop(held);
    }

    #[test]
    fn a_socket_takes_one_client_after_another_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        let mut console = Console::open(&config::Console::Socket { path: path.clone() }).unwrap();
        console.write(b"nobody hears this");
        let mut buffer = [0; 16];
        for text in [b"one", b"two"] {
            let mut client = UnixStream::connect(&path).unwrap();
            assert_eq!(console.read(&mut buffer), 0);
            console.write(text);
            assert_eq!(client.read(&mut buffer).unwrap(), 3);
            drop(client);
            assert_eq!(console.read(&mut buffer), 0);
        }
        drop(console);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_replaces_no_other_file_and_no_socket_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let (file, used) = (folder.path().join("log"), folder.path().join("used"));
        std::fs::write(&file, "old").unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&used).unwrap();
        for (path, reason, help) in [
            (&file, "a file that is no socket is there", "set \"console\".\"type\" to \"file\""),
            (&used, "a process listens there", "or end the process that listens there"),
        ] {
            let error = Console::open(&config::Console::Socket { path: path.clone() }).unwrap_err();
            let expected = format!("cannot listen on console socket {}: {reason}", path.display());
            assert_eq!(error.to_string(), expected);
            assert!(error.help().unwrap().ends_with(help), "{:?}", error.help());
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"old");
    }

    #[test]
    fn a_file_is_made_for_its_user_alone_and_links_and_devices_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &Path| Console::open(&config::Console::File { path: path.to_owned() });
        let (new, link) = (folder.path().join("new"), folder.path().join("link"));
        drop(open(&new).unwrap());
        assert_eq!(new.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::os::unix::fs::symlink(&new, &link).unwrap();
        let error = open(&link).unwrap_err();
        assert!(error.help().unwrap().contains("symbolic link"), "{error}");
        let error = open(Path::new("/dev/null")).unwrap_err();
        assert!(error.to_string().contains("a character device, and must be"), "{error}");
        assert_eq!(error.blame(), Blame::Configuration);
    }

    #[test]
    fn a_read_that_a_signal_interrupts_does_not_end_the_input() {
        for kind in [io::ErrorKind::Interrupted, io::ErrorKind::WouldBlock] {
            assert_eq!(taken(Err(kind.into())), (0, true));
        }
        assert_eq!((taken(Ok(0)), taken(Ok(3))), ((0, false), (3, true)));
        assert_eq!(taken(Err(io::ErrorKind::ConnectionReset.into())), (0, false));
    }

    #[test]
    fn a_pipe_without_a_reader_is_an_error_and_one_with_a_reader_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let config = config::Console::File { path: path.clone() };
        let error = Console::open(&config).unwrap_err(); // hangs when it waits for a reader
        assert!(error.help().unwrap().contains("start the reader of this pipe first"), "{error}");

        let nonblocking = libc::O_NONBLOCK;
        let mut reader = OpenOptions::new().read(true).custom_flags(nonblocking).open(&path).unwrap();
        let mut console = Console::open(&config).unwrap();
        console.write(b"login: ");
        drop(console);
        let mut read = String::new();
        reader.read_to_string(&mut read).unwrap();
        assert_eq!(read, "login: ");
    }
}
