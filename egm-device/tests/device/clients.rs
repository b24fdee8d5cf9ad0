//! The device as a client sees it: ours and the `vfio_user` crate's.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

use egm_device::device::Connected;
use egm_device::device::registers::{Event, MAGIC, Register, SCRUBS};
use egm_vfio_wire::client::{CallError, Client};
use egm_vfio_wire::message::{Area, ByFile, DeviceInfo, DmaMap, DmaUnmap, IrqData, SetIrqs};
use egm_vfio_wire::serve::Device;

use crate::world::{
    BAR0, BAR2, BASE, CONFIG, ERROR, LIMIT, MSIX, REQUEST, SET, SIZE, World, event, fired, register, set,
    spans, vectors,
};

const HOLE: (u64, u64) = (0x8000, 0x3000);

/// QEMU waits 5 s for an answer that does not come, and aborts where its socket ends with an error.
#[test]
fn the_word_by_which_a_guest_gives_its_slice_back_is_answered_before_the_server_leaves() {
    const QUIESCE: u32 = 2;
    for _ in 0..200 {
        let world = World::new(&[]);
        let mut client = world.client();
        let (function, server) = (world.function.clone(), world.server.clone());
        let owner = std::thread::spawn(move || {
            function.request_return();
            assert!(function.wait_unused(LIMIT), "the guest did not answer");
            server.stop();
        });
        let given = client.write(BAR0, Register::Doorbell.offset(), &QUIESCE.to_le_bytes());
        drop(client);
        owner.join().unwrap();
        given.unwrap();
    }
}

#[test]
fn our_client_finds_the_slice_and_maps_what_is_real_of_it() {
    let world = World::new(&[HOLE]);
    let mut client = world.client();
    assert_eq!(client.device_info().unwrap(), DeviceInfo { resettable: true, regions: 9, irqs: 5 });
    let (bar, file) = client.region_info(BAR2).unwrap();
    let end = HOLE.0 + HOLE.1;
    let areas = [Area { offset: 0, size: HOLE.0 }, Area { offset: end, size: SIZE - end }];
    assert_eq!((bar.size, bar.offset, bar.mmap, &bar.areas[..]), (0x40_0000, BASE, true, &areas[..]));
    let file = File::from(file.unwrap());
    // The rule is linear: byte n of the BAR is byte offset + n of the file.
    file.write_all_at(b"mapped", BASE + end).unwrap();
    let mut data = [0; 6];
    client.read(BAR2, end, &mut data).unwrap();
    assert_eq!(&data, b"mapped");
    client.write(BAR2, end, b"trapped").unwrap();
    let mut data = [0; 7];
    file.read_exact_at(&mut data, BASE + end).unwrap();
    assert_eq!(&data, b"trapped");
}

#[test]
fn retired_pages_and_the_tail_read_ones_and_forget_writes() {
    let world = World::new(&[HOLE]);
    let mut client = world.client();
    let file = File::from(client.region_info(BAR2).unwrap().1.unwrap());
    for at in [HOLE.0, HOLE.0 + HOLE.1 - 8, SIZE, 0x40_0000 - 8] {
        client.write(BAR2, at, &[7; 8]).unwrap();
        let mut data = [0; 8];
        client.read(BAR2, at, &mut data).unwrap();
        assert_eq!(data, [0xff; 8], "{at:#x}");
    }
    // Across the edge of a hole: the bytes before it count.
    client.write(BAR2, HOLE.0 - 4, &[7; 8]).unwrap();
    let mut data = [0; 8];
    client.read(BAR2, HOLE.0 - 4, &mut data).unwrap();
    assert_eq!(data, [7, 7, 7, 7, 0xff, 0xff, 0xff, 0xff]);
    let mut hole = vec![1; 0x3000];
    file.read_exact_at(&mut hole, BASE + HOLE.0).unwrap();
    assert!(hole.iter().all(|byte| *byte == 0), "nobody touched it");
}

#[test]
fn a_page_that_goes_bad_is_two_interrupts_a_span_of_the_list_and_ones_from_then_on() {
    let world = World::new(&[]);
    let mut client = world.client();
    let events = vectors(&mut client);
    client.write(BAR2, 0x5000, &[7; 4]).unwrap();
    world.function.retire(&spans(&[(0x5000, 0x1000)]));
    assert_eq!(events.each_ref().map(fired), [true, true, false], "retired, and fewer that can be used");
    let seen =
        [Register::Pending, Register::Events, Register::Generation, Register::Spans, Register::RetiredBytes];
    assert_eq!(seen.map(|seen| register(&mut client, seen)), [3, 2, 1, 1, 0x1000]);
    let mut list = [0; 32];
    client.read(BAR0, 0x1000, &mut list[..8]).unwrap();
    client.read(BAR0, 0x1008, &mut list[8..16]).unwrap();
    assert_eq!(list[..16], [0x5000_u64.to_le_bytes(), 0x1000_u64.to_le_bytes()].concat());
    let mut data = [0; 4];
    client.read(BAR2, 0x5000, &mut data).unwrap();
    assert_eq!(data, [0xff; 4]);
    // A new client maps around it.
    drop(client);
    let areas = world.client().region_info(BAR2).unwrap().0.areas;
    assert_eq!(areas.len(), 2);
}

