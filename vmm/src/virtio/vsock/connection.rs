//! One stream connection between guest and host, without sockets: what may be sent, and what a packet means.
//!
//! ```text
//!  guest asks:  Request ──► [Open] Response ──►
//!  host asks:   ──► Request [Asked] Response ──► [Open]
//!  either way:  [Open] Data, CreditUpdate, CreditRequest, Shutdown; both directions shut, or Reset: gone
//! ```
//! All counters are modulo 2^32, as on the wire. Whatever the guest sends, the host holds at most [`BUFFER`] bytes for
//! it, and anything out of order is a [`Violation`], which ends the connection.

use super::packet::Credit;
use super::packet::NO_RECEIVE;
use super::packet::NO_SEND;
use super::packet::Op;
use super::packet::Outgoing;
use super::packet::Packet;

/// Bytes that the host buffers for a connection.
pub(super) const BUFFER: u32 = 256 << 10;
/// Growth of the buffer's room, in bytes, at which the guest gets a credit update.
const ANNOUNCE: u32 = BUFFER / 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionState {
    /// The host asked; the guest has not answered.
    Asked,
    Open,
}

/// Effect of a guest's packet on the host's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    None,
    /// The guest accepted what the host asked.
    Connected,
    /// Bytes for the host.
    Data,
    /// A direction ended: see [`Connection::guest_sends`] and [`Connection::guest_receives`].
    Shutdown,
    /// The guest dropped the connection.
    Closed,
}

/// The guest broke the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Violation;

/// Control packets that wait to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Pending {
    open: Option<Op>,
    credit_update: bool,
    credit_request: bool,
    shutdown: bool,
}

/// State of a connection; see the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Connection {
    state: ConnectionState,
    guest: Credit,
    /// Bytes sent to the guest.
    sent: u32,
    /// Bytes received from the guest.
    received: u32,
    /// Of these, bytes that the host's socket took.
    forwarded: u32,
    /// `forwarded` as last reported to the guest.
    announced: u32,
    /// The guest was asked for credit and has not given any.
    asked_for_credit: bool,
    /// `NO_SEND` and `NO_RECEIVE` of the guest.
    guest_shut: u32,
    /// The host sends no more.
    host_shut: bool,
    pending: Pending,
}

impl Connection {
    fn new(state: ConnectionState, guest: Credit, open: Op) -> Self {
        Self {
            state,
            guest,
            sent: 0,
            received: 0,
            forwarded: 0,
            announced: 0,
            asked_for_credit: false,
            guest_shut: 0,
            host_shut: false,
            pending: Pending { open: Some(open), ..Pending::default() },
        }
    }

    /// The guest asked, and the host accepted.
    pub(super) fn from_guest(request: &Packet) -> Self {
        Self::new(ConnectionState::Open, request.credit, Op::Response)
    }

    pub(super) fn from_host() -> Self {
        Self::new(ConnectionState::Asked, Credit::default(), Op::Request)
    }

    /// Whether the guest has yet to answer the host.
    pub(super) fn is_asked(&self) -> bool {
        self.state == ConnectionState::Asked
    }

    /// Takes a packet of the guest. With [`Event::Data`], its payload has a place in the buffer.
    pub(super) fn receive(&mut self, packet: &Packet) -> Result<Event, Violation> {
        self.guest = packet.credit;
        if self.credit() > 0 {
            self.asked_for_credit = false;
        }
        match (self.state, packet.op) {
            (_, Op::Reset) => Ok(Event::Closed),
            (ConnectionState::Asked, Op::Response) => {
                self.state = ConnectionState::Open;
                Ok(Event::Connected)
            }
            (ConnectionState::Open, Op::Data) if self.guest_sends() && packet.length <= self.room() => {
                self.received = self.received.wrapping_add(packet.length);
                Ok(Event::Data)
            }
            (ConnectionState::Open, Op::CreditUpdate) => Ok(Event::None),
            (ConnectionState::Open, Op::CreditRequest) => {
                self.pending.credit_update = true;
                Ok(Event::None)
            }
            (ConnectionState::Open, Op::Shutdown) => {
                self.guest_shut |= packet.flags & (NO_SEND | NO_RECEIVE);
                Ok(Event::Shutdown)
            }
            _ => Err(Violation),
        }
    }

    /// Bytes that the host holds for its socket.
    fn held(&self) -> u32 {
        self.received.wrapping_sub(self.forwarded)
    }

