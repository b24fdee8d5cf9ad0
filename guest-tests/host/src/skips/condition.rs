//! Conditions of the host that a row of the skip table names. Each is evaluated when a skip is judged.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kvm_ioctls::Kvm;
use rustix::fs::getxattr;
use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getrlimit};
use serde::Deserialize;

use crate::images::cache::Cache;

/// A condition of the host.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Condition {
    /// Always holds. The row has a note with the reason why no program can check it afterwards.
    Any,
    /// The emulated host of the lab.
    Lab,
    /// Any other host: the lab provides everything that its scenarios need.
    NotLab,
    /// The user is not root.
    NotRoot,
    /// The user is root.
    Root,
    /// The processors have another architecture.
    NotArchitecture(String),
    /// Pages of the kernel have another size, in bytes.
    NotPageSize(usize),
    /// The kernel is older than this release, for instance `6.16`.
    KernelBelow(String),
    /// The processor has fewer physical address bits.
    AddressBitsBelow(u32),
    /// The hard limit of open files is lower.
    OpenFilesBelow(u64),
    /// A VM of `/dev/kvm` lacks this, or no VM can be created.
    KvmLacks {
        /// Number of the capability.
        capability: u64,
        /// Bits that the answer needs; any positive answer will do without them.
        #[serde(default)]
        bits: i32,
    },
    /// A file or folder does not exist.
    Absent(PathBuf),
    /// A file or folder exists.
    Present(PathBuf),
    /// A file or folder belongs to this user.
    Ours(PathBuf),
    /// The file system of a path has no access control lists.
    NoAccessLists(PathBuf),
    /// No entry of the lab's cache begins with this.
    NotCached(String),
    /// No folder of PATH has this program.
    NoProgram(String),
    /// The program reports an older version in the first number of its output.
    ProgramBelow {
        /// The program, then its arguments.
        command: Vec<String>,
        /// First version that is new enough.
        version: u32,
    },
    /// A command ends with a failure or does not start.
    Fails(Vec<String>),
    /// A file exists and its text contains this.
    File {
        path: PathBuf,
        /// Part of its text.
        contains: String,
    },
    /// A file exists and its text, without white space at its ends, is this.
    FileIs { path: PathBuf, text: String },
    /// A file exists and its text, without white space at its ends, is another one.
    FileIsNot { path: PathBuf, text: String },
    /// An environment variable is not set.
    NoVariable(String),
    /// The run has this option.
    Option(String),
    /// The run lacks this option.
    NoOption(String),
}

/// The host and run for the evaluation of a condition.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Site<'a> {
    /// Folder that absolute paths are below.
    pub(super) root: &'a Path,
    /// Whether this is the emulated host.
    pub(super) in_lab: bool,
    /// Options that the run has, one word each.
    pub(super) options: &'a [String],
}

impl<'a> Site<'a> {
    /// This host, in a run with `options`.
    pub(crate) fn of_this_host(in_lab: bool, options: &'a [String]) -> Self {
        Self { root: Path::new("/"), in_lab, options }
    }

