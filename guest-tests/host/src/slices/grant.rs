//! Grants of slices to programs that are no machines, by `egm-device carve grant`.

use std::fs::File;
use std::process::{Command, Output};

use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::engine::command::output;
use crate::engine::error::LabError;
use crate::engine::step::{Fault, Step};
use crate::hosts::physical::Physical;
use crate::runner::machine::Runner;

/// The next owner of `size` bytes of `region`, a program that is no machine, finds zeros.
pub(crate) fn next_finds_zeros(runner: &Runner, region: &str, size: &str) -> Step {
    let output = run_zeros(runner, region, size)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Fault::Untrue(format!("{}: {said}", output.status)))
}

/// Output of `egm-lab zeros` on a grant of `size` bytes of `region`.
pub(crate) fn run_zeros(runner: &Runner, region: &str, size: &str) -> Result<Output, LabError> {
    let mut command = Command::new(&runner.tools.device);
    command.args(["carve", "grant", "--region", region, "--size", size, "--"]);
    output(command.arg(&runner.tools.lab).arg("zeros"))
}

/// `egm-lab zeros`: whether the slice that `egm-device carve grant` passes is zero from end to end.
pub(crate) fn check_zeros() -> Result<bool, LabError> {
    let Inherited { file, offset, size } = Inherited::new()?;
    let memory = Physical::map(&file, offset, size).map_err(LabError::file("map", "the slice"))?;
    let first = memory.first_not_zero();
    if let Some(offset) = first {
        eprintln!("byte {offset:#x} of the slice is not zero");
    }
    Ok(first.is_none())
}

/// The slice that `egm-device carve grant` passes to this process.
pub(crate) struct Inherited {
    pub(crate) file: File,
    /// Its first byte in the file.
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Inherited {
    pub(crate) fn new() -> Result<Self, LabError> {
        let number = |name: &str| {
            let text = std::env::var(name).unwrap_or_default();
            text.parse::<u64>().map_err(|_| LabError::Usage(format!("{name} is \"{text}\", not a number")))
        };
        let file = inherited(number("EGM_SLICE_FD")?).map_err(LabError::file("take", "EGM_SLICE_FD"))?;
        Ok(Self { file, offset: number("EGM_SLICE_OFFSET")?, size: number("EGM_SLICE_SIZE")? })
    }
}

/// A descriptor that this process was started with; opening its path anew would not do, because EGM devices open once.
fn inherited(descriptor: u64) -> std::io::Result<File> {
    let descriptor = i32::try_from(descriptor).map_err(std::io::Error::other)?;
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    Ok(pidfd_getfd(this, descriptor, PidfdGetfdFlags::empty())?.into())
}