    fn room(&self) -> u32 {
        let beyond = u32::from(egm_address::fault!("vsock-buffer-a-byte-more"));
        BUFFER.saturating_add(beyond).saturating_sub(self.held())
    }

    /// The host's socket took `bytes` of what was held.
    pub(super) fn forward(&mut self, bytes: u32) {
        self.forwarded = self.forwarded.wrapping_add(bytes.min(self.held()));
        if self.guest_sends() && self.forwarded.wrapping_sub(self.announced) >= ANNOUNCE {
            self.pending.credit_update = true;
        }
    }

    /// Bytes that the guest has room for; 0 when it contradicts itself.
    fn credit(&self) -> u32 {
        let over = u32::from(egm_address::fault!("vsock-credit-wrong"));
        self.guest.buffer.saturating_add(over).saturating_sub(self.sent.wrapping_sub(self.guest.forwarded))
    }

    /// Whether the guest still sends.
    pub(super) fn guest_sends(&self) -> bool {
        self.guest_shut & NO_SEND == 0
    }

    /// Whether the guest still receives.
    pub(super) fn guest_receives(&self) -> bool {
        self.guest_shut & NO_RECEIVE == 0
    }

    /// Whether bytes of the host's socket can go to the guest at all, now or when it has credit.
    fn carries_to_guest(&self) -> bool {
        self.state == ConnectionState::Open && !self.host_shut && self.guest_receives()
    }

    /// Whether nothing can pass in either direction, apart from what is held for the host.
    pub(super) fn over(&self) -> bool {
        !self.guest_sends() && (self.host_shut || !self.guest_receives())
    }

    /// Whether bytes of the host's socket would lead to a packet now: to data, or to a request for credit.
    pub(super) fn may_send(&self) -> bool {
        self.carries_to_guest() && (self.credit() > 0 || !self.asked_for_credit)
    }

    /// Bytes of the host's socket that may be sent now. With none, asks the guest for credit, once.
    pub(super) fn allowance(&mut self) -> u32 {
        if !self.carries_to_guest() {
            return 0;
        }
        let credit = self.credit();
        if credit == 0 && !self.asked_for_credit {
            self.asked_for_credit = true;
            self.pending.credit_request = true;
        }
        credit
    }

    /// The host's socket ended.
    pub(super) fn shut_host(&mut self) {
        if !self.host_shut {
            self.host_shut = true;
            self.pending.shutdown = true;
        }
    }

    /// Whether [`Connection::control`] has something.
    pub(super) fn has_control(&self) -> bool {
        self.pending != Pending::default()
    }

    /// Takes the next control packet.
    pub(super) fn control(&mut self) -> Option<Outgoing> {
        let (op, flags) = if let Some(op) = self.pending.open.take() {
            (op, 0)
        } else if std::mem::take(&mut self.pending.credit_update) {
            (Op::CreditUpdate, 0)
        } else if std::mem::take(&mut self.pending.credit_request) {
            (Op::CreditRequest, 0)
        } else if std::mem::take(&mut self.pending.shutdown) {
            (Op::Shutdown, NO_SEND)
        } else {
            return None;
        };
        Some(self.outgoing(op, 0, flags))
    }

    /// A packet with `length` bytes of payload, at most [`Connection::allowance`].
    pub(super) fn data(&mut self, length: u32) -> Outgoing {
        self.sent = self.sent.wrapping_add(length);
        self.outgoing(Op::Data, length, 0)
    }

