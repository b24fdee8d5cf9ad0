//! Many connections between one guest and Unix sockets of the host.
//!
//! ```text
//!  guest's tx queue ──► transmit() ──► connection ──► socket, or what it does not take: backlog
//!  sockets (epoll)  ──► poll()     ──► queue of slots that have something for the guest
//!  guest's rx queue ◄── receive()  ◄── resets first, then those slots in turn; payload is read into guest memory
//! ```
//! Bounds, whatever guest and host do: [`Handshakes`] limits host programs in a handshake; [`MAX_CONNECTIONS`] slots have
//! at most [`BUFFER`](super::connection::BUFFER) bytes of backlog each; a slot is queued once; with [`MAX_RESETS`]
//! unsent resets nothing is taken from the guest until it takes some (virtio 1.3 §5.10.6.3). No socket operation waits.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::Pause;
use super::connection::{Connection, Event, Violation};
use super::handshakes::Handshakes;
use super::host::{self, Handshake, HandshakeState, HostSockets};
use super::packet::{HEADER, Key, Op, Outgoing, Packet, Refusal};
use super::slot::{Phase, Slot, read_packet};
use crate::virtio::ring::{self, Chain, Ring};

/// Most connections at a time, those in a handshake included.
pub(super) const MAX_CONNECTIONS: usize = 1024;
/// Resets that may wait before the guest must take some.
const MAX_RESETS: usize = 256;
/// Chains or sockets that one event looks at.
const BUDGET: usize = 64;
/// Ports that the host's side of its own connections takes: above those that programs choose.
const FIRST_PORT: u32 = 1 << 30;

/// The listening socket's name in the epoll set; others are slot numbers.
const LISTENER: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

/// The sockets of one device and what is between them and the guest.
pub(super) struct Muxer {
    pub(super) sockets: HostSockets,
    epoll: Epoll,
    guest_cid: u32,
    slots: Vec<Option<Slot>>,
    by_key: HashMap<Key, usize>,
    /// Slots that have something for the guest, each once.
    ready: VecDeque<usize>,
    resets: VecDeque<Key>,
    next_port: u32,
    handshakes: Handshakes,
    /// Not all host programs that connected were looked at.
    more_clients: bool,
}

