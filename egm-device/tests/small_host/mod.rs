//! A host that is a folder: one node, and a region `local` of 64 MiB.

use std::fs;
use std::path::Path;

/// Writes the files of such a host's kernel below `root`.
pub(crate) fn make(root: &Path) {
    for (path, text) in [
        ("proc/cmdline", ""),
        ("proc/iomem", "00100000-3fffffff : System RAM\n"),
        ("proc/sys/kernel/random/boot_id", "a boot\n"),
        ("etc/machine-id", "a host\n"),
        ("sys/devices/system/node/online", "0\n"),
        ("sys/devices/system/node/node0/cpulist", "0\n"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 65536 kB\n"),
    ] {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}
