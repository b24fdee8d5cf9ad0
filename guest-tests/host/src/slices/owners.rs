//! Slices of one split device-DAX region: each owner has a device of its own, which is removed after its return.
//!
//! The owners are unprivileged users. Each runs `egm-device carve grant` with a hidden command of this program, which uses the
//! slice, tries to reach another owner's memory when it reads the path of that device, and ends with its standard input.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::fs::{FallocateFlags, fallocate};

use crate::engine::error::LabError;
use crate::engine::step::{TIMEOUT, eventually};
use crate::hosts::extent::Extent;
use crate::hosts::physical::Physical;
use crate::hosts::served::serve;
use crate::runner::machine::Runner;
use crate::runner::steps::{Fault, Step, Steps};
use crate::slices::broker::Broker;
use crate::slices::grant::Inherited;
use crate::slices::host_words::{self, physical};

/// The owners: user and the word that each writes.
pub(crate) const OWNERS: [User; 2] =
    [User { id: 4001, mark: 0x9d3c_51e8_f00b_6a27 }, User { id: 4002, mark: 0x5ae1_0c97_26d4_83bf }];
/// Bytes of a slice.
pub(crate) const SIZE: u64 = 64 << 20;
/// Operations that an owner tries with its own file.
pub(crate) const CHANGE: &str = "change";
/// Request to an owner to leave a page of its slice in a pipe.
pub(crate) const KEEP: &str = "keep";
/// Keeps standard input, and no other descriptor: those of the slice and of its grant are inherited.
const ALONE: &str =
    "cd /proc/self/fd; for fd in *; do [ $fd -le 2 ] || eval \"exec $fd>&-\"; done; exec sleep 100000";
/// Devices of all device-DAX regions.
const DEVICES: &str = "/sys/bus/dax/devices";
/// Prefix of an owner's output.
const OWNER: &str = "owner: ";

/// Grants two slices to two users and one to a server, and takes all three back.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, region, report, .. } = *steps;
    let (socket, policy) = (runner.work.join("broker.sock"), report.join("policy.json"));
    fs::create_dir_all(&runner.work).map_err(LabError::file("make", &runner.work))?;
    write_policy(&policy, region)?;
    let _broker = Broker::start(runner, region, &socket, report, Some(&policy))?;
    let [one, other] = OWNERS.map(|user| Owner::start(runner, region, &socket, user));
    let (mut one, mut other) = (one?, other?);
    steps.step("a device each", || each_has_a_device(region, &one, &other));
    steps.step("own memory", || one.has_its_memory(&other).and_then(|()| other.has_its_memory(&one)));
    steps.step("not the other's", || {
        let (of_one, of_other) = (one.device.clone(), other.device.clone());
        one.cannot_reach(&of_other).and_then(|()| other.cannot_reach(&of_one))
    });
    let memory = [one.memory.clone(), other.memory.clone()];
    steps.step("a server has its own", || a_server_has_its_own(runner, region, [&one, &other]));
    steps.step("returned", || {
        one.end()?;
        wait_until_removed(region, one.memory()?)?;
        other.has_mark()?;
        other.end()?;
        wait_until_removed(region, other.memory()?)
    });
    steps.step("scrubbed", || memory.iter().try_for_each(|extent| host_words::zeros(extent.clone().ok())));
    Ok(())
}

pub(crate) fn write_policy(path: &Path, region: &str) -> Result<(), LabError> {
    let users = OWNERS.map(|user| user.id);
    let rules = [0].iter().chain(&users).map(|user| {
        serde_json::json!({ "name": format!("user-{user}"), "user": user, "regions": [region], "quota": "1GiB" })
    });
    let policy = serde_json::json!({ "rules": rules.collect::<Vec<_>>() });
    fs::write(path, policy.to_string()).map_err(LabError::file("write", path))
}

/// An unprivileged user and the word that it writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User {
    pub(crate) id: u32,
    pub(crate) mark: u64,
}

/// An owner process, from the host's side.
pub(crate) struct Owner {
    child: Child,
    pub(crate) input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub(crate) mark: u64,
    /// Path of its slice's device or file.
    pub(crate) device: PathBuf,
    /// Host physical memory of that device.
    memory: Result<Extent, String>,
}

