//! Selection of the RDMA device, and of the one of its addresses, that are used.

use std::time::Duration;

use egm_vendor::verbs::{Abilities, Context, Devices, LocalPort, Port, Verbs, best_gid};

use super::super::Setting;
use crate::error::Broken;
use crate::finding::Finding;
use crate::{library, rxe};

/// More ports than any device has.
const MOST_PORTS: u8 = 16;

/// A device that is open, and where on it connections are made.
#[derive(Debug)]
pub(in crate::validate) struct Site<'c> {
    pub(in crate::validate) name: String,
    pub(in crate::validate) context: &'c Context<'c>,
    pub(in crate::validate) abilities: Abilities,
    /// Its port and address.
    pub(in crate::validate) place: LocalPort,
    /// Devices that are there as well, and why not each of them was taken.
    pub(in crate::validate) others: Vec<String>,
    /// Time limit of a completion.
    pub(in crate::validate) timeout: Duration,
}

/// Opens the device that the arguments name, or the first that has a port up, and runs `check` on it; where there is none
/// the finding is skipped and gives the reason.
pub(in crate::validate) fn with(
    setting: &Setting,
    check: impl FnOnce(&Site<'_>) -> Result<Finding, Broken>,
) -> Result<Finding, Broken> {
    let library = match library::open(&[Verbs::NAME]) {
        Ok(library) => library,
        Err(skipped) => return Ok(skipped),
    };
    if let Some(address) = setting.args.text("rdma.rxe") {
        rxe::set_up(address)?;
    }
    let verbs = Verbs::new(library)?;
    let devices = match verbs.devices() {
        Ok(devices) => devices,
        // A kernel without the character devices returns an error number; an impossible number is another matter.
        Err(error) if error.number().is_some() => {
            return Ok(Finding::skipped(format!("no RDMA here: {error}; load ib_uverbs")));
        }
        Err(error) => return Err(error.into()),
    };
    let wanted = setting.args.text("rdma.device");
    let mut others = Vec::new();
    let Some((name, context, port)) = choose(&devices, wanted, &mut others) else {
        let seen = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
        let what = wanted
            .map_or_else(|| "no RDMA device has a port that is up".to_owned(), |name| format!("no {name}"));
        return Ok(Finding::skipped(format!("{what}; devices: {seen}")));
    };
    let gids = context.gids()?;
    let gid = match setting.args.text("rdma.gid") {
        None => best_gid(&gids, port.number),
        Some(_) => {
            let index = setting.args.get("rdma.gid", 0u8)?;
            gids.iter().find(|gid| gid.port == port.number && gid.index == index).copied()
        }
    };
    let gid = gid.ok_or(egm_vendor::verbs::VerbsError::NoGid { port: port.number })?;
    let abilities = context.abilities()?;
    let place = LocalPort {
        port,
        gid,
        max_dest_rd_atomic: abilities.max_dest_rd_atomic.min(16),
        max_rd_atomic: abilities.max_rd_atomic.min(16),
    };
    let former = setting.args.get("rdma.patience", 60u64)?; // its former name
    let timeout = Duration::from_secs(setting.args.get("rdma.timeout", former)?.clamp(1, 3600));
    check(&Site { name, context: &context, abilities, place, others, timeout })
}

/// The device and its first port that is up; what is passed over goes into `others`.
fn choose<'v>(
    devices: &Devices<'v>,
    wanted: Option<&str>,
    others: &mut Vec<String>,
) -> Option<(String, Context<'v>, Port)> {
    let mut found = None;
    for device in devices.iter() {
        let name = device.name();
        if found.is_some() || wanted.is_some_and(|wanted| wanted != name) {
            others.push(name);
            continue;
        }
        match device.open().and_then(|context| Ok((active_port(&context)?, context))) {
            Ok((Some(port), context)) => found = Some((name, context, port)),
            Ok((None, _)) => others.push(format!("{name} (no port is up)")),
            Err(error) => others.push(format!("{name} ({error})")),
        }
    }
    found
}

fn active_port(context: &Context<'_>) -> Result<Option<Port>, egm_vendor::verbs::VerbsError> {
    for number in 1..=context.abilities()?.ports.min(MOST_PORTS) {
        let port = context.port(number)?;
        if port.active {
            return Ok(Some(port));
        }
    }
    Ok(None)
}
