//! Transfers into memory of programs that a GPU uses, too, and so has moved into itself: pages that a network card
//! needs come back first. The GPU has the last word on the bytes; the kernel reports where the pages were.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use egm_guest::findings::Outcome;
use egm_vendor::cuda::{Kind, Memory};
use egm_vendor::verbs::Access;

use super::super::Setting;
use super::super::cuda::each::on_gpu;
use super::super::cuda::gpu::Gpu;
use super::super::rdma::gpu::bytes;
use super::super::rdma::loopback;
use super::super::rdma::site::Site;
use super::super::rdma::trial::tried;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sys::pages;
use crate::sysfs;

/// The kernel's entry for each page of this process, 8 bytes each.
const PAGEMAP: &str = "/proc/self/pagemap";
/// Bit of an entry for a page in no memory of the kernel's: in a device, or swapped out (`PM_SWAP`).
const ELSEWHERE: u64 = 1 << 62;
/// The kernel's report about this process: how much of it is swapped out, for one.
const STATUS: &str = "/proc/self/status";

/// `odp.gpu_moving`: transfers with pages that the GPU has written and so moved into itself.
pub(super) fn moving(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    if let Some(skipped) = super::lacking(site) {
        return Ok(skipped);
    }
    on_gpu(|gpu| {
        if let Some(attribute) = gpu.context.attributes().denied(Kind::System) {
            return Ok(Finding::skipped(format!(
                "this GPU reports 0 for {attribute}: its driver does not move what programs allocate (HMM, or a coherent GPU)"
            )));
        }
        let memory = Memory::new(&gpu.context, Kind::System, bytes(setting))?;
        loopback::with(site, setting.seed, |wire| {
            let has_atomics = site.abilities.odp.atomic;
            let atomics = if has_atomics { Access::REMOTE_ATOMIC } else { Access::NONE };
            let region = wire.domain.register_cuda(memory, Access::DATA | atomics | Access::ON_DEMAND);
            let region = match region {
                Ok(region) => region,
                Err(error) => return Ok(super::refused(site, &error)),
            };
            let none = || Broken::Other("a registration without its memory".to_owned());
            let memory = region.cuda().ok_or_else(none)?;
            gpu.fill(memory, memory.bytes(), setting.seed)?;
            let moved = moved(gpu, memory)?;
            let found = tried(wire, setting, gpu, memory, &region, has_atomics)?;
            Ok(judged(found, moved, memory.bytes() / pages::size() as u64))
        })
    })
}

/// The finding after `moved` of `all` pages were in a GPU.
fn judged(found: Finding, moved: u64, all: u64) -> Finding {
    match (found.outcome, moved) {
        (Outcome::Passed, 0) => Finding::skipped(format!(
            "no page of {all} was in a GPU after it had written them, so none came back ({})",
            found.reason
        )),
        (Outcome::Passed, _) => {
            let mut claim = Claim::default();
            claim.seen(format!("{moved} of {all} pages were in the GPU before; {}", found.reason));
            claim.finish()
        }
        // Any other outcome stays as it is, wherever the pages were.
        _ => found,
    }
}

/// How many whole pages of `memory` are in a GPU: on the node that its memory is, or in no memory of the kernel's and not swapped
/// out. As many as this process has swapped out might be these.
fn moved(gpu: &Gpu, memory: &Memory) -> Result<u64, Broken> {
    let page = pages::size() as u64;
    let (first, count) = (memory.address().div_ceil(page), memory.bytes() / page);
    if let Some(own) = gpu.context.attributes().own_node() {
        return on_node(own, count, |index| pages::node_of((first + index) * page));
    }
    let mut entries = vec![0; usize::try_from(count * 8).unwrap_or(0)];
    let pagemap = File::open(PAGEMAP).map_err(Broken::file("open", PAGEMAP))?;
    pagemap.read_exact_at(&mut entries, first * 8).map_err(Broken::file("read", PAGEMAP))?;
    // Read after the entries: what was swapped out by then counts.
    let status = std::fs::read_to_string(STATUS).map_err(Broken::file("read", STATUS))?;
    Ok(elsewhere(&entries).saturating_sub(swapped(&status, page)?))
}

