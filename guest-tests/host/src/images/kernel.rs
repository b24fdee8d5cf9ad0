//! The kernels of the lab: the emulated host's and the guest's are Debian's stable ones; for the emulated host the lab
//! can also build one with options that Debian leaves out (iommufd, RDMA over Ethernet).
//!
//! Debian's is the default there because nothing has to be built and because it is the newest that QEMU's emulated SVM
//! runs guests on without losing their timers: with 7.3 as the emulated host's kernel, two of three idle guests with a
//! TSC-deadline timer slept for ever; with 6.12 none did.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::engine::progress::Stage;
use crate::engine::scenario::GraceKernel;
use crate::images::cache::{Cache, Lock, Scratch};
use crate::images::debian::{Architecture, Archive, Version};
use crate::images::modules;

/// A kernel of our own.
struct Built {
    /// Prefix of its cache entry.
    prefix: &'static str,
    /// Options in addition to `tinyconfig`.
    fragment: &'static str,
    /// Further options that distinguish this kernel from another with the same fragment.
    more: &'static str,
    /// Drivers of the lab's that are built into it, as files of a folder.
    drivers: &'static [SourceFile],
    /// Arguments of make for the target architecture.
    make: &'static [&'static str],
    /// The make target of its image.
    target: &'static str,
    /// The path of the image that it makes.
    image: &'static str,
    /// Lines that such a build prints, for the progress bar alone.
    lines: u64,
}

/// A file of a driver.
struct SourceFile {
    name: &'static str,
    text: &'static str,
}

const X86: Built = Built {
    prefix: "built-",
    fragment: include_str!("../../../../scripts/lab/l1-x86_64.config"),
    more: "",
    drivers: &[],
    make: &[],
    target: "bzImage",
    image: "arch/x86/boot/bzImage",
    lines: 2_800,
};

const GRACE: Built = Built {
    prefix: "arm64-built-",
    fragment: include_str!("../../../../scripts/lab/l1-arm64.config"),
    more: "",
    drivers: &[
        SourceFile { name: "Makefile", text: include_str!("../../../../scripts/lab/nvgrace-egm/Makefile") },
        SourceFile {
            name: "nvgrace-egm.c",
            text: include_str!("../../../../scripts/lab/nvgrace-egm/nvgrace-egm.c"),
        },
    ],
    make: &["ARCH=arm64", "CROSS_COMPILE=aarch64-linux-gnu-"],
    target: "Image",
    image: "arch/arm64/boot/Image",
    lines: 3_300,
};

/// The page size that NVIDIA uses on its hosts.
const GRACE_64K: Built = Built {
    prefix: "arm64-64k-built-",
    more: "# CONFIG_ARM64_4K_PAGES is not set\nCONFIG_ARM64_64K_PAGES=y\n",
    ..GRACE
};

/// Folder for the lab's drivers in the source.
const DRIVERS: &str = "drivers/misc/egm-lab";
/// The makefile line that builds them.
const DRIVERS_RULE: &str = "\nobj-y += egm-lab/\n";

/// A kernel in the cache: `vmlinuz`, `modules/*.ko` and `modules/order`.
#[derive(Debug, Clone)]
pub(crate) struct StockKernel {
    /// The directory that holds them.
    pub(crate) directory: PathBuf,
}

/// A kernel of our own for the emulated host, with all that it needs built in. It is built when the cache has none of
/// this fragment, or for `refresh`.
pub(crate) fn built(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    X86.obtain(cache, refresh)
}

/// The emulated Grace host's: ours have NVIDIA's VFIO driver and the lab's double of its EGM driver.
pub(crate) fn grace(kind: GraceKernel, cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    match kind {
        GraceKernel::Debian => ARM64_HOST.obtain(cache, refresh),
        GraceKernel::Debian16k => ARM64_HOST_16K.obtain(cache, refresh),
        GraceKernel::Own => GRACE.obtain(cache, refresh),
        GraceKernel::LargePages => GRACE_64K.obtain(cache, refresh),
    }
}

/// Debian's newest kernel for arm64, as guest of the emulated Grace host.
pub(crate) fn arm64(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    ARM64.obtain(cache, refresh)
}

