//! Requests that write and restore snapshots, in cloud-hypervisor's form.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::amend::check_taps;
use super::answer::{Answer, Awaited, Response, Status, read, texts};
use super::control::{answered_later, is_dry_run, not_carried_out};
use super::cycle::{Created, Cycle, Language, RestoreOrder};
use super::http::Request;
use super::life;
use super::published::Published;
use crate::config::{DeviceFile, MAX_SPARE, NewDevice, Overrides, Spec};
use crate::machine::SnapshotRequest;
use crate::passed::Passed;
use crate::snapshot::{SnapshotError, StoredSnapshot};

/// Start of a URL that names a folder.
const FILE: &str = "file://";
/// Longest path, as the kernel has it.
const MAX_PATH: usize = 4095;

/// Folder of a new snapshot.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct VmSnapshotConfig {
    /// "file://" and the absolute path of a folder, which is made if it does not exist and must have no snapshot.
    pub(super) destination_url: String,
}

/// Folder of a new snapshot, and what was unplugged for it.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewSnapshot {
    /// Absolute path of a folder, which is made if it does not exist and must have no snapshot.
    folder: String,
    /// Devices that the restored machine plugs in when its guest first runs, as `GET /egm/v1/devices` has listed them: 30 at
    /// most.
    #[serde(default)]
    #[schemars(with = "Vec<DeviceFile>")]
    unplugged: Vec<Value>,
}

/// Folder of a snapshot, and how its machine begins.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RestoreConfig {
    /// "file://" and the absolute path of a folder with a snapshot.
    source_url: String,
    /// Copy all memory in before the guest runs. Default: false.
    #[serde(default)]
    prefault: bool,
    /// "Copy" as "prefault": true; "OnDemand" reads memory from the snapshot as the guest touches it, except for slices of
    /// regions and hugetlb pages. Default: "OnDemand".
    memory_restore_mode: Option<RestoreMode>,
    /// Let the guest run at once. Default: false: it is paused.
    #[serde(default)]
    resume: bool,
    /// Network devices with a tap by descriptors, in the order of the descriptors that come with the request.
    #[serde(default)]
    net_fds: Vec<RestoredNet>,
}

/// A network device with a tap by descriptors.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RestoredNet {
    /// Id of the device.
    id: String,
    /// Number of its descriptors, which is that of its queue pairs.
    num_fds: usize,
    /// Ignored: numbers of the client's process.
    #[expect(dead_code, reason = "clients may send it")]
    #[serde(default, skip_serializing)]
    fds: Option<Vec<i32>>,
}

/// When memory is read from the snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
enum RestoreMode {
    /// Before the guest runs.
    Copy,
    /// As the guest touches it.
    OnDemand,
}

/// The absolute path `text`, or the refusal that begins with `what`.
pub(super) fn absolute(text: Option<&str>, what: &str, remedy: &str) -> Result<PathBuf, Answer> {
    let is_path =
        |text: &&str| text.starts_with('/') && text.len() <= MAX_PATH && !text.chars().any(char::is_control);
    text.filter(is_path).map(PathBuf::from).ok_or_else(|| {
        let what = format!("{what} an absolute path of at most {MAX_PATH} bytes without control characters");
        Answer::failure(Status::BadRequest, &what, remedy)
    })
}

/// The folder that `url` names.
fn folder(url: &str) -> Result<PathBuf, Answer> {
    let what = "cannot read the URL: it is not \"file://\" and";
    absolute(url.strip_prefix(FILE), what, "send a URL such as file:///var/lib/vm1.snapshot")
}

/// Writes a snapshot of the paused machine.
pub(super) fn save(request: &Request, machine: &Published) -> Response {
    let body = read::<VmSnapshotConfig>("snapshot", &request.body);
    match body.and_then(|body| folder(&body.destination_url)) {
        Ok(folder) => write(folder, Vec::new(), false, machine),
        Err(answer) => answer.into(),
    }
}

/// Writes a snapshot with devices that the restored machine plugs in, or checks whether one can be written.
pub(super) fn save_with_devices(request: &Request, machine: &Published) -> Response {
    let parsed = is_dry_run(request).and_then(|is_dry_run| {
        let NewSnapshot { folder, unplugged } = read("snapshot", &request.body)?;
        let what = "folder: cannot use the path: it is not";
        let folder = absolute(Some(&folder), what, "send a path such as /var/lib/vm1.snapshot")?;
        check_unplugged(&unplugged)?;
        Ok((folder, unplugged, is_dry_run))
    });
    match parsed {
        Ok((folder, unplugged, is_dry_run)) => write(folder, unplugged, is_dry_run, machine),
        Err(answer) => answer.into(),
    }
}

