//! Slices that a running machine gets: each is granted on a thread of its own, because a scrub can take minutes.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use crate::config::NewSlice;
use crate::hotplug::{Handle, HotplugError, Plug, PlugMemory, PluggedDevice, Reply};
use crate::passed::Passed;
use crate::plan::BackingPlan;
use crate::reserve::Granter;

/// A slice that the guest finds from now on, or would find.
#[derive(Debug)]
pub(crate) struct PluggedSlice {
    pub(crate) device: PluggedDevice,
    /// Where its memory lies; `None` for one that is only planned and that a broker places.
    pub(crate) backing: Option<BackingPlan>,
}

/// Grants `slice` and plugs it in, or plans that; `reply` is called on another thread. `granter` is acquired for that.
///
/// # Errors
/// When the host has no thread left.
pub(super) fn plug(
    slice: NewSlice,
    is_dry_run: bool,
    granter: Arc<Granter>,
    controller: Handle,
    reply: Reply<PluggedSlice>,
) -> io::Result<()> {
    let prepared = (!is_dry_run).then(|| controller.prepare());
    let work = move || {
        let plugged = plug_now(&slice, is_dry_run, &granter, &controller);
        granter.release();
        drop(prepared);
        reply(plugged);
    };
    thread::Builder::new().name("grant".to_owned()).spawn(work).map(drop)
}

fn plug_now(
    slice: &NewSlice,
    is_dry_run: bool,
    granter: &Granter,
    controller: &Handle,
) -> Result<PluggedSlice, HotplugError> {
    let node = slice.slice().node;
    if !granter.has_node(node) {
        return Err(HotplugError::NoNode { node });
    }
    let number = if is_dry_run { granter.next_number() } else { granter.number() };
    let (id, device) = (format!("egm{number}"), slice.device(number));
    let mut memory = PlugMemory { size: slice.slice().size.get(), granted: None };
    let plug = |memory: &PlugMemory, is_dry_run| {
        let (device, slice) = (device.clone(), Some(memory.clone()));
        ask(controller, Plug { device, is_dry_run, passed: Passed::default(), slice })
    };
    // A slice that no port has room for is not scrubbed for that.
    let planned = plug(&memory, true)?;
    if is_dry_run {
        return Ok(PluggedSlice { device: planned, backing: granter.plan(&id, slice.slice())? });
    }
    let granted = granter.grant(&id, slice.slice())?;
    let backing = Some(granted.backing.clone());
    memory.granted = Some(Box::new(granted));
    match plug(&memory, false) {
        Ok(device) => Ok(PluggedSlice { device, backing }),
        Err(error) => {
            granter.return_unused(&id);
            Err(error)
        }
    }
}

/// The answer of `controller` to `plug`.
fn ask(controller: &Handle, plug: Plug) -> Result<PluggedDevice, HotplugError> {
    let (sender, answer) = channel();
    controller.plug(plug, Box::new(move |plugged| drop(sender.send(plugged))))?;
    answer.recv().unwrap_or(Err(HotplugError::Ended))
}
