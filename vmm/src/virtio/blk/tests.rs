use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use proptest::prelude::*;

use super::*;
use crate::virtio::testing::{CountingInterrupt, Driver, Part, memory, wait_readable};

const SECTORS: u64 = 64;
const HEADER: u64 = 0x4000;
const STATUS: u64 = 0x5000;
const DATA: u64 = 0x6000;

struct Rig {
    block: Block,
    driver: Driver,
    memory: GuestMemoryMmap,
    file: File,
    interrupt: Arc<CountingInterrupt>,
}

fn rig(read_only: bool, features: u64) -> Rig {
    let file = tempfile::tempfile().unwrap();
    file.set_len(SECTORS * SECTOR + 100).unwrap();
    let disk = Disk::new(file.try_clone().unwrap(), read_only).unwrap();
    let mut block = Block::new(disk, "disk0").unwrap();
    let memory = memory();
    let driver = Driver::new(&memory, 0x1000, 16);
    let interrupt = Arc::new(CountingInterrupt::default());
    let queues = vec![Some(driver.queue())];
    let activation = Activation { memory: memory.clone(), queues, features, interrupt: interrupt.clone() };
    block.activate(activation).unwrap();
    Rig { block, driver, memory, file, interrupt }
}

impl Rig {
    /// Offers a request with its data part, and a status byte that no device writes.
    fn offer(&mut self, kind: u32, sector: u64, data: &[Part]) -> u16 {
        self.memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.memory.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
        self.memory.write_obj(0xeeu8, GuestAddress(STATUS)).unwrap();
        let parts = [&[Part::Read(HEADER, 16)], data, &[Part::Write(STATUS, 1)]].concat();
        self.driver.offer(&parts)
    }

    /// As the event loop would: works until everything offered is answered.
    fn settle(&mut self) -> Vec<(u16, u32)> {
        self.block.work();
        while self.block.engine.in_flight() != 0 {
            wait_readable(self.block.engine.event());
            self.block.engine.event().read().unwrap();
            self.block.work();
        }
        self.driver.used()
    }

    fn activate(&mut self) -> Result<(), ActivateError> {
        self.driver = Driver::new(&self.memory, 0x1_0000, 16);
        let queues = vec![Some(self.driver.queue())];
        self.block.activate(Activation {
            memory: self.memory.clone(),
            queues,
            features: config::FLUSH,
            interrupt: self.interrupt.clone(),
        })
    }

    /// Wrong requests and failed ones.
    fn counted(&self) -> Vec<u64> {
        self.block.counters().into_iter().map(|(_, number)| number).collect()
    }

    /// One request from start to end; its status.
    fn ask(&mut self, kind: u32, sector: u64, data: &[Part]) -> u8 {
        let head = self.offer(kind, sector, data);
        let used = self.settle();
        assert_eq!(used.len(), 1);
        assert_eq!(used[0].0, head);
        self.memory.read_obj(GuestAddress(STATUS)).unwrap()
    }
}

#[test]
fn what_is_written_is_on_the_disk_and_reads_back() {
    for features in [config::FLUSH, 0] {
        let mut rig = rig(false, features);
        rig.memory.write_slice(&[0x5a; 1024], GuestAddress(DATA)).unwrap();
        assert_eq!(rig.ask(1, 62, &[Part::Read(DATA, 600), Part::Read(DATA + 600, 424)]), 0);
        let mut bytes = [0; 1024];
        rig.file.read_exact_at(&mut bytes, 62 * 512).unwrap();
        assert_eq!(bytes, [0x5a; 1024]);
        assert_eq!(rig.ask(4, 0, &[]), 0);
        assert_eq!(rig.ask(0, 62, &[Part::Write(0x9000, 1024)]), 0);
        rig.memory.read_slice(&mut bytes, GuestAddress(0x9000)).unwrap();
        assert_eq!((bytes, rig.interrupt.count()), ([0x5a; 1024], 3));
        assert_eq!(rig.counted(), [0, 0]);
    }
}

#[test]
fn nothing_beyond_the_last_whole_sector_is_reached() {
    let mut rig = rig(false, config::FLUSH);
    assert_eq!(rig.ask(0, 64, &[Part::Write(DATA, 512)]), 1);
    assert_eq!(rig.ask(1, 63, &[Part::Read(DATA, 1024)]), 1);
    assert_eq!(rig.ask(1, u64::MAX, &[Part::Read(DATA, 512)]), 1);
    assert_eq!(rig.file.metadata().unwrap().len(), SECTORS * SECTOR + 100);
    assert_eq!(rig.counted(), [3, 0]);
}

