//! Faults of a configuration: the rule, the place, and the remedy.

use std::fmt;
use std::io;
use std::path::PathBuf;

use egm_address::{ByteSize, CpuSet, Quoted, Shown};
use egm_report::{Blame, Remedy, Report};

use super::rules::{BootRule, CpuRule, DeviceRule, MemoryRule, NumaRule};

/// A rule that a configuration breaks, and where.
///
/// `Display` is one line: place, key, rule. [`ConfigError::excerpt`] and [`ConfigError::help`] are for the lines below.
#[derive(Debug)]
pub struct ConfigError {
    /// Where the key was written, or the nearest one above it; `None` when the file could not be read.
    pub place: Option<FilePosition>,
    /// The key as a JSON path: `memory.nodes[1].size`; empty for the file as a whole.
    pub key: String,
    /// The rule that the key breaks.
    pub rule: Box<Rule>,
    /// The line at `place`, with a mark under it.
    pub excerpt: Option<Box<str>>,
}

/// Every rule that a configuration breaks, in the order of its text: the file first, then those that it extends.
///
/// `Display` is the first of them; [`Report::others`] are the rest.
#[derive(Debug)]
pub struct ConfigErrors {
    /// The first error in that order.
    pub first: ConfigError,
    /// The errors after it, in that order.
    pub others: Vec<ConfigError>,
}

/// A position in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePosition {
    /// The file, as it was named.
    pub file: PathBuf,
    /// Line number, counted from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
}

impl fmt::Display for FilePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file.display(), self.line, self.column)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.place.as_ref().map_or_else(String::new, |place| format!("{place}: "));
        let key = match *self.rule {
            Rule::UnknownKey { .. } | Rule::DuplicateKey { .. } => String::new(), // the rule names it
            _ if self.key.is_empty() => String::new(),
            _ => format!("{}: ", Shown(&self.key)),
        };
        write!(f, "{place}{key}{}", self.rule)
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&*self.rule)
    }
}

impl Report for ConfigError {
    fn remedy(&self) -> Remedy {
        // Most rules name the remedy themselves.
        Remedy { blame: Blame::Configuration, help: self.rule.help() }
    }

    fn excerpt(&self) -> Option<String> {
        self.excerpt.as_deref().map(str::to_owned)
    }
}

impl From<ConfigError> for ConfigErrors {
    fn from(first: ConfigError) -> Self {
        Self { first, others: Vec::new() }
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)
    }
}

impl std::error::Error for ConfigErrors {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.first)
    }
}

impl Report for ConfigErrors {
    fn remedy(&self) -> Remedy {
        self.first.remedy()
    }

    fn excerpt(&self) -> Option<String> {
        self.first.excerpt()
    }

    fn others(&self) -> Vec<&dyn Report> {
        self.others.iter().map(|other| other as &dyn Report).collect()
    }
}

