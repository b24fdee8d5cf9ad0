//! A region read and its answer, over a Unix socket within one process: ours that sleeps between messages and ours that
//! polls for them for a while, beside the `vfio_user` crate and a plain ping-pong of as many bytes.
//!
//! ```text
//! cargo bench -p egm-vfio-wire -- --rounds 2000
//! ```
//! prints one line of JSON: microseconds of each read of `ping`, `asleep`, `looking` and `crate`, which take turns, so
//! that other load on the machine hits all of them. `quiet` is the share of a processor that an idle connection costs.
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::io::{Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use egm_vfio_wire::client::Client;
use egm_vfio_wire::message::{DeviceInfo, DmaMap, DmaUnmap, IrqInfo, RegionInfo, SetIrqs};
use egm_vfio_wire::serve::{Device, serve};
use egm_vfio_wire::socket::{BusyPoll, Connection};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

const LIMIT: Duration = Duration::from_secs(10);
/// Reads of one turn.
const TURN: usize = 50;

fn main() {
    let rounds =
        std::env::args().skip_while(|word| word != "--rounds").nth(1).map_or(2000, |n| n.parse().unwrap());
    let (mut plain, mut asleep, mut awake) =
        (plain(), ours(BusyPoll::NONE), ours(BusyPoll::of(Duration::from_micros(50))));
    let folder = tempfile::tempdir().unwrap();
    let mut theirs = theirs(&folder.path().join("socket"));
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..rounds / TURN {
        let mut data = [0; 8];
        turn(&mut times[0], || ping(&mut plain));
        turn(&mut times[1], || asleep.read(0, 8, &mut data).unwrap());
        turn(&mut times[2], || awake.read(0, 8, &mut data).unwrap());
        turn(&mut times[3], || theirs.region_read(0, 8, &mut data).unwrap());
    }
    let quiet = Duration::from_millis(200);
    let before = processor();
    // No message comes: the time passes.
    let limit = quiet.try_into().unwrap();
    assert_eq!(poll(&mut [PollFd::new(&awake, PollFlags::RDHUP)], Some(&limit)), Ok(0));
    let used = (processor() - before).as_secs_f64() / quiet.as_secs_f64();
    let text = |times: &Vec<f64>| times.iter().map(f64::to_string).collect::<Vec<_>>().join(",");
    let ways = ["ping", "asleep", "looking", "crate"].iter().zip(&times);
    let ways = ways.map(|(name, times)| format!("\"{name}\":[{}]", text(times))).collect::<Vec<_>>();
    println!("{{{},\"quiet\":[{used}]}}", ways.join(","));
}

fn turn(times: &mut Vec<f64>, mut read: impl FnMut()) {
    // The first after the others' turns finds caches and the scheduler elsewhere.
    read();
    for _ in 0..TURN {
        let begun = Instant::now();
        read();
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
}

fn processor() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap()
}

/// Bytes of a request to read 8 bytes, and of its reply.
const PING: (usize, usize) = (32, 40);

fn plain() -> UnixStream {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        while theirs.read_exact(&mut [0; PING.0]).is_ok() && theirs.write_all(&[0; PING.1]).is_ok() {}
    });
    ours
}

fn ping(stream: &mut UnixStream) {
    stream.write_all(&[0; PING.0]).unwrap();
    stream.read_exact(&mut [0; PING.1]).unwrap();
}

fn ours(busy_poll: BusyPoll) -> Client {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let mut connection = Connection::new(theirs.into(), LIMIT, busy_poll).unwrap();
        serve(&mut connection, &mut Register)
    });
    Client::new(Connection::new(ours.into(), LIMIT, busy_poll).unwrap()).unwrap()
}

/// A device of one register.
struct Register;

impl Device for Register {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { resettable: false, regions: 9, irqs: 5 }
    }

    fn region(&self, index: u32) -> (RegionInfo, Option<BorrowedFd<'_>>) {
        let size = if index == 0 { 0x1000 } else { 0 };
        (RegionInfo { index, size, read: true, write: true, ..RegionInfo::default() }, None)
    }

    fn irq(&self, index: u32) -> IrqInfo {
        IrqInfo { index, count: 0, eventfd: false, maskable: false, automasked: false, noresize: false }
    }

    fn read(&mut self, _region: u32, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _region: u32, _offset: u64, _data: &[u8]) {}

    fn dma_map(&mut self, _map: DmaMap, _file: Option<OwnedFd>) -> Result<(), Errno> {
        Ok(())
    }

    fn dma_unmap(&mut self, _unmap: DmaUnmap) -> Result<(), Errno> {
        Ok(())
    }

    fn set_irqs(&mut self, _set: SetIrqs<'_>, _eventfds: Vec<OwnedFd>) -> Result<(), Errno> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        Ok(())
    }

    fn disconnected(&mut self) {}
}

/// The same device behind the `vfio_user` crate.
struct Theirs;

impl vfio_user::ServerBackend for Theirs {
    fn region_read(&mut self, _: u32, _: u64, data: &mut [u8]) -> Result<(), std::io::Error> {
        data.fill(0);
        Ok(())
    }

    fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<(), std::io::Error> {
        Ok(())
    }

    fn dma_map(
        &mut self,
        _: vfio_user::DmaMapFlags,
        _: u64,
        _: u64,
        _: u64,
        _: Option<std::fs::File>,
    ) -> Result<(), std::io::Error> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: vfio_user::DmaUnmapFlags, _: u64, _: u64) -> Result<(), std::io::Error> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), std::io::Error> {
        Ok(())
    }

    fn set_irqs(
        &mut self,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: Vec<std::fs::File>,
    ) -> Result<(), std::io::Error> {
        Ok(())
    }
}

fn theirs(path: &std::path::Path) -> vfio_user::Client {
    let region = |index| vfio_user::ServerRegion {
        region_info: vfio_bindings::bindings::vfio::vfio_region_info {
            argsz: 32,
            flags: 3,
            index,
            size: 0x1000,
            ..Default::default()
        },
        sparse_areas: vec![],
        mmap_fd: None,
    };
    let server = vfio_user::Server::new(path, false, vec![], (0..9).map(region).collect()).unwrap();
    std::thread::spawn(move || server.run(&mut Theirs));
    vfio_user::Client::new(path).unwrap()
}
