//! Guest view of a function's configuration space.
//!
//! ```text
//!  device's bytes ──► lists of capabilities ─┐
//!  rules (tables) ───────────────────────────┼─► image: per bit ours or the device's, kept or forwarded
//!  options (BARs, pin, what is offered) ─────┘        │
//!                        read ◄── ours | live ◄───────┤
//!                        write ──► kept, forwarded, effects
//! ```
//! A [`Shadow`] holds no device: reads of live bits go through the caller, it returns writes for the device, and an
//! [`Effects`] describes what a write means for the machine. The guest may write anything anywhere.

mod build;
mod effects;
mod error;
mod image;
mod options;
mod rules;

use egm_address::{Gpa, Guest, Span};

pub use effects::{BarRange, Effects, Message, Msi, MsixControl, MsixLayout, PowerState, Written};
pub use error::ConfigError;
pub use image::Forward;
pub use options::{AddedCapability, Bar, BarKind, Options, Resizable};
pub use rules::{RuleRow, Treatment, rules};

use super::capability::Capability;
use super::registers::{BAR0, COMMAND, COMMAND_BUS_MASTER, COMMAND_INTX_DISABLE, COMMAND_MEMORY, ROM};
use image::Image;

/// Region number of the expansion ROM, as VFIO has it.
pub const ROM_REGION: u8 = 6;

/// A function's configuration space as its guest sees it: 4096 bytes.
#[derive(Debug, Clone)]
pub struct Shadow {
    image: Image,
    bars: Vec<Bar>,
    rom: Option<Span<Guest>>,
    registers: CapabilityRegisters,
    msix: Option<MsixLayout>,
    shown: Vec<Shown>,
    remarks: Vec<String>,
}

/// Offsets of the capabilities that affect the machine.
#[derive(Debug, Clone, Copy, Default)]
struct CapabilityRegisters {
    power: Option<u16>,
    msi: Option<MsiRegisters>,
    msix: Option<u16>,
    /// Device control, if it can start a function-level reset.
    express_reset: Option<u16>,
    /// Control of the advanced features, likewise.
    advanced_reset: Option<u16>,
    /// Device control, for the bits that are forwarded.
    device_control: Option<u16>,
}

/// Registers of an MSI capability; its control register determines which exist.
#[derive(Debug, Clone, Copy)]
struct MsiRegisters {
    control: u16,
    /// Two registers rather than one.
    is_64: bool,
    data: u16,
    /// Mask, followed by pending.
    mask: Option<u16>,
    /// Vectors that the function has.
    vectors: u8,
}

/// Treatment of one capability of this function.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Shown {
    /// The capability and its offset.
    pub capability: Capability,
    pub name: &'static str,
    pub treatment: Treatment,
    /// Reason for the treatment.
    pub reason: &'static str,
}

/// State that a guest's writes have set, as far as it affects the machine.
#[derive(PartialEq)]
struct GuestState {
    decoded: Vec<(u8, Span<Guest>)>,
    command: u16,
    msi: Option<Msi>,
    msix: Option<MsixControl>,
    power: PowerState,
}

impl Shadow {
    /// Builds the guest's view of a function from `space`, 256 or 4096 bytes of its configuration space.
    ///
    /// # Errors
    /// [`ConfigError`] when the bytes are no endpoint's, or the options do not fit them.
    pub fn new(space: &[u8], options: &Options) -> Result<Self, ConfigError> {
        build::shadow(space, options)
    }

    /// The guest reads `data.len()` bytes at `offset`. `device` is called at most once, for the same bytes, and only if
    /// some of them are the device's; it fills all of them.
    pub fn read(&self, offset: u16, data: &mut [u8], device: impl FnOnce(u16, &mut [u8])) {
        data.fill(0);
        if self.image.is_live(offset, data.len()) {
            device(offset, data);
        }
        self.image.read(offset, data);
    }

    /// The guest writes `data` at `offset`.
    pub fn write(&mut self, offset: u16, data: &[u8]) -> Written {
        let before = self.state();
        let forward = self.image.write(offset, data);
        self.refuse_power_state(before.power);
        let after = self.state();
        let bit = |of: &GuestState, bit: u16| of.command & bit != 0;
        let changed = |mask: u16| (bit(&before, mask) != bit(&after, mask)).then(|| bit(&after, mask));
        let effects = Effects {
            decoding: before.decoded != after.decoded,
            msi: after.msi.filter(|_| before.msi != after.msi),
            msix: after.msix.filter(|_| before.msix != after.msix),
            intx_disabled: changed(COMMAND_INTX_DISABLE),
            bus_master: changed(COMMAND_BUS_MASTER),
            power: (before.power != after.power).then_some(after.power),
            reset: self.asks_for_reset(offset, data),
        };
        Written { forward, effects }
    }

    /// Back to the state of [`Shadow::new`], as after a reset of the function.
    pub fn reset(&mut self) {
        self.image.reset();
    }

    /// Writes for the device when it is opened, and again after each of its resets: decode memory, no bus mastering, no
    /// requests past the caches.
    pub fn start(&self) -> Vec<Forward> {
        let registers = [Some(COMMAND), self.registers.device_control];
        registers.into_iter().flatten().map(|offset| self.image.hardware(offset, 2)).collect()
    }

