//! Where the registers are (virtio 1.3 §4.1.4). Types only.
//!
//! ```text
//!  BAR 0   0x0000 common configuration   §4.1.4.3
//!          0x1000 interrupt status       §4.1.4.5
//!          0x2000 device configuration   §4.1.4.6
//!          0x3000 notification, 4 bytes a queue   §4.1.4.4
//!          0x4000 MSI-X table
//!          0x6000 MSI-X pending bits
//! ```

/// Bytes of BAR 0.
pub const BAR_SIZE: u64 = 0x8000;

pub(super) const COMMON: u32 = 0x0000;
pub(super) const COMMON_SIZE: u32 = 0x40;
pub(super) const ISR: u32 = 0x1000;
pub(super) const ISR_SIZE: u32 = 4;
pub(super) const DEVICE: u32 = 0x2000;
pub(super) const DEVICE_SIZE: u32 = 0x1000;
pub(super) const NOTIFY: u32 = 0x3000;
pub(super) const NOTIFY_SIZE: u32 = 0x1000;
pub(super) const TABLE: u32 = 0x4000;
pub(super) const PENDING: u32 = 0x6000;

/// Bytes from one queue's notification address to the next (`notify_off_multiplier`).
pub(super) const NOTIFY_STRIDE: u32 = 4;
/// Queues that have a notification address.
pub(super) const MAX_QUEUES: usize = (NOTIFY_SIZE / NOTIFY_STRIDE) as usize;
/// MSI-X vectors that fit between the table and the pending bits.
pub(super) const MAX_VECTORS: usize = 512;

/// No MSI-X vector (§4.1.5.1.2).
pub(super) const NO_VECTOR: u16 = 0xffff;

/// Device status bits (§2.1).
pub(super) mod status {
    /// The driver has seen the device.
    pub(crate) const ACKNOWLEDGE: u8 = 1;
    /// The driver knows how to drive it.
    pub(crate) const DRIVER: u8 = 2;
    /// The driver is ready.
    pub(crate) const DRIVER_OK: u8 = 4;
    /// Features are agreed on.
    pub(crate) const FEATURES_OK: u8 = 8;
    /// The device is broken until it is reset.
    pub(crate) const NEEDS_RESET: u8 = 64;
    /// The driver gave up.
    pub(crate) const FAILED: u8 = 128;
}

/// Target of an access to BAR 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Area {
    /// A register of the common configuration; `None` when no register has this offset and width.
    Common(Option<Common>),
    /// The interrupt status byte.
    Isr,
    /// The device's own configuration, at this offset.
    Device(u64),
    /// The notification address of this queue.
    Notify(u16),
    /// The MSI-X table, at this offset.
    Table(u64),
    /// The MSI-X pending bits, at this offset.
    Pending(u64),
    Hole,
}

impl Area {
    /// Decodes an access of `length` bytes at `offset`. It belongs to the area that its first byte is in.
    pub(super) fn decode(offset: u64, length: usize) -> Self {
        let Ok(offset) = u32::try_from(offset) else { return Self::Hole };
        let within = |base: u32, size: u32| offset.checked_sub(base).filter(|at| *at < size);
        if let Some(at) = within(COMMON, COMMON_SIZE) {
            Self::Common(Common::decode(at, length))
        } else if within(ISR, ISR_SIZE).is_some() {
            Self::Isr
        } else if let Some(at) = within(DEVICE, DEVICE_SIZE) {
            Self::Device(at.into())
        } else if let Some(queue) =
            within(NOTIFY, NOTIFY_SIZE).and_then(|at| u16::try_from(at / NOTIFY_STRIDE).ok())
        {
            Self::Notify(queue)
        } else if let Some(at) = within(TABLE, 0x2000) {
            Self::Table(at.into())
        } else if let Some(at) = within(PENDING, 0x2000) {
            Self::Pending(at.into())
        } else {
            Self::Hole
        }
    }
}

/// A 32-bit half of a 64-bit register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    /// Bits 31:0, at the lower offset.
    Low,
    /// Bits 63:32, at the higher offset.
    High,
}

