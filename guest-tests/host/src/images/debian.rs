//! Packages from Debian's archive, verified, without touching the host's own package state.
//!
//! Lists and downloads live in the cache, so neither root nor the host's `sources.list` is needed. Signatures are
//! checked by `apt-get` against Debian's keyring. An older host's keyring does not know the newest release: then
//! the newer keyring is itself fetched as a package of a release that it does know.

use std::fs;
use std::path::{Path, PathBuf};

use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::images::cache::{Cache, Lock};

/// The keyring of the host's package `debian-archive-keyring`.
const HOST_KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Present when that package knows trixie's keys.
const HOST_TRIXIE_KEY: &str = "/usr/share/keyrings/debian-archive-trixie-stable.gpg";
/// Suites with the current kernels.
const CURRENT: [&str; 4] = ["trixie-backports", "trixie", "trixie-updates", "bookworm-backports"];
/// Suites that an older keyring can verify.
const OLDER: [&str; 3] = ["bookworm-backports", "bookworm", "bookworm-updates"];

/// Architecture of the packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// x86-64: most machines of this program, and its guests.
    Amd64,
    /// 64-bit Arm: the emulated Grace host and its guests.
    Arm64,
}

impl Architecture {
    /// This machine's: KVM runs only guests of its own processor.
    pub(crate) fn of_this_machine() -> Self {
        match std::env::consts::ARCH {
            "aarch64" => Self::Arm64,
            _ => Self::Amd64,
        }
    }

    /// Name in Debian and in the kernel.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Folder of the package lists in the cache.
    const fn folder(self) -> &'static str {
        match self {
            Self::Amd64 => "apt",
            Self::Arm64 => "apt-arm64",
        }
    }
}

/// Debian's archive for one architecture.
#[derive(Debug)]
pub(crate) struct Archive {
    root: PathBuf,
    architecture: Architecture,
}

/// A version of a package and the suite that has it, `trixie/main`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) package: String,
    pub(crate) version: String,
    pub(crate) suite: String,
}

impl Archive {
    /// Opens the archive for x86-64 and brings the package lists up to date.
    pub(crate) fn open(cache: &Cache, held: &Lock) -> Result<Self, LabError> {
        Self::of(Architecture::Amd64, cache, held)
    }

    /// The same for `architecture`.
    pub(crate) fn of(architecture: Architecture, cache: &Cache, held: &Lock) -> Result<Self, LabError> {
        let root = cache.path(architecture.folder());
        for directory in ["lists/partial", "archives/partial"] {
            let path = root.join(directory);
            fs::create_dir_all(&path).map_err(LabError::file("make", &path))?;
        }
        let archive = Self { root, architecture };
        if !Path::new(HOST_KEYRING).exists() {
            return Err(LabError::Host {
                what: "Debian's archive keyring is missing".into(),
                remedy: "install the package debian-archive-keyring".into(),
            });
        }
        if Path::new(HOST_TRIXIE_KEY).exists() {
            archive.update(Path::new(HOST_KEYRING), &CURRENT)?;
            return Ok(archive);
        }
        archive.update(Path::new(HOST_KEYRING), &OLDER)?;
        let scratch = cache.scratch(held)?;
        let newest = archive.newest("debian-archive-keyring", |_| true)?;
        archive.unpack(&newest, scratch.path())?;
        if scratch.path().join(HOST_TRIXIE_KEY.trim_start_matches('/')).exists() {
            let fetched = scratch.path().join(HOST_KEYRING.trim_start_matches('/'));
            let keyring = archive.root.join("keyring.gpg");
            fs::copy(&fetched, &keyring).map_err(LabError::file("copy", &fetched))?;
            archive.update(&keyring, &CURRENT)?;
        }
        Ok(archive)
    }

    /// The newest version of `package` in a suite that `suite` accepts.
    pub(crate) fn newest(&self, package: &str, suite: impl Fn(&str) -> bool) -> Result<Version, LabError> {
        let listing = self.apt("apt-cache").args(["madison", package]).text()?;
        versions(&listing).into_iter().find(|v| suite(&v.suite)).ok_or_else(|| LabError::Content {
            what: "Debian's package lists".into(),
            problem: format!("no package {package}"),
        })
    }

    /// The first package named `prefix…` that `meta` depends on, in the same version: the target of a metapackage.
    pub(crate) fn behind(&self, meta: &Version, prefix: &str) -> Result<Version, LabError> {
        let found = self.needed(meta, &[prefix])?;
        found.into_iter().next().ok_or_else(|| LabError::Content {
            what: format!("Debian's package {}={}", meta.package, meta.version),
            problem: format!("it depends on no {prefix}…"),
        })
    }

    /// The packages called like one of `prefixes` that `package` depends on, in the same version.
    pub(crate) fn needed(&self, package: &Version, prefixes: &[&str]) -> Result<Vec<Version>, LabError> {
        let name = format!("{}={}", package.package, package.version);
        let record = self.apt("apt-cache").args(["show", &name]).text()?;
        let wanted = |name: &str| prefixes.iter().any(|prefix| name.starts_with(prefix));
        let found = dependencies(&record).into_iter().filter(|name| wanted(name));
        Ok(found.map(|found| Version { package: found.to_owned(), ..package.clone() }).collect())
    }

    /// Downloads a package and unpacks its files into `directory`; nothing is installed and no script runs.
    pub(crate) fn unpack(&self, package: &Version, directory: &Path) -> Result<(), LabError> {
        let name = format!("{}={}", package.package, package.version);
        self.apt("apt-get").args(["download", &name]).within(directory).bytes()?;
        unpack_all(directory, directory)
    }

