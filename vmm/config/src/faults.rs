//! The faults of one configuration: all that are independent of each other.

use super::error::{Fault, Rule, nearest};
use super::rules::BootRule;

/// Faults that are kept. A hostile file has any number, and an author corrects some at a time.
pub const MOST: usize = 20;

/// Faults found so far.
#[derive(Debug, Default)]
pub(super) struct Faults {
    found: Vec<Fault>,
    /// Keys without a usable value, although the file has one: their absence is no further fault.
    doubtful: Vec<String>,
}

impl Faults {
    /// Adds `fault`, unless it only follows from an earlier one.
    pub(super) fn note(&mut self, fault: Fault) {
        let about = about(&fault);
        let follows = |key: &String| covers(key, &about) || covers(&about, key);
        if !self.doubtful.iter().any(follows) && !self.is_full() {
            self.found.push(fault);
        }
    }

    /// The value; `None` when there is a fault instead, which is noted.
    pub(super) fn keep<T>(&mut self, result: Result<T, Fault>) -> Option<T> {
        result.map_err(|fault| self.note(fault)).ok()
    }

    /// The value of `key`; `None` when it breaks a rule, which is noted.
    pub(super) fn value<T>(&mut self, key: impl Into<String>, value: Result<T, Rule>) -> Option<T> {
        self.keep(value.map_err(|rule| rule.at(key)))
    }

    /// From now on nothing follows from what `key` lacks.
    pub(super) fn doubt(&mut self, key: String) {
        self.doubtful.push(key);
    }

    /// Whether something is wrong with `key` or inside it. Rules over several keys of it do not count then.
    pub(super) fn are_in(&self, key: &str) -> bool {
        let found = self.found.iter().map(|fault| &fault.key);
        found.chain(&self.doubtful).any(|wrong| covers(key, wrong))
    }

    pub(super) fn is_full(&self) -> bool {
        self.found.len() >= MOST
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// The same faults, in a document with other names of keys.
    pub(super) fn renamed(mut self, name: impl Fn(&str) -> String) -> Self {
        for fault in &mut self.found {
            fault.key = name(&fault.key);
            fault.rule.rename(&name);
        }
        self
    }

    pub(super) fn into_vec(self) -> Vec<Fault> {
        self.found
    }
}

/// The key that `fault` is about: of a missing one, its own and not that of the object around it.
fn about(fault: &Fault) -> String {
    match &*fault.rule {
        Rule::MissingKey { key } => member(&fault.key, key),
        Rule::MissingType { .. } => member(&fault.key, "type"),
        Rule::Boot(BootRule::NoKernel) => member(&fault.key, "kernel"),
        _ => fault.key.clone(),
    }
}

/// The key `name` of the object `key`.
fn member(key: &str, name: &str) -> String {
    if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") }
}

/// Whether `inner` is `outer` or inside it.
fn covers(outer: &str, inner: &str) -> bool {
    let rest = inner.strip_prefix(outer).filter(|_| !outer.is_empty());
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// The key that an unknown one was probably meant to be.
pub(super) fn meant(fault: &Fault) -> Option<String> {
    let Rule::UnknownKey { key, known } = &*fault.rule else { return None };
    let name = nearest(key, known.iter().copied())?;
    let object = fault.key.strip_suffix(key.as_str())?;
    Some(member(object.trim_end_matches('.'), name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(faults: Faults) -> Vec<String> {
        faults.into_vec().into_iter().map(|fault| fault.key).collect()
    }

    #[test]
    fn what_follows_from_a_wrong_value_is_no_further_fault() {
        let mut faults = Faults::default();
        faults.doubt("memory.size".to_owned());
        faults.note(Rule::MissingKey { key: "size" }.at("memory"));
        faults.note(Rule::EmptyList.at("memory.nodes[0].cpus"));
        faults.note(Rule::EmptyList.at("memory.size"));
        faults.note(Rule::MissingKey { key: "memory" }.here());
        assert!(faults.are_in("memory") && faults.are_in("memory.nodes") && !faults.are_in("mem"));
        assert_eq!(keys(faults), ["memory.nodes[0].cpus"]);
    }

    #[test]
    fn a_kernel_that_is_missing_follows_from_a_wrong_kernel_and_from_no_other_key() {
        for (doubtful, expected) in [("boot.cmdline", &["boot"][..]), ("boot.kernel", &[]), ("boot", &[])] {
            let mut faults = Faults::default();
            faults.doubt(doubtful.to_owned());
            faults.note(Rule::from(BootRule::NoKernel).at("boot"));
            assert_eq!(keys(faults), expected, "{doubtful}");
        }
    }

    #[test]
    fn a_type_that_is_missing_follows_from_a_wrong_type_and_from_no_other_key() {
        for (doubtful, expected) in
            [("devices[0].id", &["devices[0]"][..]), ("devices[0].type", &[]), ("devices[0]", &[])]
        {
            let mut faults = Faults::default();
            faults.doubt(doubtful.to_owned());
            faults.note(Rule::MissingType { known: Vec::new() }.at("devices[0]"));
            assert_eq!(keys(faults), expected, "{doubtful}");
        }
    }

    #[test]
    fn a_misspelt_key_stands_for_the_nearest() {
        let fault =
            |key: &str, at: &str| Rule::UnknownKey { key: key.to_owned(), known: vec!["size"] }.at(at);
        assert_eq!(meant(&fault("szie", "memory.szie")).as_deref(), Some("memory.size"));
        assert_eq!(meant(&fault("szie", "szie")).as_deref(), Some("size"));
        assert_eq!(meant(&fault("x", "memory.x")), None);
    }

    #[test]
    fn twenty_faults_are_kept() {
        let mut faults = Faults::default();
        (0..30).for_each(|index| faults.note(Rule::EmptyList.at(format!("egm[{index}]"))));
        assert!(faults.is_full());
        assert_eq!(keys(faults).len(), 20);
    }
}
