//! The files that a guest needs for RDMA in addition to its kernel: `egm-guest` linked to a libc, that libc, libibverbs
//! with the driver of `rdma_rxe`, and perftest. All but the first are Debian's, for the guest's processor.

use std::fs;
use std::path::{Path, PathBuf};

use crate::engine::error::LabError;
use crate::engine::progress::Stage;
use crate::images::cache::{Cache, Lock};
use crate::images::cpio::Content;
use crate::images::debian::{Architecture, Archive};
use crate::images::kernel::{self, StockKernel};

/// The package that all others come with.
const PACKAGE: &str = "perftest";
/// Libraries of its dependencies that are really loaded: those of `ib_write_bw` and of `egm-guest`.
const LIBRARIES: [&str; 15] = [
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libibverbs.so.1",
    "libibverbs/librxe-rdmav34.so",
    "librdmacm.so.1",
    "libmlx5.so.1",
    "libefa.so.1",
    "libhns.so.1",
    "libnl-3.so.200",
    "libnl-route-3.so.200",
    "libpci.so.3",
    "libudev.so.1",
    "libcap.so.2",
    "libz.so.1",
];
const OTHERS: [&str; 2] = ["usr/bin/ib_write_bw", "etc/libibverbs.d/rxe.driver"];

/// Values that differ between processors.
struct Target {
    architecture: Architecture,
    /// Prefix of its entry in the cache, different from all others.
    prefix: &'static str,
    /// Rust's name of the target, which is also the agent's build folder.
    target: &'static str,
    /// The command that builds the agent.
    build: &'static str,
    /// Debian's folder of libraries.
    folder: &'static str,
    loader: Loader,
}

/// The program that loads others.
struct Loader {
    /// Its name in the folder of libraries.
    name: &'static str,
    /// Its path in the guest, where programs look for it.
    path: &'static str,
}

/// A file of the kit.
#[derive(Debug, PartialEq, Eq)]
struct Installed {
    /// Its path in the packages.
    from: String,
    /// Its path in a guest.
    to: String,
}

const AMD64: Target = Target {
    architecture: Architecture::Amd64,
    prefix: "libraries-rdma-",
    target: "x86_64-unknown-linux-gnu",
    build: "cargo guest-lab",
    folder: "usr/lib/x86_64-linux-gnu",
    loader: Loader { name: "ld-linux-x86-64.so.2", path: "lib64/ld-linux-x86-64.so.2" },
};
const ARM64: Target = Target {
    architecture: Architecture::Arm64,
    prefix: "arm64-libraries-rdma-",
    target: "aarch64-unknown-linux-gnu",
    build: "scripts/lab/arm64 guest-lab",
    folder: "usr/lib/aarch64-linux-gnu",
    loader: Loader { name: "ld-linux-aarch64.so.1", path: "lib/ld-linux-aarch64.so.1" },
};

