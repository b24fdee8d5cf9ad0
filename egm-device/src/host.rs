//! The host of a command: the arguments of all commands that read one.

use std::io;
use std::path::{Path, PathBuf};

use egm_report::{Blame, Remedy, Report};

use crate::ledger::{Ledger, Paths};
use crate::record;
use crate::region::{HostFile, Survey};

/// The host to read, or a record of another one
#[derive(Debug, clap::Args)]
pub struct Host {
    #[command(flatten)]
    local: LocalHost,
    /// Facts of another host, as "egm-vmm facts" recorded them there
    #[arg(long, alias = "recorded", value_name = "FILE", conflicts_with_all = ["root", "host_files"])]
    facts: Option<PathBuf>,
}

/// The host to read, with its ledger
#[derive(Debug, clap::Args)]
pub(crate) struct LocalHost {
    /// Folder of host files (*.json), which name memory hidden from the kernel [default: /etc/egm-device/host]
    #[arg(long, value_name = "FOLDER")]
    host_files: Option<PathBuf>,
    /// Folder with a copy of a host's /proc and /sys, to read instead of this host; no device is opened
    #[arg(long, value_name = "FOLDER", default_value = "/", hide_default_value = true)]
    root: PathBuf,
}

impl Host {
    /// This host; `None` for a record of another one, which has neither memory nor a ledger here.
    pub(crate) fn local(&self) -> Option<&LocalHost> {
        self.facts.is_none().then_some(&self.local)
    }

    /// Facts and regions of the recorded host, or of this one.
    ///
    /// # Errors
    /// A record, a root or host files that cannot be read or are of something else.
    pub fn survey(&self) -> Result<Survey, Box<dyn Report>> {
        match &self.facts {
            Some(path) => Ok(record::survey(path)?),
            None => self.local.survey(),
        }
    }
}

impl LocalHost {
    /// The folder that this host's files are below.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Facts and regions of this host.
    ///
    /// # Errors
    /// A root or host files that cannot be read or are of something else.
    pub(crate) fn survey(&self) -> Result<Survey, Box<dyn Report>> {
        self.check_root()?;
        Ok(Survey::of(&self.root, &self.host_files()?))
    }

    /// Below another folder than `/` may be anything.
    fn check_root(&self) -> Result<(), NoHost> {
        let parts = ["proc/meminfo", "sys/devices/system/node"];
        if parts.iter().any(|part| self.root.join(part).exists()) {
            return Ok(());
        }
        Err(NoHost::Root(self.root.clone()))
    }

    /// A host may have no host files, but a folder that was named is meant.
    fn host_files(&self) -> Result<Vec<HostFile>, Box<dyn Report>> {
        match &self.host_files {
            Some(folder) if !folder.is_dir() => Err(NoHost::HostFiles(folder.clone()).into()),
            folder => Ok(HostFile::load_all(&self.root, folder.as_deref())?),
        }
    }

    /// Reason that this host's KVM cannot be opened, if it has KVM.
    pub(crate) fn no_kvm(&self) -> Option<io::Error> {
        let kvm = self.root.join("dev/kvm");
        kvm.exists().then(|| std::fs::File::open(kvm).err()).flatten()
    }

    /// The host's ledger, if it has one since it booted: showing a host makes none.
    pub(crate) fn ledger(&self) -> Result<Option<Ledger>, Box<dyn Report>> {
        if !Paths::below(&self.root).run.is_dir() {
            return Ok(None);
        }
        Ok(Some(Ledger::of_host(&self.root)?))
    }
}

/// A folder that was named holds no host.
#[derive(Debug, thiserror::Error)]
enum NoHost {
    #[error("cannot read a host below {}: it has neither proc/meminfo nor sys/devices/system/node", .0.display())]
    Root(PathBuf),
    #[error("cannot read host files in {}: it is no folder", .0.display())]
    HostFiles(PathBuf),
}

impl Report for NoHost {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help(match self {
            Self::Root(_) => "name with --root a folder with a host's proc and sys in it",
            Self::HostFiles(_) => "name a folder that exists, or leave --host-files out",
        })
    }
}
