//! The client side: requests a slice from a broker and waits for it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use egm_address::{InRegion, SpanSet};
use egm_report::{Blame, Remedy, Report};
use rustix::net::SocketFlags;

use super::packet;
use super::wire::{self, MAX_REPLY, MAX_SPANS, RefusalReply, Reply, Request, SliceRequest};
use crate::backing::{self, Backing, BackingError};
use crate::region::{Region, Slice};

/// Most bytes of a region's description.
const MAX_REGION: u64 = 64 << 20;

/// A cancel flag that is never set.
static NEVER: AtomicBool = AtomicBool::new(false);

/// Remedies for refusals of each request.
const TAKE_HELP: &str = "egm-device carve free shows what you can get now; an operator can change the rules in \
                         /etc/egm-device/policy.json";
const FREE_HELP: &str = "an operator can add a rule for this user to /etc/egm-device/policy.json";
const RETURN_HELP: &str = "end the processes that use the memory, then return the slice again";

/// Remedy where client and broker do not understand each other.
const ONE_VERSION: &str = "use a client and a broker of one version";

/// A failed exchange with a broker.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum ClientError {
    #[error("cannot reach the broker at {}", path.display())]
    Connect { path: PathBuf, source: io::Error },
    #[error("cannot {step}: {why}")]
    Refused { step: String, why: String, help: &'static str },
    #[error("cannot reach the broker any more: it closed the connection")]
    Gone(#[source] io::Error),
    #[error("cannot confirm the return of the slice: cancelled while the broker scrubs it")]
    Cancelled,
    #[error("cannot use the broker's reply: {what}")]
    Unknown { what: &'static str },
    #[error("cannot use the memory that the broker passed")]
    Backing(#[source] BackingError),
}

impl Report for ClientError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Connect { path, .. } => {
                Blame::Host.help(format!("start it: egm-device broker --socket {}", path.display()))
            }
            Self::Refused { help, .. } => Blame::Host.help(*help),
            Self::Gone(_) => Blame::Host.help(
                "start the broker, unless it runs (systemctl status egm-broker), and let it free what its end left: \
                 egm-device ledger repair",
            ),
            Self::Unknown { .. } => Blame::Internal.help(ONE_VERSION),
            Self::Backing(_) => Blame::Host.help(ONE_VERSION),
            Self::Cancelled => Blame::Host.into(),
        }
    }
}

/// A connection to a broker, for one slice.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
}

