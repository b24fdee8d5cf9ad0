//! One device at its socket: one client at a time, each on a thread of its own, so that no other client waits for it.

use std::error::Error;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use egm_vfio_wire::receiver;
use egm_vfio_wire::serve::{Served, serve, turn_away};
use egm_vfio_wire::socket::{Broken, BusyPoll, Connection};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::device::Function;

/// Time limit for the rest of a message.
const LIMIT: Duration = Duration::from_secs(5);
/// Time that a new client waits for its predecessor to leave, and the server for a refused client's message.
const CHANGE: Duration = Duration::from_secs(1);
/// Most refused clients that wait for an answer; the connection of a further one ends without one.
const REFUSED: usize = 16;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// After a connection that could not be taken: there are no descriptors, and there will not be at once.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Time to poll for a request before sleeping for it.
const LOOK: Duration = Duration::from_micros(50);

/// A device, its socket, and its current client.
pub struct DeviceServer {
    name: String,
    function: Function,
    listener: UnixListener,
    /// Whether clients must be root: they receive the file of the whole region.
    root_only: bool,
    /// Readable when no more clients are to be taken.
    stop: OwnedFd,
    slot: Mutex<ClientSlot>,
    /// Notified when the client has left.
    left: Condvar,
}

/// Reason that a client is refused.
#[derive(Debug, thiserror::Error)]
enum ClientRefusal {
    #[error(
        "refused user {user}: all slices of the region are one file; run the monitor as root, or set \"whole_device\": true \
         for the device"
    )]
    Region { user: u32 },
    #[error(
        "refused user {user}: the slice has bytes of user {bound}, and that user may still map it; restart the server, which scrubs it"
    )]
    Bound { user: u32, bound: u32 },
    #[error("refused a client without a user")]
    Unknown,
}

#[derive(Default)]
struct ClientSlot {
    client: Option<OwnedFd>,
    /// Clients that broke something.
    broken: u64,
    /// Clients of users without a right to the slice.
    refused: u64,
    /// The user of the first client: only this user's clients may have the slice.
    user: Option<u32>,
}

impl DeviceServer {
    /// `function` at `listener`, called `name`; with `root_only`, other users' clients are refused.
    ///
    /// # Errors
    /// The kernel's, for a descriptor.
    pub fn new(name: &str, function: Function, listener: UnixListener, root_only: bool) -> io::Result<Self> {
        // A client that goes away between poll(2) and accept(2) must not stop us.
        listener.set_nonblocking(true)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (slot, left) = (Mutex::default(), Condvar::new());
        Ok(Self { name: name.to_owned(), function, listener, root_only, stop, slot, left })
    }

    /// The device's name for operators.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The PCI function that clients get.
    #[must_use]
    pub const fn function(&self) -> &Function {
        &self.function
    }

    /// Takes clients until [`DeviceServer::stop`]; returns when the last has left.
    pub fn run(&self) {
        thread::scope(|scope| {
            let (refused, queue) = sync_channel(REFUSED);
            // A refused client may send nothing: another thread waits for it, so that no permitted client does.
            let refuser = thread::Builder::new().name("refusals".to_owned());
            // Without the thread every refused connection ends without an answer.
            let _ = refuser.spawn_scoped(scope, move || self.answer_refused(&queue));
            while self.wait(None) {
                if receiver::is_full() {
                    // Clients wait in the queue of the socket until a receiver ends.
                    self.wait(Some(&PAUSE));
                    continue;
                }
                let Ok((socket, _)) = self.listener.accept() else {
                    // No client any more, or no descriptors: then a client has to wait for a while longer.
                    self.wait(Some(&PAUSE));
                    continue;
                };
                let Ok(connection) = Connection::new(socket.into(), LIMIT, BusyPoll::of(LOOK)) else {
                    continue;
                };
                if let Err(why) = self.admit(&connection) {
                    if egm_address::fault!("refused-client-awaited") {
                        turn_away(connection, why, CHANGE);
                        continue;
                    }
                    // Where the queue is full, the connection ends here.
                    drop(refused.try_send((connection, why)));
                    continue;
                }
                let client = move || self.leave(self.serve(connection));
                if let Err(error) = thread::Builder::new().name(self.name.clone()).spawn_scoped(scope, client)
                {
                    self.leave(Err(Served::Broken(Broken::from(error))));
                }
            }
            drop(refused);
            self.close();
        });
    }

