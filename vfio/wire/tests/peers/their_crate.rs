//! The `vfio_user` crate, which cloud-hypervisor is built on, at the other end.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use egm_vfio_wire::client::{CallError, Client};
use egm_vfio_wire::message::{
    Area, ByFile, DeviceInfo, DmaMap, DmaUnmap, IrqAction, IrqData, IrqInfo, SetIrqs,
};
use egm_vfio_wire::serve::serve;
use egm_vfio_wire::socket::{BusyPoll, Connection};
use rustix::event::{EventfdFlags, eventfd};
use vfio_bindings::bindings::vfio::{vfio_region_info, vfio_region_sparse_mmap_area};

use crate::toy::{LIMIT, MEMORY, Toy, VECTORS};

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn fired(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]).is_ok()
}

/// Our device behind a path, for one client of theirs.
fn our_server(path: &Path) -> JoinHandle<Toy> {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let mut toy = Toy::new();
        let (socket, _) = listener.accept().unwrap();
        let mut connection = Connection::new(socket.into(), LIMIT, BusyPoll::NONE).unwrap();
        serve(&mut connection, &mut toy).unwrap();
        toy
    })
}

#[test]
fn their_client_drives_our_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let server = our_server(&path);
    let mut client = vfio_user::Client::new(&path).unwrap();

    let memory = client.region(2).unwrap();
    let areas: Vec<_> = memory.sparse_areas.iter().map(|area| (area.offset, area.size)).collect();
    assert_eq!((memory.size, areas), (MEMORY, vec![(0, 0x1000), (0x2000, MEMORY - 0x2000)]));
    memory.file_offset.as_ref().unwrap().file().write_all_at(b"mapped", 0x2000).unwrap();
    let mut data = [0; 6];
    client.region_read(2, 0x2000, &mut data).unwrap();
    assert_eq!(&data, b"mapped");

    client.region_write(0, 4, &[1, 2, 3, 4]).unwrap();
    let mut word = [0; 4];
    client.region_read(0, 4, &mut word).unwrap();
    assert_eq!(word, [1, 2, 3, 4]);

    assert_eq!(client.get_irq_info(2).unwrap().count, VECTORS);
    let events = [event(), event()];
    let fds = events.each_ref().map(AsRawFd::as_raw_fd);
    client.set_irqs(2, 0x24, 5, 2, &fds).unwrap();
    client.set_irqs(2, 0x21, 6, 1, &[]).unwrap();
    assert_eq!(events.each_ref().map(fired), [false, true]);

    client.dma_map(0, 0x8000_0000, 0x1000, Toy::new().memory.as_raw_fd()).unwrap();
    client.dma_unmap(0x8000_0000, 0x1000).unwrap();
    client.reset().unwrap();
    client.shutdown().unwrap();
    let toy = server.join().unwrap();
    assert_eq!((toy.resets, toy.left, toy.windows.len()), (1, 1, 0));
}

/// Requests to their server's device.
#[derive(Debug, PartialEq, Eq)]
enum Saw {
    Map(u64, bool),
    Unmap(u64),
    Irqs(u32, u32, usize),
    Reset,
}

struct Theirs(Sender<Saw>, File);

impl vfio_user::ServerBackend for Theirs {
    fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if offset == 0xbad {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.1.read_exact_at(data, offset)
    }

    fn region_write(&mut self, _: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.1.write_all_at(data, offset)
    }

    fn dma_map(
        &mut self,
        _: vfio_user::DmaMapFlags,
        _: u64,
        address: u64,
        _: u64,
        file: Option<File>,
    ) -> io::Result<()> {
        self.0.send(Saw::Map(address, file.is_some())).map_err(io::Error::other)
    }

    fn dma_unmap(&mut self, _: vfio_user::DmaUnmapFlags, address: u64, _: u64) -> io::Result<()> {
        self.0.send(Saw::Unmap(address)).map_err(io::Error::other)
    }

    fn reset(&mut self) -> io::Result<()> {
        self.0.send(Saw::Reset).map_err(io::Error::other)
    }

    fn set_irqs(&mut self, _: u32, _: u32, start: u32, count: u32, fds: Vec<File>) -> io::Result<()> {
        self.0.send(Saw::Irqs(start, count, fds.len())).map_err(io::Error::other)
    }
}

