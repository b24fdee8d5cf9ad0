//! Standard output, which may be a full disk.

use std::io::{self, ErrorKind, Write};
use std::sync::{Mutex, PoisonError};

use egm_address::Printable;

use crate::{Blame, Remedy, Report};

/// The first failure. Commands print in many places, and their remaining work is the same without it.
static FAILURE: Mutex<Option<io::Error>> = Mutex::new(None);

/// Some output of a command was lost.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output")]
pub struct Unwritten(#[from] io::Error);

impl Report for Unwritten {
    fn remedy(&self) -> Remedy {
        Blame::Host.help("what it went to is incomplete: make room there and run the command again")
    }
}

/// Writes to standard output. Code that ends the process checks [`written`] for lost output.
pub fn print(bytes: impl AsRef<[u8]>) {
    let mut out = io::stdout();
    if let Err(error) = out.write_all(bytes.as_ref()).and_then(|()| out.flush()) {
        // A reader that has seen enough (`| head`) closes the pipe: that is no failure of ours.
        if error.kind() != ErrorKind::BrokenPipe {
            FAILURE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }
}

/// `text` with its lines, each printable.
#[must_use]
pub fn printable_lines(text: &str) -> String {
    text.split('\n').map(|line| Printable(line).to_string()).collect::<Vec<_>>().join("\n")
}

/// Whether all that was [printed](print()) arrived.
///
/// # Errors
/// The first failure, once.
pub fn written() -> Result<(), Unwritten> {
    let failure = FAILURE.lock().unwrap_or_else(PoisonError::into_inner).take();
    failure.map_or(Ok(()), |error| Err(error.into()))
}
