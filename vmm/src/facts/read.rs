//! Facts from the running host, from a copy of its `/proc` and `/sys`, or from a file.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use egm_address::PciAddress;
use egm_device::record;
use egm_device::region::{HostFacts, MemoryMap};
use egm_vfio::host::{self, HostFunction};
use egm_vfio::kernel::region_sizes;
use egm_vfio::topology::IOMMU_REMEDY;
use egm_vfio::variant::Variant;

use crate::config::{Architecture, DeviceKind, LOCAL, Spec};
use crate::facts::error::MAX_BRIDGES;
use crate::facts::huge::{self, HugePages};
use crate::facts::kvm::{self, Probed};
use crate::facts::nodes::{self, text};
use crate::facts::{FACTS_VERSION, Facts, FactsError, Iommu, Probe, regions};
use crate::plan::may_mount;

/// Reason for the absence of a probe that the plan does not need.
const NOT_ASKED: &str = "not asked for";

/// Largest description of a processor in `/proc/cpuinfo`; x86 has 4 KiB.
const MAX_PROCESSOR: u64 = 64 << 10;

/// The part of a host that is read.
#[derive(Debug, Clone)]
pub enum Scope {
    /// All of it: for a record that serves any configuration.
    All,
    /// The needs of one machine: a launch need not look at the rest.
    Only {
        /// PCI functions, where they exist; those that they share a group or a path with are read too.
        functions: Vec<PciAddress>,
        /// Whether carve-outs of memory are asked for.
        regions: bool,
        /// Whether the plan depends on what this user may mount, and on the setting for huge pages of anonymous memory.
        huge_files: bool,
        /// Whether host functions are assigned, at the start or by hot-plug: then the plan depends on IOMMU and kernel.
        assigns: bool,
    },
}

impl Scope {
    /// The facts that the plan of `spec` depends on.
    pub fn of(spec: &Spec) -> Self {
        let function = |kind: &DeviceKind| match kind {
            DeviceKind::Vfio { function, .. } => Some(*function),
            _ => None,
        };
        let functions: Vec<_> = spec.devices.iter().filter_map(|device| function(&device.kind)).collect();
        Self::Only {
            assigns: !functions.is_empty() || spec.pcie.spare.is_some(),
            functions,
            regions: spec.egm.iter().flat_map(|slice| &slice.regions).any(|region| region != LOCAL),
            huge_files: may_mount(spec),
        }
    }
}

/// The host that this runs on, as far as `scope` goes.
///
/// # Errors
/// [`FactsError`] when `/proc` or `/sys` is not there or not as documented. That there is no KVM or no IOMMU is a
/// fact, not an error.
pub fn of_host(scope: &Scope) -> Result<Facts, FactsError> {
    let mut facts = gather(Path::new("/"), scope, kvm::probe())?;
    if matches!(scope, Scope::All | Scope::Only { huge_files: true, .. }) {
        facts.huge_files = huge::files();
    }
    for function in facts.functions.iter_mut().filter(|function| Variant::of(function) == Variant::NvGrace) {
        // Another process may have the function open. Opening it for the guest then reports that.
        let regions = region_sizes(function.address).unwrap_or_default();
        function.memory = Variant::memory(function, &regions);
    }
    Ok(facts)
}

/// A host, from a copy of its `/proc` and `/sys` in `root`; its KVM cannot be probed.
///
/// # Errors
/// As [`of_host`].
pub fn read(root: &Path, scope: &Scope) -> Result<Facts, FactsError> {
    let kvm = Probe::Absent("read from a copy of the host's files".to_owned());
    gather(root, scope, Probed { kvm, address_bits: None })
}

/// Facts that were recorded earlier.
///
/// # Errors
/// [`FactsError`] when `path` cannot be read or does not hold facts of this version.
pub fn load(path: &Path) -> Result<Facts, FactsError> {
    let facts: Facts = record::read(path)?;
    let most = if egm_address::fault!("bridges-unbounded") { usize::MAX } else { MAX_BRIDGES };
    match facts.functions.iter().find(|function| function.place.bridges.len() > most) {
        None => Ok(facts),
        Some(HostFunction { address, place, .. }) => {
            Err(FactsError::Depth { path: path.to_owned(), function: *address, bridges: place.bridges.len() })
        }
    }
}