    fn below(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn text(&self, path: &Path) -> Option<String> {
        fs::read_to_string(self.below(path)).ok()
    }
}

impl Condition {
    pub(super) fn holds(&self, site: Site<'_>) -> bool {
        match self {
            Self::Any => true,
            Self::Lab => site.in_lab,
            Self::NotLab => !site.in_lab,
            Self::NotRoot => !geteuid().is_root(),
            Self::Root => geteuid().is_root(),
            Self::NotArchitecture(name) => std::env::consts::ARCH != name,
            Self::NotPageSize(bytes) => rustix::param::page_size() != *bytes,
            Self::KernelBelow(release) => kernel_is_below(site, release),
            Self::AddressBitsBelow(bits) => address_bits(site).is_some_and(|has| has < *bits),
            Self::OpenFilesBelow(least) => getrlimit(Resource::Nofile).maximum.is_some_and(|m| m < *least),
            Self::KvmLacks { capability, bits } => {
                let answer = kvm_capability(*capability);
                answer <= 0 || answer & bits != *bits
            }
            Self::Absent(path) => !site.below(path).exists(),
            Self::Present(path) => site.below(path).exists(),
            Self::Ours(path) => {
                fs::metadata(site.below(path)).is_ok_and(|found| found.uid() == geteuid().as_raw())
            }
            Self::NoAccessLists(path) => has_no_access_lists(&site.below(path)),
            Self::NotCached(prefix) => !Cache::open().is_ok_and(|cache| cache.newest(prefix, "").is_some()),
            Self::NoProgram(name) => {
                let folders = std::env::var_os("PATH").unwrap_or_default();
                !std::env::split_paths(&folders).any(|folder| folder.join(name).exists())
            }
            Self::ProgramBelow { command, version } => {
                reported_version(command).is_some_and(|has| has < *version)
            }
            Self::Fails(command) => fails(command),
            Self::File { path, contains } => site.text(path).is_some_and(|text| text.contains(contains)),
            Self::FileIs { path, text } => site.text(path).is_some_and(|has| has.trim() == text),
            Self::FileIsNot { path, text } => site.text(path).is_some_and(|has| has.trim() != text),
            Self::NoVariable(name) => std::env::var_os(name).is_none(),
            Self::Option(option) => site.options.contains(option),
            Self::NoOption(option) => !site.options.contains(option),
        }
    }
}

/// The leading numbers of a release: `6.18.5-pvm` is `[6, 18, 5]`.
fn numbers(release: &str) -> Vec<u32> {
    let parts = release.trim().split(|c: char| !c.is_ascii_digit());
    parts.map_while(|part| part.parse().ok()).collect()
}

fn kernel_is_below(site: Site<'_>, release: &str) -> bool {
    let running = site.text(Path::new("/proc/sys/kernel/osrelease"));
    running.is_some_and(|running| numbers(&running) < numbers(release))
}

/// The first processor's physical address bits; `None` where the kernel does not report them.
fn address_bits(site: Site<'_>) -> Option<u32> {
    let text = site.text(Path::new("/proc/cpuinfo"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("address sizes"))?;
    line.trim_start_matches([' ', '\t', ':']).split(' ').next()?.parse().ok()
}

/// The answer of a VM to `KVM_CHECK_EXTENSION`; 0 without a VM.
fn kvm_capability(number: u64) -> i32 {
    let vm = Kvm::new().and_then(|kvm| kvm.create_vm());
    vm.map_or(0, |vm| vm.check_extension_raw(number))
}

fn has_no_access_lists(path: &Path) -> bool {
    let mut list = [0; 1024];
    getxattr(path, "system.posix_acl_access", &mut list[..]) == Err(Errno::NOTSUP)
}

fn command(words: &[String]) -> Option<Command> {
    let (program, arguments) = words.split_first()?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
    Some(command)
}

fn fails(words: &[String]) -> bool {
    let status = command(words).map(|mut command| command.stdout(Stdio::null()).status());
    !status.is_some_and(|status| status.is_ok_and(|status| status.success()))
}

/// The first number that a program prints.
fn reported_version(words: &[String]) -> Option<u32> {
    let output = command(words)?.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let digits = text.split(|c: char| !c.is_ascii_digit()).find(|digits| !digits.is_empty())?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host of these files, and whether a condition holds there in a run with `--quick`.
    fn host(files: &[(&str, &str)]) -> impl Fn(&str) -> bool + use<> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        move |json| {
            let condition: Condition = serde_json::from_str(json).unwrap();
            condition.holds(Site { root: root.path(), in_lab: false, options: &["--quick".into()] })
        }
    }

    #[test]
    fn files_decide() {
        let holds = host(&[("pattern", "|/usr/lib/core\n"), ("free", "0\n")]);
        assert!(holds(r#"{ "absent": "/dev/kvm" }"#) && !holds(r#"{ "absent": "/pattern" }"#));
        assert!(!holds(r#"{ "present": "/dev/kvm" }"#) && holds(r#"{ "present": "/pattern" }"#));
        assert!(holds(r#"{ "file": { "path": "/pattern", "contains": "|" } }"#));
        assert!(!holds(r#"{ "file": { "path": "/pattern", "contains": "core." } }"#));
        let free = |key: &str| format!(r#"{{ "{key}": {{ "path": "/free", "text": "0" }} }}"#);
        assert!(holds(&free("file-is")) && !holds(&free("file-is-not")));
        assert!(holds(r#"{ "file-is-not": { "path": "/pattern", "text": "0" } }"#));
        assert!(!holds(r#"{ "file-is-not": { "path": "/none", "text": "0" } }"#));
        assert!(holds(r#"{ "ours": "/pattern" }"#) && !holds(r#"{ "ours": "/none" }"#));
    }

    #[test]
    fn the_kernel_and_the_processor_decide() {
        let cpu = "processor\t: 0\naddress sizes\t: 46 bits physical, 48 bits virtual\n";
        let holds = host(&[("proc/sys/kernel/osrelease", "6.18.5-pvm\n"), ("proc/cpuinfo", cpu)]);
        assert!(holds(r#"{ "kernel-below": "6.19" }"#) && holds(r#"{ "kernel-below": "7.0" }"#));
        assert!(!holds(r#"{ "kernel-below": "6.18" }"#) && !holds(r#"{ "kernel-below": "6.2" }"#));
        assert!(holds(r#"{ "address-bits-below": 47 }"#) && !holds(r#"{ "address-bits-below": 46 }"#));
        assert!(!host(&[])(r#"{ "address-bits-below": 99 }"#), "arm64 does not report them");
        let page = rustix::param::page_size();
        assert!(!holds(&format!(r#"{{ "not-page-size": {page} }}"#)) && holds(r#"{ "not-page-size": 1 }"#));
        assert!(holds(r#"{ "not-architecture": "vax" }"#));
    }

    #[test]
    fn what_the_user_has_decides() {
        let holds = host(&[]);
        assert_ne!(holds(r#""root""#), holds(r#""not-root""#));
        assert!(!holds(r#"{ "open-files-below": 1 }"#));
        assert!(
            holds(r#"{ "no-variable": "EGM_NO_SUCH_VARIABLE" }"#) && !holds(r#"{ "no-variable": "PATH" }"#)
        );
        assert!(holds(r#"{ "option": "--quick" }"#) && !holds(r#"{ "option": "--full" }"#));
        assert!(!holds(r#"{ "no-option": "--quick" }"#) && holds(r#"{ "no-option": "--full" }"#));
        let proc = Condition::NoAccessLists("/proc/self".into());
        assert!(proc.holds(Site::of_this_host(false, &[])), "procfs has no access control lists");
        // No number of a capability, so no kernel has it.
        assert!(holds(r#"{ "kvm-lacks": { "capability": 1000000 } }"#));
    }

    #[test]
    fn programs_decide() {
        let holds = host(&[]);
        assert!(!holds(r#"{ "no-program": "sh" }"#) && holds(r#"{ "no-program": "no-such-program" }"#));
        assert!(holds(r#"{ "fails": ["false"] }"#) && holds(r#"{ "fails": ["no-such-program"] }"#));
        assert!(!holds(r#"{ "fails": ["true"] }"#));
        let below = |version: u32| {
            let command = r#"["echo", "systemd 252 (252.39)"]"#;
            holds(&format!(r#"{{ "program-below": {{ "command": {command}, "version": {version} }} }}"#))
        };
        assert!(below(254) && !below(252));
    }
}
