//! A vfio-user server that means harm: whatever it says of its device, and whenever it goes, the VMM opens it or refuses it,
//! and a guest that has it runs on.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use egm_vfio::client::{UserDomain, UserFunction, over};
use egm_vfio_wire::message::{Area, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, RegionInfo, SetIrqs};
use egm_vfio_wire::serve::{Device, serve};
use egm_vfio_wire::socket::{Closer, Connection, Patience};
use rustix::io::Errno;

use super::*;

/// No answer is late on any machine, and one that never comes ends a case soon.
const LIMIT: Duration = Duration::from_secs(5);
/// Largest BAR that the guest is given a place for.
const MOST: u64 = 1 << 40;
const CONFIG: u32 = 7;

/// What a server says of a region.
#[derive(Debug, Clone)]
struct Said {
    size: u64,
    offset: u64,
    mmap: bool,
    areas: Vec<(u64, u64)>,
    /// Which of [`files`] comes with it.
    file: usize,
}

/// What a server says and does.
#[derive(Debug, Clone)]
struct Script {
    regions: u32,
    irqs: u32,
    said: Vec<Said>,
    /// Vectors, whether by eventfd, whether none can be added.
    vectors: Vec<(u32, bool, bool)>,
    config: Vec<u8>,
    /// What it answers to what can fail, in turn: an errno.
    errors: Vec<Option<u8>>,
    /// Requests until it goes.
    life: u32,
}

/// A number that makes sense, or nearly, or not at all.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => prop::sample::select(vec![0, 0x1000, 0x4000, 0x10_0000, 1 << 30, 0x1234, 1]),
        1 => any::<u64>(),
        1 => (0..64u32).prop_map(|bit| 1 << bit),
    ]
}

fn said() -> impl Strategy<Value = Said> {
    let areas = prop::collection::vec((number(), number()), 0..3);
    let offset = prop_oneof![3 => Just(0), 1 => number()];
    (number(), offset, any::<bool>(), areas, 0..5usize).prop_map(|(size, offset, mmap, areas, file)| Said {
        size,
        offset,
        mmap,
        areas,
        file,
    })
}

/// That of a card with a few bytes changed, or any.
fn config() -> impl Strategy<Value = Vec<u8>> {
    let mut real = space();
    put(&mut real, 0x10, &[0xc]);
    let changed = move |changes: Vec<(usize, u8)>| {
        let mut space = real.clone();
        changes.into_iter().for_each(|(at, byte)| space[at] = byte);
        space
    };
    prop_oneof![
        3 => prop::collection::vec((0..0x100usize, any::<u8>()), 0..20).prop_map(changed),
        1 => prop::collection::vec(any::<u8>(), 0x1000),
    ]
}

fn script() -> impl Strategy<Value = Script> {
    let vectors = (prop_oneof![0..10u32, any::<u32>()], any::<bool>(), any::<bool>());
    let indices = (prop_oneof![3 => Just((9, 5)), 1 => (0..300u32, 0..300u32)]).boxed();
    let errors = prop::collection::vec(prop::option::weighted(0.1, any::<u8>()), 1..20);
    let life = prop_oneof![0..60u32, 60..2000u32];
    let lists = (prop::collection::vec(said(), 9), prop::collection::vec(vectors, 5));
    (indices, lists, config(), errors, life).prop_map(
        |((regions, irqs), (said, vectors), config, errors, life)| Script {
            regions,
            irqs,
            said,
            vectors,
            config,
            errors,
            life,
        },
    )
}

/// A memory file, a short one, a folder, a pipe; a last number would be none.
fn files() -> Vec<OwnedFd> {
    let long = tempfile::tempfile().unwrap();
    long.set_len(1 << 21).unwrap();
    let short = tempfile::tempfile().unwrap();
    let (pipe, _) = rustix::pipe::pipe().unwrap();
    vec![long.into(), short.into(), File::open("/").unwrap().into(), pipe]
}

struct Hostile {
    script: Script,
    files: Vec<OwnedFd>,
    closer: Closer,
    turn: usize,
}

impl Hostile {
    /// One more request, which may be the last, or refused.
    fn turn(&mut self) -> Result<(), Errno> {
        if self.script.life == 0 {
            self.closer.close();
        }
        self.script.life = self.script.life.saturating_sub(1);
        self.turn += 1;
        let error = self.script.errors[self.turn % self.script.errors.len()];
        error.map_or(Ok(()), |errno| Err(Errno::from_raw_os_error(i32::from(errno).max(1))))
    }
}

