//! Rules of PCI devices and the console.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use egm_address::Gpa;

use super::error::{Fault, Rule, at_most, in_range, name};
use super::faults::Faults;
use super::file::{BarsFile, CliqueFile, ConsoleFile, DeviceFile};
use super::rules::{DeviceRule, MAX_SOCKET};
use super::slot::Slot;
use super::spec::{
    BarPlacement, BarPlacements, Clique, Console, Device, DeviceKind, EgmForm, EgmSlice, FixedBar,
};
use super::tap::{Tap, queue_pairs_over};

/// A PCI segment has 256 buses; the devices of one machine fit in one.
const MAX_DEVICES: usize = 255;
/// Context ids below are the hypervisor's and the host's (virtio 1.3, 5.10.4), the one above is "any".
const CIDS: (u32, u32) = (3, 0xffff_fffe);
/// Four bits of NVIDIA's capability.
const MAX_CLIQUE: u64 = 15;

/// The devices of machine `machine`; `None` when one breaks a rule, which is noted. `join` makes a path of a key relative
/// to the file that wrote it.
pub(super) fn resolve(
    files: Vec<Slot<DeviceFile>>,
    machine: Option<&str>,
    join: impl Fn(&str, &Path) -> Result<PathBuf, Rule>,
    faults: &mut Faults,
) -> Option<Vec<Device>> {
    faults.value("devices", at_most(files.len(), MAX_DEVICES))?;
    let ids = ids(&files, faults);
    let mut devices: Vec<Device> = Vec::with_capacity(files.len());
    let mut owners = BTreeMap::new();
    for (index, (Slot(file), id)) in files.into_iter().zip(ids).enumerate() {
        let Some(file) = file else { continue };
        let here = format!("devices[{index}]");
        let (_, root_port) = file.common();
        let behind = matches!(file, DeviceFile::Vfio { .. } | DeviceFile::VfioUser { .. });
        let seed = mac_seed(machine.unwrap_or_default(), &id);
        let Some(kind) = kind(file, &seed, &here, &join, faults) else { continue };
        for (key, what) in descriptors(&kind).into_iter().chain(exclusive(&kind)) {
            let here = format!("{here}.{key}");
            let first = match owners.entry(what) {
                Entry::Vacant(place) => {
                    place.insert(here);
                    continue;
                }
                Entry::Occupied(first) => first,
            };
            let (what, first) = (first.key().clone(), first.get().clone());
            let rule = match key {
                "type" => DeviceRule::SecondVsock { first },
                _ => DeviceRule::Shared { what, first },
            };
            faults.note(Rule::from(rule).at(here));
        }
        devices.push(Device { id, root_port: root_port.unwrap_or(behind), kind });
    }
    (!faults.are_in("devices")).then_some(devices)
}

/// The slices that are devices, after those of `devices`.
pub(super) fn slices(egm: &[EgmSlice], mut devices: Vec<Device>, faults: &mut Faults) -> Option<Vec<Device>> {
    for (index, slice) in (0..).zip(egm).filter(|(_, slice)| slice.form == EgmForm::Device) {
        let id = format!("egm{index}");
        if let Some(first) = devices.iter().position(|device| device.id == id) {
            let first = format!("devices[{first}]");
            faults.note(Rule::from(DeviceRule::DuplicateId { id, first }).at(format!("egm[{index}]")));
            return None;
        }
        devices.push(Device {
            id,
            root_port: true,
            kind: DeviceKind::Egm { slice: index, node: slice.node },
        });
    }
    faults.value("devices", at_most(devices.len(), MAX_DEVICES))?;
    Some(devices)
}

/// Ids as written, and for the rest the first free of `blk0`, `blk1`, …
fn ids(files: &[Slot<DeviceFile>], faults: &mut Faults) -> Vec<String> {
    let written = |file: &Slot<DeviceFile>| Some(file.get()?.common().0?.to_owned());
    let mut used: BTreeMap<String, usize> = BTreeMap::new();
    for (index, file) in files.iter().enumerate() {
        let Some(id) = written(file) else { continue };
        let key = format!("devices[{index}].id");
        let Some(id) = faults.value(&key, name(&id)) else { continue };
        if let Some(first) = used.get(&id) {
            let first = format!("devices[{first}]");
            faults.note(Rule::from(DeviceRule::DuplicateId { id, first }).at(key));
            continue;
        }
        used.insert(id, index);
    }
    let mut used: BTreeSet<String> = used.into_keys().collect();
    let mut given = |file: &DeviceFile| {
        let free = (0_usize..).map(|n| format!("{}{n}", prefix(file))).find(|id| !used.contains(id));
        let id = free.unwrap_or_default();
        used.insert(id.clone());
        id
    };
    files
        .iter()
        .map(|file| written(file).or_else(|| file.get().map(&mut given)).unwrap_or_default())
        .collect()
}

