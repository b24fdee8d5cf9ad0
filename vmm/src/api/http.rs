//! Parser of requests: the head by `httparse`, limits and framing by RFC 9112. Pure.

use httparse::{EMPTY_HEADER, Header, Status, parse_chunk_size, parse_headers};

use crate::passed::Passed;

/// Longest request line and header fields together.
pub(super) const MAX_HEAD: usize = 8 << 10;
/// Longest body, with the sizes and the trailer of its chunks.
pub(super) const MAX_BODY: usize = 64 << 10;
const MAX_FIELDS: usize = 64;

/// Method of a request, as far as the API has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Put,
    Other,
}

impl Method {
    /// Its name in a request.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Put => "PUT",
            Self::Other => "",
        }
    }

    fn of(name: &str) -> Self {
        [Self::Get, Self::Put].into_iter().find(|method| method.name() == name).unwrap_or(Self::Other)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) method: Method,
    /// As it was sent: percent signs have no meaning.
    pub(super) path: String,
    /// Text behind the question mark.
    pub(super) query: String,
    /// Whether the client reads server-sent events.
    pub(super) accepts_server_sent: bool,
    /// Whether the client keeps the connection for another request.
    pub(super) keeps_alive: bool,
    pub(super) body: Vec<u8>,
    /// Descriptors that came with it (`SCM_RIGHTS`).
    pub(super) passed: Passed,
}

#[cfg(test)]
impl Request {
    /// PUT `target` with `body`.
    pub(super) fn put(target: &str, body: Vec<u8>) -> Self {
        let (path, query) = self::target(target);
        Self {
            method: Method::Put,
            path: path.to_owned(),
            query: query.to_owned(),
            accepts_server_sent: false,
            keeps_alive: true,
            body,
            passed: Passed::default(),
        }
    }
}

/// Why bytes are no request that this API reads. The connection ends after it, because the next request's start is
/// unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    Malformed,
    Version,
    HeadTooLong,
    BodyTooLong,
    UnknownCoding,
}

/// Meaning of the bytes so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Parsed {
    /// A part of a request. Whether the client waits for an interim answer before it sends the body.
    Part {
        waits: bool,
    },
    /// A request, and the number of its bytes.
    Whole(Request, usize),
    Refused(Refusal),
}

/// Properties of the header fields.
#[derive(Default)]
struct Fields {
    length: Option<u64>,
    is_chunked: bool,
    closes: bool,
    keeps: bool,
    waits: bool,
    accepts_server_sent: bool,
}

/// Reads the first request of `input`.
pub(super) fn parse(input: &[u8]) -> Parsed {
    let mut fields = [EMPTY_HEADER; MAX_FIELDS];
    let mut head = httparse::Request::new(&mut fields);
    let length = match head.parse(input.get(..MAX_HEAD).unwrap_or(input)) {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) if input.len() < MAX_HEAD => return Parsed::Part { waits: false },
        Ok(Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Parsed::Refused(Refusal::HeadTooLong);
        }
        Err(httparse::Error::Version) => return Parsed::Refused(Refusal::Version),
        Err(_) => return Parsed::Refused(Refusal::Malformed),
    };
    let fields = match Fields::of(head.headers) {
        Ok(fields) => fields,
        Err(refusal) => return Parsed::Refused(refusal),
    };
    // Chunks are of HTTP/1.1 (RFC 9112, clause 6.1).
    if fields.is_chunked && head.version == Some(0) {
        return Parsed::Refused(Refusal::Malformed);
    }
    let rest = input.get(length..).unwrap_or_default();
    let framed = if fields.is_chunked { chunked(rest) } else { sized(rest, fields.length.unwrap_or(0)) };
    let (body, size) = match framed {
        Body::Whole { bytes, size } => (bytes, size),
        Body::Part => return Parsed::Part { waits: fields.waits },
        Body::Refused(refusal) => return Parsed::Refused(refusal),
    };
    let (path, query) = target(head.path.unwrap_or_default());
    let method = Method::of(head.method.unwrap_or_default());
    let request = Request {
        method,
        path: path.to_owned(),
        query: query.to_owned(),
        accepts_server_sent: fields.accepts_server_sent,
        // A client reads no body after HEAD, and would take ours for the next answer.
        keeps_alive: method != Method::Other && !fields.closes && (head.version == Some(1) || fields.keeps),
        body,
        passed: Passed::default(),
    };
    Parsed::Whole(request, length.saturating_add(size))
}