    fn outgoing(&mut self, op: Op, length: u32, flags: u32) -> Outgoing {
        self.announced = self.forwarded;
        self.pending.credit_update = false; // every header carries it
        Outgoing { op, length, flags, credit: Credit { buffer: BUFFER, forwarded: self.forwarded } }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::packet::Key;
    use super::*;

    fn packet(op: Op, length: u32) -> Packet {
        let credit = Credit { buffer: 1000, forwarded: 0 };
        Packet { key: Key { guest_port: 1, host_port: 2 }, op, length, flags: 0, credit }
    }

    fn open() -> Connection {
        let mut connection = Connection::from_guest(&packet(Op::Request, 0));
        assert_eq!(connection.control().unwrap().op, Op::Response);
        connection
    }

    #[test]
    fn the_host_asks_and_may_send_once_the_guest_answers() {
        let mut connection = Connection::from_host();
        assert_eq!(connection.control().unwrap().op, Op::Request);
        assert_eq!(connection.allowance(), 0);
        assert!(!connection.has_control());
        assert_eq!(connection.receive(&packet(Op::Response, 0)), Ok(Event::Connected));
        assert_eq!(connection.allowance(), 1000);
        assert_eq!(connection.receive(&packet(Op::Response, 0)), Err(Violation));
    }

    #[test]
    fn data_before_the_answer_is_a_violation() {
        assert_eq!(Connection::from_host().receive(&packet(Op::Data, 1)), Err(Violation));
    }

    #[test]
    fn the_guest_may_fill_the_buffer_and_no_more() {
        let mut connection = open();
        assert_eq!(connection.receive(&packet(Op::Data, BUFFER)), Ok(Event::Data));
        assert_eq!(connection.receive(&packet(Op::Data, 0)), Ok(Event::Data));
        assert_eq!(connection.clone().receive(&packet(Op::Data, 1)), Err(Violation));
        connection.forward(1);
        assert_eq!(connection.receive(&packet(Op::Data, 1)), Ok(Event::Data));
    }

    #[test]
    fn the_guest_gets_an_update_of_room_when_a_quarter_was_forwarded() {
        let mut connection = open();
        connection.receive(&packet(Op::Data, BUFFER)).unwrap();
        connection.forward(ANNOUNCE - 1);
        assert!(!connection.has_control());
        connection.forward(1);
        let update = connection.control().unwrap();
        assert_eq!((update.op, update.credit.forwarded), (Op::CreditUpdate, ANNOUNCE));
        assert!(!connection.has_control());
    }

    #[test]
    fn without_credit_the_guest_is_asked_once_until_it_gives_some() {
        let mut connection = open();
        assert_eq!(connection.allowance(), 1000);
        connection.data(1000);
        assert_eq!(connection.allowance(), 0);
        assert_eq!(connection.control().unwrap().op, Op::CreditRequest);
        assert_eq!(connection.allowance(), 0);
        assert!(!connection.has_control());
        let mut update = packet(Op::CreditUpdate, 0);
        update.credit.forwarded = 600;
        connection.receive(&update).unwrap();
        assert_eq!(connection.allowance(), 600);
    }

    #[test]
    fn a_guest_that_took_more_than_was_sent_gets_nothing() {
        let mut connection = open();
        let mut update = packet(Op::CreditUpdate, 0);
        update.credit.forwarded = 1;
        connection.receive(&update).unwrap();
        assert_eq!(connection.allowance(), 0);
    }

    #[test]
    fn each_direction_ends_by_itself_and_the_connection_with_both() {
        let mut connection = open();
        connection.shut_host();
        let shutdown = connection.control().unwrap();
        assert_eq!((shutdown.op, shutdown.flags), (Op::Shutdown, NO_SEND));
        assert!(!connection.over());
        assert_eq!(connection.receive(&packet(Op::Data, 1)), Ok(Event::Data));
        connection.receive(&Packet { flags: NO_SEND, ..packet(Op::Shutdown, 0) }).unwrap();
        assert!(connection.over());
        assert_eq!(connection.receive(&packet(Op::Data, 1)), Err(Violation));
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop::sample::select(vec![
            Op::Request,
            Op::Response,
            Op::Reset,
            Op::Shutdown,
            Op::Data,
            Op::CreditUpdate,
            Op::CreditRequest,
        ])
    }

    proptest! {
        #[test]
        fn in_any_order_of_packets_no_more_is_held_than_the_buffer_and_no_more_sent_than_the_credit(
            from_host in any::<bool>(),
            steps in prop::collection::vec(
                (any_op(), any::<u32>(), any::<u32>(), 0..0x8_0000u32, any::<u32>(), 0..0x8_0000u32), 0..60),
        ) {
            let mut connection = if from_host { Connection::from_host() } else { open() };
            for (op, flags, buffer, length, forwarded, taken) in steps {
                let credit = Credit { buffer, forwarded };
                let packet = Packet { op, flags, length, credit, ..packet(op, 0) };
                match connection.receive(&packet) {
                    Ok(Event::Closed) | Err(Violation) => break,
                    Ok(_) => {}
                }
                prop_assert!(connection.held() <= BUFFER);
                connection.forward(taken);
                prop_assert!(connection.held() <= BUFFER);
                let allowance = connection.allowance();
                prop_assert!(allowance <= buffer);
                connection.data(allowance);
                prop_assert!(allowance == 0 || connection.credit() == 0);
                for _ in 0..5 {
                    connection.control();
                }
                prop_assert!(!connection.has_control());
            }
        }
    }
}