impl Owner {
    pub(crate) fn start(
        runner: &Runner,
        region: &str,
        socket: &Path,
        User { id, mark }: User,
    ) -> Result<Self, LabError> {
        let program = &runner.tools.device;
        let mut command = Command::new(program);
        command.args(["carve", "grant", "--region", region, "--size", &SIZE.to_string(), "--broker"]);
        command.arg(socket).arg("--").arg(&runner.tools.lab).args(["slice-owner", &mark.to_string()]);
        command.uid(id).gid(id).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(LabError::file("run", program))?;
        let missing = || LabError::file("talk to", program)(io::ErrorKind::BrokenPipe.into());
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or_else(missing)?);
        let mut owner =
            Self { child, input, output, mark, device: PathBuf::new(), memory: Err(String::new()) };
        owner.device = owner.line().map_err(|error| refused(program, &error))?.into();
        owner.memory = memory_of(&owner.device).map_err(|error| error.to_string());
        Ok(owner)
    }

    /// The text after [`OWNER`] on the next line that has it.
    pub(crate) fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Some(text) = line.trim_end().strip_prefix(OWNER) {
                return Ok(text.to_owned());
            }
        }
    }

    fn memory(&self) -> Result<Extent, Fault> {
        Ok(self.memory.clone()?)
    }

    /// Its word lies at both ends of its device's memory.
    fn has_mark(&self) -> Step {
        let extent = self.memory()?;
        let memory = physical(extent)?;
        let words = [0, extent.size - 8].map(|at| memory.word(at));
        if extent.size == SIZE && words == [Some(self.mark); 2] {
            return Ok(());
        }
        Err(Fault::Untrue(format!("{extent} have {words:x?} at their ends")))
    }

    /// Its memory has no words but its own.
    fn has_its_memory(&self, other: &Self) -> Step {
        self.has_mark()?;
        let extent = self.memory()?;
        match physical(extent)?.count(other.mark) {
            0 => Ok(()),
            count => Err(Fault::Untrue(format!("{count} words of another owner lie in {extent}"))),
        }
    }

    /// The owner can neither open `device` nor read beyond its own memory.
    pub(crate) fn cannot_reach(&mut self, device: &Path) -> Step {
        let input = self.input.as_mut().ok_or("the owner has ended")?;
        writeln!(input, "{}", device.display())?;
        match self.line()?.as_str() {
            "refused" => Ok(()),
            reached => Err(Fault::Untrue(format!("an owner of {} {reached}", self.device.display()))),
        }
    }

    pub(crate) fn end(&mut self) -> Step {
        drop(self.input.take());
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { Err(Fault::Untrue(format!("an owner ended with {status}"))) }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Why an owner printed no line, with the end of the audit log: an ordinary user gets no reason.
fn refused(program: &Path, error: &io::Error) -> LabError {
    let log = Command::new(program).arg("log").output();
    let log = log.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let last = log.lines().rev().take(3).collect::<Vec<_>>().join("; ");
    LabError::Content {
        what: "an owner's output".into(),
        problem: format!("{error}; the audit log ends: {last}"),
    }
}

/// Host physical memory of `device`, as the kernel shows it.
fn memory_of(device: &Path) -> io::Result<Extent> {
    let folder = Path::new(DEVICES).join(device.file_name().unwrap_or_default());
    let text = |name: &str| fs::read_to_string(folder.join(name));
    let start = u64::from_str_radix(text("mapping0/start")?.trim().trim_start_matches("0x"), 16);
    let size = text("size")?.trim().parse();
    Ok(Extent { start: start.map_err(io::Error::other)?, size: size.map_err(io::Error::other)? })
}

/// Devices of slices of `region`.
fn devices(region: &str) -> Result<BTreeSet<PathBuf>, Fault> {
    let names = fs::read_dir(DEVICES)?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let is_slices = |name: &String| {
        name.strip_prefix(region).and_then(|rest| rest.strip_prefix('.')).is_some_and(|number| number != "0")
    };
    Ok(names.filter(is_slices).map(|name| Path::new("/dev").join(name)).collect())
}

/// Waits until no device has any of `memory`: the broker removes devices asynchronously.
fn wait_until_removed(region: &str, memory: Extent) -> Step {
    eventually(TIMEOUT, || match having(region, memory)? {
        devices if devices.is_empty() => Ok(()),
        devices => Err(Fault::Untrue(format!("{memory} stay in {devices:?}"))),
    })
}

/// Devices of slices of `region` that have any of `memory`. The broker's scrub of idle memory has devices, too, of other memory.
fn having(region: &str, memory: Extent) -> Result<BTreeSet<PathBuf>, Fault> {
    // A device that is being made or removed has no memory.
    let has = |device: &PathBuf| memory_of(device).is_ok_and(|of| of.overlaps(memory));
    Ok(devices(region)?.into_iter().filter(has).collect())
}

fn each_has_a_device(region: &str, one: &Owner, other: &Owner) -> Step {
    for owner in [one, other] {
        let (of_owner, has) = (BTreeSet::from([owner.device.clone()]), having(region, owner.memory()?)?);
        if has != of_owner {
            return Err(Fault::Untrue(format!("the memory of {} is in {has:?}", owner.device.display())));
        }
    }
    let (one, other) = (one.memory()?, other.memory()?);
    if one.overlaps(other) { Err(Fault::Untrue(format!("{one} overlap {other}"))) } else { Ok(()) }
}

/// A server of a slice as a PCI function is a third owner.
fn a_server_has_its_own(runner: &Runner, region: &str, owners: [&Owner; 2]) -> Step {
    let socket = runner.work.join("slice.sock");
    let mut command = Command::new(&runner.tools.device);
    command.args(["serve", "--region", region, "--pxm", "0", "--size", "24MiB", "--socket"]).arg(&socket);
    let mut server = serve(command, Stdio::null())?;
    let device = server.open_file(&format!("/dev/{region}."));
    let memory = device.as_ref().map(|device| memory_of(device));
    server.request_slice()?;
    let code = server.wait()?;
    let memory = memory.ok_or("the server has no device of a slice")??;
    if code != Some(0) {
        return Err(Fault::Untrue(format!("the server's exit code is {code:?}")));
    }
    for owner in owners {
        if owner.memory()?.overlaps(memory) {
            return Err(Fault::Untrue(format!("the server has memory of {}", owner.device.display())));
        }
    }
    wait_until_removed(region, memory)
}

/// `egm-lab slice-owner`: writes `mark` at both ends of its slice, and tries to reach each device that it reads the path of.
pub(crate) fn own(mark: u64) -> Result<(), LabError> {
    let Inherited { file, offset, size } = Inherited::new()?;
    let error = |source| LabError::file("use", "the slice")(source);
    let device = fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)));
    let memory = Physical::map_writable(&file, offset, size).map_err(error)?;
    for at in [0, size.saturating_sub(8)] {
        memory.set_word(at, mark).ok_or_else(|| error(io::ErrorKind::InvalidInput.into()))?;
    }
    println!("{OWNER}{}", device.map_err(error)?.display());
    for line in io::stdin().lines() {
        let path = line.map_err(error)?;
        let end = offset.saturating_add(size);
        let answer = match path.as_str() {
            CHANGE => changed(&file, end),
            KEEP => kept(&memory)?,
            path => reached(&file, end, Path::new(path)),
        };
        println!("{OWNER}{answer}");
    }
    Ok(())
}

