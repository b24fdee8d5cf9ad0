//! The kernels of the lab: the emulated host's and the guest's are Debian's stable ones; one of our own, with what Debian
//! leaves out (iommufd, RDMA over Ethernet), can be built for the emulated host.
//!
//! Debian's is the default there because nothing has to be built and because it is the newest that QEMU's emulated SVM
//! runs guests on without losing their timers: with 7.3 as the emulated host's kernel, two of three idle guests with a
//! TSC-deadline timer slept for ever; with 6.12 none did.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::cache::{Cache, Lock, Scratch};
use crate::command::Tool;
use crate::debian::Archive;
use crate::error::LabError;
use crate::modules;
use crate::progress::Stage;

/// What the emulated host's kernel has over `tinyconfig`.
const FRAGMENT: &str = include_str!("../../../scripts/lab/l1-x86_64.config");
/// Lines that such a build prints, for the progress bar alone.
const BUILD_LINES: u64 = 2_800;

/// A kernel in the cache: `vmlinuz`, `modules/*.ko` and `modules/order`.
#[derive(Debug, Clone)]
pub(crate) struct StockKernel {
    /// The directory that holds them.
    pub(crate) directory: PathBuf,
}

/// A kernel of our own for the emulated host, with all that it needs built in, built when the cache has none of this
/// fragment or when a newer one is asked for.
pub(crate) fn built(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    let suffix = format!("-{}", fragment_id());
    cache.obtain("built-", &suffix, refresh, build_l1).map(|directory| StockKernel { directory })
}

/// Debian's stable cloud kernel with the modules that a virtio guest needs.
pub(crate) fn guest(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    cache
        .obtain(GUEST.prefix, &GUEST.suffix(), refresh, |cache, held| fetch(&GUEST, cache, held))
        .map(|directory| StockKernel { directory })
}

/// Debian's stable kernel for every machine, for guests that need drivers which the cloud kernel leaves out.
pub(crate) fn generic(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    cache
        .obtain(GENERIC.prefix, &GENERIC.suffix(), refresh, |cache, held| fetch(&GENERIC, cache, held))
        .map(|directory| StockKernel { directory })
}

/// Debian's stable kernel with the modules that the emulated host needs.
pub(crate) fn l1(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    cache
        .obtain(L1.prefix, &L1.suffix(), refresh, |cache, held| fetch(&L1, cache, held))
        .map(|directory| StockKernel { directory })
}

/// One of Debian's kernels.
struct Stock {
    /// How its entry in the cache begins.
    prefix: &'static str,
    /// The package that depends on the newest.
    meta: &'static str,
    /// Modules that are wanted.
    modules: &'static [&'static str],
}

const GUEST: Stock = Stock { prefix: "guest-", meta: "linux-image-cloud-amd64", modules: &modules::OF_GUEST };
const GENERIC: Stock = Stock { prefix: "generic-", meta: "linux-image-amd64", modules: &modules::OF_GENERIC };
const L1: Stock = Stock { prefix: "host-", meta: "linux-image-amd64", modules: &modules::OF_L1 };

impl Stock {
    /// How its entry in the cache ends: it changes with the modules that are wanted.
    fn suffix(&self) -> String {
        format!("-{}", id(&self.modules.join(" ")))
    }
}

impl StockKernel {
    /// The kernel image.
    pub(crate) fn image(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }
}

fn build_l1(cache: &Cache, held: &Lock) -> Result<PathBuf, LabError> {
    let stage = Stage::begin("looking up Debian's newest linux-source");
    let archive = Archive::open(cache, held)?;
    let source = archive.behind(&archive.newest("linux-source", |_| true)?)?;
    let name = format!("built-{}-{}", source.version, fragment_id());
    stage.end();
    if cache.path(&name).exists() {
        return Ok(cache.touch(&name));
    }
    let stage = Stage::begin(&format!("unpacking {} {}", source.package, source.version));
    let scratch = cache.scratch(held)?;
    archive.unpack(&source, scratch.path())?;
    let tree = unpack_source(&scratch, &source.package)?;
    stage.end();
    configure(&tree)?;
    let stage = Stage::counted("building the lab's host kernel", BUILD_LINES);
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    make(&tree).args([format!("-j{jobs}"), "bzImage".into()]).lines(|_| stage.tick())?;
    stage.end();
    let made = scratch.path().join("made");
    let order = made.join("modules/order");
    fs::create_dir_all(made.join("modules")).map_err(LabError::file("make", &made))?;
    fs::write(&order, "").map_err(LabError::file("write", &order))?;
    let image = tree.join("arch/x86/boot/bzImage");
    fs::rename(&image, made.join("vmlinuz")).map_err(LabError::file("take", &image))?;
    cache.publish(&made, &name, held)
}

fn unpack_source(scratch: &Scratch, package: &str) -> Result<PathBuf, LabError> {
    let tarball = scratch.path().join(format!("usr/src/{package}.tar.xz"));
    let tar = Tool::new("tar", "tar").within(scratch.path());
    tar.args(["-xf".as_ref(), tarball.as_os_str()]).bytes()?;
    Ok(scratch.path().join(package))
}

