//! Execution of this program in its own place: the process keeps its number and some descriptors, and nothing else.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::custody::fetch;

/// Longest state in bytes; a configuration, which is the most of it, is a body of the API.
const MAX_STATE: u64 = 1 << 20;
/// Standard input, output and error, which no execution changes.
const STANDARD: RawFd = 2;

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

/// Descriptor `number`, which the execution before this one left open. It is closed in a further one.
///
/// # Errors
/// There is none, or it is standard input, output or error.
pub(crate) fn adopt(number: RawFd) -> io::Result<OwnedFd> {
    if number <= STANDARD {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let adopted = fetch(std::process::id(), number)?;
    nix::unistd::close(number)?;
    Ok(adopted)
}

/// Executes this program with its own command line and `option`, which gets the numbers of `first` and `second`: these
/// stay open. Returns only when that fails; then they stay open as well.
pub(crate) fn execute(option: &str, first: &impl AsFd, second: &impl AsFd) -> io::Error {
    let (first, second) = (first.as_fd(), second.as_fd());
    for kept in [first, second] {
        if let Err(errno) = fcntl_setfd(kept, FdFlags::empty()) {
            return errno.into();
        }
    }
    let _ = io::stdout().flush();
    let mut words = std::env::args_os();
    let mut command = Command::new("/proc/self/exe");
    if let Some(program) = words.next() {
        command.arg0(program);
    }
    let option = format!("--{option}=");
    command.args(without(words, &option));
    command.arg(format!("{option}{},{}", first.as_raw_fd(), second.as_raw_fd())).exec()
}

/// The words that do not start with `option`, which the execution before this one added.
fn without(words: impl Iterator<Item = OsString>, option: &str) -> Vec<OsString> {
    words.filter(|word| !word.as_encoded_bytes().starts_with(option.as_bytes())).collect()
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
    }

    #[test]
    fn no_standard_descriptor_is_adopted() {
        for number in [-1, 0, 1, 2] {
            assert_eq!(adopt(number).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{number}");
        }
    }

    #[test]
    fn the_command_line_grows_by_one_option_only() {
        let words = ["serve", "--api", "s", "--resume=3,4"].map(OsString::from);
        assert_eq!(without(words.into_iter(), "--resume="), ["serve", "--api", "s"]);
    }
}