/// Start of the ids of devices without one.
pub(super) fn prefix(file: &DeviceFile) -> &'static str {
    match file {
        DeviceFile::VirtioBlk { .. } => "blk",
        DeviceFile::VirtioNet { .. } => "net",
        DeviceFile::VirtioVsock { .. } => "vsock",
        DeviceFile::VirtioRng { .. } => "rng",
        DeviceFile::Vfio { .. } => "vfio",
        DeviceFile::VfioUser { .. } => "user",
    }
}

/// The kind of the device `here`; `None` when it breaks a rule, which is noted. `mac_seed` decides the hardware address
/// where none is written.
fn kind(
    file: DeviceFile,
    mac_seed: &str,
    here: &str,
    join: impl Fn(&str, &Path) -> Result<PathBuf, Rule>,
    faults: &mut Faults,
) -> Option<DeviceKind> {
    let key = |name: &str| format!("{here}.{name}");
    let socket = |path: PathBuf| join(&key("socket"), &path).and_then(socket);
    Some(match file {
        DeviceFile::VirtioBlk { path, read_only, .. } => {
            let path = faults.value(key("path"), join(&key("path"), &path))?;
            DeviceKind::VirtioBlk { path, read_only: read_only.unwrap_or(false) }
        }
        DeviceFile::VirtioNet { tap, mac, queue_pairs, vhost, .. } => {
            let tap = faults.value(key("tap"), tap.resolve());
            let mac = mac.map_or_else(|| Ok(own_mac(mac_seed)), |mac| unicast(&mac));
            let mac = faults.value(key("mac"), mac);
            let queue_pairs = faults.value(key("queue_pairs"), queue_pairs_over(queue_pairs, tap.as_ref()));
            DeviceKind::VirtioNet { tap: tap?, mac: mac?, queue_pairs: queue_pairs?, vhost }
        }
        DeviceFile::VirtioVsock { cid, socket: path, .. } => {
            let cid = faults.value(key("cid"), in_range(cid, CIDS.0, CIDS.1));
            let socket = faults.value(key("socket"), path.map(socket).transpose());
            DeviceKind::VirtioVsock { cid: cid?, socket: socket? }
        }
        DeviceFile::VirtioRng { .. } => DeviceKind::VirtioRng,
        DeviceFile::Vfio { function, backend, clique: number, bars, p2p, .. } => {
            let clique = faults.value(key("clique"), number.map_or(Ok(Clique::Auto), clique));
            let bars =
                bars.map_or(Ok(BarPlacements::Guest), places).map_err(|fault| fault.inside(&key("bars")));
            let bars = faults.keep(bars);
            DeviceKind::Vfio {
                function,
                backend: backend.unwrap_or_default(),
                clique: clique?,
                bars: bars?,
                p2p: p2p.unwrap_or(true),
            }
        }
        DeviceFile::VfioUser { socket: path, .. } => {
            DeviceKind::VfioUser { socket: faults.value(key("socket"), socket(path))? }
        }
    })
}

fn clique(file: CliqueFile) -> Result<Clique, Rule> {
    match file {
        CliqueFile::Name(name) => match name.as_str() {
            "auto" => Ok(Clique::Auto),
            "off" => Ok(Clique::Off),
            _ => Err(Rule::UnknownName { name, known: vec!["auto", "off"] }),
        },
        CliqueFile::Number(number) => in_range(number, 0, MAX_CLIQUE)
            .map(|number| u8::try_from(number).map_or(Clique::Off, Clique::Number)),
    }
}

fn places(file: BarsFile) -> Result<BarPlacements, Fault> {
    match file {
        BarsFile::All(name) => match name.as_str() {
            "guest" => Ok(BarPlacements::Guest),
            "host" => Ok(BarPlacements::Host),
            _ => Err(Rule::UnknownName { name, known: vec!["guest", "host"] }.here()),
        },
        BarsFile::Each(places) => {
            let fixed = |(index, place): (String, String)| {
                bar_place(&index, place).map_err(|rule| Rule::from(rule).at(index))
            };
            places.into_iter().map(fixed).collect::<Result<_, _>>().map(BarPlacements::Each)
        }
    }
}

fn bar_place(index: &str, place: String) -> Result<FixedBar, DeviceRule> {
    let number = match index.as_bytes() {
        [digit @ b'0'..=b'5'] => digit - b'0',
        _ => return Err(DeviceRule::BarIndex { index: index.to_owned() }),
    };
    if place == "host" {
        return Ok(FixedBar { index: number, place: BarPlacement::Host });
    }
    let digits = place.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let address = digits.ok_or(DeviceRule::BarPlacement { place })?;
    Ok(FixedBar { index: number, place: BarPlacement::At(Gpa::new(address)) })
}

impl Device {
    /// Names of the host's resources that it must have for itself, such as `disk /srv/disk.img`, without descriptors; for a
    /// vsock device also `vsock`, of which a machine has one.
    pub fn exclusive(&self) -> Vec<String> {
        exclusive(&self.kind).into_iter().map(|(_, what)| what).collect()
    }
}

