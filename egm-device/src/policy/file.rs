//! The policy file: JSON, owned by root, refused when any other user could have written it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use egm_address::ByteSize;
use egm_report::json::{self, JsonError, Unknown};
use egm_report::{Chain, Report};
use schemars::JsonSchema;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::rules::{Policy, Rule, RuleSubject};
use crate::schema::{self, NameOrNumberText, NameText, NamesText, SizeText};
use crate::trusted::{self, NotRootOwned};

/// Maximum size of a policy file in bytes, far above the page or two of a usual one.
const MAX_FILE: u64 = 1 << 20;
const MAX_RULES: usize = 1000;

/// Words in `regions` that mean every region of a kind.
const KINDS: [&str; 7] = ["egm", "reserved", "devdax", "fsdax", "hugetlb", "memfd", "guest-memfd"];
/// A rule with an empty list, which would be for no memory.
const NO_REGION: &str = "\"regions\" is empty";

/// A policy file that is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum PolicyError {
    #[error("cannot read policy {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot trust policy {}: it belongs to user {uid} with mode {mode:#o}", path.display())]
    NotRootOwned { path: PathBuf, uid: u32, mode: u32 },
    #[error("cannot use policy {}", path.display())]
    File { path: PathBuf, source: Box<PolicyError> },
    #[error("it is larger than {}", ByteSize::new(MAX_FILE))]
    TooLarge,
    #[error("it is not UTF-8 text: save the file as UTF-8")]
    NotText,
    #[error("line {}, column {}: policy is not JSON of its schema", .0.line, .0.column)]
    Json(#[source] Box<JsonError>),
    #[error("it has {count} rules, and {MAX_RULES} at most are read")]
    TooManyRules { count: usize },
    #[error("rule {rule:?}: {what}")]
    Rule { rule: String, what: String },
}

impl PolicyError {
    /// Whether the host has no such file.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// The JSON Schema of a policy file, as text that ends in a newline.
#[must_use]
pub fn schema() -> String {
    schema::text::<PolicyFile>()
}

/// Users' shares of memory, for the broker. A request is decided by the first rule that fits it.
// The comments here are the documentation of the file, and the descriptions of its schema.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "egm-device policy")]
struct PolicyFile {
    /// Location of the schema, for editors.
    #[serde(rename = "$schema")]
    _schema: Option<String>,
    /// Description of the policy, for people.
    #[serde(rename = "description")]
    _description: Option<String>,
    /// The first rule that fits a request decides; a request that none fits is refused, unless root makes it.
    #[schemars(length(max = 1000))]
    rules: Vec<RuleFile>,
}

/// A rule names a user or a group, not both.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend("oneOf" = [{ "required": ["user"] }, { "required": ["group"] }]))]
struct RuleFile {
    /// Name of the rule in refusals.
    #[schemars(with = "NameText")]
    name: String,
    /// A user by name or number; this or `group`.
    #[schemars(with = "Option<NameOrNumberText>")]
    user: Option<NameOrNumber>,
    /// A group by name or number, primary or supplementary.
    #[schemars(with = "Option<NameOrNumberText>")]
    group: Option<NameOrNumber>,
    /// The VM class that these users may start; without it the rule is for requests without a class.
    #[schemars(with = "Option<NameText>")]
    class: Option<String>,
    /// Regions by name, or by kind: `egm`, `reserved`, `devdax`, `fsdax`, `hugetlb`, `memfd`, `guest-memfd`. Default: all.
    #[schemars(with = "Option<NamesText>")]
    regions: Option<RegionNames>,
    /// The most that all of them hold together. Default: no limit.
    #[schemars(with = "Option<SizeText>")]
    quota: Option<ByteSize>,
    /// The most that each user of them holds. Default: no limit.
    #[schemars(with = "Option<SizeText>")]
    quota_each: Option<ByteSize>,
    /// Bytes kept free for them in the rule's one region.
    #[schemars(with = "Option<SizeText>")]
    reservation: Option<ByteSize>,
    /// Higher is served first. Default: 0.
    #[serde(default)]
    priority: i32,
    /// Share among waiting requests of the same priority, 1 to 65536. Default: 1.
    #[schemars(range(min = 1, max = 65536))]
    weight: Option<NonZeroU32>,
    /// Permits slices of regions in which all slices are one file (`egm`, `reserved`, `devdax`): these users can then
    /// read and write every tenant's bytes, and with `reserved` all of the host's memory. Default: false.
    #[serde(default)]
    whole_device: bool,
    /// Owners of one trust domain share a region that a GPU reaches. Default: each owner is a domain of its own.
    #[schemars(with = "Option<NameText>")]
    trust_domain: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a name or a number")]
enum NameOrNumber {
    Number(u32),
    Name(String),
}

/// At least one region. The check is the parser's, which has the place in the text.
struct RegionNames(Vec<String>);

impl<'de> Deserialize<'de> for RegionNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = RegionNames;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of names")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<RegionNames, A::Error> {
                let mut names = Vec::new();
                while let Some(name) = list.next_element()? {
                    names.push(name);
                }
                if names.is_empty() { Err(A::Error::custom(NO_REGION)) } else { Ok(RegionNames(names)) }
            }
        }
        deserializer.deserialize_seq(List)
    }
}

