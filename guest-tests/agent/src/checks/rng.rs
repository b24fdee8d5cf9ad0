//! Claim: the kernel's hardware random number generator is the planned virtio-rng and gives bytes that are not constant.

use std::fs::File;
use std::io::Read;

use super::Context;
use crate::error::Broken;
use crate::expect::DeviceKind;
use crate::finding::{Claim, Finding};
use crate::sysfs;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    if !context.plan.devices().any(|(_, device)| device.kind == DeviceKind::VirtioRng) {
        return Ok(Finding::skipped("no virtio-rng is planned"));
    }
    let mut claim = Claim::default();
    let current = sysfs::text("/sys/class/misc/hw_random/rng_current")?;
    claim.holds(current.trim().starts_with("virtio_rng"), || {
        format!("the current generator is {:?}, not virtio_rng", current.trim())
    });
    let mut bytes = [0; 256];
    File::open("/dev/hwrng")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(Broken::file("read", "/dev/hwrng"))?;
    varied(&mut claim, &bytes);
    claim.seen(format!("{} bytes from {}", bytes.len(), current.trim()));
    Ok(claim.finish())
}

/// Random bytes take many values: 256 of them fewer than 64 with a chance below 2^-300.
fn varied(claim: &mut Claim, bytes: &[u8; 256]) {
    let different = bytes.iter().collect::<std::collections::BTreeSet<_>>().len();
    claim.holds(different >= 64, || format!("256 bytes take only {different} values"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_and_repeating_bytes_are_not_random() {
        let judged = |bytes: [u8; 256]| {
            let mut claim = Claim::default();
            varied(&mut claim, &bytes);
            claim.is_true()
        };
        assert!(!judged([7; 256]));
        assert!(!judged(std::array::from_fn(|i| i.to_le_bytes()[0] % 63)));
        assert!(judged(std::array::from_fn(|i| i.to_le_bytes()[0])));
    }
}
