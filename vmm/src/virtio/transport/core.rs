//! The common configuration structure as a state machine (virtio 1.3 §3.1, §4.1.4.3). Pure: a register write gives
//! an [`Effect`] that the glue carries out.

use super::registers::{Common, Half, NO_VECTOR, status};
use crate::snapshot::{Mismatch, ensure};
use crate::virtio::saved::{QueueRegisters, RegisterState};

/// Action that a register write requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(super) enum Effect {
    None,
    /// The driver requests a reset of the device; the registers are reset already.
    Reset,
    /// The driver is ready.
    Activate,
    /// Configuration changes interrupt by this vector.
    ConfigVector(u16),
    /// This queue interrupts by this vector.
    QueueVector(u16, u16),
}

/// The driver's settings of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueState {
    pub(super) max_size: u16,
    /// Size: a power of two, at most `max_size`.
    pub(super) size: u16,
    /// MSI-X vector or [`NO_VECTOR`].
    pub(super) vector: u16,
    /// Whether the driver enabled it.
    pub(super) enabled: bool,
    /// Descriptor table: whatever the guest wrote.
    pub(super) descriptor: u64,
    /// Available ring: whatever the guest wrote.
    pub(super) driver: u64,
    /// Used ring: whatever the guest wrote.
    pub(super) device: u64,
}

impl QueueState {
    fn new(max_size: u16) -> Self {
        Self {
            max_size,
            size: max_size,
            vector: NO_VECTOR,
            enabled: false,
            descriptor: 0,
            driver: 0,
            device: 0,
        }
    }
}

/// The registers of the common configuration.
#[derive(Debug)]
pub(super) struct Core {
    offered: u64,
    accepted: u64,
    device_select: u32,
    driver_select: u32,
    status: u8,
    /// The driver wrote 0 and the device is not at rest yet: until then the status does not read 0 (§4.1.4.3.1).
    resetting: bool,
    config_vector: u16,
    queue_select: u16,
    queues: Vec<QueueState>,
    vectors: u16,
    mistakes: u64,
}

/// VIRTIO_F_VERSION_1 (§6): always offered, and required of the driver.
pub(super) const VERSION_1: u64 = 1 << 32;

impl Core {
    /// A device that offers `features`, with queues of these largest sizes and this many MSI-X vectors.
    pub(super) fn new(features: u64, queue_sizes: &[u16], vectors: u16) -> Self {
        Self {
            offered: features | VERSION_1,
            accepted: 0,
            device_select: 0,
            driver_select: 0,
            status: 0,
            resetting: false,
            config_vector: NO_VECTOR,
            queue_select: 0,
            queues: queue_sizes.iter().copied().map(QueueState::new).collect(),
            vectors,
            mistakes: 0,
        }
    }

    /// Feature bits that both sides agreed on.
    pub(super) fn features(&self) -> u64 {
        self.accepted & self.offered
    }

    pub(super) fn queues(&self) -> &[QueueState] {
        &self.queues
    }

    /// Things that the driver did against the specification.
    pub(super) fn mistakes(&self) -> u64 {
        self.mistakes
    }

    /// Counts a thing that the driver did against the specification.
    pub(super) fn mistake(&mut self) {
        self.mistakes = self.mistakes.saturating_add(1);
        if egm_address::fault!("mistakes-in-the-log") {
            tracing::info!("mistake {} of a driver", self.mistakes);
        }
    }

    /// Whether the device has yet to come to rest after a reset.
    pub(super) fn is_resetting(&self) -> bool {
        self.resetting
    }

    /// The device is at rest.
    pub(super) fn rested(&mut self) {
        (self.status, self.resetting) = (0, false);
    }

    /// Vector of configuration changes.
    pub(super) const fn config_vector(&self) -> u16 {
        self.config_vector
    }

    /// Whether the device is active: its driver started it, and it needs no reset.
    pub(super) const fn is_live(&self) -> bool {
        self.status & (status::DRIVER_OK | status::NEEDS_RESET) == status::DRIVER_OK
    }

