//! Accesses that the host's IOMMU refused, counted by the interrupts that report them. The kernel's log is no source:
//! drivers limit the rate of such messages, and the log wraps. There is no trace event either: `io_page_fault` is for
//! drivers that call `report_iommu_fault`, which neither Intel's nor Arm's SMMUv3 driver does.
//!
//! A burst of faults may be one interrupt, but none is without one: an IOMMU raises it when its record of faults stops being
//! empty, and the driver empties that record.

use std::fs;
use std::path::Path;

use crate::engine::error::LabError;
use crate::engine::step::{Fault, Step};

const INTERRUPTS: &str = "/proc/interrupts";
/// The devices of virtio's driver.
const VIRTIO: &str = "/sys/bus/virtio/drivers/virtio_iommu";

/// Number of interrupts that have reported refused accesses since this host started.
pub(crate) fn faults() -> Result<u64, LabError> {
    let text = fs::read_to_string(INTERRUPTS).map_err(LabError::file("read", INTERRUPTS))?;
    counted(&text, &virtio_devices(Path::new(VIRTIO))).ok_or_else(|| LabError::Host {
        what: format!("no IOMMU of this host has a fault interrupt in {INTERRUPTS}"),
        remedy: "start the host with its IOMMU on: intel_iommu=on, amd_iommu=on".into(),
    })
}

/// Checks that the IOMMU has refused nothing since `before`.
pub(crate) fn no_faults_since(before: u64) -> Step {
    match faults()?.saturating_sub(before) {
        0 => Ok(()),
        new => Err(Fault::Untrue(format!("{new} interrupts of the IOMMU for refused accesses: see l1.log"))),
    }
}

/// Names of the virtual IOMMUs: `virtio0`.
fn virtio_devices(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("virtio")).collect()
}

/// The sum over processors of all fault interrupts in the text of `/proc/interrupts`; `None` where there is none.
fn counted(text: &str, virtio: &[String]) -> Option<u64> {
    let processors = text.lines().next()?.split_whitespace().count();
    let mut total = None;
    for line in text.lines().skip(1) {
        let mut words = line.split_whitespace().skip(1);
        let counts: u64 = words.by_ref().take(processors).filter_map(|word| word.parse::<u64>().ok()).sum();
        // Actions that share a line are separated by commas.
        if words.any(|word| is_fault_interrupt(word.trim_end_matches(','), virtio)) {
            total = Some(total.unwrap_or(0) + counts);
        }
    }
    total
}

/// Intel's `dmar0` (not `dmar0-prq`), AMD's `AMD-Vi` or `AMD-Vi0-Evt`, Arm's `arm-smmu-v3-evtq` (or all of its in one), virtio's
/// `virtio0-event`, or with fewer vectors `virtio0-virtqueues` or `virtio0`: the requests of its driver raise none.
fn is_fault_interrupt(name: &str, virtio: &[String]) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let amd = name.strip_prefix("AMD-Vi").is_some_and(|rest| rest.is_empty() || rest.ends_with("-Evt"));
    let of_virtio = virtio.iter().any(|device| {
        name.strip_prefix(device.as_str()).is_some_and(|rest| ["", "-event", "-virtqueues"].contains(&rest))
    });
    name.strip_prefix("dmar").is_some_and(is_number)
        || amd
        || ["arm-smmu-v3-evtq", "arm-smmu-v3-combined-irq"].contains(&name)
        || of_virtio
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "           CPU0       CPU1\n";

    #[test]
    fn fault_interrupts_are_summed_over_processors_and_units() {
        let intel = format!(
            "{HEAD} 24:          3          4  DMAR-MSI    0-edge      dmar0\n 25:          0          1  DMAR-MSI    1-edge      dmar1\n \
             26:          9          9  DMAR-MSI    2-edge      dmar0-prq\n 27:          8          8  PCI-MSIX-0000:01:00.0   0-edge      nvme0q0\n"
        );
        assert_eq!(counted(&intel, &[]), Some(8));
        let arm = format!(
            "{HEAD} 13:          2          0     GICv3 106 Edge      arm-smmu-v3-evtq\n 14:          7          0     GICv3 109 Edge      arm-smmu-v3-gerror\n"
        );
        assert_eq!(counted(&arm, &[]), Some(2));
    }

    #[test]
    fn of_virtio_the_event_queue_counts_and_another_device_does_not() {
        let virtio = ["virtio0".to_owned()];
        let text =
            |name: &str| format!("{HEAD} 30:          5          0  ITS-PCI-MSIX   1 Edge      {name}\n");
        assert_eq!(counted(&text("virtio0-event"), &virtio), Some(5));
        assert_eq!(counted(&text("virtio0"), &virtio), Some(5));
        assert_eq!(counted(&text("other, virtio0"), &virtio), Some(5));
        assert_eq!(counted(&text("virtio0-virtqueues"), &virtio), Some(5));
        for name in ["virtio0-config", "virtio0-request", "virtio01-event", "virtio1"] {
            assert_eq!(counted(&text(name), &virtio), None, "{name}");
        }
    }

    #[test]
    fn a_host_without_an_iommu_differs_from_one_without_faults() {
        let idle = format!("{HEAD} 24:          0          0  DMAR-MSI    0-edge      dmar0\n");
        assert_eq!((counted(&idle, &[]), counted(HEAD, &[])), (Some(0), None));
    }
}