impl Client {
    /// Connects to the broker at `path`, which identifies this process even if another one uses the connection.
    ///
    /// # Errors
    /// [`ClientError::Connect`].
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let error = |source| ClientError::Connect { path: path.to_owned(), source };
        let socket = packet::socket(SocketFlags::empty()).map_err(error)?;
        let address = packet::address(path).map_err(error)?;
        rustix::net::connect(&socket, &address).map_err(|errno| error(errno.into()))?;
        Ok(Self { socket })
    }

    /// Requests a slice as `take` describes. If the request must wait, `waiting` gets the reason, once.
    ///
    /// # Errors
    /// [`ClientError`]: refused, with the rule and what is free instead, or the broker broke the protocol.
    pub fn take(self, take: &SliceRequest, waiting: impl FnOnce(&str)) -> Result<BrokerLease, ClientError> {
        self.request(&Request::Take(take.clone()))?;
        let mut waiting = Some(waiting);
        loop {
            let (reply, descriptors) = self.receive(&NEVER)?;
            match reply {
                Reply::Waiting(RefusalReply { why, .. }) => {
                    if let Some(waiting) = waiting.take() {
                        waiting(&why);
                    }
                }
                Reply::Granted { slice, offset } => {
                    return BrokerLease::new(self, slice, offset, descriptors);
                }
                Reply::Refused(RefusalReply { why, .. }) => {
                    let step = format!("get slice \"{}\" from the broker", take.name);
                    return Err(ClientError::Refused { step, why, help: TAKE_HELP });
                }
                _ => return Err(ClientError::Unknown { what: "it answers another request" }),
            }
        }
    }

    /// Memory that is available to this user now: bytes in total, and bytes in the largest block.
    ///
    /// # Errors
    /// [`ClientError`]: refused, or the broker has gone or broke the protocol.
    pub fn free(&self) -> Result<(u64, u64), ClientError> {
        self.request(&Request::Free)?;
        match self.receive(&NEVER)?.0 {
            Reply::Free(room) => Ok((room.total, room.largest)),
            Reply::Refused(RefusalReply { why, .. }) => {
                let step = "get the free memory from the broker".to_owned();
                Err(ClientError::Refused { step, why, help: FREE_HELP })
            }
            _ => Err(ClientError::Unknown { what: "it answers another request" }),
        }
    }

    /// Sends `request`, which has a reply: a broker that refused the connection sent the reason before it hung up.
    fn request(&self, request: &Request) -> Result<(), ClientError> {
        match self.send(request) {
            Err(ClientError::Gone(error))
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
            {
                Ok(())
            }
            sent => sent,
        }
    }

    fn send(&self, request: &Request) -> Result<(), ClientError> {
        packet::send(self.socket.as_fd(), &wire::encode(request), &[]).map_err(ClientError::Gone)
    }

    fn receive(&self, cancel: &AtomicBool) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        let mut buffer = [0; MAX_REPLY];
        let received = packet::wait_for(self.socket.as_fd(), &mut buffer, cancel);
        let (length, descriptors) = received.map_err(|error| match error.kind() {
            io::ErrorKind::Interrupted => ClientError::Cancelled,
            _ => ClientError::Gone(error),
        })?;
        match buffer.get(..length) {
            None | Some([]) => Err(ClientError::Gone(io::ErrorKind::UnexpectedEof.into())),
            Some(packet) => {
                let reply = serde_json::from_slice(packet);
                let reply = reply.map_err(|_| ClientError::Unknown { what: "it has another format" })?;
                Ok((reply, descriptors))
            }
        }
    }
}

/// A slice from a broker. It stays granted while this value or this process lives.
#[derive(Debug)]
pub struct BrokerLease {
    client: Client,
    region: Region,
    slice: Slice,
    offset: u64,
    file: File,
}

impl BrokerLease {
    fn new(
        client: Client,
        slice: Slice,
        offset: u64,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Self, ClientError> {
        let Ok([memory, description]) = <[OwnedFd; packet::DESCRIPTORS]>::try_from(descriptors) else {
            return Err(ClientError::Unknown { what: "it has a slice without descriptors" });
        };
        let mut text = Vec::new();
        read_all(&description.into(), &mut text).map_err(ClientError::Gone)?;
        let region = serde_json::from_slice(&text);
        let region = region
            .map_err(|_| ClientError::Unknown { what: "its description of the region has another format" })?;
        Ok(Self { client, region, slice, offset, file: memory.into() })
    }

    /// The region, with all of its retired pages.
    #[must_use]
    pub const fn region(&self) -> &Region {
        &self.region
    }

    /// Offset and size in the region.
    #[must_use]
    pub const fn slice(&self) -> &Slice {
        &self.slice
    }

    /// Its file, which may hold slices of other owners.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Offset of the slice in [`BrokerLease::file`].
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Its memory, checked against the region. It stays granted while the lease or this process lives.
    ///
    /// # Errors
    /// [`ClientError::Backing`]: the broker passed other memory.
    pub fn backing(&self) -> Result<Box<dyn Backing>, ClientError> {
        let file = self.file.try_clone().map_err(ClientError::Gone)?;
        backing::adopt(&self.region, &self.slice, file).map_err(ClientError::Backing)
    }

    /// Reports `bad` bytes of the slice (offsets in the region): no later owner gets them. The broker sends no reply.
    ///
    /// # Errors
    /// [`ClientError::Gone`]: the broker has ended, and has no record of them.
    pub fn retire(&self, bad: &SpanSet<InRegion>) -> Result<(), ClientError> {
        let spans: Vec<_> = bad.iter().map(|span| (span.start().get(), span.size())).collect();
        spans.chunks(MAX_SPANS).try_for_each(|part| {
            let bad = Request::Bad(part.to_vec());
            if egm_address::fault!("bad-bytes-lost") {
                self.client.request(&bad)
            } else {
                self.client.send(&bad)
            }
        })
    }

    /// The connection: a process that inherits it keeps the lease, even when this one has ended.
    #[must_use]
    pub fn connection(&self) -> BorrowedFd<'_> {
        self.client.socket.as_fd()
    }

