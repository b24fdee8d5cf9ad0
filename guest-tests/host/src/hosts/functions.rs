//! PCI functions of this host: their groups and drivers, by sysfs.

use std::fs::{self, File};
use std::path::Path;

use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::engine::step::Step;

/// The first function of `scenario` that is unavailable on this host, if any.
pub(crate) fn missing(scenario: &Scenario) -> Option<String> {
    let function = scenario.assigned.iter().find(|function| group(function).is_none())?;
    Some(format!("this host has no function {function} in an IOMMU group"))
}

/// The IOMMU group of a function of this host.
pub(crate) fn group(function: &str) -> Option<String> {
    let link = fs::read_link(format!("/sys/bus/pci/devices/{function}/iommu_group")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

/// A group has one owner at a time, so a successful open shows that the function's group is free.
pub(crate) fn free(function: &str) -> Step {
    let group = group(function).ok_or("its group is gone")?;
    File::options().read(true).write(true).open(format!("/dev/vfio/{group}"))?;
    Ok(())
}

/// Binds `function` to `driver`, after unbinding it from its current one.
pub(crate) fn bind(function: &str, driver: &str) -> Result<(), LabError> {
    let folder = Path::new("/sys/bus/pci/devices").join(function);
    unbind(function)?;
    write(&folder.join("driver_override"), driver)?;
    write(Path::new("/sys/bus/pci/drivers_probe"), function)
}

/// Unbinds `function` from its driver, if it has one.
pub(crate) fn unbind(function: &str) -> Result<(), LabError> {
    let driver = Path::new("/sys/bus/pci/devices").join(function).join("driver");
    if driver.exists() { write(&driver.join("unbind"), function) } else { Ok(()) }
}

/// Writes `text` to a file of sysfs.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), LabError> {
    fs::write(path, text).map_err(LabError::file("write", path))
}
