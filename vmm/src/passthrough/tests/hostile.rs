//! A hostile vfio-user server: whatever it reports of its device, and whenever it disconnects, the VMM opens it or
//! refuses it, and a guest that has it runs on.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use egm_vfio::client::{UserDomain, UserFunction, over};
use egm_vfio_wire::message::{Area, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, RegionInfo, SetIrqs};
use egm_vfio_wire::serve::{Device, serve};
use egm_vfio_wire::socket::{BusyPoll, Closer, Connection};
use rustix::io::Errno;

use super::*;

/// No answer is late on any machine, and one that never comes ends a case soon.
const LIMIT: Duration = Duration::from_secs(5);
/// Largest BAR that the guest is given a place for.
const MOST: u64 = 1 << 40;
const CONFIG: u32 = 7;

/// A server's report of a region.
#[derive(Debug, Clone)]
struct RegionReport {
    size: u64,
    offset: u64,
    mmap: bool,
    areas: Vec<(u64, u64)>,
    /// Which of [`files`] comes with it.
    file: usize,
}

/// Reports and behaviour of a server.
#[derive(Debug, Clone)]
struct Script {
    regions: u32,
    irqs: u32,
    reports: Vec<RegionReport>,
    /// Vectors, whether by eventfd, whether none can be added.
    vectors: Vec<(u32, bool, bool)>,
    config: Vec<u8>,
    /// Answers to requests that can fail, in turn: an errno.
    errors: Vec<Option<u8>>,
    /// Requests until it goes.
    life: u32,
}

/// A plausible number, or nearly, or not at all.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => prop::sample::select(vec![0, 0x1000, 0x4000, 0x10_0000, 1 << 30, 0x1234, 1]),
        1 => any::<u64>(),
        1 => (0..64u32).prop_map(|bit| 1 << bit),
    ]
}

fn region_report() -> impl Strategy<Value = RegionReport> {
    let areas = prop::collection::vec((number(), number()), 0..3);
    let offset = prop_oneof![3 => Just(0), 1 => number()];
    (number(), offset, any::<bool>(), areas, 0..5usize)
        .prop_map(|(size, offset, mmap, areas, file)| RegionReport { size, offset, mmap, areas, file })
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
    let lists = (prop::collection::vec(region_report(), 9), prop::collection::vec(vectors, 5));
    (indices, lists, config(), errors, life).prop_map(
        |((regions, irqs), (reports, vectors), config, errors, life)| Script {
            regions,
            irqs,
            reports,
            vectors,
            config,
            errors,
            life,
        },
    )
}

/// A memory file, a short one, a folder, a pipe; a last number would be none.
fn files() -> Vec<OwnedFd> {
    let long = tempfile::tempfile_in("/dev/shm").unwrap();
    long.set_len(1 << 24).unwrap();
    let short = tempfile::tempfile_in("/dev/shm").unwrap();
    let (pipe, _) = rustix::pipe::pipe().unwrap();
    vec![long.into(), short.into(), File::open("/").unwrap().into(), pipe]
}

struct Hostile {
    script: Script,
    files: Vec<OwnedFd>,
    closer: Closer,
    turn: usize,
    slow: Option<Slow>,
}

