//! A configuration from the API. It is checked when it arrives, and read again at each start.

use std::path::Path;

use super::cloud::{self, ConsoleOutputMode, VmConfig};
use super::cycle::{Created, Language};
use super::shown::ShownConfig;
use crate::config::{self, ConfigErrors, Overrides, Spec};
use crate::passed::Passed;

/// Longest name of a machine that is made from a path.
const MAX_NAME: usize = 32;
/// Name of a socket that names no machine: its folder does.
const API: &str = "api";

/// A specification, and notes on values that the plan or the host decides.
struct Checked {
    spec: Spec,
    notes: Vec<String>,
    /// Modes of `serial` and `console` of cloud-hypervisor's document.
    consoles: Option<[ConsoleOutputMode; 2]>,
}

impl Created {
    /// The configuration `text`. A machine without a name has `default_name`.
    ///
    /// # Errors
    /// [`ConfigErrors`] with all refusals.
    pub(super) fn new(language: Language, text: String, default_name: &str) -> Result<Self, ConfigErrors> {
        Self::with_taps(language, text, default_name, Passed::default())
    }

    /// The same with the descriptors `taps`: a document counts them from 0 on, and a configuration of a snapshot names them in their
    /// order.
    ///
    /// # Errors
    /// As [`Created::new`].
    pub(super) fn with_taps(
        language: Language,
        text: String,
        default_name: &str,
        taps: Passed,
    ) -> Result<Self, ConfigErrors> {
        let document = Document { language, text: &text, default_name, taps: &taps };
        let Checked { spec, notes, consoles } = document.check(&Overrides::default())?;
        notes.iter().for_each(|note| tracing::info!("{note}"));
        let shown = shown(&spec, consoles);
        Ok(Self { language, text, default_name: default_name.to_owned(), name: spec.name, shown, taps })
    }

    /// Whether its text is `bytes`.
    pub(crate) fn is_of(&self, bytes: &[u8]) -> bool {
        self.text.as_bytes() == bytes
    }

    /// Specification of the machine.
    ///
    /// # Errors
    /// [`ConfigErrors`]: a file that it extends has changed.
    pub(crate) fn spec(&self, overrides: &Overrides) -> Result<Spec, ConfigErrors> {
        let Self { language, text, default_name, taps, .. } = self;
        Ok(Document { language: *language, text, default_name, taps }.check(overrides)?.spec)
    }
}

/// The text of a configuration, and what it needs to be read.
struct Document<'a> {
    language: Language,
    text: &'a str,
    default_name: &'a str,
    taps: &'a Passed,
}

impl Document<'_> {
    fn check(&self, overrides: &Overrides) -> Result<Checked, ConfigErrors> {
        // The name of the document in messages. It lies in the working directory, to which paths are relative.
        let path = format!("{}.json", self.default_name);
        let (path, text) = (Path::new(&path), self.text.as_bytes().to_vec());
        let (mut notes, mut consoles) = (Vec::new(), None);
        let spec = match self.language {
            Language::Own => {
                let mut spec = config::parse_with(path, text, overrides)?;
                let named = spec.tap_descriptors().flat_map(|(_, numbers)| numbers);
                named.zip(self.taps.numbers()).for_each(|(number, tap)| *number = tap);
                spec
            }
            Language::CloudHypervisor => {
                config::parse_foreign(path, text, overrides, |document: VmConfig| {
                    let translated = cloud::translate_with(&document, self.taps.numbers())?;
                    notes = translated.notes;
                    consoles = Some([document.serial.mode, document.console.mode]);
                    let origins = translated.origins;
                    Ok((translated.file, move |key: &str| origins.of(key)))
                })?
            }
        };
        Ok(Checked { spec, notes, consoles })
    }
}

/// The parts of cloud-hypervisor's `VmConfig` that every machine has.
fn shown(spec: &Spec, consoles: Option<[ConsoleOutputMode; 2]>) -> ShownConfig {
    let slices = spec.egm.iter().map(|slice| slice.size.get());
    let size = slices.fold(spec.memory.size.get(), u64::saturating_add);
    let shown = ShownConfig::new(spec.cpus.count, size, &spec.boot, &spec.console);
    match consoles {
        Some([serial, console]) => shown.with_consoles(serial.into(), console.into()),
        None => shown,
    }
}

/// The name of a machine with an API at `path`: the file's, or for `api.sock` the folder's.
pub(super) fn default_name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default();
    let folder = path.parent().and_then(Path::file_name).filter(|_| stem == API);
    let name = folder.unwrap_or(stem).to_string_lossy();
    let allowed = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let name: String = name.chars().filter(allowed).take(MAX_NAME).collect();
    if name.is_empty() { "machine".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = r#"{"memory":{"size":"16MiB"},"boot":{"kernel":"k"},"cpus":{"count":2}}"#;
    const CLOUD: &str = r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1},"payload":{"kernel":"k"},
        "serial":{"mode":"Tty"},"console":{"mode":"Off"}}"#;

    #[test]
    fn a_machine_has_the_name_of_its_socket_or_of_its_folder() {
        for (path, name) in [
            ("vm1.sock", "vm1"),
            ("/run/egm-vmm/vm1/api.sock", "vm1"),
            ("api.sock", "api"),
            ("/run/libvirt/ch/debian-socket", "debian-socket"),
            ("a b\u{1b}c.sock", "abc"),
            ("/", "machine"),
        ] {
            assert_eq!(default_name(Path::new(path)), name, "{path:?}");
        }
    }

    #[test]
    fn a_configuration_of_either_language_is_a_machine() {
        let ours = Created::new(Language::Own, OURS.to_owned(), "vm1").unwrap();
        assert_eq!((ours.name.as_str(), ours.shown.cpus.boot_vcpus), ("vm1", 2));
        let spec = ours.spec(&Overrides::default()).unwrap();
        assert_eq!((spec.name.as_str(), spec.boot.kernel.as_path()), ("vm1", Path::new("k")));
        let cloud = Created::new(Language::CloudHypervisor, CLOUD.to_owned(), "vm2").unwrap();
        assert_eq!((cloud.name.as_str(), cloud.shown.payload.kernel.as_str()), ("vm2", "k"));
    }

    #[test]
    fn every_mistake_is_refused_with_its_place() {
        let errors = Created::new(Language::Own, "{}".to_owned(), "vm1").unwrap_err();
        assert!(errors.to_string().starts_with("vm1.json:1:"), "{errors}");
        assert!(Created::new(Language::CloudHypervisor, OURS.to_owned(), "vm1").is_err());
        assert!(Created::new(Language::Own, "no JSON".to_owned(), "vm1").is_err());
    }
}
