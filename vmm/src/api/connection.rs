//! One client's connection as a state machine over bytes and time. Pure.
//!
//! ```text
//!            request                 all sent, kept
//!  Open ───────────────► answer ───────────────────────► Open
//!   │ │                     │ all sent, not kept
//!   │ └── refusal ──────────┴──────────────────────────► Draining ── deadline, end ─► Over
//!   └──── events ───► Streaming ── end of the client ──► Over
//! ```
//! It reads nothing while it has something to send, so both buffers are bounded. A stream has no deadline, and neither has
//! a client that waits for an answer: it is `Waiting`, and reads nothing either.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::answer::{Answer, CONTINUE, Status};
use super::events::EventFormat;
use super::http::{MAX_BODY, MAX_HEAD, Parsed, Refusal, Request, parse};

/// Most bytes of requests that a connection buffers.
const CAPACITY: usize = MAX_HEAD + MAX_BODY;
/// Most descriptors that come with one request: a tap for each queue pair of an interface.
pub(super) const MAX_PASSED: usize = 16;
/// Most bytes of one read while input is dropped.
const DROPPED: usize = 64 << 10;

/// Time limits of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Of a request, from its first byte; of the first one, from the connection on.
    pub(super) request: Duration,
    /// Between two bytes of an answer.
    pub(super) answer: Duration,
    /// For what a client still sends after a refusal.
    pub(super) drain: Duration,
}

impl Limits {
    pub(super) const USUAL: Self = Self {
        request: Duration::from_secs(10),
        answer: Duration::from_secs(10),
        drain: Duration::from_secs(2),
    };
}

/// A stream of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stream {
    pub(super) format: EventFormat,
    /// Next event of the journal.
    pub(super) cursor: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// Has a request that is answered later.
    Waiting,
    /// The output is the last.
    Last,
    /// Gets events until its client leaves.
    Streaming(Stream),
    /// Has sent all, and reads what its client still sends: closing at once could cut the answer off.
    Draining,
    Over,
}

#[derive(Debug)]
pub(super) struct Connection {
    phase: Phase,
    input: Vec<u8>,
    /// Descriptors that came with the input.
    passed: Vec<OwnedFd>,
    /// Whether some of them are missing.
    has_lost_passed: bool,
    output: Vec<u8>,
    /// Bytes of `output` that are sent.
    sent: usize,
    /// Whether the client has sent a whole request.
    has_asked: bool,
    /// Whether the request that is being read got its interim answer.
    is_continued: bool,
    limits: Limits,
    deadline: Option<Instant>,
    /// Since when it has answered all requests of its client and reads no other.
    idle: Option<Instant>,
}

impl Connection {
    pub(super) fn new(limits: Limits, now: Instant) -> Self {
        let mut connection = Self {
            phase: Phase::Open,
            input: Vec::new(),
            passed: Vec::new(),
            has_lost_passed: false,
            output: Vec::new(),
            sent: 0,
            has_asked: false,
            is_continued: false,
            limits,
            deadline: None,
            idle: None,
        };
        connection.rearm(now);
        connection
    }

    /// Bytes to read now; 0 while there is something to send.
    pub(super) fn room(&self) -> usize {
        match self.phase {
            Phase::Open if self.output.is_empty() => CAPACITY.saturating_sub(self.input.len()),
            Phase::Streaming(_) | Phase::Draining => DROPPED,
            _ => 0,
        }
    }

    /// Takes descriptors that came with the bytes which [`receive`](Self::receive) takes next. They belong to the next request.
    /// `is_whole`: none of them is missing.
    pub(super) fn receive_descriptors(&mut self, descriptors: Vec<OwnedFd>, is_whole: bool) {
        if self.phase == Phase::Open {
            self.passed.extend(descriptors);
            self.has_lost_passed |= !is_whole || self.passed.len() > MAX_PASSED;
            self.passed.truncate(MAX_PASSED);
        }
    }

