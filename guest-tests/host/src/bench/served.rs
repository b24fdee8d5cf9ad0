//! A slice as a PCI function: cost of a register over the socket and of its memory in a client, by benchmarks of the
//! two packages in this process tree; and cost of its memory for a guest's processors, in the emulated host.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use egm_guest::findings::Line;

use super::emulated::EmulatedHost;
use super::figures::{Report, Row, Summary, Target};
use super::{Rounds, Section, measured};
use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::engine::process::{Limit, Reaction, watch};
use crate::images::initramfs;
use crate::images::kernel;
use crate::images::tools::Tools;

/// Memory that is mapped: far more than caches hold.
const MIB: u64 = 256;

/// The guest's check that measures.
const CHECK: &str = "egm_bar";
/// Time for it, under emulation.
const DEADLINE: Duration = Duration::from_secs(600);

pub(super) fn run(directory: &Path) -> Result<Report, LabError> {
    let mut report = Report::default();
    report.extend("round trips", round_trips());
    report.extend("mapped BAR", mapped());
    report.extend("BAR in a guest", guest(directory));
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
    let seconds = measured("egm-device", "bar", &["--mib", &MIB.to_string(), "--rounds", "101"])?;
    #[expect(clippy::cast_precision_loss, reason = "some MiB are far below 2^52")]
    let gib = MIB as f64 / 1024.0;
    let speeds = |way: String| Some(seconds.get(&way)?.iter().map(|s| gib / s).collect::<Vec<_>>());
    let row = |what: &str| {
        let (bar, memory) = (speeds(format!("bar-{what}"))?, speeds(format!("memory-{what}"))?);
        let name = format!("BAR 2 as a client maps it, {what}");
        let row = Row::in_turns(name, "GiB/s", &bar, "the same pages as memory", &memory)?;
        Some(row.should(Target::RatioAtLeast(0.98)))
    };
    Ok(Report { rows: ["write", "read"].into_iter().filter_map(row).collect(), ..Report::default() })
}

fn guest(directory: &Path) -> Result<Report, LabError> {
    let host = EmulatedHost::new(directory)?;
    let stock = kernel::l1(&host.cache, false)?;
    let speeds: Rounds = host.measure(&stock, Section::Served, &[])?;
    let row = |what: &str| {
        let [bar, memory] = ["bar", "memory"].map(|way| speeds.get(&format!("{way}-{what}")));
        let name = format!("a slice as a BAR in a guest, {what}, in the lab");
        let row = Row::in_turns(name, "MB/s", bar?, "a slice as memory of that guest", memory?)?;
        Some(row.should(Target::RatioAtLeast(0.98)))
    };
    Ok(Report { rows: ["write", "read"].into_iter().filter_map(row).collect(), ..Report::default() })
}

/// In the emulated host: a guest with two slices of one kind, one of them a function.
pub(super) fn within(tools: &Path, logs: &Path) -> Result<Rounds, LabError> {
    let (config, initramfs) = (tools.join("bar.json"), tools.join("bar.cpio"));
    let programs = Tools::copied(tools);
    let slice =
        |node, form| serde_json::json!({ "region": "local", "size": "96MiB", "node": node, "as": form });
    let json = serde_json::json!({
        "memory": { "size": "256MiB" },
        "egm": [slice(1, "memory"), slice(0, "device")],
        "boot": {
            "kernel": programs.kernel.image(),
            "initramfs": initramfs,
            "cmdline": format!("console=ttyS0 panic=-1 nokaslr quiet egm.checks={CHECK}"),
        },
    });
    fs::write(&config, json.to_string()).map_err(LabError::file("write", &config))?;
    let plan = Tool::new(&programs.vmm.to_string_lossy(), "egm-vmm")
        .args(["plan".as_ref(), config.as_os_str(), "--json".as_ref()])
        .bytes()?;
    let root = initramfs::guest(&programs.agent, Some(&plan), &programs.kernel)?;
    fs::write(&initramfs, root).map_err(LabError::file("write", &initramfs))?;
    let mut command = Command::new(&programs.vmm);
    command.arg("run").arg(&config);
    let mut said = String::new();
    let [console, vmm] = ["bar-console.log", "bar-vmm.log"].map(|name| logs.join(name));
    watch(command, Limit::Total(DEADLINE), &console, &vmm, |text| {
        if let Some(Line::Check(check)) = Line::parse(text).filter(|_| said.is_empty()) {
            said = check.reason;
        }
        Reaction::Go
    })?;
    Ok(rounds(&said))
}

/// `bar-write 1.0 2.0; bar-read 3.0`: the check's figures for each kind of access.
fn rounds(said: &str) -> Rounds {
    let ways = said.split(';').filter_map(|way| way.trim().split_once(' '));
    let figures = |text: &str| text.split(' ').filter_map(|figure| figure.parse().ok()).collect();
    ways.map(|(way, text)| (way.to_owned(), figures(text))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_each_way_is_its_rounds() {
        let rounds = rounds("bar-write 1.0 2.5; bar-read 3.0; memory-write 4.0");
        assert_eq!(rounds["bar-write"], [1.0, 2.5]);
        assert_eq!((rounds["bar-read"].len(), rounds["memory-write"][0]), (1, 4.0));
    }
}
