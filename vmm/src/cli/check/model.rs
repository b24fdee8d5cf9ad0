//! Findings of `egm-vmm check`: the JSON form, from which the text is made.

use egm_address::{PciAddress, PciAddressError};
use egm_vfio::dma::Memlock;
use egm_vfio::host::HostFunction;
use egm_vfio::topology::{self, Express, Link};
use serde::Serialize;

use crate::error::{Blame, Report};
use crate::plan::PassthroughPlan;

/// An argument that is neither a function nor, alone, a file.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) struct NotOne(pub(super) PciAddressError);

impl Report for NotOne {
    fn blame(&self) -> Blame {
        Blame::Configuration
    }

    fn help(&self) -> Option<String> {
        Some("write host functions, or one configuration file that exists".to_owned())
    }
}

/// All findings.
#[derive(Debug, Serialize)]
pub(super) struct Checked {
    pub(super) functions: Vec<Function>,
    /// Each ordered pair of different functions.
    pub(super) peers: Vec<Peer>,
    pub(super) advice: Vec<String>,
    /// Bytes that the machine of a configuration pins.
    pub(super) pinned: Option<u64>,
    /// Bytes that this process may pin; `None` without a limit, or of another host.
    pub(super) memlock: Option<u64>,
    pub(super) problems: Vec<Problem>,
}

/// One host function.
#[derive(Debug, Serialize)]
pub(super) struct Function {
    pub(super) address: PciAddress,
    /// `10de:2335`.
    pub(super) ids: String,
    pub(super) class: &'static str,
    pub(super) driver: Option<String>,
    pub(super) group: Option<u32>,
    /// Other members of the group but bridges, with their drivers.
    pub(super) others: Vec<String>,
    pub(super) node: Option<u32>,
    pub(super) link: Option<String>,
    pub(super) resets: Vec<String>,
    pub(super) bars: Vec<u64>,
    /// Whether it has address translation services; `None` when that could not be read.
    pub(super) ats: Option<bool>,
    /// ACS of each bridge above that has it, the root port first.
    pub(super) acs: Vec<String>,
}

/// How requests of one function reach another.
#[derive(Debug, Serialize)]
pub(super) struct Peer {
    pub(super) from: PciAddress,
    pub(super) to: PciAddress,
    /// `PIX`, `PXB`, `PHB`, `NODE`, `SYS`.
    pub(super) relation: String,
    /// `D`, `R`, `C` or `-`.
    pub(super) route: char,
    pub(super) reasons: Vec<String>,
}

/// Something that the host lacks.
#[derive(Debug, Serialize)]
pub(super) struct Problem {
    pub(super) problem: String,
    pub(super) help: String,
}

impl Checked {
    pub(super) fn new(
        functions: &[HostFunction],
        wanted: &[PciAddress],
        passthrough: Option<&PassthroughPlan>,
        memlock: Option<Memlock>,
    ) -> Self {
        let passed: Vec<&HostFunction> =
            wanted.iter().filter_map(|address| topology::find(functions, *address)).collect();
        let pairs = passed.iter().flat_map(|from| passed.iter().map(move |to| (*from, *to)));
        let pairs = pairs.filter(|(from, to)| from.address != to.address);
        let mut problems: Vec<Problem> = wanted
            .iter()
            .filter_map(|address| topology::usable(functions, *address).err())
            .map(|error| Problem { problem: error.to_string(), help: error.help() })
            .collect();
        let pinned = passthrough.map(|plan| plan.pinned);
        let too_small = pinned.zip(memlock).and_then(|(pinned, memlock)| memlock.check(pinned).err());
        problems.extend(
            too_small.map(|error| Problem {
                problem: error.to_string(),
                help: error.remedy().unwrap_or_default(),
            }),
        );
        Self {
            functions: passed.iter().map(|function| Function::new(functions, function)).collect(),
            peers: pairs.map(|(from, to)| Peer::new(functions, from, to)).collect(),
            advice: topology::advice(functions, &passed).iter().map(ToString::to_string).collect(),
            pinned,
            memlock: memlock.and_then(|memlock| memlock.limit),
            problems,
        }
    }
}

impl Function {
    fn new(all: &[HostFunction], function: &HostFunction) -> Self {
        let others = topology::members(all, function).filter(|other| !topology::is_bridge(other));
        let other = |other: &HostFunction| {
            format!("{} {}", other.address, other.driver.as_deref().unwrap_or("no driver"))
        };
        let acs = |bridge: &HostFunction| {
            let Express { acs, .. } = bridge.place.express?;
            Some(format!("{} {}", bridge.address, acs?))
        };
        Self {
            address: function.address,
            ids: format!("{:04x}:{:04x}", function.vendor, function.device),
            class: topology::class_name(function.class),
            driver: function.driver.clone(),
            group: function.iommu_group,
            others: others.map(other).collect(),
            node: function.numa_node,
            link: function.place.link.as_ref().map(Link::to_string),
            resets: function.place.resets.clone(),
            bars: function.bars.iter().map(|bar| bar.size).collect(),
            ats: function.place.express.map(|express| express.ats.is_some()),
            acs: topology::bridges(all, function).filter_map(acs).collect(),
        }
    }
}

impl Peer {
    fn new(all: &[HostFunction], from: &HostFunction, to: &HostFunction) -> Self {
        let found = topology::peer(all, from, to);
        Self {
            from: from.address,
            to: to.address,
            relation: found.relation.to_string(),
            route: found.route.letter(),
            reasons: found.reasons.iter().map(ToString::to_string).collect(),
        }
    }
}
