//! Where the guest's serial console goes: our own terminal, a file, a pseudo-terminal or a socket.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};

use crate::config;
use crate::error::{Blame, Report};
use crate::listener::Listener;

/// Why the console cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The file that output goes to.
    #[error("cannot open console file {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The socket for a client.
    #[error("cannot listen on console socket {}", path.display())]
    Socket {
        /// Its path.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The host gives no pseudo-terminal.
    #[error("cannot open a pseudo-terminal for the console")]
    Pty(#[source] io::Error),
}

impl Report for ConsoleError {
    fn blame(&self) -> Blame {
        match self {
            Self::File { .. } | Self::Socket { .. } => Blame::Configuration,
            Self::Pty(_) => Blame::Host,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            Self::File { .. } => {
                "set \"console\".\"path\" to a file that you may write, in a folder that exists".to_owned()
            }
            Self::Socket { source, .. }
                if matches!(source.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AlreadyExists) =>
            {
                "set \"console\".\"path\" to a path that does not exist yet, or end who listens there"
                    .to_owned()
            }
            Self::Socket { .. } => {
                "set \"console\".\"path\" to a path in a folder that exists and that you may write".to_owned()
            }
            Self::Pty(_) => "mount devpts on /dev/pts, or set \"console\" to \"stdio\"".to_owned(),
        })
    }
}

/// How long the guest waits for a reader of its output who takes nothing.
const PATIENCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// An open console. A reader who takes nothing costs the guest a second (`PATIENCE`) once, and after that only output.
#[derive(Debug)]
pub struct Console(Kind);

#[derive(Debug)]
enum Kind {
    /// `before` is what the terminal was like, once it is raw.
    Stdio {
        before: Option<Box<Termios>>,
        input: bool,
        stalled: bool,
    },
    File {
        file: File,
        stalled: bool,
    },
    Pty {
        master: File,
        _slave: OwnedFd,
    },
    Socket {
        listener: Listener,
        client: Option<UnixStream>,
    },
    Null,
}

