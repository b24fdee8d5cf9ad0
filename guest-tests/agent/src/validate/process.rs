//! A validation as a process of its own: its verdict is one JSON document on a pipe.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Args;
use egm_guest::findings::{MAX_VERDICT, Verdict};

use super::{PARTS, Setting, Validation, find};
use crate::answer::{answer, answer_of};
use crate::cmdline::Arguments;
use crate::error::Broken;
use crate::finding::Finding;

/// Seconds that a validation may take unless the argument `deadline` sets them.
const DEADLINE: u64 = 600;

/// Arguments of a validation's process.
#[derive(Debug, Clone, Args)]
pub(crate) struct Given {
    /// Name of the validation.
    pub(crate) name: String,
    /// Seed of the run, from which that of the validation is derived.
    #[arg(long)]
    pub(crate) seed: u64,
    /// The largest size in bytes.
    #[arg(long)]
    pub(crate) most: u64,
    /// Argument of the validation, as for "validate".
    #[arg(long = "arg", value_name = "KEY=VALUE")]
    pub(crate) args: Vec<String>,
}

/// The seed of validation `name` in a run with `seed`: the same whatever else the run has.
fn seed_of(name: &str, seed: u64) -> u64 {
    // FNV-1a, so that names that differ have seeds that differ.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    crate::pattern::Random::new(seed ^ hash).next()
}

/// Runs one validation in this process; the verdict goes to what was standard output, which then is standard error.
pub(crate) fn validation_in_this_process(given: &Given) -> ExitCode {
    let args = match Arguments::from_pairs(&given.args) {
        Ok(args) => args,
        Err(broken) => {
            eprintln!("error: {broken}");
            return ExitCode::FAILURE;
        }
    };
    answer(|| {
        let setting = Setting { seed: seed_of(&given.name, given.seed), most: given.most, args };
        let verdict = match find(&given.name) {
            Some(validation) => decide(validation, &setting),
            None => Finding::error("there is no such validation").into_verdict(&given.name, "", 0),
        };
        verdict.to_json()
    })
}

fn decide(validation: &Validation, setting: &Setting) -> Verdict {
    let finding = (validation.run)(setting).unwrap_or_else(Finding::from);
    finding.without_nonsense().into_verdict(validation.name, validation.claim, setting.seed)
}

/// Runs one part in this process.
pub(crate) fn part_in_this_process(name: &str, words: &[String]) -> ExitCode {
    let Some(part) = PARTS.iter().copied().flatten().find(|part| part.name == name) else {
        eprintln!("error: there is no part {name:?}");
        return ExitCode::from(2);
    };
    match (part.run)(words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(broken) => {
            eprintln!("error: {broken}");
            ExitCode::FAILURE
        }
    }
}

/// Runs `validation` in a process of its own; `each` receives the elapsed time now and then.
pub(super) fn run(validation: &Validation, given: &Given, each: &mut dyn FnMut(Duration)) -> Verdict {
    let begun = Instant::now();
    let seed = seed_of(validation.name, given.seed);
    let mut verdict = child(validation, given, each)
        .unwrap_or_else(|broken| Finding::from(broken).into_verdict(validation.name, validation.claim, seed));
    verdict.millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    verdict
}

/// Time limit of a validation.
pub(super) fn deadline(args: &Arguments) -> Result<Duration, Broken> {
    args.get("deadline", DEADLINE).map(Duration::from_secs)
}

fn child(validation: &Validation, given: &Given, each: &mut dyn FnMut(Duration)) -> Result<Verdict, Broken> {
    let deadline = deadline(&Arguments::from_pairs(&given.args)?)?;
    let mut command = Command::new("/proc/self/exe");
    command.arg("validation").arg(validation.name);
    command.args(["--seed", &given.seed.to_string(), "--most", &given.most.to_string()]);
    for pair in &given.args {
        command.arg("--arg").arg(pair);
    }
    let text = match answer_of(command, deadline, MAX_VERDICT, each) {
        Ok(text) => text,
        Err(why) => return Ok(error(validation, given, why)),
    };
    Ok(match Verdict::parse(&text) {
        Ok(verdict) if verdict.name == validation.name => verdict,
        Ok(other) => error(validation, given, format!("gave the verdict of {:?}", other.name)),
        Err(why) => error(validation, given, why),
    })
}

fn error(validation: &Validation, given: &Given, reason: String) -> Verdict {
    let seed = seed_of(validation.name, given.seed);
    Finding::error(reason).into_verdict(validation.name, validation.claim, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_of_its_validation_and_of_its_run() {
        assert_eq!(seed_of("memory.pattern", 1), seed_of("memory.pattern", 1));
        assert_ne!(seed_of("memory.pattern", 1), seed_of("memory.pattern", 2));
        assert_ne!(seed_of("memory.pattern", 1), seed_of("memory.latency", 1));
    }
}
