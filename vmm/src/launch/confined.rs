//! What a machine's process gives up before its guest runs: the locks of its slices, its user, and system calls.

use std::path::PathBuf;
use std::sync::Arc;

use crate::custody::Keeper;
use crate::error::Report;
use crate::plan::Plan;
use crate::reserve::Leases;
use crate::sandbox::{self, KeptDescriptors, Mode, Sandbox};
use crate::user::{self, User, UserError};

/// How a machine's process is confined while its guest runs.
pub(crate) struct Confined {
    custody: Custody,
    mode: Mode,
    /// Path of the control API's socket, which the process removes at its end.
    api: Option<PathBuf>,
}

/// The process that returns a machine's slices. Only a machine with a keeper can become another user's.
enum Custody {
    /// The machine's own, as the user that started it.
    Own,
    /// The keeper, and the unprivileged user that the machine becomes, if any.
    Kept { keeper: Keeper, user: Option<User> },
}

impl Confined {
    /// For the user `name` (a name or number); `keeper` is a descriptor's number in the process that started this one.
    ///
    /// # Errors
    /// An unknown user, a descriptor that is not a keeper's, and a user without a keeper.
    pub(crate) fn new(name: Option<&str>, keeper: Option<i32>, mode: Mode) -> Result<Self, Box<dyn Report>> {
        let custody = match (name, keeper) {
            (None, None) => Custody::Own,
            (Some(_), None) => return Err(Box::new(UserError::NoKeeper)),
            (name, Some(keeper)) => {
                if name.is_some() {
                    user::gain_nothing()?;
                }
                let user = name.map(User::find).transpose()?;
                Custody::Kept { keeper: Keeper::connect(keeper)?, user }
            }
        };
        Ok(Self { custody, mode, api: None })
    }

    /// With the control API at `api`, if there is one.
    pub(crate) fn with_api(self, api: Option<PathBuf>) -> Self {
        Self { api, ..self }
    }

    /// The user that the machine becomes, if any.
    const fn user(&self) -> Option<&User> {
        match &self.custody {
            Custody::Own => None,
            Custody::Kept { user, .. } => user.as_ref(),
        }
    }

    /// Number of the user that runs the machine.
    pub(crate) fn uid(&self) -> u32 {
        self.user().map_or_else(|| rustix::process::geteuid().as_raw(), User::uid)
    }

    /// Whether the machine becomes another user's.
    pub(super) const fn is_of_user(&self) -> bool {
        self.user().is_some()
    }

    /// Whether another process returns the machine's slices.
    pub(super) const fn has_keeper(&self) -> bool {
        matches!(self.custody, Custody::Kept { .. })
    }

    /// What becomes of system calls.
    pub(super) const fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether the process can change the ledger after its guest has run.
    pub(super) const fn keeps_ledger(&self) -> bool {
        !self.is_of_user() && !self.mode.is_on()
    }

    /// Hands the locks of `leases` over to the keeper, which returns the slices from now on.
    ///
    /// # Errors
    /// The keeper has ended.
    pub(super) fn hand_over(&self, leases: &Leases) -> Result<(), Box<dyn Report>> {
        match &self.custody {
            Custody::Kept { keeper, .. } => Ok(keeper.hand_over(leases, self.uid())?),
            Custody::Own => Ok(()),
        }
    }

    /// Drops the privileges that the machine's user lacks; the process then ends with its keeper. For another user or with
    /// [`Mode::Strict`], no mapping can move to other bytes of its file any more.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn drop_privileges(&self) -> Result<(), Box<dyn Report>> {
        if self.is_of_user() || self.mode == Mode::Strict {
            sandbox::keep_mappings()?;
        }
        match &self.custody {
            Custody::Kept { keeper, user: Some(user) } => Ok(user.become_this(keeper.process())?),
            Custody::Kept { keeper, user: None } => Ok(user::follow(keeper.process())?),
            Custody::Own => Ok(()),
        }
    }

    /// Confines every thread but this one, and returns the restrictions for vCPUs and this thread; `None` without a sandbox.
    ///
    /// # Errors
    /// [`crate::sandbox::SandboxError`].
    pub(super) fn confine(
        &self,
        plan: &Plan,
        leases: &Leases,
    ) -> Result<Option<Arc<Sandbox>>, Box<dyn Report>> {
        let (broker, egm_device) = (leases.has_broker(), leases.has_egm_device());
        let kept = KeptDescriptors { broker, egm_device, api: self.api.as_deref() };
        let sandbox = Sandbox::new(self.mode, plan, kept)?;
        if let Some(sandbox) = &sandbox {
            sandbox.confine_others()?;
        }
        Ok(sandbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Blame;

    #[test]
    fn a_machine_of_a_user_without_a_keeper_is_refused() {
        let error = Confined::new(Some("65534"), None, Mode::Off).err().unwrap();
        assert_eq!(error.blame(), Blame::Internal);
        assert!(error.to_string().starts_with("cannot drop privileges: no other process"), "{error}");
        let own = Confined::new(None, None, Mode::Strict).ok().unwrap();
        assert_eq!((own.is_of_user(), own.has_keeper()), (false, false));
    }
}
