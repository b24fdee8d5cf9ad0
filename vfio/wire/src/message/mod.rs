//! Messages: a body to a value and back, for both directions (QEMU docs/interop/vfio-user.rst, "Commands").
//!
//! A wrong body does not end the connection, as the next message can be found: its sender gets an error reply. Bytes
//! after a message's own are ignored, so that a newer peer may send more.

mod access;
mod device;
mod dma;
mod feature;
mod irq;
mod region;
mod version;
mod wrong;

pub use access::{Access, Call, DmaAccess, Write, Writes};
pub use device::DeviceInfo;
pub use dma::{ByFile, DmaMap, DmaUnmap};
pub use feature::{Feature, Migration};
pub use irq::{IrqAction, IrqData, IrqInfo, SetIrqs};
pub use region::{Area, MOST_AREAS, Query, RegionInfo, RegionReply};
pub(crate) use version::ANNOUNCED_FDS;
pub use version::{Capabilities, Limits, MigrationPages, TwinSocket, Version};
pub(crate) use wrong::MOST_VERSION_DATA;
pub use wrong::Wrong;

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// Command numbers of the vfio-user protocol.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Command { $($(#[$doc])* $name = $number,)* }

        impl TryFrom<u16> for Command {
            type Error = Wrong;

            fn try_from(command: u16) -> Result<Self, Wrong> {
                match command {
                    $($number => Ok(Self::$name),)*
                    _ => Err(Wrong::Command { command }),
                }
            }
        }

        #[cfg(test)]
        pub(crate) const COMMANDS: &[Command] = &[$(Command::$name),*];
    };
}

commands! {
    /// The first message of a connection, and its reply.
    Version = 1,
    /// Memory that the server may reach.
    DmaMap = 2,
    /// Memory that the server may no longer reach.
    DmaUnmap = 3,
    /// Number of regions and interrupts.
    DeviceInfo = 4,
    /// Size, flags and mappable areas of a region.
    RegionInfo = 5,
    /// Eventfds for writes to a region.
    RegionIoFds = 6,
    /// One kind of interrupt.
    IrqInfo = 7,
    /// Sets up, masks or triggers interrupts.
    SetIrqs = 8,
    /// Bytes of a region.
    RegionRead = 9,
    /// Bytes to a region.
    RegionWrite = 10,
    /// The server reads the client's memory.
    DmaRead = 11,
    /// The server writes the client's memory.
    DmaWrite = 12,
    /// Resets the device; the request has no body.
    Reset = 13,
    /// Dirty page logging as it was before version 0.9 of the text; only its number is known here.
    DirtyPages = 14,
    /// Several writes to regions, 8 bytes at most each.
    WriteMulti = 15,
    /// Features of the device, among them migration.
    Feature = 16,
    /// The device's state out of the server.
    MigrationRead = 17,
    /// The device's state into the server.
    MigrationWrite = 18,
}

impl Command {
    /// The number in a message's header.
    #[must_use]
    pub fn number(self) -> u16 {
        self as u16
    }
}

