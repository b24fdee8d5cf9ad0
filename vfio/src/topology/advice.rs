//! Settings of switches and adapters with which a NIC reaches a GPU's memory by the shortest way.
//!
//! The recipes are those of rdma-core's `rdma_topo` for machines that assign functions to guests.

use std::fmt;

use egm_address::PciAddress;

use super::placement::Acs;
use super::{Relation, find, relation};
use crate::host::HostFunction;
use crate::ids::{DATA_DIRECT, MELLANOX, NVIDIA};

/// Recommended ACS control: bits 6 to 0, `x` for those that may be either, as the kernel's `pci=config_acs=` takes it.
type Pattern = &'static str;
/// Direct translated, redirection and source validation: requests that an ATS device had translated pass the switch.
const NIC_PORT: Pattern = "1x111x1";
/// Redirection and source validation, the kernel's own choice.
const OTHER_PORT: Pattern = "xx111x1";
/// Upstream forwarding, completion redirect, source validation.
const DATA_DIRECT_PORT: Pattern = "xx110x1";
/// Upstream forwarding, request redirect, source validation.
const DATA_DIRECT_GPU_PORT: Pattern = "xx101x1";
/// No source validation: requests and completions of the pair come by different ports.
const DATA_DIRECT_OTHER: Pattern = "xx111x0";

/// A recommended change on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// ACS of a port.
    Acs {
        /// Port that needs another ACS setting.
        port: PciAddress,
        /// Current ACS; `None` if it has none or could not be read.
        now: Option<Acs>,
        /// Recommended ACS: bits 6 to 0, `x` for either.
        want: &'static str,
    },
    /// A NIC that could have ATS and does not show it.
    Ats {
        /// Address of the NIC on the host.
        function: PciAddress,
    },
    /// A Data Direct function and its GPU in different groups.
    Groups {
        /// The Data Direct function.
        nic: PciAddress,
        /// The GPU that it is paired with.
        gpu: PciAddress,
    },
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Acs { port, now, want } => {
                let now =
                    now.map_or_else(|| "unknown or missing".to_owned(), |acs| format!("{:07b}", acs.control));
                write!(f, "{port}: ACS is {now}, better {want}: boot with pci=config_acs={want}@{port}")
            }
            Self::Ats { function } => write!(
                f,
                "{function}: no ATS, so its requests leave the switch: mlxconfig -d {function} set ATS_ENABLED=true, then reboot the \
                 host"
            ),
            Self::Groups { nic, gpu } => write!(
                f,
                "{nic} and {gpu} are in different IOMMU groups: Data Direct needs one, which ACS without source validation above \
                 them makes"
            ),
        }
    }
}

/// Changes that help the NICs of `assigned` to reach its GPUs behind the same switch, one line a port.
pub fn advice(functions: &[HostFunction], assigned: &[&HostFunction]) -> Vec<Advice> {
    let gpus = || assigned.iter().filter(|f| f.vendor == NVIDIA && f.class >> 16 == 0x03);
    let nics = assigned
        .iter()
        .filter(|f| f.vendor == MELLANOX && (f.class >> 16 == 0x02 || f.device == DATA_DIRECT));
    let pairs = nics.flat_map(|nic| gpus().map(move |gpu| (*nic, *gpu)));
    let mut all: Vec<Advice> = Vec::new();
    for (nic, gpu) in pairs.filter(|(nic, gpu)| relation(nic, gpu) <= Relation::Pxb) {
        for new in of_pair(functions, nic, gpu) {
            // Two pairs may share a port; the first pair's advice for it stands.
            if !all.iter().any(|old| old.about() == new.about()) {
                all.push(new);
            }
        }
    }
    all
}

impl Advice {
    const fn about(&self) -> (u8, PciAddress) {
        match self {
            Self::Acs { port, .. } => (0, *port),
            Self::Ats { function } => (1, *function),
            Self::Groups { nic, .. } => (2, *nic),
        }
    }
}

