//! A function behind a vfio-user server: registers by message, BARs and shared memory by file, interrupts by eventfd.
//!
//! ```text
//!  vCPUs ─ Backend ─► function ─┐
//!  guest memory ─ Domain ──────► link ── one call at a time ── socket ── server
//!                 Error eventfd ◄─ watch: the server is gone ─┘
//! ```
//! A server that is gone, slow or wrong is lost for good: reads return all ones, and the eventfd of
//! [`InterruptKind::Error`](crate::backend::InterruptKind) fires, as for hardware that was pulled out. No call takes
//! longer than twice [`Settings::limit`].
//!
//! A server is trusted with the memory that it receives, and not to shorten the files that it shares (a vCPU that
//! touches missing bytes stops with an error; this process never touches them). Its files are memory or devices of
//! memory, checked outside this process (`egm_vfio_wire::receiver`); once the device is described, it sends no further
//! descriptor.

mod domain;
mod function;
mod lost;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use egm_vfio_wire::client::{CallError, Client};
pub use egm_vfio_wire::receiver::attend;
use egm_vfio_wire::socket::{BusyPoll, Connection};

pub use self::domain::UserDomain;
pub use self::function::UserFunction;
use self::lost::Lost;
use crate::backend::BackendError;

/// Timeouts of calls to a server.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Longest time that an answer may take.
    pub limit: Duration,
    /// How long to poll for an answer before sleeping until it comes.
    pub busy_poll: BusyPoll,
}

impl Default for Settings {
    /// 5 s, as QEMU; polls for 50 µs.
    fn default() -> Self {
        Self { limit: Duration::from_secs(5), busy_poll: BusyPoll::of(Duration::from_micros(50)) }
    }
}

/// Why a server cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum OpenError {
    /// No server accepts the connection.
    #[error("cannot connect to the vfio-user server {path}")]
    Connect {
        path: String,
        #[source]
        source: io::Error,
    },
    /// It fails the protocol while it describes its device.
    #[error("the vfio-user server {path} does not describe its device")]
    Talk {
        path: String,
        /// Error of the failed call.
        #[source]
        source: CallError,
    },
    /// A region ends beyond the file that it is mapped from.
    #[error("region {region} of the vfio-user server {path} ends at {end:#x} of a file of {size:#x} bytes")]
    ShortFile {
        path: String,
        /// Number of the region.
        region: u32,
        /// Where it ends in the file.
        end: u64,
        /// Bytes of the file.
        size: u64,
    },
}

/// Connects to the server at `path`; returns its function and the address space through which it reaches memory.
///
/// # Errors
/// [`OpenError`].
pub fn open(path: &Path, settings: Settings) -> Result<(UserFunction, UserDomain), OpenError> {
    let name = path.display().to_string();
    let connection = Connection::connect(path, settings.limit, settings.busy_poll)
        .map_err(|source| OpenError::Connect { path: name.clone(), source })?;
    over(name, connection)
}

/// As [`open`], over a socket that is connected already. `name` is for messages.
///
/// # Errors
/// [`OpenError`].
pub fn over(name: String, connection: Connection) -> Result<(UserFunction, UserDomain), OpenError> {
    let talk = |source| OpenError::Talk { path: name.clone(), source };
    let mut client = Client::new(connection).map_err(talk)?;
    let parts = function::describe(&name, &mut client)?;
    client.refuse_fds();
    let watched = client.as_fd().try_clone_to_owned();
    let limits = client.limits();
    let lost =
        watched.and_then(Lost::watch).map_err(|source| OpenError::Connect { path: name.clone(), source })?;
    let link = Arc::new(Link { name, lost, client: Mutex::new(client) });
    Ok((UserFunction::new(Arc::clone(&link), parts), UserDomain::new(link, limits)))
}

/// The connection that a function and its address space share.
struct Link {
    name: String,
    /// Dropped first: the client's drop shuts the connection down, which is not a lost server.
    lost: Lost,
    client: Mutex<Client>,
}

impl Link {
    /// Makes one call; if the server is lost by it, signals that.
    fn call<T>(&self, call: impl FnOnce(&mut Client) -> Result<T, CallError>) -> Result<T, CallError> {
        // After a panic the client is between two messages at worst, and detects that by itself.
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        call(&mut client).inspect_err(|error| {
            if !error.stands() {
                self.lost.announce();
            }
        })
    }

    /// Makes one call; its error becomes a [`BackendError`] that names `what` was tried.
    fn ask<T>(
        &self,
        what: impl fmt::Display,
        call: impl FnOnce(&mut Client) -> Result<T, CallError>,
    ) -> Result<T, BackendError> {
        self.call(call).map_err(|error| {
            let function = self.name.clone();
            match error {
                CallError::Refused { source, .. } => {
                    BackendError::Refused { function, what: what.to_string(), source }
                }
                CallError::Unsendable { source, .. } => BackendError::Refused {
                    function,
                    what: what.to_string(),
                    source: io::Error::other(source),
                },
                lost => BackendError::Gone { function, why: lost.in_one_line() },
            }
        })
    }

    /// Duplicates `fd`: the copy stays open when the caller's is closed.
    fn keep(&self, fd: impl AsFd) -> Result<OwnedFd, BackendError> {
        let refused = |source| {
            let what = "keep an eventfd".to_owned();
            BackendError::Refused { function: self.name.clone(), what, source }
        };
        fd.as_fd().try_clone_to_owned().map_err(refused)
    }
}