/// Reports whether this process reached memory of `device`, or of `file` from `end` on, and how, or was refused.
fn reached(file: &File, end: u64, device: &Path) -> String {
    let tries = [File::options().read(true).write(true).open(device), File::open(device)];
    if tries.iter().any(Result::is_ok) {
        return format!("opens {}", device.display());
    }
    // The kernel reads for this process, because a fault would end the process.
    let read = Physical::map(file, 0, end.saturating_mul(2)).and_then(|memory| {
        let own = File::open("/proc/self/mem")?;
        own.read_exact_at(&mut [0; 8], memory.address())?;
        Ok(own.read_exact_at(&mut [0; 8], memory.address().saturating_add(end)))
    });
    match read {
        Ok(Ok(())) => format!("reads from {end:#x} on"),
        _ => "refused".to_owned(),
    }
}

/// Leaves a page of `memory` in a pipe that a process keeps without the slice's descriptor; returns its id.
fn kept(memory: &Physical) -> Result<String, LabError> {
    let error = |source| LabError::file("leave a page in", "a pipe")(source);
    let (reader, writer) = io::pipe().map_err(error)?;
    memory.share_page(&writer).map_err(error)?;
    let mut command = Command::new("sh");
    command.args(["-c", ALONE]).stdin(reader).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command.spawn().map_err(error)?.id().to_string())
}

/// Properties of its own file that a process can change: size and blocks.
fn changed(file: &File, size: u64) -> String {
    let (whole, none) = (FallocateFlags::empty(), FallocateFlags::KEEP_SIZE);
    let tries = [
        ("truncates", file.set_len(0)),
        ("extends", file.set_len(size.saturating_mul(2))),
        ("punches", fallocate(file, FallocateFlags::PUNCH_HOLE | none, 0, 1 << 20).map_err(Into::into)),
        ("zeroes", fallocate(file, FallocateFlags::ZERO_RANGE, 0, size).map_err(Into::into)),
        ("collapses", fallocate(file, FallocateFlags::COLLAPSE_RANGE, 0, 1 << 20).map_err(Into::into)),
        ("allocates", fallocate(file, whole, size, 1 << 20).map_err(Into::into)),
        ("allocates beyond", fallocate(file, none, size, 1 << 20).map_err(Into::into)),
        ("writes beyond", file.write_all_at(b"x", size)),
    ];
    let done: Vec<_> = tries
        .iter()
        .filter(|(_, tried): &&(_, io::Result<()>)| tried.is_ok())
        .map(|(what, _)| *what)
        .collect();
    if done.is_empty() { "refused".to_owned() } else { done.join(", ") }
}
