//! The devices to serve: the file of `egm-device serve --config`, JSON.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use egm_address::{ByteSize, PciAddress};
use egm_report::json::{self, JsonError};
use egm_report::{Blame, Remedy, Report};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};

use crate::bounded;
use crate::device::config::Id;
use crate::policy::is_word;
use crate::region::remedy;
use crate::schema::{self, IdText, NameText, PciText, SizeText, SomeSizeText};

/// Maximum size of the file in bytes; a device takes a few lines.
const MAX_FILE: u64 = 1 << 20;
/// Most devices of one process.
const MAX_DEVICES: usize = 256;

/// A device to be served.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    /// Name for operators: its slice's owner, and the name of a socket that systemd passes.
    #[schemars(with = "NameText")]
    pub name: String,
    /// The region, by name or kind.
    pub region: String,
    /// Bytes of the slice, whole pages of the region.
    #[schemars(with = "SomeSizeText")]
    pub size: ByteSize,
    /// Alignment of its host physical address; the least is the region's page.
    #[schemars(with = "Option<SizeText>")]
    pub align: Option<ByteSize>,
    /// Socket for clients. Without it systemd has to pass one.
    pub socket: Option<PathBuf>,
    /// Proximity domain that the guest gets for the memory.
    pub pxm: Option<u32>,
    /// Whether every reset scrubs.
    #[serde(default)]
    pub scrub_on_reset: bool,
    /// Whether it has MSI-X. QEMU up to 11.1 at least aborts when a vfio-user function that has it is unplugged.
    #[serde(default = "yes")]
    pub msix: bool,
    /// Whether clients of other users than root may connect although all slices of the region are one file: they can
    /// then map every tenant's bytes.
    #[serde(default)]
    pub whole_device: bool,
    /// PCI identity of the function.
    #[serde(default, deserialize_with = "id")]
    #[schemars(with = "IdText")]
    pub id: Id,
    /// Trust domain of its guest, without a broker: owners of one domain share a region that a GPU reaches.
    #[schemars(with = "Option<NameText>")]
    pub trust_domain: Option<String>,
    /// GPUs of its guest, without a broker: their regions are exclusive to the trust domain.
    #[serde(default)]
    #[schemars(with = "Vec<PciText>")]
    pub gpus: Vec<PciAddress>,
}

const fn yes() -> bool {
    true
}

fn id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Id, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// The JSON Schema of a file of devices, as text that ends in a newline.
#[must_use]
pub fn schema() -> String {
    schema::text::<DevicesFile>()
}

/// Slices that "egm-device serve" shows as PCI functions, each at a socket of its own.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "egm-device serve")]
struct DevicesFile {
    /// Location of the schema, for editors.
    #[serde(rename = "$schema")]
    _schema: Option<String>,
    /// Description of the devices, for people.
    #[serde(rename = "description")]
    _description: Option<String>,
    /// The devices, 1 to 256.
    #[schemars(length(min = 1, max = 256))]
    devices: Vec<DeviceConfig>,
}

/// Why a file of devices is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum FileError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// It is not JSON, or has an unknown key or value.
    #[error("{}:{}:{}: not devices to serve", path.display(), source.line, source.column)]
    Json { path: PathBuf, source: Box<JsonError> },
    #[error("cannot serve {count} devices: a process serves 1 to {MAX_DEVICES}")]
    Count { count: usize },
    #[error("cannot serve two devices with the {what} {value:?}: each has its own")]
    Twice { what: &'static str, value: String },
    #[error("cannot use {0:?} as the name of a device: write 1 to 64 of A-Z a-z 0-9 . _ -")]
    Name(String),
    #[error("cannot use {0:?} as a trust domain: write 1 to 64 of A-Z a-z 0-9 . _ -")]
    Domain(String),
    #[error("cannot serve device {0:?}: its slice has 0 bytes; write a size, as \"64GiB\"")]
    Empty(String),
    #[error("cannot find device {name:?}: the file has {}", known.join(", "))]
    Unknown { name: String, known: Vec<String> },
}

impl Report for FileError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Read { .. } => Blame::Configuration.help("name a file that exists and that you may read"),
            Self::Json { source, .. } => Blame::Configuration.help(remedy(source).unwrap_or_else(|| {
                r#"correct it there: {"devices": [{"name": …, "region": …, "size": …, "socket": …}]}"#
                    .to_owned()
            })),
            Self::Unknown { name, known } => {
                let near = known.iter().min_by_key(|known| strsim::damerau_levenshtein(name, known));
                let help = near.map(|near| format!("write \"{near}\" instead of \"{name}\""));
                Remedy { blame: Blame::Configuration, help }
            }
            _ => Blame::Configuration.into(),
        }
    }

    fn excerpt(&self) -> Option<String> {
        match self {
            Self::Json { source, .. } => Some(source.excerpt.clone()),
            _ => None,
        }
    }
}