#[test]
fn the_owner_asks_and_the_guest_answers_by_quiescing() {
    let world = World::new(&[]);
    let mut client = world.client();
    let events = vectors(&mut client);
    let (sender, waited) = channel();
    let function = world.function.clone();
    let waiter = std::thread::spawn(move || sender.send(function.wait_unused(Duration::from_secs(600))));
    world.function.request_return();
    assert_eq!(events.each_ref().map(fired), [false, false, true]);
    assert_eq!(register(&mut client, Register::Pending), u64::from(Event::Wanted.bit()));
    assert!(waited.try_recv().is_err(), "nobody has answered yet");
    set(&mut client, Register::Doorbell, 2);
    assert_eq!(waited.recv(), Ok(true));
    waiter.join().unwrap().unwrap();
    set(&mut client, Register::Doorbell, 3);
    assert!(!world.function.wait_unused(Duration::ZERO), "it uses the memory again");
}

#[test]
fn the_vmm_is_asked_too_before_and_after_it_listens_and_notified_when_the_device_is_taken() {
    let world = World::new(&[]);
    let mut client = world.client();
    let kinds = [ERROR, REQUEST].map(|index| client.irq_info(index).unwrap());
    assert!(kinds.iter().all(|kind| (kind.count, kind.eventfd, kind.noresize) == (1, true, true)));
    let (early, late, error) = (event(), event(), event());
    let connect = |client: &mut Client, index, event: &OwnedFd| {
        client.set_irqs(SetIrqs { index, count: 1, ..SET }, &[event.as_fd()]).unwrap();
    };
    connect(&mut client, ERROR, &error);
    connect(&mut client, REQUEST, &early);
    assert_eq!((fired(&early), fired(&error)), (false, false));
    world.function.request_return();
    assert_eq!((fired(&early), fired(&error)), (true, false));
    connect(&mut client, REQUEST, &late);
    assert!(fired(&late), "the owner still asks");
    world.function.close();
    assert_eq!((fired(&late), fired(&error)), (false, true));
}

#[test]
fn a_guest_that_has_quiesced_loses_nothing_when_the_device_is_taken() {
    let world = World::new(&[]);
    let mut client = world.client();
    let error = event();
    client.set_irqs(SetIrqs { index: ERROR, count: 1, ..SET }, &[error.as_fd()]).unwrap();
    set(&mut client, Register::Doorbell, 2);
    world.function.close();
    assert!(!fired(&error));
}

#[test]
fn resets_of_a_client_that_has_hung_up_are_done_once_when_it_leaves() {
    let world = World::with(&[], true);
    let (socket, client) = UnixStream::pair().unwrap();
    let mut device = world.function.connect().over(socket.into());
    device.write(BAR2, 0, b"old");
    assert!(device.reset().is_ok());
    let read = |device: &mut Connected| {
        let mut data = [1; 3];
        device.read(BAR2, 0, &mut data);
        data
    };
    assert_eq!(read(&mut device), [0; 3], "it waits for the answer");
    device.write(BAR2, 0, b"old");
    drop(client);
    assert!(device.reset().is_ok());
    device.write(CONFIG, 0x58, &[0, 0x80]);
    assert_eq!(&read(&mut device), b"old", "nobody waits");
    device.disconnected();
    assert_eq!(read(&mut device), [0; 3], "the next client finds what a reset leaves");
}

#[test]
fn a_reset_keeps_the_bytes_and_forgets_the_guest_s_settings() {
    let world = World::new(&[]);
    let mut client = world.client();
    client.write(BAR2, 0x1000, b"kept").unwrap();
    client.write(CONFIG, 4, &[6, 0]).unwrap();
    set(&mut client, Register::First, 9);
    client.reset().unwrap();
    let mut data = [0; 4];
    client.read(BAR2, 0x1000, &mut data).unwrap();
    assert_eq!(&data, b"kept");
    client.read(CONFIG, 4, &mut data[..2]).unwrap();
    assert_eq!((data[0], register(&mut client, Register::First)), (0, 0));
}