/// Meaning of the bytes behind a head.
enum Body {
    Part,
    /// The body, and the number of bytes that carried it.
    Whole {
        bytes: Vec<u8>,
        size: usize,
    },
    Refused(Refusal),
}

/// A body of `length` bytes.
fn sized(input: &[u8], length: u64) -> Body {
    let size = match usize::try_from(length) {
        Ok(size) if size <= MAX_BODY || egm_address::fault!("api-body-without-limit") => size,
        _ => return Body::Refused(Refusal::BodyTooLong),
    };
    input.get(..size).map_or(Body::Part, |bytes| Body::Whole { bytes: bytes.to_vec(), size })
}

/// A body in chunks (RFC 9112, clause 7.1). Extensions and the trailer's fields have no meaning.
fn chunked(input: &[u8]) -> Body {
    let input = input.get(..MAX_BODY).unwrap_or(input);
    // Chunks that go on behind the limit are no part of a request.
    let part = || if input.len() < MAX_BODY { Body::Part } else { Body::Refused(Refusal::BodyTooLong) };
    let (mut chunks, mut rest) = (Vec::new(), input);
    loop {
        let (line, size) = match parse_chunk_size(rest) {
            Ok(Status::Complete(found)) => found,
            Ok(Status::Partial) => return part(),
            Err(_) => return Body::Refused(Refusal::Malformed),
        };
        let (line, behind) = rest.split_at_checked(line).unwrap_or_default();
        // The parser takes a line without digits for the size 0, and any byte of an extension.
        let is_size = line.first().is_some_and(u8::is_ascii_hexdigit);
        if !is_size || line.iter().filter(|byte| **byte == b'\n').count() > 1 {
            return Body::Refused(Refusal::Malformed);
        }
        rest = behind;
        if size == 0 {
            break;
        }
        let Ok(size) = usize::try_from(size) else { return Body::Refused(Refusal::BodyTooLong) };
        if size > MAX_BODY {
            return Body::Refused(Refusal::BodyTooLong);
        }
        let Some((chunk, behind)) = rest.split_at_checked(size) else { return part() };
        chunks.push(chunk);
        rest = match behind.split_at_checked(2) {
            Some((b"\r\n", behind)) => behind,
            Some(_) => return Body::Refused(Refusal::Malformed),
            None => return part(),
        };
    }
    match parse_headers(rest, &mut [EMPTY_HEADER; MAX_FIELDS]) {
        Ok(Status::Complete((trailer, _))) => {
            let size = input.len().saturating_sub(rest.len()).saturating_add(trailer);
            Body::Whole { bytes: chunks.concat(), size }
        }
        Ok(Status::Partial) => part(),
        Err(httparse::Error::TooManyHeaders) => Body::Refused(Refusal::HeadTooLong),
        Err(_) => Body::Refused(Refusal::Malformed),
    }
}

impl Fields {
    fn of(headers: &[Header<'_>]) -> Result<Self, Refusal> {
        let mut fields = Self::default();
        for header in headers {
            let has = |word: &str| has_word(header.value, word);
            match header.name.to_ascii_lowercase().as_str() {
                // Two lengths are one request for one parser and two for another (RFC 9112, clause 11.2).
                "content-length" => {
                    let length = length(header.value)?;
                    if fields.length.replace(length).is_some_and(|other| other != length) {
                        return Err(Refusal::Malformed);
                    }
                }
                "transfer-encoding" => {
                    if !header.value.eq_ignore_ascii_case(b"chunked") {
                        return Err(Refusal::UnknownCoding);
                    }
                    if std::mem::replace(&mut fields.is_chunked, true) {
                        return Err(Refusal::Malformed);
                    }
                }
                "connection" => {
                    fields.closes |= has("close");
                    fields.keeps |= has("keep-alive");
                }
                "expect" => fields.waits |= has("100-continue"),
                "accept" => fields.accepts_server_sent |= has("text/event-stream"),
                _ => {}
            }
        }
        // One parser ends the request at its length, and another at its last chunk (RFC 9112, clause 6.3).
        if fields.is_chunked && fields.length.is_some() { Err(Refusal::Malformed) } else { Ok(fields) }
    }
}

/// The number of a Content-Length field: digits only.
fn length(value: &[u8]) -> Result<u64, Refusal> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(Refusal::Malformed);
    }
    let digits = str::from_utf8(value).map_err(|_| Refusal::Malformed)?;
    digits.parse().map_err(|_| Refusal::BodyTooLong)
}

