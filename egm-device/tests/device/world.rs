//! A device at a socket, in this process.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use egm_address::{BarOffset, InBar, Span, SpanSet};
use egm_device::Anonymous;
use egm_device::device::config::Id;
use egm_device::device::core::Facts;
use egm_device::device::registers::Register;
use egm_device::device::{Function, ScrubEnd, Setup};
use egm_device::serve::DeviceServer;
use egm_vfio_wire::client::Client;
use egm_vfio_wire::message::{IrqAction, IrqData, SetIrqs};
use egm_vfio_wire::socket::{BusyPoll, Connection};
use rustix::event::{EventfdFlags, eventfd};
use tempfile::TempDir;

pub(crate) const BAR0: u32 = 0;
pub(crate) const BAR2: u32 = 2;
pub(crate) const CONFIG: u32 = 7;
pub(crate) const MSIX: u32 = 2;
pub(crate) const ERROR: u32 = 3;
pub(crate) const REQUEST: u32 = 4;
/// Bytes of the slice: no power of two.
pub(crate) const SIZE: u64 = 0x30_0000;
/// Bytes in front of the slice in its file.
pub(crate) const BASE: u64 = 0x10_0000;
/// Time enough for any machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) const SET: SetIrqs<'_> =
    SetIrqs { index: MSIX, start: 0, count: 3, action: IrqAction::Trigger, data: IrqData::Eventfd };

pub(crate) fn spans(spans: &[(u64, u64)]) -> SpanSet<InBar> {
    spans.iter().map(|(start, size)| Span::new(BarOffset::new(*start), *size).unwrap()).collect()
}

pub(crate) fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

pub(crate) fn fired(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]).is_ok()
}

/// A window of a file, as a slice of a region is.
struct Window(Anonymous);

impl egm_device::Backing for Window {
    fn file(&self) -> &std::fs::File {
        self.0.file()
    }
    fn offset(&self) -> u64 {
        BASE
    }
    fn size(&self) -> u64 {
        SIZE
    }
    fn page_size(&self) -> u64 {
        0x1000
    }
    fn is_invisible(&self) -> bool {
        false
    }
    fn outlives_power(&self) -> bool {
        false
    }
}

pub(crate) struct World {
    pub(crate) path: PathBuf,
    pub(crate) function: Function,
    pub(crate) server: Arc<DeviceServer>,
    thread: Option<JoinHandle<()>>,
    _folder: TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        self.server.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(ended.is_some_and(|ended| ended.is_ok()), "the server panicked");
    }
}

impl World {
    /// A device with the bad pages `retired`.
    pub(crate) fn new(retired: &[(u64, u64)]) -> Self {
        Self::with(retired, false)
    }

    pub(crate) fn with(retired: &[(u64, u64)], scrub_at_reset: bool) -> Self {
        Self::watching(retired, scrub_at_reset, Box::new(|_| {}))
    }

    /// One that reports the end of each scrub to `scrubbed`.
    pub(crate) fn watching(retired: &[(u64, u64)], scrub_at_reset: bool, scrubbed: Box<ScrubEnd>) -> Self {
        Self::open(retired, scrub_at_reset, false, scrubbed)
    }

    /// A device of a region in which slices share one file; every user can reach its socket.
    pub(crate) fn of_shared_file() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let world = Self::open(&[], false, true, Box::new(|_| {}));
        let folder = world.path.parent().unwrap();
        std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::set_permissions(&world.path, PermissionsExt::from_mode(0o666)).unwrap();
        world
    }

    fn open(retired: &[(u64, u64)], scrub_at_reset: bool, root_only: bool, scrubbed: Box<ScrubEnd>) -> Self {
        let memory = Window(Anonymous::new("test", BASE + SIZE, None).unwrap());
        let facts = Facts { size: SIZE, base: BASE, page: 0x1000, pxm: Some(1), scrub_at_reset, msix: true };
        let setup = Setup {
            id: Id::default(),
            facts,
            retired: spans(retired),
            bad: Box::new(|_| {}),
            scrubbed,
            near: None,
        };
        let function = Function::new(setup, &memory).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = Arc::new(DeviceServer::new("test", function.clone(), listener, root_only).unwrap());
        let thread = std::thread::spawn({
            let server = server.clone();
            move || server.run()
        });
        Self { path, function, server, thread: Some(thread), _folder: folder }
    }

    pub(crate) fn connection(&self) -> Connection {
        Connection::connect(&self.path, LIMIT, BusyPoll::NONE).unwrap()
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.connection()).unwrap()
    }
}

pub(crate) fn register(client: &mut Client, register: Register) -> u64 {
    let mut bytes = [0; 8];
    client.read(BAR0, register.offset(), &mut bytes[..register.bytes()]).unwrap();
    u64::from_le_bytes(bytes)
}

pub(crate) fn set(client: &mut Client, register: Register, word: u32) {
    client.write(BAR0, register.offset(), &word.to_le_bytes()).unwrap();
}

/// Connects an eventfd to each vector.
pub(crate) fn vectors(client: &mut Client) -> [OwnedFd; 3] {
    let events = [event(), event(), event()];
    client.set_irqs(SET, &events.each_ref().map(AsFd::as_fd)).unwrap();
    events
}
