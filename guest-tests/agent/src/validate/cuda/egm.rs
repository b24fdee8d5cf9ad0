//! Pieces of the memory of EGM devices, which a check gets one after the other. Nothing of them is retired.

use std::cell::Cell;
use std::ops::Range;

use egm_guest::findings::Outcome;
use egm_memory::{Found, Function};
use egm_vendor::cuda::{Context, CudaError, Kind, Memory};

use crate::error::Broken;
use crate::finding::Finding;
use crate::validate::Setting;

/// Alignment of pieces, in bytes: a large page.
const PAGE: u64 = 2 << 20;

/// The EGM devices of this machine.
pub(crate) struct Pieces {
    functions: Vec<Function>,
    /// Devices that cannot be used, with the reason.
    broken: Vec<String>,
    /// Offset of the next piece.
    next: Cell<u64>,
}

impl Pieces {
    /// The EGM devices that there are, or the finding that explains why there are none.
    pub(crate) fn find(setting: &Setting) -> Result<Result<Self, Finding>, Broken> {
        // A folder like `/sys/bus/pci/devices`, of a machine that was written down.
        let found = match setting.args.text("egm.functions") {
            None => egm_memory::find(),
            Some(folder) => egm_memory::find_in(folder.as_ref()),
        };
        let Found { functions, broken } = found.map_err(CudaError::from)?;
        let broken: Vec<String> =
            broken.into_iter().map(|(address, error)| format!("EGM device {address}: {error}")).collect();
        Ok(match (functions.is_empty(), broken.is_empty()) {
            (false, _) => Ok(Self { functions, broken, next: Cell::new(0) }),
            (true, false) => Err(Finding::error(broken.join("; "))),
            (true, true) => Err(Finding::skipped("this machine has no EGM device as a PCI function")),
        })
    }

    /// The finding for usable devices, with what is broken: that is an error where nothing failed.
    pub(crate) fn with_broken(&self, mut found: Finding) -> Finding {
        if self.broken.is_empty() {
            return found;
        }
        let broken = self.broken.join("; ");
        if found.outcome == Outcome::Failed {
            found.reason = format!("{}; {broken}", found.reason);
        } else {
            found.reason = format!("{broken}; of others: {}", found.reason);
            found.outcome = Outcome::Error;
        }
        found
    }

    /// Their kinds of memory.
    pub(crate) fn kinds(&self) -> Vec<Kind> {
        self.functions.iter().map(|function| Kind::EgmDevice(function.address)).collect()
    }

    /// The next check begins from the start again.
    pub(crate) fn again(&self) {
        self.next.set(0);
    }

    /// At least `bytes` bytes of the device of `kind`, registered, that no other piece has.
    pub(crate) fn piece(&self, context: &Context, kind: Kind, bytes: u64) -> Result<Memory, Broken> {
        let function = self.functions.iter().find(|function| Kind::EgmDevice(function.address) == kind);
        let function = function.ok_or(CudaError::NoHostAddress(kind))?;
        let retired = function.registers().and_then(|registers| registers.retired());
        let (bytes, retired) = (bytes.next_multiple_of(PAGE), retired.map_err(CudaError::from)?);
        let memory = function.map().map_err(CudaError::from)?;
        let at = place(memory.size(), &retired, self.next.get(), bytes).ok_or_else(|| {
            let size = memory.size();
            Broken::Other(format!("{kind} has {size:#x} bytes, no {bytes:#x} more: say a smaller --size"))
        })?;
        self.next.set(at + bytes);
        Ok(Memory::of_egm_device(context, function.address, memory, at, bytes)?)
    }
}

/// Offset from `from` on of the first `bytes` bytes of which none is retired.
fn place(size: u64, retired: &[Range<u64>], from: u64, bytes: u64) -> Option<u64> {
    let mut at = from.checked_next_multiple_of(PAGE)?;
    loop {
        let end = at.checked_add(bytes).filter(|end| *end <= size)?;
        let in_the_way = retired.iter().filter(|span| span.start < end && at < span.end);
        match in_the_way.map(|span| span.end).max() {
            None => return Some(at),
            Some(behind) => at = behind.checked_next_multiple_of(PAGE)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_piece_goes_around_retired_bytes_and_does_not_reach_beyond_the_end() {
        let retired = [3 * MIB..3 * MIB + 4096, 9 * MIB..9 * MIB + 1];
        assert_eq!(place(16 * MIB, &retired, 0, 2 * MIB), Some(0));
        assert_eq!(place(16 * MIB, &retired, 0, 4 * MIB), Some(4 * MIB));
        assert_eq!(place(16 * MIB, &retired, 4 * MIB, 6 * MIB), Some(10 * MIB));
        assert_eq!(place(16 * MIB, &retired, 0, 8 * MIB), None);
        assert_eq!(place(16 * MIB, &[0..MIB, MIB..u64::MAX], 0, 1), None);
        assert_eq!(place(u64::MAX, &[], u64::MAX, 1), None);
    }

    proptest! {
        #[test]
        fn no_byte_of_a_piece_is_retired(
            spans in prop::collection::vec((0u64..64, 0u64..8), 0..8),
            from in 0u64..64,
            bytes in 1u64..16,
        ) {
            let retired: Vec<Range<u64>> =
                spans.iter().map(|(at, length)| at * MIB..(at + length) * MIB).collect();
            if let Some(at) = place(64 * MIB, &retired, from * MIB, bytes * MIB) {
                let piece = at..at + bytes * MIB;
                prop_assert!(at >= from * MIB && piece.end <= 64 * MIB && at.is_multiple_of(PAGE));
                for span in retired.iter().filter(|span| !span.is_empty()) {
                    prop_assert!(span.end <= piece.start || piece.end <= span.start, "{span:?} {piece:?}");
                }
            }
        }
    }
}
