//! Rows for all that the machine of a configuration needs, but its host functions.
//!
//! A row shows what a launch would find. What only the host itself could show is not judged from a record of it.

use std::path::Path;

use egm_report::show::size;
use egm_vfio::dma::Memlock;
use rustix::process::geteuid;

use super::inspect::{self, Finding};
use super::memory;
use super::proc_tables::ProcTables;
use super::row::Row;
use crate::config::{Device, DeviceKind, Spec};
use crate::error::Report;
use crate::facts::{Facts, Probe};
use crate::kvm::Hypervisor;
use crate::plan::{Plan, PlanError};

/// Reason for rows without a judgement.
const RECORDED: &str = "recorded host";
/// Exists while kvm_pvm is loaded.
const KVM_PVM: &str = "/sys/module/kvm_pvm";

/// A machine, and the host that it is judged against.
pub(super) struct Machine<'a> {
    pub(super) spec: &'a Spec,
    pub(super) facts: &'a Facts,
    pub(super) plan: Result<&'a Plan, &'a PlanError>,
    /// Whether the host is this one.
    pub(super) is_here: bool,
}

/// An item that a launch opens, or that only the running host shows.
enum Item<'a> {
    Kvm,
    Kernel,
    Initramfs,
    Console,
    Device(&'a Device),
}

impl Machine<'_> {
    /// A row for each item that the machine needs.
    pub(super) fn rows(&self) -> Vec<Row> {
        let tables = self.is_here.then(ProcTables::read);
        let mut rows = self.planned();
        rows.extend(self.items().iter().filter_map(|item| match &tables {
            Some(tables) => self.inspected(item, tables),
            None => self.recorded(item),
        }));
        let Ok(plan) = self.plan else {
            rows.push(Row::not_judged("memory", "there is no plan"));
            return rows;
        };
        let takes_slices = !self.is_here || geteuid().is_root();
        rows.extend(memory::rows(plan, self.facts, takes_slices));
        rows.extend(self.locked_memory(plan));
        rows
    }

    /// The plan and its notes, or why there is none.
    fn planned(&self) -> Vec<Row> {
        let plan = match self.plan {
            Ok(plan) => plan,
            Err(error) => return vec![Row::failed("plan", error)],
        };
        let memory = plan.backings.iter().fold(0u64, |sum, backing| sum.saturating_add(backing.size));
        let found = format!("vCPUs: {}; memory: {}", plan.vcpus.len(), size(memory));
        let notes = plan.notes.iter().map(|note| Row::note("plan", note, None));
        std::iter::once(Row::ok("plan", found)).chain(notes).collect()
    }

    fn items(&self) -> Vec<Item<'_>> {
        let initramfs = self.spec.boot.initramfs.as_ref().map(|_| Item::Initramfs);
        let first = [Item::Kvm, Item::Kernel].into_iter().chain(initramfs).chain([Item::Console]);
        first.chain(self.spec.devices.iter().map(Item::Device)).collect()
    }

    /// `None` for a device that needs nothing which is judged here.
    fn inspected(&self, item: &Item<'_>, tables: &ProcTables) -> Option<Row> {
        let subject = item.subject()?;
        let boot = &self.spec.boot;
        let found = match item {
            // The plan refuses a guest of another architecture.
            Item::Kernel if self.spec.arch != self.facts.arch => {
                return Some(Row::not_judged(subject, "it is not for this host's processors"));
            }
            Item::Kernel => inspect::kernel(&boot.kernel),
            Item::Initramfs => inspect::initramfs(boot.initramfs.as_deref()?),
            Item::Kvm => kvm(),
            Item::Console => inspect::console(&self.spec.console, tables).map_err(Into::into),
            Item::Device(device) => inspect::device(device, tables)?,
        };
        Some(Row::inspected(subject, found))
    }

    fn recorded(&self, item: &Item<'_>) -> Option<Row> {
        let subject = item.subject()?;
        Some(match (item, &self.facts.kvm) {
            (Item::Kvm, Probe::Present(kvm)) => {
                Row::ok(subject, format!("at most {} vCPUs, as recorded", kvm.max_vcpus))
            }
            (Item::Kvm, Probe::Absent(reason)) => Row::not_judged(subject, format!("{RECORDED}: {reason}")),
            _ => Row::not_judged(subject, RECORDED),
        })
    }

    /// The limit of this process on what devices reach; `None` without host functions.
    fn locked_memory(&self, plan: &Plan) -> Option<Row> {
        let pinned = plan.passthrough.as_ref()?.pinned;
        let (subject, found) = ("locked memory", format!("the machine pins {}", size(pinned)));
        if !self.is_here {
            return Some(Row::not_judged(subject, format!("{RECORDED}; {found}")));
        }
        let memlock = Memlock::of_process();
        Some(match memlock.check(pinned) {
            Err(error) => Row::lacking(subject, error.to_string(), error.remedy()),
            Ok(()) => {
                let limit = memlock.limit.map_or_else(|| "no limit".to_owned(), size);
                Row::ok(subject, format!("{found}; this user's limit: {limit}"))
            }
        })
    }
}

impl Item<'_> {
    /// The name of its row; `None` for devices that open nothing of their own.
    fn subject(&self) -> Option<String> {
        let kind = match self {
            Self::Kvm => return Some("KVM".to_owned()),
            Self::Kernel => return Some("kernel".to_owned()),
            Self::Initramfs => return Some("initramfs".to_owned()),
            Self::Console => return Some("console".to_owned()),
            Self::Device(device) => match device.kind {
                DeviceKind::VirtioBlk { .. } => "disk",
                DeviceKind::VirtioNet { .. } => "network",
                DeviceKind::VirtioVsock { .. } => "vsock",
                DeviceKind::VfioUser { .. } => "server",
                DeviceKind::VirtioRng | DeviceKind::Vfio { .. } | DeviceKind::Egm { .. } => return None,
            },
        };
        let Self::Device(device) = self else { return None };
        Some(format!("{kind} \"{}\"", device.id))
    }
}

fn kvm() -> Result<Finding, Box<dyn Report>> {
    let hypervisor = Hypervisor::open()?;
    Ok(kvm_with(hypervisor.max_vcpus(), Path::new(KVM_PVM).exists()))
}

/// A KVM with at most `max_vcpus` vCPUs; `is_pvm`: its module is `kvm_pvm`.
fn kvm_with(max_vcpus: usize, is_pvm: bool) -> Finding {
    let found = format!("/dev/kvm: at most {max_vcpus} vCPUs");
    if !is_pvm {
        return Finding::Ready(found);
    }
    Finding::Remark {
        found: format!("{found}; kvm_pvm emulates guest kernel code, and stock kernels do not start"),
        help: Some("use a host with hardware virtualization, or the lab: egm-lab run-config FILE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kvm_that_starts_no_stock_kernel_has_a_remark() {
        assert_eq!(kvm_with(8, false), Finding::Ready("/dev/kvm: at most 8 vCPUs".to_owned()));
        match kvm_with(8, true) {
            Finding::Remark { found, help: Some(help) } => {
                assert!(
                    found.contains("stock kernels do not start") && help.contains("egm-lab run-config"),
                    "{found}"
                );
            }
            other => panic!("{other:?}"),
        }
    }
}
