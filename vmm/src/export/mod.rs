//! A machine's configuration in the words of other monitors.
//!
//! ```text
//!  vm.json ──egm-config──► Spec ────────────┐
//!                                           ├─guest─► Guest ──┬─► qemu, cloud_hypervisor   a command line
//!  this host, or a recorded one ──► Survey ─┘                 └─► libvirt                  XML
//! ```
//! Input is the configuration and the host, never egm-vmm's plan: other monitors decide addresses and windows for
//! themselves (`DESIGN.md` here). Nothing is opened but the configuration. A setting that a monitor cannot take becomes a note,
//! never a silent loss.
#![forbid(unsafe_code)]

mod cloud_hypervisor;
mod command;
mod figures;
mod guest;
mod libvirt;
mod load;
mod qemu;
mod words;

pub(crate) use command::Command;
pub(crate) use guest::Guest;
pub(crate) use load::load;

use std::collections::BTreeSet;

use egm_address::Quoted;
use egm_report::{Blame, Remedy, Report};

/// The monitors that a machine can be written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Monitor {
    /// Command line of cloud-hypervisor
    CloudHypervisor,
    /// Command line of QEMU
    Qemu,
    /// XML of a libvirt domain that QEMU runs
    Libvirt,
}

/// Differences between builds and hosts of one monitor.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    /// QEMU and libvirt as NVIDIA builds them.
    pub nvidia: bool,
    /// UEFI image for guests that need one.
    pub firmware: Option<String>,
}

/// A machine in a monitor's words.
#[derive(Debug, Clone)]
pub(crate) struct Export {
    /// Input of the monitor.
    pub output: Output,
    /// Settings that it does not get, and steps that must come first; a sentence each.
    pub notes: Vec<String>,
}

/// Input of a monitor.
#[derive(Debug, Clone)]
pub(crate) enum Output {
    Command(Command),
    /// A domain of libvirt.
    Xml(String),
}

impl Output {
    /// Refuses what a terminal obeys and XML cannot hold. Paths, names and command lines come from files of any origin.
    fn check(&self) -> Result<(), ExportError> {
        let has_control = |text: &&str| text.chars().any(|c| c.is_control() && c != '\n');
        let bad = match self {
            Self::Command(command) => command.words().find(has_control),
            Self::Xml(xml) => xml.lines().find(has_control),
        };
        bad.map_or(Ok(()), |text| Err(ExportError::Control { text: text.trim().to_owned() }))
    }
}

/// Settings that a monitor cannot express and cannot do without.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExportError {
    /// cloud-hypervisor's options have no escape for quotes.
    #[error("{text:?} has a double quote, which no option of cloud-hypervisor can hold")]
    Quote { text: String },
    /// A terminal would obey it, and XML cannot hold it.
    #[error("cannot export {}: it has a control character", Quoted(text))]
    Control {
        /// The argument, or the line of XML.
        text: String,
    },
    /// cloud-hypervisor maps files from their start.
    #[error("{id} begins at {offset:#x} of {path}: cloud-hypervisor maps a file from its start")]
    Offset {
        /// Name of the memory.
        id: String,
        path: String,
        /// First byte of the memory, counted in the file.
        offset: u64,
    },
    /// QEMU counts nodes from 0 to the last.
    #[error("there is a node {next} and no node {node}: QEMU's nodes, and libvirt's, have no gaps")]
    Gap {
        /// The first that is missing.
        node: u32,
        /// The one after it.
        next: u32,
    },
    /// libvirt's cells have memory of its own making, and come first.
    #[error("node {node} cannot be a cell of libvirt: those have memory, and numbers below all others")]
    Cell { node: u32 },
    /// The XML library refuses it.
    #[error("cannot write XML")]
    Xml(#[from] std::io::Error),
}

impl Report for ExportError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Quote { .. } => Blame::Configuration.help("rename the file"),
            Self::Control { .. } => {
                Blame::Configuration.help("remove it from the configuration or the recorded host")
            }
            Self::Cell { .. } => Blame::Configuration.help(
                "give nodes with processors memory, and slices of regions that are files the highest numbers",
            ),
            Self::Gap { node, next } => Blame::Configuration.help(format!(
                "make node {next} node {node} in \"memory\".\"nodes\" and \"egm\", and close up those after it"
            )),
            Self::Offset { .. } => Blame::Configuration.help(
                "write \"as\": \"device\", which a server shows as a PCI device, or export to QEMU, which maps from any offset",
            ),
            Self::Xml(_) => Blame::Internal.into(),
        }
    }
}

/// `guest` in the words of `monitor`.
///
/// # Errors
/// [`ExportError`], where the machine would be another one.
pub(crate) fn export(guest: &Guest, monitor: Monitor, options: &Options) -> Result<Export, ExportError> {
    let gap = (0_u32..).zip(&guest.nodes).find(|(number, node)| node.id != *number);
    if let (Monitor::Qemu | Monitor::Libvirt, Some((node, next))) = (monitor, gap) {
        return Err(ExportError::Gap { node, next: next.id });
    }
    let mut export = match monitor {
        Monitor::CloudHypervisor => cloud_hypervisor::export(guest)?,
        Monitor::Qemu => qemu::export(guest, options),
        Monitor::Libvirt => libvirt::export(guest, options)?,
    };
    export.output.check()?;
    let mut said = BTreeSet::new();
    export.notes.retain(|note| said.insert(note.clone()));
    Ok(export)
}
