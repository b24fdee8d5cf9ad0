//! A device that a machine gets while it runs.

use std::path::Path;

use serde::de::DeserializeOwned;

use super::boot;
use super::devices;
use super::error::{ConfigErrors, Rule};
use super::faults::Faults;
use super::file::DeviceFile;
use super::foreign::{Refusal, translated};
use super::slot::Slot;
use super::source::{self, Document};
use super::spec::{BarPlacements, Device, DeviceKind, VfioBackend};
use super::tap::TapFile;

/// Name of the text in messages.
const TEXT: &str = "device";
/// Key of the device in a configuration.
const HERE: &str = "devices[0]";

/// A device that has no name in a machine yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDevice {
    id: Option<String>,
    prefix: &'static str,
    kind: DeviceKind,
    /// Whether its hardware address is made from the names of machine and device.
    has_derived_mac: bool,
}

impl NewDevice {
    /// The device of `text`: JSON, in the form of an entry of `devices` in a configuration. Paths are relative to the
    /// working directory.
    ///
    /// # Errors
    /// The rules that it breaks, with their places.
    pub fn parse(text: Vec<u8>) -> Result<Self, ConfigErrors> {
        Self::parse_foreign(text, |file: DeviceFile| match file {
            DeviceFile::VirtioNet { tap: TapFile::Descriptors(_), .. } => Err(vec![Refusal {
                key: "tap".to_owned(),
                reason: "cannot use these descriptors: the machine's process inherits none while it runs"
                    .to_owned(),
                help: "name the interface, or pass descriptors with vm.add-net of egm-vmm serve".to_owned(),
            }]),
            file => Ok((file, str::to_owned)),
        })
    }

    /// The same of a parsed document.
    ///
    /// # Errors
    /// As [`NewDevice::parse`]; the places are those of its text.
    pub fn from_value(device: &serde_json::Value) -> Result<Self, ConfigErrors> {
        Self::parse(device.to_string().into_bytes())
    }

    /// The device of `text`, which has the form `T`. `translate` makes our form of it, and a function that gives the text's
    /// name of a key of our form.
    ///
    /// # Errors
    /// As [`NewDevice::parse`], with the text's keys.
    pub fn parse_foreign<T, N>(
        text: Vec<u8>,
        translate: impl FnOnce(T) -> Result<(DeviceFile, N), Vec<Refusal>>,
    ) -> Result<Self, ConfigErrors>
    where
        T: DeserializeOwned,
        N: Fn(&str) -> String,
    {
        let (document, (file, name)) = translated(Document::alone(Path::new(TEXT), text)?, translate)?;
        let mut faults = Faults::default();
        let device = Self::of(file, &mut faults);
        let own_key = |key: &str| key.strip_prefix(HERE).unwrap_or(key).trim_start_matches('.').to_owned();
        document.refuse(faults.renamed(|key| name(&own_key(key))))?;
        device.ok_or_else(|| source::unplaced(Rule::NotText).into())
    }

    /// The device of `file`; `None` when it breaks a rule, which is noted.
    fn of(file: DeviceFile, faults: &mut Faults) -> Option<Self> {
        let (id, root_port) = file.common();
        let (id, prefix) = (id.map(str::to_owned), devices::prefix(&file));
        let has_derived_mac = matches!(file, DeviceFile::VirtioNet { mac: None, .. });
        let refused =
            |reason: &str, help: &str| Rule::Refused { reason: reason.to_owned(), help: help.to_owned() };
        if root_port == Some(false) {
            let rule =
                refused("cannot plug a device into bus 0: only ports have slots", "leave root_port out");
            faults.note(rule.at(format!("{HERE}.root_port")));
        }
        let join = |_: &str, path: &Path| boot::path(path.to_owned());
        let kind = devices::resolve(vec![Slot::new(file)], None, join, faults)?.pop()?.kind;
        match &kind {
            DeviceKind::Vfio { backend, .. } if *backend != VfioBackend::Auto => {
                let rule = refused(
                    "cannot choose the interface of one function: a machine has one for all",
                    "leave backend out",
                );
                faults.note(rule.at(format!("{HERE}.backend")));
            }
            DeviceKind::Vfio { bars, .. } if *bars != BarPlacements::Guest => {
                let rule = refused(
                    "cannot fix addresses of BARs: they lie in the window of the port",
                    "leave bars out, or name the function in \"devices\" of the configuration",
                );
                faults.note(rule.at(format!("{HERE}.bars")));
            }
            _ => {}
        }
        Some(Self { id, prefix, kind, has_derived_mac })
    }

