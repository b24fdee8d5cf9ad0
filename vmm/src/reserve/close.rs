//! Closes the files of slices once their memory is mapped and registered.
//!
//! A mapping keeps the memory. Where the slices of a region share one file, that file would give every tenant's bytes
//! to an attacker from inside the guest.

use std::io;

use egm_device::close::Closing;
use egm_device::region::RegionKind;

use egm_device::Backing as _;

use super::leases::Leases;
use crate::error::{Blame, Report};
use crate::plan::Plan;

/// Why descriptors of a slice stay open.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// The kernel refused.
    #[error("cannot close the files of the machine's slices")]
    Close(#[from] io::Error),
    /// A function of this process needs the file while the guest runs.
    #[error(
        "cannot run the machine as another user: slice \"{id}\" is a PCI function, which keeps the file of all slices of \"{region}\""
    )]
    Needed {
        /// The backing.
        id: String,
        /// Its region.
        region: String,
    },
}

impl Report for CloseError {
    fn blame(&self) -> Blame {
        match self {
            Self::Close(_) => Blame::Host,
            Self::Needed { .. } => Blame::Configuration,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Close(_) => None,
            Self::Needed { .. } => Some("set \"as\": \"memory\" for it, or leave out --user".to_owned()),
        }
    }
}

/// User of the machine's process while the guest runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    /// The user that started it.
    AsIs,
    /// An unprivileged user, without files that are not needed.
    Confined,
}

impl Leases {
    /// Refuses a machine of another user that could not close the file of a region.
    ///
    /// # Errors
    /// [`CloseError::Needed`].
    pub(crate) fn check_confinable(&self, plan: &Plan) -> Result<(), CloseError> {
        let needed = self.iter().find(|(id, taken)| taken.region().kind.shares_file() && is_device(plan, id));
        match needed {
            Some((id, taken)) => {
                Err(CloseError::Needed { id: id.to_owned(), region: taken.region().name.clone() })
            }
            None => Ok(()),
        }
    }

    /// Closes the files of slices that the machine of `plan` needs no more, its memory being mapped and registered. Returns
    /// what the operator should know.
    ///
    /// # Errors
    /// [`CloseError::Close`].
    pub(crate) fn close_files(
        &self,
        plan: &Plan,
        has_servers: bool,
        runs: Runs,
    ) -> Result<Vec<String>, CloseError> {
        let (mut closing, mut kept, mut notes) = (Closing::default(), Closing::default(), Vec::new());
        for (id, taken) in self.iter() {
            let list = matches!(taken.region().kind, RegionKind::Egm { .. });
            let keeps = match (taken.region().kind.shares_file(), runs) {
                // Root could open it anyway, and reads the list of retired pages from it.
                (true, Runs::AsIs) => list || is_device(plan, id),
                (true, Runs::Confined) => false,
                (false, Runs::AsIs) => true,
                // The slice's own file: servers receive it.
                (false, Runs::Confined) => has_servers || is_device(plan, id),
            };
            match keeps {
                true => kept.add(taken.file())?,
                false => closing.add(taken.file())?,
            }
            if list && runs == Runs::Confined {
                notes.push(format!(
                    "pages of \"{id}\" that the host retires while the guest runs are not noticed: the user has no \
                     descriptor of region \"{}\"",
                    taken.region().name
                ));
            }
            if keeps && taken.region().kind.shares_file() {
                notes.push(format!(
                    "\"{id}\" keeps the file of all slices of \"{}\" open while the guest runs",
                    taken.region().name
                ));
            }
        }
        if !egm_address::fault!("region-file-kept") {
            closing.without(&kept).close()?;
        }
        Ok(notes)
    }

    /// Closes the locks of this process's slices, which another process holds.
    ///
    /// # Errors
    /// [`CloseError::Close`].
    pub(crate) fn close_locks(&self) -> Result<(), CloseError> {
        let mut closing = Closing::default();
        for (_, lease) in self.own() {
            closing.add(lease.claim())?;
        }
        closing.close()?;
        Ok(())
    }
}

fn is_device(plan: &Plan, id: &str) -> bool {
    plan.backings.iter().any(|backing| backing.id == id && backing.device)
}
