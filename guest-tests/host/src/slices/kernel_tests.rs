//! Tests of `egm-device` that depend on the kernel, on the kernel of this host: `scripts/lab/tests` builds them.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::engine::error::LabError;
use crate::hosts::pool::Pool;
use crate::runner::steps::{Fault, Step, Steps};

/// Test programs of `egm-device`, each a step of the scenario.
const PROGRAMS: [Program; 4] = [
    Program { name: UNIT_TESTS, tests: &["free::"] },
    Program { name: "broker_attacks", tests: &[] },
    Program { name: "broker_pools", tests: &[] },
    Program { name: "dax_devices", tests: &[] },
];
/// The program with the unit tests.
const UNIT_TESTS: &str = "egm_device";
/// Tests of that program that make their files on the file system that maps its medium directly.
const DIRECT: [&str; 2] = ["backing::fsdax::", "ledger::slice_file::"];
const MEDIUM: &str = "/mnt/pmem";
/// The program that tests start.
const STARTED: &str = "egm-device";
/// The file with its path on the machine that built it.
const PATH: &str = "path";
/// Pages of 2 MiB that the tests use.
const PAGES: u64 = 8;

struct Program {
    name: &'static str,
    /// The tests that run; all if none is named.
    tests: &'static [&'static str],
}

pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, report, .. } = *steps;
    let Some(folder) = &runner.tools.tests else {
        steps.skip("no test programs: scripts/lab/tests builds them");
        return Ok(());
    };
    let path = fs::read_to_string(folder.join(PATH)).map_err(LabError::file("read", folder))?;
    link(&folder.join(STARTED), Path::new(path.trim()))?;
    let _pool = Pool::resize(2 << 10, PAGES)?;
    for Program { name, tests } in PROGRAMS {
        let log = report.join(format!("{name}.log"));
        steps.step(name, || passes(Command::new(folder.join(name)).args(tests), &log));
    }
    steps.step("fsdax", || {
        if !fs::read_to_string("/proc/self/mounts")?
            .lines()
            .any(|line| line.split(' ').nth(1) == Some(MEDIUM))
        {
            return Err(Fault::Untrue(format!("nothing is mounted at {MEDIUM}")));
        }
        let mut command = Command::new(folder.join(UNIT_TESTS));
        passes(command.args(DIRECT).env("TMPDIR", MEDIUM), &report.join("fsdax.log"))
    });
    Ok(())
}

/// Makes `program` available at `path`, its path on the machine that built it.
fn link(program: &Path, path: &Path) -> Result<(), LabError> {
    if path.exists() {
        return Ok(());
    }
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(LabError::file("make", parent))?;
    symlink(program, path).map_err(LabError::file("link", path))
}

/// All tests of `command`, a test program, pass, and none is skipped.
fn passes(command: &mut Command, log: &Path) -> Step {
    let (out, errors) = (File::create(log)?, File::options().append(true).open(log)?);
    command.args(["--nocapture", "--test-threads", "1"]);
    let status = command.stdin(Stdio::null()).stdout(out).stderr(errors).status()?;
    let text = fs::read_to_string(log)?;
    if !status.success() {
        return Err(Fault::Untrue(format!("{status}: see {}", log.display())));
    }
    match text.lines().find_map(|line| Some(line.split_once("skipped: ")?.1)) {
        Some(why) => Err(Fault::Untrue(format!("a test is skipped: {why}"))),
        None => Ok(()),
    }
}
