//! The device from the driver's side: over a pair of sockets that keep packets apart as a tap does, and over a real
//! tap in a network of its own where the test may make one.

use std::fs::File;
use std::io::Read;
use std::io::Write;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::Mutex;

use event_manager::EventManager;
use event_manager::SubscriberOps;
use proptest::prelude::*;
use rustix::net::AddressFamily;
use rustix::net::SocketFlags;
use rustix::net::SocketType;
use vm_memory::Bytes;
use vm_memory::GuestAddress;
use vm_memory::GuestMemoryMmap;

use super::userspace;
use super::*;
use crate::virtio::RING_EVENT_IDX;
use crate::virtio::testing::CountingInterrupt;
use crate::virtio::testing::Driver;
use crate::virtio::testing::EventInterrupt;
use crate::virtio::testing::Part;
use crate::virtio::testing::enter_new_network;
use crate::virtio::testing::memory;

const BUFFERS: u64 = 0x1_0000;

/// Two ends of a thing that keeps packets apart; the first is the tap.
fn tap_and_host() -> (File, File) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    (File::from(a), File::from(b))
}

fn bytes(memory: &GuestMemoryMmap, address: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    bytes
}

#[test]
fn a_chain_of_several_buffers_is_one_packet() {
    let (tap, mut host) = tap_and_host();
    let memory = memory();
    let mut driver = Driver::new(&memory, 0x1000, 16);
    memory.write_slice(b"headheadheadpay", GuestAddress(BUFFERS)).unwrap();
    memory.write_slice(b"load", GuestAddress(BUFFERS + 0x1000)).unwrap();
    let head = driver.offer(&[Part::Read(BUFFERS, 15), Part::Read(BUFFERS + 0x1000, 4)]);
    let mut ring = driver.ring();
    assert_eq!(userspace::transmit(&mut ring, &tap, &mut Dropped::default()), Pause::Driver);
    assert_eq!(driver.used(), [(head, 0)]);
    let mut packet = [0; 64];
    let length = host.read(&mut packet).unwrap();
    assert_eq!(&packet[..length], b"headheadheadpayload");
}