impl Target {
    const fn of(architecture: Architecture) -> &'static Self {
        match architecture {
            Architecture::Amd64 => &AMD64,
            Architecture::Arm64 => &ARM64,
        }
    }

    /// Where `cargo guest-lab` and `cargo guest` put the agent, below `target`.
    fn agents(&self, target: &Path) -> [PathBuf; 2] {
        ["lab", "release"]
            .map(|profile| target.join("guest").join(self.target).join(profile).join("egm-guest"))
    }

    /// The newest agent below `target`, so that a stale one of another profile is not tested.
    fn agent(&self, target: &Path) -> Result<PathBuf, LabError> {
        let paths = self.agents(target);
        let made = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
        let newest = paths.iter().filter(|path| made(path).is_some()).max_by_key(|path| made(path));
        newest.cloned().ok_or_else(|| LabError::Host {
            what: format!("{} is missing", paths.map(|path| path.display().to_string()).join(" or ")),
            remedy: self.build.into(),
        })
    }

    fn files(&self) -> Vec<Installed> {
        let libraries = LIBRARIES.iter().map(|name| format!("{}/{name}", self.folder));
        let same = libraries.chain(OTHERS.iter().map(|path| (*path).to_owned()));
        let Loader { name, path } = self.loader;
        let loader = Installed { from: format!("{}/{name}", self.folder), to: path.to_owned() };
        same.map(|path| Installed { from: path.clone(), to: path }).chain([loader]).collect()
    }

    fn fetch(&self, cache: &Cache, held: &Lock) -> Result<PathBuf, LabError> {
        let stage =
            Stage::begin(&format!("fetching Debian's RDMA libraries for {}", self.architecture.name()));
        let archive = Archive::of(self.architecture, cache, held)?;
        // The stable release's package: the agent is compatible with that release's libc.
        let package = archive
            .newest(PACKAGE, |suite| suite == "trixie/main")
            .or_else(|_| archive.newest(PACKAGE, |_| true))?;
        let name = format!("{}{}{}", self.prefix, package.version, suffix());
        if cache.path(&name).exists() {
            return Ok(cache.touch(&name));
        }
        let scratch = cache.scratch(held)?;
        let (all, made) = (scratch.path().join("all"), scratch.path().join("made"));
        fs::create_dir_all(&all).map_err(LabError::file("make", &all))?;
        archive.unpack_with_dependencies(&package, &all)?;
        for Installed { from, to } in self.files() {
            // Through links: the guest has files only.
            let file = all.join(&from);
            let bytes = fs::read(&file).map_err(LabError::file("read", &file))?;
            write(&made.join(to), &bytes)?;
        }
        stage.end();
        cache.publish(&made, &name, held)
    }
}

/// Suffix of a cache entry: it changes with the list of files.
fn suffix() -> String {
    format!("-{}", kernel::id(&LIBRARIES.into_iter().chain(OTHERS).collect::<Vec<_>>().join(" ")))
}

/// A guest's kernel with RDMA, the agent for it, and the tree of files that it loads.
#[derive(Debug, Clone)]
pub(crate) struct Kit {
    /// With `rdma_rxe` and `ib_uverbs` among its modules.
    pub(crate) kernel: StockKernel,
    /// Linked to a libc.
    pub(crate) agent: PathBuf,
    /// Files in the guest's layout below its root.
    pub(crate) tree: PathBuf,
}

impl Kit {
    /// For guests of `architecture`, from the cache and this checkout.
    pub(crate) fn of(architecture: Architecture, cache: &Cache) -> Result<Self, LabError> {
        let kind = Target::of(architecture);
        let agent = kind.agent(&target()?)?;
        let kernel = kernel::rdma(architecture, cache, false)?;
        let tree = cache.obtain(kind.prefix, &suffix(), false, |cache, held| kind.fetch(cache, held))?;
        Ok(Self { kernel, agent, tree })
    }

    /// The reason why this checkout has no kit for guests of `architecture`, if so: its agent is not built.
    pub(crate) fn missing(architecture: Architecture) -> Option<String> {
        let agent = target().and_then(|target| Target::of(architecture).agent(&target));
        agent.err().map(|error| error.to_string())
    }

    /// The one that [`Kit::copy_to`] put into `directory`, if it did.
    pub(crate) fn copied(directory: &Path) -> Option<Self> {
        let kernel = StockKernel { directory: directory.to_owned() };
        let kit = Self { kernel, agent: directory.join("egm-guest"), tree: directory.join("tree") };
        kit.agent.exists().then_some(kit)
    }

    /// Puts all but the kernel into `directory`.
    pub(crate) fn copy_to(&self, directory: &Path) -> Result<(), LabError> {
        for Content { name, bytes } in self.files()? {
            let to = directory.join("tree").join(name);
            write(&to, &bytes)?;
        }
        let bytes = fs::read(&self.agent).map_err(LabError::file("read", &self.agent))?;
        write(&directory.join("egm-guest"), &bytes)
    }

    /// The files of the tree, in order.
    pub(crate) fn files(&self) -> Result<Vec<Content>, LabError> {
        let mut files = Vec::new();
        gather(&self.tree, "", &mut files)?;
        files.sort();
        Ok(files)
    }
}

