//! Claim: 256 KiB sent to the host's vsock port `vsock.port` (default 1024) come back byte for byte, and the guest has the
//! planned context id.

use std::fs::File;
use std::time::Duration;

use super::Context;
use crate::error::Broken;
use crate::expect::DeviceKind;
use crate::finding::{Claim, Finding};
use crate::{net, sys};

/// Device that reports this machine's context id.
const DEVICE: &str = "/dev/vsock";
/// The host's context id (virtio 1.2, 5.10.4).
pub(super) const HOST: u32 = 2;
/// Default port of the echo.
pub(super) const PORT: u32 = 1024;
/// Time for which a transfer may stand still.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes that make the round.
const SIZE: usize = 256 << 10;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let planned = context.plan.devices().find_map(|(_, device)| match device.kind {
        DeviceKind::VirtioVsock { cid } => Some(cid),
        _ => None,
    });
    let Some(planned) = planned else { return Ok(Finding::skipped("no vsock device is planned")) };
    let port = context.args.get("vsock.port", PORT)?;
    let mut claim = Claim::default();
    claim.equal("the context id", &local_cid()?, &planned);
    match sys::vsock_connect(HOST, port, TIMEOUT) {
        Ok(stream) => match net::echo(&stream, SIZE, u64::from(port)) {
            Ok(rate) => {
                claim.seen(format!("context id {planned}, {SIZE} bytes"));
                return Ok(claim.finish().with_value(rate, "MiB/s"));
            }
            Err(why) => claim.untrue(why),
        },
        Err(error) => claim.untrue(format!("cannot connect to port {port} of the host: {error}")),
    }
    Ok(claim.finish())
}

/// Context id that the driver took from the device: 0xffffffff (`VMADDR_CID_ANY`) when there is none.
fn local_cid() -> Result<u32, Broken> {
    let device = File::open(DEVICE).map_err(Broken::file("open", DEVICE))?;
    sys::vsock_local_cid(&device).map_err(Broken::file("ask for the context id", DEVICE))
}