#[test]
fn a_reset_scrubs_when_control_or_the_operator_asks_and_answers_when_all_is_zero() {
    for (operator, level) in [(false, false), (false, true), (true, false)] {
        let world = World::with(&[HOLE], operator);
        let mut client = world.client();
        client.write(BAR2, SIZE - 6, b"secret").unwrap();
        if !operator {
            set(&mut client, Register::Control, 1);
        }
        if level {
            // Function-level reset, by the PCI Express capability's device control.
            client.write(CONFIG, 0x58, &[0, 0x80]).unwrap();
        } else {
            client.reset().unwrap();
        }
        let mut data = [1; 6];
        client.read(BAR2, SIZE - 6, &mut data).unwrap();
        assert_eq!(data, [0; 6]);
        let seen = [Register::Status, Register::Scrubbed, Register::Control];
        assert_eq!(seen.map(|seen| register(&mut client, seen)), [0, SIZE - HOLE.1, 0]);
    }
}

#[test]
fn what_is_closed_scrubs_no_more_whatever_its_client_had_sent() {
    let world = World::with(&[], true);
    let mut client = world.client();
    client.write(BAR2, 0, b"kept").unwrap();
    world.function.close();
    assert!(client.reset().is_err());
    let mut data = [0; 4];
    client.read(BAR2, 0, &mut data).unwrap();
    assert_eq!(&data, b"kept");
}

#[test]
fn what_one_client_let_go_of_the_next_one_uses() {
    let world = World::new(&[]);
    let mut client = world.client();
    set(&mut client, Register::Doorbell, 2);
    assert!(world.function.wait_unused(Duration::ZERO));
    drop(client);
    let client = world.client();
    assert!(!world.function.wait_unused(Duration::ZERO));
    drop(client);
    assert!(world.function.wait_unused(Duration::MAX));
}

#[test]
fn the_doorbell_scrubs_while_the_guest_looks_at_the_status() {
    let world = World::new(&[]);
    let mut client = world.client();
    client.write(BAR2, 0x2000, b"secret").unwrap();
    set(&mut client, Register::Doorbell, 1);
    while register(&mut client, Register::Status) & u64::from(SCRUBS) != 0 {
        std::thread::yield_now();
    }
    assert_eq!(register(&mut client, Register::Scrubbed), SIZE);
    let mut data = [1; 6];
    client.read(BAR2, 0x2000, &mut data).unwrap();
    assert_eq!(data, [0; 6]);
}

/// The first scrub ends only after 10,000 rings.
#[test]
fn a_guest_that_keeps_ringing_gets_one_scrub_at_a_time_and_one_more() {
    let (passes, counted) = channel();
    let (go, wait) = channel();
    let wait = Mutex::new(wait);
    let scrubbed = Box::new(move |end: &Result<_, _>| {
        passes.send(end.is_ok()).unwrap();
        wait.lock().unwrap().recv().unwrap();
    });
    let world = World::watching(&[], false, scrubbed);
    // Dropped before the world, because the end of the world waits for the scrubs.
    let go = go;
    let mut client = world.client();
    set(&mut client, Register::Doorbell, 1);
    assert_eq!(counted.recv_timeout(LIMIT), Ok(true));
    for _ in 0..1000 {
        set(&mut client, Register::Doorbell, 1);
    }
    let named = |name: &str| {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks
            .filter(|task| std::fs::read_to_string(task.path().join("comm")).is_ok_and(|n| n == name))
            .count()
    };
    assert_eq!(named("scrub\n"), 1);
    go.send(()).unwrap();
    assert_eq!(counted.recv_timeout(LIMIT), Ok(true), "the rings are one more scrub");
    go.send(()).unwrap();
    while register(&mut client, Register::Status) & u64::from(SCRUBS) != 0 {
        std::thread::yield_now();
    }
    assert!(counted.try_recv().is_err(), "a third scrub");
    assert_eq!(register(&mut client, Register::Mistakes), 0);
}

#[test]
fn the_slice_stays_when_the_client_reconnects_and_its_vectors_and_windows_go() {
    let world = World::new(&[]);
    let mut client = world.client();
    let events = vectors(&mut client);
    let map = DmaMap { read: true, write: true, offset: 0, address: 0, size: 0x1000, by_file: ByFile::Any };
    client.dma_map(map, None).unwrap();
    client.write(BAR2, 0, b"kept").unwrap();
    drop(client);
    let mut client = world.client();
    let mut data = [0; 4];
    client.read(BAR2, 0, &mut data).unwrap();
    assert_eq!(&data, b"kept");
    client.dma_map(map, None).unwrap();
    world.function.request_return();
    assert_eq!(events.each_ref().map(fired), [false; 3]);
}

