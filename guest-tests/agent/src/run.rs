//! Running checks, each as a process of its own with a deadline.

use std::io::{Read, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use egm_guest::findings::{Check, Line, MAX_LINE, Outcome, SUMMARY};
use egm_report::show::{Screen, hanging};

use crate::With;
use crate::checks::{self, Decide, Selected};
use crate::cmdline::Arguments;
use crate::error::Broken;
use crate::finding::Finding;

/// Seconds that a check may take unless the argument `deadline` sets them.
const DEADLINE: u64 = 600;
/// Time in which a killed check has to be gone.
const GRACE: Duration = Duration::from_secs(5);

/// Runs one check in this process: the line goes to standard output.
pub(crate) fn in_this_process(name: &str, with: &With) -> ExitCode {
    let decide = |decide| match decide {
        Decide::Planned(run) => run(&with.context()?),
        Decide::Alone(run) => run(&Arguments::from_pairs(&with.args)?),
    };
    let finding = checks::find(name)
        .map_or_else(|| no_such_check(name), |check| decide(check.run).unwrap_or_else(Finding::from));
    print_line(&finding.into_check(name, 0));
    ExitCode::SUCCESS
}

/// Runs checks and hands each result on as it comes; returns the summary. A check that is selected by name is required.
pub(crate) fn all(names: &[String], with: &With, mut each: impl FnMut(&Check)) -> Check {
    let mut good = true;
    let mut count = 0u32;
    for Selected { name, required } in checks::expand(names, with.plan.exists()) {
        let check = one(&name, with);
        let check = if required { passed_or_failed(check) } else { check };
        good &= matches!(check.outcome, Outcome::Passed | Outcome::Skipped);
        count += 1;
        each(&check);
    }
    summary(count, good)
}

/// The result of a required check: what it skipped is a failure.
fn passed_or_failed(check: Check) -> Check {
    match check.outcome {
        Outcome::Skipped => Check {
            outcome: Outcome::Failed,
            reason: format!("required, but skipped: {}", check.reason),
            ..check
        },
        _ => check,
    }
}

/// The line that ends a report of `count` checks.
pub(crate) fn summary(count: u32, good: bool) -> Check {
    let outcome = if good { Outcome::Passed } else { Outcome::Failed };
    Check {
        name: SUMMARY.to_owned(),
        outcome,
        value: Some(f64::from(count)),
        unit: None,
        reason: String::new(),
        millis: 0,
    }
}

/// Prints a line in one write, so that nothing comes between its bytes.
pub(crate) fn print_line(check: &Check) {
    let mut out = std::io::stdout().lock();
    // Without a console there is nothing to report the failure to.
    let _ = out.write_all(format!("{}\n", check.to_line()).as_bytes()).and_then(|()| out.flush());
}

/// Runs checks for a person (or a program, with `json`); the exit code shows whether all is well.
pub(crate) fn for_a_person(names: &[String], with: &With, json: bool) -> ExitCode {
    let names = if names.is_empty() { vec!["all".to_owned()] } else { names.to_vec() };
    let summary = all(&names, with, |check| if json { print_line(check) } else { print_row(check) });
    if json {
        print_line(&summary);
    }
    if summary.outcome == Outcome::Passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print_row(check: &Check) {
    let value = check.value.map_or_else(String::new, |value| {
        format!("{value:.2} {}", check.unit.as_deref().unwrap_or_default())
    });
    let row = format!("{:<14} {:<7} {value:>18}  ", check.name, check.outcome);
    let reason = hanging(&check.reason, row.chars().count(), Screen::of_stdout());
    println!("{}", (row + &reason).trim_end());
}

fn no_such_check(name: &str) -> Finding {
    Finding::error(format!("there is no check {name:?}: `egm-guest checks` names them"))
}

/// Runs one check in a process of its own.
fn one(name: &str, with: &With) -> Check {
    let begun = Instant::now();
    let result = if checks::find(name).is_some() { child(name, with) } else { Ok(Err(no_such_check(name))) };
    let millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    match result {
        Ok(Ok(check)) => Check { name: name.to_owned(), millis, ..check },
        Ok(Err(finding)) => finding.into_check(name, millis),
        Err(broken) => Finding::from(broken).into_check(name, millis),
    }
}

/// The line of a child process, or why it has none.
fn child(name: &str, with: &With) -> Result<Result<Check, Finding>, Broken> {
    let deadline = Duration::from_secs(Arguments::from_pairs(&with.args)?.get("deadline", DEADLINE)?);
    let mut command = Command::new("/proc/self/exe");
    command.arg("check").arg(name).arg("--plan").arg(&with.plan).stdin(Stdio::null()).stdout(Stdio::piped());
    for pair in &with.args {
        command.arg("--arg").arg(pair);
    }
    let mut child = command.spawn().map_err(Broken::system(format!("cannot start check {name}")))?;
    let (send, output) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stdout.take(2 * MAX_LINE as u64).read_to_end(&mut text);
            let _ = send.send(String::from_utf8_lossy(&text).into_owned());
        });
    }
    let Ok(text) = output.recv_timeout(deadline) else {
        let _ = child.kill();
        if output.recv_timeout(GRACE).is_ok() {
            let _ = child.wait();
        }
        return Ok(Err(Finding::error(format!(
            "did not end within {} s and was killed",
            deadline.as_secs()
        ))));
    };
    let status = child.wait().map_err(Broken::system(format!("cannot wait for check {name}")))?;
    Ok(text
        .lines()
        .find_map(|line| match Line::parse(line) {
            Some(Line::Check(check)) => Some(check),
            _ => None,
        })
        .ok_or_else(|| Finding::error(format!("ended without a result, {status}"))))
}