fn gather(root: &Path, scope: &Scope, probed: Probed) -> Result<Facts, FactsError> {
    let arch = architecture(root)?;
    let cpuinfo = first_processor(&root.join("proc/cpuinfo"))?;
    let (is_all, huge_files, assigns) = match scope {
        Scope::All => (true, true, true),
        Scope::Only { huge_files, assigns, .. } => (false, *huge_files, *assigns),
    };
    let huge_pages = HugePages::of(root, huge_files);
    let (host, regions) = match scope {
        Scope::All | Scope::Only { regions: true, .. } => regions::of(root)?,
        // A GPU may reach a region that the machine has no slice of.
        Scope::Only { functions, .. } if !functions.is_empty() && regions::has_egm(root) => {
            regions::of(root)?
        }
        Scope::Only { .. } => (HostFacts::default(), Vec::new()),
    };
    let host_name = || text(&root.join("proc/sys/kernel/hostname")).unwrap_or_default();
    Ok(Facts {
        version: FACTS_VERSION,
        description: if is_all { format!("recorded on {}", host_name()) } else { String::new() },
        arch,
        product: host.product,
        cpu_vendor: cpuinfo_value(&cpuinfo, "vendor_id").unwrap_or_default().to_owned(),
        address_bits: probed.address_bits.unwrap_or_else(|| address_bits(arch, &cpuinfo)),
        kvm: probed.kvm,
        memory: nodes::host(root)?,
        memory_map: MemoryMap { iomem: host.iomem, firmware: host.firmware, affinity: host.affinity },
        shmem_huge_pages: huge_pages.shmem,
        anonymous_huge_pages: huge_pages.anonymous,
        huge_page: huge_pages.page,
        huge_files: Probe::Absent(NOT_ASKED.to_owned()),
        nodes: nodes::all(root)?,
        iommu: if assigns { iommu(root) } else { Probe::Absent(NOT_ASKED.to_owned()) },
        regions,
        functions: match scope {
            Scope::All => host::functions(root)?,
            Scope::Only { functions: wanted, .. } => host::around(root, wanted)?,
        },
        servers: Vec::new(),
        kernel: if assigns { text(&root.join("proc/sys/kernel/osrelease"))? } else { String::new() },
        command_line: host.command_line,
    })
}

/// The instruction set of the host that this runs on.
///
/// # Errors
/// [`FactsError::Architecture`].
pub(crate) fn architecture_of_host() -> Result<Architecture, FactsError> {
    architecture(Path::new("/"))
}

/// From the kernel (6.1 and later), otherwise that of this program, which runs there.
fn architecture(root: &Path) -> Result<Architecture, FactsError> {
    let path = root.join("proc/sys/kernel/arch");
    match text(&path).as_deref().unwrap_or(std::env::consts::ARCH) {
        "x86_64" => Ok(Architecture::X86_64),
        "aarch64" => Ok(Architecture::Aarch64),
        other => Err(FactsError::Architecture { path, arch: other.to_owned() }),
    }
}

/// The lines of the first processor, up to an empty line. The kernel writes some kilobytes for each processor, and only as
/// far as they are read.
fn first_processor(path: &Path) -> Result<String, FactsError> {
    let error = |source| FactsError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = File::open(path).map_err(error)?.take(MAX_PROCESSOR);
    for line in BufReader::new(file).lines() {
        let line = line.map_err(error)?;
        if line.is_empty() {
            break;
        }
        text.push_str(&line);
        text.push('\n');
    }
    Ok(text)
}

/// The value of the first line `key : value`.
fn cpuinfo_value<'a>(cpuinfo: &'a str, key: &str) -> Option<&'a str> {
    cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(k, _)| k.trim() == key)
        .map(|(_, v)| v.trim())
}

/// x86: `address sizes : 48 bits physical, 57 bits virtual`. With 4-level page tables, known by 48 virtual bits, KVM's
/// second stage reaches 48 bits whatever the processor has. Arm has no such line: 40 is what every host offers.
fn address_bits(arch: Architecture, cpuinfo: &str) -> u8 {
    let least = match arch {
        Architecture::X86_64 => 36,
        Architecture::Aarch64 => 40,
    };
    let sizes = cpuinfo_value(cpuinfo, "address sizes").unwrap_or_default();
    let numbers: Vec<u8> = sizes.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers.as_slice() {
        [physical, linear, ..] if *linear <= 48 => (*physical).min(48).max(least),
        [physical, ..] => (*physical).clamp(least, 52),
        [] => least,
    }
}