/// `tinyconfig` and the fragment; an option that this kernel no longer has is told, not silently lost.
fn configure(tree: &Path) -> Result<(), LabError> {
    make(tree).args(["-s", "tinyconfig"]).bytes()?;
    let path = tree.join(".config");
    let tiny = fs::read_to_string(&path).map_err(LabError::file("read", &path))?;
    // The last of two lines about one option counts.
    fs::write(&path, format!("{tiny}\n{FRAGMENT}")).map_err(LabError::file("write", &path))?;
    make(tree).args(["-s", "olddefconfig"]).bytes()?;
    let made = fs::read_to_string(&path).map_err(LabError::file("read", &path))?;
    let lost: Vec<_> = lost_options(FRAGMENT, &made);
    if !lost.is_empty() {
        Stage::note(&format!("this kernel does not take {}", lost.join(" ")));
    }
    Ok(())
}

fn make(tree: &Path) -> Tool {
    Tool::new("make", "make").args(["-C".as_ref(), tree.as_os_str()])
}

/// Options that `fragment` sets and `config` does not have.
fn lost_options<'a>(fragment: &'a str, config: &str) -> Vec<&'a str> {
    let have: std::collections::BTreeSet<_> = config.lines().collect();
    fragment.lines().filter(|line| line.starts_with("CONFIG_") && !have.contains(line)).collect()
}

/// Twelve digits that change whenever an option of the fragment does.
fn fragment_id() -> String {
    let options: Vec<_> = FRAGMENT.lines().filter(|line| line.contains("CONFIG_")).collect();
    id(&options.join("\n"))
}

/// Twelve digits that change whenever `text` does.
fn id(text: &str) -> String {
    Sha256::digest(text).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

fn fetch(stock: &Stock, cache: &Cache, held: &Lock) -> Result<PathBuf, LabError> {
    let stage = Stage::begin(&format!("fetching Debian's {}", stock.meta));
    let archive = Archive::open(cache, held)?;
    // The stable release's kernel is what most guests run; later ones are split into other packages as well.
    let meta = archive
        .newest(stock.meta, |suite| suite == "trixie/main")
        .or_else(|_| archive.newest(stock.meta, |_| true))?;
    let image = archive.behind(&meta)?;
    let name = format!("{}{}{}", stock.prefix, image.version, stock.suffix());
    if cache.path(&name).exists() {
        return Ok(cache.touch(&name));
    }
    let scratch = cache.scratch(held)?;
    archive.unpack(&image, scratch.path())?;
    let release = image.package.trim_start_matches("linux-image-");
    let made = scratch.path().join("made");
    gather_modules(scratch.path(), release, stock.modules, &made.join("modules"))?;
    let vmlinuz = scratch.path().join(format!("boot/vmlinuz-{release}"));
    fs::rename(&vmlinuz, made.join("vmlinuz")).map_err(LabError::file("take", &vmlinuz))?;
    stage.end();
    cache.publish(&made, &name, held)
}

/// Decompresses `wanted` modules and what they need into `target`, with their `order`.
fn gather_modules(root: &Path, release: &str, wanted: &[&str], target: &Path) -> Result<(), LabError> {
    fs::create_dir_all(target).map_err(LabError::file("make", target))?;
    // depmod looks below /lib, which in a package is /usr/lib.
    let usr = root.join("usr");
    Tool::new("depmod", "kmod").args(["-b".as_ref(), usr.as_os_str(), release.as_ref()]).bytes()?;
    let tree = usr.join("lib/modules").join(release);
    let path = tree.join("modules.dep");
    let dep = fs::read_to_string(&path).map_err(LabError::file("read", &path))?;
    let mut order = String::new();
    for module in modules::load_order(&dep, wanted) {
        let packed = tree.join(&module);
        let bytes = match module.strip_suffix(".xz") {
            Some(_) => Tool::new("xz", "xz-utils").args(["-dc".as_ref(), packed.as_os_str()]).bytes()?,
            None => fs::read(&packed).map_err(LabError::file("read", &packed))?,
        };
        let file = module.rsplit('/').next().unwrap_or(&module).trim_end_matches(".xz").to_owned();
        let unpacked = target.join(&file);
        fs::write(&unpacked, bytes).map_err(LabError::file("write", &unpacked))?;
        order.push_str(&file);
        order.push('\n');
    }
    let path = target.join("order");
    fs::write(&path, order).map_err(LabError::file("write", &path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_the_kernel_did_not_take_is_found() {
        let fragment = "# why\nCONFIG_A=y\nCONFIG_B=y\n# CONFIG_C is not set\n";
        assert_eq!(lost_options(fragment, "CONFIG_A=y\n# CONFIG_B is not set\n"), ["CONFIG_B=y"]);
    }

    #[test]
    fn the_fragment_gives_the_lab_what_it_stands_on() {
        for option in
            ["KVM_AMD", "NET_9P_VIRTIO", "9P_FS", "TUN", "IOMMUFD", "VFIO_PCI", "VHOST_VSOCK", "VSOCKETS"]
        {
            assert!(FRAGMENT.contains(&format!("CONFIG_{option}=y\n")), "{option}");
        }
    }
}