    fn answer_refused(&self, queue: &Receiver<(Connection, Errno)>) {
        for (connection, why) in queue {
            if self.wait(Some(&NOW)) {
                turn_away(connection, why, CHANGE);
            }
        }
    }

    fn serve(&self, mut connection: Connection) -> Result<(), Served> {
        let socket = connection.as_fd().try_clone_to_owned().map_err(Broken::from)?;
        let mut device = self.function.connect().over(socket);
        serve(&mut connection, &mut device)
    }

    /// Admits the client of `connection`, or returns the errno of the refusal.
    fn admit(&self, connection: &Connection) -> Result<(), Errno> {
        let user = self.permit(connection).map_err(|_| Errno::ACCESS)?;
        if self.occupy(connection, user) { Ok(()) } else { Err(Errno::BUSY) }
    }

    /// Waits for a client, or for `time` at most; false when it is time to stop.
    fn wait(&self, time: Option<&Timespec>) -> bool {
        let listener = PollFd::new(&self.listener, PollFlags::IN);
        let mut all = [PollFd::new(&self.stop, PollFlags::IN), listener];
        let wanted = if time.is_some() { &mut all[..1] } else { &mut all[..] };
        // Interrupted, or out of memory: look again.
        let _ = poll(wanted, time);
        all[0].revents().is_empty()
    }

    /// The user of the client, as the kernel reports it, if this user may use the device.
    fn permit(&self, socket: &Connection) -> Result<u32, ClientRefusal> {
        let peer = rustix::net::sockopt::socket_peercred(socket).map(|peer| peer.uid.as_raw());
        let mut slot = self.slot();
        let refusal = match peer {
            Ok(user) if self.root_only && user != 0 && !egm_address::fault!("region-file-for-all") => {
                ClientRefusal::Region { user }
            }
            Ok(user) => match slot
                .user
                .filter(|bound| *bound != user && !egm_address::fault!("slice-of-another-user"))
            {
                None => return Ok(user),
                Some(bound) => ClientRefusal::Bound { user, bound },
            },
            Err(_) => ClientRefusal::Unknown,
        };
        slot.refused = slot.refused.saturating_add(1);
        let count = slot.refused;
        drop(slot);
        if count.is_power_of_two() {
            tracing::info!("device {}: {refusal} ({count} refused so far)", self.name);
        }
        Err(refusal)
    }

    /// Makes this client the only one if the previous client leaves in time.
    fn occupy(&self, socket: &Connection, user: u32) -> bool {
        let slot = self.slot();
        let waited = self.left.wait_timeout_while(slot, CHANGE, |slot| slot.client.is_some());
        let mut slot = waited.unwrap_or_else(PoisonError::into_inner).0;
        let free = slot.client.is_none();
        if free {
            slot.client = socket.as_fd().try_clone_to_owned().ok();
            // A descriptor or a mapping of the slice cannot be taken back: no other user's bytes may come into it.
            slot.user = Some(user);
        }
        free && slot.client.is_some()
    }

    fn leave(&self, outcome: Result<(), Served>) {
        let mut slot = self.slot();
        slot.client = None;
        let logged = outcome.err().and_then(|error| {
            slot.broken = slot.broken.saturating_add(1);
            // A client may reconnect any number of times: the log grows with the logarithm of their number.
            slot.broken.is_power_of_two().then_some((error, slot.broken))
        });
        drop(slot);
        self.left.notify_all();
        if let Some((error, count)) = logged {
            let causes = std::iter::successors(error.source(), |cause| <dyn Error>::source(*cause));
            let text = causes.fold(error.to_string(), |all, cause| format!("{all}: {cause}"));
            tracing::info!("device {}: {text} ({count} clients so far that ended so)", self.name);
        }
    }

    fn slot(&self) -> MutexGuard<'_, ClientSlot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.function.close();
        // The client may leave on its own in the meantime.
        let end =
            |slot: &ClientSlot, how| slot.client.as_ref().map(|client| rustix::net::shutdown(client, how));
        let slot = self.slot();
        // Requests read so far are answered, and none stays unread: the client would get that as an error, and QEMU
        // (11.1.3) aborts then.
        end(&slot, Shutdown::Read);
        let waited = self.left.wait_timeout_while(slot, CHANGE, |slot| slot.client.is_some());
        end(&waited.unwrap_or_else(PoisonError::into_inner).0, Shutdown::Both);
    }

    /// Takes no more clients, and ends the one that is there.
    pub fn stop(&self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        self.close();
    }
}
