//! `egm-device carve plan`, `return` and `scrub`: slices of one region.

use std::num::NonZeroU64;
use std::process::ExitCode;

use egm_address::{ByteSize, Hpa, InRegion, Offset, Span, SpanSet};
use egm_report::program::{Outcome, print_json};
use egm_report::show::print;
use egm_report::show::{Screen, Side, Table, exact, size};
use egm_report::{Blame, Remedy, Report};
use serde::Serialize;

use crate::carve::plan::{Carver, PlacementError, Request, place};
use crate::cli::access::{LedgerArgs, cancelled_by_signals, find, open};
use crate::host::Host;
use crate::ledger::{GrantError, Watch};
use crate::owner::Owner;
use crate::progress::with_bar;
use crate::region::{Region, Slice};

/// The region, as a positional argument or as "carve grant" takes it
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct RegionArg {
    /// Name of the region
    #[arg(value_name = "REGION")]
    word: Option<String>,
    /// Name of the region, as an option
    #[arg(long, value_name = "REGION")]
    region: Option<String>,
}

impl RegionArg {
    fn name(&self) -> &str {
        // One of them is there: the group is required.
        self.word.as_ref().or(self.region.as_ref()).map_or("", String::as_str)
    }
}

/// Size and position of slices
#[derive(Debug, clap::Args)]
struct SliceArgs {
    #[command(flatten)]
    region: RegionArg,
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

impl SliceArgs {
    fn request(&self) -> Request {
        let at = self.at.map(ByteSize::get);
        Request { align: self.align.get(), at, ..Request::new(self.size.get(), Owner::this("plan")) }
    }
}

/// Show where slices would be placed, without taking them
#[derive(Debug, clap::Args)]
pub(super) struct PlanArgs {
    #[command(flatten)]
    wanted: SliceArgs,
    /// Number of slices of that size
    #[arg(long, default_value_t = 1)]
    count: u32,
    /// Plan as if no slice were granted yet
    #[arg(long)]
    empty: bool,
    #[command(flatten)]
    host: Host,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Scrub the memory of an owner that has ended; refused while the owner runs
#[derive(Debug, clap::Args)]
pub(super) struct ReturnArgs {
    #[command(flatten)]
    region: RegionArg,
    /// Offset of the slice in the region
    #[arg(long, value_name = "OFFSET")]
    at: ByteSize,
    /// Size of the slice
    #[arg(long)]
    size: ByteSize,
    #[command(flatten)]
    common: LedgerArgs,
}

/// Scrub free dirty memory, so that later grants need not wait
#[derive(Debug, clap::Args)]
pub(super) struct ScrubArgs {
    #[command(flatten)]
    region: RegionArg,
    /// Limit in bytes per second, such as 1GiB [default: none]
    #[arg(long, value_name = "BYTES")]
    rate: Option<ByteSize>,
    #[command(flatten)]
    common: LedgerArgs,
}

/// A refusal that is about the region alone.
fn short(short: PlacementError) -> GrantError {
    GrantError::Short { short: Box::new(short), holders: Vec::new() }
}

/// A slice as `--json` prints it.
#[derive(Debug, Serialize)]
struct SliceRow {
    #[serde(flatten)]
    slice: Slice,
    /// Host physical address of its first byte, where known.
    base: Option<Hpa>,
    /// Retired bytes in it.
    holes: Vec<Span<InRegion>>,
}

impl SliceRow {
    fn new(region: &Region, slice: Slice) -> Self {
        let bytes = Span::new(Offset::new(slice.offset), slice.size.get()).ok();
        let holes = bytes.map(|bytes| region.retired.within(bytes)).unwrap_or_default();
        let base = region.base.and_then(|base| base.checked_add(slice.offset));
        Self { slice, base, holes: holes.iter().collect() }
    }
}

pub(super) fn plan(args: &PlanArgs) -> Outcome {
    let survey = args.host.survey()?;
    let mut region = find(&survey, args.wanted.region.name())?.clone();
    let (mut busy, mut clean) = (SpanSet::default(), SpanSet::default());
    if let Some(host) = args.host.local().filter(|_| !args.empty) {
        let states = open(host)?.states(&region)?;
        (busy, clean) = (states.busy(), states.clean);
        region.retired = states.retired;
    }
    let mut carver = Carver::new(&region, &busy, &clean);
    let take = |_| carver.place(&args.wanted.request()).map(|slice| SliceRow::new(&region, slice));
    let slices = (0..args.count).map(take).collect::<Result<Vec<_>, _>>();
    let slices = slices.map_err(short)?;
    if args.json {
        print_json(&slices);
    } else {
        let mut out = String::new();
        table(&slices).write(&mut out, Screen::of_stdout());
        print(out);
    }
    Ok(ExitCode::SUCCESS)
}

fn table(slices: &[SliceRow]) -> Table<'static> {
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
    fn remedy(&self) -> Remedy {
        Blame::Host.help("a slice returns when its owner ends: end that process")
    }
}

pub(super) fn return_slice(args: &ReturnArgs) -> Outcome {
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
    let near = survey.near(region);
    let scrubbed = with_bar(&region.name, |progress| {
        let watch = Watch { progress, cancel: &cancel, near, pace: None };
        ledger.scrub(&ledger.memory(), region, Some(&wanted), &watch)
    })?;
    print_scrubbed(args.common.json, scrubbed);
    Ok(ExitCode::SUCCESS)
}

pub(super) fn scrub(args: &ScrubArgs) -> Outcome {
    let survey = args.common.host.survey()?;
    let region = find(&survey, args.region.name())?;
    let ledger = open(&args.common.host)?;
    let cancel = cancelled_by_signals();
    let (near, pace) = (survey.near(region), args.rate.and_then(|rate| NonZeroU64::new(rate.get())));
    let scrubbed = with_bar(&region.name, |progress| {
        ledger.scrub(&ledger.memory(), region, None, &Watch { progress, cancel: &cancel, near, pace })
    })?;
    print_scrubbed(args.common.json, scrubbed);
    Ok(ExitCode::SUCCESS)
}

fn print_scrubbed(json: bool, scrubbed: u64) {
    if json {
        print_json(&serde_json::json!({ "scrubbed": scrubbed }));
    } else {
        print(format!("{} scrubbed.\n", size(scrubbed)));
    }
}