    /// Takes bytes of the client, at most [`room`](Self::room).
    pub(super) fn receive(&mut self, bytes: &[u8], now: Instant) {
        if self.phase == Phase::Open {
            let is_first = self.input.is_empty();
            self.input.extend(bytes.iter().take(self.room()));
            // Further bytes give a request no further time.
            if is_first && self.has_asked {
                self.rearm(now);
            }
        }
    }

    /// Handles the end of the client's input.
    pub(super) fn end_of_input(&mut self, now: Instant) {
        self.phase = if self.output.is_empty() { Phase::Over } else { Phase::Last };
        self.rearm(now);
    }

    /// The next whole request, once the previous answer is sent. Answers bytes that are no request.
    pub(super) fn next_request(&mut self, now: Instant) -> Option<Request> {
        if self.phase != Phase::Open || !self.output.is_empty() {
            return None;
        }
        if self.has_lost_passed {
            self.passed = Vec::new();
            let what = "cannot read the request: some of its descriptors did not arrive";
            let remedy = format!(
                "pass at most {MAX_PASSED}; with fewer, raise the program's limit: prlimit --pid PID --nofile=65536"
            );
            self.answer(&unread(what, &remedy), false, now);
            return None;
        }
        match parse(&self.input) {
            // It is unknown which of several requests they came with.
            Parsed::Whole(_, length) if !self.passed.is_empty() && length < self.input.len() => {
                self.passed = Vec::new();
                let what = "cannot read the request: other requests came with its descriptors";
                self.answer(&unread(what, "wait for its answer before the next request"), false, now);
                None
            }
            Parsed::Whole(request, length) => {
                self.input.drain(..length);
                self.has_asked = true;
                self.is_continued = false;
                Some(Request { passed: std::mem::take(&mut self.passed).into_iter().collect(), ..request })
            }
            Parsed::Part { waits } => {
                if waits && !std::mem::replace(&mut self.is_continued, true) {
                    self.output.extend(CONTINUE);
                }
                None
            }
            Parsed::Refused(refusal) => {
                self.answer(&refused(refusal), false, now);
                None
            }
        }
    }

    /// Waits, without a deadline, until its request is answered.
    pub(super) fn wait(&mut self) {
        self.phase = Phase::Waiting;
        self.deadline = None;
    }

    /// Whether an answer is to come later.
    pub(super) fn is_waiting(&self) -> bool {
        self.phase == Phase::Waiting
    }

    /// Queues `answer`; the connection ends after it unless it `keeps_alive`.
    pub(super) fn answer(&mut self, answer: &Answer, keeps_alive: bool, now: Instant) {
        self.output.extend(answer.bytes(keeps_alive));
        self.phase = if keeps_alive { Phase::Open } else { Phase::Last };
        self.rearm(now);
    }

    /// Queues `head`, and begins a stream of events.
    pub(super) fn begin_stream(&mut self, head: &[u8], format: EventFormat) {
        self.output.extend(head);
        self.phase = Phase::Streaming(Stream { format, cursor: 0 });
        self.deadline = None;
    }

    /// Whether its client reads events.
    pub(super) const fn is_stream(&self) -> bool {
        matches!(self.phase, Phase::Streaming(_))
    }

    /// Its stream, when everything before is sent: a slow client has one batch of events in its output at most.
    pub(super) fn drained_stream(&mut self) -> Option<&mut Stream> {
        match &mut self.phase {
            Phase::Streaming(stream) if self.output.is_empty() => Some(stream),
            _ => None,
        }
    }

    /// Queues `events` of its stream.
    pub(super) fn push(&mut self, events: &[u8]) {
        if self.is_stream() {
            self.output.extend(events);
        }
    }

    pub(super) fn output(&self) -> &[u8] {
        self.output.get(self.sent..).unwrap_or_default()
    }

    /// Records `count` sent bytes of [`output`](Self::output). Returns whether the sending side is to be closed.
    pub(super) fn sent(&mut self, count: usize, now: Instant) -> bool {
        self.sent = self.sent.saturating_add(count);
        if self.sent < self.output.len() {
            if count > 0 {
                self.rearm(now);
            }
            return false;
        }
        self.output = Vec::new(); // frees it: a plan is long
        self.sent = 0;
        let is_last = self.phase == Phase::Last;
        if is_last {
            self.phase = Phase::Draining;
        }
        self.rearm(now);
        is_last
    }

