//! `egm-device log`: the audit log for people.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use egm_report::program::Outcome;
use egm_report::show::{print, size, wrap, written};
use egm_report::{Blame, Remedy, Report};
use rustix::fs::inotify;
use serde::Deserialize;
use serde_json::Value;

use crate::audit::{FILES, MAX_LINE, Paths, time};

/// Columns of a terminal.
const WIDTH: usize = 80;

/// Show the audit log: grants, returns, refusals, scrubs and bad pages
///
/// Each line of the log is a JSON object with the keys time, event, owner, uid, pid, program (comm, exe) and, if the event
/// has them, region, span (offset, size), bytes, duration_ms and reason. The next line counts those that could not be
/// written (lost) and those beyond the allowance of one user (suppressed): 256 KiB at once and 512 bytes per second, for
/// refusals, grants and quarantines separately.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(super) struct Args {
    /// Wait for more lines, until Ctrl-C
    #[arg(long)]
    follow: bool,
    /// Show lines since a time in UTC (2026-11-23, 2026-11-23T08:47) or since an age (90s, 15min, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = since)]
    since: Option<String>,
    /// Show this event only; may be repeated
    #[arg(long, value_name = "EVENT", value_parser = EVENTS)]
    event: Vec<String>,
    /// Read the file of findings (retire, unretire, quarantine, release, mismatch), which has a longer history
    #[arg(long)]
    findings: bool,
    /// Show this region only
    #[arg(long, value_name = "REGION")]
    region: Option<String>,
    /// Print the lines unchanged, one JSON object each
    #[arg(long)]
    json: bool,
    /// Folder below which the files of the host are
    #[arg(long, value_name = "FOLDER", default_value = "/", hide_default_value = true)]
    root: PathBuf,
}

const HELP: &str = "\
Examples:

  egm-device log --since 2h --event refusal
  egm-device log --follow --region egm4
  egm-device log --json --since 2026-11-23 | jq .bytes";

const EVENTS: [&str; 10] = [
    "grant",
    "return",
    "refusal",
    "scrub",
    "retire",
    "unretire",
    "claim-refused",
    "quarantine",
    "release",
    "mismatch",
];

fn since(text: &str) -> Result<String, String> {
    time::parse_since(text, SystemTime::now())
}

/// The log cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the audit log {}", path.display())]
struct LogError {
    path: PathBuf,
    source: io::Error,
}

impl Report for LogError {
    fn remedy(&self) -> Remedy {
        Blame::Host.help("run as root: the log names tenants and their programs")
    }
}

/// A line, as far as it is shown.
#[derive(Debug, Deserialize)]
struct LogEntry {
    time: String,
    event: String,
    #[serde(default)]
    owner: String,
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    region: String,
    span: Option<LogSpan>,
    bytes: Option<u64>,
    reason: Option<String>,
    #[serde(default)]
    lost: u64,
    #[serde(default)]
    suppressed: u64,
}

#[derive(Debug, Deserialize)]
struct LogSpan {
    offset: u64,
}

pub(super) fn run(args: &Args) -> Outcome {
    let paths = Paths::below(&args.root);
    let path = if args.findings { paths.findings } else { paths.file };
    let error = |source| LogError { path: path.clone(), source };
    // Watched before it is read, so that no change in between is missed.
    let changes = if args.follow { Some(Changes::of(&path).map_err(error)?) } else { None };
    let mut reader = Reader { args, unreadable: 0 };
    if !args.json {
        print(heads());
    }
    let rotated = (1..FILES).rev().map(|number| PathBuf::from(format!("{}.{number}", path.display())));
    for path in rotated {
        if let Some(file) = open(&path).map_err(error)? {
            reader.show(&mut BufReader::new(file)).map_err(error)?;
        }
    }
    let mut newest = open(&path).map_err(error)?.map(BufReader::new);
    if let Some(file) = &mut newest {
        reader.show(file).map_err(error)?;
    }
    if let Some(changes) = changes {
        reader.follow(&path, newest, &changes).map_err(error)?;
    }
    if reader.unreadable > 0 {
        let lines = if reader.unreadable == 1 { "line of the log is" } else { "lines of the log are" };
        tracing::info!("{} {lines} cut or damaged", reader.unreadable);
    }
    Ok(ExitCode::SUCCESS)
}

/// The file, if there is one.
fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        file => file.map(Some),
    }
}

struct Reader<'a> {
    args: &'a Args,
    /// Lines that are no JSON.
    unreadable: u64,
}

