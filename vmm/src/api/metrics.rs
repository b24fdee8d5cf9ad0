//! The machine's numbers in Prometheus' text format.

use std::fmt::{Display, Write};

use super::published::{KnownState, Published};
use super::views::{VERSION, counter_name};
use crate::machine::Live;
use crate::reserve::SliceRecord;

/// A label's name and value.
type Label<'a> = (&'static str, &'a str);

struct Metrics<'a> {
    text: String,
    /// Name of the machine, a label of every sample: files of several machines are read together.
    machine: &'a str,
}

impl Metrics<'_> {
    /// Begins the metric `name`.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String never fails.
        let _ = write!(self.text, "# HELP egm_vmm_{name} {help}\n# TYPE egm_vmm_{name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[Label<'_>], value: impl Display) {
        let labels = [("machine", self.machine)].into_iter().chain(labels.iter().copied());
        let labels: Vec<_> = labels.map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let _ = writeln!(self.text, "egm_vmm_{name}{{{}}} {value}", labels.join(","));
    }
}

/// A label's value in quotes: names come from configurations.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn seconds(microseconds: u64) -> String {
    format!("{}.{:06}", microseconds / 1_000_000, microseconds % 1_000_000)
}

/// All metrics of the machine.
pub(super) fn text(machine: &Published, state: &KnownState) -> String {
    let mut all = Metrics { text: String::new(), machine: state.name().unwrap_or_default() };
    all.family("info", "gauge", "The program, the machine and its state.");
    let phase = serde_json::to_value(state.phase()).unwrap_or_default();
    let labels = [("version", VERSION), ("state", phase.as_str().unwrap_or_default())];
    all.sample("info", &labels, 1);
    all.family("uptime_seconds", "gauge", "Time since the program's start.");
    all.sample("uptime_seconds", &[], seconds(super::published::microseconds(machine.begun.elapsed())));
    all.family("start_stage_seconds", "gauge", "Duration of each stage of the start.");
    for stage in &state.stages {
        all.sample("start_stage_seconds", &[("stage", stage.stage)], seconds(stage.duration_us));
    }
    all.family("events_total", "counter", "Events of the machine.");
    all.sample("events_total", &[], machine.journal().published());
    all.family("slice_bytes", "gauge", "Size of each slice.");
    let region = |slice: &SliceRecord| slice.region.clone().unwrap_or_default();
    let slices = state.slices.records();
    for slice in &slices {
        all.sample("slice_bytes", &[("slice", &slice.id), ("region", &region(slice))], slice.size);
    }
    all.family("slice_retired_bytes", "gauge", "Bytes of each slice that were retired at its grant.");
    for slice in &slices {
        let retired = slice.retired.iter().map(|bad| bad.size).fold(0, u64::saturating_add);
        all.sample("slice_retired_bytes", &[("slice", &slice.id), ("region", &region(slice))], retired);
    }
    all.family("device_events_total", "counter", "Mistakes and failures that a device counted.");
    for device in state.live.as_ref().and_then(Live::counters).unwrap_or_default() {
        for (words, number) in &device.counters {
            let counter = counter_name(words);
            all.sample("device_events_total", &[("device", &device.id), ("counter", &counter)], number);
        }
    }
    all.text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_cannot_forge_another_sample() {
        let mut metrics = Metrics { text: String::new(), machine: "vm1" };
        metrics.sample("x", &[("device", "a\"} 1\nforged 2\\")], 3);
        assert_eq!(metrics.text, "egm_vmm_x{machine=\"vm1\",device=\"a\\\"} 1\\nforged 2\\\\\"} 3\n");
    }

    #[test]
    fn seconds_keep_all_digits() {
        assert_eq!([seconds(0), seconds(1_000_001), seconds(62_500)], ["0.000000", "1.000001", "0.062500"]);
    }

    #[test]
    fn every_sample_has_a_family_and_a_number() {
        let machine = Published::new("vm.json".into());
        machine.stage("configuration");
        let text = text(&machine, &machine.state());
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(text.contains(&format!("# TYPE {name} ")), "{line}");
            assert!(line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{line}");
        }
        assert!(
            text.contains("egm_vmm_start_stage_seconds{machine=\"\",stage=\"configuration\"} 0."),
            "{text}"
        );
        assert!(text.contains("state=\"starting\"} 1\n"), "{text}");
    }
}
