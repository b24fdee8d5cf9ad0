//! Controller of hot-plugged devices: its thread, and the thread's steps, which tests take without it.

mod reset;

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use egm_vfio::backend::InterruptKind;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::maker::Maker;
use super::occupant::{Departing, New, Occupant};
use super::{
    CurrentDevices, Devices, Event, EventKind, Handle, HotplugError, Plug, PluggedDevice, Removal, Request,
    Running, UNPLUG_TIMEOUT,
};
use crate::config::{DeviceKind, NewDevice};
use crate::eventfd::{self, borrowed};
use crate::lock::lock;
use crate::passthrough::HostEvents;
use crate::pci::{Duty, Port, RootComplex};
use crate::plan::BridgePlan;

/// Time between two looks at devices that depart.
const DEPARTURE: Duration = Duration::from_millis(10);

pub(crate) struct Slot {
    pub(crate) port: Arc<Port>,
    pub(crate) number: u16,
    pub(crate) bridge: BridgePlan,
    pub(crate) occupant: Option<Occupant>,
}

/// Plugs and unplugs devices of a machine, and resets them.
pub(crate) struct Controller {
    root: Arc<RootComplex>,
    slots: Vec<Slot>,
    /// Functions behind no hot-plug port: they stay.
    fixed: Vec<Occupant>,
    departing: Vec<Departing>,
    maker: Box<dyn Maker>,
    /// Name of the machine.
    machine: String,
    /// The device that has a resource of the host for itself, by the resource.
    owners: BTreeMap<String, String>,
    report: Box<dyn Fn(&Event) + Send>,
    handle: Handle,
    requests: Receiver<Request>,
    ended: bool,
}

