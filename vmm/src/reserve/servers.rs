//! vfio-user servers, connected.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use egm_vfio::backend::{Backend, BackendError};
use egm_vfio::client::{self, OpenError, Settings, UserDomain, UserFunction};
use egm_vfio::dma::Domain;

use crate::error::{Blame, Report};
use crate::facts::Server;

/// Why a server's device cannot be a guest's.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The path names no socket.
    #[error("{} is not a socket", path.display())]
    NotSocket {
        /// The path.
        path: PathBuf,
    },
    /// No server there, or one that breaks the protocol.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It no longer answers.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl Report for ServerError {
    fn blame(&self) -> Blame {
        match self {
            Self::NotSocket { .. } => Blame::Configuration,
            Self::Open(_) | Self::Backend(_) => Blame::Host,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            Self::NotSocket { .. } => {
                "set \"socket\" to the Unix socket that the server listens on".to_owned()
            }
            Self::Open(OpenError::Connect { path, source }) => match source.kind() {
                io::ErrorKind::PermissionDenied => {
                    format!("let this user write to it (ls -l {path}), or be root")
                }
                io::ErrorKind::WouldBlock => {
                    "the server takes no more clients: end the one that it has".to_owned()
                }
                _ => "start the server first, and set \"socket\" to where it listens".to_owned(),
            },
            Self::Open(_) | Self::Backend(_) => "read the server's log, and start it again".to_owned(),
        })
    }
}

struct Connected {
    function: Arc<UserFunction>,
    domain: Arc<UserDomain>,
    described: Server,
}

/// The vfio-user servers of a machine, by socket. They are connected before there is a plan, because only they report
/// how large their BARs are, and once, because some serve one client and end.
#[derive(Default)]
pub struct Servers(BTreeMap<PathBuf, Connected>);

impl Servers {
    /// Connects the server at `socket`.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn connect(&mut self, socket: &Path) -> Result<(), ServerError> {
        let opened = client::open(socket, Settings::default());
        let (function, domain) = opened.map_err(|error| match std::fs::metadata(socket) {
            Ok(found) if !found.file_type().is_socket() => ServerError::NotSocket { path: socket.to_owned() },
            _ => error.into(),
        })?;
        let described = Server {
            socket: socket.to_owned(),
            bars: function.bars()?,
            msix_vectors: function.msix_vectors(),
        };
        let connected = Connected { function: Arc::new(function), domain: Arc::new(domain), described };
        self.0.insert(socket.to_owned(), connected);
        Ok(())
    }

    /// Facts of the servers, for the plan.
    pub fn facts(&self) -> Vec<Server> {
        self.0.values().map(|server| server.described.clone()).collect()
    }

    /// The device of the server at `socket`, if it is one of these.
    pub(crate) fn function(&self, socket: &Path) -> Option<Arc<dyn Backend>> {
        self.0.get(socket).map(|server| Arc::clone(&server.function) as _)
    }

    /// Socket and I/O address space of each.
    pub(crate) fn domains(&self) -> impl Iterator<Item = (&Path, Arc<dyn Domain>)> {
        self.0.iter().map(|(socket, server)| (socket.as_path(), Arc::clone(&server.domain) as _))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