/// Debian's stable kernel for arm64.
pub(crate) fn arm64_stable(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    ARM64_STABLE.obtain(cache, refresh)
}

/// Debian's stable cloud kernel with the modules that a virtio guest needs.
pub(crate) fn guest(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    GUEST.obtain(cache, refresh)
}

/// Debian's stable kernel for every machine, for guests that need drivers which the cloud kernel leaves out.
pub(crate) fn generic(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    GENERIC.obtain(cache, refresh)
}

/// The same with RDMA over any network card; for arm64 Debian's newest, which guests have there.
pub(crate) fn rdma(
    architecture: Architecture,
    cache: &Cache,
    refresh: bool,
) -> Result<StockKernel, LabError> {
    match architecture {
        Architecture::Amd64 => RDMA.obtain(cache, refresh),
        Architecture::Arm64 => ARM64_RDMA.obtain(cache, refresh),
    }
}

/// Debian's stable kernel with the modules that the emulated host needs.
pub(crate) fn l1(cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
    L1.obtain(cache, refresh)
}

/// One of Debian's kernels.
struct Stock {
    /// Prefix of its cache entry.
    prefix: &'static str,
    architecture: Architecture,
    /// The package that depends on the newest.
    meta: &'static str,
    /// The preferred suite; without the package there, the newest of all suites.
    suite: &'static str,
    /// Names of the modules to gather, with their dependencies.
    modules: &'static [&'static str],
}

/// Suite of the stable release; most guests run its kernel.
const STABLE: &str = "trixie/main";

const GUEST: Stock = Stock {
    prefix: "guest-",
    architecture: Architecture::Amd64,
    meta: "linux-image-cloud-amd64",
    suite: STABLE,
    modules: &modules::OF_GUEST,
};
const GENERIC: Stock =
    Stock { prefix: "generic-", meta: "linux-image-amd64", modules: &modules::OF_GENERIC, ..GUEST };
const RDMA: Stock = Stock { prefix: "rdma-", modules: &modules::OF_RDMA, ..GENERIC };
const L1: Stock = Stock { prefix: "host-", meta: "linux-image-amd64", modules: &modules::OF_L1, ..GUEST };
const ARM64: Stock = Stock {
    prefix: "arm64-newest-",
    architecture: Architecture::Arm64,
    meta: "linux-image-arm64",
    suite: "trixie-backports/main",
    modules: &modules::OF_ARM64,
};
const ARM64_RDMA: Stock = Stock { prefix: "arm64-rdma-", modules: &modules::OF_RDMA, ..ARM64 };
const ARM64_HOST: Stock = Stock { prefix: "arm64-host-", modules: &modules::OF_L1, ..ARM64 };
const ARM64_HOST_16K: Stock =
    Stock { prefix: "arm64-16k-host-", meta: "linux-image-arm64-16k", ..ARM64_HOST };
const ARM64_STABLE: Stock = Stock { prefix: "arm64-stable-", suite: STABLE, ..ARM64 };

impl Stock {
    fn obtain(&self, cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
        let suffix = self.suffix();
        let make = |cache: &Cache, held: &Lock| fetch(self, cache, held);
        cache.obtain(self.prefix, &suffix, refresh, make).map(|directory| StockKernel { directory })
    }

    /// Suffix of its cache entry: it changes with the list of modules.
    fn suffix(&self) -> String {
        format!("-{}", id(&self.modules.join(" ")))
    }
}

impl StockKernel {
    pub(crate) fn image(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }
}

impl Built {
    fn obtain(&self, cache: &Cache, refresh: bool) -> Result<StockKernel, LabError> {
        let suffix = format!("-{}", self.id());
        let make = |cache: &Cache, held: &Lock| build(self, cache, held);
        cache.obtain(self.prefix, &suffix, refresh, make).map(|directory| StockKernel { directory })
    }

    /// Twelve digits that change whenever an option of the fragment or a driver does.
    fn id(&self) -> String {
        let options = self.options().filter(|line| line.contains("CONFIG_"));
        let drivers = self.drivers.iter().map(|file| file.text);
        id(&options.chain(drivers).collect::<Vec<_>>().join("\n"))
    }

