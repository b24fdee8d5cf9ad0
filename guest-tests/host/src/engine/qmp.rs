//! QEMU's monitor over a Unix socket: a command and its answer, and events (QMP specification).

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// Timeout: an emulated guest is slow to release a device.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum size of an answer in bytes; the answers to these commands are short.
const MAX_LINE: u64 = 1 << 20;

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub(crate) struct Monitor {
    stream: BufReader<UnixStream>,
    events: VecDeque<String>,
}

impl Monitor {
    /// The monitor at `path`, ready for commands.
    pub(crate) fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut monitor = Self { stream: BufReader::new(stream), events: VecDeque::new() };
        monitor.line()?;
        monitor.execute("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Runs `command`; a refusal is an error. Events that come before the answer are kept.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> io::Result<()> {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream.get_mut(), "{request}")?;
        loop {
            let line = self.line()?;
            if let Some(error) = line.get("error") {
                return Err(io::Error::other(format!("QEMU refuses {request}: {error}")));
            }
            if line.get("return").is_some() {
                return Ok(());
            }
            self.keep(&line);
        }
    }

    pub(crate) fn wait(&mut self, event: &str) -> io::Result<()> {
        loop {
            while let Some(seen) = self.events.pop_front() {
                if seen == event {
                    return Ok(());
                }
            }
            let line = self.line()?;
            self.keep(&line);
        }
    }

    fn keep(&mut self, line: &Value) {
        self.events.extend(line.get("event").and_then(Value::as_str).map(str::to_owned));
    }

    fn line(&mut self) -> io::Result<Value> {
        let mut line = String::new();
        let length = self.stream.by_ref().take(MAX_LINE).read_line(&mut line)?;
        if length == 0 {
            return Err(io::Error::other("QEMU's monitor is gone"));
        }
        Ok(serde_json::from_str(&line)?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread::{self, JoinHandle};

    use super::*;

    /// A monitor that sends these lines: the first at once, and one more for each request.
    fn prints(lines: &'static [&'static str]) -> (tempfile::TempDir, JoinHandle<()>) {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
        let server = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut asked = BufReader::new(stream.try_clone().unwrap()).lines();
            for (number, line) in lines.iter().enumerate() {
                if number > 0 {
                    asked.next().unwrap().unwrap();
                }
                (&stream).write_all(line.as_bytes()).unwrap();
            }
        });
        (folder, server)
    }

    #[test]
    fn answers_are_found_among_events_which_are_kept() {
        let (folder, server) = prints(&[
            "{\"QMP\":{}}\n",
            "{\"return\":{}}\n",
            "{\"event\":\"DEVICE_DELETED\"}\n{\"event\":\"RESET\"}\n{\"return\":{}}\n",
        ]);
        let mut monitor = Monitor::connect(&folder.path().join("qmp")).unwrap();
        monitor.execute("device_del", json!({ "id": "x" })).unwrap();
        monitor.wait("RESET").unwrap();
        server.join().unwrap();
        assert!(monitor.wait("DEVICE_DELETED").is_err(), "it was passed over, and the monitor is gone");
    }

    #[test]
    fn a_refusal_names_the_request() {
        let (folder, server) =
            prints(&["{\"QMP\":{}}\n", "{\"return\":{}}\n", "{\"error\":{\"desc\":\"no such device\"}}\n"]);
        let mut monitor = Monitor::connect(&folder.path().join("qmp")).unwrap();
        let error = monitor.execute("device_del", json!({ "id": "x" })).unwrap_err().to_string();
        server.join().unwrap();
        assert!(error.contains("device_del") && error.contains("no such device"), "{error}");
    }
}
