//! A thousand clients, one after the other, leave no resource behind.
#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use egm_function::config::Identity;
use egm_function::device::{Function, Setup};
use egm_vfio_wire::client::Client;
use egm_vfio_wire::message::{ByFile, DmaMap, IrqAction, IrqData, SetIrqs};
use egm_vfio_wire::serve::serve;
use egm_vfio_wire::socket::{Connection, Patience};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;

const LIMIT: Duration = Duration::from_secs(20);
const ROUNDS: u64 = 1000;

fn connection(socket: UnixStream) -> Connection {
    Connection::new(socket.into(), LIMIT, Patience::NONE).unwrap()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Maps memory, connects vectors, and disconnects without notice, each client in the middle of a message.
fn visit(socket: UnixStream, round: u64) {
    let leftover = socket.try_clone().unwrap();
    let mut client = Client::new(connection(socket)).unwrap();
    let memory = File::from(rustix::fs::memfd_create(c"guest", MemfdFlags::CLOEXEC).unwrap());
    for window in 0..8 {
        let map = DmaMap {
            read: true,
            write: true,
            offset: 0,
            address: window << 12,
            size: 1 << 12,
            by_file: ByFile::Any,
        };
        client.dma_map(map, Some(memory.as_fd())).unwrap();
    }
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let set = SetIrqs { index: 2, start: 0, count: 4, action: IrqAction::Trigger, data: IrqData::Eventfd };
    client.set_irqs(set, &[event.as_fd(); 4]).unwrap();
    client.write(2, 0, &round.to_le_bytes()).unwrap();
    client.reset().unwrap();
    if round % 2 == 1 {
        rustix::io::write(&leftover, &[1, 2, 3, 4, 5]).unwrap();
    }
}

#[test]
fn the_files_of_a_thousand_clients_are_closed_and_the_memory_is_the_last_one_s() {
    let identity = Identity { vendor: 0x10de, device: 0x2342, class: 0x03_0200 };
    let setup = Setup { identity, bar: 1 << 20, memory: 1 << 20, vectors: 4 };
    let mut function = Function::new(setup).unwrap();
    let before = open_files();
    for round in 0..ROUNDS {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let client = std::thread::spawn(move || visit(ours, round));
        let left = serve(&mut connection(theirs), &mut function);
        assert_eq!(left.is_ok(), round % 2 == 0, "{round}: {left:?}");
        client.join().unwrap();
    }
    assert_eq!(open_files(), before);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let reader = std::thread::spawn(move || {
        let mut data = [0; 8];
        Client::new(connection(ours)).unwrap().read(2, 0, &mut data).unwrap();
        u64::from_le_bytes(data)
    });
    serve(&mut connection(theirs), &mut function).unwrap();
    assert_eq!(reader.join().unwrap(), ROUNDS - 1);
}
