//! GDRCopy's own test programs, run where they are installed.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use egm_guest::findings::Figure;
use egm_vendor::gdr::gdrcopy::{self, CopyDirection, Sanity};

use crate::answer::{LAST_WORDS, first, in_background, last, quoted};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// Exit code of a GDRCopy program that could not decide (`EXIT_WAIVED`).
const WAIVED: i32 = 2;
/// Longest output that is read, in bytes.
const OUTPUT: usize = 1 << 20;

/// Result of a program.
struct Ended {
    code: Option<i32>,
    output: String,
    words: Vec<u8>,
}

/// Runs a program of GDRCopy's to its end; the validation's own deadline ends it with everything else.
fn ran(program: &str) -> Result<Result<Ended, Finding>, Broken> {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let reason = format!("{program} is not installed: it comes with GDRCopy (package gdrcopy-tests)");
            return Ok(Err(Finding::skipped(reason)));
        }
        Err(error) => return Err(Broken::system(format!("cannot start {program}"))(error)),
    };
    let errors = child.stderr.take().map(|errors| in_background(move || last(errors, LAST_WORDS)));
    let output = child.stdout.take().map(|output| first(output, OUTPUT)).unwrap_or_default();
    let status = child.wait().map_err(Broken::system(format!("cannot wait for {program}")))?;
    let words = errors.and_then(|errors| errors.recv().ok()).unwrap_or_default();
    Ok(Ok(Ended { code: status.code(), output: String::from_utf8_lossy(&output).into_owned(), words }))
}

/// `gdr.sanity`: judges the totals and the exit code of `gdrcopy_sanity`.
pub(super) fn sanity(_: &Setting) -> Result<Finding, Broken> {
    Ok(match ran("gdrcopy_sanity")? {
        Ok(ended) => judge_sanity(ended.code, &ended.output, &ended.words),
        Err(finding) => finding,
    })
}

fn judge_sanity(code: Option<i32>, output: &str, words: &[u8]) -> Finding {
    let Some(sanity) = Sanity::parse(output) else {
        return match code {
            Some(WAIVED) => Finding::skipped(format!("gdrcopy_sanity waived itself{}", quoted(words))),
            code => {
                Finding::error(format!("gdrcopy_sanity ended without totals, code {code:?}{}", quoted(words)))
            }
        };
    };
    let mut claim = Claim::default();
    claim.seen(format!("{} passed, {} waived: {}", sanity.passed, sanity.waived, sanity.waivers.join(", ")));
    claim.holds(sanity.failed == 0, || format!("{} failed: {}", sanity.failed, sanity.failures.join(", ")));
    claim.holds(sanity.failed > 0 || matches!(code, Some(0 | WAIVED)), || {
        format!("its exit code is {code:?}")
    });
    if sanity.passed == 0 && sanity.failed == 0 {
        return Finding::skipped(format!("gdrcopy_sanity waived all of its {} tests", sanity.waived));
    }
    claim.finish()
}

/// `gdr.copybw`: the bandwidths that `gdrcopy_copybw` measures, in GB/s.
pub(super) fn copybw(_: &Setting) -> Result<Finding, Broken> {
    measured("gdrcopy_copybw", "GB/s", gdrcopy::bandwidths)
}

/// `gdr.copylat`: the latencies that `gdrcopy_copylat` measures, in ns.
pub(super) fn copylat(_: &Setting) -> Result<Finding, Broken> {
    measured("gdrcopy_copylat", "ns", gdrcopy::latencies)
}

fn measured(program: &str, unit: &str, read: fn(&str) -> Vec<gdrcopy::Figure>) -> Result<Finding, Broken> {
    Ok(match ran(program)? {
        Ok(ended) => judge_figures(program, unit, &ended, read),
        Err(finding) => finding,
    })
}

fn judge_figures(
    program: &str,
    unit: &str,
    ended: &Ended,
    read: fn(&str) -> Vec<gdrcopy::Figure>,
) -> Finding {
    let figures = read(&ended.output);
    match ended.code {
        Some(0) if !figures.is_empty() => {
            let mut claim = Claim::default();
            claim.seen(format!("{} figures of {program}", figures.len()));
            claim.finish().with_figures(figures.iter().map(|figure| as_ours(program, unit, figure)).collect())
        }
        Some(WAIVED) => Finding::skipped(format!("{program} waived itself{}", quoted(&ended.words))),
        code => Finding::error(format!(
            "{program} ended with code {code:?} and {} figures{}",
            figures.len(),
            quoted(&ended.words)
        )),
    }
}

fn as_ours(program: &str, unit: &str, figure: &gdrcopy::Figure) -> Figure {
    let way = match figure.way {
        CopyDirection::Write => "write",
        CopyDirection::Read => "read",
    };
    Figure::of(format!("{way} by {program}"), Some(figure.bytes), unit, &mut [figure.value])
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::*;

    #[test]
    fn sanity_is_judged_by_its_totals_and_its_code() {
        let outcome = |code, output: &str| judge_sanity(code, output, b"why").outcome;
        let totals = "Total: 3, Passed: 2, Failed: 0, Waived: 1\n";
        assert_eq!(outcome(Some(0), totals), Outcome::Passed);
        assert_eq!(outcome(Some(1), totals), Outcome::Failed, "a code that does not go with the totals");
        assert_eq!(outcome(Some(1), "Total: 3, Passed: 2, Failed: 1, Waived: 0\n"), Outcome::Failed);
        assert_eq!(outcome(Some(0), "Total: 2, Passed: 0, Failed: 0, Waived: 2\n"), Outcome::Skipped);
        assert_eq!(outcome(Some(2), ""), Outcome::Skipped);
        assert_eq!(outcome(Some(0), ""), Outcome::Error);
        assert_eq!(outcome(None, "segmentation fault"), Outcome::Error);
    }

    #[test]
    fn figures_are_merged_when_the_program_ended_well() {
        let output = "writing test, size=4096 offset=0 num_iters=1\nwrite BW: 1000MB/s\n".to_owned();
        let ended = |code| Ended { code: Some(code), output: output.clone(), words: Vec::new() };
        let finding = judge_figures("gdrcopy_copybw", "GB/s", &ended(0), gdrcopy::bandwidths);
        assert_eq!(finding.outcome, Outcome::Passed);
        let verdict = finding.into_verdict("gdr.copybw", "", 0);
        assert_eq!((verdict.figures.len(), verdict.figures[0].bytes), (1, Some(4096)));
        assert_eq!(judge_figures("x", "GB/s", &ended(1), gdrcopy::bandwidths).outcome, Outcome::Error);
        assert_eq!(judge_figures("x", "GB/s", &ended(2), gdrcopy::bandwidths).outcome, Outcome::Skipped);
    }
}