    /// Returns the slice, which no process may map any more, and waits until it is scrubbed. Without this call, the
    /// slice goes back when this process has ended and no process has the connection.
    ///
    /// # Errors
    /// [`ClientError::Cancelled`] if `cancel` is set, while the broker goes on; another if it refuses or has gone.
    pub fn return_slice(self, cancel: &AtomicBool) -> Result<(), ClientError> {
        self.release().return_slice(cancel)
    }

    /// Closes its memory. The slice stays granted while the returned value or this process lives.
    #[must_use]
    pub fn release(self) -> ReleasedSlice {
        drop(self.file);
        ReleasedSlice { client: self.client }
    }
}

/// A slice from a broker without its memory.
#[derive(Debug)]
pub struct ReleasedSlice {
    client: Client,
}

impl ReleasedSlice {
    /// As [`BrokerLease::return_slice`]. A refused slice can be returned once more.
    ///
    /// # Errors
    /// As there.
    pub fn return_slice(&self, cancel: &AtomicBool) -> Result<(), ClientError> {
        self.client.request(&Request::Return)?;
        match self.client.receive(cancel)?.0 {
            Reply::Returned => Ok(()),
            Reply::Refused(RefusalReply { why, .. }) => {
                let step = "return the slice to the broker".to_owned();
                Err(ClientError::Refused { step, why, help: RETURN_HELP })
            }
            _ => Err(ClientError::Unknown { what: "it answers another request" }),
        }
    }
}

/// Reads the broker's text from offset 0: the descriptor shares its position with the broker.
fn read_all(file: &File, text: &mut Vec<u8>) -> io::Result<()> {
    struct At<'a>(&'a File, u64);
    impl Read for At<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let length = self.0.read_at(buffer, self.1)?;
            self.1 = self.1.saturating_add(u64::try_from(length).map_err(io::Error::other)?);
            Ok(length)
        }
    }
    At(file, 0).take(MAX_REGION).read_to_end(text)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use egm_address::{ByteSize, Offset, Span};
    use rustix::net::{AddressFamily, SocketType, socketpair};

    use super::*;
    use crate::region::RegionKind;
    use crate::retired::Retired;

    /// A lease, and the broker's end of its connection.
    fn lease() -> (BrokerLease, OwnedFd) {
        let (socket, broker) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let region = Region {
            name: "egm4".into(),
            kind: RegionKind::Egm { device: "/dev/egm4".into() },
            node: None,
            size: ByteSize::new(4096),
            page_size: ByteSize::new(4096),
            base: None,
            functions: Vec::new(),
            retired: Retired::default(),
        };
        let slice = Slice { region: "egm4".into(), offset: 0, size: ByteSize::new(4096) };
        let file = tempfile::tempfile().unwrap();
        (BrokerLease { client: Client { socket }, region, slice, offset: 0, file }, broker)
    }

    #[test]
    fn bad_bytes_that_no_broker_records_are_an_error() {
        let (lease, broker) = lease();
        let bad = SpanSet::from_iter([Span::new(Offset::new(0), 4096).unwrap()]);
        lease.retire(&bad).unwrap();
        drop(broker);
        assert!(matches!(lease.retire(&bad), Err(ClientError::Gone(_))));
    }

    /// A broker may scrub for minutes: a client that must stop does not wait for it.
    #[test]
    fn a_client_that_returns_a_slice_may_end_before_the_scrub() {
        let (lease, broker) = lease();
        assert!(matches!(lease.return_slice(&AtomicBool::new(true)), Err(ClientError::Cancelled)));
        let mut sent = [0; 64];
        assert!(matches!(
            packet::receive(broker.as_fd(), &mut sent).unwrap(),
            packet::Packet::Whole(b"\"return\"")
        ));
    }
}
