//! `egm-device carve plan`, `return` and `scrub`: slices of one region.

use std::num::NonZeroU64;
use std::process::ExitCode;

use egm_address::{ByteSize, Hpa, InRegion, Offset, Span, SpanSet};
use egm_report::program::{Outcome, print_json};
use egm_report::show::print;
use egm_report::show::{Screen, Side, Table, exact, size};
use egm_report::{Blame, Report};
use serde::Serialize;

use crate::carve::plan::{Carver, Request, Short, place};
use crate::cli::access::{Common, cancelled_by_signals, find, near, open};
use crate::ledger::{GrantError, Watch};
use crate::owner::Owner;
use crate::progress::with_bar;
use crate::region::{Region, Slice};

/// Which region, as a word of its own or in the way of "carve grant"
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// Name of the region
    #[arg(value_name = "REGION")]
    word: Option<String>,
    /// Name of the region, as an option
    #[arg(long, value_name = "REGION")]
    region: Option<String>,
}

impl Which {
    fn name(&self) -> &str {
        // One of them is there: the group is required.
        self.word.as_ref().or(self.region.as_ref()).map_or("", String::as_str)
    }
}

/// Which slice
#[derive(Debug, clap::Args)]
struct Wanted {
    #[command(flatten)]
    region: Which,
    /// Size including retired pages inside, such as 4GiB
    #[arg(long)]
    size: ByteSize,
    /// Alignment of the address [default: the region's page size]
    #[arg(long, default_value = "0", hide_default_value = true)]
    align: ByteSize,
    /// Required offset in the region
    #[arg(long, value_name = "OFFSET")]
    at: Option<ByteSize>,
}

impl Wanted {
    fn request(&self) -> Request {
        let at = self.at.map(ByteSize::get);
        Request { align: self.align.get(), at, ..Request::new(self.size.get(), Owner::this("plan")) }
    }
}

/// Show where slices would be placed, without taking them
#[derive(Debug, clap::Args)]
pub(super) struct Plan {
    #[command(flatten)]
    wanted: Wanted,
    /// Number of slices of that size
    #[arg(long, default_value_t = 1)]
    count: u32,
    /// Plan as if no slice were granted yet
    #[arg(long)]
    empty: bool,
    #[command(flatten)]
    common: Common,
}

/// Scrub the memory of an owner that has ended; refused while the owner runs
#[derive(Debug, clap::Args)]
pub(super) struct Return {
    #[command(flatten)]
    region: Which,
    /// Offset of the slice in the region
    #[arg(long, value_name = "OFFSET")]
    at: ByteSize,
    /// Size of the slice
    #[arg(long)]
    size: ByteSize,
    #[command(flatten)]
    common: Common,
}

/// Scrub free dirty memory, so that later grants need not wait
#[derive(Debug, clap::Args)]
pub(super) struct Scrub {
    #[command(flatten)]
    region: Which,
    /// Limit in bytes per second, such as 1GiB [default: none]
    #[arg(long, value_name = "BYTES")]
    rate: Option<ByteSize>,
    #[command(flatten)]
    common: Common,
}

/// A refusal that is about the region alone.
fn short(short: Short) -> GrantError {
    GrantError::Short { short: Box::new(short), holders: Vec::new() }
}

/// A slice as `--json` prints it.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    slice: Slice,
    /// Host physical address of its first byte, where known.
    base: Option<Hpa>,
    /// Retired bytes in it.
    holes: Vec<Span<InRegion>>,
}

impl Shown {
    fn new(region: &Region, slice: Slice) -> Self {
        let bytes = Span::new(Offset::new(slice.offset), slice.size.get()).ok();
        let holes = bytes.map(|bytes| region.retired.within(bytes)).unwrap_or_default();
        let base = region.base.and_then(|base| base.checked_add(slice.offset));
        Self { slice, base, holes: holes.iter().collect() }
    }
}

