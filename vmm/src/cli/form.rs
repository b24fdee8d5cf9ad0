//! Machines in the form of another monitor: the option `--from`.

use std::path::Path;

use crate::api::cloud::{self, Translation, VmConfig};
use crate::config::{self, Overrides, Spec};
use crate::error::Report;
use crate::facts;

/// Monitors that have documents of machines.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Monitor {
    CloudHypervisor,
}

/// The form of a machine's file.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct Form {
    /// Read the machine as another monitor's document: cloud-hypervisor (the VmConfig that vm.create takes)
    #[arg(long, value_name = "MONITOR", hide_possible_values = true)]
    from: Option<Monitor>,
}

impl Form {
    /// Whether another monitor's document is read.
    pub(super) const fn is_foreign(self) -> bool {
        self.from.is_some()
    }

    /// The machine of the file `path`. A document has the architecture of the host, here or as recorded in `facts`.
    pub(super) fn load(
        self,
        path: &Path,
        overrides: &Overrides,
        facts: Option<&Path>,
    ) -> Result<Spec, Box<dyn Report>> {
        let Some(Monitor::CloudHypervisor) = self.from else {
            return Ok(config::load_with(path, overrides)?);
        };
        let arch = facts.map(facts::load).transpose()?.map(|facts| facts.arch);
        let spec = config::load_foreign(path, overrides, |document: VmConfig| {
            let Translation { mut file, notes, origins } = cloud::translate(&document)?;
            file.arch = arch;
            notes.iter().for_each(|note| tracing::info!("{note}"));
            Ok((file, move |key: &str| origins.of(key)))
        })?;
        Ok(spec)
    }
}