impl Device for Hostile {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { resettable: true, regions: self.script.regions, irqs: self.script.irqs }
    }
    fn region(&self, index: u32) -> (RegionInfo, Option<BorrowedFd<'_>>) {
        let Some(said) = self.script.said.get(index as usize) else {
            return (RegionInfo { index, ..RegionInfo::default() }, None);
        };
        if index == CONFIG {
            return (
                RegionInfo { index, size: 0x1000, read: true, write: true, ..RegionInfo::default() },
                None,
            );
        }
        let size = said.size;
        let areas = said.areas.iter().map(|&(offset, size)| Area { offset, size }).collect();
        let info =
            RegionInfo { index, size, offset: said.offset, read: true, write: true, mmap: said.mmap, areas };
        (info, self.files.get(said.file).map(AsFd::as_fd))
    }
    fn irq(&self, index: u32) -> IrqInfo {
        let known = self.script.vectors.get(index as usize).copied();
        let (count, eventfd, noresize) = known.unwrap_or_default();
        IrqInfo { index, count, eventfd, maskable: false, automasked: false, noresize }
    }
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        let _ = self.turn();
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        match self.script.config.get(at..).and_then(|bytes| bytes.get(..data.len())) {
            Some(bytes) if region == CONFIG => data.copy_from_slice(bytes),
            _ => data.fill(0x5a),
        }
    }
    fn write(&mut self, _region: u32, _offset: u64, _data: &[u8]) {
        let _ = self.turn();
    }
    fn dma_map(&mut self, _map: DmaMap, _file: Option<OwnedFd>) -> Result<(), Errno> {
        self.turn()
    }
    fn dma_unmap(&mut self, _unmap: DmaUnmap) -> Result<(), Errno> {
        self.turn()
    }
    fn set_irqs(&mut self, _set: SetIrqs<'_>, _eventfds: Vec<OwnedFd>) -> Result<(), Errno> {
        self.turn()
    }
    fn reset(&mut self) -> Result<(), Errno> {
        self.turn()
    }
    fn disconnected(&mut self) {}
}

/// The guest of a server, as far as it came; how many BARs it had.
fn drive(script: Script, accesses: Vec<Access>) -> usize {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = |socket: UnixStream| Connection::new(socket.into(), LIMIT, Patience::NONE).unwrap();
    let (ours, mut theirs) = (connection(ours), connection(theirs));
    let closer = theirs.closer().unwrap();
    let server = std::thread::spawn(move || {
        let mut device = Hostile { script, files: files(), closer, turn: 0 };
        drop(serve(&mut theirs, &mut device));
    });
    let opened = over("hostile.sock".to_owned(), ours).ok();
    let bars = opened.and_then(|(function, domain)| live(function, domain, accesses));
    server.join().unwrap();
    bars.unwrap_or(0)
}

/// As the plan does: a BAR is a power of two, and one that has no place refuses the machine.
fn placed(function: &UserFunction) -> Option<Vec<BarPlan>> {
    let mut at = BAR;
    let mut bars = Vec::new();
    for bar in function.bars().ok()? {
        let size = bar.size.max(0x1000).checked_next_power_of_two().filter(|size| *size <= MOST)?;
        at = at.next_multiple_of(size);
        let span = Span::new(Gpa::new(at), size).unwrap();
        bars.push(BarPlan { index: bar.index, kind: BarKind::Memory64Prefetchable, span });
        at += size;
    }
    Some(bars)
}

fn live(function: UserFunction, domain: UserDomain, accesses: Vec<Access>) -> Option<usize> {
    let bars = placed(&function)?;
    let slots = Arc::new(FakeSlots::default());
    let connections = Connections {
        router: Arc::new(FakeRouter::default()),
        line: Some(Box::new(FakeLine::default())),
        slots: Arc::clone(&slots) as _,
        peers: Arc::new(Peers::new(vec![Arc::new(domain)])),
        reachable: true,
        memory: Vec::new(),
    };
    let function = PassedFunction::new(Arc::new(function), &bars, Vec::new(), connections).ok()?;
    let _ = function.lend(&bars);
    let mut bus = Bus::default();
    bus.add(8, Arc::clone(&function) as _);
    let root = RootComplex::new(bus);
    root.config_write(0, 8, COMMAND, &[6, 0]);
    for access in accesses {
        match access {
            Access::Config(offset, data) => {
                root.config_write(0, 8, offset & !3, &data[..data.len().min(4) & 6]);
            }
            Access::Bar(offset, data) => function.bar_write(0, offset, &data),
        }
        function.bar_read(0, 0, &mut [0; 8]);
    }
    function.end();
    assert!(slots.lent().is_empty());
    Some(bars.len())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("EGM_HOSTILE_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(64)
    ))]
    #[test]
    fn a_server_that_means_harm_is_refused_or_served_and_the_guest_lives(
        script in script(),
        accesses in prop::collection::vec(access(), 0..40),
    ) {
        drive(script, accesses);
    }
}

/// What the property tries comes through often enough to mean something.
#[test]
fn a_server_that_only_says_what_makes_sense_is_served() {
    let some = Said { size: 0x10_0000, offset: 0, mmap: true, areas: vec![(0x1000, 0x3000)], file: 0 };
    let none = Said { size: 0, areas: Vec::new(), ..some.clone() };
    let mut config = space();
    put(&mut config, 0x10, &[0xc]);
    let said = [vec![some], vec![none; 8]].concat();
    let vectors = vec![(1, true, false); 5];
    let script = Script { regions: 9, irqs: 5, said, vectors, config, errors: vec![None], life: u32::MAX };
    assert_eq!(drive(script, vec![Access::Bar(0x10, vec![1])]), 1);
}
