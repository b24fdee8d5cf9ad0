//! Supervision of a child process: reads its console, limits its time, and leaves no process behind.

use std::fs::File;
use std::io::{IsTerminal, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::engine::console::Console;
use crate::engine::error::LabError;

/// End of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// By itself, with this exit code.
    Exit(i32),
    /// By this signal, which the deadline did not send.
    Signal(i32),
    /// Killed at its deadline.
    Deadline,
}

/// Time limit of a child.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Limit {
    /// This long after its start.
    Total(Duration),
    /// This long after it last wrote something.
    Silence(Duration),
}

/// Time that a child has left.
struct Timer {
    limit: Limit,
    /// Its start, or, for a limit of silence, its last output.
    since: Instant,
}

impl Timer {
    /// Records output of the child at `now`.
    fn output(&mut self, now: Instant) {
        if matches!(self.limit, Limit::Silence(_)) {
            self.since = now;
        }
    }

    fn left(&self, now: Instant) -> Duration {
        let (Limit::Total(allowed) | Limit::Silence(allowed)) = self.limit;
        allowed.saturating_sub(now.saturating_duration_since(self.since))
    }
}

/// Reaction of the watcher to a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reaction {
    Go,
    /// The child, and not its descendants, gets SIGTERM.
    Terminate,
    /// The child gets SIGPWR.
    Press,
    /// The child gets SIGKILL.
    Kill,
}

enum Event {
    Bytes(Vec<u8>),
    Closed,
    Exited(std::io::Result<ExitStatus>),
}

/// Runs `command` until it ends or is late. Its standard output goes line by line to `line` and to the
/// file `console`, its standard error to the file `errors`.
///
/// The whole process group is gone when this returns.
pub(crate) fn watch(
    command: Command,
    limit: Limit,
    console: &Path,
    errors: &Path,
    line: impl FnMut(&str) -> Reaction,
) -> Result<Ending, LabError> {
    let log = File::create(console).map_err(LabError::file("write", console))?;
    let stderr = File::create(errors).map_err(LabError::file("write", errors))?;
    let mut command = bound_to_us(command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr).process_group(0);
    let program = command.get_program().to_os_string();
    if let Some(text) = announced(limit).filter(|_| !std::io::stderr().is_terminal()) {
        eprintln!("{text}");
    }
    let mut child = command.spawn().map_err(LabError::file("run", program))?;
    let pid = Pid::from_child(&child);
    // Bounded: a guest that writes faster than it is read waits.
    let (sender, events) = sync_channel(64);
    if let Some(out) = child.stdout.take() {
        spawn_reader(out, sender.clone());
    }
    spawn_waiter(child, sender);
    follow(&events, pid, limit, Console::new(log), line)
}

/// Line to print before a child with a deadline of its own: a supervisor that limits this machine's silence counts from
/// here. Without it, two slow guests in a row would look like a hang.
fn announced(limit: Limit) -> Option<String> {
    match limit {
        Limit::Total(most) => Some(format!("a machine starts, for {} s at most", most.as_secs())),
        Limit::Silence(_) => None,
    }
}

/// The same command, killed by the kernel when this process ends in any way, if util-linux is installed to request
/// that. (The emulated host has none, but it powers off with this process.)
pub(crate) fn bound_to_us(command: Command) -> Command {
    const SETPRIV: &str = "/usr/bin/setpriv";
    if !Path::new(SETPRIV).exists() {
        return command;
    }
    let mut bound = Command::new(SETPRIV);
    bound.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => bound.env(key, value),
            None => bound.env_remove(key),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        bound.current_dir(folder);
    }
    bound
}

