//! The plan of a machine together with its slices: each depends on the other.

use crate::config::Spec;
use crate::error::Report;
use crate::facts::{Facts, FactsError, Scope, of_host};
use crate::machine::{GuestView, UpgradeError, check_view};
use crate::plan::{self, Plan};
use crate::reserve::{ATTEMPTS, Broker, Leases, ReserveError, SliceProgress};

/// A machine's plan, the host that it was made for, and the slices that it names.
#[derive(Debug)]
pub struct Placement {
    /// Facts that the plan was made for.
    pub facts: Facts,
    /// Final: no later phase changes it.
    pub plan: Plan,
    /// Slices as the plan has them.
    pub leases: Leases,
}

impl Placement {
    /// Plans the machine of `spec` and takes its slices; again, with new facts of the host, when another process takes one
    /// of them first.
    ///
    /// # Errors
    /// [`ReserveError`]; nothing stays taken.
    pub fn take(
        spec: &Spec,
        read_facts: impl Fn() -> Result<Facts, FactsError>,
        progress: SliceProgress<'_>,
    ) -> Result<Self, ReserveError> {
        for attempt in 1..=ATTEMPTS {
            let mut facts = read_facts()?;
            let mut plan = plan::plan(spec, &facts)?;
            let leases = match Leases::take(spec, &plan.backings, &facts, progress) {
                Err(error) if error.is_lost_race() && attempt < ATTEMPTS => continue,
                taken => taken?,
            };
            // Some kernels report retired pages only through the open region: they become holes of guest memory.
            if leases.add_retired(&mut facts) {
                plan = plan::plan(spec, &facts)?;
            }
            if leases.are_those_of(&plan.backings) {
                return Ok(Self { facts, plan, leases });
            }
        }
        Err(ReserveError::Moved { attempts: ATTEMPTS })
    }

    /// Takes the slices of `spec` that `broker` grants, and plans the machine around them. `waiting` is called with a slice
    /// that must wait, and the reason.
    ///
    /// # Errors
    /// [`ReserveError`]; slices granted until then are returned.
    pub fn borrow(
        spec: &Spec,
        read_facts: impl Fn() -> Result<Facts, FactsError>,
        broker: &Broker,
        waiting: &dyn Fn(&str, &str),
    ) -> Result<Self, ReserveError> {
        let granted = broker.borrow(spec, waiting)?;
        let (mut pinned, mut facts) = (spec.clone(), read_facts()?);
        let notes = granted.pin(&mut pinned, &mut facts);
        let mut plan = plan::plan(&pinned, &facts)?;
        plan.notes.extend(notes);
        Ok(Self { facts, plan, leases: granted.into_leases()? })
    }
}

/// Checks that this program would plan the machine of `spec` as its guest knows it, while that runs in another execution.
///
/// # Errors
/// The host has changed, or this program plans otherwise.
pub(crate) fn rehearse(spec: &Spec, view: &GuestView) -> Result<(), Box<dyn Report>> {
    let facts = of_host(&Scope::of(spec))?.with_all_memory_free();
    let plan = plan::plan(spec, &facts)?;
    check_view(view, &plan).map_err(|mismatch| UpgradeError::State(mismatch.into()))?;
    Ok(())
}