/// A register of the common configuration structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Common {
    /// Selects the 32 feature bits that [`Common::DeviceFeature`] shows.
    DeviceFeatureSelect,
    /// Feature bits that the device offers, 32 at a time.
    DeviceFeature,
    /// Selects the 32 feature bits that [`Common::DriverFeature`] sets.
    DriverFeatureSelect,
    /// Feature bits that the driver accepts, 32 at a time.
    DriverFeature,
    /// Vector of configuration changes.
    ConfigVector,
    QueueCount,
    /// Device status (§2.1); writing 0 resets the device.
    Status,
    /// Changes with the device configuration.
    ConfigGeneration,
    /// Queue that the registers below speak of.
    QueueSelect,
    QueueSize,
    QueueVector,
    /// Whether it is enabled.
    QueueEnable,
    /// Its notification address in units of [`NOTIFY_STRIDE`].
    QueueNotifyOffset,
    /// Address of its descriptor table.
    QueueDescriptor(Half),
    /// Address of its available ring.
    QueueDriver(Half),
    /// Address of its used ring.
    QueueDevice(Half),
    /// There, and always zero, as its feature is not offered: notification data, queue reset, admin queues.
    Absent,
}

impl Common {
    /// §4.1.3.1: each register has one width; 64-bit registers are two of 32 bits.
    pub(super) fn decode(offset: u32, length: usize) -> Option<Self> {
        Some(match (offset, length) {
            (0x00, 4) => Self::DeviceFeatureSelect,
            (0x04, 4) => Self::DeviceFeature,
            (0x08, 4) => Self::DriverFeatureSelect,
            (0x0c, 4) => Self::DriverFeature,
            (0x10, 2) => Self::ConfigVector,
            (0x12, 2) => Self::QueueCount,
            (0x14, 1) => Self::Status,
            (0x15, 1) => Self::ConfigGeneration,
            (0x16, 2) => Self::QueueSelect,
            (0x18, 2) => Self::QueueSize,
            (0x1a, 2) => Self::QueueVector,
            (0x1c, 2) => Self::QueueEnable,
            (0x1e, 2) => Self::QueueNotifyOffset,
            (0x20, 4) => Self::QueueDescriptor(Half::Low),
            (0x24, 4) => Self::QueueDescriptor(Half::High),
            (0x28, 4) => Self::QueueDriver(Half::Low),
            (0x2c, 4) => Self::QueueDriver(Half::High),
            (0x30, 4) => Self::QueueDevice(Half::Low),
            (0x34, 4) => Self::QueueDevice(Half::High),
            (0x38 | 0x3a | 0x3c | 0x3e, 2) => Self::Absent,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_the_bar_belongs_to_the_area_of_its_page() {
        for offset in 0..BAR_SIZE {
            let (area, page) = (Area::decode(offset, 1), offset & !0xfff);
            let fits = match area {
                Area::Common(_) => page == 0 && offset < 0x40,
                Area::Isr => offset < 0x1004 && page == 0x1000,
                Area::Device(at) => at + 0x2000 == offset && page == 0x2000,
                Area::Notify(queue) => u64::from(queue) == (offset - 0x3000) / 4,
                Area::Table(at) => at + 0x4000 == offset && at < 0x2000,
                Area::Pending(at) => at + 0x6000 == offset,
                Area::Hole => page < 0x2000,
            };
            assert!(fits, "{offset:#x} decodes to {area:?}");
        }
        assert_eq!(Area::decode(BAR_SIZE, 4), Area::Hole);
        assert_eq!(Area::decode(u64::MAX, 4), Area::Hole);
    }

    #[test]
    fn registers_tile_the_structure_and_each_has_one_width() {
        let mut at = 0;
        while at < COMMON_SIZE {
            let widths: Vec<u32> =
                [1, 2, 4, 8].into_iter().filter(|w| Common::decode(at, *w as usize).is_some()).collect();
            let [width] = widths[..] else { panic!("{at:#x} has widths {widths:?}") };
            for inside in at + 1..at + width {
                assert!(
                    (1..=8).all(|w| Common::decode(inside, w).is_none()),
                    "{inside:#x} is inside a register"
                );
            }
            at += width;
        }
    }
}
