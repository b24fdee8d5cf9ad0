//! The files that describe a machine (`/proc`, `/sys`, `/boot`), below a root: the machine's own, or one that
//! was recorded. Reads are bounded, and what is missing, unreadable or no file is `None`.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use egm_address::CpuSet;

use crate::sysfs;

/// Most bytes of one file.
const MAX_FILE: u64 = 4 << 20;
/// Most names of one folder.
const MAX_NAMES: usize = 65_536;

/// The files below a root.
#[derive(Debug, Clone)]
pub(crate) struct Tree(PathBuf);

impl Tree {
    pub(crate) fn live() -> Self {
        Self(PathBuf::from("/"))
    }

    /// The files below `root`.
    pub(crate) fn at(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// The first [`MAX_FILE`] bytes of a file.
    pub(crate) fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        let path = self.path(path);
        // A pipe in place of a file would wait for its writer, and a device do something when it is opened.
        std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
        let mut bytes = Vec::new();
        // A file of sysfs that its driver does not answer gives an error when read, not when opened.
        File::open(path).ok()?.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// A file as text.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        self.bytes(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A file of one word or line, without blanks around it; `None` when it is empty.
    pub(crate) fn word(&self, path: &str) -> Option<String> {
        self.text(path).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// A number, decimal or hexadecimal after `0x`.
    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        sysfs::parse_number(&self.text(path)?)
    }

    /// A list such as `0-3,8`.
    pub(crate) fn list(&self, path: &str) -> Option<CpuSet> {
        self.text(path)?.trim().parse().ok()
    }

    /// Names in a folder, sorted.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(path)).into_iter().flatten().flatten().take(MAX_NAMES);
        let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    }

    /// Whether there is such a file or folder.
    pub(crate) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// The last name of what a link points to.
    pub(crate) fn link(&self, path: &str) -> Option<String> {
        Some(std::fs::read_link(self.path(path)).ok()?.file_name()?.to_string_lossy().into_owned())
    }

    /// The names of the path without links, below the root.
    pub(crate) fn real(&self, path: &str) -> Option<Vec<String>> {
        let root = self.0.canonicalize().ok()?;
        let real = self.path(path).canonicalize().ok()?;
        let below = real.strip_prefix(&root).ok()?;
        Some(below.iter().map(|name| name.to_string_lossy().into_owned()).collect())
    }

    /// PCI functions: their addresses, sorted.
    pub(crate) fn functions(&self) -> Vec<String> {
        self.names(PCI)
    }

    /// The class of a PCI function, 24 bits.
    pub(crate) fn class(&self, function: &str) -> Option<u64> {
        self.number(&pci(function, "class"))
    }

    /// Whether a PCI function has this vendor.
    pub(crate) fn is_of(&self, function: &str, vendor: u64) -> bool {
        self.number(&pci(function, "vendor")) == Some(vendor)
    }

    /// The NUMA node of a PCI function, if the kernel has one for it.
    pub(crate) fn node_of(&self, function: &str) -> Option<u32> {
        self.word(&pci(function, "numa_node"))?.parse().ok()
    }
}

impl Tree {
    /// Bytes that can be had on a NUMA node: those that are free, and half of what the kernel keeps there of files and can
    /// drop, as `MemAvailable` counts it for the whole machine.
    pub(crate) fn available_on(&self, number: u32) -> Option<u64> {
        let text = self.text(&node(number, "meminfo"))?;
        let bytes = |key: &str| sysfs::node_meminfo(&text, number, key);
        let kept = ["Active(file)", "Inactive(file)", "SReclaimable"].map(|key| bytes(key).unwrap_or(0) / 2);
        Some(kept.into_iter().fold(bytes("MemFree")?, u64::saturating_add))
    }
}

/// The folder of PCI functions.
pub(crate) const PCI: &str = "/sys/bus/pci/devices";
/// The folder of NUMA nodes.
pub(crate) const NODES: &str = "/sys/devices/system/node";
/// NVIDIA's PCI vendor id.
pub(crate) const NVIDIA: u64 = 0x10de;
/// Base class of display controllers.
const DISPLAY: u64 = 0x03;

/// A file of a PCI function.
pub(crate) fn pci(function: &str, file: &str) -> String {
    format!("{PCI}/{function}/{file}")
}

/// A file of a NUMA node.
pub(crate) fn node(number: u32, file: &str) -> String {
    format!("{NODES}/node{number}/{file}")
}

/// Whether a class is that of a GPU: VGA or 3D.
pub(crate) const fn is_display(class: u64) -> bool {
    class >> 16 == DISPLAY
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// Makes the tree that `record` describes: after a line `== PATH` its text follows; `-> PATH TARGET` is a link,
    /// `## PATH` begins bytes in hexadecimal.
    pub(crate) fn recorded(record: &str) -> (TempDir, Tree) {
        let folder = tempfile::tempdir().unwrap();
        let tree = Tree::at(folder.path());
        let mut file: Option<(PathBuf, bool, String)> = None;
        let place = |path: &str| {
            let path = tree.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        };
        let write = |file: Option<(PathBuf, bool, String)>| {
            let Some((path, hex, text)) = file else { return };
            let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
            let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            fs::write(path, if hex { digits.chunks(2).map(pair).collect() } else { text.into_bytes() })
                .unwrap();
        };
        for line in record.lines() {
            if let Some(path) = line.strip_prefix("== ").or_else(|| line.strip_prefix("## ")) {
                write(file.replace((place(path), line.starts_with('#'), String::new())));
            } else if let Some((path, target)) =
                line.strip_prefix("-> ").and_then(|rest| rest.split_once(' '))
            {
                symlink(target, place(path)).unwrap();
            } else if let Some((_, _, text)) = &mut file {
                text.push_str(line);
                text.push('\n');
            }
        }
        write(file);
        (folder, tree)
    }

    #[test]
    fn what_is_no_file_is_none_and_nothing_waits_for_it() {
        let (folder, tree) = recorded("-> /sys/loop loop\n-> /sys/zero /dev/zero\n== /sys/folder/x\n1\n");
        let pipe = folder.path().join("sys/pipe");
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        for path in ["/sys/loop", "/sys/zero", "/sys/folder", "/sys/pipe"] {
            assert_eq!((tree.bytes(path), tree.real("/sys/loop")), (None, None), "{path}");
        }
        fs::write(folder.path().join("sys/large"), vec![b'7'; 5 << 20]).unwrap();
        assert_eq!(tree.bytes("/sys/large").map(|bytes| bytes.len()), Some(4 << 20));
    }

    #[test]
    fn what_is_there_is_read_and_what_is_not_is_none() {
        let (_folder, tree) =
            recorded("== /sys/a/b\n 0x10 \n== /sys/list\n0-2\n-> /sys/link a/b\n## /sys/raw\n00 ff\n== /e\n");
        assert_eq!((tree.number("/sys/a/b"), tree.number("/sys/list")), (Some(16), None));
        assert_eq!(tree.list("/sys/list").unwrap().to_string(), "0-2");
        assert_eq!(
            (tree.link("/sys/link").as_deref(), tree.bytes("/sys/raw")),
            (Some("b"), Some(vec![0, 255]))
        );
        assert_eq!(tree.real("/sys/link").unwrap(), ["sys", "a", "b"]);
        assert_eq!((tree.word("/e"), tree.text("/none"), tree.names("/none").len()), (None, None, 0));
    }
}
