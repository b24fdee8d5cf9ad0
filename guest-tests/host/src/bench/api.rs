//! A guest that starts by requests to `egm-vmm serve`.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use super::launch::Launched;
use super::monitor::Payload;
use crate::engine::error::LabError;

/// Seconds from `vm.create` of `payload`, with `vm.boot` after it, until the guest's first byte `mark`; `program` serves and
/// has no machine until then.
pub(super) fn seconds_from_create(
    program: &Path,
    payload: &Payload,
    work: &Path,
    mark: &str,
    deadline: Duration,
) -> Result<f64, LabError> {
    let socket = work.join("serve.sock");
    let mut command = Command::new(program);
    command.args(["serve", "--api"]).arg(&socket);
    let requests = |started| start_guest(&mut connect(&socket, started, deadline)?, payload, deadline);
    let requested = |started| requests(started).map_err(LabError::file("use", &socket));
    let launched = Launched::requested(command, mark, deadline, &work.join("stderr.log"), requested)?;
    Ok(launched.elapsed.as_secs_f64())
}

/// Waits until a program listens at `socket`.
fn connect(socket: &Path, since: Instant, deadline: Duration) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(socket) {
            Err(_) if since.elapsed() < deadline => std::thread::yield_now(),
            connected => return connected,
        }
    }
}

/// Returns the time of the first request.
fn start_guest(client: &mut UnixStream, payload: &Payload, deadline: Duration) -> io::Result<Instant> {
    let machine = json!({
        "cpus": { "boot_vcpus": 1, "max_vcpus": 1 },
        "memory": { "size": payload.mib << 20 },
        "payload": { "kernel": payload.kernel },
        "serial": { "mode": "Tty" },
        "console": { "mode": "Off" },
    });
    let body = machine.to_string();
    let create = format!("PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    client.set_read_timeout(Some(deadline))?;
    let begun = Instant::now();
    client.write_all(create.as_bytes())?;
    let mut answer = [0; 512];
    let length = client.read(&mut answer)?;
    let answer = String::from_utf8_lossy(answer.get(..length).unwrap_or_default());
    if !answer.starts_with("HTTP/1.1 204 ") {
        return Err(io::Error::other(format!("vm.create: {answer}")));
    }
    client.write_all(b"PUT /api/v1/vm.boot HTTP/1.1\r\n\r\n")?;
    Ok(begun)
}
