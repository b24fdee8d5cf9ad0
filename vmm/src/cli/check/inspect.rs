//! Resources of a machine, inspected without effects: nothing is opened for writing, locked, connected, made or changed.
//!
//! Each function ends with the error that a launch would end with, as far as that can be known without the launch.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::SocketAddr;
use std::path::Path;

use egm_report::show::size;
use egm_vfio::client::OpenError;
use rustix::fs::{Access, access};

use super::proc_tables::{FileId, ProcTables};
use crate::arch::boot::{self, ARCHIVE_HEAD, BootError};
use crate::arch::native;
use crate::config::{Console, Device, DeviceKind, Tap};
use crate::console::{self, ConsoleError};
use crate::error::Report;
use crate::machine::BuildError;
use crate::reserve::ServerError;
use crate::resources::{DeviceError, open_disk, open_file};
use crate::virtio::blk::{Disk, SECTOR};
use crate::virtio::net::tap;
use crate::virtio::vhost;
use crate::virtio::vsock::{self, SocketError};

/// A resource that a launch can use.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// Usable as intended; the text describes what was found.
    Ready(String),
    /// Usable, but perhaps not as intended.
    Remark { found: String, help: Option<String> },
}

use Finding::{Ready, Remark};

fn both_ways() -> Access {
    Access::READ_OK | Access::WRITE_OK
}

fn accessible(path: impl AsRef<Path>, wanted: Access) -> io::Result<()> {
    Ok(access(path.as_ref(), wanted)?)
}

/// The kernel: a regular file of a format that the host's processors run.
///
/// # Errors
/// Those of a launch.
pub(crate) fn kernel(path: &Path) -> Result<Finding, Box<dyn Report>> {
    let mut file = open_file("boot.kernel", path)?;
    let failed = |source| BuildError::Boot { file: path.to_owned(), source };
    let format = native::boot::kernel_format(&mut file).map_err(failed)?;
    let bytes = file.metadata().map_err(|source| failed(BootError::ReadKernel(source)))?.len();
    Ok(Ready(format!("{}: {format}, {}", path.display(), size(bytes))))
}

/// The initramfs: a regular file that is not empty.
///
/// # Errors
/// Those of a launch.
pub(crate) fn initramfs(path: &Path) -> Result<Finding, Box<dyn Report>> {
    let mut file = open_file("boot.initramfs", path)?;
    let failed = |source| BuildError::Boot { file: path.to_owned(), source };
    let bytes = boot::initramfs_size(&mut file).map_err(failed)?;
    let unread = |source| failed(BootError::ReadInitramfs { size: bytes, source });
    let mut head = Vec::new();
    Read::by_ref(&mut file).take(ARCHIVE_HEAD).read_to_end(&mut head).map_err(unread)?;
    let found = format!("{}: {}", path.display(), size(bytes));
    Ok(match boot::archive_format(&head) {
        Some(format) => Ready(format!("{found}, {format}")),
        None => Remark {
            found: format!("{found}, of no format that Linux unpacks"),
            help: Some("set \"boot\".\"initramfs\" to a cpio archive, compressed or not".to_owned()),
        },
    })
}

/// The destination of the serial console.
///
/// # Errors
/// Those of a launch.
pub(crate) fn console(console: &Console, tables: &ProcTables) -> Result<Finding, ConsoleError> {
    Ok(match console {
        Console::Null => Ready("discarded".to_owned()),
        Console::Stdio => Ready("standard input and output".to_owned()),
        Console::Pty => {
            accessible("/dev/ptmx", both_ways()).map_err(ConsoleError::Pty)?;
            Ready("a pseudo-terminal".to_owned())
        }
        Console::File { path } => console_file(path)?,
        Console::Socket { path } => {
            let failed = |source| ConsoleError::socket(path, source);
            SocketAddr::from_pathname(path).map_err(failed)?;
            match AtPath::of(path, tables).map_err(failed)? {
                AtPath::Listener => return Err(failed(io::ErrorKind::AddrInUse.into())),
                AtPath::OtherFile => return Err(failed(io::ErrorKind::AlreadyExists.into())),
                free => free.finding(path),
            }
        }
    })
}

fn console_file(path: &Path) -> Result<Finding, ConsoleError> {
    let failed = |source| ConsoleError::File { path: path.to_owned(), source };
    let kind = match fs::symlink_metadata(path) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            can_be_made(path).map_err(failed)?;
            return Ok(Ready(format!("{}, made at start", path.display())));
        }
        Err(error) => return Err(failed(error)),
    };
    if kind.is_symlink() {
        return Err(failed(io::Error::from_raw_os_error(libc::ELOOP)));
    }
    console::check_kind(path, kind)?;
    accessible(path, Access::WRITE_OK).map_err(failed)?;
    Ok(Ready(if kind.is_fifo() {
        format!("{}: a pipe, which needs its reader at start", path.display())
    } else {
        format!("{}, appended to", path.display())
    }))
}

