//! Findings of `egm-vmm check`: the JSON form, from which the text is made.

use egm_address::{PciAddress, PciAddressError};
use egm_vfio::host::HostFunction;
use egm_vfio::topology::{self, Express, Link, Reason};
use serde::Serialize;

use super::names;
use super::row::Row;
use crate::error::{Blame, Remedy, Report};

/// Arguments that are neither functions nor one file.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotOne {
    #[error(transparent)]
    Function(PciAddressError),
    #[error("cannot read {count} documents: --from takes one")]
    Documents { count: usize },
}

impl Report for NotOne {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help(match self {
            Self::Function(_) => "write host functions, or one configuration file that exists",
            Self::Documents { .. } => "name the document's file; \"-\" is standard input",
        })
    }
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Checked {
    /// Name of the machine, if a configuration is checked.
    pub(super) machine: Option<String>,
    /// The items that a machine needs, then the functions.
    pub(super) rows: Vec<Row>,
    /// Host functions that exist, by address.
    pub(super) functions: Vec<Function>,
    /// Each ordered pair of different functions.
    pub(super) peers: Vec<Peer>,
    pub(super) advice: Vec<String>,
    /// Bytes that the machine of a configuration pins.
    pub(super) pinned: Option<u64>,
}

/// A host function as tables and `--json` show it.
#[derive(Debug, Serialize)]
pub(super) struct Function {
    /// Kind, and position among those of the kind: `GPU0`.
    pub(super) name: String,
    pub(super) address: PciAddress,
    /// Vendor's name, if it is a usual one.
    pub(super) vendor: Option<&'static str>,
    /// Vendor and device id in hexadecimal: `10de:2335`.
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
    /// The same, for the text.
    #[serde(skip)]
    pub(super) causes: Vec<Reason>,
}

impl Checked {
    /// The functions at `wanted` among all `functions` of a host.
    pub(super) fn of_functions(functions: &[HostFunction], wanted: &[PciAddress]) -> Self {
        let mut wanted = wanted.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        let assigned: Vec<&HostFunction> =
            wanted.iter().filter_map(|address| topology::find(functions, *address)).collect();
        let names = names::names(&assigned);
        let described = assigned.iter().zip(&names);
        let described: Vec<Function> =
            described.map(|(function, name)| Function::new(functions, function, name)).collect();
        let pairs = assigned.iter().flat_map(|from| assigned.iter().map(move |to| (*from, *to)));
        let pairs = pairs.filter(|(from, to)| from.address != to.address);
        Self {
            rows: wanted.iter().map(|address| judge(functions, *address, &described)).collect(),
            peers: pairs.map(|(from, to)| Peer::new(functions, from, to)).collect(),
            advice: topology::advice(functions, &assigned).iter().map(ToString::to_string).collect(),
            functions: described,
            ..Self::default()
        }
    }

    /// The short name of the function at `address`; its address where it has none.
    pub(super) fn name(&self, address: PciAddress) -> String {
        name(&self.functions, address)
    }

    /// The rows of the machine.
    pub(super) fn items(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.function.is_none())
    }

    /// The rows of host functions.
    pub(super) fn judged(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.function.is_some())
    }
}

fn name(functions: &[Function], address: PciAddress) -> String {
    let position = functions.binary_search_by_key(&address, |function| function.address);
    let known = position.ok().and_then(|position| functions.get(position));
    known.map_or_else(|| address.to_string(), |function| function.name.clone())
}

/// Whether the function at `address` can be assigned to a guest now.
fn judge(all: &[HostFunction], address: PciAddress, described: &[Function]) -> Row {
    let subject = name(described, address);
    let row = match topology::usable(all, address) {
        Ok(()) => Row::ok(subject, format!("{address} can be assigned")),
        Err(error) => Row::lacking(subject, error.to_string(), Some(error.help())),
    };
    row.of_function(address)
}

impl Function {
    fn new(all: &[HostFunction], function: &HostFunction, name: &str) -> Self {
        let others = topology::members(all, function).filter(|other| !topology::is_bridge(other));
        let other = |other: &HostFunction| {
            format!("{} {}", other.address, other.driver.as_deref().unwrap_or("no driver"))
        };
        let acs = |bridge: &HostFunction| {
            let Express { acs, .. } = bridge.place.express?;
            Some(format!("{} {}", bridge.address, acs?))
        };
        Self {
            name: name.to_owned(),
            address: function.address,
            vendor: topology::vendor_name(function.vendor),
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
            causes: found.reasons,
        }
    }

    /// Relation and route; the root complex is the only route between root ports, and not named.
    pub(super) fn way(&self) -> String {
        match self.route {
            'C' => self.relation.clone(),
            route => format!("{} {route}", self.relation),
        }
    }
}
