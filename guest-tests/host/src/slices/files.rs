//! Slices of a file system that maps persistent memory directly: a guest's, a server's, then those of two users of a broker.
//!
//! Each has a file of its own, which its owner can neither change nor read past. The lab looks for what a scrub leaves in
//! the whole medium, through `/dev/mem` and not through the file system.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::engine::command::output;
use crate::engine::error::LabError;
use crate::engine::step::{TIMEOUT, eventually};
use crate::hosts::extent::Extent;
use crate::hosts::pagemap;
use crate::hosts::served::serve;
use crate::runner::machine::Runner;
use crate::runner::steps::{Fault, Step, Steps};
use crate::slices::broker::Broker;
use crate::slices::host_words::physical;
use crate::slices::owned;
use crate::slices::owners::{CHANGE, KEEP, OWNERS, Owner, SIZE, User, write_policy};

/// The persistent memory of the file system, as `/proc/iomem` names what `memmap=nn!ss` makes.
const PERSISTENT: &str = "Persistent Memory (legacy)";
/// The word of the owner that leaves a page in a pipe.
const KEPT: u64 = 0x71c3_0e9a_84fd_2b56;
/// The audit log of quarantines.
const FINDINGS: &str = "/var/log/egm-device/findings.jsonl";
/// Switch of leases of files.
const LEASES: &str = "/proc/sys/fs/leases-enable";

/// The guest's part, and the owners'.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    owned::run(steps)?;
    let Steps { runner, region, report, .. } = *steps;
    let (socket, policy) = (runner.work.join("broker.sock"), report.join("policy.json"));
    fs::create_dir_all(&runner.work).map_err(LabError::file("make", &runner.work))?;
    write_policy(&policy, region)?;
    steps.step("no file before", || wait_for_files(0));
    steps.step("a server has its own", || a_server_has_its_own(runner, region));
    let mut broker = Broker::start(runner, region, &socket, report, Some(&policy))?;
    let mut keeper = Owner::start(runner, region, &socket, User { mark: KEPT, ..OWNERS[0] })?;
    let mut pipe = None;
    steps.step("a page in a pipe", || {
        pipe = Some(keeper.keeps_a_page()?);
        keeper.end()
    });
    steps.step("busy pages", || is_quarantined(runner, &keeper.device));
    // The grant that it waits for comes after the first review of the new process.
    drop(broker);
    broker = Broker::start(runner, region, &socket, report, Some(&policy))?;
    steps.step("busy after a restart", || {
        is_quarantined(runner, &keeper.device).and_then(|()| is_not_released())
    });
    let [one, other] = OWNERS.map(|user| Owner::start(runner, region, &socket, user));
    let (mut one, mut other) = (one?, other?);
    let (of_one, of_other) = (one.device.clone(), other.device.clone());
    steps.step("a file each", || has_files(&[&of_one, &of_other]));
    steps.step("own memory", || [&one, &other].into_iter().try_for_each(|owner| marks(owner.mark, 2)));
    steps.step("not the other's", || one.cannot_reach(&of_other).and_then(|()| other.cannot_reach(&of_one)));
    steps.step("no other size", || {
        one.cannot_change().and_then(|()| other.cannot_change())?;
        [&of_one, &of_other].into_iter().try_for_each(|file| is_whole(file))
    });
    steps.step("free without them", || {
        kill_process(pipe.ok_or("no process keeps a page")?, Signal::KILL)?;
        // No session of this broker has the slice: the idle scrub after the one in progress and a rest finds it free.
        wait_for_files_within(2, 2 * TIMEOUT)?;
        marks(KEPT, 0)
    });
    steps.step("returned", || {
        one.end()?;
        wait_for_files(1)?;
        marks(one.mark, 0)?;
        marks(other.mark, 2)
    });
    // Nothing takes the other slice back when its owner ends.
    drop(broker);
    steps.step("left", || {
        other.end()?;
        is_left(runner, &of_other)?;
        marks(other.mark, 2)
    });
    steps.step("scrubbed later", || {
        let scrub = ["carve", "scrub", "--region", region];
        let said = output(Command::new(&runner.tools.device).args(scrub))?;
        if !said.status.success() {
            return Err(Fault::Untrue(String::from_utf8_lossy(&said.stderr).into_owned()));
        }
        wait_for_files(0)?;
        marks(other.mark, 0)
    });
    steps.step("no unretire", || {
        refused(runner, &["ledger", "unretire", region, "0", "4KiB"], "a file with a bad page is set aside")
    });
    steps.step("not without leases", || {
        fs::write(LEASES, "0")?;
        let grant = ["carve", "grant", "--region", region, "--size", "2MiB", "--", "true"];
        let step = refused(runner, &grant, "fs.leases-enable is 0");
        fs::write(LEASES, "1")?;
        step
    });
    Ok(())
}

/// The files of slices.
fn files() -> Result<BTreeSet<PathBuf>, Fault> {
    let folder = pagemap::SLICE_FILES.trim();
    Ok(fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?)
}

/// The broker's scrub of idle memory makes files of its own, and deletes them.
fn wait_for_files(count: usize) -> Step {
    wait_for_files_within(count, TIMEOUT)
}

