//! Step 1: what the specification wants of this host.
//!
//! | file | content |
//! |---|---|
//! | `cpus` | vCPU ids, topology, pinning |
//! | `regions` | which region of the host an EGM slice comes from, and where in it |
//! | `devices` | BARs and vectors of each device; `near`: the guest node that a host function is near to |
//! | `data_direct` | pairs of functions, and GPU BARs that they address |
//! | `backings` | memory of the host behind the guest's; `pages`: its pages, and why not larger ones |
//! | `host_memory` | whether the host has that memory, and free |

pub(super) mod backings;
pub(super) mod cpus;
mod data_direct;
pub(super) mod devices;
pub(super) mod host_memory;
mod near;
pub(super) mod pages;
pub(super) mod regions;

use egm_vfio::host::HostFunction;

use self::devices::DeviceDemand;
use self::regions::Source;
use crate::arch::{Layout, layout_of};
use crate::config::Spec;
use crate::facts::Facts;
use crate::plan::{BackingPlan, PlanError, VcpuPlan};

/// A machine's needs, and the parts of the host that serve them.
pub(super) struct Demand<'a> {
    pub(super) spec: &'a Spec,
    pub(super) facts: &'a Facts,
    pub(super) layout: &'static Layout,
    pub(super) vcpus: Vec<VcpuPlan>,
    /// Source of each EGM slice.
    pub(super) sources: Vec<Source>,
    /// Needs of each device, in the order of the configuration.
    pub(super) devices: Vec<DeviceDemand<'a>>,
    /// Memory of the nodes, then of the slices.
    pub(super) backings: Vec<BackingPlan>,
    /// Notes on small pages.
    pub(super) small_pages: Vec<String>,
    /// Notes on functions without the other of their Data Direct pair.
    pub(super) unpaired: Vec<String>,
}

impl<'a> Demand<'a> {
    /// The needs of `spec` on the host that `facts` describes.
    pub(super) fn of(spec: &'a Spec, facts: &'a Facts) -> Result<Self, PlanError> {
        let layout = layout_of(spec.arch);
        cpus::check_host(spec, facts)?;
        let vcpus = cpus::plan(spec, layout)?;
        cpus::check_pinning(&vcpus, facts)?;
        regions::check_gpus(spec, facts)?;
        let sources = regions::choose(spec, facts)?;
        let mut devices = devices::of(spec, facts, &sources)?;
        let unpaired = data_direct::decide(facts, &mut devices)?;
        let mut backings = backings::of(spec, &sources);
        let small_pages = pages::decide(spec, facts, &mut backings);
        Ok(Self { spec, facts, layout, vcpus, sources, devices, backings, small_pages, unpaired })
    }

    /// The host functions of the machine.
    pub(super) fn hosts(&self) -> impl Iterator<Item = &'a HostFunction> {
        self.devices.iter().filter_map(|one| one.host)
    }

    /// Checks that the host has the machine's memory, and may share it; returns notes on memory that it has, but not free.
    /// Separate, because memory that fits into no guest is reported first.
    pub(super) fn check_memory(&self) -> Result<Vec<String>, PlanError> {
        backings::check(self.spec, self.facts, &self.backings)
    }
}