    /// The registers, while no reset is pending.
    pub(super) fn saved(&self) -> RegisterState {
        let queue = |queue: &QueueState| QueueRegisters {
            size: queue.size,
            vector: queue.vector,
            enable: queue.enabled,
            descriptor: queue.descriptor,
            driver: queue.driver,
            device: queue.device,
        };
        RegisterState {
            device_feature_select: self.device_select,
            driver_feature_select: self.driver_select,
            driver_feature: self.accepted,
            config_vector: self.config_vector,
            status: self.status,
            queue_select: self.queue_select,
            queues: self.queues.iter().map(queue).collect(),
        }
    }

    /// Takes registers that a device like this one can have.
    ///
    /// # Errors
    /// [`Mismatch`].
    pub(super) fn restore(&mut self, saved: &RegisterState) -> Result<(), Mismatch> {
        use status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, NEEDS_RESET};
        let accepted = saved.driver_feature;
        let has = |bit: u8| saved.status & bit != 0;
        let known = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | NEEDS_RESET | FAILED;
        let agreed = !has(FEATURES_OK) || (has(ACKNOWLEDGE) && has(DRIVER));
        let steps = agreed && (!has(DRIVER_OK) || has(FEATURES_OK)) && saved.status & !known == 0;
        ensure(steps, || format!("no driver leads to device status {:#x}", saved.status))?;
        let missing = accepted & !self.offered;
        ensure(!has(FEATURES_OK) || (missing == 0 && accepted & VERSION_1 != 0), || {
            format!("its driver uses the feature bits {missing:#x}, which this host's device lacks")
        })?;
        let (count, own) = (saved.queues.len(), self.queues.len());
        ensure(count == own, || format!("{count} queues in place of {own}"))?;
        let has_vector = |vector: u16| vector < self.vectors || vector == NO_VECTOR;
        ensure(has_vector(saved.config_vector), || format!("it has no vector {}", saved.config_vector))?;
        for (queue, saved) in self.queues.iter_mut().zip(&saved.queues) {
            let QueueRegisters { size, vector, enable, descriptor, driver, device } = *saved;
            let max_size = queue.max_size;
            ensure(size.is_power_of_two() && size <= max_size, || {
                format!("no queue of {max_size} entries has {size}")
            })?;
            let has_vector = vector < self.vectors || vector == NO_VECTOR;
            ensure(has_vector, || format!("it has no vector {vector}"))?;
            *queue = QueueState { max_size, size, vector, enabled: enable, descriptor, driver, device };
        }
        self.device_select = saved.device_feature_select;
        self.driver_select = saved.driver_feature_select;
        self.accepted = accepted;
        self.config_vector = saved.config_vector;
        self.status = saved.status;
        self.queue_select = saved.queue_select;
        Ok(())
    }

    /// Sets DEVICE_NEEDS_RESET: the device could not start, or had an error that it cannot go on from (§2.1.1).
    pub(super) fn needs_reset(&mut self) {
        self.status |= status::NEEDS_RESET;
    }

    /// Reads a register. [`Common::ConfigGeneration`] is not kept here and reads zero.
    pub(super) fn read(&self, register: Common) -> u32 {
        let queue = self.queues.get(usize::from(self.queue_select));
        match register {
            Common::DeviceFeatureSelect => self.device_select,
            Common::DeviceFeature => half_of(self.offered, self.device_select),
            Common::DriverFeatureSelect => self.driver_select,
            Common::DriverFeature => half_of(self.accepted, self.driver_select),
            Common::ConfigVector => self.config_vector.into(),
            Common::QueueCount => u32::try_from(self.queues.len()).unwrap_or(0),
            Common::Status => self.status.into(),
            Common::QueueSelect => self.queue_select.into(),
            Common::QueueSize => queue.map_or(0, |q| q.size.into()),
            Common::QueueVector => queue.map_or(NO_VECTOR, |q| q.vector).into(),
            Common::QueueEnable => queue.is_some_and(|q| q.enabled).into(),
            Common::QueueNotifyOffset => queue.map_or(0, |_| self.queue_select.into()),
            Common::QueueDescriptor(half) => queue.map_or(0, |q| get(q.descriptor, half)),
            Common::QueueDriver(half) => queue.map_or(0, |q| get(q.driver, half)),
            Common::QueueDevice(half) => queue.map_or(0, |q| get(q.device, half)),
            Common::ConfigGeneration | Common::Absent => 0,
        }
    }

    /// Writes a register; `value` has no bits above the register's width. A write before the end of a reset, which the
    /// driver must wait for (§4.1.4.3.2), is ignored and counted.
    pub(super) fn write(&mut self, register: Common, value: u32) -> Effect {
        if self.resetting {
            self.mistake();
            return Effect::None;
        }
        let short = u16::try_from(value & 0xffff).unwrap_or(0);
        match register {
            Common::DeviceFeatureSelect => self.device_select = value,
            Common::DriverFeatureSelect => self.driver_select = value,
            Common::DriverFeature => self.write_features(value),
            Common::Status => return self.write_status(u8::try_from(value & 0xff).unwrap_or(0)),
            Common::ConfigVector => {
                self.config_vector = self.vector(short);
                return Effect::ConfigVector(self.config_vector);
            }
            Common::QueueSelect => self.queue_select = short,
            Common::QueueVector => return self.write_queue_vector(short),
            Common::QueueSize
            | Common::QueueEnable
            | Common::QueueDescriptor(_)
            | Common::QueueDriver(_)
            | Common::QueueDevice(_) => self.write_queue(register, value),
            Common::DeviceFeature
            | Common::QueueCount
            | Common::ConfigGeneration
            | Common::QueueNotifyOffset
            | Common::Absent => self.mistake(),
        }
        Effect::None
    }

    fn write_features(&mut self, value: u32) {
        if self.status & status::FEATURES_OK != 0 {
            return self.mistake(); // §3.1.1: not after FEATURES_OK
        }
        match self.driver_select {
            0 => set(&mut self.accepted, Half::Low, value),
            1 => set(&mut self.accepted, Half::High, value),
            _ if value == 0 => {}
            _ => self.mistake(),
        }
    }

    /// §2.1, §3.1.1. The driver only adds bits; NEEDS_RESET is the device's and stays whatever is written.
    fn write_status(&mut self, value: u8) -> Effect {
        use status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, NEEDS_RESET};
        if value == 0 {
            self.reset();
            return Effect::Reset;
        }
        let had = self.status & !NEEDS_RESET;
        if value & had != had
            || value & !(ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | NEEDS_RESET | FAILED) != 0
        {
            self.mistake();
            return Effect::None;
        }
        self.status |= value & (ACKNOWLEDGE | DRIVER | FAILED);
        let new = value & !had;
        if new & FEATURES_OK != 0 {
            let known = self.status & (ACKNOWLEDGE | DRIVER) == ACKNOWLEDGE | DRIVER;
            let agreed = self.accepted & !self.offered == 0 && self.accepted & VERSION_1 != 0;
            if known && agreed {
                self.status |= FEATURES_OK;
            } else {
                self.mistake();
            }
        }
        if new & DRIVER_OK == 0 {
            return Effect::None;
        }
        if self.status & (FEATURES_OK | FAILED | NEEDS_RESET) != FEATURES_OK {
            self.mistake();
            return Effect::None;
        }
        self.status |= DRIVER_OK;
        Effect::Activate
    }

    /// Resets the registers; the status reads 0 once the device is quiescent.
    pub(super) fn reset(&mut self) {
        self.accepted = 0;
        self.device_select = 0;
        self.driver_select = 0;
        self.resetting = true;
        self.config_vector = NO_VECTOR;
        self.queue_select = 0;
        for queue in &mut self.queues {
            *queue = QueueState::new(queue.max_size);
        }
    }

    /// §4.1.5.1.2.1: a vector that the device has not reads back as none.
    fn vector(&mut self, vector: u16) -> u16 {
        if vector >= self.vectors && vector != NO_VECTOR {
            self.mistake();
        }
        if vector < self.vectors { vector } else { NO_VECTOR }
    }

    fn write_queue_vector(&mut self, vector: u16) -> Effect {
        let (index, vector) = (self.queue_select, self.vector(vector));
        let Some(queue) = self.queues.get_mut(usize::from(index)) else {
            self.mistake();
            return Effect::None;
        };
        queue.vector = vector;
        Effect::QueueVector(index, vector)
    }

    /// §4.1.4.3.2: a queue is set up before it is enabled, and enabled before DRIVER_OK.
    fn write_queue(&mut self, register: Common, value: u32) {
        let running = self.status & status::DRIVER_OK != 0;
        let queue = self.queues.get_mut(usize::from(self.queue_select));
        let Some(queue) = queue.filter(|queue| !running && !queue.enabled) else { return self.mistake() };
        match register {
            Common::QueueDescriptor(half) => set(&mut queue.descriptor, half, value),
            Common::QueueDriver(half) => set(&mut queue.driver, half, value),
            Common::QueueDevice(half) => set(&mut queue.device, half, value),
            Common::QueueEnable if value == 1 => queue.enabled = true,
            Common::QueueSize => match u16::try_from(value) {
                Ok(size) if size.is_power_of_two() && size <= queue.max_size => queue.size = size,
                _ => self.mistake(),
            },
            _ => self.mistake(),
        }
    }
}