#[test]
fn our_client_drives_their_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let memory = Toy::new().memory;
    let file = memory.try_clone().unwrap();
    let regions = (0..9).map(|index| {
        let flags = if index == 2 { 7 } else { 3 };
        let region_info = vfio_region_info { argsz: 32, flags, index, size: MEMORY, ..Default::default() };
        let area = vfio_region_sparse_mmap_area { offset: 0x1000, size: 0x2000 };
        let sparse_areas = if index == 2 { vec![vfio_user::SparseArea { area }] } else { vec![] };
        vfio_user::ServerRegion {
            region_info,
            sparse_areas,
            mmap_fd: (index == 2).then(|| memory.as_raw_fd()),
        }
    });
    let irqs = (0..5).map(|index| vfio_user::IrqInfo { index, flags: 1, count: 4 });
    let server = vfio_user::Server::new(&path, true, irqs.collect(), regions.collect()).unwrap();
    let (sender, saw) = channel();
    let server = std::thread::spawn(move || server.run(&mut Theirs(sender, file)));

    let connection = Connection::connect(&path, LIMIT, BusyPoll::NONE).unwrap();
    let mut client = Client::new(connection).unwrap();
    assert_eq!((client.limits().fds, client.limits().data), (1, 1 << 20));
    assert_eq!(client.device_info().unwrap(), DeviceInfo { resettable: true, regions: 9, irqs: 5 });
    let (region, file) = client.region_info(2).unwrap();
    assert_eq!((region.areas, file.is_some()), (vec![Area { offset: 0x1000, size: 0x2000 }], true));
    assert!(client.region_info(0).unwrap().1.is_none());
    let info =
        IrqInfo { index: 2, count: 4, eventfd: true, maskable: false, automasked: false, noresize: false };
    assert_eq!(client.irq_info(2).unwrap(), info);

    client.write(2, 8, b"bytes").unwrap();
    let mut data = [0; 5];
    client.read(2, 8, &mut data).unwrap();
    assert_eq!(&data, b"bytes");
    // An error of their device has no data, and no errno: ours does not wait for either.
    assert!(matches!(client.read(2, 0xbad, &mut data), Err(CallError::Refused { .. })));
    assert!(matches!(client.irq_info(5), Err(CallError::Refused { .. })));

    let map =
        DmaMap { read: true, write: true, offset: 0, address: 0x1000, size: 0x1000, by_file: ByFile::Any };
    client.dma_map(map, Some(memory.as_fd())).unwrap();
    client.dma_map(DmaMap { address: 0x4000, ..map }, None).unwrap();
    client.dma_unmap(DmaUnmap::Window { address: 0x1000, size: 0x1000 }).unwrap();
    let set = SetIrqs { index: 2, start: 1, count: 2, action: IrqAction::Trigger, data: IrqData::Eventfd };
    let events = [event(), event()];
    client.set_irqs(set, &events.each_ref().map(AsFd::as_fd)).unwrap();
    let flags = client.set_irqs(SetIrqs { data: IrqData::Bool(&[1, 1]), ..set }, &[]);
    assert!(matches!(flags, Err(CallError::Refused { .. })), "they take no flags");
    drop(client);
    // Their server takes the rest of that message for the next one; its result after that is not checked.
    let _ = server.join().unwrap();
    let saw: Vec<_> = saw.iter().collect();
    let expected = [Saw::Map(0x1000, true), Saw::Map(0x4000, false), Saw::Unmap(0x1000)];
    assert_eq!(saw[..3], expected);
    // One descriptor a message, as they announce in the handshake.
    assert_eq!(saw[3..5], [Saw::Irqs(1, 1, 1), Saw::Irqs(2, 1, 1)]);
}

#[test]
fn our_client_resets_their_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let server = vfio_user::Server::new(&path, false, vec![], vec![]).unwrap();
    let (sender, saw) = channel();
    let server = std::thread::spawn(move || server.run(&mut Theirs(sender, Toy::new().memory)));
    let mut client = Client::new(Connection::connect(&path, LIMIT, BusyPoll::NONE).unwrap()).unwrap();
    assert!(!client.device_info().unwrap().resettable);
    client.reset().unwrap();
    drop(client);
    server.join().unwrap().unwrap();
    assert_eq!(saw.iter().collect::<Vec<_>>(), [Saw::Reset]);
}
