//! Guests that start and go on by requests in cloud-hypervisor's form.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::launch::Launched;
use super::monitor::{Monitor, Payload};
use crate::engine::error::LabError;
use crate::engine::logs;
use crate::peers::cloud_api::{put, send};

/// A monitor that has no machine until it is requested.
#[derive(Debug)]
pub(super) struct Server {
    program: PathBuf,
    /// Its arguments but for the last, the path of the socket.
    words: &'static [&'static str],
}

impl Server {
    fn new(program: &Path, words: &'static [&'static str]) -> Self {
        Self { program: program.to_owned(), words }
    }

    /// Seconds from `vm.create` of `payload`, with `vm.boot` after it, until the guest's first byte `mark`.
    pub(super) fn seconds_from_create(
        &self,
        payload: &Payload,
        work: &Path,
        mark: &str,
        deadline: Duration,
    ) -> Result<f64, LabError> {
        let machine = machine(payload);
        let requests = |socket: &Path| {
            let begun = Instant::now();
            put(socket, "vm.create", Some(&machine))?;
            send(socket, "vm.boot", None).map(|_| begun)
        };
        Ok(self.start(work, mark, deadline, requests)?.elapsed.as_secs_f64())
    }

    /// Starts it, and waits for its guest's word `mark` once `requests` to its [`socket`] in `work` are sent; they return
    /// the time from which it is awaited.
    pub(super) fn start(
        &self,
        work: &Path,
        mark: &str,
        deadline: Duration,
        requests: impl FnOnce(&Path) -> io::Result<Instant>,
    ) -> Result<Launched, LabError> {
        let socket = socket(work);
        logs::remove(&socket)?;
        let mut command = Command::new(&self.program);
        command.args(self.words).arg(&socket);
        let requested = |started| {
            let requested = wait_for(&socket, started, deadline).and_then(|()| requests(&socket));
            requested.map_err(LabError::file("use", &socket))
        };
        Launched::requested(command, mark, deadline, &work.join("stderr.log"), requested)
    }
}

impl Monitor {
    /// The monitor without a machine, where it takes requests in cloud-hypervisor's form.
    pub(super) fn server(&self) -> Option<Server> {
        match self {
            Self::Egm(program) | Self::OtherEgm(program) => Some(Server::new(program, &["serve", "--api"])),
            Self::CloudHypervisor(program) => Some(Server::new(program, &["--api-socket"])),
            Self::Q35 | Self::Microvm | Self::Firecracker(_) => None,
        }
    }
}

/// The socket of a [`Server`] that works in `work`.
pub(super) fn socket(work: &Path) -> PathBuf {
    work.join("api.sock")
}

/// Waits until a program listens at `socket`.
fn wait_for(socket: &Path, since: Instant, deadline: Duration) -> io::Result<()> {
    loop {
        match UnixStream::connect(socket) {
            Err(_) if since.elapsed() < deadline => std::thread::yield_now(),
            connected => return connected.map(drop),
        }
    }
}

/// The machine of `payload`.
pub(super) fn machine(payload: &Payload) -> Value {
    json!({
        "cpus": { "boot_vcpus": 1, "max_vcpus": 1 },
        "memory": { "size": payload.mib << 20 },
        "payload": { "kernel": payload.kernel },
        "serial": { "mode": "Tty" },
        "console": { "mode": "Off" },
    })
}
