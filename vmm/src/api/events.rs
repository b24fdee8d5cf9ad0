//! Events of a machine, and the journal of the latest ones.
//!
//! ```text
//!  machine ── publish ─► Journal: the last 256 lines ─┬─► reader with a cursor
//!  hot-plug ─ publish ─►                              └─► reader that was slow: "lost" with a count, then the oldest line
//! ```
//! A publisher never waits for a reader: a full journal drops its oldest line.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::SystemTime;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use vmm_sys_util::eventfd::EventFd;

use crate::eventfd;
use crate::lock::lock;

/// Lines that a journal keeps.
const KEPT: usize = 256;

/// An event of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum MachineEvent {
    /// The vCPUs run.
    Started,
    /// The machine is in the state of a snapshot, and its vCPUs wait.
    Restored,
    /// The vCPUs wait outside the guest.
    Paused,
    /// The vCPUs run again.
    Resumed,
    /// The guest was reset, and starts again in the same machine.
    Reset,
    /// A snapshot of the paused machine is complete.
    Snapshot,
    /// Guest memory is bad.
    BadMemory {
        /// Id of the backing.
        backing: String,
        /// First bad byte: offset in the backing's region, or in the backing where it has none.
        offset: u64,
        /// Bad bytes.
        size: u64,
    },
    /// A host function was plugged in, is requested back by the host, failed, is lost or left.
    Device {
        /// Id in the machine.
        device: String,
        /// Name of the event.
        change: &'static str,
        /// The event in words.
        text: String,
    },
    /// The machine has ended.
    Stopped {
        /// Name of the reason.
        reason: &'static str,
        /// The reason in words.
        text: String,
    },
    /// The machine did not start.
    Failed {
        /// The reason in words.
        text: String,
    },
    /// The program serves, without a machine that runs. Earlier events are lost.
    Ready {
        /// Name of the reason of the last machine's end, if there was one.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        /// That reason in words.
        #[serde(skip_serializing_if = "Option::is_none")]
        text: Option<String>,
    },
}

/// An event as readers get it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Event")]
struct JournalLine<'a> {
    /// Position in the journal, from 0.
    sequence: u64,
    /// Milliseconds since 1970.
    time_ms: u64,
    #[serde(flatten)]
    event: &'a MachineEvent,
}

/// A line in place of events that this reader missed.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[schemars(rename = "LostEvents")]
enum LossMarker {
    /// The reader was too slow, or came too late.
    Lost {
        /// Number of events that it missed.
        events: u64,
    },
}

/// Schema of one line or one server-sent event.
pub(super) fn line_schema(generator: &mut SchemaGenerator) -> Schema {
    let event = generator.subschema_for::<JournalLine<'_>>();
    let marker = generator.subschema_for::<LossMarker>();
    json_schema!({ "oneOf": [event, marker] })
}

/// The latest events.
#[derive(Debug, Default)]
pub struct Journal {
    lines: Mutex<KeptLines>,
    /// Signalled after each event, once there may be readers.
    wake: OnceLock<Arc<EventFd>>,
}

#[derive(Debug, Default)]
struct KeptLines {
    kept: VecDeque<Arc<str>>,
    /// Number of events so far.
    published: u64,
}

/// Events that a reader has not seen, and the number of those that it missed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) lost: u64,
    /// Sequence number and JSON of each.
    pub(super) lines: Vec<(u64, Arc<str>)>,
}

impl Journal {
    /// A journal that goes on after `published` events of another one.
    pub(super) fn after(published: u64) -> Self {
        let lines = KeptLines { kept: VecDeque::new(), published };
        Self { lines: Mutex::new(lines), wake: OnceLock::new() }
    }

    /// Whether events are kept, because there may be readers.
    pub(crate) fn is_open(&self) -> bool {
        self.wake.get().is_some()
    }

    /// Adds `event`. Does nothing in a machine without an API.
    pub fn publish(&self, event: &MachineEvent) {
        let Some(wake) = self.wake.get() else { return };
        let mut lines = lock(&self.lines);
        let line = JournalLine { sequence: lines.published, time_ms: milliseconds(), event };
        // Every map has string keys, so this cannot fail.
        let text = serde_json::to_string(&line).unwrap_or_default();
        if lines.kept.len() == KEPT {
            lines.kept.pop_front();
        }
        lines.kept.push_back(text.into());
        lines.published = lines.published.saturating_add(1);
        drop(lines);
        let _ = wake.write(1); // a full counter has woken the readers' thread already
    }

    /// Wakes the readers' thread, as an event does.
    pub(super) fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            let _ = wake.write(1);
        }
    }

    /// Keeps events from now on. The descriptor is signalled after each.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(super) fn open(&self) -> io::Result<Arc<EventFd>> {
        let made = Arc::new(eventfd::new()?);
        Ok(Arc::clone(self.wake.get_or_init(|| made)))
    }

    /// At most `most` events from `cursor` on, which moves behind them.
    pub(super) fn read(&self, cursor: &mut u64, most: usize) -> Batch {
        let lines = lock(&self.lines);
        let first = lines.published.saturating_sub(u64::try_from(lines.kept.len()).unwrap_or(u64::MAX));
        let lost = first.saturating_sub(*cursor);
        let from = first.max(*cursor);
        let skipped = usize::try_from(from.saturating_sub(first)).unwrap_or(usize::MAX);
        let unseen = lines.kept.iter().skip(skipped).take(most);
        let lines: Vec<_> = (from..).zip(unseen.cloned()).collect();
        *cursor = from.saturating_add(u64::try_from(lines.len()).unwrap_or(0));
        Batch { lost, lines }
    }

    /// Number of events so far.
    pub(super) fn published(&self) -> u64 {
        lock(&self.lines).published
    }
}

