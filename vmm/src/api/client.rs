//! A client of the API: one request at a time on a Unix socket.

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use egm_address::Printable;
use rustix::fs::{Mode, OFlags};

use crate::error::{Blame, Remedy, Report};
use crate::listener::connect;

/// Timeout of each write of a request, and of the whole answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest head of an answer, in bytes; a body and an event have their own limits.
const MAX_HEAD: u64 = 8 << 10;
const MAX_BODY: u64 = 64 << 20;
const MAX_EVENT: u64 = 64 << 10;

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// No API listens there.
    #[error("cannot reach the API at {}", path.display())]
    Unreachable { path: PathBuf, source: io::Error },
    /// The connection broke or timed out, or the answer is not HTTP/1.1.
    #[error("cannot read the answer of {}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// The API refused the request.
    #[error("cannot {request}: {}", Printable(reason))]
    Refused { request: String, status: u16, reason: String, remedy: Option<String> },
}

impl Report for ClientError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Unreachable { .. } => Blame::Host.help("list the machines of this user: egm-vmm list"),
            Self::Unreadable { .. } => Blame::Host.help("check that a machine with --api listens there"),
            Self::Refused { status, remedy, .. } => Remedy {
                // The request itself is wrong, or the machine refuses it.
                blame: if matches!(status, 400 | 404 | 405) { Blame::Configuration } else { Blame::Host },
                help: remedy.as_ref().map(|remedy| Printable(remedy).to_string()),
            },
        }
    }
}

/// An API, by its socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client<'p> {
    path: &'p Path,
    timeout: Duration,
    /// Longest body of an answer, in bytes.
    limit: u64,
}

/// Status and length of an answer, and the rest of its stream.
struct AnswerHead {
    status: u16,
    length: Option<u64>,
    rest: BufReader<Timed>,
}

/// A stream with a deadline for reads; without one, reads never time out.
struct Timed {
    stream: UnixStream,
    end: Option<Instant>,
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(left)?;
        self.stream.read(buffer)
    }
}

impl<'p> Client<'p> {
    pub(crate) const fn new(path: &'p Path) -> Self {
        Self { path, timeout: TIMEOUT, limit: MAX_BODY }
    }

    /// Path of the socket.
    pub(crate) const fn path(&self) -> &'p Path {
        self.path
    }

    /// With another timeout for each request and answer.
    pub(crate) const fn within(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// With another longest body, in bytes.
    pub(crate) const fn limited(self, limit: u64) -> Self {
        Self { limit, ..self }
    }

    /// Sends a request without a body, and returns the body of the answer; empty where it has none.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn ask(&self, method: &str, target: &str) -> Result<String, ClientError> {
        self.ask_with(method, target, &[])
    }

    /// The same with `body`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn ask_with(&self, method: &str, target: &str, body: &[u8]) -> Result<String, ClientError> {
        let AnswerHead { status, length, rest } = self.send(method, target, body)?;
        let body = self.body(length, rest).map_err(|source| self.unreadable(source))?;
        match status {
            200..300 => Ok(body),
            _ => Err(refused(format!("{method} {target}"), status, &body)),
        }
    }

    /// The body of an answer: `length` bytes, or all until the connection ends.
    fn body(&self, length: Option<u64>, rest: BufReader<Timed>) -> io::Result<String> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        if length.is_some_and(|length| length > self.limit) {
            return Err(invalid("it is too long"));
        }
        let mut body = Vec::new();
        let read =
            rest.take(length.unwrap_or_else(|| self.limit.saturating_add(1))).read_to_end(&mut body)?;
        let read = u64::try_from(read).unwrap_or(u64::MAX);
        if read > self.limit {
            return Err(invalid("it is too long"));
        }
        if length.is_some_and(|length| length != read) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        String::from_utf8(body).map_err(|_| invalid("it is not UTF-8"))
    }

    /// Opens the stream of events, the kept ones first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn follow(&self) -> Result<Events, ClientError> {
        let (method, target) = ("GET", "/egm/v1/events");
        let AnswerHead { status, rest, .. } = self.send(method, target, &[])?;
        if status == 200 {
            return Ok(Events { stream: rest });
        }
        let mut body = String::new();
        let _ = rest.take(MAX_HEAD).read_to_string(&mut body); // the status suffices
        Err(refused(format!("{method} {target}"), status, &body))
    }

    fn send(&self, method: &str, target: &str, body: &[u8]) -> Result<AnswerHead, ClientError> {
        let unreachable = |source| ClientError::Unreachable { path: self.path.to_owned(), source };
        let stream = self.connect().map_err(unreachable)?; // fails where a server has too many clients to accept
        stream.set_nonblocking(false).map_err(unreachable)?;
        stream.set_write_timeout(Some(self.timeout)).map_err(unreachable)?;
        let length =
            if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let request =
            format!("{method} {target} HTTP/1.1\r\nHost: egm-vmm\r\n{length}Connection: close\r\n\r\n");
        // A server that refuses this client answers and closes before it reads.
        let written = (&stream).write_all(&[request.as_bytes(), body].concat());
        let stream = Timed { stream, end: Instant::now().checked_add(self.timeout) };
        head(stream).map_err(|source| self.unreadable(written.err().unwrap_or(source)))
    }

    /// Connects to the socket at the path, not through a link there: another user may own the folder.
    fn connect(&self) -> io::Result<UnixStream> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = rustix::fs::open(self.path, flags, Mode::empty())?;
        connect(Path::new(&format!("/proc/self/fd/{}", socket.as_raw_fd())))
    }

    fn unreadable(&self, source: io::Error) -> ClientError {
        ClientError::Unreadable { path: self.path.to_owned(), source }
    }
}

