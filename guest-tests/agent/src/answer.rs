//! A process of this program that answers with one document, on a pipe. Its libraries' output is kept, to explain a
//! crash. Past its deadline it is killed with all that it started. All of that ends too when the requesting process
//! ends before, by Ctrl-C or otherwise: that process holds the writing end of its standard input.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::error::Broken;

/// Time that a process has after its end until its pipes are closed.
const GRACE: Duration = Duration::from_secs(5);
/// Interval in which a person sees that a process is still running.
const REDRAW: Duration = Duration::from_millis(500);
/// Bytes of a process' last words that are kept.
pub(crate) const LAST_WORDS: usize = 2048;
/// Lines of them that a reason quotes.
const QUOTED: usize = 4;

/// Writes what `document` gives to what was standard output, which then is standard error.
pub(crate) fn answer(document: impl FnOnce() -> String) -> ExitCode {
    match own_output() {
        Ok(mut output) => {
            // The caller then sees that nothing came.
            let _ = output.write_all(document().as_bytes());
            ExitCode::SUCCESS
        }
        Err(broken) => {
            eprintln!("error: {broken}");
            ExitCode::FAILURE
        }
    }
}

/// The pipe to the one that started this process. Libraries print where they like; on standard output they would be
/// taken for the answer.
fn own_output() -> Result<File, Broken> {
    let system = |error| Broken::system("cannot keep standard output")(error);
    if let Some(line) = lifeline()? {
        end_with(line)?;
    }
    let output = rustix::io::fcntl_dupfd_cloexec(std::io::stdout().as_fd(), 3).map_err(system)?;
    rustix::stdio::dup2_stdout(std::io::stderr().as_fd()).map_err(system)?;
    Ok(File::from(output))
}

/// Standard input, if it is the pipe of [`answer_of`]: this process then becomes the first of its group. For a person
/// or a script that calls this program, standard input is something else.
fn lifeline() -> Result<Option<OwnedFd>, Broken> {
    let system = |error| Broken::system("cannot keep standard input")(error);
    let input = std::io::stdin();
    let is_pipe =
        rustix::fs::fstat(&input).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
    if !is_pipe || rustix::process::getpgrp() != rustix::process::getpid() {
        return Ok(None);
    }
    let line = rustix::io::fcntl_dupfd_cloexec(input.as_fd(), 3).map_err(system)?;
    // Libraries and programs that read standard input find its end.
    let nothing = File::open("/dev/null").map_err(Broken::system("cannot open /dev/null"))?;
    rustix::stdio::dup2_stdin(&nothing).map_err(system)?;
    Ok(Some(line))
}

/// Ends this process and all of its group as soon as the other end of `line` is closed. A death signal of the kernel's
/// would end this process alone, and leave what it started.
fn end_with(line: OwnedFd) -> Result<(), Broken> {
    let wait = move || {
        // Nothing is ever written there.
        let _ = std::io::copy(&mut File::from(line), &mut std::io::sink());
        let _ = rustix::process::kill_current_process_group(Signal::KILL);
    };
    let thread = std::thread::Builder::new().name("lifeline".to_owned()).spawn(wait);
    thread.map(drop).map_err(Broken::system("cannot start a thread"))
}

/// The answer of `command`, `most` bytes at most; `each` receives the elapsed time now and then.
///
/// # Errors
/// In words: it could not be started, did not end within `deadline`, ended without an answer, or wrote too much.
pub(crate) fn answer_of(
    mut command: Command,
    deadline: Duration,
    most: usize,
    each: &mut dyn FnMut(Duration),
) -> Result<Vec<u8>, String> {
    // Standard input closes with this process, however that ends.
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(|error| format!("cannot be started: {error}"))?;
    let output = child.stdout.take().map(|pipe| in_background(move || first(pipe, most.saturating_add(1))));
    let words = child.stderr.take().map(|pipe| in_background(move || last(pipe, LAST_WORDS)));
    let Some(text) = output.and_then(|output| wait(&output, deadline, each)) else {
        let is_gone = kill(&mut child).is_some();
        let left = if is_gone { "" } else { ", and is still there: it waits in the kernel, see dmesg" };
        return Err(format!("did not end within {} s and was killed{left}", deadline.as_secs()));
    };
    if text.len() > most {
        kill(&mut child);
        return Err(format!("its answer is longer than {most} bytes"));
    }
    if !text.is_empty() {
        kill(&mut child);
        return Ok(text);
    }
    // Its end closes the pipe; what it exits with is settled by then, so killing it changes no status.
    let words = words.and_then(|words| words.recv_timeout(GRACE).ok()).unwrap_or_default();
    let how = kill(&mut child).map_or_else(|| "in an unknown way".to_owned(), |status| status.to_string());
    Err(format!("ended without an answer, {how}{}", quoted(&words)))
}

