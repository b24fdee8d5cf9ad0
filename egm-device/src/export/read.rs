//! A configuration and what it extends, from disk to a tree whose paths are absolute.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::Value;

use super::file::File;
use super::machine::Machine;
use super::rules::{Rule, resolve};
use crate::bounded;
use crate::report::{Blame, Report};

/// Largest file.
const MAX_FILE: u64 = 1 << 20;
/// Most files that extend one another.
const MAX_FILES: usize = 8;

/// Why a file is no machine.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no JSON.
    #[error("{}:{}:{}: not JSON", path.display(), source.line(), source.column())]
    Json {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// Files extend each other in a circle, or more of them than anybody needs.
    #[error("{} extends more than {MAX_FILES} files, or itself", path.display())]
    Extends {
        /// The file that was asked for.
        path: PathBuf,
    },
    /// It is JSON, but not a machine.
    #[error("{} is not a machine", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// It is a machine that breaks a rule.
    #[error("{}: {key}: {rule}", path.display())]
    Rule {
        /// The file.
        path: PathBuf,
        /// The key, such as `memory.nodes`.
        key: String,
        /// The rule.
        rule: Rule,
    },
}

impl Report for ReadError {
    fn blame(&self) -> Blame {
        Blame::Configuration
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            Self::Read { .. } => "name a machine's configuration, such as configs/smoke.json".to_owned(),
            Self::Json { .. } | Self::Shape { .. } | Self::Rule { .. } => {
                "\"egm-vmm plan FILE\" says the line, \"egm-vmm schema\" what may be written".to_owned()
            }
            Self::Extends { .. } => "follow the \"extends\" keys, and remove one".to_owned(),
        })
    }
}

impl Machine {
    /// The machine in the configuration file `path`, together with the files that it extends.
    ///
    /// # Errors
    /// [`ReadError`] names the file, and the key where there is one.
    pub fn load(path: &Path) -> Result<Self, ReadError> {
        let tree = tree(path)?;
        let shape = |source| ReadError::Shape { path: path.to_owned(), source };
        let file: File = serde_json::from_value(tree).map_err(shape)?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        resolve(file, &stem).map_err(|(key, rule)| ReadError::Rule { path: path.to_owned(), key, rule })
    }
}

/// The file and those below it, merged.
fn tree(first: &Path) -> Result<Value, ReadError> {
    let mut layers = Vec::new();
    let mut next = Some(first.to_owned());
    while let Some(path) = next {
        if layers.len() >= MAX_FILES {
            return Err(ReadError::Extends { path: first.to_owned() });
        }
        let read = |source| ReadError::Read { path: path.clone(), source };
        let folder =
            std::path::absolute(path.parent().unwrap_or_else(|| Path::new("")).join(".")).map_err(read)?;
        let mut layer = parse(&path)?;
        next = match layer.as_object_mut().and_then(|object| object.remove("extends")) {
            Some(Value::String(below)) => Some(path.parent().unwrap_or_else(|| Path::new("")).join(below)),
            Some(_) => return Err(ReadError::Extends { path: first.to_owned() }),
            None => None,
        };
        place_paths(&mut layer, &folder);
        layers.push(layer);
    }
    Ok(layers.into_iter().rev().reduce(overlaid).unwrap_or(Value::Null))
}

fn parse(path: &Path) -> Result<Value, ReadError> {
    let read = |source| ReadError::Read { path: path.to_owned(), source };
    let bytes = fs::File::open(path).and_then(|file| bounded::read(file, MAX_FILE)).map_err(read)?;
    serde_json::from_slice(&bytes).map_err(|source| ReadError::Json { path: path.to_owned(), source })
}

/// Makes every path of a layer relative to the folder of the file that wrote it, before layers are merged.
fn place_paths(layer: &mut Value, folder: &Path) {
    let place = |value: Option<&mut Value>| {
        if let Some(Value::String(path)) = value {
            // A path that is not Unicode is the folder's: what cannot be written in an argument is refused by rule.
            *path = folder.join(&*path).to_string_lossy().into_owned();
        }
    };
    for key in ["kernel", "initramfs"] {
        place(layer.get_mut("boot").and_then(|boot| boot.get_mut(key)));
    }
    place(layer.get_mut("console").and_then(|console| console.get_mut("path")));
    for device in layer.get_mut("devices").and_then(Value::as_array_mut).into_iter().flatten() {
        for key in ["path", "socket"] {
            place(device.get_mut(key));
        }
    }
}

/// What `over` says, and for keys that it leaves out, what `base` says. Only objects are merged.
fn overlaid(base: Value, over: Value) -> Value {
    match (base, over) {
        (Value::Object(mut base), Value::Object(over)) => {
            for (key, value) in over {
                let merged = match base.remove(&key) {
                    Some(old) => overlaid(old, value),
                    None => value,
                };
                base.insert(key, merged);
            }
            Value::Object(base)
        }
        (_, over) => over,
    }
}
