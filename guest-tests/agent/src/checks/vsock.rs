//! Claim: 256 KiB sent to the host's vsock port `vsock.port` (default 1024) come back byte for byte, and the guest has the
//! planned context id.

use std::time::Duration;

use super::Context;
use crate::error::Broken;
use crate::expect::DeviceKind;
use crate::finding::{Claim, Finding};
use crate::{net, sys};

/// The host's context id (virtio 1.2, 5.10.4).
pub(super) const HOST: u32 = 2;
/// Default port of the echo.
pub(super) const PORT: u32 = 1024;
/// How long each transfer may stand still.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes that make the round.
const SIZE: usize = 256 << 10;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let planned = context.plan.devices().find_map(|(_, device)| match device.kind {
        DeviceKind::VirtioVsock { cid } => Some(cid),
        _ => None,
    });
    let Some(planned) = planned else { return Ok(Finding::waived("no vsock device is planned")) };
    let port = context.args.get("vsock.port", PORT)?;
    let mut claim = Claim::default();
    match sys::vsock_connect(HOST, port, PATIENCE) {
        Ok((stream, cid)) => {
            claim.equal("the context id", &cid, &planned);
            match net::echo(&stream, SIZE, u64::from(port)) {
                Ok(rate) => {
                    claim.seen(format!("context id {cid}, {SIZE} bytes"));
                    return Ok(claim.finish().with_value(rate, "MiB/s"));
                }
                Err(why) => claim.untrue(why),
            }
        }
        Err(error) => claim.untrue(format!("cannot connect to port {port} of the host: {error}")),
    }
    Ok(claim.finish())
}
