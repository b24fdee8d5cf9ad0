//! A VMM that is started, awaited, measured and killed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::engine::error::LabError;

/// Maximum console output in bytes without the mark.
const MAX_CONSOLE: usize = 1 << 20;

/// A running VMM with a guest that has printed its mark; killed on drop.
#[derive(Debug)]
pub(crate) struct Launched {
    child: Child,
    console: Option<ChildStdout>,
    /// From just before the process was made, or from the first request, until the guest's word came.
    pub(crate) elapsed: Duration,
}

impl Launched {
    /// Starts `command` and waits until its standard output has `mark`, `deadline` at most. Its standard error goes to
    /// the file `errors`, and the end of that into the error.
    pub(crate) fn start(
        command: Command,
        mark: &str,
        deadline: Duration,
        errors: &Path,
    ) -> Result<Self, LabError> {
        Self::requested(command, mark, deadline, errors, Ok)
    }

    /// The same for a guest that `request` starts; it gets the time before the process was made, and returns the time from
    /// which the guest's word is awaited.
    pub(crate) fn requested(
        mut command: Command,
        mark: &str,
        deadline: Duration,
        errors: &Path,
        request: impl FnOnce(Instant) -> Result<Instant, LabError>,
    ) -> Result<Self, LabError> {
        let log = File::create(errors).map_err(LabError::file("write", errors))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let program = command.get_program().to_string_lossy().into_owned();
        let begun = Instant::now();
        let child = command.spawn().map_err(LabError::file("run", &program))?;
        let mut launched = Self { child, console: None, elapsed: Duration::ZERO };
        launched.console = launched.child.stdout.take();
        let begun = request(begun)?;
        let said = match &mut launched.console {
            Some(console) => wait_for(console, mark.as_bytes(), begun, deadline),
            None => Err("it has no standard output".to_owned()),
        };
        launched.elapsed = begun.elapsed();
        said.map_err(|problem| {
            let said = fs::read_to_string(errors).unwrap_or_default();
            let tail = said.trim_end().lines().last().unwrap_or_default();
            LabError::Content { what: program, problem: format!("{problem} before \"{mark}\": {tail}") }
        })?;
        Ok(launched)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Takes what its guest prints from now on, so that no write of the VMM waits.
    pub(crate) fn drain(&mut self) {
        if let Some(mut console) = self.console.take() {
            // Its end is the VMM's.
            std::thread::spawn(move || io::copy(&mut console, &mut io::sink()));
        }
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // It may have ended by itself; either way nothing of it is left.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_for(
    console: &mut ChildStdout,
    mark: &[u8],
    begun: Instant,
    deadline: Duration,
) -> Result<(), String> {
    let (mut seen, mut buffer) = (Vec::<u8>::new(), [0; 4096]);
    while seen.len() < MAX_CONSOLE {
        let left = deadline.saturating_sub(begun.elapsed());
        let timeout = Timespec::try_from(left).map_err(|error| error.to_string())?;
        match poll(&mut [PollFd::new(console, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(format!("{} s passed", deadline.as_secs())),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(io::Error::from(error).to_string()),
        }
        let count = console.read(&mut buffer).map_err(|error| error.to_string())?;
        if count == 0 {
            return Err("it ended".to_owned());
        }
        // Searches only new output: a repeated search would count as the guest's time.
        let from = seen.len().saturating_sub(mark.len());
        seen.extend(buffer.iter().take(count));
        if seen.get(from..).is_some_and(|new| new.windows(mark.len()).any(|w| w == mark)) {
            return Ok(());
        }
    }
    Err(format!("{MAX_CONSOLE} bytes came"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, deadline: Duration) -> Result<Launched, LabError> {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Launched::start(command, "mark", deadline, &directory.path().join("errors"))
    }

    #[test]
    fn it_runs_until_dropped_once_the_mark_came_in_pieces() {
        let launched = shell("printf ma; printf rk; exec sleep 1000", Duration::from_secs(60)).unwrap();
        let process = format!("/proc/{}", launched.id());
        assert!(Path::new(&process).exists());
        drop(launched);
        assert!(!Path::new(&process).exists());
    }

    #[test]
    fn a_start_that_ends_or_is_late_is_an_error_with_the_last_output() {
        let error = shell("echo no such kernel >&2", Duration::from_secs(60)).unwrap_err().to_string();
        assert!(error.contains("it ended") && error.ends_with("no such kernel"), "{error}");
        let error = shell("exec sleep 1000", Duration::from_millis(1)).unwrap_err().to_string();
        assert!(error.contains("s passed"), "{error}");
    }
}
