//! Names of host functions: vendor and ids, as far as the facts have them.

use egm_address::PciAddress;
use egm_vfio::topology;

use crate::facts::Facts;

/// `NVIDIA 10de:2335, host 0000:18:00.0`; without facts of the function `host function 0000:18:00.0`.
pub(super) fn host_function(facts: &Facts, address: PciAddress) -> String {
    let Some(function) = topology::find(&facts.functions, address) else {
        return format!("host function {address}");
    };
    let ids = format!("{:04x}:{:04x}", function.vendor, function.device);
    match topology::vendor_name(function.vendor) {
        Some(vendor) => format!("{vendor} {ids}, host {address}"),
        None => format!("{ids}, host {address}"),
    }
}
