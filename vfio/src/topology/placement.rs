//! Position of one function in the host, read from sysfs and configuration space.

use std::fmt;
use std::fs;
use std::path::{Component, Path};

use egm_address::PciAddress;
use serde::{Deserialize, Serialize};

use crate::pci::capability::{CapabilityId, extended, standard};

/// Position of a function in the host, and how it can be handled. A field without a source is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionPlacement {
    /// Bridges between the host bridge and the function, the root port first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bridges: Vec<PciAddress>,
    /// Its link to the bridge above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// Ways in which the kernel can reset it, the preferred one first: `flr`, `bus`, `pm`, …
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resets: Vec<String>,
    /// Its PCI Express capabilities; `None` for a conventional function, and where configuration space beyond 64 bytes
    /// could not be read (not root).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub express: Option<Express>,
    /// Name of its device for iommufd, `vfio3`, while a VFIO driver has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cdev: Option<String>,
}

/// Current and maximum speed and width of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Current speed, in megatransfers per second.
    pub speed: u32,
    /// Current number of lanes.
    pub width: u8,
    /// Maximum speed of this end, in megatransfers per second.
    pub max_speed: u32,
    /// Lanes that this end has.
    pub max_width: u8,
}

/// PCI Express capabilities that determine which functions can reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Express {
    /// Device or port type.
    pub port: Port,
    /// Access control services, where it has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acs: Option<Acs>,
    /// Address translation services, where it has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ats: Option<Ats>,
}

/// Device or port type (PCI Express Base 6.0 §7.5.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Port {
    /// An endpoint, native or legacy (types 0 and 1).
    Endpoint,
    /// A port of the root complex.
    Root,
    /// A switch's port towards the root complex.
    Upstream,
    /// A switch's port towards devices.
    Downstream,
    /// A device of the root complex.
    Integrated,
    /// A bridge to or from conventional PCI, or something newer.
    Other,
}

/// Access control services of a port (PCI Express Base 6.0 §7.7.11); the bits are those of both registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Acs {
    /// Low byte of the ACS Capability register: the supported services.
    pub capability: u8,
    /// Low byte of the ACS Control register: the enabled services.
    pub control: u8,
}

/// Address translation services of a function (PCI Express Base 6.0 §10.5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ats {
    /// Whether ATS is on now; the kernel enables it when it maps a guest's memory.
    pub enabled: bool,
}

impl FunctionPlacement {
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Reads the function at `folder`, its folder in sysfs below `root`; a field without a source stays empty.
    pub(crate) fn read(root: &Path, folder: &Path, config: &[u8]) -> Self {
        let resets = fs::read_to_string(folder.join("reset_method")).unwrap_or_default();
        Self {
            bridges: bridges(root, folder),
            link: link(folder),
            resets: resets.split_whitespace().map(str::to_owned).collect(),
            express: express(config),
            cdev: first_name(&folder.join("vfio-dev")),
        }
    }
}

/// The functions on the real path above `folder`: `…/pci0000:00/0000:00:01.0/0000:01:00.0`.
fn bridges(root: &Path, folder: &Path) -> Vec<PciAddress> {
    let (Ok(root), Ok(real)) = (root.canonicalize(), folder.canonicalize()) else { return Vec::new() };
    let inside = real.strip_prefix(&root).unwrap_or(&real);
    let mut chain: Vec<PciAddress> = inside
        .components()
        .filter_map(|part| match part {
            Component::Normal(name) => name.to_str()?.parse().ok(),
            _ => None,
        })
        .collect();
    chain.pop();
    chain
}

fn link(folder: &Path) -> Option<Link> {
    let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let width = |name: &str| text(name)?.trim().parse().ok().filter(|lanes| *lanes > 0);
    Some(Link {
        speed: speed(&text("current_link_speed")?)?,
        width: width("current_link_width")?,
        max_speed: speed(&text("max_link_speed")?)?,
        max_width: width("max_link_width")?,
    })
}

/// `16.0 GT/s PCIe`, in older kernels `16 GT/s`; `Unknown` without a link.
fn speed(text: &str) -> Option<u32> {
    let (whole, tenths) = match text.split_whitespace().next()?.split_once('.') {
        Some((whole, tenths)) => (whole, tenths.parse::<u32>().ok().filter(|digit| *digit < 10)?),
        None => (text.split_whitespace().next()?, 0),
    };
    whole.parse::<u32>().ok()?.checked_mul(1000)?.checked_add(tenths * 100)
}

/// The first name in a folder, by name.
fn first_name(folder: &Path) -> Option<String> {
    let names = fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.min()
}

