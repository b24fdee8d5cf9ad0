//! A device that copies memory, behind the wire's own server.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use egm_vfio::backend::RegionIndex;
use egm_vfio_wire::message::{Area, DeviceInfo, DmaMap, DmaUnmap, IrqData, IrqInfo, RegionInfo, SetIrqs};
use egm_vfio_wire::serve::Device;
use rustix::io::Errno;

pub(crate) const BAR: RegionIndex = RegionIndex::Bar(2);
pub(crate) const MEMORY: u64 = 0x8000;
pub(crate) const VECTORS: u32 = 4;

/// Registers of BAR 0. A 32-bit vector to fire.
pub(crate) const FIRE: u64 = 0;
/// Three 64-bit numbers: from, to, bytes. They are copied at once.
pub(crate) const COPY: u64 = 0x10;
/// 1 if the last copy succeeded.
pub(crate) const DONE: u64 = 0x28;

pub(crate) struct Copier {
    registers: [u8; 0x1000],
    memory: File,
    shared: Vec<(DmaMap, File)>,
    vectors: [Option<File>; VECTORS as usize],
}

impl Copier {
    /// With a memory file of `length` bytes.
    pub(crate) fn new(length: u64) -> Self {
        let memory = tempfile::tempfile_in("/dev/shm").unwrap();
        memory.set_len(length).unwrap();
        Self::of(memory)
    }

    /// With `memory` behind its BAR.
    pub(crate) fn of(memory: File) -> Self {
        Self { registers: [0; 0x1000], memory, shared: Vec::new(), vectors: Default::default() }
    }

    fn number(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.registers[at..at + 8].try_into().unwrap())
    }

    /// The file and offset of `count` bytes at `address`.
    fn place(&self, address: u64, count: u64, write: bool) -> Option<(&File, u64)> {
        let inside = |map: &DmaMap| {
            address >= map.address && address + count <= map.address + map.size && (map.write || !write)
        };
        let (map, file) = self.shared.iter().find(|(map, _)| inside(map))?;
        Some((file, map.offset + (address - map.address)))
    }

    fn copy(&self) -> Option<()> {
        let [from, to, count] = [0x10, 0x18, 0x20].map(|at| self.number(at));
        let mut data = vec![0; usize::try_from(count).ok()?];
        let (file, offset) = self.place(from, count, false)?;
        file.read_exact_at(&mut data, offset).ok()?;
        let (file, offset) = self.place(to, count, true)?;
        file.write_all_at(&data, offset).ok()
    }
}

impl Device for Copier {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { resettable: true, regions: 9, irqs: 3 }
    }

    fn region(&self, index: u32) -> (RegionInfo, Option<BorrowedFd<'_>>) {
        let some = RegionInfo { index, read: true, write: true, ..RegionInfo::default() };
        match index {
            0 => (RegionInfo { size: 0x1000, ..some }, None),
            2 => {
                let areas = vec![Area { offset: 0x1000, size: MEMORY - 0x1000 }];
                (RegionInfo { size: MEMORY, mmap: true, areas, ..some }, Some(self.memory.as_fd()))
            }
            _ => (RegionInfo { index, ..RegionInfo::default() }, None),
        }
    }

    fn irq(&self, index: u32) -> IrqInfo {
        let count = if index == 2 { VECTORS } else { 0 };
        IrqInfo { index, count, eventfd: true, maskable: false, automasked: false, noresize: false }
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        if region == 2 {
            self.memory.read_exact_at(data, offset).unwrap();
        } else {
            data.copy_from_slice(&self.registers[usize::try_from(offset).unwrap()..][..data.len()]);
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        if region == 2 {
            return self.memory.write_all_at(data, offset).unwrap();
        }
        self.registers[usize::try_from(offset).unwrap()..][..data.len()].copy_from_slice(data);
        match offset {
            FIRE => {
                let vector = usize::from(self.registers[0]);
                if let Some(Some(eventfd)) = self.vectors.get(vector) {
                    rustix::io::write(eventfd, &1_u64.to_ne_bytes()).unwrap();
                }
            }
            COPY => self.registers[0x28] = u8::from(self.copy().is_some()),
            _ => {}
        }
    }

    fn dma_map(&mut self, map: DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        self.shared.push((map, file.ok_or(Errno::INVAL)?.into()));
        Ok(())
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        let DmaUnmap::Window { address, .. } = unmap else { return Err(Errno::INVAL) };
        self.shared.retain(|(map, _)| map.address != address);
        Ok(())
    }

    fn set_irqs(&mut self, set: SetIrqs<'_>, eventfds: Vec<OwnedFd>) -> Result<(), Errno> {
        if (set.count, set.data) == (0, IrqData::None) {
            self.vectors = Default::default();
        }
        let mut eventfds = eventfds.into_iter().map(File::from);
        for vector in set.start..set.start + set.count {
            self.vectors[usize::try_from(vector).unwrap()] = eventfds.next();
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.registers = [0; 0x1000];
        Ok(())
    }

    fn disconnected(&mut self) {
        self.shared.clear();
        self.vectors = Default::default();
    }
}
