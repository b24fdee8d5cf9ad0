//! The files of a configuration: one, and those that it extends.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use egm_report::json::line_and_column;
use rustix::fs::{Mode, OFlags};

use super::boot;
use super::decode::decode;
use super::error::{ConfigError, ConfigErrors, Fault, FilePosition, Rule};
use super::faults::Faults;
use super::tree::{Mark, Marked, Node, Value};

/// Largest file; the largest of ours has a hundredth of it.
const MAX_FILE: u64 = 1 << 20;
/// Most files that extend one another.
const MAX_FILES: usize = 8;
/// The key that names the file below.
const EXTENDS: &str = "extends";
/// Standard input, on a command line.
const STDIN: &str = "-";
/// Standard input, in messages. It has no folder, so paths in it are relative to the working directory.
const NAME_OF_STDIN: &str = "<stdin>";

/// All files of a configuration, merged into one tree.
pub(super) struct Document {
    sources: Vec<Source>,
    root: Node,
    /// Keys that a file has twice.
    twice: Vec<Marked>,
}

struct Source {
    path: PathBuf,
    text: String,
}

impl Document {
    /// Reads `path` and the files that it extends; `-` is standard input.
    pub(super) fn load(path: &Path) -> Result<Self, ConfigError> {
        let (path, bytes) = requested(path)?;
        Self::from_bytes(path, bytes)
    }

    /// Reads `path` alone, in which `extends` is a key as any other; `-` is standard input.
    pub(super) fn load_alone(path: &Path) -> Result<Self, ConfigError> {
        let (path, bytes) = requested(path)?;
        Self::alone(path, bytes)
    }

    /// The same for a file with known content.
    pub(super) fn alone(path: &Path, bytes: Vec<u8>) -> Result<Self, ConfigError> {
        let sources = vec![Source { path: path.to_owned(), text: text(path, bytes)? }];
        let mut twice = Vec::new();
        let root = Node::parse(&sources[0].text, 0, &mut twice)
            .map_err(|Marked { mark, rule }| error_at(&sources, mark, rule.here()))?;
        Ok(Self { sources, root, twice })
    }

    /// The same for a file with known content; the files that it extends are read from disk.
    pub(super) fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self, ConfigError> {
        let mut sources = Vec::new();
        let mut twice = Vec::new();
        let mut layers = Vec::new();
        let mut next = Some((path.to_owned(), bytes));
        while let Some((path, bytes)) = next {
            let index = sources.len();
            let text = text(&path, bytes)?;
            sources.push(Source { path, text });
            let mut layer = Node::parse(&sources[index].text, index, &mut twice)
                .map_err(|Marked { mark, rule }| error_at(&sources, mark, rule.here()))?;
            next = extended(&mut layer)
                .map(|node| {
                    below(&sources, &node).map_err(|rule| error_at(&sources, node.mark, rule.at(EXTENDS)))
                })
                .transpose()?;
            layers.push(layer);
        }
        let root = layers.into_iter().rev().reduce(Node::overlaid);
        let root = root.ok_or_else(|| unplaced(Rule::NotText))?;
        Ok(Self { sources, root, twice })
    }

    pub(super) fn root(&self) -> &Node {
        &self.root
    }

    pub(super) fn path(&self) -> &Path {
        self.sources.first().map_or_else(|| Path::new(""), |source| &source.path)
    }

    /// `path`, the value of `key`, relative to the folder of the file that has the key.
    pub(super) fn join(&self, key: &str, path: &Path) -> PathBuf {
        let source = self.sources.get(self.root.nearest(key).mark.source);
        source
            .and_then(|source| source.path.parent())
            .map_or_else(|| path.to_owned(), |folder| folder.join(path))
    }

    /// All of `faults` and the keys that are written twice, in the order of the text.
    ///
    /// # Errors
    /// Those, when there are any.
    pub(super) fn refuse(self, faults: Faults) -> Result<(), ConfigErrors> {
        let Self { sources, root, twice } = self;
        let is_full = faults.is_full();
        let place = |fault: Fault| (root.nearest(&fault.key).mark, fault);
        let twice = twice.into_iter().map(|Marked { mark, rule }| (mark, rule.here()));
        let mut all: Vec<(Mark, Fault)> = faults.into_vec().into_iter().map(place).chain(twice).collect();
        all.sort_by_key(|(mark, _)| (mark.source, mark.offset));
        let more = Rule::More { shown: all.len() };
        let all = all.into_iter().map(|(mark, fault)| error_at(&sources, mark, fault));
        let mut all = all.chain(is_full.then(|| unplaced(more)));
        match all.next() {
            None => Ok(()),
            Some(first) => Err(ConfigErrors { first, others: all.collect() }),
        }
    }
}

