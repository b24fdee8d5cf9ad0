//! Execution of this program in its own place: the process keeps its number and some descriptors, and nothing else.
//!
//! The descriptors pass the execution in a message of a socket, which is standard input meanwhile. So the next execution
//! owns each of them without a number, and needs no system call that container runtimes refuse (`pidfd_getfd`).

mod holder;

use std::ffi::{CStr, OsString};
use std::fs::File;
use std::io::{self, IoSlice, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};
use rustix::stdio::dup2_stdin;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) use self::holder::Holder;
use crate::passed::{self, Received};

/// Longest state in bytes: a configuration, which is a body of the API, or a machine with some kilobytes a vCPU.
const MAX_STATE: u64 = 64 << 20;
/// Most descriptors of a caller.
pub(crate) const MAX_PASSED: usize = 250;
/// Most descriptors in the message: standard input, and those of the caller.
const PASSED: usize = MAX_PASSED + 1;

/// Seals of a state: no holder of the descriptor changes it.
fn seals() -> SealFlags {
    SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE
}

/// `value` as a file in memory that cannot be changed.
///
/// # Errors
/// Those of memfd_create(2), and of a value without a JSON form.
pub(crate) fn sealed(value: &impl Serialize) -> io::Result<File> {
    let text = serde_json::to_vec(value)?;
    if u64::try_from(text.len()).map_or(true, |length| length > MAX_STATE) {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create(c"egm-vmm-state", flags)?);
    file.write_all(&text)?;
    if !egm_address::fault!("state-without-seals") {
        fcntl_add_seals(&file, seals())?;
    }
    Ok(file)
}

/// The value of a file that [`sealed`] made.
///
/// # Errors
/// A file that can be changed, or that has no such value.
pub(crate) fn unsealed<T: DeserializeOwned>(mut file: File) -> io::Result<T> {
    if !fcntl_get_seals(&file)?.contains(seals()) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    file.rewind()?;
    let mut text = Vec::new();
    file.take(MAX_STATE).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Names this process `name` again, as `ps` and `killall` show it in 15 bytes: the kernel names an execution of
/// `/proc/self/exe` "exe".
pub(crate) fn restore_name(name: &CStr) {
    let _ = rustix::thread::set_name(name);
}

/// The descriptors that the execution before this one passed. Restores that one's standard input.
///
/// # Errors
/// Standard input has no such message.
pub(crate) fn inherited() -> io::Result<Vec<OwnedFd>> {
    let mut passed = received(io::stdin().as_fd())?;
    dup2_stdin(passed.remove(0))?;
    Ok(passed)
}

/// This program, which its file may no longer be.
pub(crate) fn own() -> PathBuf {
    "/proc/self/exe".into()
}

/// Executes `program` with the command line of this one and `option`; [`inherited`] returns `descriptors` there, [`MAX_PASSED`] at
/// most. Returns only when that fails.
pub(crate) fn execute(program: &Path, option: &str, descriptors: &[BorrowedFd<'_>]) -> io::Error {
    let _ = io::stdout().flush();
    let parts = || {
        Ok::<_, io::Error>((
            command(program, option, descriptors)?,
            io::stdin().as_fd().try_clone_to_owned()?,
        ))
    };
    let (mut command, stdin) = match parts() {
        Ok(parts) => parts,
        Err(error) => return error,
    };
    let error = command.exec();
    // std has changed these for the program: a machine goes on with them.
    let _ = dup2_stdin(stdin);
    let _ = signal_hook::flag::register(libc::SIGPIPE, Arc::default());
    error
}

/// The same as a command.
///
/// # Errors
/// More than [`MAX_PASSED`] descriptors, or none left for the message.
pub(crate) fn command(program: &Path, option: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<Command> {
    let socket = sent(&[&[io::stdin().as_fd()], descriptors].concat())?;
    let mut words = std::env::args_os();
    let mut command = Command::new(program);
    if let Some(program) = words.next() {
        command.arg0(program);
    }
    command.args(without(words, option)).arg(option).stdin(Stdio::from(socket));
    Ok(command)
}

/// A socket that has a message with `descriptors`.
fn sent(descriptors: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PASSED))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(ours, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(theirs)
}

/// The descriptors of the message that waits in `socket`: one at least.
fn received(socket: BorrowedFd<'_>) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PASSED))];
    let Received { descriptors, is_whole, .. } =
        passed::receive(socket, &mut [0], &mut space, RecvFlags::DONTWAIT)?;
    if !is_whole {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    if descriptors.is_empty() { Err(io::ErrorKind::InvalidData.into()) } else { Ok(descriptors) }
}

/// The words but for `option`, which the execution before this one added.
fn without(words: impl Iterator<Item = OsString>, option: &str) -> impl Iterator<Item = OsString> {
    words.filter(move |word| word != option)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_cannot_be_changed_and_one_that_can_is_refused() {
        let mut file = sealed(&["a", "b"]).unwrap();
        assert!(file.write_all(b"x").is_err() && file.set_len(1).is_err());
        assert_eq!(unsealed::<Vec<String>>(file).unwrap(), ["a", "b"]);
        let open = memfd_create(c"open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert_eq!(unsealed::<Vec<String>>(open.into()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(unsealed::<u64>(sealed(&"text").unwrap()).is_err());
        assert!(sealed(&"x".repeat(64 << 20)).is_err(), "longer than what is read");
    }

    #[test]
    fn descriptors_pass_in_a_message_and_nothing_else_is_taken_for_one() {
        let (mut file, other) = (tempfile::tempfile().unwrap(), File::open("/dev/null").unwrap());
        file.write_all(b"first").unwrap();
        for count in [2, 3, PASSED] {
            let mut descriptors = vec![other.as_fd(); count];
            descriptors[1] = file.as_fd();
            let socket = sent(&descriptors).unwrap();
            let mut passed = received(socket.as_fd()).unwrap();
            assert_eq!(passed.len(), count);
            let mut text = String::new();
            let mut first = File::from(passed.remove(1));
            first.rewind().unwrap();
            first.read_to_string(&mut text).unwrap();
            assert_eq!(text, "first");
            assert!(received(socket.as_fd()).is_err(), "the message is gone, and its sender too");
        }
        assert!(received(other.as_fd()).is_err());
        assert!(sent(&vec![other.as_fd(); 2 * PASSED]).is_err());
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::write(&ours, b"x").unwrap();
        assert_eq!(received(theirs.as_fd()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn the_command_line_has_the_option_once() {
        let words = ["serve", "--api", "s", "--resume"].map(OsString::from);
        assert_eq!(without(words.into_iter(), "--resume").collect::<Vec<_>>(), ["serve", "--api", "s"]);
    }
}
