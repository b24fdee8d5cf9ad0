//! Guest physical addresses that may be used at all.

use egm_address::{Gpa, Guest, Placer, Request, Span, SpanSet};
use egm_vfio::host::ReservedKind;

use crate::arch::Layout;
use crate::plan::demand::Demand;
use crate::plan::demand::pages::huge_page;
use crate::plan::{AddressBits, PlanError, WindowKind, WindowPlan};

/// AMD's HyperTransport range just below 1 TiB: the processor routes it elsewhere, and its IOMMU does not translate it
/// (AMD IOMMU specification, 2.1.2).
const AMD_HYPERTRANSPORT: (u64, u64) = (0xfd_0000_0000, 0x100_0000_0000);
/// Processors with fewer address bits end below that range.
const AMD_HYPERTRANSPORT_BITS: u8 = 40;

/// Where PCI memory and configuration space are.
pub(super) struct Windows {
    pub(super) memory32: Span<Guest>,
    pub(super) memory64: Option<Span<Guest>>,
    pub(super) ecam: Span<Guest>,
}

/// The guest physical address space and what is still free in it above RAM.
pub(super) struct Space {
    pub(super) layout: &'static Layout,
    pub(super) bits: AddressBits,
    /// One past the last usable address.
    pub(super) limit: u64,
    /// Bytes of a transparent huge page of the host.
    pub(super) huge_page: u64,
    /// Ranges that nothing may use, with what a person should read.
    reserved: Vec<(String, Span<Guest>)>,
    /// Everything from here to `limit` is free but for `reserved`.
    pub(super) top: Gpa,
}

impl Space {
    pub(super) fn new(demand: &Demand<'_>) -> Result<Self, PlanError> {
        let (facts, layout) = (demand.facts, demand.layout);
        let bits = facts.address_bits;
        if !(32..=52).contains(&bits) && !egm_address::fault!("address-bits-unchecked") {
            return Err(PlanError::AddressBits { bits });
        }
        let translated = demand.hosts().filter_map(|host| host.iova_bits).min();
        let bits = match translated.filter(|translated| (32..bits).contains(translated)) {
            Some(translated) => AddressBits::Translated(translated),
            None => AddressBits::Guest(bits),
        };
        let (limit, top) = (1 << bits.number(), Gpa::new(0));
        let huge_page = huge_page(facts);
        let mut space = Self { layout, bits, limit, huge_page, reserved: Vec::new(), top };
        if facts.cpu_vendor == "AuthenticAMD" && bits.number() >= AMD_HYPERTRANSPORT_BITS {
            let (start, end) = AMD_HYPERTRANSPORT;
            let span = Span::between(Gpa::new(start), Gpa::new(end));
            space.reserved.extend(span.map(|span| ("AMD HyperTransport".to_owned(), span)));
        }
        space.reserve_for_devices(demand)?;
        Ok(space)
    }

    /// Keeps free what the IOMMU groups of the machine's own host functions cannot map: guest physical addresses are
    /// the I/O virtual addresses of its devices.
    fn reserve_for_devices(&mut self, demand: &Demand<'_>) -> Result<(), PlanError> {
        let first_ram = self.layout.ram.first().map_or(0, |ram| ram.start().get());
        let tables = Span::new(Gpa::new(first_ram), self.layout.min_memory)
            .map_err(|_| PlanError::Internal("the layout has no least memory"))?;
        for host in demand.hosts() {
            let function = host.address;
            for region in host.reserved.iter().filter(|r| r.kind != ReservedKind::DirectRelaxable) {
                let end = Gpa::new(region.span.end().get().min(self.limit));
                let Some(span) = Span::between(Gpa::new(region.span.start().get()), end) else { continue };
                if span.overlaps(tables) {
                    let what = "its first memory";
                    return Err(PlanError::Reserved { function, reserved: span, what, span: tables });
                }
                let label = match region.kind {
                    ReservedKind::Msi => "host IOMMU: interrupts",
                    _ => "host IOMMU: not mappable",
                };
                self.reserved.push((label.to_owned(), span));
            }
        }
        Ok(())
    }

    /// Everything that must stay free.
    pub(super) fn blocked(&self) -> SpanSet<Guest> {
        self.reserved.iter().map(|(_, span)| *span).collect()
    }

    /// Addresses from `top` to the limit that are free.
    pub(super) fn placer_at_top(&self) -> Placer<Guest> {
        Placer::new(&Span::between(self.top, Gpa::new(self.limit)).into_iter().collect(), &self.blocked())
    }

    /// Places `size` bytes at the lowest aligned free address above everything placed before.
    pub(super) fn place_at_top(&mut self, size: u64, align: u64) -> Option<Span<Guest>> {
        let span = self.placer_at_top().place(Request { tag: (), size, align }).ok()?.span;
        self.top = span.end();
        Some(span)
    }

    /// Every window of the plan, ascending.
    pub(super) fn windows(&self, pci: &Windows) -> Vec<WindowPlan> {
        let named = |kind, label: &str, span| WindowPlan { kind, label: label.to_owned(), span };
        let mut all: Vec<WindowPlan> =
            self.layout.fixed.iter().map(|w| named(w.kind, w.label, w.span)).collect();
        all.push(named(WindowKind::Firmware, "firmware tables", self.layout.firmware));
        all.push(named(WindowKind::PciMemory32, "32-bit PCI window", pci.memory32));
        all.push(named(WindowKind::Ecam, "PCI configuration", pci.ecam));
        all.extend(pci.memory64.map(|span| named(WindowKind::PciMemory64, "64-bit PCI window", span)));
        for (label, span) in &self.reserved {
            let taken: SpanSet<Guest> = all.iter().map(|w| w.span).collect();
            let left = SpanSet::from_iter([*span]).minus(&taken);
            all.extend(left.iter().map(|span| named(WindowKind::Reserved, label, span)));
        }
        all.sort_by_key(|window| window.span);
        all
    }
}
