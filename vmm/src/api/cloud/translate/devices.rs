//! Devices of the document, in the order in which cloud-hypervisor makes them.

use std::path::Path;

use egm_address::PciAddress;
use egm_config::{CliqueFile, DeviceFile, TapFile, VfioBackend};

use super::super::document::{
    DeviceConfig, DiskConfig, NetConfig, PlatformConfig, UserDeviceConfig, VmConfig, VsockConfig,
};
use super::context::Context;

/// Adds the devices of `config`.
pub(super) fn translate(config: &VmConfig, context: &mut Context) {
    for (index, disk) in (0..).zip(config.disks.iter().flatten()) {
        self::disk(disk, &format!("disks[{index}]"), context);
    }
    for (index, net) in (0..).zip(config.net.iter().flatten()) {
        self::net(net, &format!("net[{index}]"), context);
    }
    if let Some(vsock) = &config.vsock {
        self::vsock(vsock, context);
    }
    // cloud-hypervisor's machines have one, also where the document has none.
    context.device("rng", DeviceFile::VirtioRng { id: config.rng.id.clone(), root_port: None });
    for (index, device) in (0..).zip(config.devices.iter().flatten()) {
        function(device, config.platform.as_ref(), &format!("devices[{index}]"), context);
    }
    for (index, device) in (0..).zip(config.user_devices.iter().flatten()) {
        server(device, &format!("user_devices[{index}]"), context);
    }
}

pub(super) fn vsock(vsock: &VsockConfig, context: &mut Context) {
    let (id, socket) = (vsock.id.clone(), Some(vsock.socket.clone()));
    context.device("vsock", DeviceFile::VirtioVsock { id, root_port: None, cid: vsock.cid, socket });
}

pub(super) fn server(device: &UserDeviceConfig, at: &str, context: &mut Context) {
    let (id, socket) = (device.id.clone(), device.socket.clone());
    context.device(at, DeviceFile::VfioUser { id, root_port: None, socket });
}

pub(super) fn disk(disk: &DiskConfig, at: &str, context: &mut Context) {
    if disk.serial.is_some() && disk.id.is_some() && disk.serial != disk.id {
        context.refuse(format!("{at}.serial"));
    }
    let Some(path) = disk.path.clone() else { return context.refuse(format!("{at}.path")) };
    let id = disk.id.clone().or_else(|| disk.serial.clone());
    let read_only = disk.readonly.then_some(true);
    context.device(at, DeviceFile::VirtioBlk { id, root_port: None, path, read_only });
}

pub(super) fn net(net: &NetConfig, at: &str, context: &mut Context) {
    let pairs =
        u16::try_from(net.num_queues / 2).ok().filter(|pairs| *pairs > 0 && net.num_queues.is_multiple_of(2));
    if pairs.is_none() {
        context.refuse(format!("{at}.num_queues"));
    }
    let tap = match (&net.fds, &net.tap) {
        (None, Some(name)) => Some(TapFile::Name(name.clone())),
        (Some(fds), None) => context.numbers(fds).map(TapFile::Descriptors),
        (Some(fds), Some(_)) if context.numbers(fds).is_none() => None,
        (None, None) | (Some(_), Some(_)) => {
            context.refuse(format!("{at}.tap"));
            None
        }
    };
    let Some(tap) = tap else { return }; // it or `fds` is refused
    let (id, mac) = (net.id.clone(), net.mac.clone());
    context
        .device(at, DeviceFile::VirtioNet { id, root_port: None, tap, mac, queue_pairs: pairs, vhost: None });
}

pub(super) fn function(
    device: &DeviceConfig,
    platform: Option<&PlatformConfig>,
    at: &str,
    context: &mut Context,
) {
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
