//! Why a slice cannot come from a region.

use std::collections::BTreeSet;

use egm_device::carve::plan::Short;
use egm_device::trust::Conflict;
use egm_report::Report;
use egm_report::show::first_of;

use crate::config::{GUEST_MEMFD, LOCAL, nearest};
use crate::facts::HeldSpan;

/// Why a slice cannot come from a region.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    /// The host has no such region.
    #[error("the host has none")]
    Unknown,
    /// KVM has no guest_memfd, or could not be opened to check.
    #[error(
        "no guest_memfd that the host can map: KVM lacks it (KVM_CAP_GUEST_MEMFD_FLAGS, Linux 6.18), or this user may not \
         open /dev/kvm"
    )]
    NoGuestMemfd,
    /// guest_memfd has base pages of any node, and the slice chooses pages or nodes.
    #[error("its pages are small and of any node, and the slice chooses \"{key}\"")]
    NoChoice {
        /// Configuration key of the slice's choice.
        key: &'static str,
    },
    /// Another trust domain's GPU reaches it.
    #[error(transparent)]
    Exclusive(#[from] Box<Conflict>),
    /// It has no free span for the slice.
    #[error("{short}{}", held_by(held))]
    Short {
        /// The shortage.
        short: Short,
        /// Holders of the region's bytes.
        held: Vec<HeldSpan>,
    },
}

impl NoPlace {
    /// Remedy for a slice that none of the regions `tried` can give.
    pub(super) fn remedy(tried: &[(String, Self)]) -> String {
        let conflict = tried.iter().find_map(|(_, why)| match why {
            Self::Exclusive(conflict) => conflict.help(),
            _ => None,
        });
        let all = |is: fn(&Self) -> bool| tried.iter().all(|(_, why)| is(why));
        match conflict.filter(|_| all(|why| matches!(why, Self::Exclusive(_)))) {
            Some(help) => help,
            None if all(|why| !matches!(why, Self::Short { .. })) => {
                format!("give \"region\" a list that ends in \"{LOCAL}\"")
            }
            None => {
                format!("lower the slice's \"size\", or give \"region\" a list that ends in \"{LOCAL}\"")
            }
        }
    }

    /// Remedy for a region that the host does not have; it has those of `names`, and of `kinds`.
    pub(super) fn unknown(region: &str, names: &[String], kinds: &[&str]) -> String {
        let everywhere = ["hugetlb", GUEST_MEMFD, "memfd", LOCAL];
        let names = names.iter().map(String::as_str).chain(kinds.iter().copied()).chain(everywhere);
        let meant = nearest(region, names).filter(|near| *near != region);
        let question = meant.map_or_else(String::new, |near| format!("did you mean \"{near}\"? "));
        format!(
            "{question}\"egm-device regions\" shows what the host has, \"{LOCAL}\" is memory of egm-vmm itself"
        )
    }
}

/// `; held by vm1 (process 12, user 0), vm2 (process 13, user 0)`.
fn held_by(held: &[HeldSpan]) -> String {
    let owners: BTreeSet<&str> = held.iter().map(|held| held.owner.as_str()).collect();
    if owners.is_empty() {
        return String::new();
    }
    format!("; held by {}", first_of(owners.into_iter().map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_host_has_is_suggested() {
        let remedy = |kinds: &[&str]| NoPlace::unknown("egm4", &["dax0.0".to_owned()], kinds);
        assert!(remedy(&["devdax"]).starts_with("\"egm-device regions\" shows"), "{}", remedy(&["devdax"]));
        assert!(remedy(&["devdax", "egm"]).starts_with("did you mean \"egm\"? "));
        let local = NoPlace::unknown("locla", &[], &[]);
        assert!(local.starts_with("did you mean \"local\"? "), "{local}");
    }
}