    /// Lines of the fragment, except for options that `more` sets, and then the lines of `more`.
    fn options(&self) -> impl Iterator<Item = &'static str> {
        let (fragment, more) = (self.fragment, self.more);
        let is_said =
            move |line: &str| option(line).is_some_and(|name| more.lines().any(|l| option(l) == Some(name)));
        fragment.lines().filter(move |line| !is_said(line)).chain(more.lines())
    }

    fn make(&self, tree: &Path) -> Tool {
        Tool::new("make", "make").args(["-C".as_ref(), tree.as_os_str()]).args(self.make)
    }

    /// Puts the lab's drivers into the source.
    fn add_drivers(&self, tree: &Path) -> Result<(), LabError> {
        if self.drivers.is_empty() {
            return Ok(());
        }
        let folder = tree.join(DRIVERS);
        fs::create_dir_all(&folder).map_err(LabError::file("make", &folder))?;
        for SourceFile { name, text } in self.drivers {
            let path = folder.join(name);
            fs::write(&path, text).map_err(LabError::file("write", &path))?;
        }
        let parent = folder.with_file_name("Makefile");
        let text = fs::read_to_string(&parent).map_err(LabError::file("read", &parent))?;
        fs::write(&parent, text + DRIVERS_RULE).map_err(LabError::file("write", &parent))
    }

    /// `tinyconfig` and the fragment; an option that this kernel no longer has is reported, not silently lost.
    fn configure(&self, tree: &Path) -> Result<(), LabError> {
        self.make(tree).args(["-s", "tinyconfig"]).bytes()?;
        let path = tree.join(".config");
        let tiny = fs::read_to_string(&path).map_err(LabError::file("read", &path))?;
        // The last of two lines about one option counts.
        let fragment = self.options().collect::<Vec<_>>().join("\n");
        fs::write(&path, format!("{tiny}\n{fragment}\n")).map_err(LabError::file("write", &path))?;
        self.make(tree).args(["-s", "olddefconfig"]).bytes()?;
        let made = fs::read_to_string(&path).map_err(LabError::file("read", &path))?;
        let lost: Vec<_> = lost_options(&fragment, &made);
        if !lost.is_empty() {
            Stage::note(&format!("this kernel does not take {}", lost.join(" ")));
        }
        Ok(())
    }
}

fn build(built: &Built, cache: &Cache, held: &Lock) -> Result<PathBuf, LabError> {
    let stage = Stage::begin("looking up Debian's newest linux-source");
    let archive = Archive::open(cache, held)?;
    let source = archive.behind(&archive.newest("linux-source", |_| true)?, "linux-source")?;
    let name = format!("{}{}-{}", built.prefix, source.version, built.id());
    stage.end();
    if cache.path(&name).exists() {
        return Ok(cache.touch(&name));
    }
    let stage = Stage::begin(&format!("unpacking {} {}", source.package, source.version));
    let scratch = cache.scratch(held)?;
    archive.unpack(&source, scratch.path())?;
    let tree = unpack_source(&scratch, &source.package)?;
    stage.end();
    built.add_drivers(&tree)?;
    built.configure(&tree)?;
    let stage = Stage::counted("building the lab's host kernel", built.lines);
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    built.make(&tree).args([format!("-j{jobs}"), built.target.into()]).lines(|_| stage.tick())?;
    stage.end();
    let made = scratch.path().join("made");
    let order = made.join("modules/order");
    fs::create_dir_all(made.join("modules")).map_err(LabError::file("make", &made))?;
    fs::write(&order, "").map_err(LabError::file("write", &order))?;
    let image = tree.join(built.image);
    fs::rename(&image, made.join("vmlinuz")).map_err(LabError::file("take", &image))?;
    cache.publish(&made, &name, held)
}

fn unpack_source(scratch: &Scratch, package: &str) -> Result<PathBuf, LabError> {
    let tarball = scratch.path().join(format!("usr/src/{package}.tar.xz"));
    let tar = Tool::new("tar", "tar").within(scratch.path());
    tar.args(["-xf".as_ref(), tarball.as_os_str()]).bytes()?;
    Ok(scratch.path().join(package))
}