#[test]
fn a_chain_that_the_device_could_write_is_no_packet() {
    let (tap, mut host) = tap_and_host();
    let memory = memory();
    let mut driver = Driver::new(&memory, 0x1000, 16);
    let head = driver.offer(&[Part::Read(BUFFERS, 15), Part::Write(BUFFERS + 0x1000, 4)]);
    let mut ring = driver.ring();
    userspace::transmit(&mut ring, &tap, &mut Dropped::default());
    assert_eq!(driver.used(), [(head, 0)]);
    assert_eq!(ring.malformed(), 1);
    assert_eq!(host.read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_tap_that_is_full_loses_nothing() {
    let (tap, mut host) = tap_and_host();
    let memory = memory();
    let mut driver = Driver::new(&memory, 0x1000, 128);
    let mut ring = driver.ring();
    let (mut sent, mut completed) = (0u32, 0);
    let mut dropped = Dropped::default();
    // Each packet carries its number.
    loop {
        let address = BUFFERS + u64::from(sent % 64) * 0x1000;
        memory.write_obj(sent, GuestAddress(address)).unwrap();
        driver.offer(&[Part::Read(address, 0x1000)]);
        sent += 1;
        let pause = userspace::transmit(&mut ring, &tap, &mut dropped);
        completed += driver.used().len();
        if pause == Pause::Tap {
            break;
        }
    }
    assert_eq!(completed + 1, sent as usize);
    let mut packet = vec![0; 0x2000];
    for number in 0..sent {
        if number == 1 {
            assert_eq!(userspace::transmit(&mut ring, &tap, &mut dropped), Pause::Driver);
        }
        assert_eq!(host.read(&mut packet).unwrap(), 0x1000);
        assert_eq!(packet[..4], number.to_le_bytes());
    }
    assert_eq!(dropped, Dropped::default());
}

#[test]
fn one_event_moves_at_most_the_budget() {
    let (tap, mut host) = tap_and_host();
    let memory = memory();
    let mut driver = Driver::new(&memory, 0x1000, 128);
    for _ in 0..100 {
        driver.offer(&[Part::Read(BUFFERS, 60)]);
    }
    let mut ring = driver.ring();
    assert_eq!(userspace::transmit(&mut ring, &tap, &mut Dropped::default()), Pause::Budget);
    assert_eq!(driver.used().len(), userspace::BUDGET);
    assert_eq!(userspace::transmit(&mut ring, &tap, &mut Dropped::default()), Pause::Driver);
    assert_eq!(driver.used().len(), 100 - userspace::BUDGET);
    assert_eq!(host.read(&mut [0; 64]).unwrap(), 60);
}

#[test]
fn a_packet_waits_in_the_tap_until_the_driver_has_a_buffer() {
    let (tap, mut host) = tap_and_host();
    let memory = memory();
    let mut driver = Driver::new(&memory, 0x1000, 16);
    let mut receive = Receive::new(driver.ring(), 0);
    host.write_all(&[7; 100]).unwrap();
    assert_eq!(receive.run(&tap, &mut Dropped::default()), Pause::Driver);

    let too_small = driver.offer(&[Part::Write(BUFFERS, 11)]);
    let readable = driver.offer(&[Part::Read(BUFFERS, 2000)]);
    let good = driver.offer(&[Part::Write(BUFFERS, 12), Part::Write(BUFFERS + 0x1000, 1600)]);
    assert_eq!(receive.run(&tap, &mut Dropped::default()), Pause::Driver);
    assert_eq!(driver.used(), [(too_small, 0), (readable, 0), (good, 100)]);
    assert_eq!(receive.ring.malformed(), 2);
    assert_eq!(bytes(&memory, BUFFERS, 12), [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1, 0], "num_buffers is 1");
    assert_eq!(bytes(&memory, BUFFERS + 0x1000, 89), [vec![7; 88], vec![0]].concat());
}

#[test]
fn without_merging_a_packet_never_takes_a_second_buffer() {
    let (tap, mut host) = tap_and_host();
    let memory = memory();
    let mut driver = Driver::new(&memory, 0x1000, 16);
    let first = driver.offer(&[Part::Write(BUFFERS, 50)]);
    driver.offer(&[Part::Write(BUFFERS + 0x1000, 50)]);
    host.write_all(&[7; 80]).unwrap();
    assert_eq!(Receive::new(driver.ring(), 0).run(&tap, &mut Dropped::default()), Pause::Tap);
    assert_eq!(driver.used(), [(first, 50)]);
}

#[test]
fn with_merging_the_tap_is_not_read_before_the_largest_packet_fits() {
    let (tap, mut host) = tap_and_host();
    let memory = memory();
    let mut driver = Driver::new(&memory, 0x1000, 64);
    let mut receive = Receive::new(driver.ring(), spec::MERGEABLE | spec::GUEST_LARGE);
    host.write_all(&[7; 3000]).unwrap();
    let offer = |driver: &mut Driver, i: u64| driver.offer(&[Part::Write(BUFFERS + i * 0x1000, 2048)]);
    for i in 0..32 {
        offer(&mut driver, i);
    }
    assert_eq!(receive.run(&tap, &mut Dropped::default()), Pause::Driver);
    assert_eq!(driver.used(), []);
    offer(&mut driver, 32);
    assert_eq!(receive.run(&tap, &mut Dropped::default()), Pause::Driver);
    assert_eq!(driver.used(), [(0, 2048), (1, 952)]);
    assert_eq!(bytes(&memory, BUFFERS + 10, 2), [2, 0], "num_buffers");
}

#[test]
fn with_merging_a_small_queue_that_gave_all_it_has_is_served() {
    let (tap, mut host) = tap_and_host();
    let memory = memory();
    let mut driver = Driver::new(&memory, 0x1000, 16);
    for i in 0..16 {
        driver.offer(&[Part::Write(BUFFERS + i * 0x1000, 2048)]);
    }
    host.write_all(&[7; 3000]).unwrap();
    Receive::new(driver.ring(), spec::MERGEABLE | spec::GUEST_LARGE).run(&tap, &mut Dropped::default());
    assert_eq!(driver.used(), [(0, 2048), (1, 952)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn whatever_the_buffers_packets_arrive_whole_and_in_order(
        sizes in prop::collection::vec(12u32..3000, 1..16),
        lengths in prop::collection::vec(14usize..1500, 1..40),
    ) {
        let (tap, mut host) = tap_and_host();
        let memory = memory();
        let mut driver = Driver::new(&memory, 0x1000, 128);
        let mut receive = Receive::new(driver.ring(), spec::MERGEABLE);
        for (i, length) in lengths.iter().enumerate() {
            host.write_all(&vec![u8::try_from(i).unwrap(); *length]).unwrap();
        }
        let buffers: Vec<u32> = sizes.iter().copied().cycle().take(120).collect();
        for (i, size) in buffers.iter().enumerate() {
            driver.offer(&[Part::Write(BUFFERS + i as u64 * 0x1000, *size)]);
        }
        receive.run(&tap, &mut Dropped::default());
        let mut used = driver.used().into_iter();
        let mut packet = 0;
        while let Some((head, written)) = used.next() {
            let at = BUFFERS + u64::from(head) * 0x1000;
            let count = u16::from_le_bytes(bytes(&memory, at + 10, 2).try_into().unwrap());
            let mut content = bytes(&memory, at, written as usize);
            for _ in 1..count {
                let (head, written) = used.next().unwrap();
                content.extend(bytes(&memory, BUFFERS + u64::from(head) * 0x1000, written as usize));
            }
            let mut expected = vec![u8::try_from(packet).unwrap(); lengths[packet]];
            expected[10..12].copy_from_slice(&count.to_le_bytes());
            prop_assert_eq!(content, expected);
            packet += 1;
        }
        // Those that did not fit are still in the tap.
        for length in &lengths[packet..] {
            let mut left = vec![0; 2000];
            prop_assert_eq!((&tap).read(&mut left).unwrap(), *length);
        }
    }
}

/// A tap with two queues and an address, in a network of this thread; prints why not where that is impossible.
fn real_tap() -> Option<Vec<File>> {
    let ready = enter_new_network().map_err(|e| e.to_string()).and_then(|()| {
        let script = "ip tuntap add egm0 mode tap multi_queue && ip link set egm0 up && ip link set lo up && \
                      ip addr add 192.0.2.1/24 dev egm0 && \
                      ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev egm0";
        let output = Command::new("sh").args(["-c", script]).output().map_err(|e| e.to_string())?;
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    });
    match ready.and_then(|()| tap::open("egm0", 2).map_err(|e| e.to_string())) {
        Ok(taps) => Some(taps),
        Err(reason) => {
            println!("skipped: no tap can be made here: {}", reason.trim());
            None
        }
    }
}

/// The host's hardware address on that tap.
fn tap_mac() -> String {
    let output = Command::new("ip").args(["-o", "link", "show", "egm0"]).output().unwrap();
    let words = String::from_utf8(output.stdout).unwrap();
    let mut words = words.split_whitespace().skip_while(|word| *word != "link/ether");
    words.nth(1).unwrap().to_owned()
}

/// Everything that a running device needs, and its driver.
struct Machine {
    memory: GuestMemoryMmap,
    drivers: Vec<Driver>,
    device: Arc<Mutex<Net>>,
    events: EventManager<Arc<Mutex<Net>>>,
    interrupt: Arc<CountingInterrupt>,
}

impl Machine {
    fn new(taps: Vec<File>) -> Self {
        let memory = memory();
        let device = Net::new([2, 0, 0, 0, 0, 2], taps, Backend::Userspace).unwrap();
        let drivers =
            (0..device.queue_sizes().len() as u64).map(|i| Driver::new(&memory, 0x1000 + i * 0x1000, 64));
        let drivers: Vec<_> = drivers.collect();
        let device = Arc::new(Mutex::new(device));
        let mut events = EventManager::new().unwrap();
        events.add_subscriber(device.clone());
        Self { memory, drivers, device, events, interrupt: Arc::default() }
    }

    fn activate(&self) {
        let activation = Activation {
            memory: self.memory.clone(),
            queues: self.drivers.iter().map(|d| Some(d.queue())).collect(),
            features: spec::features(2) & !RING_EVENT_IDX,
            interrupt: self.interrupt.clone(),
        };
        self.device.lock().unwrap().activate(activation).unwrap();
    }

    fn kick(&self, queue: usize) {
        self.device.lock().unwrap().kicks()[queue].write(1).unwrap();
    }

    /// Runs the event loop until queue `queue` has used buffers.
    fn until_used(&mut self, queue: usize) -> Vec<(u16, u32)> {
        for _ in 0..1000 {
            let used = self.drivers[queue].used();
            if !used.is_empty() {
                return used;
            }
            self.events.run_with_timeout(100).unwrap();
        }
        panic!("queue {queue} was never served");
    }

    fn command(&mut self, command: [u8; 4]) -> u8 {
        let (at, control) = (0x8000, self.drivers.len() - 1);
        self.memory.write_slice(&command, GuestAddress(at)).unwrap();
        self.drivers[control].offer(&[Part::Read(at, 2), Part::Read(at + 2, 2), Part::Write(at + 8, 1)]);
        self.kick(control);
        assert_eq!(self.until_used(control)[0].1, 1);
        bytes(&self.memory, at + 8, 1)[0]
    }
}

/// An Ethernet frame with a UDP datagram for 192.0.2.1, and the device's header before it.
fn datagram(port: u16, payload: &[u8], mac: &str) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame.extend(mac.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()));
    frame.extend([2, 0, 0, 0, 0, 2, 8, 0]);
    let length = u16::try_from(28 + payload.len()).unwrap();
    let mut ip = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 2, 192, 0, 2, 1];
    ip[2..4].copy_from_slice(&length.to_be_bytes());
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    frame.extend(ip);
    frame.extend([0x27, 0x10]);
    frame.extend(port.to_be_bytes());
    frame.extend((length - 20).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(payload);
    frame
}

#[test]
fn datagrams_cross_a_real_tap_both_ways_and_again_after_a_reset() {
    let Some(taps) = real_tap() else { return };
    let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let mac = tap_mac();
    let mut machine = Machine::new(taps);
    for round in 0..2 {
        machine.activate();

        let frame = datagram(port, b"from the guest", &mac);
        machine.memory.write_slice(&frame, GuestAddress(BUFFERS)).unwrap();
        machine.drivers[1].offer(&[Part::Read(BUFFERS, u32::try_from(frame.len()).unwrap())]);
        machine.kick(1);
        machine.until_used(1);
        let mut received = [0; 64];
        let length = socket.recv(&mut received).unwrap();
        assert_eq!(&received[..length], b"from the guest", "round {round}");
        assert!(machine.interrupt.count() > 0);

        for i in 0..60 {
            machine.drivers[0].offer(&[Part::Write(BUFFERS + i * 0x1000, 2048)]);
        }
        machine.kick(0);
        socket.send_to(b"to the guest", "192.0.2.2:9").unwrap();
        let found = (0..100).any(|_| {
            machine.until_used(0).iter().any(|(head, length)| {
                let packet = bytes(&machine.memory, BUFFERS + u64::from(*head) * 0x1000, *length as usize);
                packet.ends_with(b"to the guest")
            })
        });
        assert!(found, "round {round}");

        machine.device.lock().unwrap().reset();
        machine.drivers = (0..5).map(|i| Driver::new(&machine.memory, 0x1000 + i * 0x1000, 64)).collect();
        for driver in &machine.drivers {
            driver.clear();
        }
    }
    assert!(machine.device.lock().unwrap().counters().iter().all(|(_, number)| *number == 0));
}

#[test]
fn the_driver_chooses_how_many_pairs_the_tap_spreads_over() {
    let Some(taps) = real_tap() else { return };
    let mut machine = Machine::new(taps);
    machine.activate();
    assert_eq!(machine.command([4, 0, 2, 0]), spec::ACCEPTED);
    assert_eq!(machine.command([4, 0, 3, 0]), spec::REFUSED);
    assert_eq!(machine.command([4, 0, 1, 0]), spec::ACCEPTED);
    assert_eq!(machine.command([0, 0, 1, 0]), spec::REFUSED);
    assert!(machine.device.lock().unwrap().counters().contains(&("refused commands", 2)));
}

#[test]
fn a_tap_of_one_queue_is_named_when_several_pairs_are_requested() {
    if real_tap().is_none() {
        return;
    }
    let made = Command::new("ip").args(["tuntap", "add", "egm1", "mode", "tap"]).status().unwrap();
    assert!(made.success());
    let error = tap::open("egm1", 2).unwrap_err();
    assert!(matches!(error, tap::TapError::SingleQueue { queue_pairs: 2, .. }), "{error}");
    let held = tap::open("egm1", 1).unwrap();
    let adopted = tap::adopt(&[held[0].as_raw_fd()]).unwrap();
    assert_eq!(adopted.len(), 1, "a descriptor of it is as good as its name");
    tap::set_offload(&adopted[0], 0).unwrap();
    drop(adopted);
    assert!(matches!(tap::open("egm1", 1), Err(tap::TapError::Busy { .. })));
    drop(held);
    assert_eq!(tap::open("egm0", 1).unwrap().len(), 1, "a multi-queue tap serves one pair too");
}

#[test]
fn the_configuration_space_ends_with_zeros() {
    let taps = vec![tap_and_host().0, tap_and_host().0];
    let device = Net::new([2, 0, 0, 0, 0, 9], taps, Backend::Userspace).unwrap();
    let mut data = [0xff; 6];
    device.config_read(8, &mut data);
    assert_eq!(data, [2, 0, 0, 0, 0, 0]);
    device.config_read(u64::MAX, &mut data);
    assert_eq!(data, [0; 6]);
}

#[test]
fn the_kernel_moves_packets_until_the_device_is_reset() {
    let Some(mut taps) = real_tap() else { return };
    taps.truncate(1);
    let file = match File::options().read(true).write(true).open("/dev/vhost-net") {
        Ok(file) => file,
        Err(error) => return println!("skipped: /dev/vhost-net: {error}"),
    };
    let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let mac = tap_mac();
    let mut device = Net::new([2, 0, 0, 0, 0, 2], taps, Backend::vhost(vec![file]).unwrap()).unwrap();
    for round in 0..2 {
        let memory = memory();
        let interrupt = Arc::new(EventInterrupt::new());
        let (mut receive, mut transmit) =
            (Driver::new(&memory, 0x1000, 64), Driver::new(&memory, 0x2000, 64));
        let activation = Activation {
            memory: memory.clone(),
            queues: vec![Some(receive.queue()), Some(transmit.queue())],
            features: device.features() & !RING_EVENT_IDX,
            interrupt: interrupt.clone(),
        };
        device.activate(activation).unwrap();

        let frame = datagram(port, b"from the guest", &mac);
        memory.write_slice(&frame, GuestAddress(BUFFERS)).unwrap();
        transmit.offer(&[Part::Read(BUFFERS, u32::try_from(frame.len()).unwrap())]);
        device.kicks()[1].write(1).unwrap();
        let mut received = [0; 64];
        let length = socket.recv(&mut received).unwrap();
        assert_eq!(&received[..length], b"from the guest", "round {round}");

        for i in 0..60 {
            receive.offer(&[Part::Write(BUFFERS + i * 0x1000, 2048)]);
        }
        device.kicks()[0].write(1).unwrap();
        let mut arrives = |text: &[u8]| {
            socket.send_to(text, "192.0.2.2:9").unwrap();
            let mut found = false;
            while !found {
                interrupt.wait(0);
                found = receive.used().iter().any(|(head, length)| {
                    let packet = bytes(&memory, BUFFERS + u64::from(*head) * 0x1000, *length as usize);
                    packet.ends_with(text)
                });
            }
        };
        arrives(b"to the guest");
        interrupt.change(0);
        device.vector_changed(0).unwrap();
        arrives(b"by another vector");

        device.reset();
        transmit.used();
        transmit.offer(&[Part::Read(BUFFERS, 64)]);
        device.kicks()[1].write(1).unwrap();
        socket.send_to(b"nobody hears", "192.0.2.2:9").unwrap();
        assert!(
            receive.used().is_empty() && transmit.used().is_empty(),
            "memory is left alone after a reset"
        );
    }
    assert!(device.counters().iter().all(|(_, number)| *number == 0));
}
