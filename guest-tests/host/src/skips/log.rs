//! Lines `skipped: REASON` of a log, each with the test or step that printed it. Pure.

/// Prefix of a test's line when this host cannot decide it.
const SKIPPED: &str = "skipped: ";

/// Name and reason of each skip in the output of cargo-nextest, of libtest, or of scripts/test; a pair that repeats is one.
pub(super) fn skips(log: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
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
        let skip = (name.to_owned(), reason.trim().to_owned());
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
        let pair = |name: &str, reason: &str| (name.to_owned(), reason.to_owned());
        assert_eq!(skips(log), [pair("as_two_users", "only root"), pair("tap::tests::opens", "no tap")]);
        let libtest = "---- users::two stdout ----\nskipped: only root\n\nsuccesses:\n    users::two\n";
        assert_eq!(skips(libtest), [pair("users::two", "only root")]);
        assert_eq!(
            skips("fuzzing: skipped: run only with --full\n"),
            [pair("fuzzing", "run only with --full")]
        );
    }
}
