//! `/proc/iomem`: the kernel's resources by host physical address.

use std::fmt;

use egm_address::{Host, Hpa, Span};
use serde::{Deserialize, Serialize};

/// A line: a range of addresses and its user. Lines below it, one level deeper, have parts of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resource {
    /// Host physical addresses of the line.
    pub span: Span<Host>,
    /// 0 for a line without indentation.
    pub depth: u8,
    /// `System RAM`, `Reserved`, `PCI Bus 0000:00`, a driver, …
    pub name: String,
}

impl Resource {
    /// Whether the kernel's allocator has it.
    #[must_use]
    pub(crate) fn is_system_ram(&self) -> bool {
        self.depth == 0 && self.name.starts_with("System RAM")
    }

    /// Whether it is unused: firmware or command line keep it aside. Lines below it may still be in use.
    fn is_set_aside(&self) -> bool {
        self.depth == 0
            && (self.name.eq_ignore_ascii_case("reserved") || self.name.starts_with("Persistent Memory"))
    }
}

/// The format of `/proc/iomem`.
impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}-{:08x} : {}", self.span.start(), self.span.last(), self.name)
    }
}

/// The lines of `/proc/iomem`. Without privilege the kernel shows every address as zero: the result is empty then. A
/// line of another format is left out.
#[must_use]
pub fn parse(text: &str) -> Vec<Resource> {
    let all: Vec<Resource> = text.lines().filter_map(line).collect();
    if all.iter().all(|resource| resource.span.last() == Hpa::new(0)) { Vec::new() } else { all }
}

fn line(line: &str) -> Option<Resource> {
    let (range, name) = line.split_once(" : ")?;
    let (first, last) = range.trim().split_once('-')?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    let end = number(last)?.checked_add(1)?;
    let span = Span::between(Hpa::new(number(first)?), Hpa::new(end))?;
    let indent = range.len().saturating_sub(range.trim_start().len());
    Some(Resource { span, depth: u8::try_from(indent / 2).unwrap_or(u8::MAX), name: name.trim().to_owned() })
}

/// The first line that keeps `span` from being used: System RAM, a device, or a driver in memory that was set aside.
#[must_use]
pub fn in_the_way(lines: &[Resource], span: Span<Host>) -> Option<&Resource> {
    lines.iter().find(|line| line.span.overlaps(span) && !line.is_set_aside())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "\
00001000-0009fbff : System RAM
00100000-bfffffff : System RAM
  01000000-022090c7 : Kernel code
100000000-13fffffff : System RAM
140000000-17fffffff : Reserved
  150000000-1500fffff : intel-spi
180000000-1bfffffff : Persistent Memory (legacy)
4000000000-7fffffffff : PCI Bus 0000:00
";

    fn span(start: u64, size: u64) -> Span<Host> {
        Span::new(Hpa::new(start), size).unwrap()
    }

    fn blocked(start: u64, size: u64) -> Option<String> {
        in_the_way(&parse(TEXT), span(start, size)).map(ToString::to_string)
    }

    #[test]
    fn absent_reserved_and_persistent_memory_may_be_used_and_nothing_else() {
        assert_eq!(blocked(0x1_4000_0000, 0x1000_0000), None);
        assert_eq!(blocked(0x1_8000_0000, 0x4000_0000), None);
        assert_eq!(blocked(0x2_0000_0000, 0x4000_0000), None);
        assert_eq!(blocked(0x1_3fff_f000, 0x2000).unwrap(), "100000000-13fffffff : System RAM");
        assert_eq!(blocked(0x40_0000_0000, 1).unwrap(), "4000000000-7fffffffff : PCI Bus 0000:00");
    }

    #[test]
    fn a_driver_inside_reserved_memory_keeps_it() {
        assert_eq!(blocked(0x1_4000_0000, 0x4000_0000).unwrap(), "150000000-1500fffff : intel-spi");
    }

    #[test]
    fn a_reader_without_privilege_sees_zeroes_and_so_nothing() {
        assert!(parse("00000000-00000000 : System RAM\n  00000000-00000000 : Kernel code\n").is_empty());
    }

    proptest! {
        #[test]
        fn any_text_is_lines_or_nothing(text in "[0-9a-f\\- :\nR]{0,200}") {
            for line in parse(&text) {
                prop_assert!(line.span.size() > 0);
            }
        }
    }
}