/// Request of a client to a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request<'a> {
    /// The handshake, the first request of a connection.
    Version(Version),
    /// Memory that the server may reach, with one file descriptor or none.
    DmaMap(DmaMap),
    /// Memory that it has to release.
    DmaUnmap(DmaUnmap),
    /// About the device; the most bytes of the reply's body.
    DeviceInfo(u32),
    /// Query for the size and the mappable areas of a region.
    RegionInfo(Query),
    /// Eventfds of a region.
    RegionIoFds(Query),
    /// About a kind of interrupt.
    IrqInfo(Query),
    /// Interrupts, with as many descriptors as its vectors, or none.
    SetIrqs(SetIrqs<'a>),
    /// Reads bytes of a region; the reply has them.
    RegionRead(Access),
    /// Writes to a region.
    RegionWrite(Write<'a>),
    /// Reset of the device, without a body.
    Reset,
    /// An old way to log dirty pages.
    DirtyPages,
    /// Several writes of 8 bytes at most.
    WriteMulti(Writes<'a>),
    /// Reads, sets or probes a feature.
    Feature(Feature<'a>),
    /// State of the device to be read.
    MigrationRead(Migration<'a>),
    /// State of the device, written.
    MigrationWrite(Migration<'a>),
}

impl<'a> Request<'a> {
    /// Decodes the request of `command` with `body`.
    ///
    /// # Errors
    /// [`Wrong`] if the bytes do not fit the command.
    pub fn decode(command: u16, body: &'a [u8]) -> Result<Self, Wrong> {
        let number = command;
        Ok(match Command::try_from(command)? {
            Command::Version => Self::Version(Version::decode(body)?),
            Command::DmaMap => Self::DmaMap(DmaMap::decode(body)?),
            Command::DmaUnmap => Self::DmaUnmap(DmaUnmap::decode(body)?),
            Command::DeviceInfo => Self::DeviceInfo(DeviceInfo::decode_request(body)?),
            Command::RegionInfo => Self::RegionInfo(Query::decode_region(body)?),
            Command::RegionIoFds => Self::RegionIoFds(Query::decode_io_fds(body)?),
            Command::IrqInfo => Self::IrqInfo(Query::decode(body)?),
            Command::SetIrqs => Self::SetIrqs(SetIrqs::decode(body)?),
            Command::RegionRead => Self::RegionRead(Access::decode(body)?),
            Command::RegionWrite => Self::RegionWrite(Write::decode(body)?),
            Command::Reset => Self::Reset,
            Command::DirtyPages => Self::DirtyPages,
            Command::WriteMulti => Self::WriteMulti(Writes::decode(body)?),
            Command::Feature => Self::Feature(Feature::decode(body)?),
            Command::MigrationRead => Self::MigrationRead(Migration::decode_read(body)?),
            Command::MigrationWrite => Self::MigrationWrite(Migration::decode_write(body)?),
            Command::DmaRead | Command::DmaWrite => return Err(Wrong::Command { command: number }),
        })
    }

    /// Command that carries the request.
    #[must_use]
    pub fn command(&self) -> Command {
        match self {
            Self::Version(_) => Command::Version,
            Self::DmaMap(_) => Command::DmaMap,
            Self::DmaUnmap(_) => Command::DmaUnmap,
            Self::DeviceInfo(_) => Command::DeviceInfo,
            Self::RegionInfo(_) => Command::RegionInfo,
            Self::RegionIoFds(_) => Command::RegionIoFds,
            Self::IrqInfo(_) => Command::IrqInfo,
            Self::SetIrqs(_) => Command::SetIrqs,
            Self::RegionRead(_) => Command::RegionRead,
            Self::RegionWrite(_) => Command::RegionWrite,
            Self::Reset => Command::Reset,
            Self::DirtyPages => Command::DirtyPages,
            Self::WriteMulti(_) => Command::WriteMulti,
            Self::Feature(_) => Command::Feature,
            Self::MigrationRead(_) => Command::MigrationRead,
            Self::MigrationWrite(_) => Command::MigrationWrite,
        }
    }

    /// Appends the body to `out`. Data of a write comes last, so that a sender need not copy it: see [`Request::data`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Version(version) => version.encode(out),
            Self::DmaMap(map) => map.encode(out),
            Self::DmaUnmap(unmap) => unmap.encode(out),
            Self::DeviceInfo(room) => DeviceInfo::encode_request(*room, out),
            Self::RegionInfo(query) => query.encode_region(out),
            Self::RegionIoFds(query) | Self::IrqInfo(query) => query.encode(out),
            Self::SetIrqs(set) => set.encode(out),
            Self::RegionRead(access) => access.encode(out),
            Self::RegionWrite(write) => write.access.encode(out),
            Self::Reset | Self::DirtyPages => {}
            Self::WriteMulti(writes) => writes.encode(out),
            Self::Feature(feature) => feature.encode(out),
            Self::MigrationRead(part) | Self::MigrationWrite(part) => part.encode(out),
        }
    }

    /// Data that follows [`Request::encode`]'s bytes in the message: a write's, else none.
    #[must_use]
    pub fn data(&self) -> &'a [u8] {
        match self {
            Self::RegionWrite(write) => write.data,
            Self::MigrationWrite(part) => part.data,
            _ => &[],
        }
    }

    /// Whether `fds` file descriptors may come with it.
    #[must_use]
    pub fn takes(&self, fds: usize) -> bool {
        match self {
            Self::DmaMap(map) if map.by_file != ByFile::Any => fds == 1,
            Self::DmaMap(_) => fds <= 1,
            Self::SetIrqs(set) if set.data == IrqData::Eventfd => {
                fds == 0 || u32::try_from(fds) == Ok(set.count)
            }
            _ => fds == 0,
        }
    }
}

#[cfg(test)]
mod tests;
