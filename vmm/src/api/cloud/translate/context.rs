//! What a translation collects: refusals, notes, devices, and where each part of our file comes from.

use egm_address::CpuSet;
use egm_config::{DeviceFile, MOST_FAULTS, Refusal, Slot};

use super::super::document::NetConfig;
use super::super::table::{Fate, pattern, row, rows};

/// Results of the parts of a translation.
#[derive(Debug, Default)]
pub(super) struct Context {
    pub(super) refusals: Vec<Refusal>,
    pub(super) notes: Vec<String>,
    pub(super) origins: Origins,
    pub(super) devices: Vec<Slot<DeviceFile>>,
    /// Descriptors of taps that came with requests, by their numbers in this process.
    pub(super) taps: Vec<i32>,
}

impl Context {
    /// Refuses the value at `key` by its row of the table.
    pub(super) fn refuse(&mut self, key: impl Into<String>) {
        let key = key.into();
        self.refuse_by(key.clone(), &key);
    }

    /// Refuses the value at `key` by the row of `field`.
    pub(super) fn refuse_by(&mut self, key: String, field: &str) {
        // No more are shown, and a document may have a hundred thousand.
        if self.refusals.len() >= MOST_FAULTS {
            return;
        }
        let (reason, help) =
            row(field).map_or(("cannot take this value", "leave it out"), |r| (r.refuses, r.help));
        let refusal = Refusal { key, reason: reason.to_owned(), help: help.to_owned() };
        if !self.refusals.contains(&refusal) {
            self.refusals.push(refusal);
        }
    }

    /// Notes what the value at `key` means here.
    pub(super) fn note(&mut self, key: &str) {
        let means = row(key).map_or("", |row| row.means);
        self.notes.push(format!("{key}: {means}"));
    }

    /// The numbers of the descriptors at `places`; `None` if one is not there.
    pub(super) fn numbers(&self, places: &[i32]) -> Option<Vec<u64>> {
        let number = |place: &i32| u64::try_from(*self.taps.get(usize::try_from(*place).ok()?)?).ok();
        places.iter().map(number).collect()
    }

    /// Takes descriptors that are there out of `net`: the table refuses all others.
    pub(super) fn take_numbers(&self, net: &mut NetConfig) {
        net.fds.take_if(|fds| self.numbers(fds).is_some());
    }

    /// Adds the device of the document's `theirs`.
    pub(super) fn device(&mut self, theirs: &str, device: DeviceFile) {
        let ours = format!("devices[{}]", self.devices.len());
        self.origins.add(ours, theirs);
        self.devices.push(Slot::new(device));
    }
}

/// Which part of the document a part of our file comes from.
#[derive(Debug, Default)]
pub(crate) struct Origins(Vec<(String, String)>);

impl Origins {
    /// Records that our `ours` comes from the document's `theirs`.
    pub(super) fn add(&mut self, ours: impl Into<String>, theirs: &str) {
        self.0.push((ours.into(), theirs.to_owned()));
    }

    /// The document's name for `key` of our file: the field with its value, or the object that contains it. A key that comes
    /// from no field is its own name.
    pub(crate) fn of(&self, key: &str) -> String {
        let around = |(ours, _): &&(String, String)| {
            key.strip_prefix(ours.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let nearest = self.0.iter().filter(around).max_by_key(|(ours, _)| ours.len());
        let (ours, theirs) = nearest.map_or(("", ""), |(ours, theirs)| (ours.as_str(), theirs.as_str()));
        let (wanted, inside) = (pattern(key), pattern(theirs));
        let rest = |path: &'static str| {
            path.strip_prefix(inside.as_str()).filter(|rest| inside.is_empty() || rest.starts_with('.'))
        };
        let is_key = |fate: Fate| matches!(fate, Fate::Honoured(key) if key == wanted);
        let mut fields = rows().filter(|row| is_key(row.fate)).filter_map(|row| rest(row.path));
        match (fields.next(), fields.next()) {
            (Some(field), None) => format!("{theirs}{field}"),
            _ if ours.is_empty() => key.to_owned(),
            _ => theirs.to_owned(),
        }
    }
}

/// The set of `numbers`; `None` if one is [`CpuSet::LIMIT`] or more.
pub(super) fn cpu_set(numbers: impl IntoIterator<Item = u64>) -> Option<CpuSet> {
    let number = |number| u32::try_from(number).ok().filter(|number| *number < CpuSet::LIMIT);
    numbers.into_iter().map(number).collect()
}
