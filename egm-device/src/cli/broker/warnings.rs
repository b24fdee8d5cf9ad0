//! Differences between a policy and its host. One policy may serve several hosts, so they are no errors.

use egm_report::show::exact;

use crate::policy::{Policy, is_kind};
use crate::region::Region;

/// Rules of `policy` that name no region of `regions`, and reservations that are larger than their region.
pub(super) fn of(policy: &Policy, regions: &[Region]) -> Vec<String> {
    let mut warnings = Vec::new();
    for rule in policy.rules() {
        let is_unknown =
            |name: &&String| !is_kind(name) && regions.iter().all(|region| region.name != **name);
        for name in rule.regions.iter().filter(is_unknown) {
            warnings
                .push(format!("rule {:?} names region {name:?}, which this host does not have", rule.name));
        }
    }
    for region in regions {
        let rules = policy.rules().iter().filter(|rule| rule.regions.contains(&region.name));
        let reserved = rules.fold(0, |sum: u64, rule| sum.saturating_add(rule.reservation));
        if reserved > region.size.get() {
            let (reserved, size) = (exact(reserved), exact(region.size.get()));
            warnings.push(format!(
                "the policy reserves {reserved} of region {:?}, which has {size}",
                region.name
            ));
        }
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::tests::region;
    use crate::policy::{Names, parse};
    use crate::region::RegionKind;

    fn warnings(rules: &str) -> Vec<String> {
        let policy = parse(&format!(r#"{{"rules": [{rules}]}}"#), &Names::default()).unwrap();
        of(&policy, &[region(RegionKind::Hugetlb, 4 << 20, 2 << 20)])
    }

    #[test]
    fn a_region_that_the_host_lacks_is_a_warning_and_a_kind_is_none() {
        assert_eq!(warnings(r#"{"name": "a", "user": 1, "regions": ["r", "hugetlb", "egm"]}"#), [""; 0]);
        assert_eq!(
            warnings(r#"{"name": "a", "user": 1, "regions": ["egm4", "r"]}"#),
            ["rule \"a\" names region \"egm4\", which this host does not have"]
        );
    }

    #[test]
    fn reservations_above_the_size_of_their_region_are_a_warning() {
        let rule = |user: u32, size: &str| {
            format!(r#"{{"name": "a{user}", "user": {user}, "regions": ["r"], "reservation": "{size}"}}"#)
        };
        assert_eq!(warnings(&[rule(1, "2MiB"), rule(2, "2MiB")].join(",")), [""; 0]);
        assert_eq!(
            warnings(&[rule(1, "2MiB"), rule(2, "4MiB")].join(",")),
            ["the policy reserves 6MiB of region \"r\", which has 4MiB"]
        );
    }
}