fn follow(
    events: &Receiver<Event>,
    pid: Pid,
    limit: Limit,
    mut console: Console,
    mut line: impl FnMut(&str) -> Reaction,
) -> Result<Ending, LabError> {
    let mut timer = Timer { limit, since: Instant::now() };
    let (mut status, mut closed, mut late) = (None, false, false);
    while status.is_none() || !closed {
        let left = if late { Duration::MAX } else { timer.left(Instant::now()) };
        match events.recv_timeout(left) {
            Ok(Event::Bytes(bytes)) => {
                timer.output(Instant::now());
                console.feed(&bytes, |text| react(line(text), pid));
            }
            Ok(Event::Closed) => closed = true,
            Ok(Event::Exited(ended)) => {
                status = Some(ended.map_err(LabError::file("wait for", "a child"))?);
                // A descendant that outlives the child would hold the console open.
                kill_group(pid);
            }
            Err(RecvTimeoutError::Timeout) => {
                late = true;
                kill_group(pid);
                // QEMU's emulation of a process returns from a spawn before the child has a group of its own.
                let _ = kill_process(pid, Signal::KILL);
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    console.flush(&mut |text| react(line(text), pid));
    Ok(match status {
        _ if late => Ending::Deadline,
        Some(status) => {
            status.code().map_or_else(|| Ending::Signal(status.signal().unwrap_or(0)), Ending::Exit)
        }
        None => Ending::Signal(0),
    })
}

fn react(reaction: Reaction, pid: Pid) {
    let signal = match reaction {
        Reaction::Go => return,
        Reaction::Terminate => Signal::TERM,
        Reaction::Press => Signal::POWER,
        Reaction::Kill => Signal::KILL,
    };
    // The process may have just ended by itself.
    let _ = kill_process(pid, signal);
}

fn kill_group(pid: Pid) {
    // An error means that the group is empty, which is the goal.
    let _ = kill_process_group(pid, Signal::KILL);
}

fn spawn_reader(mut out: ChildStdout, events: SyncSender<Event>) {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(count @ 1..) = out.read(&mut buffer) {
            let bytes = buffer.get(..count).unwrap_or_default().to_vec();
            if events.send(Event::Bytes(bytes)).is_err() {
                return;
            }
        }
        let _ = events.send(Event::Closed);
    });
}

fn spawn_waiter(mut child: Child, events: SyncSender<Event>) {
    std::thread::spawn(move || events.send(Event::Exited(child.wait())));
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Limit = Limit::Total(Duration::from_secs(60));

    fn shell(script: &str, limit: Limit, line: impl FnMut(&str) -> Reaction) -> Ending {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        watch(command, limit, &directory.path().join("out"), &directory.path().join("err"), line).unwrap()
    }

    #[test]
    fn the_exit_code_and_every_line_come_back() {
        let mut seen = Vec::new();
        let ending = shell("echo one; echo two; exit 7", LONG, |line| {
            seen.push(line.to_owned());
            Reaction::Go
        });
        assert_eq!((ending, seen), (Ending::Exit(7), vec!["one".to_owned(), "two".to_owned()]));
    }

    #[test]
    fn a_child_past_its_deadline_is_killed_with_all_its_descendants() {
        // The descendant holds the console: were it alive, this would not return.
        let late = Limit::Total(Duration::from_millis(1));
        assert_eq!(shell("sleep 1000 & sleep 1000", late, |_| Reaction::Go), Ending::Deadline);
    }

    #[test]
    fn a_child_that_falls_silent_is_killed() {
        let silence = Limit::Silence(Duration::from_millis(1));
        assert_eq!(shell("echo; sleep 1000", silence, |_| Reaction::Go), Ending::Deadline);
    }

    #[test]
    fn a_late_child_that_has_no_group_of_its_own_yet_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new("sleep").arg("1000").stdout(Stdio::piped()).spawn().unwrap();
        let (pid, out) = (Pid::from_child(&child), child.stdout.take().unwrap());
        let (sender, events) = sync_channel(64);
        spawn_reader(out, sender.clone());
        spawn_waiter(child, sender);
        let console = Console::new(File::create(directory.path().join("out")).unwrap());
        let late = Limit::Total(Duration::from_millis(1));
        assert_eq!(follow(&events, pid, late, console, |_| Reaction::Go).unwrap(), Ending::Deadline);
    }

    #[test]
    fn output_extends_a_limit_of_silence_and_no_other() {
        let (begun, second) = (Instant::now(), Duration::from_secs(1));
        let left = |limit| {
            let mut timer = Timer { limit, since: begun };
            timer.output(begun + 2 * second);
            [3, 9].map(|seconds| timer.left(begun + seconds * second))
        };
        assert_eq!(left(Limit::Silence(3 * second)), [2 * second, Duration::ZERO]);
        assert_eq!(left(Limit::Total(4 * second)), [second, Duration::ZERO]);
    }

    #[test]
    fn a_child_with_a_deadline_is_announced_to_a_watcher_of_silence() {
        let said = announced(Limit::Total(Duration::from_secs(300))).unwrap();
        assert!(said.contains("300 s") && !said.starts_with(crate::engine::progress::PREFIX), "{said}");
        assert_eq!(announced(Limit::Silence(Duration::from_secs(300))), None);
    }

    #[test]
    fn a_descendant_does_not_outlive_the_child() {
        assert_eq!(shell("sleep 1000 & exit 0", LONG, |_| Reaction::Go), Ending::Exit(0));
    }

    #[test]
    fn a_line_can_ask_for_a_signal() {
        let script = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done";
        let on = |line: &str| if line == "ready" { Reaction::Terminate } else { Reaction::Go };
        assert_eq!(shell(script, LONG, on), Ending::Exit(5));
    }
}
