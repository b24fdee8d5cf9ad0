//! A kernel streams through more memory than the GPU has.

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Kind, Memory, Shape};

use super::each::{Seen, on_family};
use super::gpu::{self, Family};
use super::measure::Clock;
use crate::error::Broken;
use crate::finding::Finding;
use crate::machine;
use crate::tree::Tree;
use crate::validate::Setting;

/// Bytes that are left for the rest of the machine.
const LEFT: u64 = 4 << 30;
const GIB: u64 = 1 << 30;

/// One piece of HOST_NUMA memory, larger than the GPU's own, is written and read by one kernel each.
pub(super) fn check(setting: &Setting) -> Result<Finding, Broken> {
    on_family(setting, Family::HostNuma, false, |gpu, kind, claim| {
        let own = gpu.context.device().memory()?;
        let wanted = own.saturating_add(GIB).checked_next_multiple_of(GIB).unwrap_or(u64::MAX);
        let available = available(&Tree::live(), kind);
        if setting.most < wanted || available.saturating_sub(LEFT) < wanted {
            return Ok(Seen::Not(format!(
                "{kind}: the GPU has {own:#x} bytes, so {wanted:#x} are needed; --size allows {:#x} and {available:#x} are free",
                setting.most
            )));
        }
        let memory = Memory::new(&gpu.context, kind, wanted)?;
        let (words, clock) = (memory.words()?.part(0, wanted / 8), Clock::new(&gpu.context, None)?);
        let (shape, mut found) = (Shape::whole(&gpu.context), Vec::new());
        gpu.fill(&memory, wanted, !setting.seed)?;
        let part = memory.part(0, wanted)?;
        let written = clock.seconds(&gpu.stream, None, || {
            Ok(gpu.kernels.write(&gpu.stream, shape, part, setting.seed)?)
        })?;
        gpu::note(claim, "the GPU wrote, processors read", gpu::compare(words, setting.seed), setting.seed);
        let (wrong, result) = gpu.result(0)?;
        let read = clock.seconds(&gpu.stream, None, || {
            Ok(gpu.kernels.check(&gpu.stream, shape, part, setting.seed, wrong)?)
        })?;
        let differ = result.read(0);
        claim.holds(differ == 0, || format!("the GPU read {differ} wrong words"));
        if differ == 0 {
            gpu.check_reports(&memory, 0..wanted, setting.seed)?;
        }
        for (way, seconds) in [("SM write", written), ("SM read and compare", read)] {
            #[expect(clippy::cast_precision_loss, reason = "a rate, for people")]
            let rate = wanted as f64 / seconds / 1e9;
            found.push(Figure::of(
                format!("{kind}, beyond the GPU's: {way}"),
                Some(wanted),
                "GB/s",
                &mut [rate],
            ));
        }
        claim.seen(format!("{kind}: {wanted:#x} bytes, the GPU has {own:#x}"));
        Ok(Seen::Figures(found))
    })
}

/// Bytes that are available on the node of `kind`, or on the machine where the kernel has no nodes.
fn available(tree: &Tree, kind: Kind) -> u64 {
    let node = match kind {
        Kind::HostNuma(node) | Kind::Pool(node) => u32::try_from(node).ok(),
        _ => None,
    };
    let on_node = node.and_then(|node| tree.available_on(node));
    on_node.or_else(|| machine::meminfo(tree, "MemAvailable")).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::recorded;

    #[test]
    fn what_the_kernel_cannot_drop_is_not_available() {
        // 8 GiB free, and 100 GiB of a tmpfs, which are FilePages too.
        let (_folder, tree) = recorded(
            "== /proc/meminfo\nMemAvailable: 3145728 kB\n\
             == /sys/devices/system/node/node1/meminfo\n\
             Node 1 MemFree: 8388608 kB\nNode 1 FilePages: 104857600 kB\nNode 1 Shmem: 104857600 kB\n\
             Node 1 Active(file): 2097152 kB\n",
        );
        assert_eq!(available(&tree, Kind::HostNuma(1)), 9 << 30);
        assert_eq!(available(&tree, Kind::HostNuma(2)), 3 << 30);
        assert_eq!(available(&tree, Kind::Pinned), 3 << 30);
    }
}