fn express(config: &[u8]) -> Option<Express> {
    const EXPRESS: CapabilityId = CapabilityId::Standard(0x10);
    const ACS: CapabilityId = CapabilityId::Extended(0x0d);
    const ATS: CapabilityId = CapabilityId::Extended(0x0f);
    let byte = |at: u16, offset: u16| config.get(usize::from(at.checked_add(offset)?)).copied();
    let at = standard(config).find(EXPRESS)?.offset;
    let port = match byte(at, 2)? >> 4 {
        0 | 1 => Port::Endpoint,
        4 => Port::Root,
        5 => Port::Upstream,
        6 => Port::Downstream,
        9 | 10 => Port::Integrated,
        _ => Port::Other,
    };
    let list = extended(config);
    let acs = list.find(ACS).map(|found| found.offset);
    let ats = list.find(ATS).map(|found| found.offset);
    Some(Express {
        port,
        acs: acs.and_then(|at| Some(Acs { capability: byte(at, 4)?, control: byte(at, 6)? })),
        ats: ats.and_then(|at| Some(Ats { enabled: byte(at, 7)? & 0x80 != 0 })),
    })
}

impl Acs {
    /// Refuses requests from a requester that is not behind the port.
    pub const SOURCE_VALIDATION: u8 = 1 << 0;
    /// Refuses requests that are translated already.
    pub const TRANSLATION_BLOCKING: u8 = 1 << 1;
    /// Requests to neighbours go to the root complex.
    pub const REQUEST_REDIRECT: u8 = 1 << 2;
    /// Completions to neighbours go to the root complex.
    pub const COMPLETION_REDIRECT: u8 = 1 << 3;
    /// Forwards requests from below to the root complex even if their target is below.
    pub const UPSTREAM_FORWARDING: u8 = 1 << 4;
    /// Controls by a table which neighbours are reachable.
    pub const EGRESS_CONTROL: u8 = 1 << 5;
    /// Requests that are translated already go to neighbours directly.
    pub const DIRECT_TRANSLATED: u8 = 1 << 6;

    /// Whether all of `bits` are switched on.
    pub const fn has(self, bits: u8) -> bool {
        self.control & bits == bits
    }
}

/// The bits that are on, as lspci abbreviates them: `SV RR CR UF`.
impl fmt::Display for Acs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["SV", "TB", "RR", "CR", "UF", "EC", "DT"];
        let on: Vec<&str> =
            (0u8..).zip(names).filter(|(bit, _)| self.has(1 << bit)).map(|(_, name)| name).collect();
        f.write_str(&if on.is_empty() { "off".to_owned() } else { on.join(" ") })
    }
}

/// Prints `16 GT/s x16`, then the maximum if it is higher.
impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one = |speed: u32, width: u8| {
            let tenths =
                if speed.is_multiple_of(1000) { String::new() } else { format!(".{}", speed % 1000 / 100) };
            format!("{}{tenths} GT/s x{width}", speed / 1000)
        };
        f.write_str(&one(self.speed, self.width))?;
        if self.max_speed > self.speed || self.max_width > self.width {
            write!(f, " of {}", one(self.max_speed, self.max_width))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;
    use crate::host;

    #[test]
    fn a_place_is_read_from_the_real_path_and_the_configuration_space() {
        let host = Host::two_switches();
        let gpu = host::function(host.root(), host.gpu(0)).unwrap().place;
        let chain: Vec<String> = gpu.bridges.iter().map(ToString::to_string).collect();
        assert_eq!(chain, ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0"]);
        assert_eq!(gpu.link.unwrap().to_string(), "16 GT/s x16 of 32 GT/s x16");
        assert_eq!(gpu.resets, ["flr", "bus"]);
        assert_eq!(gpu.cdev.as_deref(), Some("vfio0"));
        let port = host::function(host.root(), gpu.bridges[2]).unwrap().place.express.unwrap();
        assert_eq!((port.port, port.acs.unwrap().to_string()), (Port::Downstream, "SV RR CR UF".to_owned()));
        let nic = host::function(host.root(), host.nic(0)).unwrap().place.express.unwrap();
        assert_eq!(nic, Express { port: Port::Endpoint, acs: None, ats: Some(Ats { enabled: false }) });
    }

    #[test]
    fn speeds_of_old_and_new_kernels_and_of_no_link_are_distinguished() {
        let read = ["16 GT/s\n", "2.5 GT/s PCIe\n", "64.0 GT/s PCIe\n", "Unknown\n", "\n", "9999999 GT/s"]
            .map(speed);
        assert_eq!(read, [Some(16_000), Some(2500), Some(64_000), None, None, None]);
    }

    #[test]
    fn a_space_that_ends_early_states_nothing() {
        assert_eq!(express(&[0; 64]), None);
        assert_eq!(express(&[0xff; 4096]), None);
    }
}
