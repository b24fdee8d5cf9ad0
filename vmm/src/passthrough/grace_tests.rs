//! A GPU with coherent memory on its whole way: from the facts to the guest's memory slots and tables.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egm_address::{BarOffset, InBar, Span};
use egm_vfio::backend::RegionIndex;
use egm_vfio::dma::Limits;
use egm_vfio::fake::{Call, FakeDomain, FakeFunction};
use egm_vfio::host::HostFunction;

use super::coherent::{MemoryFault, wait};
use super::tests::{FakeRouter, FakeSlots};
use super::*;
use crate::error::Report;
use crate::pci::{Bus, RootComplex};
use crate::plan::{AssignedPlan, FunctionPlan, FunctionRole, Plan};
use crate::{config, facts, firmware, plan};

/// As the driver showed a function with 0x6800_0000 bytes of memory (emulated host, Linux 7.2).
const RESMEM: (u64, u64) = (0x8000_0000, 0x4800_0000);
const USEMEM: (u64, u64) = (0x4000_0000, 0x2000_0000);
const REGISTERS: u64 = 1 << 24;
const READY: [(u64, u32); 2] = [(0x1498, 0xff), (0x200bc, 0xff)];

fn function() -> HostFunction {
    serde_json::from_value(serde_json::json!({
        "address": "0009:01:00.0", "vendor": 0x10de, "device": 0x2342, "class": 0x03_0200,
        "driver": "nvgrace_gpu_vfio_pci", "numa_node": 0, "iommu_group": 9, "msix_vectors": 0, "reserved": [],
        "bars": [
            { "index": 0, "kind": "memory64-prefetchable", "size": REGISTERS },
            { "index": 2, "kind": "memory64-prefetchable", "size": 0x1_0000 },
            { "index": 4, "kind": "memory64-prefetchable", "size": 0x200_0000 },
        ],
        "memory": [{ "bar": 2, "size": RESMEM.0 }, { "bar": 4, "size": USEMEM.0 }],
    }))
    .unwrap()
}

fn plan_of(function: HostFunction) -> Plan {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("grace.json");
    let text = serde_json::json!({
        "name": "grace", "arch": "x86_64", "boot": { "kernel": "vmlinux" }, "memory": { "size": "1GiB" },
        "devices": [{ "type": "vfio", "id": "gpu0", "function": function.address }],
    });
    std::fs::write(&file, text.to_string()).unwrap();
    let spec = config::load(&file).unwrap();
    let mut facts = facts::load(Path::new("../configs/facts/x86-server.json")).unwrap();
    facts.functions.push(function);
    plan::plan(&spec, &facts).unwrap()
}

fn gpu(plan: &Plan) -> (FunctionPlan, AssignedPlan) {
    let endpoint = |f: &'_ FunctionPlan| match &f.role {
        FunctionRole::Endpoint { assigned: Some(assigned), .. } => Some((f.clone(), assigned.clone())),
        _ => None,
    };
    plan.pci.iter().find_map(endpoint).unwrap()
}

fn part(size: u64) -> Span<InBar> {
    Span::new(BarOffset::new(0), size).unwrap()
}

fn fake() -> FakeFunction {
    let mut space = vec![0; 0x1000];
    space[..4].copy_from_slice(&[0xde, 0x10, 0x42, 0x23]);
    space[8..12].copy_from_slice(&[0, 0, 2, 3]);
    let region = |fake: FakeFunction, bar, (size, real)| {
        fake.with_region(RegionIndex::Bar(bar), size, b"", &[part(real)]).unwrap()
    };
    let fake = FakeFunction::default().with_region(RegionIndex::Config, 0x1000, &space, &[]).unwrap();
    let fake = region(region(region(fake, 0, (REGISTERS, REGISTERS)), 2, RESMEM), 4, USEMEM);
    for (offset, value) in READY {
        fake.memory(RegionIndex::Bar(0)).unwrap().write(offset, &value.to_le_bytes()).unwrap();
    }
    fake
}

struct Grace {
    fake: Arc<FakeFunction>,
    slots: Arc<FakeSlots>,
    domain: Arc<FakeDomain>,
}

impl Grace {
    fn new(capabilities: Vec<u32>, domain: FakeDomain) -> Self {
        let slots = Arc::new(FakeSlots::of(capabilities));
        Self { fake: Arc::new(fake()), slots, domain: Arc::new(domain) }
    }

    fn open(&self, plan: &Plan) -> Result<Arc<AssignedFunction>, PassthroughError> {
        let (function, assigned) = gpu(plan);
        let connections = Connections {
            router: Arc::new(FakeRouter::default()),
            line: None,
            slots: Arc::clone(&self.slots) as _,
            peers: Arc::new(Peers::new(vec![Arc::clone(&self.domain) as _])),
            reachable: false,
            memory: assigned.memory.unwrap().bars,
        };
        let opened =
            AssignedFunction::new(Arc::clone(&self.fake) as _, &function.bars, Vec::new(), connections)?;
        opened.share_bars(&function.bars)?;
        Ok(opened)
    }
}

