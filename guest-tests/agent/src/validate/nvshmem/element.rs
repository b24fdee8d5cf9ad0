//! A process that is one PE.

use std::fmt::Display;
use std::io::{BufRead, Write};
use std::path::PathBuf;

use egm_vendor::cuda::{Context, Driver, Kernels, Kind, Shape, Stream};
use egm_vendor::nvshmem::{Library, Memory, Pe, ShmemError, UniqueId};
use rustix::process::Signal;

use super::WORKS;
use super::job::{FOUND_LINE, Found, ID_LINE};
use crate::error::Broken;
use crate::library;
use crate::validate::cuda::compare::Comparer;

impl From<ShmemError> for Broken {
    fn from(error: ShmemError) -> Self {
        Self::Other(error.to_string())
    }
}

/// The round of what is poison in each round of collectives.
pub(super) const POISON: u16 = 0xff00;
/// The round of a transfer of all memory; the next one is its poison's.
pub(super) const WHOLE: u16 = 0xff01;

/// Command line of a PE.
struct Words {
    work: &'static super::Work,
    pe: i32,
    pes: i32,
    gpu: usize,
    seed: u64,
    most: u64,
    library: PathBuf,
}

impl Words {
    fn parse(words: &[String]) -> Result<Self, Broken> {
        let [work, pe, pes, gpu, seed, most, library] = words else {
            return Err(Broken::Argument(words.join(" "), "is not what a PE is started with"));
        };
        fn number<T: std::str::FromStr>(word: &str) -> Result<T, Broken> {
            word.parse().map_err(|_| Broken::Argument(word.to_owned(), "is not a number of a PE"))
        }
        let known = WORKS.iter().find(|known| known.name == work);
        Ok(Self {
            work: known.ok_or_else(|| Broken::Argument(work.clone(), "is no work of a PE"))?,
            pe: number(pe)?,
            pes: number(pes)?,
            gpu: number(gpu)?,
            seed: number(seed)?,
            most: number(most)?,
            library: library.into(),
        })
    }
}

/// Is a PE until its work is done.
pub(super) fn run(words: &[String]) -> Result<(), Broken> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(Broken::system("cannot end with the one that started this"))?;
    let words = Words::parse(words)?;
    let device = Driver::open()?.devices()?.get(words.gpu).copied();
    let device = device.ok_or_else(|| Broken::Other(format!("there is no GPU {}", words.gpu)))?;
    let context = Context::new(device)?;
    let loaded = library::open(&[&words.library.to_string_lossy()]);
    let loaded = loaded.map_err(|finding| Broken::Other(finding.reason))?;
    let library = Library::of(loaded, &words.library)?;
    let id = id(&library, words.pe)?;
    let pe = match Pe::start(library, &context, &id, words.pe, words.pes) {
        // No later result would belong to the PE that this process was started as.
        Err(error @ ShmemError::Started { .. }) => {
            let found = Found { untrue: vec![error.to_string()], is_another: true, ..Found::default() };
            print_line(FOUND_LINE, serde_json::to_string(&found).unwrap_or_default());
            return Ok(());
        }
        started => started?,
    };
    let mut element = Element {
        kernels: Kernels::new(&context)?,
        stream: Stream::new(&context)?,
        results: egm_vendor::cuda::Memory::new(&context, Kind::Pinned, 64)?,
        context,
        pe: &pe,
        seed: words.seed,
        most: words.most,
        found: Found::default(),
    };
    (words.work.run)(&mut element)?;
    let Element { found, kernels, stream, results, .. } = element;
    drop((kernels, stream, results));
    pe.end()?;
    print_line(FOUND_LINE, serde_json::to_string(&found).unwrap_or_default());
    Ok(())
}

/// Prints a line of ours. What the library printed before may not have ended its line.
fn print_line(start: &str, text: impl Display) {
    let mut out = std::io::stdout().lock();
    // A closed output means that the caller is gone.
    let _ = out.write_all(format!("\n{start}{text}\n").as_bytes()).and_then(|()| out.flush());
}

/// The job's id: PE 0 makes it, the others receive it.
fn id(library: &Library, pe: i32) -> Result<UniqueId, Broken> {
    if pe == 0 {
        let id = library.unique_id()?;
        print_line(ID_LINE, id);
        return Ok(id);
    }
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line);
    read.map_err(Broken::system("cannot read the job's id"))?;
    line.trim_end().parse().map_err(|_| Broken::text("standard input", &line, "a job's id"))
}

/// A PE at work.
pub(super) struct Element<'p> {
    pub(super) pe: &'p Pe,
    pub(super) context: Context,
    pub(super) kernels: Kernels,
    pub(super) stream: Stream,
    /// Reports of comparisons by the GPU.
    results: egm_vendor::cuda::Memory,
    /// The validation's seed, the same for all PEs.
    pub(super) seed: u64,
    /// The largest size in bytes.
    pub(super) most: u64,
    pub(super) found: Found,
}

/// Memory that the calls here are given has an address for this GPU.
fn on_gpu<'m>(memory: &'m Memory<'_>) -> Result<&'m egm_vendor::cuda::Memory, Broken> {
    memory.gpu().ok_or_else(|| Broken::Other("symmetric memory that this GPU does not reach".to_owned()))
}