/// Refuses `unplugged` devices that no machine can have.
pub(super) fn check_unplugged(unplugged: &[Value]) -> Result<(), Answer> {
    if u64::try_from(unplugged.len()).map_or(true, |count| count > MAX_SPARE) {
        let what = format!(
            "unplugged: cannot take {} devices: a machine has {MAX_SPARE} spare ports at most",
            unplugged.len()
        );
        return Err(Answer::failure(Status::BadRequest, &what, "list the devices of GET /egm/v1/devices"));
    }
    let devices = unplugged.iter().try_for_each(|device| NewDevice::from_value(device).map(drop));
    devices.map_err(|errors| Answer::failures(Status::BadRequest, &texts(&errors)))
}

fn write(folder: PathBuf, unplugged: Vec<Value>, is_dry_run: bool, machine: &Published) -> Response {
    answered_later(machine, |live, give| {
        let answer = |result: Result<(), SnapshotError>| {
            result.map_or_else(|error| not_carried_out(&error), |()| Answer::done())
        };
        let reply = Box::new(move |result| give(answer(result)));
        live.snapshot(SnapshotRequest { folder, unplugged, is_dry_run, reply })
    })
}

/// Creates the machine of a snapshot, and starts it.
pub(super) fn restore(request: &Request, machine: &Published) -> Response {
    match order(request, machine) {
        Ok(()) => Response::Later(Awaited::Restore),
        Err(answer) => answer.into(),
    }
}

fn order(request: &Request, machine: &Published) -> Result<(), Answer> {
    match machine.state().cycle.as_ref().map(Cycle::check_create) {
        None => return Err(life::single_machine()),
        Some(created) => created.map_err(life::refused)?,
    }
    let config: RestoreConfig = read("restore", &request.body)?;
    let folder = folder(&config.source_url)?;
    let stored = StoredSnapshot::open(&folder)
        .map_err(|error| Answer::failures(Status::BadRequest, &texts(&error)))?;
    let text = String::from_utf8_lossy(stored.machine()).into_owned();
    let wrong = |errors| Answer::failures(Status::BadRequest, &texts(&errors));
    let created = Created::new(Language::Own, text, &machine.default_name).map_err(wrong)?;
    let mut spec = created.spec(&Overrides::default()).map_err(wrong)?;
    let taps = taps_of(&mut spec, &config.net_fds, &request.passed)?;
    let created = Created { taps, ..created };
    let copy = config.prefault || config.memory_restore_mode == Some(RestoreMode::Copy);
    let order = RestoreOrder { folder, copy, resume: config.resume };
    match machine.change(|cycle| cycle.restore(created, order)) {
        None => Err(life::single_machine()),
        Some(changed) => changed.map_err(life::refused),
    }
}

/// The descriptors `passed` for the devices `nets`, in the order of the devices of `spec`.
///
/// # Errors
/// The refusal of those that are not the machine's.
fn taps_of(spec: &mut Spec, nets: &[RestoredNet], passed: &Passed) -> Result<Passed, Answer> {
    let refused = |what: String, remedy| Err(Answer::failure(Status::BadRequest, &what, remedy));
    const REMEDY: &str =
        "name each network device with a tap by descriptors in net_fds once, and send its descriptors";
    let total = nets.iter().fold(0, |sum: usize, net| sum.saturating_add(net.num_fds));
    if total != passed.len() {
        let what =
            format!("net_fds: cannot take {total} descriptors: {} came with the request", passed.len());
        return refused(what, REMEDY);
    }
    check_taps(passed)?;
    let (mut taps, mut devices) = (Vec::new(), 0);
    for (id, numbers) in spec.tap_descriptors() {
        let is_it = |net: &RestoredNet| net.id == id && net.num_fds == numbers.len();
        let Some(place) = nets.iter().position(is_it) else {
            let what =
                format!("net_fds: cannot restore \"{id}\" without {} descriptors of its tap", numbers.len());
            return refused(what, REMEDY);
        };
        devices += 1;
        let first: usize = nets.iter().take(place).map(|net| net.num_fds).sum();
        taps.extend(passed.iter().skip(first).take(numbers.len()).cloned());
    }
    if devices != nets.len() {
        return refused("net_fds: cannot find each of its devices in the machine".to_owned(), REMEDY);
    }
    Ok(taps.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_an_absolute_path_behind_file() {
        assert_eq!(folder("file:///a/b").unwrap(), PathBuf::from("/a/b"));
        for wrong in ["", "/a", "file://a", "http:///a", "file:///a\nb", "file://"] {
            assert_eq!(folder(wrong).unwrap_err().status, Status::BadRequest, "{wrong:?}");
        }
    }
}