#[test]
fn interrupts_are_fired_by_flags_one_by_one_and_let_go() {
    let world = World::new(&[]);
    let mut client = world.client();
    let events = vectors(&mut client);
    client.set_irqs(SetIrqs { data: IrqData::Bool(&[1, 0, 1]), ..SET }, &[]).unwrap();
    assert_eq!(events.each_ref().map(fired), [true, false, true]);
    // A kind without vectors has nothing to disable.
    let none = client.set_irqs(SetIrqs { index: 0, count: 0, data: IrqData::None, ..SET }, &[]);
    assert!(matches!(none, Err(CallError::Refused { .. })));
    client.set_irqs(SetIrqs { start: 1, count: 1, data: IrqData::None, ..SET }, &[]).unwrap();
    assert_eq!(events.each_ref().map(fired), [false, true, false]);
    client.set_irqs(SetIrqs { count: 0, data: IrqData::None, ..SET }, &[]).unwrap();
    world.function.request_return();
    assert_eq!(events.each_ref().map(fired), [false; 3]);
    for wrong in
        [SetIrqs { start: 1, ..SET }, SetIrqs { index: 5, ..SET }, SetIrqs { index: 0, count: 1, ..SET }]
    {
        let refused = client.set_irqs(SetIrqs { data: IrqData::None, ..wrong }, &[]);
        assert!(matches!(refused, Err(CallError::Refused { .. })), "{wrong:?}");
    }
}

#[test]
fn windows_come_with_a_file_and_without_and_none_over_another() {
    let world = World::new(&[]);
    let mut client = world.client();
    let file = File::from(client.region_info(BAR2).unwrap().1.unwrap());
    let map =
        DmaMap { read: true, write: true, offset: 0, address: 0x1000, size: 0x1000, by_file: ByFile::Any };
    client.dma_map(map, Some(file.as_fd())).unwrap();
    client.dma_map(DmaMap { address: 0x4000, ..map }, None).unwrap();
    let over = client.dma_map(DmaMap { address: 0x4800, ..map }, None);
    assert!(matches!(over, Err(CallError::Refused { .. })));
    client.dma_unmap(DmaUnmap::Window { address: 0x1000, size: 0x1000 }).unwrap();
    let again = client.dma_unmap(DmaUnmap::Window { address: 0x1000, size: 0x1000 });
    assert!(matches!(again, Err(CallError::Refused { .. })));
    client.dma_unmap(DmaUnmap::All).unwrap();
}

#[test]
fn the_vfio_user_crate_s_client_drives_the_device() {
    let world = World::new(&[HOLE]);
    let mut client = vfio_user::Client::new(&world.path).unwrap();
    let bar = client.region(BAR2).unwrap();
    let areas: Vec<_> = bar.sparse_areas.iter().map(|area| (area.offset, area.size)).collect();
    let end = HOLE.0 + HOLE.1;
    assert_eq!((bar.size, areas), (0x40_0000, vec![(0, HOLE.0), (end, SIZE - end)]));
    let mapped = bar.file_offset.clone().unwrap();
    assert_eq!(mapped.start(), BASE);
    mapped.file().write_all_at(b"mapped", mapped.start() + end).unwrap();
    let mut data = [0; 6];
    client.region_read(BAR2, end, &mut data).unwrap();
    assert_eq!(&data, b"mapped");
    let mut magic = [0; 4];
    client.region_read(BAR0, 0, &mut magic).unwrap();
    assert_eq!(u32::from_le_bytes(magic), MAGIC);
    // BARs are sized by writing ones, through the server.
    client.region_write(CONFIG, 0x18, &[0xff; 4]).unwrap();
    let mut sized = [0; 4];
    client.region_read(CONFIG, 0x18, &mut sized).unwrap();
    assert_eq!(u32::from_le_bytes(sized), 0xffc0_000c);
    assert_eq!(client.get_irq_info(MSIX).unwrap().count, 3);
    let event = event();
    client.set_irqs(MSIX, 0x24, 0, 1, &[event.as_raw_fd()]).unwrap();
    world.function.retire(&spans(&[(0, 0x1000)]));
    assert!(fired(&event));
    client.dma_map(0, 0x8000_0000, 0x1000, mapped.file().as_raw_fd()).unwrap();
    client.dma_unmap(0x8000_0000, 0x1000).unwrap();
    client.reset().unwrap();
    client.shutdown().unwrap();
}