impl Reader<'_> {
    /// Shows the rest of `file`. A line without its end is left for the next time, if there is one.
    fn show(&mut self, file: &mut BufReader<File>) -> io::Result<()> {
        let mut line = Vec::new();
        while file.read_until(b'\n', &mut line)? > 0 {
            if line.ends_with(b"\n") {
                self.line(&line);
                line.clear();
            } else {
                let back = i64::try_from(line.len()).map_err(io::Error::other)?;
                return file.seek_relative(back.saturating_neg());
            }
        }
        Ok(())
    }

    fn line(&mut self, text: &[u8]) {
        if text == b"\n" {
            return;
        }
        let line = if text.len() <= MAX_LINE { serde_json::from_slice::<LogEntry>(text).ok() } else { None };
        let Some(line) = line else {
            self.unreadable = self.unreadable.saturating_add(1);
            return;
        };
        let args = self.args;
        let is_meant = args.since.as_ref().is_none_or(|since| line.time >= *since)
            && (args.event.is_empty() || args.event.contains(&line.event))
            && args.region.as_ref().is_none_or(|region| line.region == *region);
        if !is_meant {
            return;
        }
        if args.json {
            // Damaged on the disk or not: what is printed is one object a line.
            print(serde_json::from_slice::<Value>(text).map_or_else(|_| Vec::new(), |_| text.to_vec()));
        } else {
            print(table(&line));
        }
    }

    /// Shows lines as they come, until the reader of standard output has gone.
    fn follow(
        &mut self,
        path: &Path,
        mut newest: Option<BufReader<File>>,
        changes: &Changes,
    ) -> io::Result<()> {
        while written().is_ok() {
            changes.wait()?;
            if let Some(file) = &mut newest {
                self.show(file)?;
            }
            let inode = |file: &File| file.metadata().map(|metadata| metadata.ino()).ok();
            let next = open(path)?;
            let is_same =
                newest.as_ref().and_then(|file| inode(file.get_ref())) == next.as_ref().and_then(inode);
            if !is_same && let Some(next) = next {
                let mut next = BufReader::new(next);
                self.show(&mut next)?;
                newest = Some(next);
            }
        }
        Ok(())
    }
}

/// Changes in the log's folder.
struct Changes(File);

impl Changes {
    fn of(path: &Path) -> io::Result<Self> {
        let folder = path.parent().ok_or(io::ErrorKind::NotFound)?;
        let inotify = inotify::init(inotify::CreateFlags::CLOEXEC)?;
        let flags = inotify::WatchFlags::MODIFY | inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&inotify, folder, flags)?;
        Ok(Self(inotify.into()))
    }

    /// Waits for one or more.
    fn wait(&self) -> io::Result<()> {
        match rustix::io::read(&self.0, &mut [0; 4096]) {
            Err(rustix::io::Errno::INTR) => Ok(()),
            read => read.map(drop).map_err(Into::into),
        }
    }
}

fn heads() -> String {
    row(["time (UTC)", "event", "owner", "user", "region", "offset", "size"])
}

/// The line in [`WIDTH`] columns; texts that have no room and the reason stand below.
fn table(line: &LogEntry) -> String {
    let short = line.time.get(5..19).map_or_else(String::new, |time| time.replace('T', " "));
    let offset = line.span.as_ref().map_or_else(|| "-".to_owned(), |span| format!("{:#x}", span.offset));
    let bytes = line.bytes.map_or_else(|| "-".to_owned(), size);
    let (owner, region) = (shown(&line.owner), shown(&line.region));
    let cells = [&short, &shown(&line.event), &owner, &line.uid.to_string(), &region, &offset, &bytes];
    let cells = cells.map(String::as_str);
    let mut out = row(cells);
    let counts = [(line.lost, "lost before it"), (line.suppressed, "suppressed before it")];
    let counts = counts.into_iter().filter(|(count, _)| *count > 0);
    let counts =
        counts.map(|(count, what)| format!("{count} {}{what}", if count == 1 { "line " } else { "lines " }));
    for reason in full(cells).into_iter().chain(line.reason.as_deref().map(shown)).chain(counts) {
        for part in wrap(&reason, WIDTH.saturating_sub(INDENT)) {
            out.push_str(&format!("{:INDENT$}{part}\n", ""));
        }
    }
    out
}

/// Columns before a reason: those of the time.
const INDENT: usize = 15;

fn row(cells: [&str; 7]) -> String {
    let [time, event, owner, user, region, offset, size] = cells;
    let widths = widths(offset);
    let (owner, user) = (cut(owner, widths.owner), cut(user, widths.user));
    let (region, offset) = (cut(region, widths.region), cut(offset, widths.offset));
    let pad = REGION_AND_OFFSET.saturating_sub(region.len());
    let line = format!("{time:<14} {event:<13} {owner:<12} {user:>5} {region} {offset:>pad$} {size:>8}");
    line.trim_end().to_owned() + "\n"
}

/// Texts of `cells` that their row has no room for.
fn full(cells: [&str; 7]) -> Option<String> {
    let [_, _, owner, user, region, offset, _] = cells;
    let widths = widths(offset);
    let all = [
        ("owner", owner, widths.owner),
        ("user", user, widths.user),
        ("region", region, widths.region),
        ("offset", offset, widths.offset),
    ];
    let long = all.iter().filter(|(_, text, most)| text.len() > *most);
    let long: Vec<String> = long.map(|(name, text, _)| format!("{name} {text}")).collect();
    (!long.is_empty()).then(|| long.join(", "))
}

/// Columns of a region and its offset together.
const REGION_AND_OFFSET: usize = 22;

/// Most characters of the cells of a row.
struct CellWidths {
    owner: usize,
    user: usize,
    region: usize,
    offset: usize,
}

/// The widths in a row with `offset`; where that is short, the region has more.
fn widths(offset: &str) -> CellWidths {
    CellWidths {
        owner: 12,
        user: 5,
        region: REGION_AND_OFFSET.saturating_sub(offset.len()).max(10),
        offset: 12,
    }
}

/// `text` without what a terminal would interpret.
fn shown(text: &str) -> String {
    let shown = text.chars().map(|c| match c {
        ' '..='~' => c.to_string(),
        _ => c.escape_default().to_string(),
    });
    shown.collect()
}

/// The first `most` characters of `text`, which are ASCII.
fn cut(text: &str, most: usize) -> String {
    match text.get(..most.saturating_sub(1)) {
        Some(start) if text.len() > most => format!("{start}~"),
        _ => text.to_owned(),
    }
}
