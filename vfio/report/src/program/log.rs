//! Notes and warnings of our libraries, which are events of [`tracing`]: lines for people, or JSON for programs.

use std::fmt::{self, Debug};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

use crate::show::{Screen, printable_lines};

/// How a program prints events.
#[derive(Debug, Clone, Copy, clap::Args)]
#[command(next_help_heading = "Messages on standard error")]
pub struct Log {
    /// Format of messages: text or json (one object per message)
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
    log_format: Format,
    /// Least severity of messages to print: error, warn, info or debug
    #[arg(long, global = true, value_name = "LEVEL", default_value = "info", hide_possible_values = true)]
    log_level: Severity,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// Severity of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum Severity {
    Error,
    Warn,
    Info,
    Debug,
}

/// Least severity that is printed, as its index among all.
static LEVEL: AtomicU8 = AtomicU8::new(Severity::Info as u8);

impl Severity {
    /// The least severity of messages that this process prints.
    #[must_use]
    pub fn least() -> Self {
        let level = usize::from(LEVEL.load(Ordering::Relaxed));
        Self::value_variants().get(level).copied().unwrap_or(Self::Debug)
    }

    /// Prints messages of this severity and above from now on.
    pub fn set_least(self) {
        LEVEL.store(self as u8, Ordering::Relaxed);
        tracing::callsite::rebuild_interest_cache(); // it keeps which messages are printed
    }

    const fn filter(self) -> LevelFilter {
        match self {
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
            Self::Debug => LevelFilter::DEBUG,
        }
    }
}

impl Log {
    /// The same with all messages.
    #[must_use]
    pub const fn verbose(self) -> Self {
        Self { log_level: Severity::Debug, ..self }
    }

    /// Prints the events of this process from now on. A second call is without effect.
    pub fn start(self) {
        self.log_level.set_least();
        let printer = Printer { format: self.log_format, made: OnceLock::new() };
        let _ = tracing::subscriber::set_global_default(printer);
    }
}

/// Prints events. It makes its subscriber when the first event comes: that allocates tables for spans, which no program of
/// ours has, and most starts print nothing.
struct Printer {
    format: Format,
    made: OnceLock<Dispatch>,
}

impl Printer {
    fn made(&self) -> &Dispatch {
        self.made.get_or_init(|| {
            // Standard error may be closed: then messages are lost, and the program goes on.
            let events = tracing_subscriber::fmt()
                .with_writer(io::stderr)
                .with_max_level(LevelFilter::DEBUG)
                .log_internal_errors(false);
            match self.format {
                Format::Text => events.event_format(Lines { screen: Screen::of_stderr() }).into(),
                Format::Json => events.json().flatten_event(true).with_current_span(false).into(),
            }
        })
    }
}

impl Subscriber for Printer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Severity::least().filter()
    }
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(Severity::least().filter())
    }
    fn event(&self, event: &Event<'_>) {
        self.made().event(event);
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.made().new_span(span)
    }
    fn record(&self, span: &Id, values: &Record<'_>) {
        self.made().record(span, values);
    }
    fn record_follows_from(&self, span: &Id, follows: &Id) {
        self.made().record_follows_from(span, follows);
    }
    fn enter(&self, span: &Id) {
        self.made().enter(span);
    }
    fn exit(&self, span: &Id) {
        self.made().exit(span);
    }
    fn clone_span(&self, span: &Id) -> Id {
        self.made().clone_span(span)
    }
    fn try_close(&self, span: Id) -> bool {
        self.made().try_close(span)
    }
}

/// One line an event, after its severity in a word. Texts may quote hostile peers: they are made printable.
struct Lines {
    screen: Screen,
}

impl<S: Subscriber + for<'s> LookupSpan<'s>, N: for<'w> FormatFields<'w> + 'static> FormatEvent<S, N>
    for Lines
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut message = Message::default();
        event.record(&mut message);
        let label = self.screen.message(&format!("{}:", word(*event.metadata().level())));
        writeln!(writer, "{label} {}", printable_lines(&message.0))
    }
}

fn word(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "note",
        _ => "debug",
    }
}

/// The text of an event; its other fields follow as NAME=VALUE.
#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0.insert_str(0, &format!("{value:?}"));
        } else {
            self.0.push_str(&format!(" {}={value:?}", field.name()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::fmt::MakeWriter;

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl MakeWriter<'_> for Log {
        type Writer = Self;
        fn make_writer(&self) -> Self {
            self.clone()
        }
    }

    #[test]
    fn events_from_the_least_severity_on_are_printed_by_what_the_first_one_makes() {
        let printer = || Arc::new(Printer { format: Format::Text, made: OnceLock::new() });
        let debug = || tracing::debug!("below the level at first");
        let first = printer();
        tracing::subscriber::with_default(Arc::clone(&first), || {
            debug();
            assert!(first.made.get().is_none());
            tracing::info!("printed");
            assert!(first.made.get().is_some());
        });
        let second = printer();
        tracing::subscriber::with_default(Arc::clone(&second), || {
            Severity::Debug.set_least();
            debug();
            assert!(second.made.get().is_some());
        });
        for &severity in Severity::value_variants() {
            severity.set_least();
            assert_eq!(Severity::least(), severity);
            let name = serde_json::to_string(&severity).unwrap();
            assert_eq!(serde_json::from_str::<Severity>(&name).unwrap(), severity);
        }
        Severity::Info.set_least();
    }

    #[test]
    fn an_event_is_a_line_with_its_severity_and_cannot_forge_another() {
        let kept = Log::default();
        let events = tracing_subscriber::fmt().with_writer(kept.clone()).with_max_level(Level::DEBUG);
        tracing::subscriber::with_default(
            events.event_format(Lines { screen: Screen::FILE }).finish(),
            || {
                tracing::warn!("bad page at {:#x}", 4096);
                tracing::info!(pages = 2, "two\nlines \u{1b}[2J");
                tracing::debug!("seen");
            },
        );
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..2], ["warning: bad page at 0x1000", "note: two"]);
        assert!(
            lines[2].starts_with("lines ") && lines[2].ends_with("pages=2") && !text.contains('\u{1b}'),
            "{text:?}"
        );
        assert_eq!(lines[3..], ["debug: seen"]);
    }
}
