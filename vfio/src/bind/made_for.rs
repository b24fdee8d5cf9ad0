//! VFIO driver that a kernel has for a function: a variant of `vfio-pci` that was made for it, or `vfio-pci` itself.
//!
//! A variant's module names its functions by aliases that begin with `vfio_pci:` and continue like a function's own
//! `modalias` (`PCI_DRIVER_OVERRIDE_DEVICE_VFIO` in `include/linux/pci.h`), with `*` as wildcard. `modules.alias` holds
//! them, and `modules.builtin.modinfo` those of drivers that are built into the kernel.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use egm_address::PciAddress;

/// Driver for any function.
const GENERIC: &str = "vfio-pci";
/// Prefixes of the aliases of variants, and of a function's own.
const VARIANT: &str = "vfio_pci:";
const FUNCTION: &str = "pci:";
/// Largest file of the kernel's modules that is read, in bytes: real ones have 2 MB.
const LIMIT: usize = 16 << 20;

/// Driver for `function` of the host at `root`: the variant with the fewest wildcards in its alias, or `vfio-pci` if
/// there is none or the kernel's modules cannot be read.
pub(super) fn driver(root: &Path, function: PciAddress) -> String {
    variant(root, function).unwrap_or_else(|| GENERIC.to_owned())
}

fn variant(root: &Path, function: PciAddress) -> Option<String> {
    let modalias = root.join("sys/bus/pci/devices").join(function.to_string()).join("modalias");
    let modalias = fs::read_to_string(modalias).ok()?;
    let ids = modalias.trim().strip_prefix(FUNCTION)?;
    let release = fs::read_to_string(root.join("proc/sys/kernel/osrelease")).ok()?;
    let modules = root.join("lib/modules").join(release.trim());
    let read = |name: &str| {
        let mut text = Vec::new();
        let file = File::open(modules.join(name)).ok();
        let read = file.and_then(|file| file.take(LIMIT as u64 + 1).read_to_end(&mut text).ok());
        if read.is_some_and(|count| count <= LIMIT) {
            String::from_utf8_lossy(&text).into_owned()
        } else {
            String::new()
        }
    };
    let (loadable, builtin) = (read("modules.alias"), read("modules.builtin.modinfo"));
    let all = loadable.lines().filter_map(of_line).chain(builtin.split('\0').filter_map(of_entry));
    let ours = all.filter(|(pattern, name)| super::is_name(name) && matches(pattern, ids));
    ours.min_by_key(|(pattern, _)| pattern.matches('*').count()).map(|(_, name)| name.to_owned())
}

/// Pattern and driver of `alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci`.
fn of_line(line: &str) -> Option<(&str, &str)> {
    let mut words = line.strip_prefix("alias ")?.split_ascii_whitespace();
    Some((words.next()?.strip_prefix(VARIANT)?, words.next()?))
}

/// The same of `nvgrace_gpu_vfio_pci.alias=vfio_pci:v000010DEd00002342sv*sd*bc*sc*i*`.
fn of_entry(entry: &str) -> Option<(&str, &str)> {
    let (name, pattern) = entry.split_once(".alias=")?;
    Some((pattern.strip_prefix(VARIANT)?, name))
}

/// Whether `text` is `pattern`, where `*` is any text, also none.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut left) = text.strip_prefix(head) else {
        return false;
    };
    let mut parts = rest.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return left.ends_with(part);
        }
        // The first match leaves the most text for the parts after it.
        let Some((_, behind)) = left.split_once(part) else {
            return false;
        };
        left = behind;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "v000010DEd00002342sv000010DEsd000016EBbc03sc02i00";

    #[test]
    fn a_star_is_any_text() {
        for pattern in ["*", "v000010DEd00002342sv*sd*bc*sc*i*", GPU, "v*i00", "*bc03*", "v*d00002342*00"] {
            assert!(matches(pattern, GPU), "{pattern}");
        }
        for pattern in ["", "v000010DEd00002345sv*sd*bc*sc*i*", "v*i01", "*bc04*", "v*d00002342*0x", "v"] {
            assert!(!matches(pattern, GPU), "{pattern}");
        }
        assert!(!matches("ab*ba", "aba"), "the ends do not share a letter");
        assert!(matches("", "") && !matches("a", ""));
    }

    #[test]
    fn only_aliases_of_variants_count() {
        let line = "alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci";
        assert_eq!(of_line(line), Some(("v000010DEd00002342sv*sd*bc*sc*i*", "nvgrace_gpu_vfio_pci")));
        for other in
            ["", "alias", "alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia", "alias vfio_pci:v1", "# a"]
        {
            assert_eq!(of_line(other), None, "{other}");
        }
        let entry = "qat_vfio_pci.alias=vfio_pci:v00008086d00004941sv*sd*bc*sc*i*";
        assert_eq!(of_entry(entry), Some(("v00008086d00004941sv*sd*bc*sc*i*", "qat_vfio_pci")));
        assert_eq!(of_entry("nvme.alias=pci:v0000144Dd0000A822sv*sd*bc*sc*i*"), None);
    }
}
