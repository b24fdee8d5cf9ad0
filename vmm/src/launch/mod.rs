//! The start of a machine, phase by phase: each phase is a type that consumes the one before it.
//!
//! ```text
//!            ┌─ again, when a planned slice is taken ─┐
//!  Spec ─► Facts ─► Plan ─► Leases ───────────────────┴─► Reserved ─► Opened ─► Built ─► Ended
//!          host             scrubbed                      GPUs,       Resources Machine  ExitReason
//!                                                         servers
//! ```
//! Side effects start in `Reserved`; the loop is [`Placement::take`]. Whatever ends the start, and the machine, drops what
//! it reserved: that releases its GPUs, then scrubs and returns its slices. After the plan no phase decides anything.

mod confined;
mod placement;
mod reservation;
mod restored;
mod unplugged;

use std::sync::Arc;

use egm_device::progress::Bars;
use egm_report::progress::Bar;
use rustix::process::geteuid;

pub(crate) use self::confined::Confined;
pub use self::placement::Placement;
pub(crate) use self::placement::rehearse;
pub(crate) use self::reservation::Reservation;
pub(crate) use self::restored::Restored;
use crate::api::Journal;
use crate::config::Spec;
use crate::error::Report;
use crate::facts::{self, Facts, Scope};
use crate::lock::lock;
use crate::machine::{self, HandOver, Live, Machine, MachineStep};
use crate::memory::{Beginning, Present};
use crate::plan::{self, Plan};
use crate::reserve::{Broker, Granter, Leases, Servers};
use crate::resources::{self, Resources};
use crate::sandbox;

type Outcome<T> = Result<T, Box<dyn Report>>;

/// A machine's plan, and what the host has reserved for it.
pub(crate) struct Reserved {
    spec: Spec,
    plan: Plan,
    servers: Servers,
    broker: Option<Broker>,
    confined: Confined,
    held: Reservation,
}

impl Reserved {
    /// Plans the machine of `spec` and reserves its slices, its GPUs and its vfio-user servers. A machine that `has_memory`
    /// already needs none of the host's. `waiting` is called with a slice that the broker does not grant yet, and the reason.
    ///
    /// # Errors
    /// Anything that the host lacks; nothing stays reserved.
    pub(crate) fn of(
        spec: &Spec,
        broker: Option<&Broker>,
        confined: Confined,
        has_memory: bool,
        waiting: &dyn Fn(&str, &str),
    ) -> Outcome<Self> {
        let is_returned_here = broker.is_none() && !confined.has_keeper();
        sandbox::check(confined.mode(), spec, is_returned_here)?;
        let servers = Servers::of(&spec.devices)?;
        let scope = Scope::of(spec);
        if let Scope::Only { regions: true, .. } = scope {
            // Another machine's files need not be here.
            plan::check_architecture(spec.arch, facts::architecture_of_host()?)?;
            resources::check_boot(&spec.boot)?; // before minutes of scrubbing; other machines open the files a moment later
        }
        let free = |facts: Facts| if has_memory { facts.with_all_memory_free() } else { facts };
        let read_facts =
            || facts::of_host(&scope).map(|facts| free(Facts { servers: servers.facts(), ..facts }));
        let bars = Bars::default();
        let Placement { facts, plan, leases } = match broker {
            None => Placement::take(spec, read_facts, &|slice, step| bars.report(slice, step))?,
            Some(broker) => Placement::borrow(spec, read_facts, broker, waiting)?,
        };
        drop(bars);
        plan.notes.iter().for_each(|note| tracing::info!("{note}"));
        leases.publish(&plan);
        let mut held = Reservation::new(facts, leases);
        // The broker claims the GPUs that its client's user may open.
        if broker.is_none() || geteuid().is_root() {
            held.claim_gpus(&plan, spec.trust_domain.as_deref(), &confined)?;
        }
        Ok(Self { spec: spec.clone(), plan, servers, broker: broker.cloned(), confined, held })
    }

    /// Makes ordinary memory private, so that it is read from a snapshot as the guest touches it: the last change of the plan.
    pub(crate) fn on_demand(mut self) -> Self {
        plan::make_private(&mut self.plan.backings);
        self
    }

    /// The plan, which no later phase changes.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The slices of the machine.
    pub(crate) fn slices(&self) -> &Leases {
        self.held.leases()
    }

    /// Opens every descriptor that the plan names, and makes memory present where devices reach it.
    ///
    /// # Errors
    /// [`resources::ResourceError`], and `crate::reserve::CloseError` for a machine that cannot run as its user.
    pub(crate) fn open(self, beginning: Beginning<'_>) -> Outcome<Opened> {
        let Self { spec, plan, servers, broker, confined, held } = self;
        if confined.is_of_user() {
            held.leases().check_confinable(&plan)?;
        }
        let bar = Bar::new("memory present");
        let progress = |done, total| bar.report(done, total);
        let resources =
            Resources::open_with(&plan, held.facts(), held.leases(), servers, beginning, &progress)?;
        Ok(Opened { spec, plan, resources, broker, confined, held })
    }
}

