//! Host files, `configs/host/*.json`: spans of memory that an operator has hidden from the kernel.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};

use egm_address::{ByteSize, Hpa, Quoted};
use egm_report::json::{self, JsonError, Unknown};
use egm_report::{Blame, Remedy, Report};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use crate::region::read;
use crate::schema::{self, AddressText, SizeText, SomeSizeText};
use crate::trusted::{self, NotRootOwned};

/// Folder of host files, below a host's root.
const FOLDER: &str = "etc/egm-device/host";

/// The JSON Schema of a host file, as text that ends in a newline.
#[must_use]
pub fn schema() -> String {
    schema::text::<HostFile>()
}

/// Memory of a host that an operator has kept from the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "egm-device host file")]
pub struct HostFile {
    /// For editors: the schema of host files.
    #[serde(rename = "$schema", default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// The host that it is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Spans of hidden memory, each a region.
    #[serde(default)]
    pub regions: Vec<ReservedSpan>,
    /// Folders of file systems that map their medium directly.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fsdax: Vec<FsdaxFolder>,
}

/// A folder with the slices of a region as its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FsdaxFolder {
    /// Name of the region.
    pub name: String,
    /// The folder, root's alone (mode 0700), on an ext4 file system that is mounted with `dax`.
    pub folder: PathBuf,
}

/// Memory that `mem=` or `memmap=` keeps from the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReservedSpan {
    /// Name of the region.
    pub name: String,
    /// Host physical address of its first byte.
    #[schemars(with = "AddressText")]
    pub base: Hpa,
    /// Size, a multiple of the page size.
    #[serde(serialize_with = "as_people_write")]
    #[schemars(with = "SomeSizeText")]
    pub size: ByteSize,
    /// Its node; the default comes from ACPI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// Alignment of slices; the default is the largest of 2 MiB, 64 KiB and 4 KiB that fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<SizeText>")]
    pub page_size: Option<ByteSize>,
    /// Declares that all of it is RAM. Required only where the firmware's memory map cannot be read (Arm with ACPI): a
    /// wrong address would be scrubbed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub trusted: bool,
    /// The file with host physical addresses as offsets.
    #[serde(default = "dev_mem")]
    pub device: PathBuf,
}

/// Writes `15GiB`: host files are for people.
fn as_people_write<S: Serializer>(size: &ByteSize, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(size)
}

fn dev_mem() -> PathBuf {
    PathBuf::from("/dev/mem")
}

/// Why a host file is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum HostFileError {
    #[error("cannot read host file {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot trust {}: it belongs to user {uid} with mode {mode:#o}", path.display())]
    NotRootOwned { path: PathBuf, uid: u32, mode: u32 },
    /// It is not JSON, or has an unknown key or value.
    #[error("{}:{}:{}: not a host file", path.display(), source.line, source.column)]
    Json { path: PathBuf, source: Box<JsonError> },
}

impl HostFile {
    /// All host files (`*.json`) of the host at `root`, by name: those in `folder`, or else in its
    /// `/etc/egm-device/host`. A missing folder has none.
    ///
    /// This host's files name the memory that a grant scrubs, so root must own them and their folder, and no other user
    /// may write either.
    pub fn load_all(root: &Path, folder: Option<&Path>) -> Result<Vec<Self>, HostFileError> {
        let folder = folder.map_or_else(|| root.join(FOLDER), Path::to_owned);
        let is_here = trusted::is_this_host(root);
        if is_here && let Ok(metadata) = folder.metadata() {
            check(&folder, &metadata)?;
        }
        let names = read::names(&folder).into_iter().filter(|name| name.ends_with(".json"));
        names.map(|name| Self::load(&folder.join(name), is_here)).collect()
    }

    fn load(path: &Path, is_here: bool) -> Result<Self, HostFileError> {
        let error = |source| HostFileError::Read { path: path.to_owned(), source };
        let file = read::open(path).map_err(error)?;
        if is_here {
            check(path, &file.metadata().map_err(error)?)?;
        }
        let bytes = read::all(file).map_err(error)?;
        json::from_slice(&bytes).map_err(|source| HostFileError::Json { path: path.to_owned(), source })
    }
}

fn check(path: &Path, metadata: &Metadata) -> Result<(), HostFileError> {
    trusted::check(metadata).map_err(|NotRootOwned { uid, mode }| HostFileError::NotRootOwned {
        path: path.to_owned(),
        uid,
        mode,
    })
}

impl Report for HostFileError {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help(match self {
            Self::Read { .. } => "let this user read it, or take it out of that folder".to_owned(),
            Self::NotRootOwned { path, .. } => {
                format!("read it, then: chown root {0} && chmod go-w {0}", path.display())
            }
            Self::Json { source, .. } => remedy(source).unwrap_or_else(|| {
                "correct it there: a host file is as \"egm-device carve advise\" shows one".to_owned()
            }),
        })
    }

    fn excerpt(&self) -> Option<String> {
        match self {
            Self::Json { source, .. } => Some(source.excerpt.clone()),
            _ => None,
        }
    }
}

/// The remedy for a mistake in a file of ours: for an unknown key, the most similar known one.
pub(crate) fn remedy(error: &JsonError) -> Option<String> {
    let Some(Unknown { name, known }) = &error.unknown else { return error.help.clone() };
    let right = known.iter().min_by_key(|known| strsim::damerau_levenshtein(name, known))?;
    Some(format!("write \"{right}\" instead of {}", Quoted(name)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use egm_report::Chain;

    use super::*;

    fn load(text: &str) -> Result<HostFile, HostFileError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.json"), text).unwrap();
        fs::write(folder.path().join("README"), "not a host file").unwrap();
        HostFile::load_all(folder.path(), Some(folder.path())).map(|mut all| all.remove(0))
    }

    #[test]
    fn a_span_has_a_name_a_base_and_a_size_and_the_rest_by_default() {
        let file =
            load(r#"{"regions": [{"name": "hidden", "base": "0x100000000", "size": "4GiB"}]}"#).unwrap();
        let span = &file.regions[0];
        assert_eq!((span.base.get(), span.size.get(), span.node), (4 << 30, 4 << 30, None));
        assert_eq!(span.device, Path::new("/dev/mem"));
    }

    #[test]
    fn a_misspelt_key_is_refused_with_its_place_and_the_right_name() {
        let error =
            load("{\"regions\": [\n{\"name\": \"hidden\", \"bse\": \"0x1\", \"size\": 4096}]}").unwrap_err();
        let text = Chain(&error).to_string();
        assert!(text.contains("a.json:2:20: not a host file"), "{text}");
        assert!(text.ends_with("help: write \"base\" instead of \"bse\""), "{text}");
    }
}