    /// Slice `number` of its machine, near the guest's node `node`.
    pub(super) fn of_slice(number: u32, node: u32) -> Self {
        let kind = DeviceKind::Egm { slice: number, node };
        Self { id: Some(format!("egm{number}")), prefix: "egm", kind, has_derived_mac: false }
    }

    /// Its name in every machine, if it has one.
    pub fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// Kind of device, with its settings.
    pub const fn kind(&self) -> &DeviceKind {
        &self.kind
    }

    /// Start of the name that a machine gives it otherwise; a number from 0 on follows.
    pub const fn prefix(&self) -> &'static str {
        self.prefix
    }

    /// The device under the name `id` of the machine `machine`.
    #[must_use]
    pub fn named(&self, id: &str, machine: &str) -> Device {
        let mut kind = self.kind.clone();
        if let DeviceKind::VirtioNet { mac, .. } = &mut kind
            && self.has_derived_mac
        {
            *mac = devices::own_mac(&devices::mac_seed(machine, id));
        }
        Device { id: id.to_owned(), root_port: true, kind }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn parse(text: &str) -> Result<NewDevice, String> {
        let error = |errors: ConfigErrors| {
            let first = errors.to_string();
            errors.others.iter().map(ToString::to_string).fold(first, |all, one| format!("{all}\n{one}"))
        };
        NewDevice::parse(text.as_bytes().to_vec()).map_err(error)
    }

    #[test]
    fn a_device_gets_the_name_and_the_hardware_address_that_its_machine_would_give_it() {
        let net = parse(r#"{"type":"virtio-net","tap":"tap0"}"#).unwrap();
        assert_eq!((net.id(), net.prefix()), (None, "net"));
        let machine = r#"{"memory":{"size":"16MiB"},"boot":{"kernel":"k"},"devices":[{"type":"virtio-net","tap":"tap0"}]}"#;
        let spec =
            crate::parse_with(Path::new("vm7.json"), machine.into(), &crate::Overrides::default()).unwrap();
        let named = net.named("net0", "vm7");
        assert_eq!((&named.id, &named.kind), (&spec.devices[0].id, &spec.devices[0].kind));
        assert!(named.root_port && net.named("net1", "vm7").kind != named.kind);
        let fixed =
            parse(r#"{"type":"virtio-net","tap":"tap0","id":"lan","mac":"52:54:00:00:00:01"}"#).unwrap();
        let (one, other) = (fixed.named("lan", "a"), fixed.named("lan", "b"));
        assert_eq!((fixed.id(), one), (Some("lan"), other));
        let disk = parse(r#"{"type":"virtio-blk","path":"/d"}"#).unwrap().named("blk0", "vm7");
        assert_eq!(disk.kind, DeviceKind::VirtioBlk { path: PathBuf::from("/d"), read_only: false });
        assert_eq!(disk.exclusive(), ["disk /d"]);
    }

    #[test]
    fn a_device_that_no_running_machine_takes_is_refused_with_its_place_and_a_remedy() {
        for (text, expected) in [
            (r#"{"type":"virtio-blk","path":""}"#, "device:1:22: path: the path is empty"),
            (r#"{"type":"virtio-blk"}"#, "device:1:1: key \"path\" is missing"),
            (r#"{"type":"virtio-rng","id":"a b"}"#, "device:1:22: id: \"a b\" is not a name"),
            (r#"{"type":"virtio-rng","root_port":false}"#, "root_port: cannot plug a device into bus 0"),
            (r#"{"type":"vfio","function":"0000:01:00.0","backend":"legacy"}"#, "backend: cannot choose"),
            (r#"{"type":"vfio","function":"0000:01:00.0","bars":"host"}"#, "bars: cannot fix addresses"),
            (r#"{"type":"virtio-net","tap":[3]}"#, "tap: cannot use these descriptors"),
            (r#"{"type":"virtio-rng","other":1}"#, "unknown key \"other\""),
            ("[]", "found an array"),
            ("no JSON", "device:1:"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
