//! Messages of two machines beside the RDMA connection: one JSON line at a time, bounded.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use egm_vendor::verbs::{Endpoint, Mtu, Remote};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Broken;

/// Longest line in bytes.
const MAX_LINE: u64 = 4096;
/// Most words of one machine in a run.
const MAX_WORDS: u32 = 256;
/// First word of both sides: what it is, and in which version.
const HELLO: &str = "egm-guest rdma.pair 2";

/// First message of each side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Hello {
    what: String,
    number: u32,
    psn: u32,
    lid: u16,
    gid: [u8; 16],
    mtu: u32,
    address: u64,
    rkey: u32,
    /// Bytes of memory from `address` on.
    pub(super) size: usize,
    /// Reads and atomics that it serves at once.
    pub(super) reads: u8,
}

impl Hello {
    pub(super) fn new(end: &Endpoint, memory: Remote, size: usize, reads: u8) -> Self {
        Self {
            what: HELLO.to_owned(),
            number: end.number,
            psn: end.psn,
            lid: end.lid,
            gid: end.gid,
            mtu: end.mtu.number(),
            address: memory.address,
            rkey: memory.rkey,
            size,
            reads,
        }
    }

    pub(super) fn endpoint(&self) -> Endpoint {
        let mtu = Mtu::from_number(self.mtu);
        Endpoint { number: self.number, psn: self.psn, lid: self.lid, gid: self.gid, mtu }
    }

    pub(super) fn memory(&self) -> Remote {
        Remote { address: self.address, rkey: self.rkey }
    }
}

/// Request of the side that transfers to the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub(super) enum Ask {
    /// Fill that many bytes of your memory with this pattern.
    Fill { size: usize, seed: u64 },
    /// Say whether they are of this pattern.
    Compare { size: usize, seed: u64 },
    /// Post a receive of that many bytes.
    Receive { size: usize },
    /// Wait until it has arrived.
    Arrived { size: usize },
    /// Put this into your first word.
    Word { value: u64 },
    /// Say what your first word is.
    Tell,
    /// It is your turn to ask.
    Turn,
}

/// The other side's answer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Answer {
    /// The fault that was found, if any.
    pub(super) wrong: Option<String>,
    pub(super) word: u64,
}

/// A line to the other machine.
#[derive(Debug)]
pub(super) struct Talk {
    lines: BufReader<TcpStream>,
    count: u32,
}

impl Talk {
    /// Waits for the other machine at `place`.
    pub(super) fn listen(place: &str, limit: Duration) -> Result<Self, Broken> {
        let what = || format!("no machine connected to {place}");
        let listener =
            TcpListener::bind(place).map_err(Broken::system(format!("cannot listen at {place}")))?;
        let ready = rustix::event::PollFd::new(&listener, rustix::event::PollFlags::IN);
        let timeout = rustix::event::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: 0,
        };
        let ready = rustix::event::poll(&mut [ready], Some(&timeout)).map_err(Broken::system(what()))?;
        if ready == 0 {
            let late = io::Error::from(io::ErrorKind::TimedOut);
            return Err(Broken::system(what())(late));
        }
        let (stream, _) = listener.accept().map_err(Broken::system(what()))?;
        Self::over(stream, limit).map_err(Broken::system(what()))
    }

    /// Connects to the other machine, which may not be there yet.
    pub(super) fn connect(place: &str, limit: Duration) -> Result<Self, Broken> {
        let begun = Instant::now();
        loop {
            let connected = place.to_socket_addrs().and_then(|mut all| {
                let address = all.next().ok_or(io::ErrorKind::NotFound)?;
                TcpStream::connect_timeout(&address, Duration::from_secs(5))
            });
            match connected {
                Ok(stream) => {
                    return Self::over(stream, limit)
                        .map_err(Broken::system(format!("cannot talk to {place}")));
                }
                Err(error) if begun.elapsed() >= limit => {
                    return Err(Broken::system(format!("cannot connect to {place}"))(error));
                }
                // Refused at once while the other one boots: not too many tries a second.
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    fn over(stream: TcpStream, limit: Duration) -> io::Result<Self> {
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        stream.set_nodelay(true)?;
        Ok(Self { lines: BufReader::new(stream), count: 0 })
    }

    pub(super) fn send<T: Serialize>(&mut self, word: &T) -> Result<(), Broken> {
        let mut line = serde_json::to_string(word).unwrap_or_default();
        line.push('\n');
        let said = self.lines.get_mut().write_all(line.as_bytes());
        said.map_err(Broken::system("cannot write to the other machine"))
    }

    /// Receives a message, of bounded length.
    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> Result<T, Broken> {
        let mut line = Vec::new();
        let received = (&mut self.lines).take(MAX_LINE).read_until(b'\n', &mut line);
        received.map_err(Broken::system("the other machine sends nothing"))?;
        self.count += 1;
        let word =
            serde_json::from_slice(&line).ok().filter(|_| self.count <= MAX_WORDS && line.ends_with(b"\n"));
        word.ok_or_else(|| {
            Broken::text("the other machine", &String::from_utf8_lossy(&line), "a word of this protocol")
        })
    }

    /// Sends our hello, and receives and checks the other one.
    pub(super) fn handshake(&mut self, ours: &Hello) -> Result<Hello, Broken> {
        self.send(ours)?;
        let theirs: Hello = self.receive()?;
        if theirs.what == HELLO {
            return Ok(theirs);
        }
        Err(Broken::text(
            "the other machine's handshake",
            &theirs.what,
            "that of this version: use one build",
        ))
    }

    /// Sends a request, and receives the answer.
    pub(super) fn ask(&mut self, ask: Ask) -> Result<Answer, Broken> {
        self.send(&ask)?;
        self.receive()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn pair() -> (Talk, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Talk::over(listener.accept().unwrap().0, TIMEOUT).unwrap(), there)
    }

    fn hello() -> Hello {
        let end = Endpoint { number: 17, psn: 5, lid: 0, gid: [3; 16], mtu: Mtu::B1024 };
        Hello::new(&end, Remote { address: 4096, rkey: 9 }, 8192, 4)
    }

    #[test]
    fn both_sides_receive_the_name_of_the_other() {
        let (mut talk, there) = pair();
        let other = thread::spawn(move || {
            let mut talk = Talk::over(there, TIMEOUT).unwrap();
            talk.handshake(&hello()).unwrap()
        });
        assert_eq!(talk.handshake(&hello()).unwrap().endpoint(), hello().endpoint());
        assert_eq!(other.join().unwrap(), hello());
    }

    #[test]
    fn a_line_that_is_too_long_or_no_word_or_another_version_is_an_error() {
        let long = "x".repeat(10_000);
        let other =
            serde_json::to_string(&Hello { what: "egm-guest rdma.pair 0".into(), ..hello() }).unwrap();
        for (line, expected) in [(long.as_str(), "a word"), ("{}", "a word"), (&other, "use one build")] {
            let (mut talk, mut there) = pair();
            there.write_all(format!("{line}\n").as_bytes()).unwrap();
            let error = talk.handshake(&hello()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn more_words_than_a_run_has_are_an_error() {
        let (mut talk, mut there) = pair();
        there.write_all("\"tell\"\n".repeat(300).as_bytes()).unwrap();
        let received = (0..300).take_while(|_| talk.receive::<Ask>().is_ok()).count();
        assert_eq!(received, 256);
    }
}