fn wait_for_files_within(count: usize, limit: Duration) -> Step {
    eventually(limit, || match files()? {
        files if files.len() == count => Ok(()),
        files => Err(Fault::Untrue(format!("the files of slices stay {files:?}, not {count}"))),
    })
}

fn has_files(wanted: &[&PathBuf; 2]) -> Step {
    let all = files()?;
    if wanted[0] != wanted[1] && wanted.iter().all(|file| all.contains(*file)) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("the owners have {wanted:?} of {all:?}")))
}

/// The file has all of its bytes and blocks.
fn is_whole(file: &Path) -> Step {
    let metadata = fs::metadata(file)?;
    let blocks = std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
    if metadata.len() == SIZE && blocks >= SIZE {
        return Ok(());
    }
    Err(Fault::Untrue(format!("{} has {} bytes and {blocks} in blocks", file.display(), metadata.len())))
}

/// The medium has `mark` so many times.
fn marks(mark: u64, count: usize) -> Step {
    let iomem = fs::read_to_string("/proc/iomem")?;
    let line = iomem.lines().rfind(|line| line.contains(PERSISTENT)).ok_or("no persistent memory")?;
    let range = line.trim().split(' ').next().and_then(|range| range.split_once('-')).ok_or("no range")?;
    let [first, last] = [range.0, range.1].map(|text| u64::from_str_radix(text, 16));
    let (first, last) = (first?, last?);
    let found = physical(Extent { start: first, size: last - first + 1 })?.count(mark);
    if found == count {
        return Ok(());
    }
    Err(Fault::Untrue(format!("{found} words of an owner lie at {first:#x}..{last:#x}, not {count}")))
}

/// A slice that is a PCI function has a file as well, until its server ends.
fn a_server_has_its_own(runner: &Runner, region: &str) -> Step {
    let socket = runner.work.join("slice.sock");
    let mut command = Command::new(&runner.tools.device);
    command.args(["serve", "--region", region, "--pxm", "0", "--size", "24MiB", "--socket"]).arg(&socket);
    let mut server = serve(command, Stdio::null())?;
    let served = wait_for_files(1);
    server.request_slice()?;
    let code = server.wait()?;
    served?;
    if code != Some(0) {
        return Err(Fault::Untrue(format!("the server's exit code is {code:?}")));
    }
    wait_for_files(0)
}

/// `egm-device ledger repair` finds `file`, which has no owner.
fn is_left(runner: &Runner, file: &Path) -> Step {
    let said = output(Command::new(&runner.tools.device).args(["ledger", "repair", "--json"]))?;
    let repair: Value = serde_json::from_slice(&said.stdout)?;
    let bytes = repair["files"][0]["bytes"].as_u64();
    if file.exists() && bytes.is_some_and(|bytes| bytes >= SIZE) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("{} is there: {}, and the repair is {repair}", file.display(), file.exists())))
}

/// The broker quarantines the slice of `file`, because a pipe has a page of it: the file stays.
fn is_quarantined(runner: &Runner, file: &Path) -> Step {
    // The broker waits for pages for 30 s first.
    eventually(2 * TIMEOUT, || {
        let said = output(Command::new(&runner.tools.device).args(["ledger", "show", "--json"]))?;
        let shown = String::from_utf8_lossy(&said.stdout).into_owned();
        if !file.exists() {
            return Err(Fault::Untrue(format!("{} is gone while a pipe has a page of it", file.display())));
        }
        match shown.contains("busy-pages") {
            true => Ok(()),
            false => Err(Fault::Untrue(format!("no page is busy: {shown}"))),
        }
    })
}

/// The audit log has no end of a quarantine.
fn is_not_released() -> Step {
    let log = fs::read_to_string(FINDINGS)?;
    match log.lines().find(|line| line.contains("\"release\"")) {
        None => Ok(()),
        Some(line) => Err(Fault::Untrue(format!("the log reports that busy pages are free: {line}"))),
    }
}

/// `egm-device` with these `arguments` fails, and names the reason.
fn refused(runner: &Runner, arguments: &[&str], reason: &str) -> Step {
    let said = output(Command::new(&runner.tools.device).args(arguments))?;
    let error = String::from_utf8_lossy(&said.stderr);
    if !said.status.success() && error.contains(reason) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("{arguments:?} ends with {}: {error}", said.status)))
}

impl Owner {
    /// It leaves a page of its slice in a pipe; returns the process that keeps the pipe.
    fn keeps_a_page(&mut self) -> Result<Pid, Fault> {
        let input = self.input.as_mut().ok_or("the owner has ended")?;
        writeln!(input, "{KEEP}")?;
        let line = self.line()?;
        let pid = line.parse().ok().and_then(Pid::from_raw);
        pid.ok_or_else(|| Fault::Untrue(format!("an owner keeps no page: {line}")))
    }

    /// It cannot change the size or the blocks of its file.
    fn cannot_change(&mut self) -> Step {
        let input = self.input.as_mut().ok_or("the owner has ended")?;
        writeln!(input, "{CHANGE}")?;
        match self.line()?.as_str() {
            "refused" => Ok(()),
            done => Err(Fault::Untrue(format!("an owner of {} {done} it", self.device.display()))),
        }
    }
}