/// The resource of a device; `None` for a device that needs none here: host functions and slices are judged elsewhere.
pub(crate) fn device(device: &Device, tables: &ProcTables) -> Option<Result<Finding, Box<dyn Report>>> {
    let found = match &device.kind {
        DeviceKind::VirtioBlk { path, read_only } => disk(path, *read_only, tables),
        DeviceKind::VirtioNet { tap, queue_pairs, vhost, .. } => net(tap, *queue_pairs, *vhost),
        DeviceKind::VirtioVsock { socket, .. } => vsock(socket.as_deref(), tables),
        DeviceKind::VfioUser { socket } => return Some(server(socket, tables).map_err(Into::into)),
        DeviceKind::VirtioRng | DeviceKind::Vfio { .. } | DeviceKind::Egm { .. } => return None,
    };
    Some(found.map_err(Into::into))
}

fn disk(path: &Path, read_only: bool, tables: &ProcTables) -> Result<Finding, DeviceError> {
    let failed = |source| DeviceError::DiskFile { path: path.to_owned(), source };
    let file: File = open_disk(path, false)?;
    if !read_only {
        accessible(path, Access::WRITE_OK).map_err(failed)?;
    }
    let found = file.metadata().map_err(failed)?;
    if tables.excludes(FileId::of(&found), read_only) {
        return Err(DeviceError::DiskInUse { path: path.to_owned() });
    }
    let unfit = |source| DeviceError::Disk { path: path.to_owned(), source };
    let disk = Disk::new(file, read_only).map_err(unfit)?;
    let bytes = disk.sectors().saturating_mul(SECTOR);
    let way = if read_only { ", read only" } else { "" };
    let text = format!("{}: {}{way}", path.display(), size(bytes));
    // A block device's metadata has no size; it has whole sectors.
    Ok(match found.len() % SECTOR {
        0 => Ready(text),
        rest => Remark {
            found: format!("{text}; the guest does not see the last {}", size(rest)),
            help: Some(format!("make its size a multiple of 512: truncate -s %512 {}", path.display())),
        },
    })
}

fn net(tap: &Tap, queue_pairs: u16, vhost: Option<bool>) -> Result<Finding, DeviceError> {
    match tap {
        Tap::Name(name) => tap::inspect(name, queue_pairs)?,
        Tap::Descriptors(_) => {
            let help = Some("start the machine with them: 3<>/dev/tapN in a shell".to_owned());
            return Ok(Remark { found: format!("tap {tap}: not looked at"), help });
        }
    }
    if vhost == Some(false) {
        return Ok(Ready(format!("tap {tap}, packets moved by this process")));
    }
    let Err(source) = accessible(vhost::NET, both_ways()) else {
        return Ok(Ready(format!("tap {tap}, packets moved by {}", vhost::NET)));
    };
    let error = DeviceError::VhostFile { path: vhost::NET, source };
    if vhost == Some(true) {
        return Err(error);
    }
    let found = format!("tap {tap}, packets moved by this process, since it cannot open {}", vhost::NET);
    Ok(Remark { found, help: error.help() })
}

fn vsock(socket: Option<&Path>, tables: &ProcTables) -> Result<Finding, DeviceError> {
    let Some(path) = socket else {
        let failed = |source| DeviceError::VhostFile { path: vhost::VSOCK, source };
        accessible(vhost::VSOCK, both_ways()).map_err(failed)?;
        return Ok(Ready(vhost::VSOCK.to_owned()));
    };
    vsock::check_length(path)?;
    let failed = |source| SocketError::Bind { path: path.to_owned(), source };
    match AtPath::of(path, tables).map_err(failed)? {
        AtPath::Listener => Err(SocketError::InUse { path: path.to_owned() }.into()),
        AtPath::OtherFile => Err(failed(io::ErrorKind::AlreadyExists.into()).into()),
        free => Ok(free.finding(path)),
    }
}

/// A server is not connected: some serve one client and end.
fn server(socket: &Path, tables: &ProcTables) -> Result<Finding, ServerError> {
    let failed = |source| {
        let path = socket.display().to_string();
        ServerError::Open(OpenError::Connect { path, source })
    };
    if !fs::metadata(socket).map_err(failed)?.file_type().is_socket() {
        return Err(ServerError::NotSocket { path: socket.to_owned() });
    }
    accessible(socket, Access::WRITE_OK).map_err(failed)?;
    Ok(if tables.listens(socket) {
        Ready(format!("{}: a process listens there", socket.display()))
    } else {
        Remark {
            found: format!("{}: no process was seen to listen there", socket.display()),
            help: Some("start the vfio-user server before the machine".to_owned()),
        }
    })
}

/// The file where a socket is to be made.
enum AtPath {
    Nothing,
    /// A socket that no process was seen to listen on.
    Socket,
    /// A socket that a process listens on.
    Listener,
    /// A file of another kind.
    OtherFile,
}

