//! A driver that knows nothing but the specification drives a disk: it finds the registers by the capabilities,
//! negotiates, kicks through the BAR, and receives completions by MSI-X, while an event loop runs the device.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use egm_address::{Gpa, PciAddress, Span};
use egm_vmm::pci::msix::{MsiMessage, MsiRouter, Msix};
use egm_vmm::pci::{DecodedBar, PciFunction};
use egm_vmm::plan::{BarKind, BarPlan, FunctionPlan, FunctionRole};
use egm_vmm::virtio::blk::{Block, Disk};
use egm_vmm::virtio::{BAR_SIZE, Doorbell, VirtioDevice, VirtioPci};
use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADER: u64 = 0x4000;
const STATUS: u64 = 0x5000;
const DATA: u64 = 0x6000;

/// Interrupts stay in their eventfds, where the test reads them.
struct Keep;

impl MsiRouter for Keep {
    fn connect(&self, slot: &mut Option<u32>, _message: MsiMessage, _trigger: &EventFd) -> io::Result<()> {
        *slot = Some(0);
        Ok(())
    }
    fn disconnect(&self, _slot: u32, _trigger: &EventFd) {}
}

/// No kernel: kicks come through the BAR.
struct NoDoorbell;

impl Doorbell for NoDoorbell {
    fn attach(&self, _gpa: u64, _fd: &EventFd) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn detach(&self, _gpa: u64, _fd: &EventFd) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The event loop's thread; it ends with this.
struct Loop {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Loop {
    fn start(device: Arc<Mutex<dyn MutEventSubscriber + Send>>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut events = EventManager::new().unwrap();
            events.add_subscriber(device);
            while !stopped.load(Ordering::Acquire) {
                events.run_with_timeout(10).unwrap();
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.take().unwrap().join().unwrap();
    }
}

struct Driver {
    function: VirtioPci,
    msix: Arc<Msix>,
    memory: GuestMemoryMmap,
    /// Offsets in BAR 0 of the common, notification and device structures.
    common: u64,
    notify: u64,
    device: u64,
    available: u16,
}

impl Driver {
    fn find(function: VirtioPci, msix: Arc<Msix>, memory: GuestMemoryMmap) -> Self {
        let mut driver = Self { function, msix, memory, common: 0, notify: 0, device: 0, available: 0 };
        let mut at = driver.config::<1>(0x34)[0];
        while at != 0 {
            let [id, next, _, kind] = driver.config(at.into());
            let offset = u32::from_le_bytes(driver.config(u16::from(at) + 8)).into();
            match (id, kind) {
                (9, 1) => driver.common = offset,
                (9, 2) => driver.notify = offset,
                (9, 4) => driver.device = offset,
                _ => {}
            }
            at = next;
        }
        driver
    }

    fn config<const N: usize>(&self, offset: u16) -> [u8; N] {
        let mut data = [0; N];
        self.function.config_read(offset, &mut data);
        data
    }

    fn write<const N: usize>(&self, register: u64, value: [u8; N]) {
        self.function.bar_write(0, self.common + register, &value);
    }

    fn read<const N: usize>(&self, register: u64) -> [u8; N] {
        let mut data = [0; N];
        self.function.bar_read(0, self.common + register, &mut data);
        data
    }

    /// Resets the device and waits for the end of the reset (virtio 1.3 §4.1.4.3.2).
    fn reset(&self) {
        self.write(0x14, [0]);
        while self.read::<1>(0x14) != [0] {
            thread::yield_now();
        }
    }

    /// virtio 1.3 §3.1.1, accepting everything.
    fn start(&mut self) {
        self.available = 0;
        self.memory.write_slice(&[0; 0x2000], GuestAddress(AVAILABLE)).unwrap();
        self.reset();
        self.write(0x14, [1]);
        self.write(0x14, [3]);
        for select in 0..2u32 {
            self.write(0x00, select.to_le_bytes());
            self.write(0x08, select.to_le_bytes());
            self.write(0x0c, self.read::<4>(0x04));
        }
        self.write(0x14, [11]);
        self.write(0x16, [0, 0]);
        self.write(0x18, 16u16.to_le_bytes());
        self.write(0x1a, 1u16.to_le_bytes());
        for (register, address) in [(0x20, TABLE), (0x28, AVAILABLE), (0x30, USED)] {
            self.write(register, u32::try_from(address).unwrap().to_le_bytes());
        }
        self.write(0x1c, [1, 0]);
        self.write(0x14, [15]);
        assert_eq!(self.read::<1>(0x14), [15]);
    }

    /// Offers a request of `length` bytes of data and kicks.
    fn offer(&mut self, kind: u32, sector: u64, length: u32, device_writes: bool) {
        self.memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.memory.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
        self.memory.write_obj(0xeeu8, GuestAddress(STATUS)).unwrap();
        let data = if device_writes { 3u16 } else { 1 };
        let chain = [(HEADER, 16, 1, 1u16), (DATA, length, data, 2), (STATUS, 1, 2, 0)];
        for (index, (address, length, flags, next)) in (0..).zip(chain) {
            let at = TABLE + index * 16;
            self.memory.write_obj(address, GuestAddress(at)).unwrap();
            self.memory.write_obj(length, GuestAddress(at + 8)).unwrap();
            self.memory.write_obj([flags, next], GuestAddress(at + 12)).unwrap();
        }
        // Head 0 in every place. used_event: interrupt for the next completion.
        self.memory.write_obj(self.available, GuestAddress(AVAILABLE + 4 + 32)).unwrap();
        self.available += 1;
        self.memory.store(self.available, GuestAddress(AVAILABLE + 2), Ordering::Release).unwrap();
        self.function.bar_write(0, self.notify, &[0, 0]);
    }