/// Adds the files of `folder` and of those in it to `files`, with `before` in front of their paths.
fn gather(folder: &Path, before: &str, files: &mut Vec<Content>) -> Result<(), LabError> {
    let entries = fs::read_dir(folder).map_err(LabError::file("read", folder))?;
    for entry in entries {
        let path = entry.map_err(LabError::file("read", folder))?.path();
        let name = format!("{before}{}", path.file_name().unwrap_or_default().to_string_lossy());
        if path.is_dir() {
            gather(&path, &format!("{name}/"), files)?;
        } else {
            let bytes = fs::read(&path).map_err(LabError::file("read", &path))?;
            files.push(Content { name, bytes });
        }
    }
    Ok(())
}

/// The build directory of this program.
fn target() -> Result<PathBuf, LabError> {
    let lab = std::env::current_exe().map_err(LabError::file("find", "egm-lab"))?;
    Ok(lab.ancestors().nth(3).unwrap_or_else(|| Path::new("target")).to_owned())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), LabError> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    fs::create_dir_all(folder).map_err(LabError::file("make", folder))?;
    fs::write(path, bytes).map_err(LabError::file("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_agent_is_taken_and_a_missing_one_is_reported_with_its_command() {
        let folder = tempfile::tempdir().unwrap();
        let agent = || AMD64.agent(folder.path());
        let error = agent().unwrap_err().to_string();
        assert!(error.contains("missing") && error.contains("cargo guest-lab"), "{error}");
        let [lab, release] = AMD64.agents(folder.path());
        let age = |path: &Path, seconds| {
            let at = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            fs::File::options().write(true).open(path).unwrap().set_modified(at).unwrap();
        };
        write(&release, b"release").unwrap();
        assert_eq!(agent().unwrap(), release);
        write(&lab, b"lab").unwrap();
        for (lab_at, release_at, newest) in [(2, 1, &lab), (1, 2, &release)] {
            age(&lab, lab_at);
            age(&release, release_at);
            assert_eq!(&agent().unwrap(), newest);
        }
    }

    #[test]
    fn what_was_built_for_one_processor_is_not_taken_for_another() {
        let folder = tempfile::tempdir().unwrap();
        for path in AMD64.agents(folder.path()) {
            write(&path, b"amd64").unwrap();
        }
        let error = ARM64.agent(folder.path()).unwrap_err().to_string();
        assert!(error.contains("aarch64-unknown-linux-gnu") && error.contains("scripts/lab/arm64 guest-lab"));
        // The cache finds an entry by how its name begins.
        assert!(!AMD64.prefix.starts_with(ARM64.prefix) && !ARM64.prefix.starts_with(AMD64.prefix));
    }

    #[test]
    fn a_guest_has_the_loader_where_its_programs_look_and_the_rest_where_debian_has_it() {
        for (kind, loader) in [(&AMD64, "lib64/ld-linux-x86-64.so.2"), (&ARM64, "lib/ld-linux-aarch64.so.1")]
        {
            let files = kind.files();
            assert_eq!(files.len(), LIBRARIES.len() + OTHERS.len() + 1);
            let moved: Vec<_> = files.iter().filter(|file| file.from != file.to).collect();
            let from = format!("{}/{}", kind.folder, kind.loader.name);
            assert_eq!(moved, [&Installed { from, to: loader.to_owned() }]);
        }
    }

    #[test]
    fn what_is_copied_is_found_again_with_every_file() {
        let folder = tempfile::tempdir().unwrap();
        let kernel = StockKernel { directory: folder.path().join("kernel") };
        let kit = Kit { kernel, agent: folder.path().join("agent"), tree: folder.path().join("libraries") };
        fs::write(&kit.agent, "agent").unwrap();
        let content = |file: Installed| Content { name: file.to.clone(), bytes: file.to.into_bytes() };
        let mut meant: Vec<_> = ARM64.files().into_iter().map(content).collect();
        meant.sort();
        for Content { name, bytes } in &meant {
            write(&kit.tree.join(name), bytes).unwrap();
        }
        let there = folder.path().join("there");
        assert!(Kit::copied(&there).is_none());
        kit.copy_to(&there).unwrap();
        assert_eq!(Kit::copied(&there).unwrap().files().unwrap(), meant);
    }
}
