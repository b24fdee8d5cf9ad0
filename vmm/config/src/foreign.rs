//! Machines that documents of another monitor describe.
//!
//! ```text
//! document ──tree, shape──► T ──translate──► File ──rules──► Spec
//!                            a Refusal for each key that no machine of ours can honour
//! ```
//! A refusal, and a rule that the translated file breaks, is reported at the line of the document.

use std::fmt;
use std::path::Path;

use serde::de::DeserializeOwned;

use super::boot::Overrides;
use super::error::{ConfigErrors, Rule};
use super::faults::Faults;
use super::file::File;
use super::resolve::spec;
use super::shape::shape;
use super::source::{self, Document};
use super::spec::Spec;

/// A key of another monitor's document that no machine of ours can honour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The key in the document: `disks[0].direct`.
    pub key: String,
    /// "cannot VERB OBJECT: REASON".
    pub reason: String,
    /// Change to the document that avoids the refusal.
    pub help: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, reason, help } = self;
        write!(f, "{key}: {reason}; {help}")
    }
}

/// The machine of the document `path` (`-` is standard input), which has the form `T`. `translate` makes our file of it,
/// and a function that gives the document's name of a key of our file. Paths in the document are relative to the
/// working directory.
///
/// # Errors
/// As [`load`](crate::load), with the document's keys and places.
pub fn load_foreign<T, N>(
    path: &Path,
    overrides: &Overrides,
    translate: impl FnOnce(T) -> Result<(File, N), Vec<Refusal>>,
) -> Result<Spec, ConfigErrors>
where
    T: DeserializeOwned,
    N: Fn(&str) -> String,
{
    resolve(Document::load_alone(path)?, overrides, translate)
}

/// [`load_foreign`] of `text`, which did not come from a file: `path` is its name in messages.
///
/// # Errors
/// As [`load_foreign`].
pub fn parse_foreign<T, N>(
    path: &Path,
    text: Vec<u8>,
    overrides: &Overrides,
    translate: impl FnOnce(T) -> Result<(File, N), Vec<Refusal>>,
) -> Result<Spec, ConfigErrors>
where
    T: DeserializeOwned,
    N: Fn(&str) -> String,
{
    resolve(Document::alone(path, text)?, overrides, translate)
}

/// [`load_foreign`] of a document that was read.
pub(super) fn resolve<T, N>(
    document: Document,
    overrides: &Overrides,
    translate: impl FnOnce(T) -> Result<(File, N), Vec<Refusal>>,
) -> Result<Spec, ConfigErrors>
where
    T: DeserializeOwned,
    N: Fn(&str) -> String,
{
    let (document, (file, name)) = translated(document, translate)?;
    let mut faults = Faults::default();
    let as_written = |_: &str, path: &Path| path.to_owned();
    let spec = spec(file, document.path(), &as_written, overrides, &mut faults);
    document.refuse(faults.renamed(name))?;
    spec.ok_or_else(|| source::unplaced(Rule::NotText).into())
}

/// What `translate` makes of `document`, which has the form `T`.
///
/// # Errors
/// Its mistakes of form, or else the refusals of `translate`.
pub(super) fn translated<T: DeserializeOwned, O>(
    document: Document,
    translate: impl FnOnce(T) -> Result<O, Vec<Refusal>>,
) -> Result<(Document, O), ConfigErrors> {
    let mut faults = Faults::default();
    let shaped = shape(document.root(), &[], &mut faults);
    // What a document lacks because it is wrong would be refused as missing.
    if let Some(shaped) = shaped.filter(|_| faults.is_empty()) {
        match translate(shaped) {
            Ok(made) => return Ok((document, made)),
            Err(refusals) => {
                for Refusal { key, reason, help } in refusals {
                    faults.note(Rule::Refused { reason, help }.at(key));
                }
            }
        }
    }
    document.refuse(faults)?;
    Err(source::unplaced(Rule::NotText).into())
}

