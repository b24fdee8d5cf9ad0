//! Two machines, one connection: each in its turn moves data into the other's memory, and has it compared there.

use std::time::{Duration, Instant};

use egm_guest::findings::Figure;
use egm_vendor::verbs::{Access, Atomics, CompletionQueue, Connected, LocalPort, Registered, Remote, Work};

use super::super::Setting;
use super::data::{difference, put};
use super::loopback::DEPTH;
use super::site::Site;
use super::words::{Answer, Ask, Hello, Talk};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::Random;
use crate::sys::Mapping;

/// Most bytes of memory: what one request moves.
const LARGEST: usize = 64 << 20;
/// Sizes that are moved as far as the memory goes: odd ones, and more than a packet.
const SIZES: [usize; 5] = [1, 1023, 4096, 65_537, 1 << 20];
/// Additions to the other side's word.
const ADDITIONS: u64 = 200;
/// A round of bandwidth lasts this long at least.
const ROUND: Duration = Duration::from_millis(500);
/// Requests of a round of latency.
const FEW: usize = 50;

pub(super) fn run(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    let mut talk = match (setting.args.text("rdma.listen"), setting.args.text("rdma.peer")) {
        (None, None) => {
            let how =
                "give one machine --arg rdma.listen=ADDRESS:PORT and the other --arg rdma.peer=ADDRESS:PORT";
            return Ok(Finding::skipped(format!("there is no other machine: {how}")));
        }
        (Some(place), _) => Talk::listen(place, site.timeout)?,
        (None, Some(place)) => Talk::connect(place, site.timeout)?,
    };
    let first = setting.args.text("rdma.listen").is_none();
    let size = usize::try_from(setting.most).unwrap_or(LARGEST).clamp(1 << 16, LARGEST);
    let memory = match setting.args.text("rdma.node") {
        None => Mapping::new(size),
        Some(_) => Mapping::on_node(size, setting.args.get("rdma.node", 0)?),
    };
    let memory = memory.map_err(Broken::system(format!("cannot have {size} bytes of memory")))?;
    let mut random = Random::new(setting.seed);
    let domain = site.context.domain()?;
    let completions = site.context.completion_queue((2 * DEPTH).min(site.abilities.max_cqe))?;
    let pair = domain.queue_pair(&completions, DEPTH.min(site.abilities.max_qp_wr))?;
    let memory = domain.register(memory, Access::ALL)?;
    let ours = pair.endpoint(&site.place, random.next_u32());
    let hello = Hello::new(&ours, memory.remote(0, size)?, size, site.place.max_dest_rd_atomic);
    let theirs = talk.handshake(&hello)?;
    let max_rd_atomic = site.place.max_rd_atomic.min(theirs.reads.max(1));
    let pair = pair.connect(&LocalPort { max_rd_atomic, ..site.place }, &ours, &theirs.endpoint())?;
    // The other side may post a request only when this one is ready to receive.
    talk.send(&Answer::default())?;
    talk.receive::<Answer>()?;
    let mut end =
        End { site, talk, completions: &completions, pair, memory, theirs, random, claim: Claim::default() };
    let figures = if first {
        let figures = end.lead()?;
        end.talk.ask(Ask::Turn)?;
        end.follow()?;
        figures
    } else {
        end.follow()?;
        let figures = end.lead()?;
        end.talk.ask(Ask::Turn)?;
        figures
    };
    let (ours, theirs) = (end.memory.size(), end.theirs.size);
    end.claim.seen(format!("{} bytes used, of {ours} here and {theirs} there", ours.min(theirs)));
    let value = figures.first().map_or(0.0, |figure| figure.value);
    Ok(end.claim.finish().with_value(value, "GB/s").with_figures(figures))
}

struct End<'e> {
    site: &'e Site<'e>,
    talk: Talk,
    completions: &'e CompletionQueue<'e>,
    pair: Connected<'e>,
    memory: Registered<'e, Mapping>,
    theirs: Hello,
    random: Random,
    claim: Claim,
}