/// The option that a line of a configuration is about.
fn option(line: &str) -> Option<&str> {
    let name = line.trim_start_matches("# ").split([' ', '=']).next()?;
    name.starts_with("CONFIG_").then_some(name)
}

/// Options that `fragment` sets and `config` does not have.
fn lost_options<'a>(fragment: &'a str, config: &str) -> Vec<&'a str> {
    let have: std::collections::BTreeSet<_> = config.lines().collect();
    fragment.lines().filter(|line| line.starts_with("CONFIG_") && !have.contains(line)).collect()
}

/// Twelve digits that change whenever `text` does.
pub(crate) fn id(text: &str) -> String {
    Sha256::digest(text).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

fn fetch(stock: &Stock, cache: &Cache, held: &Lock) -> Result<PathBuf, LabError> {
    let stage = Stage::begin(&format!("fetching Debian's {}", stock.meta));
    let archive = Archive::of(stock.architecture, cache, held)?;
    let meta = archive
        .newest(stock.meta, |suite| suite == stock.suite)
        .or_else(|_| archive.newest(stock.meta, |_| true))?;
    let image = archive.behind(&meta, "linux-image-")?;
    let name = format!("{}{}{}", stock.prefix, image.version, stock.suffix());
    if cache.path(&name).exists() {
        return Ok(cache.touch(&name));
    }
    let scratch = cache.scratch(held)?;
    let release = image.package.trim_start_matches("linux-image-");
    for package in parts(&archive, &image)? {
        archive.unpack(&package, scratch.path())?;
    }
    let made = scratch.path().join("made");
    gather_modules(scratch.path(), release, stock.modules, &made.join("modules"))?;
    let places = [format!("boot/vmlinuz-{release}"), format!("usr/lib/modules/{release}/vmlinuz")];
    let places = places.map(|place| scratch.path().join(place));
    let [boot, modules] = &places;
    let vmlinuz = if boot.exists() { boot } else { modules };
    fs::rename(vmlinuz, made.join("vmlinuz")).map_err(LabError::file("take", vmlinuz))?;
    stage.end();
    cache.publish(&made, &name, held)
}

/// The packages that a kernel is in: later ones have the image and the modules in packages of their own.
fn parts(archive: &Archive, image: &Version) -> Result<Vec<Version>, LabError> {
    let parts = archive.needed(image, &["linux-binary-", "linux-modules-", "linux-base-"])?;
    Ok(if parts.iter().any(|part| part.package.starts_with("linux-binary-")) {
        parts
    } else {
        vec![image.clone()]
    })
}

/// Decompresses `wanted` modules and their dependencies into `target`, with their `order`.
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
            assert!(X86.fragment.contains(&format!("CONFIG_{option}=y\n")), "{option}");
        }
    }
    #[test]
    fn the_grace_host_has_what_the_lab_stands_on_and_another_kernel_for_another_driver() {
        for option in ["KVM", "NET_9P_VIRTIO", "9P_FS", "IOMMUFD", "ARM_SMMU_V3", "NVGRACE_GPU_VFIO_PCI"] {
            assert!(GRACE.fragment.contains(&format!("CONFIG_{option}=y\n")), "{option}");
        }
        let other = Built { drivers: &[SourceFile { name: "Makefile", text: "" }], ..GRACE };
        assert_ne!(other.id(), GRACE.id());
    }

    #[test]
    fn what_is_over_the_fragment_replaces_its_lines() {
        let pages = |built: &Built| -> Vec<_> {
            built.options().filter(|line| line.contains("K_PAGES") || line.contains("CONFIG_KVM=")).collect()
        };
        assert_eq!(pages(&GRACE), ["CONFIG_ARM64_4K_PAGES=y", "CONFIG_KVM=y"]);
        let large = ["CONFIG_KVM=y", "# CONFIG_ARM64_4K_PAGES is not set", "CONFIG_ARM64_64K_PAGES=y"];
        assert_eq!(pages(&GRACE_64K), large);
        assert_ne!(GRACE_64K.id(), GRACE.id());
    }
}