#[test]
fn a_read_only_disk_reads_flushes_and_refuses_writes() {
    let mut rig = rig(true, config::FLUSH);
    assert_eq!(rig.ask(1, 0, &[Part::Read(DATA, 512)]), 1);
    assert_eq!(rig.ask(0, 0, &[Part::Write(DATA, 512)]), 0);
    assert_eq!(rig.ask(4, 0, &[]), 0);
    assert_eq!(rig.block.features() & (1 << 5 | 1 << 13 | 1 << 14), 1 << 5);
}

#[test]
fn discarded_and_zeroed_sectors_read_zero() {
    for (kind, flags) in [(11, 0u32), (13, 1), (13, 0)] {
        let mut rig = rig(false, config::FLUSH);
        rig.file.write_all_at(&[7; 64 * 512], 0).unwrap();
        rig.memory.write_obj(8u64, GuestAddress(DATA)).unwrap();
        rig.memory.write_obj([8u32, flags], GuestAddress(DATA + 8)).unwrap();
        let status = rig.ask(kind, 0, &[Part::Read(DATA, 16)]);
        let mut bytes = [1; 4096 + 1];
        rig.file.read_exact_at(&mut bytes, 4096).unwrap();
        match status {
            0 => assert_eq!((bytes[0], bytes[4095], bytes[4096]), (0, 0, 7), "request {kind}, flags {flags}"),
            // A file system without the operation: the driver writes zeroes itself, and nothing was changed.
            2 if kind == 13 => assert_eq!(bytes, [7; 4097]),
            other => panic!("request {kind} was answered by {other}"),
        }
    }
}

#[test]
fn the_serial_number_is_the_device_id() {
    let mut rig = rig(false, 0);
    rig.memory.write_slice(&[0xff; 24], GuestAddress(DATA)).unwrap();
    assert_eq!(rig.ask(8, 0, &[Part::Write(DATA, 3), Part::Write(DATA + 3, 17)]), 0);
    let mut bytes = [0; 21];
    rig.memory.read_slice(&mut bytes, GuestAddress(DATA)).unwrap();
    assert_eq!(&bytes, b"disk0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\xff");
}

#[test]
fn a_chain_without_a_status_comes_back_empty_and_is_counted() {
    let mut rig = rig(false, config::FLUSH);
    let head = rig.driver.offer(&[Part::Read(HEADER, 16)]);
    assert_eq!(rig.settle(), [(head, 0)]);
    let head = rig.driver.offer_loop();
    assert_eq!(rig.settle(), [(head, 0)]);
    assert_eq!(rig.counted(), [2, 0]);
}

#[test]
fn a_full_queue_is_served_and_the_same_chain_twice_is_answered_twice() {
    let mut rig = rig(false, config::FLUSH);
    let head = rig.offer(0, 0, &[Part::Write(DATA, 512)]);
    rig.driver.set_available(&[head; 16], 16);
    let used = rig.settle();
    assert_eq!(used, vec![(head, 513); 16]);
}

#[test]
fn a_reset_lasts_until_what_is_in_flight_is_done_and_notifies_no_driver() {
    let mut rig = rig(false, config::FLUSH);
    rig.memory.write_slice(&[0x5a; 512], GuestAddress(DATA)).unwrap();
    rig.offer(1, 9, &[Part::Read(DATA, 512)]);
    rig.block.take();
    rig.block.engine.commit();
    rig.block.reset();
    rig.settle();
    assert!(rig.block.is_quiescent());
    let mut bytes = [0; 512];
    rig.file.read_exact_at(&mut bytes, 9 * 512).unwrap();
    assert_eq!((bytes, rig.block.engine.in_flight(), rig.interrupt.count()), ([0x5a; 512], 0, 0));
    rig.block.work();
    assert!(rig.driver.used().is_empty());
}

/// Storage that answers when the test releases it.
struct Storage {
    event: EventFd,
    jobs: Arc<Mutex<Vec<(u16, Job)>>>,
    done: Arc<Mutex<Vec<Done>>>,
}

impl Engine for Storage {
    fn event(&self) -> &EventFd {
        &self.event
    }
    fn submit(&mut self, tag: u16, job: Job) {
        self.jobs.lock().unwrap().push((tag, job));
    }
    fn commit(&mut self) {}
    fn collect(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.done.lock().unwrap());
    }
    fn in_flight(&self) -> usize {
        self.jobs.lock().unwrap().len() + self.done.lock().unwrap().len()
    }
}