pub(super) fn plan(args: &Plan) -> Outcome {
    let survey = args.common.host.survey()?;
    let mut region = find(&survey, args.wanted.region.name())?.clone();
    let (mut busy, mut clean) = (SpanSet::default(), SpanSet::default());
    // The ledger is this host's, not a recorded one's.
    if !args.empty && !args.common.host.is_recorded() {
        let states = open(&args.common.host)?.states(&region)?;
        (busy, clean) = (states.busy(), states.clean);
        region.retired = states.retired;
    }
    let mut carver = Carver::new(&region, &busy, &clean);
    let take = |_| carver.place(&args.wanted.request()).map(|slice| Shown::new(&region, slice));
    let slices = (0..args.count).map(take).collect::<Result<Vec<_>, _>>();
    let slices = slices.map_err(short)?;
    if args.common.json {
        print_json(&slices);
    } else {
        let mut out = String::new();
        table(&slices).write(&mut out, Screen::of_stdout());
        print(out);
    }
    Ok(ExitCode::SUCCESS)
}

fn table(slices: &[Shown]) -> Table<'static> {
    use Side::{Left, Right};
    let mut table =
        Table::new(&[Left, Right, Right, Right, Right], &["region", "offset", "size", "address", "retired"]);
    for shown in slices {
        let holes = shown.holes.iter().map(|hole| hole.size()).fold(0, u64::saturating_add);
        let base = shown.base.map_or_else(|| "-".to_owned(), |base| base.to_string());
        let offset = format!("{:#x}", shown.slice.offset);
        table.row(
            None,
            vec![shown.slice.region.clone(), offset, size(shown.slice.size.get()), base, size(holes)],
        );
    }
    table
}

/// Bytes that are to be returned have an owner.
#[derive(Debug, thiserror::Error)]
#[error("region \"{region}\": {owner} has {} at {at}", exact(*bytes))]
struct InUse {
    region: String,
    owner: String,
    at: Offset,
    bytes: u64,
}

impl Report for InUse {
    fn blame(&self) -> Blame {
        Blame::Host
    }

    fn help(&self) -> Option<String> {
        Some("a slice returns when its owner ends: end that process".to_owned())
    }
}

pub(super) fn give_back(args: &Return) -> Outcome {
    let survey = args.common.host.survey()?;
    let region = find(&survey, args.region.name())?;
    let ledger = open(&args.common.host)?;
    let request = Request { at: Some(args.at.get()), ..Request::new(args.size.get(), Owner::this("return")) };
    let nothing = SpanSet::default();
    // First check that it is a slice at all, then look for its holder.
    place(region, &nothing, &nothing, &request).map_err(short)?;
    let wanted = SpanSet::from_iter(Span::new(Offset::new(args.at.get()), args.size.get()));
    if let Some(held) =
        ledger.states(region)?.held.iter().find(|held| wanted.overlapping(held.span).is_some())
    {
        let owner = held.owner.as_ref().map_or_else(|| "an unknown process".to_owned(), ToString::to_string);
        let (at, bytes) = (held.span.start(), held.span.size());
        return Err(InUse { region: region.name.clone(), owner, at, bytes }.into());
    }
    let cancel = cancelled_by_signals();
    let near = near(&survey, region);
    let scrubbed = with_bar(&region.name, |progress| {
        let watch = Watch { progress, cancel: &cancel, near, pace: None };
        ledger.scrub(&ledger.memory(), region, Some(&wanted), &watch)
    })?;
    tell(args.common.json, scrubbed);
    Ok(ExitCode::SUCCESS)
}

pub(super) fn scrub(args: &Scrub) -> Outcome {
    let survey = args.common.host.survey()?;
    let region = find(&survey, args.region.name())?;
    let ledger = open(&args.common.host)?;
    let cancel = cancelled_by_signals();
    let (near, pace) = (near(&survey, region), args.rate.and_then(|rate| NonZeroU64::new(rate.get())));
    let scrubbed = with_bar(&region.name, |progress| {
        ledger.scrub(&ledger.memory(), region, None, &Watch { progress, cancel: &cancel, near, pace })
    })?;
    tell(args.common.json, scrubbed);
    Ok(ExitCode::SUCCESS)
}

fn tell(json: bool, scrubbed: u64) {
    if json {
        print_json(&serde_json::json!({ "scrubbed": scrubbed }));
    } else {
        print(format!("{} scrubbed.\n", size(scrubbed)));
    }
}
