//! A function behind a vfio-user server: registers by message, BARs by its memory files, interrupts by eventfd, memory
//! lent to it by file.
//!
//! ```text
//!  vCPUs ─ Backend ─► function ─┐
//!  guest memory ─ Domain ──────► link ── one call at a time ── socket ── server
//!                 Error eventfd ◄─ watch: the server is gone ─┘
//! ```
//! A server that is gone, slow or wrong is lost for good: reads give ones, and the eventfd of
//! [`InterruptKind::Error`](crate::backend::InterruptKind) fires, as for hardware that was pulled out. No call takes longer
//! than twice [`Settings::limit`].
//!
//! A server is trusted with the memory that it is lent, and not to shorten the files that it lends (a vCPU that touches
//! what is missing stops with an error; this process never touches it). Its files are memory or devices of memory, checked
//! outside this process (`egm_vfio_wire::receiver`); once the device is described, it sends no further descriptor.

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
use egm_vfio_wire::socket::{Connection, Patience};

pub use self::domain::UserDomain;
pub use self::function::UserFunction;
use self::lost::Lost;
use crate::backend::BackendError;

/// How to treat a server.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// How long an answer may take.
    pub limit: Duration,
    /// How long to look for an answer before going to sleep for it.
    pub patience: Patience,
}

impl Default for Settings {
    /// 5 s, as QEMU; looks for 50 µs.
    fn default() -> Self {
        Self { limit: Duration::from_secs(5), patience: Patience::of(Duration::from_micros(50)) }
    }
}

/// Why a server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is none.
    #[error("cannot connect to the vfio-user server {path}: start it before the VM")]
    Connect {
        /// Its socket.
        path: String,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// It does not behave.
    #[error("the vfio-user server {path} does not describe its device")]
    Talk {
        /// Its socket.
        path: String,
        /// What went wrong.
        #[source]
        source: CallError,
    },
    /// A region ends beyond the file that it is mapped from.
    #[error("region {region} of the vfio-user server {path} ends at {end:#x} of a file of {size:#x} bytes")]
    ShortFile {
        /// Its socket.
        path: String,
        /// Number of the region.
        region: u32,
        /// Where it ends in the file.
        end: u64,
        /// Bytes of the file.
        size: u64,
    },
}

/// The server's function and the address space that it reaches memory by.
///
/// # Errors
/// [`OpenError`].
pub fn open(path: &Path, settings: Settings) -> Result<(UserFunction, UserDomain), OpenError> {
    let name = path.display().to_string();
    let connection = Connection::connect(path, settings.limit, settings.patience)
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
    /// One call; a server that is lost by it is announced.
    fn call<T>(&self, call: impl FnOnce(&mut Client) -> Result<T, CallError>) -> Result<T, CallError> {
        // A call that panicked left the client between two messages at worst: it finds out by itself.
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        call(&mut client).inspect_err(|error| {
            if !error.stands() {
                self.lost.announce();
            }
        })
    }

    /// As a [`BackendError`]; `what` was tried.
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
                lost => BackendError::Gone { function, why: chain(&lost) },
            }
        })
    }

    /// A copy of `fd` that stays when the caller's is closed.
    fn keep(&self, fd: impl AsFd) -> Result<OwnedFd, BackendError> {
        let refused = |source| {
            let what = "keep an eventfd".to_owned();
            BackendError::Refused { function: self.name.clone(), what, source }
        };
        fd.as_fd().try_clone_to_owned().map_err(refused)
    }
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |all, cause| format!("{all}: {cause}"))
}
