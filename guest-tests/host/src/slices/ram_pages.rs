//! Guest RAM in hugetlb pages of each size. A stock kernel boots on it; meanwhile the host shows the RAM's page size.

use std::fs;
use std::path::Path;

use crate::engine::error::LabError;
use crate::engine::scenario::{HugetlbRam, Scenario};
use crate::hosts::pagemap;
use crate::hosts::parts::Plan;
use crate::hosts::pool::Pool;
use crate::runner::machine::INIT;
use crate::runner::steps::{Fault, Step, Steps};

/// RAM of the guests.
const SIZES: [HugetlbRam; 2] = [
    HugetlbRam { size: "512MiB", page_size: "2M", page_kib: 2 << 10, pages: 256 },
    HugetlbRam { size: "1GiB", page_size: "1G", page_kib: 1 << 20, pages: 1 },
];
/// A write of "3" frees the kernel's caches.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
/// A write of "1" makes free memory contiguous. Not every kernel does; the pool's size shows the result.
const COMPACT: &str = "/proc/sys/vm/compact_memory";
/// The kernel moves pages out of a GiB in one attempt, and gives up where one of them is in use at that moment.
const ATTEMPTS: u32 = 10;
/// Prefix of the VMM's report of its memory's page size.
const REPORT: &str = "memory: ";

/// Boots a guest on pages of each size.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    SIZES.into_iter().try_for_each(|ram| boot(steps, ram))
}

fn boot(steps: &mut Steps<'_>, ram: HugetlbRam) -> Result<(), LabError> {
    let Steps { runner, scenario, .. } = *steps;
    let name = |case: &str| format!("{case}, {}", ram.page_size);
    let Some(pool) = pool(ram)? else {
        steps.step(&name("pool"), || Err(Fault::Undecided("the host has too little contiguous memory")));
        return Ok(());
    };
    let folder = steps.folder(ram.page_size)?;
    let scenario = Scenario { hugetlb_ram: Some(ram), ..*scenario };
    let machine = runner.machine(&scenario, &folder)?;
    steps.step(&name("plan"), || planned(machine.plan.as_ref(), ram));
    let mut looked = Err(Fault::Undecided("the guest did not reach its init"));
    let boot = runner.boot_watched(&scenario, &machine, &folder, &mut |line| {
        if line.contains(INIT) {
            looked = taken(&pool, ram).and_then(|()| mapped(ram));
        }
    })?;
    steps.judge(scenario.expected, &boot, &format!(", {}", ram.page_size));
    steps.step(&name("pages"), || looked);
    steps.step(&name("reported"), || reported(&folder));
    steps.step(&name("returned"), || free(&pool, ram.pages));
    Ok(())
}

/// A pool of all pages, where the host has as much contiguous memory.
fn pool(ram: HugetlbRam) -> Result<Option<Pool>, LabError> {
    for _ in 0..ATTEMPTS {
        let _ = fs::write(DROP_CACHES, "3");
        let _ = fs::write(COMPACT, "1");
        let pool = Pool::resize(ram.page_kib, ram.pages)?;
        if pool.free()? == ram.pages {
            return Ok(Some(pool));
        }
    }
    Ok(None)
}

/// The plan has all RAM in pages of this size.
fn planned(plan: Option<&Plan>, ram: HugetlbRam) -> Step {
    let sizes = plan.map(Plan::page_sizes).unwrap_or_default();
    if !sizes.is_empty() && sizes.iter().all(|size| *size == Some(ram.page_kib << 10)) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("the plan has pages of {sizes:?} bytes")))
}

/// The machine has all pages of the pool.
fn taken(pool: &Pool, ram: HugetlbRam) -> Step {
    let left = free(pool, 0);
    left.map_err(|_| Fault::Untrue(format!("the machine does not have all {} pages of the pool", ram.pages)))
}

fn free(pool: &Pool, expected: u64) -> Step {
    match pool.free()? {
        free if free == expected => Ok(()),
        free => Err(Fault::Untrue(format!("{free} pages of the pool are free, not {expected}"))),
    }
}

/// The machine maps guest memory in pages of this size alone.
fn mapped(ram: HugetlbRam) -> Step {
    let processes = pagemap::machines()?;
    let [process] = processes.as_slice() else {
        return Err(Fault::Untrue(format!("{} machines run", processes.len())));
    };
    let sizes = page_sizes(&fs::read_to_string(process.join("smaps"))?);
    if !sizes.is_empty() && sizes.iter().all(|kib| *kib == ram.page_kib) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("mappings of guest memory have pages of {sizes:?} KiB")))
}

/// KiB of a page of each mapping of guest memory in `smaps` (Documentation/filesystems/proc.rst).
fn page_sizes(smaps: &str) -> Vec<u64> {
    let mut is_guests = false;
    let mut sizes = Vec::new();
    for line in smaps.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        if first.contains('-') {
            is_guests = line.ends_with(pagemap::GUEST_MEMORY);
        } else if first == "KernelPageSize:" && is_guests {
            sizes.extend(rest.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok()));
        }
    }
    sizes
}

/// The VMM reported that all of the memory is in huge pages.
fn reported(folder: &Path) -> Step {
    let log = fs::read_to_string(folder.join("vmm.log"))?;
    let line = log.lines().find_map(|line| line.strip_prefix(REPORT));
    let sizes =
        line.and_then(|line| line.strip_suffix(" present in huge pages of the host")?.split_once(" of "));
    match sizes {
        Some((huge, all)) if huge == all => Ok(()),
        _ => Err(Fault::Untrue(format!("the VMM reported {line:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_sizes_are_those_of_guest_memory_alone() {
        let smaps = "7f00-7f80 rw-s 0 00:0f 9    /memfd:egm-vmm (deleted)\nSize: 512 kB\nKernelPageSize:     2048 kB\n\
                     7f80-7f90 rw-p 0 00:00 0 \nKernelPageSize:        4 kB\n\
                     7fa0-7fb0 rw-s 0 00:0f 9    /memfd:egm-vmm (deleted)\nKernelPageSize:        4 kB\n";
        assert_eq!(page_sizes(smaps), [2048, 4]);
    }
}
