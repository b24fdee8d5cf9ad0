//! What a guest needs for RDMA beside its kernel: `egm-guest` linked to a libc, that libc, libibverbs with the driver of
//! `rdma_rxe`, and perftest; all but the first are Debian's.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache::{Cache, Lock};
use crate::debian::Archive;
use crate::error::LabError;
use crate::kernel::{self, StockKernel};
use crate::progress::Stage;

/// How its entry in the cache begins.
const PREFIX: &str = "libraries-rdma-";
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
/// Where they are.
const FOLDER: &str = "usr/lib/x86_64-linux-gnu";
/// The loader, and where programs look for it.
const LOADER: (&str, &str) = ("usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "lib64/ld-linux-x86-64.so.2");
/// The rest.
const OTHERS: [&str; 2] = ["usr/bin/ib_write_bw", "etc/libibverbs.d/rxe.driver"];
/// Where `cargo guest-lab` and `cargo guest` put the agent, below what this program was built in.
const AGENTS: [&str; 2] =
    ["guest/x86_64-unknown-linux-gnu/lab/egm-guest", "guest/x86_64-unknown-linux-gnu/release/egm-guest"];

/// A guest's kernel with RDMA, the agent for it, and the tree of files that it loads.
#[derive(Debug, Clone)]
pub(crate) struct Kit {
    /// With `rdma_rxe` and `ib_uverbs` among its modules.
    pub(crate) kernel: StockKernel,
    /// Linked to a libc.
    pub(crate) agent: PathBuf,
    /// Files as the guest has them below its root.
    pub(crate) tree: PathBuf,
}

impl Kit {
    /// From the cache and this checkout.
    pub(crate) fn of(cache: &Cache) -> Result<Self, LabError> {
        let lab = std::env::current_exe().map_err(LabError::file("find", "egm-lab"))?;
        let agent = agent(lab.ancestors().nth(3).unwrap_or_else(|| Path::new("target")))?;
        let kernel = kernel::rdma(cache, false)?;
        let tree = cache.obtain(PREFIX, "", false, fetch)?;
        Ok(Self { kernel, agent, tree })
    }

    /// The one that [`Kit::copy_to`] put into `directory`, if it did.
    pub(crate) fn copied(directory: &Path) -> Option<Self> {
        let kernel = StockKernel { directory: directory.to_owned() };
        let kit = Self { kernel, agent: directory.join("egm-guest"), tree: directory.join("tree") };
        kit.agent.exists().then_some(kit)
    }

    /// Puts all but the kernel into `directory`.
    pub(crate) fn copy_to(&self, directory: &Path) -> Result<(), LabError> {
        for (path, bytes) in self.files()? {
            let to = directory.join("tree").join(path);
            write(&to, &bytes)?;
        }
        let bytes = fs::read(&self.agent).map_err(LabError::file("read", &self.agent))?;
        write(&directory.join("egm-guest"), &bytes)
    }

    /// Path below the root and bytes of each file of the tree, in order.
    pub(crate) fn files(&self) -> Result<Vec<(String, Vec<u8>)>, LabError> {
        let mut paths: Vec<String> = LIBRARIES.iter().map(|name| format!("{FOLDER}/{name}")).collect();
        paths.extend(OTHERS.iter().map(|path| (*path).to_owned()));
        paths.push(LOADER.1.to_owned());
        let read = |path: String| {
            let file = self.tree.join(&path);
            let bytes = fs::read(&file).map_err(LabError::file("read", &file))?;
            Ok((path, bytes))
        };
        paths.into_iter().map(read).collect()
    }
}

/// The newest agent below `target`: an old one beside it must not be what is tried.
fn agent(target: &Path) -> Result<PathBuf, LabError> {
    let paths = AGENTS.map(|path| target.join(path));
    let made = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
    let newest = paths.iter().filter(|path| made(path).is_some()).max_by_key(|path| made(path));
    newest.cloned().ok_or_else(|| LabError::Host {
        what: format!("{} is missing", paths.map(|path| path.display().to_string()).join(" or ")),
        remedy: "cargo guest-lab".into(),
    })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), LabError> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    fs::create_dir_all(folder).map_err(LabError::file("make", folder))?;
    fs::write(path, bytes).map_err(LabError::file("write", path))
}

fn fetch(cache: &Cache, held: &Lock) -> Result<PathBuf, LabError> {
    let stage = Stage::begin("fetching Debian's RDMA libraries");
    let archive = Archive::open(cache, held)?;
    // That of the release whose kernel guests have.
    let package = archive
        .newest(PACKAGE, |suite| suite == "trixie/main")
        .or_else(|_| archive.newest(PACKAGE, |_| true))?;
    let name = format!("{PREFIX}{}", package.version);
    if cache.path(&name).exists() {
        return Ok(cache.touch(&name));
    }
    let scratch = cache.scratch(held)?;
    let (all, made) = (scratch.path().join("all"), scratch.path().join("made"));
    fs::create_dir_all(&all).map_err(LabError::file("make", &all))?;
    archive.unpack_with_dependencies(&package, &all)?;
    let libraries = LIBRARIES.iter().map(|name| format!("{FOLDER}/{name}"));
    let same = libraries.chain(OTHERS.iter().map(|path| (*path).to_owned())).map(|path| (path.clone(), path));
    for (from, to) in same.chain([(LOADER.0.to_owned(), LOADER.1.to_owned())]) {
        // Through links: the guest has files only.
        let file = all.join(&from);
        let bytes = fs::read(&file).map_err(LabError::file("read", &file))?;
        write(&made.join(to), &bytes)?;
    }
    stage.end();
    cache.publish(&made, &name, held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_agent_is_taken_and_a_missing_one_is_told_with_its_command() {
        let folder = tempfile::tempdir().unwrap();
        assert!(agent(folder.path()).unwrap_err().to_string().contains("missing"));
        let [lab, release] = AGENTS.map(|path| folder.path().join(path));
        let age = |path: &Path, seconds| {
            let at = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            fs::File::options().write(true).open(path).unwrap().set_modified(at).unwrap();
        };
        write(&release, b"release").unwrap();
        assert_eq!(agent(folder.path()).unwrap(), release);
        write(&lab, b"lab").unwrap();
        for (lab_at, release_at, newest) in [(2, 1, &lab), (1, 2, &release)] {
            age(&lab, lab_at);
            age(&release, release_at);
            assert_eq!(&agent(folder.path()).unwrap(), newest);
        }
    }

    #[test]
    fn what_is_copied_is_found_again_with_every_file() {
        let folder = tempfile::tempdir().unwrap();
        let kernel = StockKernel { directory: folder.path().join("kernel") };
        let kit = Kit { kernel, agent: folder.path().join("agent"), tree: folder.path().join("libraries") };
        fs::write(&kit.agent, "agent").unwrap();
        for path in LIBRARIES.iter().map(|name| format!("{FOLDER}/{name}")) {
            write(&kit.tree.join(&path), path.as_bytes()).unwrap();
        }
        for path in OTHERS.into_iter().chain([LOADER.1]) {
            write(&kit.tree.join(path), path.as_bytes()).unwrap();
        }
        let there = folder.path().join("there");
        assert!(Kit::copied(&there).is_none());
        kit.copy_to(&there).unwrap();
        let copied = Kit::copied(&there).unwrap();
        assert_eq!(copied.files().unwrap(), kit.files().unwrap());
        assert!(copied.files().unwrap().iter().any(|(path, _)| path == "lib64/ld-linux-x86-64.so.2"));
    }
}
