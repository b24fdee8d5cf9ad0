//! What a machine's process gives up before its guest runs: the locks of its slices, its user, and system calls.

use std::sync::Arc;

use crate::custody::Keeper;
use crate::error::Report;
use crate::plan::Plan;
use crate::reserve::Leases;
use crate::sandbox::{Mode, Openings, Sandbox};
use crate::user::{self, User};

/// How a machine's process is confined while its guest runs.
pub(crate) struct Confined {
    /// The unprivileged user that it becomes.
    user: Option<User>,
    /// The process that returns its slices.
    keeper: Option<Keeper>,
    mode: Mode,
}

impl Confined {
    /// With the user `name`, by name or number; `keeper` is the descriptor of the process that started this one.
    ///
    /// # Errors
    /// An unknown user, and a descriptor that is not a keeper's.
    pub(crate) fn new(name: Option<&str>, keeper: Option<i32>, mode: Mode) -> Result<Self, Box<dyn Report>> {
        if name.is_some() {
            user::gain_nothing()?;
        }
        let user = name.map(User::find).transpose()?;
        Ok(Self { user, keeper: keeper.map(Keeper::connect).transpose()?, mode })
    }

    /// Number of the user that runs the machine.
    pub(crate) fn uid(&self) -> u32 {
        self.user.as_ref().map_or_else(|| rustix::process::geteuid().as_raw(), User::uid)
    }

    /// Whether the machine becomes another user's.
    pub(super) const fn is_of_user(&self) -> bool {
        self.user.is_some()
    }

    /// Whether another process returns the machine's slices.
    pub(super) const fn has_keeper(&self) -> bool {
        self.keeper.is_some()
    }

    /// What becomes of system calls.
    pub(super) const fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether the process can change the ledger after its guest has run.
    pub(super) const fn keeps_ledger(&self) -> bool {
        self.user.is_none() && !self.mode.is_on()
    }

    /// Hands the locks of `leases` over to the keeper, which returns the slices from now on.
    ///
    /// # Errors
    /// The keeper has ended.
    pub(super) fn hand_over(&self, leases: &Leases) -> Result<(), Box<dyn Report>> {
        match &self.keeper {
            Some(keeper) => Ok(keeper.hand_over(leases.own(), self.uid())?),
            None => Ok(()),
        }
    }

    /// Drops the privileges that the machine's user lacks. From now on the process ends with its keeper.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn drop_privileges(&self) -> Result<(), Box<dyn Report>> {
        match (&self.user, &self.keeper) {
            (Some(user), Some(keeper)) => Ok(user.become_this(keeper.process())?),
            (None, Some(keeper)) => Ok(user::follow(keeper.process())?),
            (_, None) => Ok(()),
        }
    }

    /// Encloses every thread but this one, and returns the walls for vCPUs and this thread; `None` without a sandbox.
    ///
    /// # Errors
    /// [`crate::sandbox::SandboxError`].
    pub(super) fn enclose(
        &self,
        plan: &Plan,
        leases: &Leases,
    ) -> Result<Option<Arc<Sandbox>>, Box<dyn Report>> {
        let openings = Openings { broker: leases.has_broker(), egm_device: leases.has_egm_device() };
        let sandbox = Sandbox::new(self.mode, plan, openings)?;
        if let Some(sandbox) = &sandbox {
            sandbox.enclose_others()?;
        }
        Ok(sandbox)
    }
}