/// Reports that bus mastering is switched on, and holds the answer to that until the test releases it.
struct Slow {
    asked: Sender<()>,
    answer: Receiver<()>,
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
        let Some(report) = self.script.reports.get(index as usize) else {
            return (RegionInfo { index, ..RegionInfo::default() }, None);
        };
        if index == CONFIG {
            return (
                RegionInfo { index, size: 0x1000, read: true, write: true, ..RegionInfo::default() },
                None,
            );
        }
        let size = report.size;
        let areas = report.areas.iter().map(|&(offset, size)| Area { offset, size }).collect();
        let info = RegionInfo {
            index,
            size,
            offset: report.offset,
            read: true,
            write: true,
            mmap: report.mmap,
            areas,
        };
        (info, self.files.get(report.file).map(AsFd::as_fd))
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
    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let _ = self.turn();
        if let Some(slow) = &self.slow
            && (region, offset, data[0] & 4) == (CONFIG, COMMAND.into(), 4)
        {
            slow.asked.send(()).unwrap();
            slow.answer.recv().unwrap();
        }
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

/// A server, and what is to be opened of it.
fn served(script: Script, slow: Option<Slow>) -> (Option<(UserFunction, UserDomain)>, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = |socket: UnixStream| Connection::new(socket.into(), LIMIT, BusyPoll::NONE).unwrap();
    let (ours, mut theirs) = (connection(ours), connection(theirs));
    let closer = theirs.closer().unwrap();
    let server = thread::spawn(move || {
        let mut device = Hostile { script, files: files(), closer, turn: 0, slow };
        drop(serve(&mut theirs, &mut device));
    });
    (over("hostile.sock".to_owned(), ours).ok(), server)
}

/// The guest of a server, as far as it came; how many BARs it had.
fn drive(script: Script, accesses: Vec<Access>) -> usize {
    let (opened, server) = served(script, None);
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

fn assigned(
    function: UserFunction,
    domain: UserDomain,
    bars: &[BarPlan],
) -> Option<(Arc<AssignedFunction>, RootComplex, Arc<FakeSlots>)> {
    let slots = Arc::new(FakeSlots::default());
    let connections = Connections {
        router: Arc::new(FakeRouter::default()),
        line: Some(Box::new(FakeLine::default())),
        slots: Arc::clone(&slots) as _,
        peers: Arc::new(Peers::new(vec![Arc::new(domain)])),
        reachable: true,
        memory: Vec::new(),
    };
    let function = AssignedFunction::new(Arc::new(function), bars, Vec::new(), connections).ok()?;
    let _ = function.share_bars(bars);
    let mut bus = Bus::default();
    bus.add(8, Arc::clone(&function) as _);
    Some((function, RootComplex::new(bus), slots))
}

fn live(function: UserFunction, domain: UserDomain, accesses: Vec<Access>) -> Option<usize> {
    let bars = placed(&function)?;
    let (function, root, slots) = assigned(function, domain, &bars)?;
    root.config_write(0, 8, COMMAND, &[6, 0]);
    assert!(slots.mapped().len() <= parts::MOST);
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
    assert!(slots.mapped().is_empty());
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

/// One of which BARs 0 to 2 of 64 bits, as many as `bars`, have `areas` that can be mapped.
fn honest(bars: usize, areas: &[(u64, u64)]) -> Script {
    let none = RegionReport { size: 0, offset: 0, mmap: true, areas: Vec::new(), file: 0 };
    let mut reports = vec![none; 9];
    let mut config = space();
    for bar in 0..bars {
        (reports[2 * bar].size, reports[2 * bar].areas) = (1 << 24, areas.to_vec());
        put(&mut config, 0x10 + 8 * u16::try_from(bar).unwrap(), &[0xc]);
    }
    let vectors = vec![(1, true, false); 5];
    Script { regions: 9, irqs: 5, reports, vectors, config, errors: vec![None], life: u32::MAX }
}

/// What the property tries comes through often enough to mean something.
#[test]
fn a_server_that_only_sends_what_makes_sense_is_served() {
    assert_eq!(drive(honest(1, &[(0x1000, 0x3000)]), vec![Access::Bar(0x10, vec![1])]), 1);
}

/// Each switch of memory decoding changes every slot, and other vCPUs wait for that.
#[test]
fn a_server_with_thousands_of_mappable_areas_is_served_with_a_few_slots() {
    let pages: Vec<_> = (0..4096).map(|page| (page << 12, 0x1000)).collect();
    let accesses = vec![Access::Config(COMMAND, vec![0, 0]), Access::Bar(0xff_f000, vec![1])];
    assert_eq!(drive(honest(3, &pages), accesses), 3);
}

/// What a vCPU does that moves another function's BARs.
#[test]
fn other_functions_do_not_wait_for_the_answer_of_a_server() {
    let ((asked, asks), (answers, answer)) = (channel(), channel());
    let (opened, server) = served(honest(1, &[(0, 0x4000)]), Some(Slow { asked, answer }));
    let (function, domain) = opened.unwrap();
    let bars = placed(&function).unwrap();
    let (function, root, slots) = assigned(function, domain, &bars).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| root.config_write(0, 8, COMMAND, &[6, 0]));
        asks.recv().unwrap();
        root.update();
        assert!(slots.mapped().is_empty() && !function.is_lost(), "it is still to answer, and not given up");
        answers.send(()).unwrap();
    });
    assert_eq!(slots.mapped().len(), 1);
    function.end();
    drop((function, root));
    server.join().unwrap();
}
