//! The owner of a slice, in words that outlive the process.
#![forbid(unsafe_code)]

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The process that holds a slice, or for which the broker holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    /// Its name for operators: that of a VM or a job.
    pub name: String,
    /// User id of the process.
    pub uid: u32,
    /// Process id in the host's first process namespace.
    pub pid: u32,
    /// When the process started, in clock ticks since boot: with `pid` it names one process of one boot.
    pub started: u64,
    /// Trust domain, if it has a named one ([`crate::trust`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(description = "Trust domain, if it has a named one.")]
    pub domain: Option<String>,
}

impl Owner {
    /// This process, called `name`. A `/proc` that cannot be read gives a start of 0, which no living process has.
    #[must_use]
    pub fn this(name: impl Into<String>) -> Self {
        let pid = std::process::id();
        let started = started(pid).unwrap_or(0);
        Self { name: name.into(), uid: rustix::process::getuid().as_raw(), pid, started, domain: None }
    }

    /// This process as it scrubs idle memory: what it holds then is free to others soon.
    pub(crate) fn scrub() -> Self {
        Self::this("scrub")
    }

    /// The same owner in trust domain `domain`.
    #[must_use]
    pub fn in_domain(self, domain: Option<String>) -> Self {
        Self { domain, ..self }
    }

    /// Whether both are one process, or of one named trust domain.
    #[must_use]
    pub fn trusts(&self, other: &Self) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
            || is_same(self.domain.as_deref(), other.domain.as_deref())
    }

    /// Whether this very process still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        started(self.pid) == Some(self.started)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {}, user {})", self.name, self.pid, self.uid)
    }
}

/// Start of process `pid`: field 22 of `/proc/PID/stat`. Field 2 may hold blanks and brackets, so counting starts after it.
#[must_use]
pub fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Whether two trust domains are one. An owner without a name for its domain shares it with no other owner.
#[must_use]
pub fn is_same(one: Option<&str>, other: Option<&str>) -> bool {
    one.is_some() && one == other
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_trust_each_other_as_one_process_or_by_the_name_of_a_domain() {
        let this = Owner::this("vm1");
        let other = Owner { pid: 1, started: 1, ..this.clone() };
        let of = |owner: &Owner, domain: &str| owner.clone().in_domain(Some(domain.to_owned()));
        assert!(this.trusts(&Owner { name: "vm2".to_owned(), ..this.clone() }), "one process");
        assert!(!this.trusts(&other), "one user");
        assert!(of(&this, "a").trusts(&of(&other, "a")));
        assert!(!of(&this, "a").trusts(&of(&other, "b")) && !this.trusts(&of(&other, "a")));
    }

    #[test]
    fn only_names_make_one_domain_of_two_owners() {
        assert!(is_same(Some("a"), Some("a")));
        assert!(!is_same(Some("a"), Some("b")) && !is_same(Some("a"), None) && !is_same(None, None));
    }

    #[test]
    fn a_process_is_known_by_its_number_and_its_start() {
        let this = Owner::this("test");
        assert!(this.is_alive() && this.started > 0);
        assert!(!Owner { started: this.started + 1, ..this.clone() }.is_alive());
        assert!(!Owner { pid: u32::MAX, ..this }.is_alive());
    }
}