/// Numbers of users and groups by name, from `/etc/passwd` and `/etc/group`. A rule names users of a directory service
/// by number.
#[derive(Debug, Clone, Default)]
pub struct Names {
    users: BTreeMap<String, u32>,
    groups: BTreeMap<String, u32>,
}

impl Names {
    /// From the texts of the two files; lines that are not entries are passed over.
    #[must_use]
    pub fn new(passwd: &str, group: &str) -> Self {
        let entry = |line: &str| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            let number = fields.nth(1)?.parse().ok()?;
            Some((name, number))
        };
        let all = |text: &str| text.lines().filter_map(entry).collect();
        Self { users: all(passwd), groups: all(group) }
    }

    /// The names of the host at `root`; a missing file has none.
    #[must_use]
    pub fn of_host(root: &Path) -> Self {
        let text = |path| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        Self::new(&text("etc/passwd"), &text("etc/group"))
    }
}

/// Path of a host's policy, below its root folder.
pub(crate) const OF_HOST: &str = "etc/egm-device/policy.json";

impl Policy {
    /// The policy of the host at `root`; without a valid one, only root is named. A policy that is refused is logged.
    #[must_use]
    pub fn of_host(root: &Path) -> Self {
        load(&root.join(OF_HOST), &Names::of_host(root)).unwrap_or_else(|error| {
            if !error.is_missing() {
                let why = Chain(&error as &dyn Report).to_string();
                let why = why.trim_start_matches("error: ");
                tracing::warn!("no user of a GPU has a trust domain, because the policy is not used: {why}");
            }
            Self::root_only()
        })
    }
}

/// Reads the policy at `path`.
///
/// # Errors
/// [`PolicyError`]: not readable, not root's own, or not a policy.
pub fn load(path: &Path, names: &Names) -> Result<Policy, PolicyError> {
    let read = |source| PolicyError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read)?;
    let metadata = file.metadata().map_err(read)?; // of the open file: it cannot be exchanged afterwards
    trusted::check(&metadata).map_err(|NotRootOwned { uid, mode }| PolicyError::NotRootOwned {
        path: path.to_owned(),
        uid,
        mode,
    })?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE.saturating_add(1)).read_to_end(&mut bytes).map_err(read)?;
    let text = String::from_utf8(bytes).map_err(|_| PolicyError::NotText);
    let policy = text.and_then(|text| parse(&text, names));
    policy.map_err(|error| PolicyError::File { path: path.to_owned(), source: Box::new(error) })
}