fn half_of(bits: u64, select: u32) -> u32 {
    match select {
        0 => get(bits, Half::Low),
        1 => get(bits, Half::High),
        _ => 0,
    }
}

fn get(value: u64, half: Half) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    u32::from_le_bytes(match half {
        Half::Low => [a, b, c, d],
        Half::High => [e, f, g, h],
    })
}

fn set(to: &mut u64, half: Half, value: u32) {
    *to = match half {
        Half::Low => *to & !0xffff_ffff | u64::from(value),
        Half::High => *to & 0xffff_ffff | u64::from(value) << 32,
    };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EVENT_IDX: u64 = 1 << 29;

    fn core() -> Core {
        Core::new(EVENT_IDX, &[256, 64], 3)
    }

    fn accept(core: &mut Core, features: u64) {
        for (select, half) in [(0, Half::Low), (1, Half::High)] {
            assert_eq!(core.write(Common::DriverFeatureSelect, select), Effect::None);
            assert_eq!(core.write(Common::DriverFeature, get(features, half)), Effect::None);
        }
    }

    fn negotiated() -> Core {
        let mut core = core();
        assert_eq!(core.write(Common::Status, 1), Effect::None);
        assert_eq!(core.write(Common::Status, 3), Effect::None);
        accept(&mut core, VERSION_1 | EVENT_IDX);
        assert_eq!(core.write(Common::Status, 11), Effect::None);
        core
    }

    #[test]
    fn a_driver_that_follows_the_steps_of_3_1_1_activates_the_device() {
        let mut core = negotiated();
        assert_eq!(core.read(Common::Status), 11);
        assert_eq!(core.write(Common::QueueDescriptor(Half::Low), 0x1000), Effect::None);
        assert_eq!(core.write(Common::QueueDescriptor(Half::High), 1), Effect::None);
        assert_eq!(core.write(Common::QueueSize, 128), Effect::None);
        assert_eq!(core.write(Common::QueueEnable, 1), Effect::None);
        assert_eq!(core.write(Common::Status, 15), Effect::Activate);
        assert_eq!((core.features(), core.mistakes()), (VERSION_1 | EVENT_IDX, 0));
        let queue = core.queues()[0];
        assert_eq!((queue.descriptor, queue.size, queue.enabled), (0x1_0000_1000, 128, true));
        assert_eq!(core.write(Common::Status, 0), Effect::Reset);
        core.rested();
        assert_eq!((core.read(Common::Status), core.queues()[0]), (0, QueueState::new(256)));
    }

    /// The registers of a device that its driver has started.
    fn started() -> RegisterState {
        let mut core = negotiated();
        assert_eq!(core.write(Common::Status, 15), Effect::Activate);
        core.saved()
    }

    /// The error of restoring `saved` in a new device.
    fn restored(saved: &RegisterState) -> Result<Core, String> {
        let mut core = core();
        core.restore(saved).map_err(|mismatch| mismatch.to_string())?;
        Ok(core)
    }

    /// §2.1: FEATURES_OK comes after ACKNOWLEDGE and DRIVER, and DRIVER_OK after it; FAILED and NEEDS_RESET at any time.
    #[test]
    fn a_restored_status_is_one_that_a_driver_leads_to() {
        for status in 0..=u8::MAX {
            let is_reached = [0, 1, 2, 3, 11, 15].contains(&(status & 0x3f));
            let core = restored(&RegisterState { status, ..started() });
            assert_eq!(core.is_ok(), is_reached, "{status:#x}");
            let Ok(core) = core else { continue };
            let is_live = status & 4 != 0 && status & 0x40 == 0;
            assert_eq!((core.status, core.is_live()), (status, is_live), "{status:#x}");
        }
    }

    #[test]
    fn restored_features_are_the_device_s_once_they_are_agreed_on() {
        let restored =
            |status, driver_feature| restored(&RegisterState { status, driver_feature, ..started() }).is_ok();
        for status in [11, 15] {
            assert!(restored(status, VERSION_1 | EVENT_IDX) && restored(status, VERSION_1));
            assert!(!restored(status, EVENT_IDX) && !restored(status, VERSION_1 | 1) && !restored(status, 0));
        }
        assert!(restored(3, 1), "a driver that has not agreed may ask for anything");
    }

    #[test]
    fn restored_queues_and_vectors_are_those_of_the_device() {
        let with = |change: &dyn Fn(&mut RegisterState)| {
            let mut saved = started();
            change(&mut saved);
            restored(&saved).map(|core| (core.config_vector(), core.saved() == saved))
        };
        for vector in [0, 2, NO_VECTOR] {
            assert_eq!(with(&|saved| saved.config_vector = vector), Ok((vector, true)));
            assert!(with(&|saved| saved.queues[1].vector = vector).is_ok());
        }
        assert!(with(&|saved| saved.config_vector = 3).unwrap_err().contains("no vector 3"));
        assert!(with(&|saved| saved.queues[1].vector = 3).unwrap_err().contains("no vector 3"));
        for size in [1, 64, 128, 256] {
            assert!(with(&|saved| saved.queues[0].size = size).is_ok(), "{size}");
        }
        for size in [0, 3, 512] {
            assert!(with(&|saved| saved.queues[0].size = size).is_err(), "{size}");
        }
        assert!(with(&|saved| saved.queues.truncate(1)).unwrap_err().contains("1 queues in place of 2"));
    }

    #[test]
    fn a_device_that_failed_or_needs_a_reset_does_not_start() {
        let mut core = negotiated();
        assert_eq!(core.write(Common::Status, 11 | 0x80), Effect::None);
        assert_eq!((core.write(Common::Status, 15 | 0x80), core.mistakes()), (Effect::None, 1));
        let mut core = negotiated();
        core.needs_reset();
        assert_eq!((core.write(Common::Status, 15), core.mistakes()), (Effect::None, 1));
    }

    #[test]
    fn features_ok_needs_version_1_and_only_what_was_offered() {
        for features in [EVENT_IDX, VERSION_1 | 1, 0] {
            let mut core = core();
            assert_eq!(core.write(Common::Status, 3), Effect::None);
            accept(&mut core, features);
            assert_eq!(core.write(Common::Status, 11), Effect::None);
            assert_eq!((core.read(Common::Status), core.mistakes()), (3, 1), "features {features:#x}");
            assert_eq!(core.write(Common::Status, 15), Effect::None, "no DRIVER_OK without FEATURES_OK");
        }
    }

    /// §3.1.1: a driver sets ACKNOWLEDGE and DRIVER before FEATURES_OK.
    #[test]
    fn features_ok_needs_acknowledge_and_driver() {
        for status in [0, 1, 2] {
            let mut core = core();
            accept(&mut core, VERSION_1);
            assert_eq!(core.write(Common::Status, status | 8), Effect::None);
            assert_eq!((core.read(Common::Status), core.mistakes()), (status, 1), "status {status}");
        }
    }

    #[test]
    fn status_bits_are_only_added_and_needs_reset_survives() {
        let mut core = negotiated();
        assert_eq!(core.write(Common::Status, 3), Effect::None);
        assert_eq!((core.read(Common::Status), core.mistakes()), (11, 1));
        assert_eq!(core.write(Common::Status, 15), Effect::Activate);
        core.needs_reset();
        assert_eq!(core.write(Common::Status, 15 | 128), Effect::None);
        assert_eq!(core.read(Common::Status), 15 | 64 | 128);
        assert_eq!(core.write(Common::Status, 0), Effect::Reset);
        core.rested();
        assert_eq!(core.read(Common::Status), 0);
    }

    #[test]
    fn until_the_device_is_at_rest_the_status_does_not_read_0_and_nothing_is_written() {
        let mut core = negotiated();
        assert_eq!(core.write(Common::Status, 15), Effect::Activate);
        assert_eq!(core.write(Common::Status, 0), Effect::Reset);
        assert_eq!((core.read(Common::Status), core.is_resetting()), (15, true));
        for value in [0, 1, 15] {
            assert_eq!(core.write(Common::Status, value), Effect::None);
        }
        assert_eq!(core.write(Common::QueueEnable, 1), Effect::None);
        core.rested();
        assert_eq!((core.read(Common::Status), core.queues()[0].enabled, core.mistakes()), (0, false, 4));
    }

    /// §4.1.4.3: each select names 32 of the feature bits, and those of a select beyond the last are zero.
    #[test]
    fn features_are_read_and_written_in_halves_of_32_bits() {
        let mut core = core();
        for (select, bits) in [(0, 1 << 29), (1, 1), (2, 0), (u32::MAX, 0)] {
            assert_eq!(core.write(Common::DeviceFeatureSelect, select), Effect::None);
            assert_eq!(
                (core.read(Common::DeviceFeatureSelect), core.read(Common::DeviceFeature)),
                (select, bits)
            );
        }
        accept(&mut core, VERSION_1 | EVENT_IDX);
        for (select, bits) in [(0, 1 << 29), (1, 1), (2, 0)] {
            assert_eq!(core.write(Common::DriverFeatureSelect, select), Effect::None);
            assert_eq!(core.read(Common::DriverFeature), bits);
        }
        assert_eq!(core.write(Common::DriverFeature, 0), Effect::None);
        assert_eq!(core.mistakes(), 0, "zero accepts nothing");
        assert_eq!(core.write(Common::DriverFeature, 1), Effect::None);
        assert_eq!((core.mistakes(), core.features()), (1, VERSION_1 | EVENT_IDX));
    }

    #[test]
    fn no_vector_is_no_mistake_and_one_out_of_range_is() {
        let mut core = core();
        for (vector, mistakes) in [(NO_VECTOR, 0), (2, 0), (3, 1)] {
            let taken = if mistakes == 0 { vector } else { NO_VECTOR };
            assert_eq!(core.write(Common::ConfigVector, vector.into()), Effect::ConfigVector(taken));
            assert_eq!(core.mistakes(), mistakes, "{vector}");
        }
    }

    /// §4.1.4.3: the driver writes 1 to enable a queue.
    #[test]
    fn only_a_1_enables_a_queue() {
        let mut core = core();
        for (value, enabled, mistakes) in [(0, false, 1), (2, false, 2), (1, true, 2)] {
            assert_eq!(core.write(Common::QueueEnable, value), Effect::None);
            assert_eq!((core.queues()[0].enabled, core.mistakes()), (enabled, mistakes), "{value}");
        }
    }

    #[test]
    fn features_are_fixed_by_features_ok() {
        let mut core = negotiated();
        accept(&mut core, VERSION_1);
        assert_eq!((core.features(), core.mistakes()), (VERSION_1 | EVENT_IDX, 2));
    }

    #[test]
    fn a_vector_out_of_range_reads_back_as_none() {
        let mut core = core();
        assert_eq!(core.write(Common::ConfigVector, 2), Effect::ConfigVector(2));
        assert_eq!(core.write(Common::QueueVector, 3), Effect::QueueVector(0, NO_VECTOR));
        assert_eq!(core.read(Common::QueueVector), 0xffff);
        assert_eq!(core.write(Common::QueueVector, 1), Effect::QueueVector(0, 1));
        assert_eq!((core.read(Common::QueueVector), core.read(Common::ConfigVector)), (1, 2));
    }

    #[test]
    fn a_queue_that_is_not_there_has_size_zero_and_ignores_writes() {
        let mut core = core();
        assert_eq!(core.write(Common::QueueSelect, 2), Effect::None);
        assert_eq!((core.read(Common::QueueSize), core.read(Common::QueueVector)), (0, 0xffff));
        assert_eq!(core.write(Common::QueueVector, 1), Effect::None);
        assert_eq!(core.write(Common::QueueEnable, 1), Effect::None);
        assert_eq!(core.mistakes(), 2);
    }

    #[test]
    fn an_enabled_queue_cannot_be_moved_resized_or_disabled() {
        let mut core = core();
        assert_eq!(core.write(Common::QueueEnable, 1), Effect::None);
        let before = core.queues()[0];
        for register in [Common::QueueSize, Common::QueueEnable, Common::QueueDriver(Half::High)] {
            assert_eq!(core.write(register, 0), Effect::None);
        }
        assert_eq!((core.queues()[0], core.mistakes()), (before, 3));
    }

    #[test]
    fn a_queue_size_is_a_power_of_two_within_the_limit() {
        let mut core = core();
        for size in [0, 3, 512, 0xffff] {
            assert_eq!(core.write(Common::QueueSize, size), Effect::None);
            assert_eq!(core.read(Common::QueueSize), 256);
        }
        assert_eq!(core.mistakes(), 4);
    }

    proptest! {
        /// Every offset, width and value in any order: registers answer, sizes stay valid, activation needs all steps.
        #[test]
        fn no_sequence_of_writes_breaks_the_rules(
            writes in prop::collection::vec((0u32..0x44, 0usize..9, any::<u32>()), 0..200)
        ) {
            let mut core = core();
            for (offset, length, value) in writes {
                let Some(register) = Common::decode(offset, length) else { continue };
                let before = core.read(Common::Status);
                match core.write(register, value) {
                    Effect::Activate => {
                        prop_assert_eq!(before & 4, 0);
                        prop_assert_eq!(core.read(Common::Status) & 15, 15);
                        prop_assert_eq!(core.accepted & !core.offered, 0);
                    }
                    Effect::Reset => core.rested(),
                    _ => {}
                }
                let _ = core.read(register);
                for queue in core.queues() {
                    prop_assert!(queue.size.is_power_of_two() && queue.size <= queue.max_size);
                    prop_assert!(queue.vector < 3 || queue.vector == NO_VECTOR);
                }
            }
        }
    }
}
