//! A kernel streams through more memory than the GPU has.

use egm_cuda::{Kind, Memory, Shape};
use egm_report::Figure;

use super::gpu::{self, Family, Seen, on_family};
use super::measure::Clock;
use crate::error::Broken;
use crate::finding::Finding;
use crate::sysfs;
use crate::validate::Setting;

/// What is left for the rest of the machine.
const LEFT: u64 = 4 << 30;
const GIB: u64 = 1 << 30;

/// One piece of HOST_NUMA memory, larger than the GPU's own, is written and read by one kernel each.
pub(super) fn check(setting: &Setting) -> Result<Finding, Broken> {
    on_family(setting, Family::HostNuma, false, |gpu, kind, claim| {
        let own = gpu.context.device().memory()?;
        let wanted = (own + GIB).next_multiple_of(GIB);
        let available = available(kind)?;
        if setting.most < wanted || available < wanted + LEFT {
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
            gpu.would_tell(&memory, (0, wanted), setting.seed)?;
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

/// Bytes that a node has free, or the machine where the kernel knows no nodes.
fn available(kind: Kind) -> Result<u64, Broken> {
    if let Kind::HostNuma(node) | Kind::Pool(node) = kind
        && let Ok(text) = sysfs::text(format!("/sys/devices/system/node/node{node}/meminfo"))
        && let Ok(number) = u32::try_from(node)
    {
        let free = sysfs::node_meminfo(&text, number, "MemFree").unwrap_or(0);
        return Ok(free + sysfs::node_meminfo(&text, number, "FilePages").unwrap_or(0));
    }
    let text = sysfs::text("/proc/meminfo")?;
    let kib = sysfs::field(&text, "MemAvailable").and_then(|value| value.strip_suffix("kB"));
    Ok(kib.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) * 1024)
}