/// An error of a file as a whole.
pub(super) fn unplaced(rule: Rule) -> ConfigError {
    ConfigError { place: None, key: String::new(), rule: Box::new(rule), excerpt: None }
}

fn error_at(sources: &[Source], mark: Mark, fault: Fault) -> ConfigError {
    let Fault { key, rule } = fault;
    let Some(source) = sources.get(mark.source) else { return ConfigError { key, ..unplaced(*rule) } };
    let (line, column) = line_and_column(source.text.as_bytes(), mark.offset);
    let text = source.text.lines().nth(line.saturating_sub(1)).unwrap_or_default();
    let excerpt = is_meant(&source.text).then(|| egm_report::excerpt(text, line, column).into());
    ConfigError { place: Some(FilePosition { file: source.path.clone(), line, column }), key, rule, excerpt }
}

/// Whether `text` is an object, perhaps behind a comment. No line of another file is printed: `extends` can name a file that
/// only root may read.
fn is_meant(text: &str) -> bool {
    text.trim_start_matches('\u{feff}').trim_start().starts_with(['{', '/'])
}

/// The name and the bytes of the file `path`; `-` is standard input.
pub(super) fn requested(path: &Path) -> Result<(&Path, Vec<u8>), ConfigError> {
    if path == Path::new(STDIN) {
        let path = Path::new(NAME_OF_STDIN);
        let error = |source| unplaced(Rule::Unreadable { path: path.to_owned(), source });
        return Ok((path, all(io::stdin().lock()).map_err(error)?));
    }
    Ok((path, read(path).map_err(unplaced)?))
}

fn read(path: &Path) -> Result<Vec<u8>, Rule> {
    let error = |source| Rule::Unreadable { path: path.to_owned(), source };
    all(open(path).map_err(error)?).map_err(error)
}

/// The bytes of `source`, one more than [`MAX_FILE`] at most.
fn all(source: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(MAX_FILE.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a regular file. Its kind is found by a reference (`O_PATH`): a pipe would wait for a writer, and to open a device
/// can have effects.
fn open(path: &Path) -> io::Result<File> {
    let reference = File::from(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    let kind = reference.metadata()?.file_type();
    match (kind.is_file() || egm_address::fault!("pipe-as-configuration"), kind.is_dir()) {
        (true, _) => File::open(format!("/proc/self/fd/{}", reference.as_raw_fd())),
        (_, true) => Err(io::ErrorKind::IsADirectory.into()),
        _ => Err(io::Error::other("not a regular file")),
    }
}

fn text(path: &Path, bytes: Vec<u8>) -> Result<String, ConfigError> {
    let most = if egm_address::fault!("configuration-of-any-size") { u64::MAX } else { MAX_FILE };
    let too_large = u64::try_from(bytes.len()).is_ok_and(|length| length > most);
    let rule = match String::from_utf8(bytes) {
        Ok(text) if !too_large => return Ok(text),
        Ok(_) => Rule::FileTooLarge { limit: MAX_FILE },
        Err(_) => Rule::NotText,
    };
    let place = Some(FilePosition { file: path.to_owned(), line: 1, column: 1 });
    Err(ConfigError { place, ..unplaced(rule) })
}

/// Takes the `extends` key out of a file.
fn extended(layer: &mut Node) -> Option<Node> {
    match &mut layer.value {
        Value::Object(members) => members.remove(EXTENDS),
        _ => None,
    }
}

/// The file that `node`, the `extends` of the last source, names.
fn below(sources: &[Source], node: &Node) -> Result<(PathBuf, Vec<u8>), Rule> {
    let name: String = decode(node).map_err(|fault| *fault.rule)?;
    let name = boot::path(name.into())?;
    let folder = sources.last().and_then(|source| source.path.parent());
    let path = folder.map_or_else(|| name.clone(), |folder| folder.join(&name));
    let mut files: Vec<PathBuf> = sources.iter().map(|source| source.path.clone()).collect();
    let circle = files.contains(&path);
    files.push(path.clone());
    if circle {
        return Err(Rule::ExtendsCycle(files));
    }
    if sources.len() >= MAX_FILES {
        return Err(Rule::ExtendsDepth { limit: MAX_FILES, files });
    }
    let bytes = read(&path)?;
    Ok((path, bytes))
}
