//! Events by cloud-hypervisor's names, in a file that its option `--event-monitor` names.
//!
//! Its users expect an object for each event and an empty line behind it. Events that cloud-hypervisor does not have are
//! on the API's stream only.

use std::fs::File;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde::Serialize;

/// An event of cloud-hypervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CloudEvent {
    /// The program serves.
    Starting,
    Booting,
    /// The vCPUs run.
    Booted,
    Paused,
    Resumed,
    Snapshotting,
    Snapshotted,
    Restoring,
    /// The machine is in the state of a snapshot, and its vCPUs wait.
    Restored,
    /// The machine has ended and starts again, or its guest was reset.
    Rebooting,
    /// It runs again.
    Rebooted,
    /// The machine has ended.
    Shutdown,
    /// Its configuration is removed.
    Deleted,
    /// The program ends.
    Ending,
}

impl CloudEvent {
    /// Its source and its name.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Starting => ("vmm", "starting"),
            Self::Booting => ("vm", "booting"),
            Self::Booted => ("vm", "booted"),
            Self::Paused => ("vm", "paused"),
            Self::Resumed => ("vm", "resumed"),
            Self::Snapshotting => ("vm", "snapshotting"),
            Self::Snapshotted => ("vm", "snapshotted"),
            Self::Restoring => ("vm", "restoring"),
            Self::Restored => ("vm", "restored"),
            Self::Rebooting => ("vm", "rebooting"),
            Self::Rebooted => ("vm", "rebooted"),
            Self::Shutdown => ("vm", "shutdown"),
            Self::Deleted => ("vm", "deleted"),
            Self::Ending => ("vmm", "shutdown"),
        }
    }
}

#[derive(Serialize)]
struct EventObject {
    /// Since the program's start.
    timestamp: Duration,
    source: &'static str,
    event: &'static str,
    /// No event has any.
    properties: Option<()>,
}

/// A file to which each event is written.
#[derive(Debug)]
pub(crate) struct EventMonitor {
    file: File,
    begun: Instant,
}

impl EventMonitor {
    /// Writes to `file`, in a program that has run for `uptime` already. A write does not wait, also not those of other
    /// programs that have the same open file.
    ///
    /// # Errors
    /// `PermissionDenied` for a file that is open for reading only, and those of fcntl(2).
    pub(crate) fn new(file: File, uptime: Duration) -> io::Result<Self> {
        let flags = fcntl_getfl(&file)?;
        if flags & OFlags::RWMODE == OFlags::RDONLY {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        fcntl_setfl(&file, flags | OFlags::NONBLOCK)?;
        let now = Instant::now();
        Ok(Self { file, begun: now.checked_sub(uptime).unwrap_or(now) })
    }

    pub(crate) const fn file(&self) -> &File {
        &self.file
    }

    /// Time since the program's start.
    pub(crate) fn uptime(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Writes `event`. The machine waits for no reader: an event that a pipe has no room for is lost.
    pub(crate) fn write(&self, event: CloudEvent) {
        let (source, event) = event.names();
        let object = EventObject { timestamp: self.uptime(), source, event, properties: None };
        let text = serde_json::to_string_pretty(&object).unwrap_or_default() + "\n\n";
        // A pipe takes all of at most PIPE_BUF bytes, or none of them (pipe(7)).
        let _ = (&self.file).write(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn an_event_is_an_object_as_libvirt_reads_it() {
        let (mut reader, writer) = io::pipe().unwrap();
        let monitor =
            EventMonitor::new(File::from(std::os::fd::OwnedFd::from(writer)), Duration::from_secs(9))
                .unwrap();
        monitor.write(CloudEvent::Booted);
        monitor.write(CloudEvent::Ending);
        drop(monitor);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        let objects: Vec<serde_json::Value> =
            text.split_terminator("\n\n").map(|object| serde_json::from_str(object).unwrap()).collect();
        let names: Vec<_> = objects.iter().map(|object| (&object["source"], &object["event"])).collect();
        assert_eq!(names, [(&"vm".into(), &"booted".into()), (&"vmm".into(), &"shutdown".into())]);
        assert!(objects[0]["timestamp"]["secs"].as_u64().unwrap() >= 9, "{text}");
        assert!(objects[0]["timestamp"]["nanos"].is_u64() && objects[0]["properties"].is_null(), "{text}");
    }

    #[test]
    fn a_reader_that_takes_nothing_holds_up_nothing() {
        let (reader, writer) = io::pipe().unwrap();
        let monitor =
            EventMonitor::new(File::from(std::os::fd::OwnedFd::from(writer)), Duration::ZERO).unwrap();
        assert!(
            EventMonitor::new(File::open("/dev/null").unwrap(), Duration::ZERO).is_err(),
            "it cannot be written"
        );
        (0..2000).for_each(|_| monitor.write(CloudEvent::Paused)); // more than a pipe has room for
        drop(reader);
        monitor.write(CloudEvent::Resumed);
    }
}
