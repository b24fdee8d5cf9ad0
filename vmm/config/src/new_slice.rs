//! A slice that a machine gets while it runs.

use std::path::Path;

use super::added::NewDevice;
use super::error::{ConfigErrors, Rule};
use super::faults::Faults;
use super::file::EgmFile;
use super::foreign::translated;
use super::memory;
use super::source::{self, Document};
use super::spec::{EgmForm, EgmSlice};

/// Name of the text in messages.
const TEXT: &str = "slice";
/// Key of the slice in a configuration.
const HERE: &str = "egm[0]";

/// A slice that becomes a PCI function of a running machine.
#[derive(Debug, Clone)]
pub struct NewSlice(EgmSlice);

impl NewSlice {
    /// The slice of `text`: JSON, in the form of an entry of `egm` in a configuration.
    ///
    /// # Errors
    /// The rules that it breaks, with their places.
    pub fn parse(text: Vec<u8>) -> Result<Self, ConfigErrors> {
        let document = Document::alone(Path::new(TEXT), text)?;
        let (document, file) = translated(document, |file: EgmFile| Ok(file))?;
        let mut faults = Faults::default();
        let slice = Self::of(&file, &mut faults);
        let own_key = |key: &str| key.strip_prefix(HERE).unwrap_or(key).trim_start_matches('.').to_owned();
        document.refuse(faults.renamed(own_key))?;
        slice.ok_or_else(|| source::unplaced(Rule::NotText).into())
    }

    /// The slice of `file`; `None` when it breaks a rule, which is noted.
    fn of(file: &EgmFile, faults: &mut Faults) -> Option<Self> {
        let slice = memory::slice(file, HERE, faults)?;
        if slice.form == EgmForm::Memory {
            let rule = Rule::Refused {
                reason: "cannot add memory to a guest that runs".to_owned(),
                help: "set \"as\": \"device\", or name the slice in \"egm\" of the configuration".to_owned(),
            };
            faults.note(rule.at(format!("{HERE}.as")));
        }
        Some(Self(slice))
    }

    /// The slice, as the entry of a configuration would be.
    pub const fn slice(&self) -> &EgmSlice {
        &self.0
    }

    /// The device that it becomes as slice `number` of its machine.
    pub fn device(&self, number: u32) -> NewDevice {
        NewDevice::of_slice(number, self.0.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceKind;

    #[test]
    fn a_slice_of_a_running_machine_is_a_device_with_its_number() {
        let text = r#"{"region":"egm","size":"2MiB","node":1,"as":"device"}"#;
        let slice = NewSlice::parse(text.into()).unwrap();
        let device = slice.device(3).named("egm3", "vm");
        assert_eq!((slice.slice().size.get(), device.root_port), (2 << 20, true));
        assert_eq!((&*device.id, device.kind), ("egm3", DeviceKind::Egm { slice: 3, node: 1 }));
    }

    #[test]
    fn what_no_running_machine_takes_is_refused_with_its_place_and_a_remedy() {
        for (text, expected) in [
            (r#"{"region":"egm","size":"2MiB","node":1}"#, "as: cannot add memory to a guest that runs"),
            (r#"{"region":"egm","size":"1MiB","node":1,"as":"device"}"#, "slice:1:17: size: "),
            (r#"{"size":"2MiB","node":1,"as":"device"}"#, "key \"region\" is missing"),
            (r#"{"region":"egm","size":"2MiB","node":1,"as":"device","id":"x"}"#, "unknown key \"id\""),
        ] {
            let error = NewSlice::parse(text.into()).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