/// The policy in `text`, with `names` of users and groups.
///
/// # Errors
/// [`PolicyError`] names the rule and the key.
pub fn parse(text: &str, names: &Names) -> Result<Policy, PolicyError> {
    if u64::try_from(text.len()).is_ok_and(|length| length > MAX_FILE) {
        return Err(PolicyError::TooLarge);
    }
    let file: PolicyFile = json::from_slice(text.as_bytes()).map_err(with_remedy)?;
    if file.rules.len() > MAX_RULES {
        return Err(PolicyError::TooManyRules { count: file.rules.len() });
    }
    let mut rules: Vec<Rule> = Vec::new();
    for written in file.rules {
        let name = written.name.clone();
        let error = |what| PolicyError::Rule { rule: name.clone(), what };
        if rules.iter().any(|rule| rule.name == name) || name == "root" || !is_word(&name) {
            return Err(error(
                "write a name that no other rule has, of A-Z a-z 0-9 . _ -, and not \"root\"".into(),
            ));
        }
        rules.push(rule(written, names).map_err(error)?);
    }
    Ok(Policy::new(rules))
}

/// A mistake at a place of the text, with the remedy.
fn with_remedy(mut error: Box<JsonError>) -> PolicyError {
    if error.reason == NO_REGION {
        error.help = Some("name regions or kinds there, or remove \"regions\" for all regions".to_owned());
    } else if let Some(unknown) = &error.unknown {
        error.help = Some(keys(unknown));
    }
    PolicyError::Json(error)
}

/// The keys that are known in place of `unknown`, with the most similar one if there is one.
fn keys(unknown: &Unknown) -> String {
    let Unknown { name, known } = unknown;
    let near = known.iter().map(|key| (strsim::damerau_levenshtein(key, name), key)).min();
    let meant = match near {
        Some((distance, key)) if distance <= 3 => format!("did you mean \"{key}\"? "),
        _ => String::new(),
    };
    format!("{meant}keys here are: {}", known.join(", "))
}

fn rule(written: RuleFile, names: &Names) -> Result<Rule, String> {
    let who = match (written.user, written.group) {
        (Some(user), None) => RuleSubject::User(number(&user, &names.users, "user")?),
        (None, Some(group)) => RuleSubject::Group(number(&group, &names.groups, "group")?),
        _ => return Err("write either \"user\" or \"group\"".to_owned()),
    };
    let reservation = written.reservation.map_or(0, ByteSize::get);
    let regions = written.regions.map_or_else(Vec::new, |regions| regions.0);
    let bad = regions.iter().chain(&written.class).chain(&written.trust_domain).find(|word| !is_word(word));
    if let Some(word) = bad {
        return Err(format!("{word:?} is not a name: write 1 to 64 of A-Z a-z 0-9 . _ -"));
    }
    match regions.as_slice() {
        _ if reservation == 0 => {}
        [region] if !is_kind(region) => {}
        _ => return Err("a reservation is kept in one region: name exactly one, not a kind".to_owned()),
    }
    let quota = written.quota.map(ByteSize::get);
    if quota.is_some_and(|quota| quota < reservation) {
        return Err("the reservation is more than the quota, so no user could take all of it".to_owned());
    }
    let weight = written.weight.unwrap_or(NonZeroU32::MIN);
    if weight.get() > 65536 {
        return Err(format!("weight {weight} is outside 1 to 65536"));
    }
    Ok(Rule {
        name: written.name,
        who,
        class: written.class,
        regions,
        quota,
        quota_each: written.quota_each.map(ByteSize::get),
        reservation,
        priority: written.priority,
        weight,
        whole_device: written.whole_device,
        trust_domain: written.trust_domain,
    })
}

fn number(who: &NameOrNumber, known: &BTreeMap<String, u32>, what: &str) -> Result<u32, String> {
    match who {
        NameOrNumber::Number(number) => Ok(*number),
        NameOrNumber::Name(name) => known.get(name).copied().ok_or_else(|| {
            format!("this host has no {what} {name:?} in /etc: write its number, without quotes")
        }),
    }
}

/// Whether `word` means every region of a kind.
pub(crate) fn is_kind(word: &str) -> bool {
    KINDS.contains(&word)
}

pub(crate) fn is_word(text: &str) -> bool {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=64).contains(&text.len()) && text.chars().all(legal)
}
