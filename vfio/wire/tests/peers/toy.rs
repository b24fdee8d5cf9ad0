//! A device for tests: registers that store values, a BAR in a memory file, interrupts, and the memory shared with it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use egm_vfio_wire::client::Client;
use egm_vfio_wire::message::{
    Area, DeviceInfo, DmaMap, DmaUnmap, IrqAction, IrqData, IrqInfo, RegionInfo, SetIrqs,
};
use egm_vfio_wire::serve::{Device, Served, serve};
use egm_vfio_wire::socket::{BusyPoll, Connection};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

const REGISTERS: u16 = 0x1000;
pub(crate) const MEMORY: u64 = 0x30_0000;
pub(crate) const VECTORS: u32 = 300;

/// Time enough for any machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) struct Toy {
    pub(crate) registers: Vec<u8>,
    pub(crate) memory: File,
    pub(crate) windows: Vec<(DmaMap, Option<OwnedFd>)>,
    pub(crate) vectors: Vec<Option<OwnedFd>>,
    pub(crate) resets: u32,
    pub(crate) left: u32,
}

/// The device and how its client left, in the end.
type Serving = JoinHandle<(Toy, Result<(), Served>)>;

impl Toy {
    pub(crate) fn new() -> Self {
        let memory = File::from(rustix::fs::memfd_create(c"toy", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MEMORY).unwrap();
        let vectors = (0..VECTORS).map(|_| None).collect();
        let registers = vec![0; REGISTERS.into()];
        Self { registers, memory, windows: Vec::new(), vectors, resets: 0, left: 0 }
    }

    /// A client and this device, which is returned when the client has left.
    pub(crate) fn serve(mut self, busy_poll: BusyPoll) -> (Client, Serving) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let mut connection = Connection::new(theirs.into(), LIMIT, busy_poll).unwrap();
            let outcome = serve(&mut connection, &mut self);
            (self, outcome)
        });
        (Client::new(Connection::new(ours.into(), LIMIT, busy_poll).unwrap()).unwrap(), server)
    }
}

impl Device for Toy {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { resettable: true, regions: 9, irqs: 5 }
    }

    fn region(&self, index: u32) -> (RegionInfo, Option<BorrowedFd<'_>>) {
        let none = RegionInfo { index, read: true, write: true, ..RegionInfo::default() };
        match index {
            0 => (RegionInfo { size: REGISTERS.into(), ..none }, None),
            2 => {
                let areas =
                    vec![Area { offset: 0, size: 0x1000 }, Area { offset: 0x2000, size: MEMORY - 0x2000 }];
                (RegionInfo { size: MEMORY, mmap: true, areas, ..none }, Some(self.memory.as_fd()))
            }
            7 => (RegionInfo { size: 256, ..none }, None),
            _ => (RegionInfo { index, ..RegionInfo::default() }, None),
        }
    }

    fn irq(&self, index: u32) -> IrqInfo {
        let count = if index == 2 { VECTORS } else { 0 };
        IrqInfo { index, count, eventfd: true, maskable: false, automasked: false, noresize: false }
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        let at = usize::try_from(offset).unwrap();
        match region {
            0 => data.copy_from_slice(&self.registers[at..][..data.len()]),
            2 => assert_eq!(rustix::io::pread(&self.memory, &mut *data, offset), Ok(data.len())),
            _ => data.fill(0x11),
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        match region {
            0 => self.registers[usize::try_from(offset).unwrap()..][..data.len()].copy_from_slice(data),
            2 => assert_eq!(rustix::io::pwrite(&self.memory, data, offset), Ok(data.len())),
            _ => {}
        }
    }

    fn dma_map(&mut self, map: DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        if self.windows.iter().any(|(window, _)| window.address == map.address) {
            return Err(Errno::EXIST);
        }
        self.windows.push((map, file));
        Ok(())
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        let before = self.windows.len();
        self.windows.retain(|(map, _)| match unmap {
            DmaUnmap::All => false,
            DmaUnmap::Window { address, size } => (map.address, map.size) != (address, size),
        });
        if self.windows.len() < before { Ok(()) } else { Err(Errno::NOENT) }
    }

    fn set_irqs(&mut self, set: SetIrqs<'_>, eventfds: Vec<OwnedFd>) -> Result<(), Errno> {
        let vectors = &mut self.vectors[set.start as usize..][..set.count as usize];
        match (set.action, set.data) {
            (IrqAction::Trigger, IrqData::Eventfd) => {
                let mut eventfds = eventfds.into_iter();
                vectors.iter_mut().for_each(|vector| *vector = eventfds.next());
            }
            (IrqAction::Trigger, data) => {
                for (index, vector) in vectors.iter().enumerate() {
                    let fires = if let IrqData::Bool(bytes) = data { bytes[index] != 0 } else { true };
                    if let (true, Some(eventfd)) = (fires, vector) {
                        rustix::io::write(eventfd, &1_u64.to_ne_bytes())?;
                    }
                }
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.resets += 1;
        self.registers.fill(0);
        Ok(())
    }

    fn disconnected(&mut self) {
        self.windows.clear();
        self.vectors.fill_with(|| None);
        self.left += 1;
    }
}
