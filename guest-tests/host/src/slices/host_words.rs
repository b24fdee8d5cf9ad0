//! Memory of a slice as it lies in the host: its addresses, its words, and the kernel's account of it.

use std::fs::{self, File};
use std::path::Path;
use std::time::Instant;

use crate::engine::error::LabError;
use crate::engine::step::{Fault, Step, TIMEOUT};
use crate::hosts::extent::Extent;
use crate::hosts::kcore::Ram;
use crate::hosts::pagemap;
use crate::hosts::physical::Physical;
use crate::runner::machine::Machine;

/// Value that the agent's check `egm_beat` writes after its counter.
pub(crate) const MARK: u64 = 0x6d67_652d_7461_6562;
/// Fault of a guest that printed no address.
pub(crate) const NO_BEAT: &str = "the guest did not say where its word beats";

/// The host physical memory of `extent`.
pub(crate) fn physical(extent: Extent) -> std::io::Result<Physical> {
    Physical::map(&File::open("/dev/mem")?, extent.start, extent.size)
}

/// Memory of the host at a physical address.
pub(crate) enum HostWords {
    /// A page mapped through `/dev/mem`, outside the kernel's own RAM.
    Mapped(Physical),
    /// Through `/proc/kcore`, for the kernel's own RAM, which `/dev/mem` refuses.
    OfKernel(Ram, u64),
}

impl HostWords {
    /// The page at `address`.
    pub(crate) fn at(address: u64) -> Result<Self, Fault> {
        let iomem = fs::read_to_string("/proc/iomem")?;
        match Ram::open() {
            Ok(all) if ram(&iomem).any(|ram| ram.contains(address)) => Ok(Self::OfKernel(all, address)),
            _ => Ok(Self::Mapped(physical(Extent { start: address, size: 4096 })?)),
        }
    }

    /// The word at `offset`, now.
    pub(crate) fn word(&self, offset: u64) -> Option<u64> {
        match self {
            Self::Mapped(page) => page.word(offset),
            Self::OfKernel(ram, address) => ram.word(address + offset).ok(),
        }
    }
}

/// The guest increments the word at this host physical address.
pub(crate) fn seen(address: u64) -> Step {
    let page = HostWords::at(address)?;
    match page.word(8) {
        Some(MARK) => beats(|| page.word(0), address),
        mark => Err(Fault::Untrue(format!(
            "at host address {address:#x} lies {mark:x?} and no mark of the guest"
        ))),
    }
}

/// The `word` at host physical address `address` increases.
pub(crate) fn beats(word: impl Fn() -> Option<u64>, address: u64) -> Step {
    let first = word();
    let begun = Instant::now();
    while word() == first {
        if begun.elapsed() > TIMEOUT {
            return Err(Fault::Untrue(format!(
                "the word at host address {address:#x} stands still at {first:x?}"
            )));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// The host physical address of guest physical address `gpa`: from the plan, or, for pages that the kernel chooses,
/// from the page map of the running machine.
pub(crate) fn host_address(machine: &Machine, gpa: Option<u64>) -> Result<u64, Fault> {
    let plan = machine.plan.as_ref().ok_or("there is no plan")?;
    let gpa = gpa.ok_or(NO_BEAT)?;
    let inside = plan.offset_in_slice(gpa).ok_or_else(|| format!("{gpa:#x} is not in the slice"))?;
    match (plan.slice(), plan.slice_in_guest()) {
        (Some(slice), _) => Ok(slice.start + inside),
        (None, Some(slice)) => pagemap::of_slice(slice.size, inside),
        (None, None) => Err("the plan has no slice".into()),
    }
}

/// The returned slice is zero.
pub(crate) fn zeros(slice: Option<Extent>) -> Step {
    let slice = slice.ok_or("the plan names no address")?;
    match physical(slice)?.first_not_zero() {
        None => Ok(()),
        Some(offset) => Err(Fault::Untrue(format!("host address {:#x} is not zero", slice.start + offset))),
    }
}

/// RAM of the kernel, by the lines of `/proc/iomem`.
pub(crate) fn ram(iomem: &str) -> impl Iterator<Item = Extent> {
    iomem.lines().filter(|line| line.trim_start() == *line && line.contains("System RAM")).filter_map(
        |line| {
            let (from, to) = line.split_once(" : ")?.0.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            let (start, last) = (number(from)?, number(to)?);
            Some(Extent { start, size: last.checked_sub(start)?.checked_add(1)? })
        },
    )
}

/// The value of `what` in `/proc/meminfo`, in bytes.
pub(crate) fn meminfo(what: &str) -> Result<u64, LabError> {
    let path = Path::new("/proc/meminfo");
    let text = fs::read_to_string(path).map_err(LabError::file("read", path))?;
    let kib = text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
    let kib = kib.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| LabError::Content { what: path.display().to_string(), problem: format!("no {what}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_of_the_kernel_is_kept_apart_from_its_contents_and_from_other_memory() {
        let iomem = "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n  00002000-00002fff : Kernel code\n\
                     1c0000000-1ffffffff : Reserved\n200000000-23fffffff : Persistent Memory (legacy)\n";
        let all: Vec<_> = ram(iomem).collect();
        assert_eq!(all, [Extent { start: 0x1000, size: 0x9_ec00 }]);
    }
}
