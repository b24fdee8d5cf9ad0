//! Devices of the document, in the order in which cloud-hypervisor makes them.

use std::path::Path;

use egm_address::PciAddress;
use egm_config::{CliqueFile, DeviceFile, Refusal, VfioBackend, is_name};
use egm_vfio::variant::clique::Clique;
use serde_json::json;

use super::super::document::{DeviceConfig, DiskConfig, NetConfig, PlatformConfig, VmConfig};
use super::context::Context;
use super::judge;
use crate::hotplug::NewFunction;

/// Adds the devices of `config`.
pub(super) fn translate(config: &VmConfig, context: &mut Context) {
    for (index, disk) in (0..).zip(config.disks.iter().flatten()) {
        self::disk(disk, &format!("disks[{index}]"), context);
    }
    for (index, net) in (0..).zip(config.net.iter().flatten()) {
        self::net(net, &format!("net[{index}]"), context);
    }
    if let Some(vsock) = &config.vsock {
        let (id, socket) = (vsock.id.clone(), Some(vsock.socket.clone()));
        context.device("vsock", DeviceFile::VirtioVsock { id, root_port: None, cid: vsock.cid, socket });
    }
    // cloud-hypervisor's machines have one, also where the document has none.
    context.device("rng", DeviceFile::VirtioRng { id: config.rng.id.clone(), root_port: None });
    for (index, device) in (0..).zip(config.devices.iter().flatten()) {
        function(device, config.platform.as_ref(), &format!("devices[{index}]"), context);
    }
    for (index, device) in (0..).zip(config.user_devices.iter().flatten()) {
        let (id, socket) = (device.id.clone(), device.socket.clone());
        context
            .device(&format!("user_devices[{index}]"), DeviceFile::VfioUser { id, root_port: None, socket });
    }
}

fn disk(disk: &DiskConfig, at: &str, context: &mut Context) {
    if disk.serial.is_some() && disk.id.is_some() && disk.serial != disk.id {
        context.refuse(format!("{at}.serial"));
    }
    let Some(path) = disk.path.clone() else { return context.refuse(format!("{at}.path")) };
    let id = disk.id.clone().or_else(|| disk.serial.clone());
    let read_only = disk.readonly.then_some(true);
    context.device(at, DeviceFile::VirtioBlk { id, root_port: None, path, read_only });
}

fn net(net: &NetConfig, at: &str, context: &mut Context) {
    let pairs =
        u16::try_from(net.num_queues / 2).ok().filter(|pairs| *pairs > 0 && net.num_queues.is_multiple_of(2));
    if pairs.is_none() {
        context.refuse(format!("{at}.num_queues"));
    }
    let Some(tap) = net.tap.clone() else {
        // `fds` has a refusal of its own.
        if net.fds.is_none() {
            context.refuse(format!("{at}.tap"));
        }
        return;
    };
    let (id, mac) = (net.id.clone(), net.mac.clone());
    context
        .device(at, DeviceFile::VirtioNet { id, root_port: None, tap, mac, queue_pairs: pairs, vhost: None });
}

/// The function that `device` adds to a machine that runs.
///
/// # Errors
/// A refusal for each value that cannot be honoured.
pub(crate) fn added(device: DeviceConfig) -> Result<NewFunction, Vec<Refusal>> {
    const AT: &str = "devices[0].";
    let mut context = Context::default();
    judge(&json!({ "devices": [device] }), &mut context);
    let function = device.path.as_deref().and_then(function_of);
    if function.is_none() && device.fd.is_none() {
        context.refuse(format!("{AT}path"));
    }
    let mut refusals = context.refusals;
    for refusal in &mut refusals {
        refusal.key = refusal.key.trim_start_matches(AT).to_owned();
    }
    let mut refuse = |key: &str, reason: &str, help: &str| {
        refusals.push(Refusal { key: key.to_owned(), reason: reason.to_owned(), help: help.to_owned() });
    };
    if device.id.as_deref().is_some_and(|id| !is_name(id)) {
        refuse("id", "cannot name a device so", "use 1 to 64 letters, digits, '.', '_' and '-'");
    }
    if device.pci_segment != 0 {
        refuse(
            "pci_segment",
            "cannot choose a segment: the plan puts every device into 0",
            "leave pci_segment out",
        );
    }
    let clique = device.x_nv_gpudirect_clique;
    if clique.is_some_and(|clique| Clique::new(clique).is_none()) {
        refuse("x_nv_gpudirect_clique", "cannot use this clique: it is beyond 15", "use 0 to 15");
    }
    match function {
        Some(function) if refusals.is_empty() => Ok(NewFunction { id: device.id, function, clique }),
        _ => Err(refusals),
    }
}

fn function(device: &DeviceConfig, platform: Option<&PlatformConfig>, at: &str, context: &mut Context) {
    let Some(function) = device.path.as_deref().and_then(function_of) else {
        if device.path.is_some() || device.fd.is_none() {
            context.refuse(format!("{at}.path"));
        }
        return;
    };
    let is_iommufd = platform.is_some_and(|platform| platform.iommufd);
    let is_without_p2p = platform.is_some_and(|platform| !platform.vfio_p2p_dma);
    context.device(
        at,
        DeviceFile::Vfio {
            id: device.id.clone(),
            root_port: None,
            function,
            backend: is_iommufd.then_some(VfioBackend::Iommufd),
            clique: device.x_nv_gpudirect_clique.map(|clique| CliqueFile::Number(clique.into())),
            bars: None,
            p2p: is_without_p2p.then_some(false),
        },
    );
}

/// PCI address of the function with the folder `path` in sysfs.
fn function_of(path: &Path) -> Option<PciAddress> {
    let name = path.file_name().filter(|_| path.starts_with("/sys"))?;
    name.to_str()?.parse().ok()
}