impl Controller {
    /// Takes over the functions in `slots` and the `fixed` ones, among all `devices` of the machine; `report` receives every
    /// event.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn new(
        root: Arc<RootComplex>,
        slots: Vec<Slot>,
        fixed: Vec<Occupant>,
        devices: Devices,
        maker: Box<dyn Maker>,
        report: Box<dyn Fn(&Event) + Send>,
    ) -> io::Result<Self> {
        let (sender, requests) = channel();
        let wake = Arc::new(eventfd::new()?);
        for slot in &slots {
            let wake = Arc::clone(&wake);
            slot.port.on_duty(move || drop(wake.write(1)));
        }
        let Devices { machine, addresses, owners } = devices;
        let current = CurrentDevices { addresses, ..CurrentDevices::default() };
        let handle = Handle { requests: sender, wake, current: Arc::new(Mutex::new(current)) };
        let controller = Self {
            root,
            slots,
            fixed,
            departing: Vec::new(),
            maker,
            machine,
            owners,
            report,
            handle,
            requests,
            ended: false,
        };
        controller.occupants().for_each(|occupant| controller.listen(occupant));
        Ok(controller)
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// When the host has no thread left.
    pub(crate) fn start(self) -> io::Result<Running> {
        let handle = self.handle.clone();
        let thread = thread::Builder::new().name("hotplug".to_owned()).spawn(move || self.run())?;
        Ok(Running { handle, thread: Some(thread) })
    }

    fn occupants(&self) -> impl Iterator<Item = &Occupant> {
        self.slots.iter().filter_map(|slot| slot.occupant.as_ref()).chain(&self.fixed)
    }

    /// Has the function wake the controller when it finds its device gone.
    fn listen(&self, occupant: &Occupant) {
        let wake = Arc::clone(&self.handle.wake);
        occupant.new.function.on_lost(Box::new(move || drop(wake.write(1))));
    }

    fn run(mut self) -> Vec<String> {
        loop {
            let next = self.turn(Instant::now());
            if self.ended {
                return self.end();
            }
            self.wait(next.map(|next| next.saturating_duration_since(Instant::now())));
        }
    }

    fn wait(&self, limit: Option<Duration>) {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let host_events = self.occupants().filter_map(|occupant| occupant.new.host_events.as_ref());
        let fds =
            std::iter::once(borrowed(&self.handle.wake)).chain(host_events.flat_map(HostEvents::descriptors));
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // The result does not matter: the next turn checks everything.
        let _ = poll(&mut fds, limit.as_ref());
    }

    /// Does all work that is due; returns the next deadline, if any. A request or an event may come earlier.
    pub(crate) fn turn(&mut self, now: Instant) -> Option<Instant> {
        let _ = self.handle.wake.read();
        while let Ok(request) = self.requests.try_recv() {
            match request {
                Request::Plug { plug, reply } => {
                    let plugged = self.plug(&plug);
                    lock(&self.handle.current).requested -= usize::from(!plug.is_dry_run);
                    reply(plugged);
                }
                Request::Unplug { id, reply } => reply(self.unplug(&id, now)),
                Request::Reset { reply } => {
                    self.warm_reset();
                    reply();
                }
                Request::End => self.ended = true,
            }
        }
        self.handle_host_events(now);
        self.reset();
        for slot in 0..self.slots.len() {
            self.remove_released(slot, now);
        }
        self.dismiss();
        let again = now.checked_add(DEPARTURE).filter(|_| !self.departing.is_empty());
        self.occupants().filter_map(|occupant| occupant.leaving).chain(again).min()
    }

    /// Handles the host's events: reports them, removes lost and failed functions, forwards requests to the guest.
    fn handle_host_events(&mut self, now: Instant) {
        for occupant in &mut self.fixed {
            let events = occupant.take_events();
            if occupant.is_gone(&events) {
                if !std::mem::replace(&mut occupant.is_lost, true) {
                    occupant.new.function.lose();
                    (self.report)(&occupant.event(EventKind::LostFixed));
                }
                continue;
            }
            for kind in events {
                let failed = kind == InterruptKind::Error;
                let what = if failed { EventKind::FailedFixed } else { EventKind::RequestedFixed };
                (self.report)(&occupant.event(what));
            }
        }
        for index in 0..self.slots.len() {
            let Some(occupant) = self.slots.get_mut(index).and_then(|slot| slot.occupant.as_mut()) else {
                continue;
            };
            let events = occupant.take_events();
            let failed = events.contains(&InterruptKind::Error);
            // The kernel also requests back a device that was pulled out: `lost` comes first.
            let lost = occupant.is_gone(&events);
            if lost || failed {
                let what = if lost { EventKind::Lost } else { EventKind::Failed };
                (self.report)(&occupant.event(what));
                self.take(index, Removal::Surprise);
            } else if events.contains(&InterruptKind::Request) && occupant.leaving.is_none() {
                (self.report)(&occupant.event(EventKind::Requested(UNPLUG_TIMEOUT)));
                self.ask_guest(index, now);
            }
        }
    }

    /// Resets the functions that are due. Each receives the names of all that are reset with it.
    fn reset(&self) {
        let due = |slot: &Slot| match (slot.port.duty(), &slot.occupant) {
            (Some(Duty::Reset(times)), Some(occupant)) => {
                Some((Arc::clone(&slot.port), times, Arc::clone(&occupant.new.function)))
            }
            _ => None,
        };
        let due: Vec<_> = self.slots.iter().filter_map(due).collect();
        let names: Vec<&str> = due.iter().map(|(_, _, function)| function.name()).collect();
        for (port, times, function) in &due {
            function.reset(&names);
            port.fresh(*times);
        }
        if !due.is_empty() {
            self.root.update();
        }
    }

    /// Removes a function that the guest has released, or has not released in time.
    fn remove_released(&mut self, index: usize, now: Instant) {
        let Some(slot) = self.slots.get(index) else { return };
        let late = slot.occupant.as_ref().and_then(|occupant| occupant.leaving);
        if slot.port.duty() == Some(Duty::Pull) {
            self.take(index, Removal::Orderly);
        } else if late.is_some_and(|until| until <= now) {
            self.take(index, Removal::Surprise);
        }
    }

    /// Removes the function in a slot: notifies the guest, and returns the function to the host.
    fn take(&mut self, index: usize, left: Removal) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        let Some(occupant) = slot.occupant.take() else { return };
        // A guest that released it is notified after the function has ended, any other guest at once.
        if left == Removal::Surprise {
            slot.port.pull();
            self.root.update();
        }
        occupant.new.function.end();
        slot.port.pull();
        self.root.update();
        let waits = occupant.event(EventKind::Departing);
        self.departing.push(Departing { occupant, left });
        self.dismiss();
        if self.departing.iter().any(|departing| departing.occupant.id == waits.id) {
            (self.report)(&waits);
        }
    }

    /// Closes departing devices that nothing uses any more, and returns them to the host.
    fn dismiss(&mut self) {
        let has_left = |departing: &mut Departing| match &mut departing.occupant.new.member {
            Some(member) => member.has_left(),
            None => true,
        };
        let gone: Vec<Departing> = self.departing.extract_if(.., has_left).collect();
        for Departing { mut occupant, left } in gone {
            for (what, number) in occupant.new.function.counters() {
                if number > 0 {
                    (self.report)(&occupant.event(EventKind::Counted(what, number)));
                }
            }
            let loss = occupant.new.member.as_mut().and_then(|member| member.take_loss());
            let loss = loss.map(|error| occupant.event(EventKind::Unflushed(error.to_string())));
            let gone = occupant.event(EventKind::Removed(left));
            let New { function, host_events, member } = occupant.new;
            drop((function, host_events)); // closes it
            let last = member.and_then(|member| member.end());
            let mut current = lock(&self.handle.current);
            current.addresses.remove(&occupant.id);
            current.plugged.retain(|device| device.id != occupant.id);
            drop(current);
            self.owners.retain(|_, id| *id != occupant.id);
            loss.iter().chain([&gone]).for_each(|event| (self.report)(event));
            last.into_iter().for_each(|last| last());
        }
    }

    fn plug(&mut self, plug: &Plug) -> Result<PluggedDevice, HotplugError> {
        if self.slots.is_empty() {
            return Err(HotplugError::NoPorts);
        }
        let id = self.free_id(&plug.device)?;
        let device = plug.device.named(&id, &self.machine);
        let owned = device.exclusive();
        if let Some((what, owner)) = owned.iter().find_map(|what| self.owners.get_key_value(what)) {
            return Err(HotplugError::Present { what: what.clone(), id: owner.clone() });
        }
        let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.occupant.is_none());
        let (free, bridges): (Vec<usize>, Vec<BridgePlan>) =
            free.map(|(index, slot)| (index, slot.bridge)).unzip();
        let full = HotplugError::NoSlot { id: id.clone(), slots: self.slots.len() };
        if free.is_empty() {
            return Err(full);
        }
        if plug.is_dry_run && matches!(device.kind, DeviceKind::VfioUser { .. }) {
            return Err(HotplugError::Unplannable { id });
        }
        let candidate = self.maker.plan(&device, plug.slice.as_ref(), &bridges)?;
        let Some(index) = free.get(candidate.bridge).copied() else { return Err(full) };
        let number = self.slots.get(index).map_or(0, |slot| slot.number);
        let plugged = PluggedDevice { id, slot: number, function: candidate.function.clone() };
        if plug.is_dry_run {
            return Ok(plugged);
        }
        let occupant = Occupant::new(&plugged.id, self.maker.make(candidate)?);
        self.listen(&occupant);
        let Some(slot) = self.slots.get_mut(index) else { return Err(full) };
        slot.port.insert(Arc::clone(&occupant.new.function));
        let event = occupant.event(EventKind::Plugged(number));
        slot.occupant = Some(occupant);
        self.root.update();
        self.owners.extend(owned.into_iter().map(|what| (what, plugged.id.clone())));
        let mut current = lock(&self.handle.current);
        current.addresses.insert(plugged.id.clone(), plugged.function.address);
        current.plugged.push(device);
        drop(current);
        (self.report)(&event);
        Ok(plugged)
    }

    /// The id of `new`, or else the first that no device has.
    fn free_id(&self, new: &NewDevice) -> Result<String, HotplugError> {
        let devices = &lock(&self.handle.current).addresses;
        match new.id() {
            Some(id) if devices.contains_key(id) => Err(HotplugError::Taken { id: id.to_owned() }),
            Some(id) => Ok(id.to_owned()),
            None => {
                let ids = (0_usize..).map(|number| format!("{}{number}", new.prefix()));
                Ok(ids.into_iter().find(|id| !devices.contains_key(id)).unwrap_or_default())
            }
        }
    }

    /// Requests `id` back from the guest.
    fn unplug(&mut self, id: &str, now: Instant) -> Result<(), HotplugError> {
        let occupied = |slot: &Slot| slot.occupant.as_ref().is_some_and(|occupant| occupant.id == id);
        let index = self.slots.iter().position(occupied);
        let occupant = index.and_then(|index| self.slots.get(index)?.occupant.as_ref());
        match (index, occupant.and_then(|occupant| occupant.leaving)) {
            (Some(index), None) => {
                self.ask_guest(index, now);
                Ok(())
            }
            (Some(_), Some(_)) => Err(HotplugError::Leaving { id: id.to_owned() }),
            (None, _) if self.departing.iter().any(|departing| departing.occupant.id == id) => {
                Err(HotplugError::Leaving { id: id.to_owned() })
            }
            (None, _) => Err(HotplugError::Unknown { id: id.to_owned() }),
        }
    }

    fn ask_guest(&mut self, index: usize, now: Instant) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        if let Some(occupant) = &mut slot.occupant {
            occupant.leaving = Some(now.checked_add(UNPLUG_TIMEOUT).unwrap_or(now));
            slot.port.press();
        }
    }

    /// Ends every function, after the machine; returns their counters that are not zero, in words.
    fn end(self) -> Vec<String> {
        let mut counted = Vec::new();
        for occupant in self.occupants() {
            occupant.new.function.end();
            // The machine counts its virtio devices itself.
            if occupant.new.host_events.is_none() && occupant.new.member.is_some() {
                continue;
            }
            let counters = occupant.new.function.counters().into_iter().filter(|(_, number)| *number > 0);
            counted.extend(counters.map(|(what, number)| format!("{number} {what} at \"{}\"", occupant.id)));
        }
        counted
    }
}

#[cfg(test)]
mod tests;