/// The devices of the file at `path`; only the one named `slice`, if given.
pub fn load(path: &Path, slice: Option<&str>) -> Result<Vec<DeviceConfig>, FileError> {
    let read = |source| FileError::Read { path: path.to_owned(), source };
    let text = File::open(path).and_then(|file| bounded::read(file, MAX_FILE)).map_err(read)?;
    let json = |source| FileError::Json { path: path.to_owned(), source };
    let mut devices = json::from_slice::<DevicesFile>(&text).map_err(json)?.devices;
    check(&devices)?;
    if let Some(name) = slice {
        let known = || devices.iter().map(|device| device.name.clone()).collect();
        if !devices.iter().any(|device| device.name == name) {
            return Err(FileError::Unknown { name: name.to_owned(), known: known() });
        }
        devices.retain(|device| device.name == name);
    }
    Ok(devices)
}

/// Checks the devices of one process.
pub(crate) fn check(devices: &[DeviceConfig]) -> Result<(), FileError> {
    if !(1..=MAX_DEVICES).contains(&devices.len()) {
        return Err(FileError::Count { count: devices.len() });
    }
    let (mut names, mut sockets) = (BTreeSet::new(), BTreeSet::new());
    for device in devices {
        let name = &device.name;
        if !is_word(name) {
            return Err(FileError::Name(name.clone()));
        }
        if let Some(domain) = device.trust_domain.as_ref().filter(|domain| !is_word(domain)) {
            return Err(FileError::Domain(domain.clone()));
        }
        if device.size.get() == 0 {
            return Err(FileError::Empty(name.clone()));
        }
        if !names.insert(name) {
            return Err(FileError::Twice { what: "name", value: name.clone() });
        }
        if let Some(socket) = device.socket.as_ref().filter(|socket| !sockets.insert(*socket)) {
            return Err(FileError::Twice { what: "socket", value: socket.display().to_string() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use egm_report::Chain;

    use super::*;

    fn load_text(text: &str, slice: Option<&str>) -> Result<Vec<DeviceConfig>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serve.json");
        std::fs::write(&path, text).unwrap();
        load(&path, slice)
            .map_err(|error| Chain(&error).to_string().replace(&path.display().to_string(), "serve.json"))
    }

    const TWO: &str = r#"{"devices": [
        {"name": "vm1", "region": "egm4", "size": "64GiB", "socket": "/run/vm1.sock", "pxm": 1, "id": "1234:0001"},
        {"name": "vm2", "region": "egm", "size": 4096, "scrub_on_reset": true, "msix": false}
    ]}"#;

    #[test]
    fn a_device_has_a_name_a_region_and_a_size_and_the_rest_by_default() {
        let offers = load_text(TWO, None).unwrap();
        assert_eq!(
            (offers[0].size.get(), offers[0].pxm, offers[0].id),
            (64 << 30, Some(1), "1234:0001".parse().unwrap())
        );
        assert_eq!(
            (offers[1].socket.as_ref(), offers[1].scrub_on_reset, offers[1].id),
            (None, true, Id::default())
        );
        assert_eq!(load_text(TWO, Some("vm2")).unwrap(), offers[1..]);
    }

    #[test]
    fn an_error_has_its_position_and_a_suggestion() {
        for (text, slice, expected) in [
            (
                "{\"devices\": [\n{\"name\": \"a\", \"regoin\": \"egm\"}]}",
                None,
                "serve.json:2:15: not devices to serve",
            ),
            (
                "{\"devices\": [\n{\"name\": \"a\", \"regoin\": \"egm\"}]}",
                None,
                "write \"region\" instead of \"regoin\"",
            ),
            ("{\"devices\": []}", None, "error: cannot serve 0 devices: a process serves 1 to 256"),
            (&TWO.replace("vm2", "vm1"), None, "two devices with the name \"vm1\": each has its own"),
            (
                &TWO.replace("4096", "4096, \"socket\": \"/run/vm1.sock\""),
                None,
                "two devices with the socket",
            ),
            (&TWO.replace("vm2", "v m"), None, "cannot use \"v m\" as the name of a device"),
            (&TWO.replace("4096", "0"), None, "device \"vm2\": its slice has 0 bytes"),
            (&TWO.replace("1234:0001", "1234"), None, "\"1234\" is not vendor:device in four hex digits"),
            (TWO, Some("vm3"), "cannot find device \"vm3\": the file has vm1, vm2"),
            (TWO, Some("wm2"), "help: write \"vm2\" instead of \"wm2\""),
        ] {
            let error = load_text(text, slice).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_sample_is_one() {
        let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/serve/grace.json");
        assert_eq!(load(&sample, None).unwrap().len(), 2);
    }
}
