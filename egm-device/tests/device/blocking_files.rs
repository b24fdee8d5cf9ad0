//! Clients of the program that send descriptors that block for ever when written to, inspected or closed.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use egm_device::device::registers::{MAGIC, Register};
use egm_vfio_wire::message::{IrqData, SetIrqs};

use crate::cli::{Host, Server, client};
use crate::fuse::Fuse;
use crate::raw::{COMMAND, MAP, Raw, message, window};
use crate::world::{SET, event, fired, register};

const SET_IRQS: u16 = 8;
const RESET: u16 = 13;
const EINVAL: Option<u32> = Some(22);

fn connect_vectors(count: u32) -> Vec<u8> {
    [20, 0x24, 2, 0, count].into_iter().flat_map(u32::to_le_bytes).collect()
}

struct World {
    // Dropped first: a server that hangs ends when its files do.
    fuse: Fuse,
    server: Server,
    host: Host,
}

impl World {
    fn new() -> Option<Self> {
        let host = Host::new();
        let server = host.serve("serve --region local --size 2MiB --socket vm.sock --timeout 0");
        Some(Self { fuse: Fuse::mount()?, server, host })
    }

    fn raw(&self) -> Raw {
        Raw::negotiated(&self.host.path("vm.sock")).0
    }

    /// The next client is served, and SIGTERM ends the server, which returns its slice.
    #[track_caller]
    fn ends_well(self) {
        let Self { fuse, server, host } = self;
        let ended = serves_and_ends(server, &host);
        drop(fuse);
        assert_eq!(ended, Some(0));
        host.owes_nothing();
        assert!(!host.ledger().contains("vm.sock"));
    }
}

/// Has the next client served and sends SIGTERM; returns the exit code of the server, `None` if it hangs.
pub(crate) fn serves_and_ends(server: Server, host: &Host) -> Option<i32> {
    let mut next = client(&host.path("vm.sock"));
    assert_eq!(register(&mut next, Register::Magic), u64::from(MAGIC));
    let events = [event(), event(), event()];
    next.set_irqs(SET, &events.each_ref().map(AsFd::as_fd)).unwrap();
    next.set_irqs(SetIrqs { data: IrqData::None, ..SET }, &[]).unwrap();
    assert_eq!(events.each_ref().map(fired), [true; 3]);
    drop(next);
    server.end_in_time()
}

/// Sends `bytes` with `files` and returns the errno of the reply.
fn errno(raw: &mut Raw, bytes: &[u8], files: &[impl AsFd]) -> Option<u32> {
    raw.send_with(bytes, files);
    raw.receive().expect("the connection stands").1
}

#[test]
fn a_file_that_is_no_eventfd_is_refused_as_one_and_does_not_hang_the_server() {
    let Some(world) = World::new() else { return };
    let mut raw = world.raw();
    let connect = message(2, SET_IRQS, COMMAND, &connect_vectors(1));
    assert_eq!(errno(&mut raw, &connect, &[world.fuse.file()]), EINVAL);
    assert_eq!(errno(&mut raw, &connect, &[std::io::pipe().unwrap().1]), EINVAL);
    let event = event();
    let mixed = [event.as_fd(), world.fuse.file().as_fd()];
    assert_eq!(errno(&mut raw, &message(3, SET_IRQS, COMMAND, &connect_vectors(2)), &mixed), EINVAL);
    // A vector without an eventfd does nothing when it fires.
    let trigger = [20, 0x21, 2, 0, 1].into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>();
    raw.send(&message(4, SET_IRQS, COMMAND, &trigger));
    assert_eq!(raw.receive().unwrap().1, None);
    drop(raw);
    world.ends_well();
}

#[test]
fn a_file_of_dma_memory_a_surplus_one_and_one_with_a_refused_message_do_not_hang_the_server() {
    let Some(world) = World::new() else { return };
    let mut raw = world.raw();
    let file = world.fuse.file();
    assert_eq!(errno(&mut raw, &message(2, MAP, COMMAND, &window(0)), &[file]), None);
    assert_eq!(errno(&mut raw, &message(3, MAP, COMMAND, &window(0x1000)), &[file; 17]), EINVAL);
    assert_eq!(errno(&mut raw, &message(4, RESET, COMMAND, &[]), &[file]), EINVAL);
    drop(raw);
    world.ends_well();
}

#[test]
fn files_that_come_with_half_a_message_behind_a_broken_one_or_to_a_busy_server_do_not_hang_it() {
    let Some(world) = World::new() else { return };
    let path = world.host.path("vm.sock");
    let one = [world.fuse.file()];
    let mut first = world.raw();
    first.send_with(&message(2, MAP, COMMAND, &window(0))[..30], &one);
    // A client is connected: another one is refused, with its files unread.
    let mut second = Raw(UnixStream::connect(&path).unwrap());
    second.send_with(&message(1, SET_IRQS, COMMAND, &connect_vectors(1)), &one);
    drop((first, second));
    let mut third = world.raw();
    // No message has 15 bytes: the bytes after it are never read.
    let mut broken = message(2, RESET, COMMAND, &[]);
    broken[4] = 15;
    third.send(&broken);
    third.send_with(&message(3, MAP, COMMAND, &window(0)), &one);
    assert!(third.receive().is_none(), "the server hangs up");
    drop(third);
    world.ends_well();
}
