//! The function as a vfio-user device: registers, memory, windows and vectors held together.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use egm_vfio_wire::message::{Area, Call, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, RegionInfo, SetIrqs};
use egm_vfio_wire::serve::{Device, Vectors, Windows};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use crate::config::{Config, Identity, LENGTH};
use crate::engine::{Copy, Progress};
use crate::reach::{Egm, Reach};
use crate::readiness::Readiness;
use crate::registers::{GRACE_SIZE, MAGIC, NO_VECTOR, Register, SIZE, TABLE};

const BAR0: u32 = 0;
const BAR2: u32 = 2;
const CONFIG: u32 = 7;
const MSIX: u32 = 2;

/// Parameters of a function.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// PCI IDs that it presents.
    pub identity: Identity,
    /// Bytes of BAR 2, a power of two.
    pub bar: u64,
    /// Bytes of memory in it, whole pages.
    pub memory: u64,
    /// Vectors, 1 to 256.
    pub vectors: u32,
}

/// The function.
#[derive(Debug)]
pub struct Function {
    setup: Setup,
    config: Config,
    /// MSI-X table and pending bits. They are only stored: clients keep tables of their own.
    table: Vec<u8>,
    memory: File,
    reach: Reach,
    vectors: Vectors,
    state: State,
    /// Only a Grace GPU has this.
    readiness: Option<Readiness>,
}

/// State that a reset clears.
#[derive(Debug)]
struct State {
    from: u64,
    to: u64,
    count: u64,
    vector: u32,
    status: u32,
    ended: u32,
    fault: u64,
    copy: Option<Copy>,
}

impl State {
    const FRESH: Self =
        Self { from: 0, to: 0, count: 0, vector: NO_VECTOR, status: 0, ended: 0, fault: 0, copy: None };
}

impl Function {
    /// A function with zeroed memory.
    ///
    /// # Errors
    /// The kernel's, for its memory.
    pub fn new(setup: Setup) -> io::Result<Self> {
        Self::with(setup, Config::new(setup.identity, setup.bar, setup.vectors))
    }

    /// As [`Function::new`], with the configuration space `config`, which has `setup`'s BAR and vectors; its IDs count.
    ///
    /// # Errors
    /// As [`Function::new`].
    pub fn with(setup: Setup, config: Config) -> io::Result<Self> {
        let memory = File::from(rustix::fs::memfd_create(c"function", MemfdFlags::CLOEXEC)?);
        memory.set_len(setup.memory)?;
        let reach = Reach::new(memory.try_clone()?, setup.memory);
        Ok(Self {
            setup,
            config,
            table: vec![0; (SIZE - TABLE) as usize],
            memory,
            reach,
            vectors: Vectors::new(setup.vectors),
            state: State::FRESH,
            readiness: None,
        })
    }

    /// A Grace GPU that is ready after `reads` reads of each word ([`Readiness::new`]).
    ///
    /// # Errors
    /// As [`Function::new`].
    pub fn grace(setup: Setup, reads: u32) -> io::Result<Self> {
        let config = Config::grace(setup.identity, setup.bar, setup.vectors);
        Ok(Self { readiness: Some(Readiness::new(reads)), ..Self::with(setup, config)? })
    }

    /// Gives the engine an aperture on `egm`, the memory of a socket (`crate::reach`).
    ///
    /// # Errors
    /// The kernel's, for the size of `egm`.
    pub fn with_egm(mut self, egm: File) -> io::Result<Self> {
        self.reach.egm = Some(Egm { bytes: egm.metadata()?.len(), file: egm });
        Ok(self)
    }

    /// Bytes of BAR 0.
    fn registers(&self) -> u32 {
        if self.readiness.is_some() { GRACE_SIZE } else { SIZE }
    }

    fn register(&self, register: Register) -> u64 {
        match register {
            Register::Magic => MAGIC.into(),
            Register::Version => 1,
            Register::Memory => self.setup.memory,
            Register::From => self.state.from,
            Register::To => self.state.to,
            Register::Count => self.state.count,
            Register::Vector => self.state.vector.into(),
            Register::Command => 0,
            Register::Status => self.state.status.into(),
            Register::Ended => self.state.ended.into(),
            Register::Fault => self.state.fault,
            Register::Windows => self.reach.windows.count() as u64,
            Register::Reads => self.readiness.as_ref().map_or(0, Readiness::reads).into(),
            Register::Refused => self.readiness.as_ref().map_or(0, Readiness::refused).into(),
        }
    }

    fn set(&mut self, register: Register, value: u64) {
        match register {
            Register::From => self.state.from = value,
            Register::To => self.state.to = value,
            Register::Count => self.state.count = value,
            Register::Vector => self.state.vector = u32::try_from(value).unwrap_or(NO_VECTOR),
            Register::Command if value == 1 && self.state.copy.is_none() => {
                let State { from, to, count, .. } = self.state;
                self.state.copy = Some(Copy::new(from, to, count));
                self.state.status = 1;
                self.run();
            }
            Register::Reads => {
                if let Some(readiness) = &mut self.readiness {
                    readiness.set_reads(u32::try_from(value).unwrap_or(u32::MAX));
                }
            }
            _ => {}
        }
    }