/// Whether the list `value` has `word`, parameters left out.
fn has_word(value: &[u8], word: &str) -> bool {
    let mut words =
        value.split(|byte| *byte == b',').filter_map(|item| item.split(|byte| *byte == b';').next());
    words.any(|item| item.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
}

/// Path and query of a request's target, which may have a scheme and a host.
fn target(text: &str) -> (&str, &str) {
    let text = match text.strip_prefix("http://") {
        Some(rest) => rest.find('/').and_then(|slash| rest.get(slash..)).unwrap_or("/"),
        None => text,
    };
    text.split_once('?').unwrap_or((text, ""))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(text: &str) -> Request {
        match parse(text.as_bytes()) {
            Parsed::Whole(request, length) if length == text.len() => request,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[track_caller]
    fn refused(text: &str, refusal: Refusal) {
        assert_eq!(parse(text.as_bytes()), Parsed::Refused(refusal), "{text:?}");
    }

    #[test]
    fn a_request_has_method_path_query_and_body() {
        let request = whole("PUT /api/v1/vm.resize?a=b HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}");
        assert_eq!((request.method, request.path.as_str()), (Method::Put, "/api/v1/vm.resize"));
        assert_eq!((request.query.as_str(), request.body.as_slice()), ("a=b", b"{}".as_slice()));
        assert!(request.keeps_alive && !request.accepts_server_sent);
        let request =
            whole("BREW http://localhost/pot HTTP/1.1\r\nAccept: a/b, Text/Event-Stream;q=1\r\n\r\n");
        assert_eq!((request.method, request.path.as_str()), (Method::Other, "/pot"));
        assert!(request.accepts_server_sent);
        assert_eq!(whole("GET http://localhost HTTP/1.1\r\n\r\n").path, "/");
    }

    /// A client reads no body after HEAD: it would take ours for the next answer.
    #[test]
    fn an_unknown_method_ends_its_connection() {
        assert!(!whole("HEAD / HTTP/1.1\r\n\r\n").keeps_alive);
    }

    #[test]
    fn a_connection_is_kept_as_the_version_and_the_client_have_it() {
        for (version, field, keeps) in [
            ("1.1", "", true),
            ("1.1", "Connection: close\r\n", false),
            ("1.1", "Connection: x, Close\r\n", false),
            ("1.0", "", false),
            ("1.0", "Connection: Keep-Alive\r\n", true),
        ] {
            let text = format!("GET / HTTP/{version}\r\n{field}\r\n");
            assert_eq!(whole(&text).keeps_alive, keeps, "{text:?}");
        }
    }

    #[test]
    fn what_is_no_request_is_refused_by_its_kind() {
        refused("\u{1}\u{2}\r\n\r\n", Refusal::Malformed);
        refused("GET / HTTP/1.1\r\nno colon\r\n\r\n", Refusal::Malformed);
        refused("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Refusal::Version);
        refused("PUT / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", Refusal::UnknownCoding);
        for length in ["-1", "+1", "1, 1", "0x1", ""] {
            refused(&format!("PUT / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"), Refusal::Malformed);
        }
        refused("PUT / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", Refusal::Malformed);
        for length in [MAX_BODY as u64 + 1, 100 << 20, u64::MAX] {
            refused(&format!("PUT / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"), Refusal::BodyTooLong);
        }
        refused("PUT / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", Refusal::BodyTooLong);
        refused(&format!("GET /{} HTTP/1.1\r\n", "a".repeat(MAX_HEAD)), Refusal::HeadTooLong);
        refused(
            &format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_FIELDS + 1)),
            Refusal::HeadTooLong,
        );
        refused(&"\r\n".repeat(MAX_HEAD), Refusal::HeadTooLong);
    }

    /// A request with a body in `chunks`.
    fn in_chunks(chunks: &str) -> String {
        format!("PUT / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n{chunks}")
    }

    /// libcurl sends a body in chunks where it does not know its length, as libvirt does without a body.
    #[test]
    fn a_body_in_chunks_is_one_body() {
        for (chunks, body) in [
            ("0\r\n\r\n", ""),
            ("2\r\n{}\r\n0\r\n\r\n", "{}"),
            ("00a;x=y\r\n0123456789\r\n1\r\n!\r\n0\r\nDigest: x\r\n\r\n", "0123456789!"),
        ] {
            assert_eq!(whole(&in_chunks(chunks)).body, body.as_bytes(), "{chunks:?}");
        }
        let two = in_chunks("1\r\na\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n");
        let Parsed::Whole(_, length) = parse(two.as_bytes()) else { panic!("{two:?}") };
        assert_eq!(&two[length..], "GET / HTTP/1.1\r\n\r\n", "the next request");
    }

    #[test]
    fn chunks_that_are_none_or_too_many_are_refused() {
        for chunks in [
            "x\r\n",
            "-1\r\n",
            "1\r\nab\r\n0\r\n\r\n",
            "0\r\nno colon\r\n\r\n",
            "\r\n",
            ";\r\n\r\n",
            " \r\n\r\n",
            "0;a\nb\r\n\r\n",
        ] {
            refused(&in_chunks(chunks), Refusal::Malformed);
        }
        for size in [MAX_BODY as u64 + 1, 100 << 20, u64::MAX] {
            refused(&in_chunks(&format!("{size:x}\r\n")), Refusal::BodyTooLong);
        }
        refused(&in_chunks(&"1\r\na\r\n".repeat(MAX_BODY / 6 + 1)), Refusal::BodyTooLong);
        refused(&in_chunks(&format!("0\r\n{}", "a: b\r\n".repeat(MAX_FIELDS + 1))), Refusal::HeadTooLong);
        refused("PUT / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Refusal::Malformed);
        let both = "PUT / HTTP/1.1\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
        refused(both, Refusal::Malformed);
        let twice = "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n";
        refused(twice, Refusal::Malformed);
    }

    #[test]
    fn a_client_that_waits_before_it_sends_a_body_is_seen() {
        let text = b"PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n";
        assert_eq!(parse(text), Parsed::Part { waits: true });
        assert_eq!(parse(&text[..20]), Parsed::Part { waits: false });
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_within_the_limits(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            if let Parsed::Whole(request, length) = parse(&bytes) {
                prop_assert!(length <= bytes.len() && request.body.len() <= MAX_BODY);
            }
        }

        /// The start of a request is never a whole one, and never refused.
        #[test]
        fn a_request_in_parts_is_read_once_it_is_whole(
            path in "/[a-z.]{0,40}", body in prop::collection::vec(any::<u8>(), 0..64), cut in 0usize..1000,
        ) {
            let mut sized = format!("PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
            sized.extend(&body);
            let mut chunked = format!("PUT {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n").into_bytes();
            for chunk in body.chunks(7) {
                chunked.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
                chunked.extend(chunk);
                chunked.extend(b"\r\n");
            }
            chunked.extend(b"0\r\n\r\n");
            for bytes in [sized, chunked] {
                let cut = cut % bytes.len();
                let is_part = matches!(parse(&bytes[..cut]), Parsed::Part { .. });
                prop_assert!(is_part, "{cut}");
                let Parsed::Whole(request, length) = parse(&bytes) else { panic!("{bytes:?}") };
                prop_assert_eq!((&request.path, &request.body, length), (&path, &body, bytes.len()));
            }
        }
    }
}