/// Every rule. The messages explain the fields.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Rule {
    // The file.
    #[error("cannot read {}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("the file is larger than {}", ByteSize::new(*limit))]
    FileTooLarge { limit: u64 },
    #[error("not UTF-8 text")]
    NotText,
    #[error("{reason}")]
    Syntax { reason: String, help: Option<String> },
    #[error("{shown} mistakes are shown, and there may be more: correct these first")]
    More { shown: usize },
    #[error("nested more than {limit} deep")]
    TooDeep { limit: usize },
    #[error("files extend each other in a circle: {}", chain(.0))]
    ExtendsCycle(Vec<PathBuf>),
    #[error("more than {limit} files extend each other: {}", chain(files))]
    ExtendsDepth { limit: usize, files: Vec<PathBuf> },

    // The shape.
    #[error("unknown key {}", Quoted(key))]
    UnknownKey { key: String, known: Vec<&'static str> },
    #[error("key {} is written twice: remove one", Quoted(key))]
    DuplicateKey { key: String },
    #[error("key \"{key}\" is missing")]
    MissingKey { key: &'static str },
    #[error("key \"type\" is missing")]
    MissingType { known: Vec<&'static str> },
    #[error("found {found}, expected {wanted}")]
    WrongType { found: String, wanted: String },
    #[error("unknown name {}", Quoted(name))]
    UnknownName { name: String, known: Vec<&'static str> },
    #[error("{reason}")]
    Value { reason: String },

    // The meaning.
    #[error("{value} is outside {least} to {most}: write a number in that range")]
    Range { value: u64, least: u64, most: u64 },
    #[error("{} is not a name: write 1 to {MAX_NAME} of A-Z a-z 0-9 . _ -", Quoted(name))]
    Name { name: String },
    #[error("this machine's architecture is {0}, no guest's: write \"x86_64\" or \"aarch64\"")]
    Architecture(String),
    #[error("contains the control character {character:?}: remove it")]
    Control { character: char },
    #[error("{reason}")]
    Refused { reason: String, help: String },
    #[error("{count} entries: {most} at most, remove some")]
    TooMany { count: usize, most: usize },
    #[error("the list is empty: name at least one, or leave the key out")]
    EmptyList,
    #[error(transparent)]
    Cpus(#[from] CpuRule),
    #[error(transparent)]
    Memory(#[from] MemoryRule),
    #[error(transparent)]
    Numa(#[from] NumaRule),
    #[error(transparent)]
    Device(#[from] DeviceRule),
    #[error(transparent)]
    Boot(#[from] BootRule),
}

/// A broken rule on its way from the key where it was seen to the top of the file.
#[derive(Debug, thiserror::Error)]
#[error("{}: {rule}", Shown(key))]
pub(super) struct Fault {
    pub(super) key: String,
    pub(super) rule: Box<Rule>,
}

impl Rule {
    /// This rule, broken by the value at hand.
    pub(super) fn here(self) -> Fault {
        self.at("")
    }

    /// This rule, broken by `key`.
    pub(super) fn at(self, key: impl Into<String>) -> Fault {
        Fault { key: key.into(), rule: Box::new(self) }
    }

    /// Gives the key that the message names the name that it has in another document.
    pub(super) fn rename(&mut self, name: impl Fn(&str) -> String) {
        if let Self::Device(DeviceRule::Shared { first, .. } | DeviceRule::DuplicateId { first, .. })
        | Self::Memory(MemoryRule::DuplicateNode { first, .. }) = self
        {
            *first = name(first);
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::UnknownKey { key, .. } if key == "payload" => Some(
                "this is a document of cloud-hypervisor's API: plan and check take it with --from cloud-hypervisor, \
                 and ctl create gives it to egm-vmm serve"
                    .to_owned(),
            ),
            Self::UnknownKey { key, known } => Some(suggest(key, known, "keys here are")),
            Self::UnknownName { name, known } => Some(suggest(name, known, "names here are")),
            Self::Unreadable { .. } => Some(
                "name a configuration file that exists and that you may read; configs/ has some".to_owned(),
            ),
            Self::MissingType { known } => Some(format!("types here are: {}", known.join(", "))),
            Self::Syntax { help, .. } => help.clone(),
            Self::Refused { help, .. } => Some(help.clone()),
            Self::NotText => Some("save the file as UTF-8".to_owned()),
            _ => None,
        }
    }
}

impl Fault {
    /// The same fault, seen from the object or array that has the member `step` (`size` or `[3]`) around it.
    pub(super) fn inside(mut self, step: &str) -> Self {
        let dot = if self.key.is_empty() || self.key.starts_with('[') { "" } else { "." };
        self.key = format!("{step}{dot}{}", self.key);
        self
    }
}

/// Longest name of a machine, device or region, in bytes.
const MAX_NAME: usize = 64;

/// Whether `text` is a name: 1 to 64 letters, digits, `.`, `_` and `-`.
pub fn is_name(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// `text`, when it is a name.
pub(super) fn name(text: &str) -> Result<String, Rule> {
    if is_name(text) { Ok(text.to_owned()) } else { Err(Rule::Name { name: text.to_owned() }) }
}

/// Refuses a `text` that a terminal would obey: messages print a configuration as it was written.
pub(super) fn no_control(text: &str) -> Result<(), Rule> {
    let is_refused = |c: &char| c.is_control() && !egm_address::fault!("control-characters-accepted");
    text.chars().find(is_refused).map_or(Ok(()), |character| Err(Rule::Control { character }))
}

/// `value`, when it is within `least..=most`.
pub(super) fn in_range<T: Copy + PartialOrd + Into<u64>>(value: T, least: T, most: T) -> Result<T, Rule> {
    let (number, low, high) = (value.into(), least.into(), most.into());
    if (low..=high).contains(&number) {
        Ok(value)
    } else {
        Err(Rule::Range { value: number, least: low, most: high })
    }
}

/// Refuses more than `most` entries. Some rules compare each with each.
pub(super) fn at_most(count: usize, most: usize) -> Result<(), Rule> {
    if count > most { Err(Rule::TooMany { count, most }) } else { Ok(()) }
}

/// Refuses a `list` that is written but empty.
pub(super) fn not_empty(list: Option<CpuSet>) -> Result<Option<CpuSet>, Rule> {
    if list.as_ref().is_some_and(CpuSet::is_empty) { Err(Rule::EmptyList) } else { Ok(list) }
}

/// `did you mean "memory"? keys here are: arch, boot, …`
fn suggest(wrong: &str, known: &[&'static str], list: &str) -> String {
    let near = nearest(wrong, known.iter().copied());
    let question = near.map_or_else(String::new, |name| format!("did you mean \"{name}\"? "));
    let mut names: Vec<&str> = known.iter().copied().filter(|name| !name.starts_with('$')).collect();
    names.sort_unstable();
    format!("{question}{list}: {}", names.join(", "))
}

/// The one of `known` that the author of `wrong` probably meant, if any is near enough.
pub fn nearest<'a>(wrong: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = known
        .filter(|_| wrong.len() <= MAX_NAME)
        .map(|name| (strsim::damerau_levenshtein(wrong, name), name))
        .filter(|(distance, name)| *distance <= 2.max(name.len() / 3));
    near.min().map(|(_, name)| name)
}

fn chain(files: &[PathBuf]) -> String {
    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(" -> ")
}