impl AtPath {
    /// The errors are those of making a file there.
    fn of(path: &Path, tables: &ProcTables) -> io::Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => Ok(Self::OtherFile),
            Ok(_) if tables.listens(path) => Ok(Self::Listener),
            Ok(_) => can_be_made(path).map(|()| Self::Socket),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                can_be_made(path).map(|()| Self::Nothing)
            }
            Err(error) => Err(error),
        }
    }

    fn finding(self, path: &Path) -> Finding {
        match self {
            Self::Nothing => Ready(format!("{}, made at start", path.display())),
            Self::Socket | Self::Listener | Self::OtherFile => Remark {
                found: format!("{} exists; a socket without a listener is replaced", path.display()),
                help: Some("end the process that listens there, if one does".to_owned()),
            },
        }
    }
}

/// Whether this user may make a file at `path`.
fn can_be_made(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    accessible(folder.unwrap_or_else(|| Path::new(".")), Access::WRITE_OK | Access::EXEC_OK)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;
    use crate::error::Blame;

    fn folder(files: &[(&str, &[u8])]) -> (tempfile::TempDir, impl Fn(&str) -> PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        for (name, content) in files {
            fs::write(path.join(name), content).unwrap();
        }
        (folder, move |name: &str| path.join(name))
    }

    #[test]
    fn an_initramfs_is_known_by_its_format_and_an_unknown_one_is_remarked() {
        let (_folder, at) =
            folder(&[("gzip", &[0x1f, 0x8b, 8, 0]), ("text", b"#!/bin/sh\n"), ("empty", b"")]);
        assert!(matches!(initramfs(&at("gzip")).unwrap(), Ready(found) if found.ends_with("4 B, gzip")));
        assert!(matches!(initramfs(&at("text")).unwrap(), Remark { help: Some(_), .. }));
        for wrong in ["empty", "none", "."] {
            assert_eq!(initramfs(&at(wrong)).unwrap_err().blame(), Blame::Configuration, "{wrong}");
        }
    }

    #[test]
    fn a_disk_is_inspected_as_a_launch_would_open_it() {
        let (_folder, at) = folder(&[("odd", &[0; 700]), ("small", b"1"), ("qcow2", b"QFI\xfb\0\0\0\x03")]);
        let tables = ProcTables::read();
        let found = disk(&at("odd"), false, &tables).unwrap();
        assert!(matches!(&found, Remark { found, .. } if found.ends_with("last 188 B")), "{found:?}");
        for (wrong, text) in [("none", "cannot open disk"), ("small", "cannot use"), ("qcow2", "cannot use")]
        {
            let error = disk(&at(wrong), true, &tables).unwrap_err();
            assert!(error.to_string().starts_with(text), "{error}");
            assert_eq!(error.blame(), Blame::Configuration);
        }
        assert_eq!(fs::read(at("odd")).unwrap(), [0; 700], "it stays as it was");
    }

    #[test]
    fn a_console_is_inspected_without_being_made() {
        let (_folder, at) = folder(&[("log", b"old")]);
        let tables = ProcTables::read();
        let file = |name: &str| console(&Console::File { path: at(name) }, &tables);
        assert!(matches!(file("log").unwrap(), Ready(found) if found.ends_with("appended to")));
        assert!(matches!(file("new").unwrap(), Ready(found) if found.ends_with("made at start")));
        assert!(!at("new").exists());
        assert!(matches!(file("none/new"), Err(ConsoleError::File { .. })));
        assert!(matches!(file("."), Err(ConsoleError::NotAFile { .. })));
        let socket = |name: &str| console(&Console::Socket { path: at(name) }, &tables);
        assert!(matches!(socket("new"), Ok(Ready(_))));
        let in_use = socket("log").unwrap_err();
        assert!(in_use.help().is_some_and(|help| help.contains("does not exist yet")), "{in_use}");
    }

    #[test]
    fn sockets_are_inspected_without_a_connection() {
        let (_folder, at) = folder(&[("file", b"")]);
        let listener = UnixListener::bind(at("server")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let tables = ProcTables::read();
        assert!(server(&at("server"), &tables).is_ok());
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(matches!(server(&at("file"), &tables), Err(ServerError::NotSocket { .. })));
        assert!(matches!(server(&at("none"), &tables), Err(ServerError::Open(OpenError::Connect { .. }))));
        assert!(matches!(vsock(Some(&at("new")), &tables), Ok(Ready(_))));
        assert!(matches!(
            vsock(Some(&at("file")), &tables),
            Err(DeviceError::Socket(SocketError::Bind { .. }))
        ));
        let long = vsock(Some(&at(&"x".repeat(100))), &tables);
        assert!(matches!(long, Err(DeviceError::Socket(SocketError::TooLong { .. }))));
    }
}
