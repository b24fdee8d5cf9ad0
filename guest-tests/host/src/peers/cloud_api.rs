//! Requests to cloud-hypervisor's API: HTTP 1.1 over a Unix socket (its `vmm/src/api/openapi/cloud-hypervisor.yaml`).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// Timeout: an emulated monitor is slow to reset.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum size of a reply's head in bytes; the expected ones are short.
const MAX_HEAD: u64 = 64 << 10;

/// Requests `action`, for instance `vm.reboot`, with `body`; a refusal is an error.
pub(crate) fn put(socket: &Path, action: &str, body: Option<&Value>) -> io::Result<()> {
    send(socket, action, body)?.accepted()
}

/// Requests `action` with `body`, and does not wait for the reply.
pub(crate) fn send<'a>(socket: &Path, action: &'a str, body: Option<&Value>) -> io::Result<Sent<'a>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(request(action, body).as_bytes())?;
    Ok(Sent { stream, action })
}

/// A request without a reply so far.
#[derive(Debug)]
pub(crate) struct Sent<'a> {
    stream: UnixStream,
    action: &'a str,
}

impl Sent<'_> {
    /// Waits for the reply; a refusal is an error.
    pub(crate) fn accepted(self) -> io::Result<()> {
        accepted(&mut BufReader::new(self.stream.take(MAX_HEAD)), self.action)
    }
}

fn request(action: &str, body: Option<&Value>) -> String {
    let body = body.map(Value::to_string).unwrap_or_default();
    let length = body.len();
    format!(
        "PUT /api/v1/{action} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

/// Reads a reply: 2xx accepts the request; the body of another reply is the reason of the refusal.
fn accepted(reply: &mut impl BufRead, action: &str) -> io::Result<()> {
    let mut status = String::new();
    reply.read_line(&mut status)?;
    if status.split(' ').nth(1).is_some_and(|code| code.len() == 3 && code.starts_with('2')) {
        return Ok(());
    }
    let mut length = 0;
    let mut line = String::new();
    while reply.read_line(&mut line)? > 2 {
        let value = line.split_once(':').filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        length = value.and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(length);
        line.clear();
    }
    let mut why = String::new();
    reply.take(length).read_to_string(&mut why)?;
    Err(io::Error::other(format!("the monitor refuses {action}: {} {why}", status.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_its_body_and_the_length_of_it() {
        let body = serde_json::json!({ "id": "x" });
        let text = request("vm.remove-device", Some(&body));
        assert!(text.starts_with("PUT /api/v1/vm.remove-device HTTP/1.1\r\n"), "{text}");
        assert!(text.ends_with("Content-Length: 10\r\n\r\n{\"id\":\"x\"}"), "{text}");
        assert!(request("vm.reboot", None).ends_with("Content-Length: 0\r\n\r\n"));
    }

    #[test]
    fn only_success_is_accepted_and_a_refusal_has_its_reason() {
        let accepted = |mut reply: &[u8]| accepted(&mut reply, "vm.reboot");
        assert!(accepted(b"HTTP/1.1 204 \r\nServer: x\r\n\r\n").is_ok());
        assert!(accepted(b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n{}").is_ok());
        let refused = accepted(b"HTTP/1.1 500 \r\ncontent-length: 7\r\n\r\nno VM!!rest").unwrap_err();
        assert!(refused.to_string().ends_with("HTTP/1.1 500 no VM!!"), "{refused}");
        assert!(accepted(b"").is_err());
    }
}