    /// Waits for the interrupt; the status.
    fn wait(&self) -> u8 {
        let trigger = self.msix.trigger(1).unwrap();
        while trigger.read().is_err() {
            thread::yield_now();
        }
        assert_eq!(
            self.memory.load::<u16>(GuestAddress(USED + 2), Ordering::Acquire).unwrap(),
            self.available
        );
        self.memory.read_obj(GuestAddress(STATUS)).unwrap()
    }
}

fn disk() -> (File, Disk) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    (file.try_clone().unwrap(), Disk::new(file, false).unwrap())
}

fn machine() -> (File, Driver, Arc<Mutex<Block>>, Loop) {
    let (file, disk) = disk();
    let block = Arc::new(Mutex::new(Block::new(disk, "disk0").unwrap()));
    let span = Span::new(Gpa::new(0x80_0000_0000), BAR_SIZE).unwrap();
    let plan = FunctionPlan {
        address: PciAddress::new(0, 1, 0, 0).unwrap(),
        role: FunctionRole::HostBridge, // not looked at
        bars: vec![BarPlan { index: 0, kind: BarKind::Memory64Prefetchable, span }],
        msix_vectors: 2,
    };
    let msix = Arc::new(Msix::new(2, Arc::new(Keep)).unwrap());
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap();
    let device: Arc<Mutex<dyn VirtioDevice>> = block.clone();
    let function =
        VirtioPci::new(device, &plan, Arc::clone(&msix), memory.clone(), Arc::new(NoDoorbell)).unwrap();
    function.place(&[DecodedBar::new(0, span)]);
    (file, Driver::find(function, msix, memory), block.clone(), Loop::start(block))
}

#[test]
fn a_driver_writes_flushes_and_reads_back() {
    let (file, mut driver, _block, _loop) = machine();
    driver.start();
    let mut capacity = [0; 8];
    driver.function.bar_read(0, driver.device, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), 2048);

    driver.memory.write_slice(&[0x5a; 4096], GuestAddress(DATA)).unwrap();
    driver.offer(1, 8, 4096, false);
    assert_eq!(driver.wait(), 0);
    driver.offer(4, 0, 0, false);
    assert_eq!(driver.wait(), 0);
    let mut bytes = [0; 4096];
    file.read_exact_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [0x5a; 4096]);

    driver.memory.write_slice(&[0; 4096], GuestAddress(DATA)).unwrap();
    driver.offer(0, 8, 4096, true);
    assert_eq!(driver.wait(), 0);
    driver.memory.read_slice(&mut bytes, GuestAddress(DATA)).unwrap();
    assert_eq!(bytes, [0x5a; 4096]);
    assert_eq!(driver.function.mistakes(), 0);
}

#[test]
fn a_reset_with_requests_in_flight_leaves_memory_alone_and_starts_again() {
    let (_file, mut driver, _block, _loop) = machine();
    for _ in 0..50 {
        driver.start();
        driver.offer(0, 0, 4096, true);
        driver.reset();
        // The device is at rest: nothing overwrites what the driver writes now.
        driver.memory.write_slice(&[7; 4096], GuestAddress(DATA)).unwrap();
        let used: u16 = driver.memory.read_obj(GuestAddress(USED + 2)).unwrap();
        driver.start();
        driver.offer(4, 0, 0, false);
        let _ = driver.msix.trigger(1).unwrap().read(); // of the request before the reset, if it was quick
        while driver.memory.load::<u16>(GuestAddress(USED + 2), Ordering::Acquire).unwrap() != 1 {
            thread::yield_now();
        }
        let mut bytes = [0; 4096];
        driver.memory.read_slice(&mut bytes, GuestAddress(DATA)).unwrap();
        assert!(bytes == [7; 4096] && used <= 1);
        let _ = driver.msix.trigger(1).unwrap().read();
    }
    // Wrong requests are not looked at: a start clears rings that the device may still be looking at.
    let counters = driver.function.counters();
    assert!(
        [("wrong register accesses", 0), ("failed requests", 0)].iter().all(|zero| counters.contains(zero))
    );
}

#[test]
fn finishing_while_the_driver_runs_makes_its_writes_durable_and_ends_the_device() {
    let (file, mut driver, block, _loop) = machine();
    driver.start();
    driver.memory.write_slice(&[0x5a; 512], GuestAddress(DATA)).unwrap();
    driver.offer(1, 0, 512, false);
    assert_eq!(driver.wait(), 0);
    block.lock().unwrap().reset();
    while !block.lock().unwrap().is_quiescent() {
        thread::yield_now();
    }
    assert!(block.lock().unwrap().take_loss().is_none());
    let mut bytes = [0; 512];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [0x5a; 512]);
    driver.function.bar_write(0, driver.notify, &[0, 0]); // a late kick has no effect
    assert!(block.lock().unwrap().counters().contains(&("failed requests", 0)));
}