impl End<'_> {
    /// Makes requests and has the other side look at them.
    fn lead(&mut self) -> Result<Vec<Figure>, Broken> {
        let most = self.memory.size().min(self.theirs.size);
        for size in SIZES.into_iter().filter(|size| *size < most).chain([most]) {
            self.write(size)?;
            self.read(size)?;
            self.send(size.min(1 << 20))?;
        }
        self.atomics()?;
        let size = most.min(1 << 20);
        Ok(vec![
            self.stream("rdma write to the other machine", size, Work::Write)?,
            self.stream("rdma read from the other machine", size, Work::Read)?,
            self.latency()?,
        ])
    }

    fn there(&self) -> Remote {
        self.theirs.memory()
    }

    fn one(&self, size: usize, work: Work) -> Result<(), Broken> {
        self.pair.post(0, self.memory.sge(0, size)?, work)?;
        Ok(self.completions.wait(1, self.site.timeout).map(drop)?)
    }

    fn write(&mut self, size: usize) -> Result<(), Broken> {
        let (sent, poison) = (self.random.next(), self.random.next());
        put(&mut self.memory, 0, size, sent);
        self.talk.ask(Ask::Fill { size, seed: poison })?;
        self.one(size, Work::Write(self.there()))?;
        let answer = self.talk.ask(Ask::Compare { size, seed: sent })?;
        if let Some(wrong) = answer.wrong {
            self.claim.untrue(format!("a write of {size:#x} bytes: {wrong}"));
        }
        Ok(())
    }

    fn read(&mut self, size: usize) -> Result<(), Broken> {
        let (sent, poison) = (self.random.next(), self.random.next());
        put(&mut self.memory, 0, size, poison);
        self.talk.ask(Ask::Fill { size, seed: sent })?;
        self.one(size, Work::Read(self.there()))?;
        if let Some(at) = difference(&self.memory, 0, size, sent) {
            self.claim.untrue(format!("a read of {size:#x} bytes: byte {at:#x} is wrong"));
        }
        Ok(())
    }

    fn send(&mut self, size: usize) -> Result<(), Broken> {
        let (sent, poison) = (self.random.next(), self.random.next());
        put(&mut self.memory, 0, size, sent);
        self.talk.ask(Ask::Fill { size, seed: poison })?;
        self.talk.ask(Ask::Receive { size })?;
        self.one(size, Work::Send)?;
        for ask in [Ask::Arrived { size }, Ask::Compare { size, seed: sent }] {
            if let Some(wrong) = self.talk.ask(ask)?.wrong {
                self.claim.untrue(format!("a send of {size:#x} bytes: {wrong}"));
            }
        }
        Ok(())
    }

    fn atomics(&mut self) -> Result<(), Broken> {
        if self.site.abilities.atomics == Atomics::None {
            self.claim.seen("no atomics");
            return Ok(());
        }
        let (start, step) = (self.random.next(), self.random.next());
        self.talk.ask(Ask::Word { value: start })?;
        for index in 0..ADDITIONS {
            self.one(8, Work::FetchAdd(self.there(), step))?;
            let meant = start.wrapping_add(step.wrapping_mul(index));
            self.claim.equal(format!("the answer of fetch-and-add {index}"), &self.word(), &meant);
        }
        let sum = start.wrapping_add(step.wrapping_mul(ADDITIONS));
        self.claim.equal(
            format!("the word after {ADDITIONS} fetch-and-adds"),
            &self.talk.ask(Ask::Tell)?.word,
            &sum,
        );
        self.one(8, Work::CompareSwap(self.there(), sum, start))?;
        self.claim.equal("the answer of a compare-and-swap", &self.word(), &sum);
        self.claim.equal("the word after a compare-and-swap", &self.talk.ask(Ask::Tell)?.word, &start);
        Ok(())
    }

    /// The first word of this side's memory.
    fn word(&self) -> u64 {
        let mut bytes = [0; 8];
        self.memory.load(0, &mut bytes);
        u64::from_ne_bytes(bytes)
    }

    /// Measures; what is there after that is compared by the side that has it.
    fn stream(&mut self, series: &str, size: usize, work: fn(Remote) -> Work) -> Result<Figure, Broken> {
        let is_write = matches!(work(self.there()), Work::Write(_));
        let (sent, poison) = (self.random.next(), self.random.next());
        put(&mut self.memory, 0, size, if is_write { sent } else { poison });
        self.talk.ask(Ask::Fill { size, seed: if is_write { poison } else { sent } })?;
        let depth = usize::try_from(DEPTH.min(self.site.abilities.max_qp_wr)).unwrap_or(1);
        let mut speeds = Vec::new();
        for _ in 0..3 {
            let (mut under_way, mut done, begun) = (0usize, 0usize, Instant::now());
            while begun.elapsed() < ROUND || done + under_way == 0 {
                while under_way < depth {
                    self.pair.post(0, self.memory.sge(0, size)?, work(self.there()))?;
                    under_way += 1;
                }
                let came = self.completions.wait(1, self.site.timeout)?.len();
                under_way = under_way.saturating_sub(came);
                done += came;
            }
            done += self.completions.wait(under_way, self.site.timeout)?.len();
            speeds.push(done as f64 * size as f64 / begun.elapsed().as_nanos().max(1) as f64);
        }
        let wrong = if is_write {
            self.talk.ask(Ask::Compare { size, seed: sent })?.wrong
        } else {
            difference(&self.memory, 0, size, sent).map(|at| format!("byte {at:#x} is wrong"))
        };
        if let Some(wrong) = wrong {
            self.claim.untrue(format!("after it was timed, {series} of {size:#x} bytes: {wrong}"));
        }
        Ok(Figure::of(series, Some(size as u64), "GB/s", &mut speeds))
    }

    fn latency(&mut self) -> Result<Figure, Broken> {
        let (sent, poison) = (self.random.next(), self.random.next());
        put(&mut self.memory, 0, 8, sent);
        self.talk.ask(Ask::Fill { size: 8, seed: poison })?;
        let mut times = Vec::new();
        for _ in 0..FEW {
            let begun = Instant::now();
            self.one(8, Work::Write(self.there()))?;
            times.push(begun.elapsed().as_nanos() as f64 / 1000.0);
        }
        if let Some(wrong) = self.talk.ask(Ask::Compare { size: 8, seed: sent })?.wrong {
            self.claim.untrue(format!("after timed writes of 8 bytes: {wrong}"));
        }
        Ok(Figure::of("rdma write to the other machine, post to completion", Some(8), "us", &mut times))
    }

    /// Does what the other side asks until it gives the turn.
    fn follow(&mut self) -> Result<(), Broken> {
        loop {
            let ask = self.talk.receive::<Ask>()?;
            let answer = self.answer(ask)?;
            self.talk.send(&answer)?;
            if ask == Ask::Turn {
                return Ok(());
            }
        }
    }

    fn answer(&mut self, ask: Ask) -> Result<Answer, Broken> {
        let all = self.memory.size();
        let within = |size: usize| size.min(all);
        let mut answer = Answer::default();
        match ask {
            Ask::Fill { size, seed } => put(&mut self.memory, 0, within(size), seed),
            Ask::Compare { size, seed } => {
                let wrong = difference(&self.memory, 0, within(size), seed);
                answer.wrong = wrong.map(|at| format!("byte {at:#x} is wrong at the other side"));
            }
            Ask::Receive { size } => self.pair.post_receive(1, self.memory.sge(0, within(size))?)?,
            Ask::Arrived { size } => {
                let came = self.completions.wait(1, self.site.timeout)?;
                let bytes = came.first().map(|completion| completion.bytes);
                if bytes != u32::try_from(size).ok() {
                    answer.wrong = Some(format!("{bytes:?} bytes arrived"));
                }
            }
            Ask::Word { value } => self.memory.store(0, &value.to_ne_bytes()),
            Ask::Tell => answer.word = self.word(),
            Ask::Turn => {}
        }
        Ok(answer)
    }
}
