//! A slice behind vfio-user: what a register costs over the socket, and its memory as a client maps it. By benchmarks of the two
//! packages, in this process tree.

use super::figures::{Report, Row, Summary, Target};
use super::measured;
use crate::error::LabError;

/// Memory that is mapped: far more than caches hold.
const MIB: u64 = 256;

/// Both.
pub(super) fn run() -> Result<Report, LabError> {
    let mut report = Report::default();
    report.extend("round trips", round_trips());
    report.extend("mapped BAR", mapped());
    Ok(report)
}

fn round_trips() -> Result<Report, LabError> {
    let times = measured("egm-vfio-wire", "round_trip", &["--rounds", "4000"])?;
    let of = |way: &str| times.get(way).and_then(|times| Summary::of(times));
    let mut report = Report::default();
    for (way, name, target) in [
        ("asleep", "a vfio-user region read, blocking", Target::RatioAtMost(1.1)),
        ("looking", "the same, looking before it sleeps", Target::AtMost(10.0)),
    ] {
        let Some(ours) = of(way) else { continue };
        let row = |peer: &str, figures| Row::new(name, "us", ours).beside(peer, figures);
        report.rows.push(row("ping-pong over a socket", of("ping")).should(target));
        report.rows.push(row("the vfio_user crate", of("crate")));
    }
    if let Some(quiet) = of("quiet") {
        let percent = quiet.map(|share| 100.0 * share);
        report
            .rows
            .push(Row::new("processor time of a quiet connection", "%", percent).should(Target::AtMost(1.0)));
    }
    Ok(report)
}

fn mapped() -> Result<Report, LabError> {
    let seconds = measured("egm-device", "bar", &["--mib", &MIB.to_string(), "--rounds", "21"])?;
    #[expect(clippy::cast_precision_loss, reason = "some MiB are far below 2^52")]
    let gib = MIB as f64 / 1024.0;
    let speed = |way: String| seconds.get(&way).and_then(|s| Summary::of(s)).map(|s| s.map(|s| gib / s));
    let row = |what: &str| {
        let ours = speed(format!("bar-{what}"))?;
        let row = Row::new(format!("BAR 2 as a client maps it, {what}"), "GiB/s", ours);
        Some(
            row.beside("the same pages as memory", speed(format!("memory-{what}")))
                .should(Target::RatioAtLeast(0.98)),
        )
    };
    Ok(Report { rows: ["write", "read"].into_iter().filter_map(row).collect(), ..Report::default() })
}