impl Muxer {
    pub(super) fn new(mut sockets: HostSockets, guest_cid: u32) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let handshakes = Handshakes::new()?;
        for (fd, token) in [(sockets.listener().as_raw_fd(), LISTENER), (handshakes.as_raw_fd(), TIMER)] {
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, token);
            epoll.ctl(ControlOperation::Add, fd, event)?;
        }
        Ok(Self {
            sockets,
            epoll,
            guest_cid,
            slots: Vec::new(),
            by_key: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            next_port: FIRST_PORT,
            handshakes,
            more_clients: false,
        })
    }

    /// Readable while a socket has an event.
    pub(super) fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Drops every connection, as a reset of the device does.
    pub(super) fn clear(&mut self) {
        self.slots.clear();
        self.by_key.clear();
        self.ready.clear();
        self.resets.clear();
        self.handshakes.clear();
    }

    /// Handles sockets with events; returns whether there may be more. Closed descriptors leave the epoll set by
    /// themselves, and an event of a slot that has another socket by now only costs a look in vain.
    pub(super) fn poll(&mut self) -> bool {
        if self.more_clients {
            self.accept();
        }
        let mut events = [EpollEvent::default(); BUDGET];
        let count = self.epoll.wait(0, &mut events).unwrap_or(0);
        for event in events.iter().take(count) {
            match event.data() {
                LISTENER => self.accept(),
                TIMER => self.expire(Instant::now()),
                number => self.news(usize::try_from(number).unwrap_or(usize::MAX), event.event_set()),
            }
        }
        count == BUDGET || self.more_clients
    }

    fn news(&mut self, number: usize, set: EventSet) {
        let ended = EventSet::ERROR | EventSet::HANG_UP;
        if set.intersects(EventSet::OUT | ended) {
            self.flush(number);
        }
        if set.intersects(EventSet::IN | EventSet::READ_HANG_UP | ended) {
            self.readable(number);
        }
        // A guest that never answers would keep the slot of a host program that gave up.
        if let Some(Some(slot)) = self.slots.get(number)
            && set.intersects(ended)
            && slot.is_abandoned()
        {
            self.remove(number, !slot.has_data_for_guest()); // no reset for a request that it has not received
        }
    }

    /// Takes host programs that connected; those beyond the limit see their stream end.
    fn accept(&mut self) {
        let now = Instant::now();
        let mut taken = 0..BUDGET;
        while let Some(client) = taken.next().and_then(|_| self.sockets.listener().accept().ok()) {
            let insert = |stream| self.insert(stream, Phase::Handshake(Handshake::default()));
            if let Some(number) = client.and_then(insert) {
                self.handshakes.begin(number, now);
            }
        }
        self.more_clients = taken.is_empty();
        self.expire(now);
    }

    fn expire(&mut self, now: Instant) {
        while let Some(number) = self.handshakes.overdue(now) {
            self.remove(number, false);
        }
    }

    /// Finds a slot; `None` when there is none, and then the stream ends.
    fn insert(&mut self, stream: UnixStream, phase: Phase) -> Option<usize> {
        let number = match self.slots.iter().position(Option::is_none) {
            Some(number) => number,
            None if self.slots.len() < MAX_CONNECTIONS || egm_address::fault!("vsock-slots-unbounded") => {
                self.slots.push(None);
                self.slots.len().saturating_sub(1)
            }
            None => return None,
        };
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        let event = EpollEvent::new(events, number as u64);
        self.epoll.ctl(ControlOperation::Add, stream.as_raw_fd(), event).ok()?;
        if let Phase::Connected(key, _) = &phase {
            self.by_key.insert(*key, number);
        }
        *self.slots.get_mut(number)? = Some(Slot::new(stream, phase));
        self.enqueue(number);
        Some(number)
    }

    /// Ends a connection, with a reset to the guest unless the guest has ended it or never received it.
    fn remove(&mut self, number: usize, tell: bool) {
        let Some(slot) = self.slots.get_mut(number).and_then(Option::take) else { return };
        self.handshakes.end(number);
        if slot.queued {
            self.ready.retain(|queued| *queued != number);
        }
        if let Phase::Connected(key, _) = slot.phase {
            self.by_key.remove(&key);
            self.resets.extend(tell.then_some(key));
        }
    }

    fn connection(&mut self, number: usize) -> Option<(&mut Slot, Key)> {
        let slot = self.slots.get_mut(number)?.as_mut()?;
        let Phase::Connected(key, _) = slot.phase else { return None };
        Some((slot, key))
    }

    /// Queues a slot that has something for the guest.
    fn enqueue(&mut self, number: usize) {
        if let Some(Some(slot)) = self.slots.get_mut(number)
            && !slot.queued
            && slot.has_data_for_guest()
        {
            slot.queued = true;
            self.ready.push_back(number);
        }
    }

    fn readable(&mut self, number: usize) {
        let Some(Some(slot)) = self.slots.get_mut(number) else { return };
        slot.readable = true;
        if matches!(slot.phase, Phase::Handshake(_)) {
            self.handshake(number);
        } else {
            self.enqueue(number);
        }
    }

    fn handshake(&mut self, number: usize) {
        let Some(Some(slot)) = self.slots.get_mut(number) else { return };
        let port = match slot.handshake() {
            HandshakeState::Incomplete => return,
            HandshakeState::Nonsense => return self.remove(number, false),
            HandshakeState::Port(port) => port,
        };
        self.handshakes.end(number);
        let key = self.free_key(port);
        self.by_key.insert(key, number);
        if let Some(Some(slot)) = self.slots.get_mut(number) {
            slot.phase = Phase::Connected(key, Connection::from_host());
        }
        self.enqueue(number);
    }

    /// A name that no connection has. There are more ports than slots, so this ends.
    fn free_key(&mut self, guest_port: u32) -> Key {
        loop {
            let key = Key { guest_port, host_port: self.next_port };
            self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_PORT);
            if !self.by_key.contains_key(&key) {
                return key;
            }
        }
    }

    /// Gives the socket what it did not take before.
    fn flush(&mut self, number: usize) {
        let Some((slot, _)) = self.connection(number) else { return };
        match slot.write_backlog() {
            Ok(()) => self.settle(number),
            Err(_) => self.remove(number, true),
        }
    }

    /// After something changed: passes on the end of a direction, or of the connection.
    fn settle(&mut self, number: usize) {
        let Some((slot, _)) = self.connection(number) else { return };
        let Phase::Connected(_, connection) = &slot.phase else { return };
        if slot.backlog.is_empty() {
            if connection.over() {
                return self.remove(number, true);
            }
            if !connection.guest_sends() {
                let _ = slot.stream.shutdown(Shutdown::Write); // ended already
            }
        }
        if !connection.guest_receives() {
            let _ = slot.stream.shutdown(Shutdown::Read); // ended already
        }
        self.enqueue(number);
    }

    /// Whether a packet of the guest can be answered.
    pub(super) fn answers(&self) -> bool {
        self.resets.len() < MAX_RESETS
    }

    /// Takes packets of the guest.
    pub(super) fn transmit(&mut self, ring: &mut Ring) -> Pause {
        ring.disarm();
        for _ in 0..BUDGET {
            if !self.answers() {
                return Pause::Resets;
            }
            match ring.pop() {
                None if ring.arm() => {}
                None => return Pause::Event,
                Some(Err(ring::Malformed)) => {}
                Some(Ok(chain)) => match read_packet(ring, &chain, self.guest_cid) {
                    Ok(packet) => {
                        self.packet(&packet, ring, &chain);
                        ring.complete(chain.head, 0);
                    }
                    Err(refusal) => {
                        if let Refusal::Reset(key) = refusal {
                            self.reset(key);
                        }
                        ring.refuse(chain.head);
                    }
                },
            }
        }
        Pause::Budget
    }

    /// Answers a packet by a reset, which ends its connection if there is one.
    fn reset(&mut self, key: Key) {
        match self.by_key.get(&key) {
            Some(number) => self.remove(*number, true),
            None => self.resets.push_back(key),
        }
    }

    fn packet(&mut self, packet: &Packet, ring: &Ring, chain: &Chain) {
        let Some(&number) = self.by_key.get(&packet.key) else {
            return match packet.op {
                Op::Reset => {}
                Op::Request => self.request(packet),
                _ => self.reset(packet.key),
            };
        };
        let Some(Some(slot)) = self.slots.get_mut(number) else { return };
        let Phase::Connected(key, connection) = &mut slot.phase else { return };
        match connection.receive(packet) {
            Err(Violation) => self.remove(number, true),
            Ok(Event::Closed) => self.remove(number, false),
            Ok(Event::None) => self.enqueue(number),
            Ok(Event::Shutdown) => self.settle(number),
            Ok(Event::Connected) => {
                // The socket is fresh, so its buffer takes a line; if it does not, the host program is gone.
                match slot.stream.write_all(host::accepted(key.host_port).as_bytes()) {
                    Ok(()) => self.enqueue(number),
                    Err(_) => self.remove(number, true),
                }
            }
            Ok(Event::Data) => match slot.deliver(packet.length, ring, chain) {
                Ok(()) => self.enqueue(number),
                Err(_) => self.remove(number, true),
            },
        }
    }

    fn request(&mut self, packet: &Packet) {
        let phase = Phase::Connected(packet.key, Connection::from_guest(packet));
        let slot =
            self.sockets.connect(packet.key.host_port).ok().and_then(|stream| self.insert(stream, phase));
        if slot.is_none() {
            self.resets.push_back(packet.key);
        }
    }

    /// Fills receive buffers of the driver.
    pub(super) fn receive(&mut self, ring: &mut Ring) -> Pause {
        ring.disarm();
        for _ in 0..BUDGET {
            if self.resets.is_empty() && self.ready.is_empty() {
                return Pause::Event;
            }
            match ring.pop() {
                None if ring.arm() => {}
                None => return Pause::Event,
                Some(Err(ring::Malformed)) => {}
                // Every buffer must hold some payload, or a connection that has some would wait for ever.
                Some(Ok(chain))
                    if !chain.readable.is_empty() || ring::total(&chain.writable) <= HEADER as u64 =>
                {
                    ring.refuse(chain.head);
                }
                Some(Ok(chain)) => match self.fill(ring, &chain) {
                    Some(written) => ring.complete(chain.head, written),
                    None => ring.unpop(1),
                },
            }
        }
        Pause::Budget
    }

    /// Puts the next packet for the guest into a chain; returns its bytes, or `None` when there is no packet.
    fn fill(&mut self, ring: &Ring, chain: &Chain) -> Option<u32> {
        let (key, packet) = match self.resets.pop_front() {
            Some(key) => (key, Outgoing::RESET),
            None => self.next_packet(ring, chain)?,
        };
        let header = packet.header(key, self.guest_cid);
        ring::write(ring.memory(), &chain.writable, 0, &header);
        u32::try_from(HEADER).ok()?.checked_add(packet.length)
    }

    fn next_packet(&mut self, ring: &Ring, chain: &Chain) -> Option<(Key, Outgoing)> {
        while let Some(number) = self.ready.pop_front() {
            let Some((slot, key)) = self.connection(number) else { continue };
            slot.queued = false;
            match slot.packet(ring, chain) {
                Ok(packet) => {
                    self.settle(number);
                    if let Some(packet) = packet {
                        return Some((key, packet));
                    }
                }
                Err(_) => {
                    self.remove(number, false);
                    return Some((key, Outgoing::RESET));
                }
            }
        }
        None
    }
}
