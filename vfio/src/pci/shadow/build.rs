//! Builds a [`Shadow`] from a function's bytes, the rules and the options.

use egm_address::{BarOffset, Guest, Span};

use super::image::{Image, Masks};
use super::options::{AddedCapability, Bar, Options, Resizable};
use super::rules::{self, HEADER, Register, Registers, Rule};
use super::{
    BarRange, CapabilityRegisters, ConfigError, MsiRegisters, MsixLayout, ROM_REGION, Shadow, Shown,
    Treatment, bar_register,
};
use crate::pci::capability::{self, Capability, CapabilityId, List, ListEnd};
use crate::pci::registers::{
    CAPABILITIES, CONVENTIONAL, EXPRESS, FIRST_CAPABILITY, HEADER_TYPE, INTERRUPT_PIN, ROM, STATUS,
    STATUS_CAPABILITIES, byte, dword, extended, id, word,
};

pub(super) fn shadow(space: &[u8], options: &Options) -> Result<Shadow, ConfigError> {
    judge(space)?;
    let (standard, extended) = (capability::standard(space), capability::extended(space));
    let mut builder = Builder {
        space,
        options,
        image: Image::new(),
        registers: CapabilityRegisters::default(),
        shown: Vec::new(),
    };
    builder.registers_of_its_own(&standard, &extended);
    for register in HEADER {
        builder.register(0, register);
    }
    builder.bars()?;
    builder.rom_and_pin()?;
    let msix = if options.msix { msix_layout(space, &standard, &options.bars)? } else { None };
    builder.standard(&standard)?;
    builder.extended(&extended);
    Ok(Shadow {
        image: builder.image,
        bars: options.bars.clone(),
        rom: options.rom,
        registers: builder.registers,
        msix,
        shown: builder.shown,
        remarks: remarks(&standard, &extended),
    })
}

/// Whether these are an endpoint's bytes at all.
fn judge(space: &[u8]) -> Result<(), ConfigError> {
    if ![CONVENTIONAL, EXPRESS].map(usize::from).contains(&space.len()) {
        return Err(ConfigError::Length { length: space.len() });
    }
    if dword(space, 0) == Some(u32::MAX) {
        return Err(ConfigError::Dead);
    }
    match byte(space, HEADER_TYPE).unwrap_or(0) & 0x7f {
        0 => Ok(()),
        header_type => Err(ConfigError::Bridge { header_type }),
    }
}

fn remarks(standard: &List, extended: &List) -> Vec<String> {
    let remark = |name: &str, list: &List| {
        let left = "what comes after is not the guest's";
        (list.end != ListEnd::Null).then(|| format!("its {name} capabilities end {}: {left}", list.end))
    };
    [remark("standard", standard), remark("extended", extended)].into_iter().flatten().collect()
}

struct Builder<'a> {
    space: &'a [u8],
    options: &'a Options,
    image: Image,
    registers: CapabilityRegisters,
    shown: Vec<Shown>,
}