    /// Ends the connection of a client that is gone.
    pub(super) fn fail(&mut self) {
        self.phase = Phase::Over;
    }

    pub(super) fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// When it ends unless something happens.
    pub(super) const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Since when it is idle, if it is. It has no deadline then.
    pub(super) const fn idle_since(&self) -> Option<Instant> {
        self.idle
    }

    /// Ends it when its time is over.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.phase = Phase::Over;
        }
    }

    fn rearm(&mut self, now: Instant) {
        let is_idle =
            self.phase == Phase::Open && self.has_asked && self.input.is_empty() && self.output.is_empty();
        self.idle = is_idle.then_some(now);
        let limit = match self.phase {
            Phase::Streaming(_) | Phase::Waiting | Phase::Over => None,
            Phase::Draining => Some(self.limits.drain),
            Phase::Open | Phase::Last if !self.output.is_empty() => Some(self.limits.answer),
            Phase::Open if is_idle => None,
            Phase::Open | Phase::Last => Some(self.limits.request),
        };
        self.deadline = limit.and_then(|limit| now.checked_add(limit));
    }
}

fn unread(what: &str, remedy: &str) -> Answer {
    Answer::failure(Status::BadRequest, what, remedy)
}

/// The answer to bytes that are no request.
fn refused(refusal: Refusal) -> Answer {
    let (status, what, remedy) = match refusal {
        Refusal::Malformed => (
            Status::BadRequest,
            "cannot read the request: it is not HTTP/1.1",
            "use an HTTP client, or egm-vmm ctl",
        ),
        Refusal::Version => (
            Status::VersionNotSupported,
            "cannot read the request: its version of HTTP is unknown",
            "use HTTP/1.1",
        ),
        Refusal::HeadTooLong => (
            Status::HeadTooLarge,
            "cannot read the request: its head is too long",
            "send at most 8 KiB and 64 header fields",
        ),
        Refusal::BodyTooLong => {
            (Status::ContentTooLarge, "cannot read the request: its body is too long", "send at most 64 KiB")
        }
        Refusal::UnknownCoding => (
            Status::LengthRequired,
            "cannot read the request: the coding of its body is unknown",
            "send Content-Length, or Transfer-Encoding: chunked",
        ),
    };
    Answer::failure(status, what, remedy)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits::USUAL;

    /// Sends everything; returns it as text.
    fn sent(connection: &mut Connection, now: Instant) -> String {
        let output = connection.output().to_vec();
        connection.sent(output.len(), now);
        String::from_utf8(output).unwrap()
    }

    fn at(start: Instant, since: Duration) -> Instant {
        start.checked_add(since).unwrap()
    }

    fn is_over_at(connection: &mut Connection, now: Instant) -> bool {
        connection.expire(now);
        connection.is_over()
    }

    #[test]
    fn requests_in_one_piece_are_answered_one_after_another_and_nothing_is_read_meanwhile() {
        let now = Instant::now();
        let mut connection = Connection::new(LIMITS, now);
        connection.receive(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\nGET /3", now);
        for path in ["/1", "/2"] {
            assert_eq!(connection.next_request(now).unwrap().path, path);
            connection.answer(&Answer::done(), true, now);
            assert_eq!((connection.room(), connection.next_request(now)), (0, None));
            assert!(sent(&mut connection, now).starts_with("HTTP/1.1 204 "));
        }
        assert_eq!(connection.next_request(now), None);
        connection.receive(b" HTTP/1.1\r\n\r\n", now);
        assert_eq!(connection.next_request(now).unwrap().path, "/3");
    }

    #[test]
    fn descriptors_are_those_of_one_request_that_comes_alone_and_whole() {
        let now = Instant::now();
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        const ONE: &[u8] = b"PUT /1 HTTP/1.1\r\n\r\n";
        let mut connection = Connection::new(LIMITS, now);
        connection.receive_descriptors(vec![null()], true);
        connection.receive(ONE, now);
        assert_eq!(connection.next_request(now).unwrap().passed.len(), 1);
        connection.answer(&Answer::done(), true, now);
        let _ = sent(&mut connection, now);
        connection.receive(ONE, now);
        assert!(connection.next_request(now).unwrap().passed.is_empty());
        let refused = |descriptors: usize, is_whole: bool, requests: usize| {
            let mut connection = Connection::new(LIMITS, now);
            connection.receive_descriptors((0..descriptors).map(|_| null()).collect(), is_whole);
            connection.receive(&ONE.repeat(requests), now);
            assert_eq!(connection.next_request(now), None);
            assert!(connection.passed.is_empty(), "they are closed");
            sent(&mut connection, now)
        };
        assert!(refused(1, true, 2).contains("other requests came with its descriptors"));
        assert!(refused(1, false, 1).contains("some of its descriptors did not arrive"));
        assert!(refused(17, true, 1).starts_with("HTTP/1.1 400 "));
    }

    #[test]
    fn a_request_gets_no_more_time_for_each_of_its_bytes() {
        let start = Instant::now();
        let mut connection = Connection::new(LIMITS, start);
        for second in 0..9 {
            connection.receive(b"x", at(start, Duration::from_secs(second)));
        }
        assert!(!is_over_at(&mut connection, at(start, Duration::from_secs(9))));
        assert!(is_over_at(&mut connection, at(start, LIMITS.request)));
    }

    #[test]
    fn a_client_that_has_asked_may_be_idle_and_one_that_has_not_may_not() {
        let start = Instant::now();
        let mut connection = Connection::new(LIMITS, start);
        connection.receive(b"GET / HTTP/1.1\r\n\r\n", start);
        let _ = connection.next_request(start).unwrap();
        connection.answer(&Answer::done(), true, start);
        let _ = sent(&mut connection, start);
        assert_eq!((connection.idle_since(), connection.deadline()), (Some(start), None));
        let later = at(start, Duration::from_secs(1_000_000));
        assert!(!is_over_at(&mut connection, later));
        connection.receive(b"G", later);
        assert_eq!(connection.idle_since(), None);
        assert!(is_over_at(&mut connection, at(later, LIMITS.request)), "half a request");
    }

    #[test]
    fn a_client_that_does_not_take_its_answer_is_closed_and_one_that_takes_it_slowly_is_not() {
        let start = Instant::now();
        let mut connection = Connection::new(LIMITS, start);
        connection.answer(&Answer::json(&"x".repeat(100)), true, start);
        let later = at(start, Duration::from_secs(9));
        connection.sent(1, later);
        assert!(!is_over_at(&mut connection, at(start, LIMITS.answer)));
        connection.sent(0, at(start, LIMITS.answer));
        assert!(is_over_at(&mut connection, at(later, LIMITS.answer)));
    }

    #[test]
    fn what_is_no_request_gets_its_status_and_then_only_what_it_still_sends_is_dropped() {
        for (text, status) in [
            ("\0\r\n\r\n", "400"),
            ("PUT / HTTP/1.1\r\nContent-Length: 104857600\r\n\r\n", "413"),
            ("PUT / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", "411"),
            ("GET / HTTP/3.0\r\n\r\n", "505"),
        ] {
            let now = Instant::now();
            let mut connection = Connection::new(LIMITS, now);
            connection.receive(text.as_bytes(), now);
            assert_eq!(connection.next_request(now), None);
            let answer = sent(&mut connection, now);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
            assert!(answer.contains("Connection: close"), "{answer}");
            connection.receive(b"GET / HTTP/1.1\r\n\r\n", now);
            assert_eq!((connection.next_request(now), connection.input.len() <= text.len()), (None, true));
            assert!(is_over_at(&mut connection, at(now, LIMITS.drain)));
        }
    }

    #[test]
    fn a_client_that_waits_gets_one_interim_answer_before_its_body() {
        let now = Instant::now();
        let mut connection = Connection::new(LIMITS, now);
        connection.receive(b"PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n", now);
        assert_eq!(connection.next_request(now), None);
        assert_eq!(sent(&mut connection, now), "HTTP/1.1 100 Continue\r\n\r\n");
        connection.receive(b"a", now);
        assert_eq!((connection.next_request(now), connection.output()), (None, b"".as_slice()));
        connection.receive(b"b", now);
        assert_eq!(connection.next_request(now).unwrap().body, b"ab");
    }

    #[test]
    fn a_request_that_is_answered_later_has_no_deadline_and_those_behind_it_wait() {
        let now = Instant::now();
        let mut connection = Connection::new(LIMITS, now);
        connection.receive(b"PUT /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\n", now);
        assert_eq!(connection.next_request(now).unwrap().path, "/1");
        connection.wait();
        assert_eq!((connection.room(), connection.next_request(now), connection.deadline()), (0, None, None));
        assert!(connection.is_waiting());
        connection.answer(&Answer::done(), true, now);
        assert!(sent(&mut connection, now).starts_with("HTTP/1.1 204 "));
        assert_eq!(connection.next_request(now).unwrap().path, "/2");
        connection.wait();
        connection.answer(&Answer::done(), false, now);
        assert!(connection.sent(connection.output().len(), now), "its side is closed");
    }

    #[test]
    fn a_stream_takes_one_batch_at_a_time_and_has_no_deadline() {
        let now = Instant::now();
        let mut connection = Connection::new(LIMITS, now);
        connection.begin_stream(b"head", EventFormat::Lines);
        assert!(connection.drained_stream().is_none(), "the head is not sent yet");
        let _ = sent(&mut connection, now);
        assert!(connection.drained_stream().is_some() && connection.deadline().is_none());
        connection.push(b"event");
        assert!(connection.drained_stream().is_none());
        assert_eq!(sent(&mut connection, now), "event");
        assert_eq!(connection.deadline(), None);
        connection.end_of_input(now);
        assert!(connection.is_over());
    }

    #[test]
    fn a_stream_that_is_half_closed_has_a_deadline() {
        let now = Instant::now();
        let mut connection = Connection::new(LIMITS, now);
        connection.begin_stream(b"head", EventFormat::Lines);
        connection.end_of_input(now);
        assert!(!is_over_at(&mut connection, now));
        assert!(is_over_at(&mut connection, at(now, LIMITS.answer)));
    }

    #[test]
    fn a_client_that_closes_its_side_gets_its_answer() {
        let now = Instant::now();
        let mut connection = Connection::new(LIMITS, now);
        connection.answer(&Answer::done(), true, now);
        connection.end_of_input(now);
        assert!(!connection.is_over());
        assert!(connection.sent(connection.output().len(), now), "the sending side is closed too");
        connection.end_of_input(now);
        assert!(connection.is_over());
    }

    proptest! {
        /// However bytes are cut into pieces, the same requests are read, within the buffer.
        #[test]
        fn pieces_of_any_bytes_are_read_as_the_whole(
            bytes in prop::collection::vec(prop_oneof![
                Just(b"GET / HTTP/1.1\r\n\r\n".to_vec()),
                Just(b"PUT /x HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc".to_vec()),
                prop::collection::vec(any::<u8>(), 0..8),
            ], 0..12),
            size in 1usize..40,
        ) {
            let bytes = bytes.concat();
            prop_assert_eq!(read(&bytes, size), read(&bytes, bytes.len().max(1)));
        }
    }

    /// The requests in `bytes`, which come in pieces of `size`, and whether the connection was refused.
    fn read(bytes: &[u8], size: usize) -> (Vec<Request>, bool) {
        let now = Instant::now();
        let mut connection = Connection::new(LIMITS, now);
        let mut requests = Vec::new();
        for piece in bytes.chunks(size) {
            assert!(connection.room() > 0 && connection.input.len() <= CAPACITY);
            connection.receive(piece, now);
            while let Some(request) = connection.next_request(now) {
                requests.push(request);
                connection.answer(&Answer::done(), true, now);
                let _ = sent(&mut connection, now);
            }
            let _ = sent(&mut connection, now);
        }
        (requests, connection.phase == Phase::Draining)
    }
}
