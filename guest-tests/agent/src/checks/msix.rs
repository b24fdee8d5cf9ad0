//! Claim: each virtio device has the planned MSI-X table, its driver uses vectors of it, and they fire when the device is
//! used; a disk is used from every vCPU, so that every queue's own vector must fire.

use std::io::Read;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::{Context, virtio_blk, virtio_net, vsock};
use crate::error::Broken;
use crate::expect::{Device, DeviceKind, Function};
use crate::finding::{Claim, Finding};
use crate::sys::{self, Mapping};
use crate::{config_space, sysfs};

/// Bytes from the generator: more than its driver has in store.
const ENTROPY: usize = 4096;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut claim = Claim::default();
    let mut devices = 0u32;
    for (function, device) in context.plan.devices().filter(|(_, d)| d.kind != DeviceKind::Other) {
        devices += 1;
        let id = &device.id;
        let config = sysfs::bytes(sysfs::pci(function.address).join("config"))?;
        let entries = config_space::msix_table(&config).map(|table| table.entries);
        let planned = Some(function.msix_vectors).filter(|n| *n > 0);
        claim.equal(format!("the MSI-X table size of {id}"), &entries, &planned);
        let Some(driver) = sysfs::virtio(function.address) else {
            claim.untrue(format!("{id} at {} has no driver", function.address));
            continue;
        };
        let before = vectors(&sysfs::text("/proc/interrupts")?, &driver);
        let used = use_device(context, function, device)?;
        let after = vectors(&sysfs::text("/proc/interrupts")?, &driver);
        judge(&mut claim, device, &before, &after, used);
    }
    if devices == 0 {
        return Ok(Finding::skipped("no virtio device is planned"));
    }
    Ok(claim.finish().with_value(f64::from(devices), "devices"))
}

/// A line of `/proc/interrupts` that is a virtio device's.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Vector {
    /// Purpose of the vector: `config`, `req.0`, `input.0`.
    queue: String,
    /// Interrupts so far, of all CPUs.
    count: u64,
    /// Whether it comes by MSI-X.
    msix: bool,
}

/// The vectors of `driver` (`virtio3`).
fn vectors(text: &str, driver: &str) -> Vec<Vector> {
    let cpus = text.lines().next().map_or(0, |head| head.split_whitespace().count());
    let prefix = format!("{driver}-");
    text.lines()
        .skip(1)
        .filter_map(|line| {
            let queue = line.split_whitespace().last()?.strip_prefix(&prefix)?.to_owned();
            let words = line.split_whitespace().skip(1).take(cpus);
            let count = words.filter_map(|n| n.parse::<u64>().ok()).sum();
            Some(Vector { queue, count, msix: line.contains("MSI-X") || line.contains("MSIX") })
        })
        .collect()
}

/// Makes the device raise interrupts; false if the other side did not answer, so that the device need not have.
fn use_device(context: &Context, function: &Function, device: &Device) -> Result<bool, Broken> {
    match device.kind {
        DeviceKind::VirtioBlk { .. } => {
            let Some(name) = virtio_blk::name(function.address) else { return Ok(false) };
            read_from_every_cpu(context, &name)?;
            Ok(true)
        }
        DeviceKind::VirtioRng => {
            let mut bytes = [0; ENTROPY];
            let read = std::fs::File::open("/dev/hwrng").and_then(|mut file| file.read_exact(&mut bytes));
            read.map(|()| true).map_err(Broken::file("read", "/dev/hwrng"))
        }
        DeviceKind::VirtioNet { .. } => {
            let Some(name) = sysfs::virtio_child(function.address, "net") else { return Ok(false) };
            let peer = virtio_net::configure(context, &name)?;
            Ok(virtio_net::datagram(peer, 64, Duration::from_secs(1)).is_ok())
        }
        DeviceKind::VirtioVsock { .. } => {
            let port = context.args.get("vsock.port", vsock::PORT)?;
            Ok(sys::vsock_connect(vsock::HOST, port, vsock::TIMEOUT).is_ok())
        }
        DeviceKind::Other => Ok(false),
    }
}

/// One transfer from each vCPU: the kernel gives each its own queue where there are enough.
fn read_from_every_cpu(context: &Context, name: &str) -> Result<(), Broken> {
    let disk = virtio_blk::open(name, false)?;
    let mut block = Mapping::new(4096).map_err(Broken::system("no memory for a block"))?;
    for vcpu in &context.plan.vcpus {
        let mut set = rustix::thread::CpuSet::new();
        set.set(usize::try_from(vcpu.index).unwrap_or(0));
        rustix::thread::sched_setaffinity(None, &set)
            .map_err(Broken::system(format!("cannot move to CPU {}", vcpu.index)))?;
        disk.read_exact_at(block.bytes_mut(), 0).map_err(Broken::system(format!("cannot read {name}")))?;
    }
    Ok(())
}

fn judge(claim: &mut Claim, device: &Device, before: &[Vector], after: &[Vector], used: bool) {
    let id = &device.id;
    claim.holds(!after.is_empty(), || format!("{id} has no vector in /proc/interrupts"));
    for vector in after.iter().filter(|v| !v.msix) {
        claim.untrue(format!("{} of {id} does not come by MSI-X", vector.queue));
    }
    let fired = |vector: &Vector| before.iter().any(|b| b.queue == vector.queue && b.count < vector.count);
    if used {
        claim.holds(after.iter().any(fired), || format!("no vector of {id} fired when it was used"));
        for vector in after.iter().filter(|v| v.queue.starts_with("req.") && !fired(v)) {
            claim.untrue(format!("vector {} of {id} did not fire", vector.queue));
        }
        claim.seen(format!(
            "{id}: {} vectors, {} fired",
            after.len(),
            after.iter().filter(|v| fired(v)).count()
        ));
    } else {
        claim.seen(format!("{id}: {} vectors, not used: no device answers", after.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERRUPTS: &str = include_str!("../../fixtures/q35/interrupts");

    #[test]
    fn vectors_of_a_device_are_found_and_counted_over_cpus() {
        let found = vectors(INTERRUPTS, "virtio0");
        let queues: Vec<_> = found.iter().map(|v| (v.queue.as_str(), v.count, v.msix)).collect();
        assert_eq!(queues, [("config", 0, true), ("req.0", 1, true), ("req.1", 0, true)]);
        assert!(vectors(INTERRUPTS, "virtio").is_empty());
    }

    #[test]
    fn a_queue_with_a_silent_vector_fails() {
        let device = Device { id: "disk0".into(), kind: DeviceKind::VirtioBlk { read_only: false } };
        let judged = |after: &str, used| {
            let mut claim = Claim::default();
            judge(&mut claim, &device, &vectors(INTERRUPTS, "virtio0"), &vectors(after, "virtio0"), used);
            claim.finish().reason
        };
        let one = INTERRUPTS.replace(" 28:          1", " 28:          5");
        assert_eq!(judged(&one, true), "vector req.1 of disk0 did not fire");
        let both = one.replace(" 29:          0          0", " 29:          0          3");
        assert_eq!(judged(&both, true), "disk0: 3 vectors, 2 fired");
        assert!(judged(INTERRUPTS, true).starts_with("no vector of disk0 fired"));
        assert!(judged(&both.replace("PCI-MSIX", "IO-APIC"), true).contains("does not come by MSI-X"));
        assert_eq!(judged(INTERRUPTS, false), "disk0: 3 vectors, not used: no device answers");
    }
}
