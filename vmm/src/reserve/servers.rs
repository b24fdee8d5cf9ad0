//! vfio-user servers, connected.

use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use egm_vfio::backend::Backend;
use egm_vfio::client::{self, Settings, UserDomain, UserFunction};
use egm_vfio::dma::Domain;

use super::error::{ReserveError, ServerError};
use crate::config::{Device, DeviceKind};
use crate::facts::Server;

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
    /// The connected servers of `devices`.
    ///
    /// # Errors
    /// [`ReserveError::Device`] with the first that cannot be used.
    pub fn of(devices: &[Device]) -> Result<Self, ReserveError> {
        let mut servers = Self::default();
        for device in devices {
            let DeviceKind::VfioUser { socket } = &device.kind else { continue };
            let connected = servers.connect(socket);
            connected.map_err(|source| ReserveError::Device { id: device.id.clone(), source })?;
        }
        Ok(servers)
    }

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