#[test]
fn its_memory_becomes_slots_of_its_real_size_that_devices_reach() {
    let plan = plan_of(function());
    let (planned, assigned) = gpu(&plan);
    let memory = assigned.memory.unwrap();
    assert_eq!((memory.bars, memory.first_node), (vec![2, 4], 1));
    let bar = |index: u8| planned.bars.iter().find(|bar| bar.index == index).unwrap().span;
    assert_eq!([0, 2, 4].map(|index| bar(index).size()), [REGISTERS, RESMEM.0, USEMEM.0]);

    let grace = Grace::new(vec![243], FakeDomain::default());
    let opened = grace.open(&plan).unwrap();
    let maps: Vec<Call> = grace.fake.take_calls();
    let map = |bar, real| Call::Map(RegionIndex::Bar(bar), part(real));
    for call in [map(0, REGISTERS), map(2, RESMEM.1), map(4, USEMEM.1)] {
        assert!(maps.contains(&call), "{call:?} is not in {maps:?}");
    }
    // Alone in the machine its memory is still in the I/O address space, and its registers are not.
    let reached: Vec<(u64, u64)> =
        grace.domain.mapped().iter().map(|(iova, _)| (iova.start().get(), iova.size())).collect();
    let at = |index: u8, real| (bar(index).start().get(), real);
    let mut both = vec![at(2, RESMEM.1), at(4, USEMEM.1)];
    both.sort_unstable();
    assert_eq!(reached, both);

    let mut bus = Bus::default();
    bus.add(8, Arc::clone(&opened) as _);
    let root = RootComplex::new(bus);
    assert_eq!(grace.slots.mapped(), [], "not before the guest decodes memory");
    root.config_write(0, 8, 4, &[2, 0]);
    both.push(at(0, REGISTERS));
    both.sort_unstable();
    assert_eq!(grace.slots.mapped(), both, "what a region has beyond its memory is no slot");
    let mut beyond = [0; 4];
    root.memory_read(bar(4).start().checked_add(USEMEM.1).unwrap(), &mut beyond);
    assert_eq!(beyond, [0; 4], "answered by the driver");
}

#[test]
fn the_guest_gets_eight_nodes_for_it() {
    let plan = plan_of(function());
    let near: Vec<u32> =
        plan.nodes.iter().filter(|node| node.initiator.is_some()).map(|node| node.id).collect();
    assert_eq!(near, (1..9).collect::<Vec<_>>());
    assert_eq!(plan.distances[0], [10, 80, 80, 80, 80, 80, 80, 80, 80]);
    assert_eq!(plan.distances[2], [80, 11, 10, 11, 11, 11, 11, 11, 11]);
    let image = firmware::build(&plan).unwrap();
    let srat = image.tables.iter().find(|table| table.signature == *b"SRAT").unwrap();
    let from = usize::try_from(srat.span.start().offset_from(image.base).unwrap()).unwrap();
    let srat = &image.bytes[from..from + usize::try_from(srat.span.size()).unwrap()];
    let address = gpu(&plan).0.address;
    assert_eq!(address.devfn(), 0, "the driver refuses another place");
    for node in 1..9 {
        let entry = [5, 32, 0, 1, node, 0, 0, 0, 0, 0, address.bus(), 0];
        assert!(srat.windows(12).any(|bytes| bytes == entry), "{entry:?}");
    }
}

#[test]
fn hardware_registers_in_place_of_memory_are_a_plain_function() {
    let mut plain = function();
    plain.memory.clear();
    let plan = plan_of(plain);
    assert_eq!((gpu(&plan).1.memory, plan.nodes.len()), (None, 1));
}

#[test]
fn a_host_with_a_kvm_that_cannot_map_it_is_refused_by_name() {
    let plan = plan_of(function());
    let grace = Grace::new(Vec::new(), FakeDomain::default());
    let error = grace.open(&plan).err().unwrap();
    assert_eq!(
        error.to_string(),
        "KVM of this host does not map the memory in BAR 4 of fake function as cached: it lacks capability 243"
    );
    assert!(error.help().unwrap().contains("6.17"));
    assert_eq!(grace.slots.mapped(), []);
}

#[test]
fn memory_that_devices_cannot_reach_is_refused() {
    let plan = plan_of(function());
    let grace = Grace::new(vec![243], FakeDomain::new(Limits::default(), &["pages", "file"]));
    assert!(matches!(grace.open(&plan), Err(PassthroughError::MemoryUnreachable { bar: 2, .. })));
}

#[test]
fn a_gpu_that_reports_by_cxl_is_left_to_the_driver() {
    let mut space = vec![0; 0x1000];
    for line in std::fs::read_to_string("../vfio/tests/data/cxl.txt").unwrap().lines() {
        let Some((offset, bytes)) = line.split_once(": ").filter(|_| !line.starts_with('#')) else {
            continue;
        };
        let at = usize::from_str_radix(offset, 16).unwrap();
        for (to, byte) in space[at..].iter_mut().zip(bytes.split(' ')) {
            *to = u8::from_str_radix(byte, 16).unwrap();
        }
    }
    let fake = FakeFunction::default().with_region(RegionIndex::Config, 0x1000, &space, &[]).unwrap();
    wait(&fake, Instant::now, |_| panic!("it was waited for")).unwrap();
}

#[test]
fn a_gpu_that_does_not_become_ready_is_waited_for_so_long_and_no_longer() {
    let fake = fake();
    let registers = fake.memory(RegionIndex::Bar(0)).unwrap();
    registers.write(READY[1].0, &[0x7f]).unwrap();
    let (start, passed) = (Instant::now(), Cell::new(Duration::ZERO));
    let wait = |pause: &dyn Fn()| {
        passed.set(Duration::ZERO);
        wait(
            &fake,
            || start + passed.get(),
            |each| {
                passed.set(passed.get() + each);
                pause();
            },
        )
    };
    let error = wait(&|| ()).unwrap_err();
    assert!(matches!(error, MemoryFault::NotReady { what: "HBM training", value: 0x7f, .. }), "{error}");
    assert_eq!(passed.get(), Duration::from_secs(30));
    wait(&|| registers.write(READY[1].0, &[0xff]).unwrap()).unwrap();
    assert_eq!(passed.get(), Duration::from_millis(100));
}
