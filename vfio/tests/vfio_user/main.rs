//! A function behind a vfio-user server, or in this process, driven through the traits that the VMM drives it by.
#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod copier;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use egm_address::{Address, InBar, Io, Span};
use egm_vfio::backend::{Backend, BackendError, InterruptKind, RegionIndex};
use egm_vfio::client::{OpenError, UserDomain, UserFunction, over};
use egm_vfio::dma::{Access, DmaError, Domain};
use egm_vfio::local::LocalFunction;
use egm_vfio::mapping::{MadeOf, Mapping};
use egm_vfio::memory::{HostBacking, HostMemory};
use egm_vfio_wire::client::CallError;
use egm_vfio_wire::socket::{Broken, BusyPoll, Closer, Connection};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::Timespec;

use crate::copier::{BAR, Copier, MEMORY, VECTORS};

/// Time enough for any machine.
const LIMIT: Duration = Duration::from_secs(20);
const REGISTERS: RegionIndex = RegionIndex::Bar(0);

fn connection(socket: UnixStream, limit: Duration) -> Connection {
    Connection::new(socket.into(), limit, BusyPoll::NONE).unwrap()
}

/// A function of `copier`, and the handle that ends its server.
fn open(mut copier: Copier) -> (Result<(UserFunction, UserDomain), OpenError>, Closer) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut server = connection(theirs, LIMIT);
    let closer = server.closer().unwrap();
    std::thread::spawn(move || egm_vfio_wire::serve::serve(&mut server, &mut copier));
    (over("test.sock".to_owned(), connection(ours, LIMIT)), closer)
}

fn function() -> (UserFunction, UserDomain, Closer) {
    let (opened, closer) = open(Copier::new(MEMORY));
    let (function, domain) = opened.unwrap();
    (function, domain, closer)
}

/// The same device behind a socket, and in this process.
fn each(judge: impl Fn(&dyn Backend)) {
    let (function, _domain, _closer) = function();
    judge(&function);
    judge(&LocalFunction::new("here".to_owned(), Copier::new(MEMORY), MadeOf::File).unwrap());
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn fired(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]).is_ok()
}

/// Whether `event` fires within [`LIMIT`].
fn fires(event: &OwnedFd) -> bool {
    let limit = Timespec::try_from(LIMIT).unwrap();
    poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&limit)) == Ok(1)
}

fn bar(start: u64, size: u64) -> Span<InBar> {
    Span::new(Address::new(start), size).unwrap()
}

fn io(start: u64, size: u64) -> Span<Io> {
    Span::new(Address::new(start), size).unwrap()
}

/// Guest memory: two pages of a file, and the file.
fn memory() -> (Arc<dyn HostMemory>, File) {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(0x3000).unwrap();
    let kept = OwnedFd::from(file.try_clone().unwrap());
    let mapping = Mapping::of(file.as_fd(), 0x1000, 0x2000, 0, MadeOf::File(kept, 0x1000)).unwrap();
    (Arc::new(mapping), file)
}

#[test]
fn regions_are_as_the_server_states_and_registers_answer() {
    each(|function| {
        assert_eq!(function.region(REGISTERS).size, 0x1000);
        assert!(function.region(REGISTERS).mappable.is_empty());
        assert_eq!(function.region(BAR).mappable, [bar(0x1000, MEMORY - 0x1000)]);
        assert_eq!(function.region(RegionIndex::Rom).size, 0);
        assert_eq!(function.interrupts(InterruptKind::Msix).count, VECTORS);
        assert_eq!(function.interrupts(InterruptKind::Msi).count, 0);
        assert!(function.can_reset());

        function.write(REGISTERS, 0x40, &[1, 2, 3, 4]).unwrap();
        let mut data = [0; 4];
        function.read(REGISTERS, 0x40, &mut data).unwrap();
        assert_eq!(data, [1, 2, 3, 4]);
        function.reset().unwrap();
        function.read(REGISTERS, 0x40, &mut data).unwrap();
        assert_eq!(data, [0; 4]);
        for (region, offset) in [(REGISTERS, 0xffd), (RegionIndex::Rom, 0), (REGISTERS, u64::MAX)] {
            data = [0; 4];
            let absent = function.read(region, offset, &mut data);
            assert!(
                matches!(absent, Err(BackendError::Absent { .. })) && data == [0xff; 4],
                "{region:?} {offset:#x}"
            );
        }
    });
}