/// A machine's open resources.
pub(crate) struct Opened {
    spec: Spec,
    plan: Plan,
    // Closed before the slices are returned.
    resources: Resources,
    broker: Option<Broker>,
    confined: Confined,
    held: Reservation,
}

impl Opened {
    /// Guest memory that is touched already; `None` where nothing is.
    pub(crate) fn present(&self) -> Option<&Present> {
        self.resources.present.as_ref()
    }

    /// Path of the console's terminal, if it is a pseudo-terminal.
    pub(crate) fn pty_name(&self) -> Option<String> {
        self.resources.console.pty_name()
    }

    /// Builds the machine, with its events in `journal`. Afterwards this process has no file of a region that it does not
    /// need, and only the privileges of the machine's user. In a sandbox, all its threads but this one are confined. The machine
    /// is in the state of `restored`, if it begins with a snapshot.
    ///
    /// # Errors
    /// [`machine::BuildError`], [`crate::snapshot::RestoreError`], [`sandbox::SandboxError`], and what the kernel refuses.
    pub(crate) fn build(self, restored: Option<&Restored>, journal: &Arc<Journal>) -> Outcome<Built> {
        let Self { spec, plan, resources, broker, confined, held } = self;
        let mut machine = machine::build(&plan, resources, journal)?.with_configuration(spec.clone());
        if !confined.is_of_user() {
            machine.live().set_granter(Granter::new(spec, broker, held.leases().clone()));
        }
        if let Some(restored) = restored {
            machine = machine.restored(restored.state()).map_err(|reason| restored.failed(reason))?;
        }
        held.leases().record_process(confined.uid())?;
        let notes = match confined.is_of_user() {
            false => held.leases().close_files(&plan)?,
            true => held.leases().close_files_for_user(&plan, !held.facts().servers.is_empty())?,
        };
        notes.iter().for_each(|note| tracing::info!("{note}"));
        held.enter(&confined)?;
        let sandbox = confined.confine(&plan, held.leases())?;
        Ok(Built { machine: machine.within(sandbox), journal: Arc::clone(journal), held })
    }
}

/// A machine that is ready to run.
pub(crate) struct Built {
    machine: Machine,
    journal: Arc<Journal>,
    held: Reservation,
}

impl Built {
    /// Access to the machine from other threads.
    pub(crate) fn live(&self) -> Live {
        self.machine.live()
    }

    /// Runs the guest to its end, and calls `step` after each step and `hand_over` at the request of an upgrade. The
    /// machine's reservation ends when the second value is dropped.
    pub(crate) fn run(
        self,
        step: &dyn Fn(MachineStep),
        hand_over: HandOver<'_>,
    ) -> (machine::Ended, Reservation) {
        let Self { machine, journal, held } = self;
        let (live, waiting) = (machine.live(), machine.unplugged());
        let step = |now| {
            step(now);
            if now == MachineStep::Resumed {
                let devices = std::mem::take(&mut *lock(&waiting));
                devices.iter().for_each(|device| unplugged::plug(device, &live, &journal));
            }
        };
        let ended = machine.run_upgradable(&step, hand_over);
        (ended, held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Mode;

    fn name<T>() -> &'static str {
        std::any::type_name::<T>().rsplit("::").next().unwrap()
    }

    #[test]
    fn the_picture_of_the_program_names_each_phase_in_its_order() {
        // Compiles only while each phase is made from the one before it.
        let _: fn(&Spec) -> Outcome<Reserved> =
            |spec| Reserved::of(spec, None, Confined::new(None, None, Mode::Off)?, false, &|_, _| ());
        let _: fn(Reserved) -> Outcome<Opened> = |reserved| reserved.open(Beginning::Kernel);
        let _: fn(Opened, &Arc<Journal>) -> Outcome<Built> = |opened, journal| opened.build(None, journal);
        type Run = fn(Built, &dyn Fn(MachineStep), HandOver<'_>) -> (machine::Ended, Reservation);
        let _: Run = Built::run;
        let phases =
            [name::<Spec>(), name::<Reserved>(), name::<Opened>(), name::<Built>(), name::<machine::Ended>()];
        let picture = format!("File ─► {}", phases.join(" ─► "));
        assert!(include_str!("../lib.rs").contains(&picture), "{picture}");
        let page = include_str!("../../../docs/architecture.md");
        let row = page.lines().find(|line| line.starts_with(" file ")).unwrap();
        let words: Vec<&str> = row.split_whitespace().filter(|word| word.is_ascii()).skip(1).collect();
        assert_eq!(words, phases);
    }
}
