//! Reserved spans: hidden memory that an operator declares, checked against the kernel's view.

use egm_address::{ByteSize, Host, Span, SpanSet};

use crate::region::facts::HostFacts;
use crate::region::host_file::ReservedSpan;
use crate::region::refused::RegionRefusal;
use crate::region::{Region, RegionKind, check_pages, iomem, is_name, largest_page, words};
use crate::retired::Retired;

/// The region that `wanted` describes.
///
/// # Errors
/// The first violated rule: memory that the kernel, a driver or the firmware uses is never handed out.
pub(super) fn region(wanted: &ReservedSpan, facts: &HostFacts) -> Result<Region, RegionRefusal> {
    if !is_name(&wanted.name) {
        return Err(RegionRefusal::Name);
    }
    let (base, size) = (wanted.base.get(), wanted.size.get());
    let span = Span::new(wanted.base, size).map_err(|_| RegionRefusal::NoSpan { base, size })?;
    let page_size = match wanted.page_size {
        Some(page) if (12..=30).any(|shift| page.get() == 1 << shift) => page,
        Some(page) => return Err(RegionRefusal::PageSize(page)),
        None => largest_page(base, size).unwrap_or(ByteSize::new(4096)),
    };
    check_pages(base, size, page_size)?;
    check(span, wanted.trusted, facts)?;
    Ok(Region {
        name: wanted.name.clone(),
        kind: RegionKind::Reserved { device: wanted.device.clone() },
        node: wanted.node.or_else(|| facts.node_of(span)),
        size: wanted.size,
        page_size,
        base: Some(wanted.base),
        functions: Vec::new(),
        retired: Retired::default(),
    })
}

/// Checks that `span` is unused, that the command line keeps the kernel from it, and that it is RAM: by the firmware's
/// map or, where that is empty, by the operator's `trusted`. A scrub writes to all of it.
fn check(span: Span<Host>, trusted: bool, facts: &HostFacts) -> Result<(), RegionRefusal> {
    if facts.iomem.is_empty() {
        return Err(RegionRefusal::IomemHidden(span));
    }
    if let Some(line) = iomem::in_the_way(&facts.iomem, span) {
        return Err(RegionRefusal::InUse { span, line: line.clone() });
    }
    let ram = facts.system_ram();
    let below = ram.iter().filter(|ram| ram.start() < span.start()).map(Span::size).sum();
    if !words::explain(&facts.command_line, span, below) {
        return Err(RegionRefusal::Unexplained(span));
    }
    let firmware: SpanSet<Host> = facts.firmware.iter().copied().collect();
    let missing = std::iter::once(span).collect::<SpanSet<Host>>().minus(&firmware);
    match (firmware.is_empty(), missing.is_empty()) {
        (true, _) if !trusted => Err(RegionRefusal::Unconfirmed(span)),
        (false, false) => Err(RegionRefusal::NotRam(span)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use egm_address::Hpa;

    use super::*;

    /// The refusal of 1 GiB at 4 GiB, kept from the kernel by `memmap=`, where the firmware calls `ram` RAM.
    fn refusal(ram: &[(u64, u64)], trusted: bool) -> Option<String> {
        let span = |(base, size)| Span::new(Hpa::new(base), size).unwrap();
        let facts = HostFacts {
            command_line: "memmap=1G$4G".to_owned(),
            iomem: iomem::parse("00000000-bfffffff : System RAM\n"),
            firmware: ram.iter().copied().map(span).collect(),
            ..HostFacts::default()
        };
        let wanted =
            format!(r#"{{"name": "r", "base": "0x100000000", "size": "1GiB", "trusted": {trusted}}}"#);
        region(&serde_json::from_str(&wanted).unwrap(), &facts).err().map(|reason| reason.to_string())
    }

    #[test]
    fn memory_is_what_the_firmware_calls_ram_whatever_the_operator_writes() {
        let (all, half) = ([(0, 6 << 30)], [(0, 9 << 29)]);
        for trusted in [false, true] {
            assert_eq!(refusal(&all, trusted), None);
            let why = refusal(&half, trusted).unwrap();
            assert_eq!(why, "not all of 0x100000000..0x140000000 is RAM in the firmware's memory map");
        }
    }

    #[test]
    fn where_the_firmware_reports_nothing_the_operator_answers_for_it() {
        let why = refusal(&[], false).unwrap();
        assert!(why.ends_with(r#"write "trusted": true beside it in the host file"#), "{why}");
        assert_eq!(refusal(&[], true), None);
    }
}