/// Number of the `count` pages that are on node `own`, by `node_of` of each.
fn on_node(own: i32, count: u64, node_of: impl Fn(u64) -> io::Result<i32>) -> Result<u64, Broken> {
    let mut pages = 0;
    for index in 0..count {
        let node = node_of(index).map_err(Broken::system(
            "cannot ask where pages are (move_pages; a container needs CAP_SYS_NICE)",
        ))?;
        pages += u64::from(node == own);
    }
    Ok(pages)
}

/// Number of pages of `page` bytes that this process has swapped out; those in a GPU are none of them.
fn swapped(status: &str, page: u64) -> Result<u64, Broken> {
    let value = sysfs::field(status, "VmSwap").unwrap_or_default();
    let kilobytes = value.strip_suffix("kB").and_then(|number| number.trim().parse::<u64>().ok());
    let bytes = kilobytes.and_then(|kilobytes| kilobytes.checked_mul(1024));
    let bytes = bytes.ok_or_else(|| Broken::text(format!("VmSwap of {STATUS}"), value, "a number and kB"))?;
    Ok(bytes.div_ceil(page))
}

/// Number of pages among `entries` of the page map that are in no memory of the kernel's.
fn elsewhere(entries: &[u8]) -> u64 {
    let (entries, _) = entries.as_chunks::<8>();
    entries.iter().filter(|entry| u64::from_ne_bytes(**entry) & ELSEWHERE != 0).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_elsewhere_are_counted() {
        // In memory; in none; never touched; in none and written since; and half an entry.
        let entries: [u64; 4] = [0x8180_0000_0000_0000, 0x4000_0000_0000_001f, 0, 0x40c0_0000_0000_0000];
        let mut bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_ne_bytes()).collect();
        bytes.extend([0xff; 4]);
        assert_eq!(elsewhere(&bytes), 2);
    }

    #[test]
    fn pages_that_are_swapped_out_are_in_no_gpu() {
        let counted = |line: &str, page| swapped(&format!("VmRSS:\t 9 kB\n{line}\n"), page);
        assert_eq!(counted("VmSwap:\t       0 kB", 4096).unwrap(), 0);
        assert_eq!(counted("VmSwap:\t      12 kB", 4096).unwrap(), 3);
        assert_eq!(counted("VmSwap:\t      68 kB", 65536).unwrap(), 2);
        for odd in ["", "VmSwap:", "VmSwap: 5", "VmSwap: -4 kB", "VmSwap: 18446744073709551615 kB"] {
            let message = counted(odd, 4096).unwrap_err().to_string();
            assert!(message.contains("VmSwap"), "{odd}: {message}");
        }
    }

    #[test]
    fn pages_are_counted_by_node_and_a_kernel_without_their_nodes_is_an_error() {
        // On the GPU's node; on another; not there (ENOENT of that page).
        let nodes = [2, 0, -2, 2];
        let counted = on_node(2, 4, |index| Ok(nodes[usize::try_from(index).unwrap()])).unwrap();
        assert_eq!(counted, 2);
        let denied = on_node(2, 4, |_| Err(io::Error::from_raw_os_error(libc::EPERM))).unwrap_err();
        assert!(denied.to_string().contains("CAP_SYS_NICE"), "{denied}");
    }

    #[test]
    fn right_data_decides_only_when_pages_were_in_the_gpu_and_wrong_data_always() {
        let passed = judged(Finding::passed("all right"), 5, 9);
        assert_eq!(passed.outcome, Outcome::Passed);
        assert!(passed.reason.contains("5 of 9 pages") && passed.reason.contains("all right"));
        let none = judged(Finding::passed("all right"), 0, 9);
        assert!(none.outcome == Outcome::Skipped && none.reason.contains("no page of 9"), "{none:?}");
        for moved in [0, 5] {
            assert_eq!(judged(Finding::failed("byte 3"), moved, 9).outcome, Outcome::Failed);
        }
    }
}
