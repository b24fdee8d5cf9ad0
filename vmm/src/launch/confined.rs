//! A machine that becomes an unprivileged user's before its guest runs.

use crate::custody::Keeper;
use crate::error::Report;
use crate::reserve::Leases;
use crate::user::{self, User};

/// The user of a machine, and the process that returns its slices.
pub(crate) struct Confined {
    user: User,
    keeper: Keeper,
}

impl Confined {
    /// For user `name`, by name or number; `keeper` is the descriptor of the process that started this one.
    ///
    /// # Errors
    /// An unknown user, and a descriptor that is not a keeper's.
    pub(crate) fn new(name: &str, keeper: i32) -> Result<Self, Box<dyn Report>> {
        user::gain_nothing()?;
        Ok(Self { user: User::find(name)?, keeper: Keeper::connect(keeper)? })
    }

    /// Number of the user.
    pub(crate) fn uid(&self) -> u32 {
        self.user.uid()
    }

    /// Hands the locks of `leases` over to the keeper, which returns the slices from now on.
    ///
    /// # Errors
    /// The keeper has ended.
    pub(super) fn hand_over(&self, leases: &Leases) -> Result<(), Box<dyn Report>> {
        Ok(self.keeper.hand_over(leases.own(), self.uid())?)
    }

    /// Drops all privileges.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn drop_privileges(&self) -> Result<(), Box<dyn Report>> {
        Ok(self.user.become_this(self.keeper.process())?)
    }
}