impl Builder<'_> {
    /// Bytes outside of header and capabilities are the device's. Below 0x100 some drivers write theirs (tg3), and
    /// reach the same through the BARs. Above, no driver does, and the host's unlinked capabilities lie there. If the
    /// standard list ends wrong, writes below 0x100 are off too: an unchecked capability could follow.
    fn registers_of_its_own(&mut self, standard: &List, extended: &List) {
        let length = CONVENTIONAL.saturating_sub(FIRST_CAPABILITY);
        self.image.expose(FIRST_CAPABILITY, length, standard.end == ListEnd::Null);
        if !extended.capabilities.is_empty() {
            self.image.expose(CONVENTIONAL, EXPRESS.saturating_sub(CONVENTIONAL), false);
        }
    }

    fn recorded(&self, offset: u16, width: u8) -> u32 {
        let bytes = self.space.iter().skip(usize::from(offset)).take(usize::from(width.min(4)));
        bytes.rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
    }

    fn register(&mut self, base: u16, register: &Register) {
        let offset = base.saturating_add(register.offset);
        let device = self.recorded(offset, register.width);
        let (value, fill) = ((register.value)(device), (register.fill)(device));
        self.image.register(offset, register.width, register.masks, value, fill);
    }

    fn bars(&mut self) -> Result<(), ConfigError> {
        let mut used = 0u8;
        for bar in &self.options.bars {
            used = judge_bar(bar, used).map_err(|rule| ConfigError::Bar {
                index: bar.index,
                span: bar.span,
                rule,
            })?;
            let store = !bar.span.size().saturating_sub(1) & !0xf;
            let value = bar.span.start().get() & store | u64::from(bar.kind.flags());
            let offset = bar_register(bar.index);
            self.half(offset, store, value);
            if bar.kind.is_64() {
                self.half(offset.saturating_add(4), store >> 32, value >> 32);
            }
        }
        Ok(())
    }

    /// Four bytes of ours, of which the guest changes the bits in `store`.
    fn half(&mut self, offset: u16, store: u64, value: u64) {
        let low = |value: u64| u32::try_from(value & 0xffff_ffff).unwrap_or_default();
        let masks = Masks { live: 0, store: low(store), forward: 0 };
        self.image.register(offset, 4, masks, low(value), 0);
    }

    fn rom_and_pin(&mut self) -> Result<(), ConfigError> {
        if let Some(span) = self.options.rom {
            let wrong = |rule| ConfigError::Bar { index: ROM_REGION, span, rule };
            judge_span(span, 2048, true).map_err(wrong)?;
            let mask = !span.size().saturating_sub(1) & 0xffff_f800;
            self.half(ROM, mask | 1, span.start().get() & mask);
        }
        let pin = self.options.pin.unwrap_or(0);
        if self.options.pin.is_some_and(|pin| !(1..=4).contains(&pin)) {
            return Err(ConfigError::Pin { pin });
        }
        self.image.fix(INTERRUPT_PIN, &[pin]);
        Ok(())
    }

    fn standard(&mut self, list: &List) -> Result<(), ConfigError> {
        let mut link = CAPABILITIES;
        for capability in &list.capabilities {
            let rule = rules::rule(capability.id);
            let (treatment, reason) = self.decide(rule);
            if treatment != Treatment::Hidden {
                link = self.link(link, capability);
            }
            self.capability(capability, rule, treatment, 2);
            self.show(*capability, rule.name, treatment, reason);
        }
        for added in &self.options.added {
            let capability = self.place(added, list)?;
            link = self.link(link, &capability);
            self.image.fix(capability.offset.saturating_add(2), &added.body);
            self.show(capability, added.name, Treatment::Added, added.reason);
        }
        if link != CAPABILITIES {
            let masks = Masks { live: !u32::from(STATUS_CAPABILITIES), store: 0, forward: 0 };
            self.image.register(STATUS, 2, masks, u32::from(STATUS_CAPABILITIES), 0);
        }
        Ok(())
    }

    /// Writes a capability's offset at `link`, and its id with an end of the list. Returns the offset of its own link.
    fn link(&mut self, link: u16, capability: &Capability) -> u16 {
        let [offset, _] = capability.offset.to_le_bytes();
        let id = if let CapabilityId::Standard(id) = capability.id { id } else { 0 };
        self.image.fix(link, &[offset]);
        self.image.fix(capability.offset, &[id, 0]);
        capability.offset.saturating_add(1)
    }

    fn show(
        &mut self,
        capability: Capability,
        name: &'static str,
        treatment: Treatment,
        reason: &'static str,
    ) {
        self.shown.push(Shown { capability, name, treatment, reason });
    }

    /// Treatment of a rule under the options.
    fn decide(&self, rule: &Rule) -> (Treatment, &'static str) {
        let undelivered = "its messages are not delivered here";
        let same = |shown: &Shown| shown.capability.id == rule.id && shown.treatment == Treatment::Emulated;
        match rule.id {
            _ if self.shown.iter().any(same) => {
                (Treatment::Hidden, "the second of a kind, which no driver finds")
            }
            CapabilityId::Standard(id::MSI) if !self.options.msi => (Treatment::Hidden, undelivered),
            CapabilityId::Standard(id::MSIX) if !self.options.msix => (Treatment::Hidden, undelivered),
            CapabilityId::Extended(extended::REBAR) if self.options.resizable == Resizable::Hidden => {
                (Treatment::Hidden, "the machine offers none")
            }
            _ => (rule.treatment, rule.reason),
        }
    }

    /// Sets all bytes of a capability after its `header` bytes.
    fn capability(&mut self, capability: &Capability, rule: &Rule, treatment: Treatment, header: u16) {
        let body = capability.offset.saturating_add(header);
        let length = capability.length.saturating_sub(header);
        match treatment {
            Treatment::Hidden => {
                return self.image.fix(capability.offset, &vec![0; usize::from(capability.length)]);
            }
            Treatment::PassThrough => self.image.expose(body, length, true),
            Treatment::ReadOnly => self.image.expose(body, length, false),
            Treatment::Emulated | Treatment::Added => self.image.fix(body, &vec![0; usize::from(length)]),
        }
        self.rows(capability, &rule.registers);
        self.note(capability);
    }

    fn rows(&mut self, capability: &Capability, registers: &Registers) {
        let at = capability.offset;
        match registers {
            Registers::Msi => self.msi(at),
            Registers::Resizable => self.resizable(capability),
            Registers::At(rows) => {
                let fits =
                    |row: &&Register| row.offset.saturating_add(u16::from(row.width)) <= capability.length;
                for row in rows.iter().filter(fits) {
                    self.register(at, row);
                }
            }
        }
    }

    /// Records its offset if it affects the machine.
    fn note(&mut self, capability: &Capability) {
        let at = |offset: u16| capability.offset.saturating_add(offset);
        let says = |offset: u16, bit: u32| self.recorded(at(offset), 4) & bit != 0;
        let (express_reset, advanced_reset) = (says(4, 1 << 28), says(0, 1 << 25));
        let registers = &mut self.registers;
        match capability.id {
            CapabilityId::Standard(id::POWER) => registers.power = Some(at(0)),
            CapabilityId::Standard(id::MSIX) => registers.msix = Some(at(0)),
            CapabilityId::Standard(id::EXPRESS) => {
                registers.device_control = Some(at(8));
                registers.express_reset = express_reset.then(|| at(8));
            }
            CapabilityId::Standard(id::ADVANCED) if advanced_reset => {
                registers.advanced_reset = Some(at(4));
            }
            _ => {}
        }
    }

    /// §7.7.1. No extended message data: no machine that we make needs it.
    fn msi(&mut self, at: u16) {
        let control = at.saturating_add(2);
        let device = self.recorded(control, 2);
        let (is_64, has_mask) = (device & 1 << 7 != 0, device & 1 << 8 != 0);
        let vectors = 1u8.checked_shl((device >> 1 & 7).min(5)).unwrap_or(1);
        let kept = |store| Masks { live: 0, store, forward: 0 };
        self.image.register(control, 2, kept(0x71), device & 0x018e, 0);
        self.image.register(at.saturating_add(4), 4, kept(!3), 0, 0);
        if is_64 {
            self.image.register(at.saturating_add(8), 4, kept(u32::MAX), 0, 0);
        }
        let data = at.saturating_add(if is_64 { 12 } else { 8 });
        self.image.register(data, 2, kept(0xffff), 0, 0);
        let mask = has_mask.then(|| data.saturating_add(4));
        if let Some(mask) = mask {
            let all = u32::MAX.checked_shr(32u32.saturating_sub(u32::from(vectors))).unwrap_or(0);
            self.image.register(mask, 4, kept(all), 0, 0);
        }
        self.registers.msi = Some(MsiRegisters { control, is_64, data, mask, vectors });
    }

    /// §7.8.6: for each register the present size as the only one supported, and nothing to write.
    fn resizable(&mut self, capability: &Capability) {
        for entry in (4..capability.length.saturating_sub(7)).step_by(8) {
            let at = capability.offset.saturating_add(entry);
            let control = self.recorded(at.saturating_add(4), 4) & 0x3fe7;
            // Bit 4 stands for 1 MiB, which is size 0; from 2^28 MiB on the bits are in the control register.
            let size = control >> 8 & 0x3f;
            let low = 1u32.checked_shl(size.saturating_add(4)).unwrap_or(0);
            let high = if low == 0 { 1u32.checked_shl(size.saturating_sub(12)).unwrap_or(0) } else { 0 };
            self.image.fix(at, &low.to_le_bytes());
            self.image.fix(at.saturating_add(4), &(control | high).to_le_bytes());
        }
    }

    /// A hidden capability keeps its link, so that the list continues.
    fn extended(&mut self, list: &List) {
        for (index, capability) in list.capabilities.iter().enumerate() {
            let rule = rules::rule(capability.id);
            let (treatment, reason) = self.decide(rule);
            let next = list.capabilities.get(index.saturating_add(1)).map_or(0, |next| next.offset);
            let kept = if treatment == Treatment::Hidden {
                0
            } else {
                self.recorded(capability.offset, 4) & 0xf_ffff
            };
            self.capability(capability, rule, treatment, 4);
            self.image.fix(capability.offset, &(kept | u32::from(next) << 20).to_le_bytes());
            self.show(*capability, rule.name, treatment, reason);
        }
    }

    /// Finds free space for a capability: no known or unknown part of the function may lie there.
    fn place(&self, added: &AddedCapability, list: &List) -> Result<Capability, ConfigError> {
        let size = added.body.len().saturating_add(2);
        let length = u16::try_from(size).unwrap_or(u16::MAX);
        let taken =
            || self.shown.iter().map(|shown| shown.capability).chain(list.capabilities.iter().copied());
        let is_free = |offset: &u16| {
            let end = offset.saturating_add(length);
            let zero = (*offset..end).all(|at| byte(self.space, at) == Some(0));
            let apart = |c: Capability| {
                matches!(c.id, CapabilityId::Extended(_)) || c.end() <= *offset || end <= c.offset
            };
            *offset >= FIRST_CAPABILITY && end <= CONVENTIONAL && zero && taken().all(apart)
        };
        let last =
            taken().map(|c| c.end()).filter(|end| *end <= CONVENTIONAL).max().unwrap_or(FIRST_CAPABILITY);
        let behind = (last.next_multiple_of(4)..CONVENTIONAL).step_by(4);
        let offset = added.preferred.iter().copied().chain(behind).find(is_free);
        let offset =
            offset.ok_or_else(|| ConfigError::NoRoom { name: added.name, size, taken: self.occupied() })?;
        Ok(Capability { id: CapabilityId::Standard(added.id), offset, length, exact: true })
    }

    /// The standard list in words.
    fn occupied(&self) -> String {
        let place =
            |s: &Shown| format!("{} at {:#x}..{:#x}", s.name, s.capability.offset, s.capability.end());
        let places: Vec<String> = self.shown.iter().map(place).collect();
        if places.is_empty() { "registers without a capability".to_owned() } else { places.join(", ") }
    }
}