impl Console {
    /// Opens what the configuration names.
    ///
    /// # Errors
    /// [`ConsoleError`] naming the file or socket.
    pub fn open(config: &config::Console) -> Result<Self, ConsoleError> {
        Ok(Self(match config {
            config::Console::Null => Kind::Null,
            config::Console::Stdio => stdio(),
            config::Console::File { path } => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                let file = file.map_err(|source| ConsoleError::File { path: path.clone(), source })?;
                Kind::File { file, stalled: false }
            }
            config::Console::Pty => pty().map_err(ConsoleError::Pty)?,
            config::Console::Socket { path } => {
                let failed = |source| ConsoleError::Socket { path: path.clone(), source };
                Kind::Socket { listener: Listener::bind(path).map_err(failed)?, client: None }
            }
        }))
    }

    /// Our terminal, if it is one, belongs to the guest from now until the console is dropped: every key goes there,
    /// Ctrl-C too. Until then the operator can stop a start that takes long.
    pub fn take_terminal(&mut self) {
        let Kind::Stdio { before, .. } = &mut self.0 else { return };
        let stdin = io::stdin();
        let Ok(found) = tcgetattr(&stdin) else { return };
        let mut raw = found.clone();
        raw.make_raw();
        raw.output_modes = found.output_modes; // our own messages keep their line ends
        if tcsetattr(&stdin, OptionalActions::Now, &raw).is_ok() {
            *before = Some(Box::new(found));
        }
    }

    /// Name of the pseudo-terminal, if it is one.
    pub fn pty_name(&self) -> Option<String> {
        match &self.0 {
            Kind::Pty { master, .. } => {
                Some(ptsname(master, Vec::new()).ok()?.to_string_lossy().into_owned())
            }
            _ => None,
        }
    }

    /// Writes what the guest printed. What nobody takes is lost, as on a cable.
    pub fn write(&mut self, data: &[u8]) {
        match &mut self.0 {
            Kind::Stdio { stalled, .. } => put(io::stdout().as_fd(), data, stalled),
            Kind::File { file, stalled } => put(file.as_fd(), data, stalled),
            Kind::Pty { master, .. } => drop(master.write(data)),
            Kind::Socket { client, .. } => {
                client.take_if(|stream| {
                    let written = stream.write(data);
                    written.is_err() && !taken(written).1
                });
            }
            Kind::Null => {}
        }
    }

    /// Descriptors to wait for; they change when a client comes or goes.
    pub fn sources(&self) -> Vec<RawFd> {
        match &self.0 {
            Kind::Stdio { input: true, .. } => vec![io::stdin().as_raw_fd()],
            Kind::Pty { master, .. } => vec![master.as_raw_fd()],
            Kind::Socket { client: Some(stream), .. } => vec![stream.as_raw_fd()],
            Kind::Socket { listener, client: None, .. } => vec![listener.as_raw_fd()],
            _ => Vec::new(),
        }
    }

    /// Takes what was typed, or a client; the number of bytes, 0 when there is none.
    pub fn read(&mut self, buffer: &mut [u8]) -> usize {
        match &mut self.0 {
            Kind::Stdio { input, .. } => {
                // Not through std's buffer: what it would read ahead no poll would ever show again.
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
        if let Kind::Stdio { before: Some(before), .. } = &self.0 {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

fn stdio() -> Kind {
    Kind::Stdio { before: None, input: is_waitable(io::stdin().as_fd()), stalled: false }
}

/// Writes what the reader takes. The guest's thread is in here, and a signal to it means that the machine ends: to
/// wait on would keep the disks from their flush for as long as nobody reads.
fn put(fd: BorrowedFd<'_>, data: &[u8], stalled: &mut bool) {
    let mut rest = data;
    while !rest.is_empty() {
        let patience = if *stalled { Timespec::default() } else { PATIENCE };
        match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], Some(&patience)) {
            Ok(0) => *stalled = true,
            Ok(_) => *stalled = false,
            Err(_) => return,
        }
        if *stalled {
            return;
        }
        // Ready means that a pipe takes a byte for certain, and more than that perhaps only in time.
        let (now, later) = rest.split_at(1);
        match rustix::io::write(fd, now) {
            Ok(1) => rest = later,
            _ => return,
        }
    }
}

/// Whether poll says something about it: a regular file or /dev/null is always ready and would spin.
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
    // Held open so that a reader who leaves does not hang the line up.
    let slave = rustix::fs::open(&name, flags, rustix::fs::Mode::empty())?;
    let mut raw = tcgetattr(&slave)?;
    raw.make_raw();
    tcsetattr(&slave, OptionalActions::Now, &raw)?;
    rustix::io::ioctl_fionbio(&master, true)?;
    Ok(Kind::Pty { master: File::from(master), _slave: slave })
}

/// What a read gave, and whether there is more to come. A signal or a source that has nothing now is not its end.
fn taken(read: io::Result<usize>) -> (usize, bool) {
    match read {
        Ok(count) => (count, count > 0),
        Err(error) => (0, matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)),
    }
}

#[cfg(test)]
mod tests {
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
    fn a_read_that_a_signal_interrupts_does_not_end_the_input() {
        for kind in [io::ErrorKind::Interrupted, io::ErrorKind::WouldBlock] {
            assert_eq!(taken(Err(kind.into())), (0, true));
        }
        assert_eq!((taken(Ok(0)), taken(Ok(3))), ((0, false), (3, true)));
        assert_eq!(taken(Err(io::ErrorKind::ConnectionReset.into())), (0, false));
    }

    #[test]
    fn a_reader_who_takes_nothing_loses_output_and_gets_it_again_once_he_reads() {
        let (mut reader, writer) = io::pipe().unwrap();
        let capacity = rustix::pipe::fcntl_getpipe_size(&writer).unwrap();
        let mut stalled = false;
        put(writer.as_fd(), &vec![7; capacity + 1], &mut stalled); // hangs when it waits for a reader
        assert!(stalled);
        assert_ne!(reader.read(&mut vec![0; capacity]).unwrap(), 0);
        put(writer.as_fd(), b"x", &mut stalled);
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap();
        assert_eq!((stalled, &byte), (false, b"x"));
    }
}