/// Key and name of each host resource that a device must have for itself.
fn exclusive(kind: &DeviceKind) -> Vec<(&'static str, String)> {
    let socket = |path: &Path| ("socket", format!("socket {}", path.display()));
    match kind {
        DeviceKind::VirtioBlk { path, read_only: false } => {
            vec![("path", format!("disk {}", path.display()))]
        }
        DeviceKind::VirtioNet { tap, mac, .. } => {
            let tap = match tap {
                Tap::Name(name) => Some(("tap", format!("tap {name}"))),
                Tap::Descriptors(_) => None, // resources of this process
            };
            let mac = mac_text(*mac);
            tap.into_iter().chain([("mac", format!("hardware address {mac}"))]).collect()
        }
        DeviceKind::VirtioVsock { socket: path, .. } => {
            let guest = ("type", "vsock".to_owned());
            [guest].into_iter().chain(path.as_deref().map(socket)).collect()
        }
        DeviceKind::Vfio { function, .. } => vec![("function", format!("function {function}"))],
        DeviceKind::VfioUser { socket: path } => vec![socket(path)],
        DeviceKind::VirtioBlk { read_only: true, .. } | DeviceKind::VirtioRng | DeviceKind::Egm { .. } => {
            Vec::new()
        }
    }
}

/// Key and name of each descriptor that a device must have for itself.
fn descriptors(kind: &DeviceKind) -> Vec<(&'static str, String)> {
    match kind {
        DeviceKind::VirtioNet { tap: Tap::Descriptors(numbers), .. } => {
            numbers.iter().map(|number| ("tap", format!("descriptor {number}"))).collect()
        }
        _ => Vec::new(),
    }
}

/// The key and path of a host's file or socket.
fn host_path(kind: &DeviceKind) -> Option<(&'static str, &Path)> {
    match kind {
        DeviceKind::VirtioBlk { path, .. } => Some(("path", path)),
        DeviceKind::VfioUser { socket } => Some(("socket", socket)),
        DeviceKind::VirtioVsock { socket, .. } => socket.as_deref().map(|path| ("socket", path)),
        DeviceKind::VirtioNet { .. }
        | DeviceKind::VirtioRng
        | DeviceKind::Vfio { .. }
        | DeviceKind::Egm { .. } => None,
    }
}

fn unicast(text: &str) -> Result<[u8; 6], Rule> {
    let wrong = || Rule::from(DeviceRule::Mac { mac: text.to_owned() });
    let mut bytes = Vec::with_capacity(6);
    for part in text.split(':') {
        let two_digits = part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
        bytes.push(u8::from_str_radix(part, 16).ok().filter(|_| two_digits).ok_or_else(wrong)?);
    }
    let mac: [u8; 6] = bytes.try_into().map_err(|_| wrong())?;
    if mac == [0; 6] || mac[0] & 1 != 0 {
        return Err(DeviceRule::Multicast { mac: text.to_owned() }.into());
    }
    Ok(mac)
}

/// The text that decides the hardware address of the device `id` where none is written.
pub(super) fn mac_seed(machine: &str, id: &str) -> String {
    format!("{machine}/{id}")
}

/// A hardware address in lower case: `52:54:00:12:34:56`.
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// A locally administered unicast address that is the same in every run: FNV-1a of `seed`.
pub(super) fn own_mac(seed: &str) -> [u8; 6] {
    let hash = seed
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let [a, b, c, d, e, f, ..] = hash.to_le_bytes();
    [a & 0xfc | 2, b, c, d, e, f]
}

fn socket(path: PathBuf) -> Result<PathBuf, Rule> {
    let length = path.as_os_str().len();
    if length > MAX_SOCKET { Err(DeviceRule::Socket { length }.into()) } else { Ok(path) }
}

/// The console, which shares no path with `devices`: guest output must not end on a disk. `None` when it breaks a rule,
/// which is noted.
pub(super) fn console(
    file: Option<ConsoleFile>,
    devices: Option<&[Device]>,
    join: impl Fn(&str, &Path) -> Result<PathBuf, Rule>,
    faults: &mut Faults,
) -> Option<Console> {
    let key = "console.path";
    let join = |path: PathBuf| join(key, &path);
    let console = match file {
        None | Some(ConsoleFile::Stdio) => Ok(Console::Stdio),
        Some(ConsoleFile::File { path }) => join(path).map(|path| Console::File { path }),
        Some(ConsoleFile::Pty) => Ok(Console::Pty),
        Some(ConsoleFile::Socket { path }) => {
            join(path).and_then(socket).map(|path| Console::Socket { path })
        }
        Some(ConsoleFile::Null) => Ok(Console::Null),
    };
    let console = faults.value(key, console)?;
    if let Console::File { path } | Console::Socket { path } = &console
        && let Some(first) = devices.unwrap_or_default().iter().enumerate().find_map(|(index, device)| {
            let (key, other) = host_path(&device.kind)?;
            (other == path).then(|| format!("devices[{index}].{key}"))
        })
    {
        let what = path.display().to_string();
        faults.note(Rule::from(DeviceRule::Shared { what, first }).at(key));
    }
    Some(console)
}