    /// As [`Self::unpack`], with all direct and indirect dependencies, down to the C library.
    pub(crate) fn unpack_with_dependencies(
        &self,
        package: &Version,
        directory: &Path,
    ) -> Result<(), LabError> {
        let name = format!("{}={}", package.package, package.version);
        let suite = package.suite.split('/').next().unwrap_or_default();
        // The empty list of installed packages makes apt fetch every dependency; files of an older, broken download do
        // not count as one of them.
        let archives = self.root.join("archives");
        remove_packages(&archives)?;
        self.apt("apt-get")
            .args(["install", "--download-only", "--no-install-recommends", "-y", "-t", suite, &name])
            .bytes()?;
        unpack_all(&archives, directory)
    }

    fn update(&self, keyring: &Path, suites: &[&str]) -> Result<(), LabError> {
        let mirror = mirror()?;
        let lines: String = suites
            .iter()
            .map(|s| format!("deb [signed-by={}] {mirror} {s} main\n", keyring.display()))
            .collect();
        let path = self.root.join("sources.list");
        fs::write(&path, lines).map_err(LabError::file("write", &path))?;
        self.apt("apt-get").args(["update", "--error-on=any"]).bytes().map(drop)
    }

    fn apt(&self, program: &str) -> Tool {
        let root = self.root.display();
        let options = [
            format!("Dir::State::Lists={root}/lists"),
            format!("Dir::Cache::Archives={root}/archives"),
            format!("Dir::Cache::pkgcache={root}/pkgcache.bin"),
            format!("Dir::Cache::srcpkgcache={root}/srcpkgcache.bin"),
            format!("Dir::Etc::SourceList={root}/sources.list"),
            "Dir::Etc::SourceParts=/dev/null".into(),
            "Dir::Etc::Preferences=/dev/null".into(),
            "Dir::Etc::PreferencesParts=/dev/null".into(),
            "Dir::State::status=/dev/null".into(),
            format!("APT::Architecture={}", self.architecture.name()),
            format!("APT::Architectures={}", self.architecture.name()),
            "APT::Sandbox::User=".into(),
            "Acquire::Languages=none".into(),
        ];
        Tool::new(program, "apt").args(options.iter().flat_map(|o| ["-o", o.as_str()]))
    }
}

/// Unpacks the packages in `from` into `directory` and removes them.
fn unpack_all(from: &Path, directory: &Path) -> Result<(), LabError> {
    for deb in packages(from)? {
        Tool::new("dpkg-deb", "dpkg")
            .args(["-x".as_ref(), deb.as_os_str(), directory.as_os_str()])
            .bytes()?;
    }
    remove_packages(from)
}

fn remove_packages(directory: &Path) -> Result<(), LabError> {
    packages(directory)?
        .iter()
        .try_for_each(|deb| fs::remove_file(deb).map_err(LabError::file("remove", deb)))
}

fn packages(directory: &Path) -> Result<Vec<PathBuf>, LabError> {
    let entries = fs::read_dir(directory).map_err(LabError::file("read", directory))?;
    let paths = entries.flatten().map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension().is_some_and(|e| e == "deb")).collect())
}

/// The Debian mirror that this host's own apt uses.
pub(crate) fn mirror() -> Result<String, LabError> {
    let listing =
        Tool::new("apt-get", "apt").args(["indextargets", "--format", "$(LABEL) $(SITE)"]).text()?;
    listing.lines().find_map(|line| line.strip_prefix("Debian h").map(|rest| format!("h{rest}"))).ok_or_else(
        || LabError::Host {
            what: "apt has no Debian mirror".into(),
            remedy: "add one to /etc/apt/sources.list and run apt-get update".into(),
        },
    )
}

/// Reads `apt-cache madison`: one version a line, newest first, `name | version | mirror suite/component arch Packages`.
fn versions(listing: &str) -> Vec<Version> {
    let version = |line: &str| {
        let mut fields = line.split('|').map(str::trim);
        let (package, version, place) = (fields.next()?, fields.next()?, fields.next()?);
        let suite = place.split_whitespace().nth(1)?;
        Some(Version { package: package.into(), version: version.into(), suite: suite.into() })
    };
    listing.lines().filter_map(version).collect()
}

/// The names of the dependencies in a package record, of alternatives the first.
fn dependencies(record: &str) -> Vec<&str> {
    let depends = record.lines().find_map(|line| line.strip_prefix("Depends: ")).unwrap_or_default();
    depends.split(',').filter_map(|one| one.split_whitespace().next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MADISON: &str = "
linux-source | 7.3.4-1~bpo13+1 | http://mirror/debian trixie-backports/main amd64 Packages
linux-source | 6.12.107-1 | http://mirror/debian trixie/main amd64 Packages
";

    #[test]
    fn versions_come_newest_first_with_their_suites() {
        let found = versions(MADISON);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].version, "7.3.4-1~bpo13+1");
        assert_eq!(found[1].suite, "trixie/main");
    }

    #[test]
    fn what_is_not_a_version_is_passed_over() {
        assert_eq!(versions("W: nothing\n|||\na | b"), []);
    }

    #[test]
    fn dependencies_are_names_without_versions_and_alternatives() {
        let record =
            "Package: linux-image\nDepends: linux-base-7.3 (= 7.3.4-1~bpo13+1), dracut | tools (>= 1), x\n";
        assert_eq!(dependencies(record), ["linux-base-7.3", "dracut", "x"]);
        assert_eq!(dependencies("Package: x\n"), Vec::<&str>::new());
    }
}