/// The output, if it comes before the deadline.
fn wait<T>(output: &Receiver<T>, deadline: Duration, each: &mut dyn FnMut(Duration)) -> Option<T> {
    let begun = Instant::now();
    loop {
        let since = begun.elapsed();
        each(since);
        let left = deadline.checked_sub(since)?;
        match output.recv_timeout(left.min(REDRAW)) {
            Ok(text) => return Some(text),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

/// Kills what is left of a process and its group. Returns how the process ended, or `None` if it has not, [`GRACE`]
/// later: one that waits in the kernel for a device cannot be killed before that answers, and nothing waits with it.
fn kill(child: &mut Child) -> Option<ExitStatus> {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // The group is gone when all of it ended by itself.
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    // It may not have a group of its own yet: a child that QEMU emulates makes it after `spawn` returns.
    let _ = child.kill();
    ended(child, GRACE)
}

/// Exit status of a process, if it ends within `grace`.
pub(crate) fn ended(child: &mut Child, grace: Duration) -> Option<ExitStatus> {
    let limit = Timespec { tv_sec: i64::try_from(grace.as_secs()).unwrap_or(i64::MAX), tv_nsec: 0 };
    if let Ok(process) = rustix::process::pidfd_open(Pid::from_child(child), PidfdFlags::empty()) {
        let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit));
        return child.try_wait().ok().flatten();
    }
    // A kernel before 5.3 has no such descriptors, so it is asked again and again.
    looked(child, grace)
}

/// Waits by polling every hundredth of a second.
fn looked(child: &mut Child, grace: Duration) -> Option<ExitStatus> {
    let (begun, pause) = (Instant::now(), Timespec { tv_sec: 0, tv_nsec: 10_000_000 });
    loop {
        match child.try_wait() {
            Ok(None) if begun.elapsed() < grace => {
                let _ = poll(&mut [], Some(&pause));
            }
            status => return status.ok().flatten(),
        }
    }
}

/// Runs `work` in a thread of its own, which sends the result.
pub(crate) fn in_background<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = send.send(work());
    });
    receive
}

/// The first bytes of a pipe.
pub(crate) fn first(pipe: impl Read, most: usize) -> Vec<u8> {
    let mut text = Vec::new();
    let _ = pipe.take(most as u64).read_to_end(&mut text);
    text
}

/// The last bytes of a pipe.
pub(crate) fn last(mut pipe: impl Read, most: usize) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = pipe.read(&mut buffer) {
        kept.extend_from_slice(buffer.get(..count).unwrap_or_default());
        kept.drain(..kept.len().saturating_sub(most));
    }
    kept
}

/// The last lines of a process' output, for a reason.
pub(crate) fn quoted(words: &[u8]) -> String {
    let text = String::from_utf8_lossy(words);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let lines = lines.get(lines.len().saturating_sub(QUOTED)..).unwrap_or_default();
    if lines.is_empty() { String::new() } else { format!("; its last words: {}", lines.join(" / ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_bounded_and_quoted_from_their_end() {
        assert_eq!(last(&[b'x'; 10_000][..], 100).len(), 100);
        assert_eq!(quoted(b"a\nb\n\nc\nd\ne\n"), "; its last words: b / c / d / e");
        assert_eq!(quoted(b"\n \n"), "");
    }

    #[test]
    fn a_wait_for_an_end_lasts_no_longer_than_its_grace_period() {
        let mut command = Command::new("/bin/cat");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0).spawn().unwrap();
        assert_eq!(ended(&mut child, Duration::ZERO), None, "its input is open");
        assert_eq!(looked(&mut child, Duration::from_millis(30)), None, "its input is still open");
        let mut other = Command::new("/bin/true").spawn().unwrap();
        assert!(looked(&mut other, Duration::from_secs(60)).is_some_and(|status| status.success()));
        assert!(kill(&mut child).is_some_and(|status| !status.success()));
    }

    fn of(script: &str, deadline: u64, most: usize) -> Result<Vec<u8>, String> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        answer_of(command, Duration::from_secs(deadline), most, &mut |_| {})
    }

    #[test]
    fn an_answer_comes_whatever_the_process_becomes_and_a_death_is_reported_with_its_words() {
        assert_eq!(of("printf hello; exec >&-; exit 3", 60, 9).as_deref(), Ok(&b"hello"[..]));
        let died = of("echo oh no >&2; kill -SEGV $$", 60, 9).unwrap_err();
        assert!(died.contains("signal: 11") && died.ends_with("its last words: oh no"), "{died}");
        assert!(of("printf 0123456789", 60, 9).unwrap_err().contains("longer than 9 bytes"));
        assert!(of("exec cat /dev/zero >/dev/null", 0, 9).unwrap_err().contains("within 0 s"));
    }
}
