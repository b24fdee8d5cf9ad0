//! Closes the files of slices once their memory is mapped and registered.
//!
//! A mapping keeps the memory. Where the slices of a region share one file, that file would give every tenant's bytes
//! to an attacker from inside the guest.

use std::io;

use egm_device::Backing as _;
use egm_device::close::Closing;
use egm_device::region::RegionKind;

use super::leases::{Leases, Named};
use crate::error::{Blame, Remedy, Report};
use crate::plan::Plan;

/// Why descriptors of a slice stay open.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CloseError {
    #[error("cannot close the files of the machine's slices")]
    Close(#[from] io::Error),
    /// A function of this process needs the file while the guest runs.
    #[error(
        "cannot run the machine as another user: slice \"{id}\" is a PCI function, which keeps the file of all slices of \"{region}\""
    )]
    Needed { id: String, region: String },
}

impl Report for CloseError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Close(_) => Blame::Host.into(),
            Self::Needed { .. } => {
                Blame::Configuration.help("set \"as\": \"memory\" for it, or leave out --user")
            }
        }
    }
}

/// A slice, and what decides whether its file is closed.
struct SliceFile<'a> {
    named: &'a Named,
    /// Whether it is the file of other slices too.
    is_shared: bool,
    /// Whether the region reports retired pages through it.
    has_list: bool,
    /// Whether a PCI function of the machine keeps it.
    is_device: bool,
}

impl<'a> SliceFile<'a> {
    fn of(named: &'a Named, plan: &Plan) -> Self {
        let kind = &named.taken.region().kind;
        Self {
            named,
            is_shared: kind.shares_file(),
            has_list: matches!(kind, RegionKind::Egm { .. }),
            is_device: plan.backings.iter().any(|backing| backing.id == named.id && backing.device),
        }
    }
}

impl Leases {
    /// Refuses a machine of another user that could not close the file of a region.
    ///
    /// # Errors
    /// [`CloseError::Needed`].
    pub(crate) fn check_confinable(&self, plan: &Plan) -> Result<(), CloseError> {
        let all = self.all();
        let mut files = all.iter().map(|named| SliceFile::of(named, plan));
        match files.find(|file| file.is_shared && file.is_device) {
            Some(SliceFile { named, .. }) => {
                let (id, region) = (named.id.clone(), named.taken.region().name.clone());
                Err(CloseError::Needed { id, region })
            }
            None => Ok(()),
        }
    }

    /// Closes the files of whole regions that the machine of `plan` needs no more, its memory being mapped and registered. It
    /// runs as the user that started it: root, which could open them again, and reads lists of retired pages from them. Returns
    /// notes for the operator.
    ///
    /// # Errors
    /// [`CloseError::Close`].
    pub(crate) fn close_files(&self, plan: &Plan) -> Result<Vec<String>, CloseError> {
        self.close_except(plan, |file| !file.is_shared || file.has_list || file.is_device)
    }

    /// Closes all files but those of single slices that a function keeps, or `has_servers` receive, for a machine that becomes
    /// an unprivileged user's. Returns notes for the operator.
    ///
    /// # Errors
    /// [`CloseError::Close`].
    pub(crate) fn close_files_for_user(
        &self,
        plan: &Plan,
        has_servers: bool,
    ) -> Result<Vec<String>, CloseError> {
        let mut notes = self.close_except(plan, |file| !file.is_shared && (has_servers || file.is_device))?;
        let all = self.all();
        let unwatched = all.iter().filter(|named| SliceFile::of(named, plan).has_list).map(|named| {
            format!(
                "pages of \"{}\" that the host retires while the guest runs are not noticed: the user has no descriptor of \
                 region \"{}\"",
                named.id,
                named.taken.region().name
            )
        });
        notes.extend(unwatched);
        Ok(notes)
    }

    fn close_except(
        &self,
        plan: &Plan,
        keeps: impl Fn(&SliceFile<'_>) -> bool,
    ) -> Result<Vec<String>, CloseError> {
        let (mut closing, mut kept, mut notes) = (Closing::default(), Closing::default(), Vec::new());
        for named in &self.all() {
            let file = SliceFile::of(named, plan);
            if !keeps(&file) {
                closing.add(named.taken.file())?;
                continue;
            }
            kept.add(named.taken.file())?;
            if file.is_shared {
                notes.push(format!(
                    "\"{}\" keeps the file of all slices of \"{}\" open while the guest runs",
                    named.id,
                    named.taken.region().name
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
        self.map_own(|_, lease| closing.add(lease.claim())).into_iter().collect::<Result<(), _>>()?;
        closing.close()?;
        Ok(())
    }
}