#[test]
fn a_bar_is_the_server_s_memory_and_can_be_shared_on_as_a_file() {
    each(|function| {
        let memory = function.map(BAR, bar(0x2000, 0x1000), 0x1_0000_2000).unwrap();
        memory.write(8, b"through the mapping").unwrap();
        let mut data = [0; 19];
        function.read(BAR, 0x2008, &mut data).unwrap();
        assert_eq!(&data, b"through the mapping");
        let HostBacking::File { file, offset } = memory.backing() else { panic!("not a file") };
        File::from(file.try_clone_to_owned().unwrap()).read_exact_at(&mut data, offset + 8).unwrap();
        assert_eq!(&data, b"through the mapping");
        for part in [bar(0, 0x1000), bar(MEMORY - 0x1000, 0x2000)] {
            assert!(matches!(function.map(BAR, part, 0), Err(BackendError::Absent { .. })), "{part}");
        }
    });
}

#[test]
fn a_device_of_this_process_states_what_its_memory_is_and_refuses_what_it_lacks() {
    let function =
        LocalFunction::new("here".to_owned(), Copier::new(MEMORY), |_, _| MadeOf::Invisible).unwrap();
    let memory = function.map(BAR, bar(0x1000, 0x1000), 0).unwrap();
    assert!(matches!(memory.backing(), HostBacking::Invisible), "as its maker said");
    let event = event();
    function.connect(InterruptKind::Msix, 0, &[Some(event.as_fd())]).unwrap();
    let others = function.connect(InterruptKind::Msix, VECTORS, &[None]);
    assert!(matches!(others, Err(BackendError::Absent { .. })));
    assert!(function.reset_bus().is_err() && function.mask_intx(true).is_err());
    assert!(function.connect_resample(event.as_fd()).is_err());
    drop(function);
    memory.write(0, b"still mapped").unwrap();
}

#[test]
fn vectors_fire_where_they_are_connected() {
    each(|function| {
        let events = [event(), event(), event()];
        let [a, b, c] = events.each_ref().map(|event| Some(event.as_fd()));
        let fire = |vector: u32| {
            function.write(REGISTERS, copier::FIRE, &vector.to_le_bytes()).unwrap();
            events.each_ref().map(fired)
        };
        function.connect(InterruptKind::Msix, 0, &[a, None, b, c]).unwrap();
        assert_eq!((fire(0), fire(1), fire(3)), ([true, false, false], [false; 3], [false, false, true]));
        function.connect(InterruptKind::Msix, 0, &[None, a]).unwrap();
        assert_eq!((fire(0), fire(1), fire(2)), ([false; 3], [true, false, false], [false, true, false]));
        function.disable(InterruptKind::Msix).unwrap();
        assert_eq!((fire(1), fire(2)), ([false; 3], [false; 3]));
        assert!(matches!(
            function.connect(InterruptKind::Msix, 3, &[a, b]),
            Err(BackendError::Absent { .. })
        ));
        assert!(matches!(function.connect(InterruptKind::Msi, 0, &[a]), Err(BackendError::Absent { .. })));
        function.disable(InterruptKind::Msi).unwrap();
    });
}

#[test]
fn the_device_reaches_what_is_shared_with_it_and_nothing_else() {
    let (function, domain, _closer) = function();
    let (guest, _file) = memory();
    guest.write(0x10, b"from the guest").unwrap();
    domain.map(io(0x8000_0000, 0x1000), &guest, 0, Access::Read).unwrap();
    domain.map(io(0x8000_1000, 0x1000), &guest, 0x1000, Access::ReadWrite).unwrap();
    let copy = |from: u64, to: u64| {
        let command = [from, to, 14].map(u64::to_le_bytes).concat();
        function.write(REGISTERS, copier::COPY, &command).unwrap();
        let mut done = [0; 1];
        function.read(REGISTERS, copier::DONE, &mut done).unwrap();
        done == [1]
    };
    assert!(copy(0x8000_0010, 0x8000_1020));
    let mut data = [0; 14];
    guest.read(0x1020, &mut data).unwrap();
    assert_eq!(&data, b"from the guest");
    assert!(!copy(0x8000_1020, 0x8000_0010), "shared read-only");
    domain.unmap(io(0x8000_1000, 0x1000)).unwrap();
    assert!(!copy(0x8000_0010, 0x8000_1020), "no longer shared");
    assert_eq!(domain.limits().mappings, Some(0xffff - 1));
}

