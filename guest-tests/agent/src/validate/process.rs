//! A validation as a process of its own: its verdict is one JSON document on a pipe, what its libraries print is kept
//! for the reason of one that dies, and past its deadline it is killed with all that it started.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use clap::Args;
use egm_report::{MAX_VERDICT, Verdict};
use rustix::process::{Pid, Signal};

use super::{PARTS, Setting, Validation, find};
use crate::cmdline::Arguments;
use crate::error::Broken;
use crate::finding::Finding;

/// Seconds that a validation may take unless the argument `deadline` says otherwise.
const DEADLINE: u64 = 600;
/// How long a process that has ended, or was killed, has until its pipes are closed.
const GRACE: Duration = Duration::from_secs(5);
/// Bytes of a process' last words that are kept.
const LAST_WORDS: usize = 2048;
/// Lines of them that a reason quotes.
const QUOTED: usize = 4;

/// What a validation's process is given on its command line.
#[derive(Debug, Clone, Args)]
pub(crate) struct Given {
    /// Its name.
    pub(crate) name: String,
    /// The run's seed.
    #[arg(long)]
    pub(crate) seed: u64,
    /// The largest size in bytes.
    #[arg(long)]
    pub(crate) most: u64,
    /// An argument.
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
    match own_output().and_then(|output| Ok((output, Arguments::from_pairs(&given.args)?))) {
        Ok((mut output, args)) => {
            let setting = Setting { seed: seed_of(&given.name, given.seed), most: given.most, args };
            let verdict = match find(&given.name) {
                Some(validation) => decide(validation, &setting),
                None => Finding::error("there is no such validation").into_verdict(&given.name, "", 0),
            };
            // Whoever started this sees that nothing came.
            let _ = output.write_all(verdict.to_json().as_bytes());
            ExitCode::SUCCESS
        }
        Err(broken) => {
            eprintln!("error: {broken}");
            ExitCode::FAILURE
        }
    }
}

fn decide(validation: &Validation, setting: &Setting) -> Verdict {
    let finding = (validation.run)(setting).unwrap_or_else(Finding::from);
    finding.into_verdict(validation.name, validation.claim, setting.seed)
}

/// The pipe to the one that started this process, which dies with that one. Libraries print where they like; on
/// standard output they would be taken for the verdict.
fn own_output() -> Result<File, Broken> {
    let system = |error| Broken::system("cannot keep standard output")(error);
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(system)?;
    let output = rustix::io::fcntl_dupfd_cloexec(std::io::stdout().as_fd(), 3).map_err(system)?;
    rustix::stdio::dup2_stdout(std::io::stderr().as_fd()).map_err(system)?;
    Ok(File::from(output))
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

/// Runs `validation` in a process of its own.
pub(super) fn run(validation: &Validation, given: &Given) -> Verdict {
    let begun = Instant::now();
    let seed = seed_of(validation.name, given.seed);
    let mut verdict = child(validation, given)
        .unwrap_or_else(|broken| Finding::from(broken).into_verdict(validation.name, validation.claim, seed));
    verdict.millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    verdict
}

fn child(validation: &Validation, given: &Given) -> Result<Verdict, Broken> {
    let deadline = Duration::from_secs(Arguments::from_pairs(&given.args)?.get("deadline", DEADLINE)?);
    let mut command = Command::new("/proc/self/exe");
    command.arg("validation").arg(validation.name);
    command.args(["--seed", &given.seed.to_string(), "--most", &given.most.to_string()]);
    for pair in &given.args {
        command.arg("--arg").arg(pair);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let what = || format!("cannot start {}", validation.name);
    let mut child = command.spawn().map_err(|error| Broken::system(what())(error))?;
    let output = child.stdout.take().map(|pipe| in_background(move || first(pipe, MAX_VERDICT + 1)));
    let words = child.stderr.take().map(|pipe| in_background(move || last(pipe, LAST_WORDS)));
    let text = output.and_then(|output| output.recv_timeout(deadline).ok());
    let Some(text) = text else {
        kill(&mut child);
        return Ok(error(
            validation,
            given,
            format!("did not end within {} s and was killed", deadline.as_secs()),
        ));
    };
    if let Ok(verdict) = Verdict::parse(&text)
        && verdict.name == validation.name
    {
        kill(&mut child);
        return Ok(verdict);
    }
    if text.len() > MAX_VERDICT {
        kill(&mut child);
        return Ok(error(validation, given, format!("its verdict is longer than {MAX_VERDICT} bytes")));
    }
    // Its end closes the pipe; what it exits with is settled by then, so killing it changes no status.
    let words = words.and_then(|words| words.recv_timeout(GRACE).ok()).unwrap_or_default();
    let how = kill(&mut child).map_or_else(|| "and did not end".to_owned(), |status| status.to_string());
    Ok(error(validation, given, format!("ended without a verdict, {how}{}", quoted(&words))))
}

fn error(validation: &Validation, given: &Given, reason: String) -> Verdict {
    let seed = seed_of(validation.name, given.seed);
    Finding::error(reason).into_verdict(validation.name, validation.claim, seed)
}

/// Ends what is left of a process and its group, and says how the process ended.
fn kill(child: &mut Child) -> Option<ExitStatus> {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // The group is gone when all of it ended by itself.
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    child.wait().ok()
}

fn in_background<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = send.send(work());
    });
    receive
}

/// The first bytes of a pipe.
fn first(pipe: impl Read, most: usize) -> Vec<u8> {
    let mut text = Vec::new();
    let _ = pipe.take(most as u64).read_to_end(&mut text);
    text
}

/// The last bytes of a pipe.
fn last(mut pipe: impl Read, most: usize) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = pipe.read(&mut buffer) {
        kept.extend_from_slice(buffer.get(..count).unwrap_or_default());
        kept.drain(..kept.len().saturating_sub(most));
    }
    kept
}

/// The last lines of what a process said, for a reason.
fn quoted(words: &[u8]) -> String {
    let text = String::from_utf8_lossy(words);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let lines = lines.get(lines.len().saturating_sub(QUOTED)..).unwrap_or_default();
    if lines.is_empty() { String::new() } else { format!("; its last words: {}", lines.join(" / ")) }
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

    #[test]
    fn last_words_are_bounded_and_quoted_from_their_end() {
        assert_eq!(last(&[b'x'; 10_000][..], 100).len(), 100);
        assert_eq!(quoted(b"a\nb\n\nc\nd\ne\n"), "; its last words: b / c / d / e");
        assert_eq!(quoted(b"\n \n"), "");
    }
}