#[cfg(test)]
mod tests {
    use egm_address::ByteSize;
    use egm_report::{Chain, Report};
    use serde::Deserialize;

    use super::*;
    use crate::file::{BootFile, MemoryFile};

    /// The document of a monitor that calls memory `ram` and the kernel `image`, and has sound.
    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Other {
        ram: u64,
        image: Option<String>,
        #[serde(default)]
        sound: Vec<Card>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Card {
        irq: u8,
    }

    fn translated(other: Other) -> Result<(File, impl Fn(&str) -> String), Vec<Refusal>> {
        let refused = |index: usize| Refusal {
            key: format!("sound[{index}].irq"),
            reason: "cannot play sound: a machine has no speaker".to_owned(),
            help: "leave it out".to_owned(),
        };
        let refusals: Vec<Refusal> = (0..other.sound.len()).map(refused).collect();
        if other.sound.iter().any(|card| card.irq < 200) {
            return Err(refusals);
        }
        let size = Some(ByteSize::new(other.ram));
        let memory = MemoryFile { size, page_size: None, prefault: None, nodes: None };
        let boot = BootFile { kernel: other.image.map(Into::into), ..BootFile::default() };
        let file = File { memory: Some(memory), boot: Some(boot), ..File::default() };
        Ok((file, |key: &str| key.replace("memory.size", "ram")))
    }

    fn read(text: &str) -> Result<Spec, String> {
        let document = Document::alone(Path::new("folder/other.json"), text.as_bytes().to_vec());
        let document = document.map_err(|error| Chain(&error).to_string())?;
        let spec = resolve(document, &Overrides::default(), translated);
        spec.map_err(|errors| Chain(&errors as &dyn Report).to_string())
    }

    #[test]
    fn a_document_is_a_machine_and_its_paths_are_as_written() {
        let spec = read(r#"{"ram":4096,"image":"vmlinuz"}"#).unwrap();
        assert_eq!((spec.name.as_str(), spec.memory.size.get()), ("other", 4096));
        assert_eq!(spec.boot.kernel, Path::new("vmlinuz"));
    }

    #[test]
    fn every_refusal_has_its_line_and_its_remedy() {
        let refused = read("{\n\"ram\": 1,\n\"sound\": [{ \"irq\": 5 },\n{ \"irq\": 7 }] }").unwrap_err();
        for (line, index) in [(3, 0), (4, 1)] {
            let wanted = format!("folder/other.json:{line}:");
            let line = refused.lines().find(|line| line.contains(&wanted));
            let line = line.unwrap_or_else(|| panic!("{refused}"));
            assert!(
                line.ends_with(&format!("sound[{index}].irq: cannot play sound: a machine has no speaker"))
            );
        }
        assert_eq!(refused.matches("  help: leave it out").count(), 2, "{refused}");
    }

    #[test]
    fn a_rule_that_the_machine_breaks_has_the_name_and_place_of_the_document() {
        let refused = read("{ \"image\": \"k\",\n  \"ram\": 4097 }").unwrap_err();
        assert!(
            refused.starts_with("error: folder/other.json:2:3: ram: 4097 is not a multiple"),
            "{refused}"
        );
    }

    #[test]
    fn every_mistake_of_a_documents_form_is_shown_and_translates_nothing() {
        let refused = read(r#"{"extends":"x","ram":"1GiB","sound":[{"irq":300},{"irq":1}]}"#).unwrap_err();
        for wanted in ["unknown key \"extends\"", "ram: found \"1GiB\"", "sound[0].irq: found 300"] {
            assert!(refused.contains(wanted), "{wanted}: {refused}");
        }
        assert!(!refused.contains("sound: a machine"), "{refused}");
        assert!(read(r#"{"ram":1,"ram":2,"image":"k"}"#).unwrap_err().contains("written twice"));
        assert!(read("[").unwrap_err().starts_with("error: folder/other.json:1:"));
    }
}