#[test]
fn memory_that_cannot_be_shared_is_refused_by_name() {
    let (_function, domain, _closer) = function();
    let (guest, _file) = memory();
    let way =
        |span, memory: &Arc<dyn HostMemory>, offset| match domain.map(span, memory, offset, Access::Read) {
            Ok(()) => "shared",
            Err(DmaError::NoWay { rule, .. }) => rule,
            Err(DmaError::Refused { source, .. }) if source.kind() == ErrorKind::AlreadyExists => "twice",
            Err(other) => panic!("{other}"),
        };
    let pages: Arc<dyn HostMemory> = Arc::new(Mapping::pages(0x2000, 0).unwrap());
    assert_eq!(way(io(0x1000, 0x1000), &guest, 0), "shared");
    assert_eq!(way(io(0, 0x2000), &guest, 0), "twice");
    assert!(way(io(0x10_0000, 0x2000), &pages, 0).contains("this has none"));
    assert!(way(io(0x10_0000, 0x2000), &guest, 0x1000).contains("beyond"));
    assert!(way(io(0x10_0800, 0x1000), &guest, 0).contains("whole pages"));
    assert!(matches!(domain.unmap(io(0, 0x1000)), Err(DmaError::NoWay { .. })));
    assert!(matches!(domain.unmap(io(0x1000, 0x800)), Err(DmaError::NoWay { .. })));
}

#[test]
fn a_server_that_dies_is_an_error_interrupt_and_ones_for_ever() {
    let (function, domain, closer) = function();
    let (guest, _file) = memory();
    domain.map(io(0, 0x2000), &guest, 0, Access::ReadWrite).unwrap();
    let error = event();
    function.connect(InterruptKind::Error, 0, &[Some(error.as_fd())]).unwrap();
    assert!(!fired(&error));
    closer.close();
    assert!(fires(&error), "nobody asked the server anything");
    let mut data = [0; 4];
    let gone = function.read(REGISTERS, 0, &mut data);
    assert!(matches!(gone, Err(BackendError::Gone { .. })) && data == [0xff; 4]);
    assert!(matches!(function.reset(), Err(BackendError::Gone { .. })));
    // Memory that was shared with it is released all the same.
    assert!(domain.unmap(io(0, 0x2000)).is_err());
    assert_eq!(Arc::strong_count(&guest), 1);
    // A trigger that connects late is signalled at once.
    let late = event();
    let _ = function.connect(InterruptKind::Error, 0, &[Some(late.as_fd())]);
    assert!(fired(&late));
}

#[test]
fn a_client_that_leaves_gets_no_notification() {
    let (function, domain, _closer) = function();
    let error = event();
    function.connect(InterruptKind::Error, 0, &[Some(error.as_fd())]).unwrap();
    drop((function, domain));
    assert!(!fired(&error));
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let opened = over("test.sock".to_owned(), connection(ours, Duration::from_millis(50)));
    let source = match opened {
        Err(OpenError::Talk { source, .. }) => source,
        _ => panic!("no error"),
    };
    assert!(matches!(source, CallError::Lost(Broken::Slow { .. })));
    let mut handshake = [0; 16];
    theirs.read_exact(&mut handshake).unwrap();
}

#[test]
fn a_file_that_ends_before_its_region_is_found_when_the_device_is_opened() {
    let (opened, _closer) = open(Copier::new(MEMORY - 1));
    let error = opened.map(drop).unwrap_err();
    assert!(matches!(error, OpenError::ShortFile { region: 2, end: MEMORY, .. }), "{error}");
}

#[test]
fn a_bar_with_a_file_that_is_no_memory_is_refused() {
    // A file of an ordinary file system: a read of its pages can wait, for FUSE's for ever.
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(MEMORY).unwrap();
    let refused = open(Copier::of(file)).0.map(drop);
    let unsafe_file =
        matches!(refused, Err(OpenError::Talk { source: CallError::UnsafeFile { region: 2 }, .. }));
    assert!(unsafe_file, "{refused:?}");
}
