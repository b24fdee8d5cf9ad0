//! Two functions behind vfio-user servers in one guest: their engines reach its memory and each other's BARs.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use egm_address::Iova;
use egm_fixtures::function::config::Identity;
use egm_fixtures::function::device::{Function, Setup};
use egm_fixtures::function::registers::OWN;
use egm_vfio::client::{UserDomain, UserFunction, over};
use egm_vfio::dma::{Access as DmaAccess, Domain};
use egm_vfio::mapping::{MadeOf, Mapping};
use egm_vfio_wire::serve::serve;
use egm_vfio_wire::socket::{BusyPoll, Closer, Connection};

use super::*;

const SETUP: Setup = Setup {
    identity: Identity { vendor: 0x15b3, device: 0x1021, class: 0x02_0000 },
    bar: 1 << 30,
    memory: 1 << 20,
    vectors: 4,
};
const REGISTERS: u64 = 0xc000_0000;
/// Where the guest has its memory.
const MEMORY: u64 = 0x10_0000;
const MEMORY_SIZE: u64 = 0x1_0000;
const DONE: u32 = 2;
const FAULT: u32 = 3;

/// A function, the address space of its engine, and what ends its server.
fn served() -> (UserFunction, UserDomain, Closer) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection =
        |socket: UnixStream| Connection::new(socket.into(), Duration::from_secs(20), BusyPoll::NONE).unwrap();
    let mut server = connection(theirs);
    let closer = server.closer().unwrap();
    std::thread::spawn(move || serve(&mut server, &mut Function::new(SETUP).unwrap()));
    let (function, domain) = over("test.sock".to_owned(), connection(ours)).unwrap();
    (function, domain, closer)
}

/// A guest with two of them, at 00:01.0 and 00:02.0.
struct Pair {
    functions: [Arc<AssignedFunction>; 2],
    closers: [Closer; 2],
    memory: Arc<dyn HostMemory>,
    root: RootComplex,
    router: Arc<FakeRouter>,
}

fn bars(number: u64) -> Vec<BarPlan> {
    let bar =
        |index, kind, start, size| BarPlan { index, kind, span: Span::new(Gpa::new(start), size).unwrap() };
    vec![
        bar(0, BarKind::Memory32, REGISTERS + number * 0x4000, 0x4000),
        bar(2, BarKind::Memory64Prefetchable, BAR + number * SETUP.bar, SETUP.bar),
    ]
}

impl Pair {
    fn new() -> Self {
        let [(first, one, a), (second, other, b)] = [served(), served()];
        let domains: Vec<Arc<dyn Domain>> = vec![Arc::new(one), Arc::new(other)];
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(MEMORY_SIZE).unwrap();
        let kept = OwnedFd::from(file.try_clone().unwrap());
        let memory = Mapping::of(file.as_fd(), 0, MEMORY_SIZE, 0, MadeOf::File(kept, 0)).unwrap();
        let memory: Arc<dyn HostMemory> = Arc::new(memory);
        let span = Span::new(Iova::new(MEMORY), MEMORY_SIZE).unwrap();
        domains.iter().for_each(|domain| domain.map(span, &memory, 0, DmaAccess::ReadWrite).unwrap());
        let (peers, router) = (Arc::new(Peers::new(domains)), Arc::new(FakeRouter::default()));
        let slots = Arc::new(FakeSlots::default());
        let mut bus = Bus::default();
        let mut number = 0;
        let functions = [first, second].map(|backend| {
            let connections = Connections {
                router: Arc::clone(&router) as _,
                line: None,
                slots: Arc::clone(&slots) as _,
                peers: Arc::clone(&peers),
                reachable: true,
                memory: Vec::new(),
            };
            let bars = bars(number);
            let function = AssignedFunction::new(Arc::new(backend), &bars, Vec::new(), connections).unwrap();
            function.share_bars(&bars).unwrap();
            number += 1;
            bus.add(u8::try_from(number * 8).unwrap(), Arc::clone(&function) as _);
            function
        });
        let root = RootComplex::new(bus);
        for devfn in [8, 16] {
            root.config_write(0, devfn, COMMAND, &[6, 0]);
        }
        Self { functions, closers: [a, b], memory, root, router }
    }

    fn set(&self, function: u64, register: u64, data: &[u8]) {
        self.root.memory_write(Gpa::new(REGISTERS + function * 0x4000 + register), data);
    }

    fn register(&self, function: u64, register: u64) -> u32 {
        let mut data = [0; 4];
        self.root.memory_read(Gpa::new(REGISTERS + function * 0x4000 + register), &mut data);
        u32::from_le_bytes(data)
    }

    fn own(&self, function: u64) -> u64 {
        let mut data = [0; 8];
        self.root.memory_read(Gpa::new(BAR + function * SETUP.bar), &mut data);
        u64::from_le_bytes(data)
    }

    /// Has the engine of `function` copy 8 bytes; its status.
    fn copy(&self, function: u64, from: u64, to: u64) -> u32 {
        for (register, value) in [(0x10, from), (0x18, to), (0x20, 8)] {
            self.set(function, register, &value.to_le_bytes());
        }
        self.set(function, 0x2c, &1_u32.to_le_bytes());
        self.register(function, 0x30)
    }
}

#[test]
fn engines_reach_memory_and_each_others_bars_where_the_guest_has_them() {
    let pair = Pair::new();
    pair.memory.write(0x20, &7_u64.to_le_bytes()).unwrap();
    assert_eq!(pair.copy(0, MEMORY + 0x20, OWN), DONE);
    assert_eq!(pair.own(0), 7);
    assert_eq!(pair.copy(0, OWN, BAR + SETUP.bar), DONE);
    assert_eq!(pair.own(1), 7);
    assert_eq!(pair.copy(1, BAR, MEMORY + 0x40), DONE);
    let mut data = [0; 8];
    pair.memory.read(0x40, &mut data).unwrap();
    assert_eq!(u64::from_le_bytes(data), 7);
    assert_eq!(pair.copy(1, OWN, MEMORY + MEMORY_SIZE), FAULT);
}

#[test]
fn a_vector_that_the_guest_opens_is_connected_at_the_server() {
    let pair = Pair::new();
    let entry = [0xfee0_0000_u32, 0, 0x41, 0].map(u32::to_le_bytes).concat();
    pair.root.config_write(0, 8, 0x92, &[0, 0x80]);
    pair.set(0, TABLE, &entry);
    assert_eq!((pair.router.data(), pair.functions[0].counters()[1].1), (vec![0x41], 0));
}

#[test]
fn of_a_server_that_died_nothing_is_left_and_the_other_function_works() {
    let pair = Pair::new();
    pair.closers[0].close();
    assert_eq!(pair.register(0, 0), u32::MAX);
    pair.functions[0].lose();
    assert_eq!((pair.own(0), pair.copy(1, OWN, BAR)), (u64::MAX, FAULT));
    assert_eq!(pair.copy(1, OWN, MEMORY), DONE);
    pair.functions.iter().for_each(|function| function.end());
}