/// Reads the head of an answer.
fn head(stream: Timed) -> io::Result<AnswerHead> {
    let mut rest = BufReader::new(stream);
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let left = MAX_HEAD.saturating_sub(u64::try_from(head.len()).unwrap_or(u64::MAX));
        if (&mut rest).take(left).read_until(b'\n', &mut head)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let mut fields = [httparse::EMPTY_HEADER; 32];
    let mut answer = httparse::Response::new(&mut fields);
    let Ok(httparse::Status::Complete(_)) = answer.parse(&head) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no answer of HTTP/1.1"));
    };
    let length = answer.headers.iter().find(|field| field.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|field| str::from_utf8(field.value).ok()?.parse().ok());
    let status = answer.code.unwrap_or(0);
    let length = if status == 204 { Some(0) } else { length };
    Ok(AnswerHead { status, length, rest })
}

/// The refusal of `request` with the texts of `body`: what failed, and the remedy.
fn refused(request: String, status: u16, body: &str) -> ClientError {
    let mut texts: Vec<String> = serde_json::from_str(body).unwrap_or_default();
    let remedy = if texts.len() > 1 { texts.pop() } else { None };
    let mut reason = texts.join(": ");
    if reason.is_empty() {
        let _ = write!(reason, "status {status}"); // a String never fails
    }
    ClientError::Refused { request, status, reason, remedy }
}

/// Events of a machine, as they come.
pub(crate) struct Events {
    stream: BufReader<Timed>,
}

impl Events {
    /// The next event, as JSON without a line end; `None` at the end of the machine's program, or at `until`.
    ///
    /// # Errors
    /// Those of the socket; `InvalidData` for a line of 64 KiB or more.
    pub(crate) fn next(&mut self, until: Option<Instant>) -> io::Result<Option<String>> {
        self.stream.get_mut().end = until;
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let most = MAX_EVENT.saturating_sub(u64::try_from(line.len()).unwrap_or(u64::MAX));
            if most == 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "an event is too long"));
            }
            match (&mut self.stream).take(most).read_until(b'\n', &mut line) {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        line.pop();
        Ok(Some(String::from_utf8_lossy(&line).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// The result of a request that is answered by `answer`.
    fn answered(answer: &'static [u8]) -> Result<String, ClientError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let count = stream.read(&mut request).unwrap();
            assert!(request[..count].starts_with(b"GET /x HTTP/1.1\r\n"));
            stream.write_all(answer).unwrap();
        });
        let reply = Client::new(&path).ask("GET", "/x");
        server.join().unwrap();
        reply
    }

    #[test]
    fn an_answer_ends_with_its_length_or_with_the_connection() {
        for answer in [
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokbehind it".as_slice(),
            b"HTTP/1.1 200 OK\r\n\r\nok",
        ] {
            assert_eq!(answered(answer).unwrap(), "ok");
        }
        assert_eq!(answered(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap(), "");
    }

    #[test]
    fn a_refusal_has_its_reason_its_remedy_and_the_party_that_must_act() {
        let refusal = answered(b"HTTP/1.1 409 Conflict\r\n\r\n[\"it ends\",\"wait\"]").unwrap_err();
        assert_eq!(refusal.to_string(), "cannot GET /x: it ends");
        assert_eq!((refusal.help().as_deref(), refusal.blame()), (Some("wait"), Blame::Host));
        let unknown = answered(b"HTTP/1.1 404 Not Found\r\n\r\n").unwrap_err();
        assert_eq!(
            (unknown.to_string().as_str(), unknown.blame()),
            ("cannot GET /x: status 404", Blame::Configuration)
        );
    }

    #[test]
    fn an_answer_that_drips_ends_with_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
            // The client has sent its request, so each read is a pause.
            while stream.write_all(b"a").is_ok() {
                let _ = stream.read(&mut [0; 1024]);
            }
        });
        match Client::new(&path).within(Duration::from_millis(50)).ask("GET", "/x") {
            Err(ClientError::Unreadable { source, .. }) => {
                assert!(
                    matches!(source.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock),
                    "{source}"
                );
            }
            other => panic!("{other:?}"),
        }
        server.join().unwrap();
    }

    #[test]
    fn an_answer_longer_than_the_caller_takes_is_an_error() {
        for answer in ["Content-Length: 4\r\n\r\nlong", "\r\nlong"] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("s");
            let listener = UnixListener::bind(&path).unwrap();
            let server = thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(format!("HTTP/1.1 200 OK\r\n{answer}").as_bytes()).unwrap();
                stream
            });
            let reply = Client::new(&path).limited(3).ask("GET", "/x");
            let _stream = server.join().unwrap();
            match reply {
                Err(ClientError::Unreadable { source, .. }) => {
                    assert_eq!(source.to_string(), "it is too long")
                }
                other => panic!("{answer:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_link_to_a_socket_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("s"), folder.path().join("link"));
        let listener = UnixListener::bind(&path).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let error = Client::new(&link).ask("GET", "/x").unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
        drop(listener);
    }

    #[test]
    fn what_is_no_answer_is_an_error_of_the_host_and_cannot_print_control_characters() {
        let cut = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok".as_slice();
        for answer in [cut, b"SSH-2.0-x\r\n\r\n", b"\r\n\r\n", b"", b"HTTP/1.1 200"] {
            let error = answered(answer).unwrap_err();
            assert!(matches!(error, ClientError::Unreadable { .. }), "{error}");
            assert_eq!(error.blame(), Blame::Host);
        }
        let forged = answered(b"HTTP/1.1 501 x\r\n\r\n[\"a\\u001b[2J\",\"b\\u001b[2J\"]").unwrap_err();
        assert!(!format!("{forged}{:?}", forged.help()).contains('\u{1b}'), "{forged}");
    }
}
