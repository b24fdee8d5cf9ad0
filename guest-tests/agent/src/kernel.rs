//! The options that the running kernel was built with, and those that memory of devices needs.

use std::collections::BTreeMap;
use std::io::Read;

use crate::tree::Tree;

/// Most bytes of a kernel's configuration, unpacked.
const MAX_CONFIG: u64 = 4 << 20;

/// Something of the kernel's that matters for memory of devices.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) option: &'static str,
    pub(crate) what: &'static str,
}

/// Options that memory which devices share, and moves between them, needs.
pub(crate) const PARTS: [Part; 5] = [
    Part { option: "CONFIG_DEVICE_PRIVATE", what: "GPU memory as pages of the kernel (device-private)" },
    Part { option: "CONFIG_PCI_P2PDMA", what: "DMA between functions in the kernel" },
    Part { option: "CONFIG_HMM_MIRROR", what: "address spaces that devices share (HMM)" },
    Part {
        option: "CONFIG_INFINIBAND_ON_DEMAND_PAGING",
        what: "RDMA without locked memory (on-demand paging)",
    },
    Part { option: "CONFIG_ZONE_DEVICE", what: "memory of devices as pages" },
];

#[derive(Debug)]
pub(crate) struct Config {
    /// Path of the file that it was read from.
    pub(crate) path: String,
    options: BTreeMap<String, String>,
}

impl Config {
    /// From the kernel itself, or as distributions keep it; `None` where neither can be read.
    pub(crate) fn of(tree: &Tree) -> Option<Self> {
        let parse = |path: &str, text: &str| {
            let option =
                |line: &str| line.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
            let options =
                text.lines().filter(|line| line.starts_with("CONFIG_")).filter_map(option).collect();
            Self { path: path.to_owned(), options }
        };
        if let Some(packed) = tree.bytes("/proc/config.gz") {
            let mut text = String::new();
            let unpacked =
                flate2::read::GzDecoder::new(packed.as_slice()).take(MAX_CONFIG).read_to_string(&mut text);
            if unpacked.is_ok() {
                return Some(parse("/proc/config.gz", &text));
            }
        }
        let release = tree.word("/proc/sys/kernel/osrelease").filter(|release| !release.contains('/'))?;
        let places = [format!("/boot/config-{release}"), format!("/lib/modules/{release}/config")];
        places.into_iter().find_map(|path| Some(parse(&path, &tree.text(&path)?)))
    }

    /// `y` for an option that is built in, `m` for one that is a module; `None` for one that is not set.
    pub(crate) fn value(&self, option: &str) -> Option<&str> {
        self.options.get(option).map(String::as_str).filter(|value| ["y", "m"].contains(value))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::tree::tests::recorded;

    #[test]
    fn the_configuration_is_read_packed_and_plain() {
        let text = "CONFIG_HMM_MIRROR=y\n# CONFIG_DEVICE_PRIVATE is not set\nCONFIG_PCI_P2PDMA=m\n\
                    CONFIG_ZONE_DEVICE=n\n";
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(text.as_bytes()).unwrap();
        let hex: String = packed.finish().unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
        let release = "== /proc/sys/kernel/osrelease\n6.12\n";
        for (path, record) in [
            ("/proc/config.gz", format!("## /proc/config.gz\n{hex}\n")),
            ("/boot/config-6.12", format!("{release}== /boot/config-6.12\n{text}")),
            ("/lib/modules/6.12/config", format!("{release}== /lib/modules/6.12/config\n{text}")),
        ] {
            let (_folder, tree) = recorded(&record);
            let config = Config::of(&tree).unwrap();
            assert_eq!(config.path, path);
            let values = PARTS.map(|part| config.value(part.option).map(str::to_owned));
            assert_eq!(values, [None, Some("m".to_owned()), Some("y".to_owned()), None, None]);
        }
    }

    #[test]
    fn what_cannot_be_unpacked_is_not_read_and_a_release_leads_nowhere_else() {
        let (_folder, broken) = recorded("## /proc/config.gz\n1f8b00\n");
        assert!(Config::of(&broken).is_none());
        let (_folder, hostile) = recorded("== /proc/sys/kernel/osrelease\n../6.12\n== /6.12\nCONFIG_X=y\n");
        assert!(Config::of(&hostile).is_none());
    }
}
