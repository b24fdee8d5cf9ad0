//! Trust domains: which owners may share a region that a coherent GPU reaches.
//!
//! A GPU's page table entry for EGM holds an offset from a base that the GPU's own guest names. The hardware checks neither
//! base nor limit, so a machine that has one of a region's GPUs reaches every byte of that region. Such a region is
//! exclusive to one trust domain: slices and GPUs of it belong to owners that trust each other, or to one owner.
#![forbid(unsafe_code)]

use std::fmt;

use egm_address::PciAddress;
use egm_report::{Blame, Remedy, Report};

use crate::owner::Owner;

/// A party to a decision, as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Party {
    /// Name of the owner.
    pub owner: String,
    /// Its trust domain, if it has a named one.
    pub domain: Option<String>,
}

impl From<&Owner> for Party {
    fn from(owner: &Owner) -> Self {
        Self { owner: owner.to_string(), domain: owner.domain.clone() }
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.domain {
            Some(domain) => write!(f, "{} of trust domain \"{domain}\"", self.owner),
            None => write!(f, "{} of no trust domain", self.owner),
        }
    }
}

/// A live slice or GPU of a region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// Owner of the slice or GPU.
    pub party: Party,
    /// Whether that owner and the requester trust each other.
    pub is_trusted: bool,
    /// The GPU; `None` for a slice.
    pub gpu: Option<PciAddress>,
}

/// A request that would let two trust domains meet in a region that a GPU reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Name of the region.
    pub region: String,
    /// Party that is refused.
    pub requester: Party,
    /// The requested GPU; `None` for a slice.
    pub gpu: Option<PciAddress>,
    /// The hold that conflicts with it.
    pub hold: Holding,
}

/// Decides whether `requester` may have `gpus` of `region`, or a slice of it when `gpus` is empty, beside `holds`.
///
/// # Errors
/// [`Conflict`] with the first hold of another trust domain, if that hold or the request is a GPU.
pub fn check(
    region: &str,
    requester: &Party,
    gpus: &[PciAddress],
    holds: impl IntoIterator<Item = Holding>,
) -> Result<(), Box<Conflict>> {
    let meets = |hold: &Holding| {
        !egm_address::fault!("trust-rule-off") && !hold.is_trusted && (hold.gpu.is_some() || !gpus.is_empty())
    };
    match holds.into_iter().find(meets) {
        None => Ok(()),
        Some(hold) => Err(Box::new(Conflict {
            region: region.to_owned(),
            requester: requester.clone(),
            gpu: gpus.first().copied(),
            hold,
        })),
    }
}

/// Parses the name of a trust domain from a command line.
///
/// # Errors
/// The rule that the name breaks.
pub fn parse_name(text: &str) -> Result<String, String> {
    if crate::policy::is_word(text) {
        return Ok(text.to_owned());
    }
    Err("a trust domain is a word of 1 to 64 characters: A-Z a-z 0-9 . _ -".to_owned())
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { region, requester, gpu, hold } = self;
        match gpu {
            Some(gpu) => {
                write!(f, "cannot give GPU {gpu}, which reaches all of region {region}, to {requester}: ")?
            }
            None => write!(f, "cannot give a slice of region {region} to {requester}: ")?,
        }
        match hold.gpu {
            Some(gpu) => write!(f, "the region is exclusive to {}, which has GPU {gpu}", hold.party),
            None => write!(f, "{} has a slice of the region", hold.party),
        }
    }
}

impl std::error::Error for Conflict {}

impl Report for Conflict {
    fn remedy(&self) -> Remedy {
        Blame::Host.help(
            "take another region, or end the other owner; owners that trust each other have one \"trust_domain\" in the \
             broker's policy, or one --trust-domain",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party(owner: &str, domain: Option<&str>) -> Party {
        Party { owner: owner.to_owned(), domain: domain.map(str::to_owned) }
    }

    #[test]
    fn two_domains_meet_in_a_region_only_while_neither_has_a_gpu_of_it() {
        let gpu: PciAddress = "0009:01:00.0".parse().unwrap();
        // The other owner trusts us, the other has a GPU, we ask for a GPU: whether we are refused.
        let table = [
            (false, false, false, false),
            (false, false, true, true),
            (false, true, false, true),
            (false, true, true, true),
            (true, false, false, false),
            (true, false, true, false),
            (true, true, false, false),
            (true, true, true, false),
        ];
        for (is_trusted, has, asks, refused) in table {
            let hold = Holding { party: party("vm1", None), is_trusted, gpu: has.then_some(gpu) };
            let gpus: &[PciAddress] = if asks { &[gpu] } else { &[] };
            let outcome = check("egm4", &party("vm2", None), gpus, [hold]);
            assert_eq!(outcome.is_err(), refused, "{is_trusted} {has} {asks}");
        }
    }

    #[test]
    fn one_trusted_hold_does_not_hide_another_that_is_not() {
        let gpu: PciAddress = "0009:01:00.0".parse().unwrap();
        let hold = |owner, is_trusted| Holding { party: party(owner, Some("a")), is_trusted, gpu: Some(gpu) };
        let conflict = check("egm4", &party("vm3", None), &[], [hold("vm1", true), hold("vm2", false)]);
        assert_eq!(
            conflict.unwrap_err().to_string(),
            "cannot give a slice of region egm4 to vm3 of no trust domain: the region is exclusive to vm2 of trust domain \
             \"a\", which has GPU 0009:01:00.0"
        );
    }

    #[test]
    fn a_name_of_a_domain_is_a_word() {
        assert!(parse_name("a b").is_err() && parse_name("").is_err() && parse_name("tenant-a").is_ok());
    }
}
