//! Lines `skipped: REASON` of a log, each with the test or step that printed it. Pure.

/// Prefix of a test's line when this host cannot decide it.
const SKIPPED: &str = "skipped: ";

/// A skip in a log.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Printed {
    /// The test or step.
    pub(super) of: String,
    pub(super) reason: String,
}

/// Each skip in the output of cargo-nextest, of libtest, or of scripts/test; one that repeats is one.
pub(super) fn skips(log: &str) -> Vec<Printed> {
    let mut found: Vec<Printed> = Vec::new();
    let mut test = String::new();
    for line in log.lines() {
        if let Some(name) = test_of(line) {
            name.clone_into(&mut test);
        }
        // A test of libtest without capture prints after `test NAME ... `.
        let Some((before, reason)) = line.split_once(SKIPPED) else { continue };
        let name = match before.trim_end().strip_suffix(':') {
            Some(step) if !step.is_empty() => step.trim(),
            _ => &test,
        };
        let skip = Printed { of: name.to_owned(), reason: reason.trim().to_owned() };
        if !found.contains(&skip) {
            found.push(skip);
        }
    }
    found
}

/// The name of the test, if `line` begins or ends its output.
fn test_of(line: &str) -> Option<&str> {
    let line = line.trim();
    // libtest: `---- NAME stdout ----`, `test NAME ... ok`.
    if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
        return Some(name);
    }
    // nextest: `PASS [   0.005s] (1/9) BINARY NAME`, or without the count.
    let rest = line.strip_prefix("PASS [").or_else(|| line.strip_prefix("SLOW ["))?;
    rest.split_whitespace().next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_skip_has_the_name_of_its_test() {
        let log = "        PASS [   0.005s] (  1/447) egm-device::users as_two_users\n  stdout ───\n\n    running 1 test\n    \
                   skipped: only root\n    test as_two_users ... ok\n        PASS [   0.010s] egm-vmm tap::tests::opens\n    \
                   skipped: no tap\n    skipped: no tap\n";
        let skip = |of: &str, reason: &str| Printed { of: of.to_owned(), reason: reason.to_owned() };
        assert_eq!(skips(log), [skip("as_two_users", "only root"), skip("tap::tests::opens", "no tap")]);
        let libtest = "---- users::two stdout ----\nskipped: only root\n\nsuccesses:\n    users::two\n";
        assert_eq!(skips(libtest), [skip("users::two", "only root")]);
        assert_eq!(
            skips("fuzzing: skipped: run only with --full\n"),
            [skip("fuzzing", "run only with --full")]
        );
    }
}
