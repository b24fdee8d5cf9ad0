//! BAR 2 as a client maps it, beside the same pages as plain memory, alternating.
//!
//! ```text
//! cargo bench -p egm-device --bench bar -- --mib 256 --rounds 11
//! ```
//! prints one line of JSON: the seconds of each way for all of it, by round. `bar-write` and `bar-read` use the areas
//! and descriptor that a client got, `memory-write` and `memory-read` a mapping of the slice itself.
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::fs::File;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use egm_device::device::config::Id;
use egm_device::device::core::Facts;
use egm_device::device::{Function, Setup};
use egm_device::{Anonymous, Backing, Mapping};
use egm_vfio_wire::client::Client;
use egm_vfio_wire::serve::serve;
use egm_vfio_wire::socket::{BusyPoll, Connection};

const BAR2: u32 = 2;
const LIMIT: Duration = Duration::from_secs(60);
/// Bytes copied at once: they stay in the processor's own cache.
const PIECE: usize = 64 << 10;
/// The ways take turns after this many bytes, so that other load of the machine affects both.
const TURN: usize = 8 << 20;

/// An area that a server gave to its client.
struct Area {
    file: File,
    offset: u64,
    size: u64,
}

impl Backing for Area {
    fn file(&self) -> &File {
        &self.file
    }
    fn offset(&self) -> u64 {
        self.offset
    }
    fn size(&self) -> u64 {
        self.size
    }
    fn page_size(&self) -> u64 {
        0x1000
    }
    fn is_invisible(&self) -> bool {
        false
    }
    fn outlives_power(&self) -> bool {
        false
    }
}

fn main() {
    let argument = |name: &str| std::env::args().skip_while(|word| word != name).nth(1);
    let number = |name, default| argument(name).map_or(default, |text| text.parse().unwrap());
    let (size, rounds) = (number("--mib", 256) << 20, number("--rounds", 11));
    let memory = Anonymous::new("bench", size, None).unwrap();
    let area = as_client(&memory, size);
    let mappings = [("bar", &area as &dyn Backing), ("memory", &memory)].map(|(name, backing)| {
        let mapping = Mapping::new(backing, 0, size, 0).unwrap();
        mapping.populate(0, mapping.size()).unwrap();
        (name, mapping)
    });
    let mut seconds = [const { (Vec::new(), Vec::new()) }; 2];
    // The first round warms up; then each way begins every other round. In a round each has half of the turns' places,
    // and never one that the other had just before, which a cache may hold.
    for round in 0..=rounds {
        let mut sums = [(0.0, 0.0); 2];
        for (turn, at) in (0..usize::try_from(size).unwrap()).step_by(TURN).enumerate() {
            let which = (usize::try_from(round).unwrap() + turn) % 2;
            let (_, mapping) = &mappings[which];
            sums[which].0 += written(mapping, at..at + TURN);
            sums[which].1 += seen(mapping, at..at + TURN);
        }
        for (all, (write, read)) in seconds.iter_mut().zip(sums).filter(|_| round > 0) {
            all.0.push((2.0 * write).to_string());
            all.1.push((2.0 * read).to_string());
        }
    }
    let figures = mappings.iter().zip(&seconds).map(|((name, _), (write, read))| {
        format!("\"{name}-write\":[{}],\"{name}-read\":[{}]", write.join(","), read.join(","))
    });
    println!("{{{}}}", figures.collect::<Vec<_>>().join(","));
}

/// The slice as a client of its device gets it.
fn as_client(memory: &Anonymous, size: u64) -> Area {
    let facts = Facts { size, base: 0, page: 0x1000, pxm: None, scrub_at_reset: false, msix: true };
    let setup = Setup {
        id: Id::default(),
        facts,
        retired: Default::default(),
        bad: Box::new(|_| {}),
        scrubbed: Box::new(|_| {}),
        near: None,
    };
    let function = Function::new(setup, memory).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        let mut connection = Connection::new(theirs.into(), LIMIT, BusyPoll::NONE).unwrap();
        serve(&mut connection, &mut function.connect())
    });
    let mut client = Client::new(Connection::new(ours.into(), LIMIT, BusyPoll::NONE).unwrap()).unwrap();
    let (info, file) = client.region_info(BAR2).unwrap();
    assert_eq!(info.areas.iter().map(|area| (area.offset, area.size)).collect::<Vec<_>>(), [(0, size)]);
    drop(client);
    server.join().unwrap().unwrap();
    Area { file: file.unwrap().into(), offset: info.offset, size }
}

/// Seconds to write `bytes` of it.
fn written(mapping: &Mapping, bytes: Range<usize>) -> f64 {
    let piece = vec![0x5a; PIECE];
    let begun = Instant::now();
    bytes.step_by(PIECE).for_each(|at| mapping.write(at, &piece).unwrap());
    begun.elapsed().as_secs_f64()
}

/// Seconds to read `bytes` of it.
fn seen(mapping: &Mapping, bytes: Range<usize>) -> f64 {
    let mut piece = vec![0; PIECE];
    let begun = Instant::now();
    bytes.step_by(PIECE).for_each(|at| mapping.read(at, &mut piece).unwrap());
    begun.elapsed().as_secs_f64()
}