    /// Runs the engine until it is done or needs a client's answer.
    fn run(&mut self) {
        let Some(copy) = &mut self.state.copy else { return };
        match copy.run(&self.reach) {
            Progress::Waits => {}
            Progress::Done => self.end(None),
            Progress::Fault(address) => self.end(Some(address)),
        }
    }

    fn end(&mut self, fault: Option<u64>) {
        self.state.copy = None;
        self.state.status = if fault.is_some() { 3 } else { 2 };
        self.state.fault = fault.unwrap_or(self.state.fault);
        self.state.ended = self.state.ended.wrapping_add(1);
        self.vectors.fire(self.state.vector);
    }

    fn fresh(&mut self) {
        self.config.reset();
        self.reach.master = false;
        self.state = State::FRESH;
        self.table.fill(0);
        if let Some(readiness) = &mut self.readiness {
            readiness.reset();
        }
    }

    /// Reads BAR 0 outside of the registers: a word of a Grace GPU, the table, or nothing.
    fn read_beside(&mut self, offset: u64, data: &mut [u8]) {
        let word = self.readiness.as_mut().filter(|_| data.len() == 4).and_then(|words| words.read(offset));
        if let Some(word) = word {
            data.copy_from_slice(&word.to_le_bytes());
        } else if let Some(bytes) = self.in_table(offset, data.len()) {
            data.copy_from_slice(bytes);
        }
    }

    /// The part of the table for an access to BAR 0.
    fn in_table(&mut self, offset: u64, length: usize) -> Option<&mut [u8]> {
        let at = usize::try_from(offset.checked_sub(TABLE.into())?).ok()?;
        self.table.get_mut(at..)?.get_mut(..length)
    }
}

impl Device for Function {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { resettable: true, regions: 9, irqs: 5 }
    }

    fn region(&self, index: u32) -> (RegionInfo, Option<BorrowedFd<'_>>) {
        let some = RegionInfo { index, read: true, write: true, ..RegionInfo::default() };
        match index {
            BAR0 => (RegionInfo { size: self.registers().into(), ..some }, None),
            BAR2 => {
                let areas = vec![Area { offset: 0, size: self.setup.memory }];
                let info = RegionInfo { size: self.setup.bar, mmap: true, areas, ..some };
                (info, Some(self.memory.as_fd()))
            }
            CONFIG => (RegionInfo { size: LENGTH as u64, ..some }, None),
            _ => (RegionInfo { index, ..RegionInfo::default() }, None),
        }
    }

    fn irq(&self, index: u32) -> IrqInfo {
        let count = if index == MSIX { self.setup.vectors } else { 0 };
        IrqInfo { index, count, eventfd: true, maskable: false, automasked: false, noresize: false }
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        match (region, Register::decode(offset, data.len())) {
            (BAR0, Some((register, bit))) => {
                let value = (self.register(register) >> bit).to_le_bytes();
                data.iter_mut().zip(value).for_each(|(to, from)| *to = from);
            }
            (BAR0, None) => self.read_beside(offset, data),
            // Short at the end of the memory: the rest of `data` stays ones.
            (BAR2, _) => drop(rustix::io::pread(&self.memory, data, offset)),
            (CONFIG, _) => self.config.read(usize::try_from(offset).unwrap_or(usize::MAX), data),
            _ => {}
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        match (region, Register::decode(offset, data.len())) {
            (BAR0, Some((register, bit))) => {
                let new = data.iter().rev().fold(0, |value: u64, byte| value << 8 | u64::from(*byte));
                let mask = if data.len() == 8 { u64::MAX } else { 0xffff_ffff << bit };
                self.set(register, self.register(register) & !mask | (new << bit) & mask);
            }
            (BAR0, None) => {
                if let Some(bytes) = self.in_table(offset, data.len()) {
                    bytes.copy_from_slice(data);
                }
            }
            (BAR2, _) => {
                let left = self.setup.memory.saturating_sub(offset);
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(data.len());
                let _ = rustix::io::pwrite(&self.memory, &data[..length], offset);
            }
            (CONFIG, _) => {
                if self.config.write(usize::try_from(offset).unwrap_or(usize::MAX), data) {
                    self.fresh();
                }
                self.reach.master = self.config.is_master();
            }
            _ => {}
        }
    }

    fn dma_map(&mut self, map: DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        self.reach.windows.map(map, file)
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        self.reach.windows.unmap(unmap)
    }

    fn set_irqs(&mut self, set: SetIrqs<'_>, eventfds: Vec<OwnedFd>) -> Result<(), Errno> {
        if set.index == MSIX { self.vectors.set(set, eventfds) } else { Ok(()) }
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.fresh();
        Ok(())
    }

    fn disconnected(&mut self) {
        self.reach.windows = Windows::default();
        self.vectors.clear();
        if self.state.copy.is_some() {
            self.end(Some(self.state.from));
        }
    }

    fn call(&mut self) -> Option<Call<'_>> {
        self.state.copy.as_mut()?.call(&self.reach)
    }

    fn answered(&mut self, answer: Result<&[u8], Errno>) {
        // A reset may have happened meanwhile.
        let Some(copy) = &mut self.state.copy else { return };
        match copy.answered(answer.ok()) {
            Ok(()) => self.run(),
            Err(address) => self.end(Some(address)),
        }
    }
}