#[test]
fn a_reset_never_waits_for_storage_and_its_flush_comes_after_the_last_request() {
    let mut rig = rig(false, config::FLUSH);
    let (jobs, done) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let event = eventfd::new().unwrap();
    rig.block.engine = Box::new(Storage { event, jobs: Arc::clone(&jobs), done: Arc::clone(&done) });
    let answer = |result: std::io::Result<()>| {
        let (tag, job) = jobs.lock().unwrap().pop().unwrap();
        done.lock().unwrap().push((tag, result));
        job
    };
    let broken = || Err(Errno::IO.into());
    for flushed in [Ok(()), broken()] {
        rig.offer(1, 9, &[Part::Read(DATA, 512)]);
        rig.block.work();
        rig.block.reset();
        rig.block.work();
        assert!(!rig.block.is_quiescent() && rig.activate().is_err());
        // The guest gets no answer to this request any more.
        assert!(matches!(answer(broken()), Job::Write { .. }));
        rig.block.work();
        assert!(!rig.block.is_quiescent());
        let is_loss = flushed.is_err();
        assert!(matches!(answer(flushed), Job::Flush));
        rig.block.work();
        assert!(rig.block.is_quiescent() && jobs.lock().unwrap().is_empty());
        rig.activate().unwrap();
        let loss = rig.block.take_loss();
        assert_eq!(loss.map(|error| error.raw_os_error()), is_loss.then_some(Some(libc::EIO)));
    }
    assert_eq!(rig.counted(), [0, 1]);
}

#[test]
fn a_flush_of_the_guest_is_answered_by_storage_and_not_before() {
    let mut rig = rig(false, config::FLUSH);
    let (jobs, done) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let event = eventfd::new().unwrap();
    rig.block.engine = Box::new(Storage { event, jobs: Arc::clone(&jobs), done: Arc::clone(&done) });
    for (result, status) in [(Ok(()), 0), (Err(std::io::Error::from(Errno::IO)), 1)] {
        let head = rig.offer(4, 0, &[]);
        rig.block.work();
        assert!(rig.driver.used().is_empty(), "it is answered before storage has flushed");
        let (tag, job) = jobs.lock().unwrap().pop().unwrap();
        assert!(matches!(job, Job::Flush));
        done.lock().unwrap().push((tag, result));
        rig.block.work();
        assert_eq!(rig.driver.used(), [(head, 1)]);
        assert_eq!(rig.memory.read_obj::<u8>(GuestAddress(STATUS)).unwrap(), status);
    }
    assert_eq!(rig.counted(), [0, 1]);
}

#[test]
fn the_configuration_states_what_the_features_promise() {
    let rig = rig(false, 0);
    let read = |offset, length: usize| {
        let mut data = [0; 8];
        rig.block.config_read(offset, &mut data[..length]);
        u64::from_le_bytes(data)
    };
    assert_eq!((read(0, 8), read(12, 4), read(20, 4)), (SECTORS, 254, 512));
    assert_eq!((read(24, 1), read(26, 2), read(34, 2)), (3, 8, 1));
    assert_eq!((read(40, 4), read(52, 4), read(56, 1)), (1, 1, 1));
    for offset in [60, 4096, u64::MAX] {
        assert_eq!(read(offset, 8), 0);
    }
}

proptest! {
    /// Whatever the tables say, the file keeps its size and its neighbours' bytes, and the device lives on.
    #[test]
    fn any_bytes_in_the_rings_leave_a_device_that_works(
        table in prop::collection::vec(any::<u8>(), 256),
        header in prop::collection::vec(0u8..16, 64),
        heads in prop::collection::vec(0u16..20, 16),
        index in 0u16..20,
    ) {
        let mut rig = rig(false, config::FLUSH);
        rig.memory.write_slice(&table, GuestAddress(0x1000)).unwrap();
        rig.memory.write_slice(&header, GuestAddress(HEADER)).unwrap();
        rig.driver.set_available(&heads, index);
        rig.block.work();
        rig.block.reset();
        while !rig.block.is_quiescent() {
            rig.settle();
        }
        prop_assert_eq!(rig.file.metadata().unwrap().len(), SECTORS * SECTOR + 100);
        rig.activate().unwrap();
        prop_assert_eq!(rig.ask(4, 0, &[]), 0);
    }
}
