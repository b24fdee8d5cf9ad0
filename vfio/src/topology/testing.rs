//! A host as a folder tree, shaped like half of an HGX machine.
//!
//! ```text
//!  pci0000:15  15:01.0 root ─ 16:00.0 up ┬ 17:00.0 down ─ 18:00.0 GPU
//!   node 0                               ├ 17:01.0 down ─ 19:00.0 NIC
//!                                        └ 17:02.0 down ─ 1a:00.0 up ─ 1b:00.0 down ─ 1c:00.0 NVMe
//!              15:02.0 root ─ 21:00.0 NVMe, the host's
//!  pci0000:97  97:01.0 root ─ 98:00.0 up ─ 99:00.0 down ─ 9a:00.0 GPU
//!   node 1
//! ```

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use egm_address::PciAddress;

use crate::host::{self, HostFunction};

pub(crate) struct Host(tempfile::TempDir);

/// Properties of one function.
struct Properties {
    path: &'static str,
    ids: (u16, u16),
    class: u32,
    port: u8,
    acs: Option<u8>,
    ats: bool,
    driver: &'static str,
    bar: u64,
}

const BRIDGE: u32 = 0x06_0400;

impl Host {
    pub(crate) fn two_switches() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        let port = |path, port, acs| Properties {
            path,
            ids: (0x1000, 0xc030),
            class: BRIDGE,
            port,
            acs,
            ats: false,
            driver: "pcieport",
            bar: 0,
        };
        let device = |path, ids, class, driver, ats| Properties {
            path,
            ids,
            class,
            port: 0,
            acs: None,
            ats,
            driver,
            bar: 1 << 30,
        };
        let functions = [
            port("pci0000:15/0000:15:01.0", 4, Some(0x1d)),
            port("0000:16:00.0", 5, None),
            port("0000:17:00.0", 6, Some(0x1d)),
            device("0000:18:00.0", (0x10de, 0x2335), 0x03_0200, "vfio-pci", false),
            port("../0000:17:01.0", 6, Some(0x1d)),
            device("0000:19:00.0", (0x15b3, 0x1021), 0x02_0000, "vfio-pci", true),
            port("../0000:17:02.0", 6, Some(0x1d)),
            port("0000:1a:00.0", 5, None),
            port("0000:1b:00.0", 6, Some(0x1d)),
            device("0000:1c:00.0", (0x144d, 0xa80a), 0x01_0802, "nvme", false),
            port("/pci0000:15/0000:15:02.0", 4, Some(0x1d)),
            device("0000:21:00.0", (0x144d, 0xa80a), 0x01_0802, "nvme", false),
            port("/pci0000:97/0000:97:01.0", 4, Some(0x1d)),
            port("0000:98:00.0", 5, None),
            port("0000:99:00.0", 6, Some(0x1d)),
            device("0000:9a:00.0", (0x10de, 0x2335), 0x03_0200, "vfio-pci", false),
        ];
        let mut folder = host.root().join("sys/devices");
        for (number, properties) in (0u32..).zip(&functions) {
            folder = match properties.path.strip_prefix("../") {
                Some(name) => folder.ancestors().find(|f| f.ends_with("0000:16:00.0")).unwrap().join(name),
                None => match properties.path.strip_prefix('/') {
                    Some(path) => host.root().join("sys/devices").join(path),
                    None => folder.join(properties.path),
                },
            };
            host.function(&folder, properties, number);
        }
        host
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn functions(&self) -> Vec<HostFunction> {
        host::functions(self.root()).unwrap()
    }

    /// The GPU of a node.
    pub(crate) fn gpu(&self, node: usize) -> PciAddress {
        ["0000:18:00.0", "0000:9a:00.0"][node].parse().unwrap()
    }

    /// The NIC of node 0.
    pub(crate) fn nic(&self, node: usize) -> PciAddress {
        ["0000:19:00.0"][node].parse().unwrap()
    }

    /// A disk behind a switch behind the GPU's switch.
    pub(crate) fn deep(&self) -> PciAddress {
        "0000:1c:00.0".parse().unwrap()
    }

    /// A disk behind a root port of its own.
    pub(crate) fn disk(&self) -> PciAddress {
        "0000:21:00.0".parse().unwrap()
    }

    fn function(&self, folder: &Path, properties: &Properties, number: u32) {
        let name = folder.file_name().unwrap();
        fs::create_dir_all(folder).unwrap();
        let write = |file: &str, text: String| fs::write(folder.join(file), text).unwrap();
        write("vendor", format!("{:#06x}\n", properties.ids.0));
        write("device", format!("{:#06x}\n", properties.ids.1));
        write("class", format!("{:#08x}\n", properties.class));
        write("numa_node", format!("{}\n", i32::from(folder.to_string_lossy().contains("pci0000:97"))));
        let resource = if properties.bar == 0 {
            "0x0 0x0 0x0\n".to_owned()
        } else {
            format!("{:#x} {:#x} 0x14220c\n", properties.bar << 8, (properties.bar << 8) + properties.bar - 1)
        };
        write("resource", resource);
        write("reset_method", "flr bus\n".to_owned());
        write("current_link_speed", "16.0 GT/s PCIe\n".to_owned());
        write("max_link_speed", "32.0 GT/s PCIe\n".to_owned());
        write("current_link_width", "16\n".to_owned());
        write("max_link_width", "16\n".to_owned());
        fs::write(folder.join("config"), config(properties)).unwrap();
        if properties.driver == "vfio-pci" {
            fs::create_dir_all(folder.join("vfio-dev/vfio0")).unwrap();
        }
        let group = self.root().join(format!("sys/kernel/iommu_groups/{number}"));
        fs::create_dir_all(group.join("devices")).unwrap();
        fs::write(group.join("devices").join(name), "").unwrap();
        fs::write(group.join("reserved_regions"), "0xfee00000 0xfeefffff msi\n").unwrap();
        symlink(&group, folder.join("iommu_group")).unwrap();
        symlink(format!("/sys/bus/pci/drivers/{}", properties.driver), folder.join("driver")).unwrap();
        let bus = self.root().join("sys/bus/pci/devices");
        fs::create_dir_all(&bus).unwrap();
        symlink(folder, bus.join(name)).unwrap();
    }
}

/// A configuration space with a PCI Express capability, and ACS and ATS where the function has them.
fn config(properties: &Properties) -> Vec<u8> {
    let mut space = vec![0; 4096];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x06, &[0x10]);
    put(0x34, &[0x40]);
    put(0x40, &[0x10, 0, properties.port << 4 | 2, 0]);
    if let Some(control) = properties.acs {
        put(0x100, &[0x0d, 0, 1, 0, 0x5f, 0, control, 0]);
    }
    if properties.ats {
        put(0x100, &[0x0f, 0, 1, 0, 0, 0, 0, 0]);
    }
    space
}