    /// Base address registers that the guest has.
    pub fn bars(&self) -> &[Bar] {
        &self.bars
    }

    /// Range that each BAR decodes now, and the ROM as [`ROM_REGION`]: none while memory decoding is off or the
    /// function sleeps. A guest may set two of them to one address, or to its memory: the caller decides which wins.
    pub fn decoded(&self) -> Vec<(u8, Span<Guest>)> {
        if self.command() & COMMAND_MEMORY == 0 || self.power() != PowerState::D0 {
            return Vec::new();
        }
        let bars = self.bars.iter().filter_map(|bar| {
            let width = if bar.kind.is_64() { 8 } else { 4 };
            let start = self.image.get(bar_register(bar.index), width) & !0xf;
            Some((bar.index, Span::new(Gpa::new(start), bar.span.size()).ok()?))
        });
        bars.chain(self.decoded_rom().map(|span| (ROM_REGION, span))).collect()
    }

    fn decoded_rom(&self) -> Option<Span<Guest>> {
        const ENABLED: u64 = 1;
        let register = self.image.get(ROM, 4);
        let start = Gpa::new(register & !0x7ff);
        (register & ENABLED != 0).then(|| Span::new(start, self.rom?.size()).ok())?
    }

    /// Location of the MSI-X structures, if the guest has MSI-X.
    pub fn msix(&self) -> Option<MsixLayout> {
        self.msix
    }

    /// State of MSI-X, if the guest has it.
    pub fn msix_control(&self) -> Option<MsixControl> {
        let control = self.image.get(self.registers.msix?.saturating_add(2), 2);
        Some(MsixControl { enabled: control & 1 << 15 != 0, masked: control & 1 << 14 != 0 })
    }

    /// State of MSI, if the guest has it.
    pub fn msi(&self) -> Option<Msi> {
        let place = self.registers.msi?;
        let control = self.image.get(place.control, 2);
        let wanted = 1u8.checked_shl(u32::try_from(control >> 4 & 7).ok()?).unwrap_or(u8::MAX);
        let address = self.image.get(place.control.saturating_add(2), if place.is_64 { 8 } else { 4 });
        let low = |offset, width| u32::try_from(self.image.get(offset, width)).unwrap_or_default();
        Some(Msi {
            enabled: control & 1 != 0,
            vectors: wanted.min(place.vectors),
            message: Message { address, data: low(place.data, 2) },
            mask: place.mask.map_or(0, |mask| low(mask, 4)),
        })
    }

    /// Vectors that the function's MSI has, 1 to 32; `None` where the guest has no MSI.
    pub fn msi_vectors(&self) -> Option<u8> {
        Some(self.registers.msi?.vectors)
    }

    /// Sets which MSI vectors are pending, for a function with masks; without masks there is nothing to see it in.
    pub fn set_msi_pending(&mut self, pending: u32) {
        if let Some(mask) = self.registers.msi.and_then(|place| place.mask) {
            self.image.set(mask.saturating_add(4), &pending.to_le_bytes());
        }
    }

    /// Whether the function may write memory.
    pub fn bus_master(&self) -> bool {
        self.command() & COMMAND_BUS_MASTER != 0
    }

    /// Whether INTx is disabled.
    pub fn intx_disabled(&self) -> bool {
        self.command() & COMMAND_INTX_DISABLE != 0
    }

    /// Power state in the guest's view.
    pub fn power(&self) -> PowerState {
        let state = self.registers.power.map_or(0, |at| self.image.get(at.saturating_add(4), 1) & 3);
        if state == 3 { PowerState::D3Hot } else { PowerState::D0 }
    }

    /// Treatment of each capability, the standard list first, in the order of the links.
    pub fn capabilities(&self) -> &[Shown] {
        &self.shown
    }

    /// Remarks for the operator on this function's bytes: a list of capabilities that ends as it must not.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    fn command(&self) -> u16 {
        u16::try_from(self.image.get(COMMAND, 2)).unwrap_or_default()
    }

    fn state(&self) -> GuestState {
        GuestState {
            decoded: self.decoded(),
            command: self.command(),
            msi: self.msi(),
            msix: self.msix_control(),
            power: self.power(),
        }
    }

    /// A state that the function does not have is not entered (PCI Express Base 6.0 §7.5.2.2).
    fn refuse_power_state(&mut self, before: PowerState) {
        let Some(at) = self.registers.power.map(|at| at.saturating_add(4)) else { return };
        let register = self.image.get(at, 1);
        if matches!(register & 3, 1 | 2) {
            let state = if before == PowerState::D3Hot { 3 } else { 0 };
            let [low, ..] = (register & !3 | state).to_le_bytes();
            self.image.set(at, &[low]);
        }
    }

    fn asks_for_reset(&self, offset: u16, data: &[u8]) -> bool {
        let written = |at: u16| at.checked_sub(offset).and_then(|index| data.get(usize::from(index)));
        let has = |at: Option<u16>, bit: u8| at.and_then(written).is_some_and(|byte| byte & bit != 0);
        has(self.registers.express_reset.map(|at| at.saturating_add(1)), 1 << 7)
            || has(self.registers.advanced_reset, 1)
    }
}

fn bar_register(index: u8) -> u16 {
    u16::from(index).saturating_mul(4).saturating_add(BAR0)
}