impl Element<'_> {
    pub(super) const fn me(&self) -> i32 {
        self.pe.number()
    }

    /// The PE after this one, itself when it is alone.
    pub(super) const fn next(&self) -> i32 {
        (self.pe.number() + 1) % self.pe.count()
    }

    /// The PE before this one.
    pub(super) const fn previous(&self) -> i32 {
        (self.pe.number() + self.pe.count() - 1) % self.pe.count()
    }

    pub(super) fn count(&self) -> usize {
        usize::try_from(self.pe.count()).unwrap_or(1)
    }

    /// The seed of what PE `of` writes in `round`; no two are equal.
    pub(super) fn seed_of(&self, of: i32, round: u16) -> u64 {
        seed_of(self.seed, of, round)
    }

    /// Notes what is untrue.
    pub(super) fn untrue(&mut self, what: impl Into<String>) {
        self.found.untrue.push(what.into());
    }

    /// Fills memory of the heap with the pattern of `seed`, and waits.
    pub(super) fn fill(&self, memory: &Memory<'_>, seed: u64) -> Result<(), Broken> {
        let whole = on_gpu(memory)?.whole();
        self.kernels.fill(&self.stream, Shape::whole(&self.context), whole, seed)?;
        Ok(self.stream.synchronize()?)
    }

    /// Writes words to memory of the heap, from its first one on, and waits.
    pub(super) fn write(&self, memory: &Memory<'_>, words: &[u64]) -> Result<(), Broken> {
        let bytes = words.len() as u64 * 8;
        let staging = egm_vendor::cuda::Memory::new(&self.context, Kind::Pinned, bytes)?;
        let to = staging.words()?;
        for (index, word) in (0..).zip(words) {
            to.write(index, *word);
        }
        self.stream.copy(on_gpu(memory)?.part(0, bytes)?, staging.part(0, bytes)?)?;
        Ok(self.stream.synchronize()?)
    }

    /// The words of memory of the heap, by a copy engine.
    pub(super) fn read(&self, memory: &Memory<'_>) -> Result<Vec<u64>, Broken> {
        self.words_of(on_gpu(memory)?)
    }

    /// The words of some memory, by a copy engine, into memory that was poisoned.
    pub(super) fn words_of(&self, memory: &egm_vendor::cuda::Memory) -> Result<Vec<u64>, Broken> {
        let staging = egm_vendor::cuda::Memory::new(&self.context, Kind::Pinned, memory.bytes())?;
        let words = staging.words()?;
        words.fill(!self.seed);
        self.stream.copy(staging.part(0, memory.bytes())?, memory.whole())?;
        self.stream.synchronize()?;
        Ok((0..words.count().min(memory.bytes() / 8)).map(|index| words.read(index)).collect())
    }

    /// Number of words of heap memory that are not the pattern of `seed`, by a kernel.
    pub(super) fn differing(&self, memory: &Memory<'_>, seed: u64) -> Result<u64, Broken> {
        self.differing_of(on_gpu(memory)?, seed)
    }

    /// The same of any memory.
    pub(super) fn differing_of(&self, memory: &egm_vendor::cuda::Memory, seed: u64) -> Result<u64, Broken> {
        let Self { context, kernels, stream, results, .. } = self;
        let found =
            Comparer { context, kernels, stream, results }.compare(memory, 0..memory.bytes(), seed)?;
        Ok(found.map_or(0, |wrong| wrong.count))
    }
}

/// The seed of what PE `of`, 254 at most, writes in `round`.
fn seed_of(seed: u64, of: i32, round: u16) -> u64 {
    // Patterns of neighbouring seeds overlap: these are 2^40 words apart.
    seed.wrapping_add(((u64::from(round) << 8 | u64::from(of.unsigned_abs() & 0xff)) + 1) << 40)
}

/// The first byte at which two equally long lists of words differ.
pub(super) fn first_difference(is: &[u64], should: &[u64]) -> Option<usize> {
    let word = is.iter().zip(should).position(|(is, should)| is != should)?;
    let byte = (is.get(word)? ^ should.get(word)?).trailing_zeros() / 8;
    Some(word * 8 + usize::try_from(byte).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::super::job::MOST_PES;
    use super::*;

    #[test]
    fn a_pe_is_started_with_all_its_words_or_not_at_all() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let good = Words::parse(&words("nvshmem.put 1 2 1 7 4096 /lib/x.so")).unwrap();
        assert_eq!((good.pe, good.pes, good.gpu, good.seed, good.most), (1, 2, 1, 7, 4096));
        for bad in ["", "nvshmem.put", "no.such 1 2 1 7 4096 /x", "nvshmem.put x 2 1 7 4096 /x"] {
            assert!(Words::parse(&words(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn no_pe_writes_the_pattern_of_another_one_or_of_another_round() {
        let rounds = [0, 1, 2, 64, 0x7fff, POISON, WHOLE, WHOLE + 1, u16::MAX];
        let seeds = rounds.map(|round| (0..MOST_PES).map(move |pe| seed_of(7, pe, round)));
        let mut seeds: Vec<u64> = seeds.into_iter().flatten().collect();
        seeds.sort_unstable();
        assert!(seeds.windows(2).all(|pair| pair[1] - pair[0] >= 1 << 40));
    }

    #[test]
    fn a_difference_is_found_at_its_byte() {
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 0x0200_0002], &[1, 2]), Some(11));
    }
}
