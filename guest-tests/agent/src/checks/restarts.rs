//! Claim: the guest starts again after each of its resets, in the same machine: the disk has what the start before wrote.
//!
//! The last block of the first writable virtio disk, or else of the first NVMe drive, has the number of resets so far. The guest
//! resets itself until that is `restarts.times` (default 2).

use rustix::system::RebootCommand;

use super::{Context, virtio_blk};
use crate::cmdline::Arguments;
use crate::error::Broken;
use crate::expect::DeviceKind;
use crate::finding::{Claim, Finding};
use crate::sysfs;

/// Begins the text in the last block.
const MARK: &str = "egm-restart ";

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let Some((name, id)) = disk(context) else {
        return Ok(Finding::skipped("no disk that could be written is there"));
    };
    let times = context.args.get("restarts.times", 2u32)?;
    let done = done(&virtio_blk::last_text(&name)?);
    let mut claim = Claim::default();
    // The last start leaves another text: a later guest counts from 0.
    let text =
        if done < times { format!("{MARK}{}", done.saturating_add(1)) } else { "egm-restarted".to_owned() };
    let signature = Arguments::from_pairs(&[format!("blk.signature={text}")])?;
    virtio_blk::keeps(&mut claim, &name, &id, &signature)?;
    // A disk that loses bytes is in the report of this start, which is then the last one.
    if done < times && claim.is_true() {
        rustix::fs::sync();
        rustix::system::reboot(RebootCommand::Restart).map_err(Broken::system("cannot reset the machine"))?;
    }
    claim.equal("the number of resets", &done, &times);
    Ok(claim.finish().with_value(f64::from(done), "resets"))
}

/// Name in `/dev` and id of the disk.
fn disk(context: &Context) -> Option<(String, String)> {
    let writable = DeviceKind::VirtioBlk { read_only: false };
    context.plan.devices().find_map(|(function, device)| {
        let name = match &device.kind {
            kind if *kind == writable => virtio_blk::name(function.address),
            DeviceKind::Other => {
                let controllers = sysfs::names(sysfs::pci(function.address).join("nvme"));
                controllers.into_iter().next().map(|controller| format!("{controller}n1"))
            }
            _ => None,
        };
        Some((name?, device.id.clone()))
    })
}

/// The number in the last block's text; 0 for any other text.
fn done(text: &str) -> u32 {
    text.strip_prefix(MARK).and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_the_mark_has_seen_no_reset() {
        assert_eq!(
            ["", "egm-lab", "egm-restart ", "egm-restart 2", "egm-restart 10"].map(done),
            [0, 0, 0, 2, 10]
        );
    }
}