/// Checks a BAR's address; `used` are registers of the BARs before it. Returns `used` with the registers of this BAR.
fn judge_bar(bar: &Bar, used: u8) -> Result<u8, &'static str> {
    let registers = if bar.kind.is_64() { 0b11u8 } else { 1 };
    let mine = registers.checked_shl(u32::from(bar.index)).unwrap_or(0);
    if bar.index > 5 || mine & 0x3f != mine {
        return Err("there are six registers, and a 64-bit BAR takes two");
    }
    if used & mine != 0 {
        return Err("another BAR takes that register");
    }
    judge_span(bar.span, 16, !bar.kind.is_64())?;
    Ok(used | mine)
}

fn judge_span(span: Span<Guest>, least: u64, below_4g: bool) -> Result<(), &'static str> {
    if !span.size().is_power_of_two() || span.size() < least {
        return Err("its size must be a power of two, 16 bytes at least, a ROM's 2 KiB");
    }
    if !span.start().is_aligned(span.size()) {
        return Err("its start must be a multiple of its size");
    }
    if below_4g && span.last().get() > u64::from(u32::MAX) {
        return Err("a 32-bit register cannot hold it: it must end below 4 GiB");
    }
    Ok(())
}

/// Location of a function's MSI-X structures (§7.7.2), which must be in BARs that the guest has.
fn msix_layout(space: &[u8], list: &List, bars: &[Bar]) -> Result<Option<MsixLayout>, ConfigError> {
    let Some(capability) = list.find(CapabilityId::Standard(id::MSIX)) else { return Ok(None) };
    let control = word(space, capability.offset.saturating_add(2)).unwrap_or(0);
    let vectors = (control & 0x7ff).saturating_add(1);
    let place = |structure, at: u16, size: u32| {
        let register = dword(space, capability.offset.saturating_add(at)).unwrap_or(0);
        let [low, ..] = register.to_le_bytes();
        let (bar, offset) = (low & 7, register & !7);
        let has = bars.iter().find(|have| have.index == bar);
        let span = Span::new(BarOffset::new(u64::from(offset)), u64::from(size)).ok();
        let span = span.filter(|span| has.is_some_and(|bar| span.end().get() <= bar.span.size()));
        span.map(|span| BarRange { bar, span }).ok_or(ConfigError::Msix { structure, bar, offset, size })
    };
    let vectors_32 = u32::from(vectors);
    let table = place("table", 4, vectors_32.saturating_mul(16))?;
    let pending = place("pending bit array", 8, vectors_32.div_ceil(64).saturating_mul(8))?;
    if table.bar == pending.bar && table.span.overlaps(pending.span) {
        return Err(ConfigError::MsixOverlap { table: table.span, pending: pending.span });
    }
    Ok(Some(MsixLayout { vectors, table, pending }))
}
