//! Claim: each host function that is a network card is driven: datagrams and a stream come back through it, byte for byte, from
//! the echo service at `net.peer`, and its interrupts come by MSI-X.
//!
//! The arguments are those of [`super::virtio_net`]; `net.mac` is the hardware address that the card must have: that it is the
//! right one.

use std::time::Duration;

use super::Context;
use super::nvme::interrupts_named;
use super::virtio_net::{configure, datagram, stream};
use crate::error::Broken;
use crate::expect::DeviceKind;
use crate::finding::{Claim, Finding};
use crate::sysfs;

/// Payloads of datagrams: a small one, a whole Ethernet frame, and fragments.
const DATAGRAMS: [usize; 3] = [64, 1472, 8000];
/// Bytes of the stream, each way.
const STREAM: usize = 4 << 20;
/// Time limit of a datagram: a link may have just come up, or an emulator may be busy.
const TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut claim = Claim::default();
    let mut rate = None;
    for (function, device) in context.plan.devices().filter(|(_, d)| d.kind == DeviceKind::Other) {
        let folder = sysfs::pci(function.address).join("net");
        let Some(name) = sysfs::names(&folder).into_iter().next() else { continue };
        let id = &device.id;
        if let Some(mac) = context.args.text("net.mac") {
            let found = sysfs::text(folder.join(&name).join("address"))?;
            claim.equal(format!("the hardware address of {id}"), &found.trim(), &mac);
        }
        let peer = configure(context, &name)?;
        let all = DATAGRAMS.iter().try_for_each(|size| datagram(peer, *size, TIMEOUT));
        match all.and_then(|()| stream(peer, STREAM)) {
            Ok(found) => rate = Some(found),
            Err(why) => claim.untrue(format!("{id}: {why}")),
        }
        let seen = interrupts_named(&sysfs::text("/proc/interrupts")?, &name);
        claim.holds(seen.count > 0, || format!("no interrupt of {id} came while it was used"));
        claim.holds(seen.other == 0, || format!("{} vectors of {id} do not come by MSI-X", seen.other));
        claim.seen(format!(
            "{id}: {STREAM} bytes each way, {} vectors, {} interrupts",
            seen.vectors, seen.count
        ));
    }
    match rate {
        None if claim.is_true() => Ok(Finding::skipped("no host function is a network card")),
        rate => Ok(claim.finish().with_value(rate.unwrap_or(0.0), "MiB/s")),
    }
}