fn iommu(root: &Path) -> Probe<Iommu> {
    let folder = root.join("sys/kernel/iommu_groups");
    let groups = fs::read_dir(folder).map_or(0, |entries| entries.filter_map(Result::ok).count());
    match u32::try_from(groups) {
        Ok(groups) if groups > 0 => {
            let iommufd = root.join("sys/class/misc/iommu").exists();
            Probe::Present(Iommu { groups, iommufd })
        }
        _ => Probe::Absent(format!("/sys/kernel/iommu_groups is empty: {IOMMU_REMEDY}")),
    }
}

#[cfg(test)]
mod tests {
    use egm_device::record::RecordError;
    use egm_device::region::Survey;
    use egm_fixtures::schema::accepts;
    use serde_json::{Value, json};

    use super::*;
    use crate::facts::SCHEMA;

    const MEMINFO: &str =
        "MemTotal:       24684096 kB\nMemFree:        16251288 kB\nMemAvailable:   23814192 kB\n";

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const GRACE: &[(&str, &str)] = &[
        ("proc/meminfo", MEMINFO),
        ("proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\n"),
        ("proc/sys/kernel/osrelease", "6.14.0-1013-nvidia-64k\n"),
        ("proc/sys/kernel/arch", "aarch64\n"),
        ("sys/devices/system/node/online", "0,2\n"),
        ("sys/devices/system/node/node0/cpulist", "0-71\n"),
        ("sys/devices/system/node/node0/distance", "10 80\n"),
        (
            "sys/devices/system/node/node0/meminfo",
            "Node 0 MemTotal: 1000 kB\nNode 0 MemFree: 100 kB\nNode 0 FilePages: 50 kB\nNode 0 Shmem: 20 kB\n",
        ),
        ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "9\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "7\n"),
        ("sys/devices/system/node/node2/cpulist", "\n"),
        ("sys/devices/system/node/node2/distance", "80 10\n"),
        ("sys/devices/system/node/node2/meminfo", "Node 2 MemTotal: 8 kB\nNode 2 MemFree: 8 kB\n"),
        ("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "536870912\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        (
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "always within_size [advise] never deny force\n",
        ),
        (
            "sys/kernel/mm/transparent_hugepage/hugepages-524288kB/shmem_enabled",
            "always inherit within_size advise [never]\n",
        ),
        ("proc/cmdline", "quiet memmap=1G$4G\n"),
        ("proc/iomem", "80000000-ffffffff : System RAM\n  90000000-9fffffff : Kernel code\n"),
        ("sys/class/dmi/id/product_name", "a Grace machine\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-524288kB/nr_hugepages", "3\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-524288kB/free_hugepages", "1\n"),
        ("sys/class/egm/egm4/egm_size", "0x6fc0000000\n"),
        ("sys/class/egm/egm4/gpu_devices", "0009:01:00.0\n0008:01:00.0\n"),
    ];

    #[test]
    fn a_copied_tree_of_a_grace_host_is_read() {
        let root = tree(GRACE);
        let facts = read(root.path(), &Scope::All).unwrap();
        assert_eq!((facts.arch, facts.address_bits), (Architecture::Aarch64, 40));
        assert_eq!(facts.nodes[0].memory.available.get(), 130 << 10);
        assert_eq!(
            (facts.shmem_huge_pages.as_str(), facts.anonymous_huge_pages.as_str()),
            ("never", "madvise")
        );
        assert_eq!(facts.huge_page.to_string(), "512MiB");
        let pool = facts.nodes[0].pools[0];
        assert_eq!((pool.page_size.get(), pool.total, pool.free), (2 << 20, 9, 7));
        assert_eq!((facts.nodes[1].id, facts.nodes[1].cpus.is_empty()), (2, true));
        assert_eq!(facts.regions[0].region.size.to_string(), "447GiB");
        assert_eq!(facts.regions[0].region.functions[0].to_string(), "0008:01:00.0");
        assert!(matches!(&facts.iommu, Probe::Absent(reason) if reason.contains("iommu_groups is empty")));
    }

    #[test]
    fn a_kernel_without_numa_has_one_node_with_everything() {
        let root = tree(&[
            ("proc/meminfo", MEMINFO),
            (
                "proc/cpuinfo",
                "vendor_id : AuthenticAMD\naddress sizes\t: 52 bits physical, 48 bits virtual\n",
            ),
            ("proc/sys/kernel/osrelease", "7.2.0\n"),
            ("proc/sys/kernel/arch", "x86_64\n"),
            ("sys/devices/system/cpu/online", "0-1\n"),
        ]);
        let facts = read(
            root.path(),
            &Scope::Only {
                functions: vec!["0000:01:00.0".parse().unwrap()],
                regions: false,
                huge_files: false,
                assigns: false,
            },
        )
        .unwrap();
        assert_eq!((facts.cpu_vendor.as_str(), facts.address_bits), ("AuthenticAMD", 48));
        assert_eq!(facts.nodes.len(), 1);
        assert_eq!(facts.nodes[0].cpus.to_string(), "0-1");
        assert_eq!(facts.memory.available.get(), 23_814_192 << 10);
        assert!(facts.functions.is_empty());
    }

    #[test]
    fn the_description_of_the_first_processor_alone_is_read() {
        let root = tree(&[(
            "proc/cpuinfo",
            "vendor_id : GenuineIntel\n\nvendor_id : GenuineIntel\naddress sizes : 52 bits physical, 48 bits virtual\n",
        )]);
        let first = first_processor(&root.path().join("proc/cpuinfo")).unwrap();
        assert_eq!(first, "vendor_id : GenuineIntel\n");
    }

    #[test]
    fn a_tree_that_lacks_a_file_names_it() {
        let root = tree(&[("proc/sys/kernel/arch", "riscv64\n")]);
        let error = read(root.path(), &Scope::All).unwrap_err().to_string();
        assert!(error.ends_with("is \"riscv64\", and guests run on x86_64 and aarch64 only"), "{error}");
        let root = tree(&[("proc/sys/kernel/arch", "x86_64\n")]);
        let error = read(root.path(), &Scope::All).unwrap_err().to_string();
        assert!(error.ends_with("proc/cpuinfo"), "{error}");
    }

    #[test]
    fn the_schema_describes_facts_of_this_version_and_no_others() {
        let schema: Value = serde_json::from_str(SCHEMA).unwrap();
        assert_eq!(schema["properties"]["version"]["const"], json!(FACTS_VERSION));
        let root = tree(GRACE);
        let grace = serde_json::to_value(read(root.path(), &Scope::All).unwrap()).unwrap();
        let here = serde_json::to_value(of_host(&Scope::All).unwrap()).unwrap();
        let files =
            fs::read_dir("../configs/facts").unwrap().map(|file| fs::read(file.unwrap().path()).unwrap());
        let files: Vec<Value> = files.map(|text| serde_json::from_slice(&text).unwrap()).collect();
        assert!(files.len() > 5);
        for facts in files.iter().chain([&grace, &here]) {
            assert!(accepts(&schema, facts), "{facts}");
        }
        for (key, value) in [
            ("version", json!(2)),
            ("arch", json!("riscv64")),
            ("memory_map", json!({})),
            ("nodes", json!([{ "id": 0 }])),
            ("regions", json!([{ "region": {} }])),
            ("functions", json!([{ "address": "x" }])),
            ("hosts", json!([])),
        ] {
            let mut wrong = grace.clone();
            wrong[key] = value;
            assert!(!accepts(&schema, &wrong), "{key}");
        }
    }

    #[test]
    fn this_host_has_facts() {
        let facts = of_host(&Scope::All).unwrap();
        assert!(facts.memory.total >= facts.memory.available && facts.memory.total.get() > 0);
        assert!(facts.nodes.iter().any(|node| !node.cpus.is_empty()));
    }

    #[test]
    fn recorded_facts_are_read_back_and_others_refused() {
        let root = tree(GRACE);
        let facts = read(root.path(), &Scope::All).unwrap();
        let path = root.path().join("facts.json");
        fs::write(&path, serde_json::to_string_pretty(&facts).unwrap()).unwrap();
        assert_eq!(load(&path).unwrap(), facts);
        // The other program reads the same file.
        let (recorded, here) = (record::survey(&path).unwrap(), Survey::of(root.path(), &[]));
        assert_eq!((recorded.host, recorded.regions), (here.host, here.regions));
        fs::write(&path, "{\"version\": 99, \"new\": 1}").unwrap();
        assert!(matches!(load(&path), Err(FactsError::Record(RecordError::Version { version: 99, .. }))));
        fs::write(&path, format!("{{\"version\": {FACTS_VERSION},\n \"arch\": 5}}")).unwrap();
        let error = load(&path).unwrap_err().to_string();
        assert!(error.contains("facts.json:2:"), "{error}");
    }
}