fn of_pair(functions: &[HostFunction], nic: &HostFunction, gpu: &HostFunction) -> Vec<Advice> {
    let data_direct = nic.device == DATA_DIRECT;
    let (nic_want, gpu_want, other_want) = if data_direct {
        (DATA_DIRECT_PORT, DATA_DIRECT_GPU_PORT, DATA_DIRECT_OTHER)
    } else {
        (NIC_PORT, OTHER_PORT, OTHER_PORT)
    };
    let own = |function: &HostFunction| function.place.bridges.last().copied();
    let mut ports: Vec<(PciAddress, Pattern)> = Vec::new();
    ports.extend(own(nic).map(|port| (port, nic_want)));
    ports.extend(own(gpu).map(|port| (port, gpu_want)));
    for port in nic.place.bridges.iter().chain(&gpu.place.bridges) {
        if !ports.iter().any(|(known, _)| known == port) {
            ports.push((*port, other_want));
        }
    }
    let port = |(port, want): (PciAddress, Pattern)| {
        let bridge = find(functions, port)?;
        let now = bridge.place.express.and_then(|express| express.acs);
        let is_port = bridge.place.express.is_none_or(|express| now.is_some() || is_downstream(express.port));
        (is_port && !now.is_some_and(|acs| fits(acs.control, want))).then_some(Advice::Acs {
            port,
            now,
            want,
        })
    };
    let mut all: Vec<Advice> = ports.into_iter().filter_map(port).collect();
    if data_direct && nic.iommu_group != gpu.iommu_group {
        all.push(Advice::Groups { nic: nic.address, gpu: gpu.address });
    }
    if !data_direct && nic.place.express.is_some_and(|express| express.ats.is_none()) {
        all.push(Advice::Ats { function: nic.address });
    }
    all
}

/// Upstream ports have no relevant ACS.
const fn is_downstream(port: super::Port) -> bool {
    matches!(port, super::Port::Root | super::Port::Downstream)
}

fn fits(control: u8, want: Pattern) -> bool {
    want.bytes().rev().zip(0u8..).all(|(wanted, bit)| match wanted {
        b'0' => control >> bit & 1 == 0,
        b'1' => control >> bit & 1 == 1,
        _ => true,
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;

    fn advice_for(host: &Host, change: impl Fn(&mut HostFunction)) -> Vec<String> {
        let mut all = host.functions();
        all.iter_mut().for_each(change);
        let assigned: Vec<&HostFunction> =
            [host.gpu(0), host.nic(0), host.gpu(1)].map(|address| find(&all, address).unwrap()).to_vec();
        advice(&all, &assigned).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_port_above_a_nic_lets_translated_requests_pass() {
        let host = Host::two_switches();
        assert_eq!(
            advice_for(&host, |_| {}),
            ["0000:17:01.0: ACS is 0011101, better 1x111x1: boot with pci=config_acs=1x111x1@0000:17:01.0"]
        );
        let good = advice_for(&host, |f| {
            if f.address.to_string() == "0000:17:01.0" {
                f.place.express.as_mut().unwrap().acs.as_mut().unwrap().control = 0x5d;
            }
        });
        assert!(good.is_empty(), "{good:?}");
    }

    #[test]
    fn a_nic_without_ats_is_shown_with_the_way_to_get_it() {
        let host = Host::two_switches();
        let advice = advice_for(&host, |f| {
            if let Some(express) = &mut f.place.express {
                express.ats = None;
            }
        });
        assert!(advice[1].contains("mlxconfig -d 0000:19:00.0 set ATS_ENABLED=true"), "{advice:?}");
    }

    #[test]
    fn data_direct_has_a_recipe_of_its_own() {
        let host = Host::two_switches();
        let nic = host.nic(0);
        let advice = advice_for(&host, |f| {
            if f.address == nic {
                f.device = DATA_DIRECT;
            }
        });
        for part in [
            "better xx110x1",
            "better xx101x1",
            "0000:15:01.0: ACS is 0011101, better xx111x0",
            "different IOMMU groups",
        ] {
            assert!(advice.iter().any(|line| line.contains(part)), "{part} in {advice:?}");
        }
    }

    #[test]
    fn patterns_are_read_from_bit_6_down() {
        assert!(fits(0x5d, NIC_PORT) && !fits(0x1d, NIC_PORT) && fits(0x1d, OTHER_PORT));
        assert!(fits(0x1c, DATA_DIRECT_OTHER) && !fits(0x1d, DATA_DIRECT_OTHER));
    }
}
