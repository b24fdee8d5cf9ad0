//! Monitors that the user provides: `--peer NAME=PATH`. The lab neither fetches nor builds them.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;

/// A monitor that the lab can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PeerName {
    /// Program of <https://github.com/cloud-hypervisor/cloud-hypervisor>, which the user provides.
    CloudHypervisor,
    /// Program of <https://github.com/firecracker-microvm/firecracker>, which the user provides.
    Firecracker,
    /// Another build of this project's monitor, for comparison.
    EgmVmm,
}

impl PeerName {
    /// Its name on the command line and among copied tools.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Firecracker => "firecracker",
            Self::EgmVmm => "egm-vmm",
        }
    }

    /// The option by which the user provides it.
    pub(crate) fn option(self) -> String {
        format!("--peer={}", self.name())
    }

    /// Reason for its absence, and how to provide it.
    pub(crate) fn absent(self) -> String {
        format!("no {0} is provided: --peer {0}=PATH", self.name())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerProgram {
    name: PeerName,
    path: PathBuf,
}

impl PeerProgram {
    pub(crate) const fn name(&self) -> PeerName {
        self.name
    }

    /// The same monitor, its program where `copy` puts it.
    ///
    /// # Errors
    /// Those of `copy`.
    pub(crate) fn copied<E>(&self, copy: impl FnOnce(&Path) -> Result<PathBuf, E>) -> Result<Self, E> {
        Ok(Self { name: self.name, path: copy(&self.path)? })
    }
}

impl FromStr for PeerProgram {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = text.split_once('=').ok_or("expected NAME=PATH")?;
        let name = PeerName::from_str(name, false)
            .map_err(|_| format!("no peer \"{name}\": expected cloud-hypervisor, firecracker or egm-vmm"))?;
        let path = PathBuf::from(path);
        if path.is_file() {
            Ok(Self { name, path })
        } else {
            Err(format!("{} is not a file", path.display()))
        }
    }
}

/// As [`PeerProgram::from_str`], for scenarios: refuses a monitor that only benchmarks start.
pub(crate) fn of_scenario(text: &str) -> Result<PeerProgram, String> {
    let name = text.split_once('=').and_then(|(name, _)| PeerName::from_str(name, false).ok());
    match name {
        Some(name @ (PeerName::Firecracker | PeerName::EgmVmm)) => {
            let name = name.name();
            Err(format!("no scenario starts {name}; egm-lab bench --peer {name}=PATH measures it"))
        }
        Some(PeerName::CloudHypervisor) | None => text.parse(),
    }
}

/// The program of `name` among `peers`.
pub(crate) fn find(peers: &[PeerProgram], name: PeerName) -> Option<PathBuf> {
    peers.iter().find(|peer| peer.name == name).map(|peer| peer.path.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_a_name_and_a_file() {
        let peer: PeerProgram = "cloud-hypervisor=/bin/sh".parse().unwrap();
        assert_eq!(find(std::slice::from_ref(&peer), PeerName::CloudHypervisor), Some("/bin/sh".into()));
        assert_eq!(find(&[peer], PeerName::Firecracker), None);
        let other: PeerProgram = "egm-vmm=/bin/sh".parse().unwrap();
        assert_eq!(find(&[other], PeerName::EgmVmm), Some("/bin/sh".into()));
        for (text, why) in [("/bin/sh", "NAME=PATH"), ("qemu=/bin/sh", "qemu"), ("firecracker=/x/y", "/x/y")]
        {
            assert!(text.parse::<PeerProgram>().unwrap_err().contains(why), "{text}");
        }
    }

    #[test]
    fn a_scenario_has_no_peer_that_none_starts() {
        assert_eq!(of_scenario("cloud-hypervisor=/bin/sh"), "cloud-hypervisor=/bin/sh".parse());
        for (text, why) in [
            ("firecracker=/bin/sh", "egm-lab bench --peer firecracker=PATH"),
            ("egm-vmm=PATH", "egm-lab bench --peer egm-vmm=PATH"),
            ("qemu=/bin/sh", "no peer \"qemu\""),
            ("/bin/sh", "NAME=PATH"),
        ] {
            assert!(of_scenario(text).unwrap_err().contains(why), "{text}");
        }
    }
}