#[cfg(test)]
impl Journal {
    /// A journal that keeps events.
    pub(crate) fn opened() -> Arc<Self> {
        let journal = Arc::<Self>::default();
        journal.open().unwrap();
        journal
    }

    /// Its events as JSON.
    pub(crate) fn values(&self) -> Vec<serde_json::Value> {
        let batch = self.read(&mut 0, usize::MAX);
        batch.lines.iter().map(|(_, text)| serde_json::from_str(text).unwrap()).collect()
    }
}

/// Form of a stream of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventFormat {
    /// A JSON object a line.
    Lines,
    /// Server-sent events (HTML standard, clause 9.2).
    ServerSent,
}

impl Batch {
    pub(super) const fn is_empty(&self) -> bool {
        self.lost == 0 && self.lines.is_empty()
    }

    /// The events for a reader, after a marker that counts the lost ones.
    pub(super) fn encode(&self, format: EventFormat) -> Vec<u8> {
        let marker = LossMarker::Lost { events: self.lost };
        let marker = (self.lost > 0).then(|| serde_json::to_string(&marker).unwrap_or_default());
        let marker = marker.as_deref().map(|text| (None, text));
        let lines = self.lines.iter().map(|(sequence, text)| (Some(*sequence), text.as_ref()));
        let mut out = String::new();
        for (sequence, text) in marker.into_iter().chain(lines) {
            match (format, sequence) {
                (EventFormat::Lines, _) => out.extend([text, "\n"]),
                (EventFormat::ServerSent, None) => out.push_str(&format!("data: {text}\n\n")),
                (EventFormat::ServerSent, Some(id)) => out.push_str(&format!("id: {id}\ndata: {text}\n\n")),
            }
        }
        out.into_bytes()
    }
}

/// Milliseconds since 1970.
fn milliseconds() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal(events: usize) -> Journal {
        let journal = Journal::default();
        journal.open().unwrap();
        (0..events).for_each(|_| journal.publish(&MachineEvent::Started));
        journal
    }

    #[test]
    fn a_journal_that_no_api_reads_keeps_nothing() {
        let journal = Journal::default();
        journal.publish(&MachineEvent::Started);
        assert!(journal.read(&mut 0, 8).is_empty());
        let wake = journal.open().unwrap();
        journal.publish(&MachineEvent::Started);
        assert_eq!((wake.read().unwrap(), journal.read(&mut 0, 8).lines.len()), (1, 1));
    }

    #[test]
    fn each_reader_gets_each_event_once_and_in_order() {
        let journal = journal(3);
        let mut cursor = 0;
        let mut seen = Vec::new();
        loop {
            let batch = journal.read(&mut cursor, 2);
            if batch.is_empty() {
                break;
            }
            assert_eq!(batch.lost, 0);
            seen.extend(batch.lines.into_iter().map(|(sequence, _)| sequence));
        }
        assert_eq!((seen, cursor), (vec![0, 1, 2], 3));
        assert_eq!(journal.read(&mut 0, 8).lines.len(), 3, "another reader");
    }

    #[test]
    fn a_slow_reader_gets_the_number_of_events_that_it_lost() {
        let journal = journal(KEPT + 5);
        let mut cursor = 2;
        let batch = journal.read(&mut cursor, 1);
        assert_eq!((batch.lost, batch.lines[0].0, cursor), (3, 5, 6));
        let text = String::from_utf8(batch.encode(EventFormat::Lines)).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0], serde_json::json!({ "event": "lost", "events": 3 }));
        assert_eq!((lines[1]["sequence"].as_u64(), lines[1]["event"].as_str()), (Some(5), Some("started")));
        assert!(lines[1]["time_ms"].as_u64().unwrap() > 1_600_000_000_000);
    }

    #[test]
    fn a_journal_that_goes_on_counts_the_events_before_it_as_lost() {
        let journal = Journal::after(5);
        journal.open().unwrap();
        journal.publish(&MachineEvent::Ready { reason: None, text: None });
        let batch = journal.read(&mut 0, 8);
        assert_eq!((batch.lost, batch.lines[0].0, journal.published()), (5, 5, 6));
        assert!(batch.lines[0].1.ends_with("\"event\":\"ready\"}"), "{batch:?}");
    }

    #[test]
    fn a_server_sent_event_is_one_block_whatever_its_text_holds() {
        let journal = journal(0);
        journal.publish(&MachineEvent::Failed { text: "two\nlines\r\n\ndata: forged".to_owned() });
        let text = String::from_utf8(journal.read(&mut 0, 8).encode(EventFormat::ServerSent)).unwrap();
        assert!(text.starts_with("id: 0\ndata: {") && text.ends_with("}\n\n"), "{text:?}");
        assert_eq!(text.lines().count(), 3, "{text:?}");
    }
}
