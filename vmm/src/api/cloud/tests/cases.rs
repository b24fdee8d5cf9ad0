//! Documents that show what becomes of each field.

const TOPOLOGY: &str = r#"{"cpus":{"boot_vcpus":4,"max_vcpus":4,"topology":
    {"threads_per_core":1,"cores_per_die":4,"dies_per_package":1,"packages":1}}}"#;
const PINNED: &str = r#"{"cpus":{"boot_vcpus":2,"max_vcpus":2,"affinity":
    [{"vcpu":0,"host_cpus":[1]},{"vcpu":1,"host_cpus":[2]}]}}"#;
const ZONES: &str = r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824},{"id":"b","size":2147483648}]},
    "numa":[{"guest_numa_id":0,"cpus":[0],"memory_zones":["a"]},{"guest_numa_id":1,"memory_zones":["b"]}]}"#;
const DISK: &str = r#"{"disks":[{"path":"d"}]}"#;
const NET: &str = r#"{"net":[{"tap":"t"}]}"#;
const GPU: &str = r#"{"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0"}]}"#;
const USER: &str = r#"{"user_devices":[{"socket":"s"}]}"#;
const VSOCK: &str = r#"{"vsock":{"cid":3,"socket":"s"}}"#;

/// A field, and two documents in which it has different values.
pub(super) const HONOURED: &[(&str, &str, &str)] = &[
    (
        "cpus.boot_vcpus",
        r#"{"cpus":{"boot_vcpus":1,"max_vcpus":2}}"#,
        r#"{"cpus":{"boot_vcpus":2,"max_vcpus":2}}"#,
    ),
    (
        "cpus.topology.threads_per_core",
        TOPOLOGY,
        r#"{"cpus":{"boot_vcpus":4,"max_vcpus":4,"topology":
            {"threads_per_core":2,"cores_per_die":2,"dies_per_package":1,"packages":1}}}"#,
    ),
    (
        "cpus.topology.cores_per_die",
        TOPOLOGY,
        r#"{"cpus":{"boot_vcpus":4,"max_vcpus":4,"topology":
            {"threads_per_core":1,"cores_per_die":2,"dies_per_package":1,"packages":2}}}"#,
    ),
    (
        "cpus.topology.packages",
        TOPOLOGY,
        r#"{"cpus":{"boot_vcpus":4,"max_vcpus":4,"topology":
            {"threads_per_core":1,"cores_per_die":2,"dies_per_package":1,"packages":2}}}"#,
    ),
    (
        "cpus.affinity[].vcpu",
        PINNED,
        r#"{"cpus":{"boot_vcpus":2,"max_vcpus":2,"affinity":
            [{"vcpu":1,"host_cpus":[1]},{"vcpu":0,"host_cpus":[2]}]}}"#,
    ),
    (
        "cpus.affinity[].host_cpus",
        PINNED,
        r#"{"cpus":{"boot_vcpus":2,"max_vcpus":2,"affinity":
            [{"vcpu":0,"host_cpus":[1]},{"vcpu":1,"host_cpus":[2,3]}]}}"#,
    ),
    ("payload.kernel", "{}", r#"{"payload":{"kernel":"l"}}"#),
    ("payload.cmdline", "{}", r#"{"payload":{"cmdline":"console=hvc0 console=ttyS0"}}"#),
    ("payload.initramfs", "{}", r#"{"payload":{"initramfs":"i"}}"#),
    ("serial.mode", r#"{"serial":{"mode":"Null"}}"#, r#"{"serial":{"mode":"Pty"}}"#),
    ("serial.file", r#"{"serial":{"mode":"File","file":"a"}}"#, r#"{"serial":{"mode":"File","file":"b"}}"#),
    (
        "serial.socket",
        r#"{"serial":{"mode":"Socket","socket":"a"}}"#,
        r#"{"serial":{"mode":"Socket","socket":"b"}}"#,
    ),
    ("console.mode", r#"{"console":{"mode":"Off"}}"#, r#"{"console":{"mode":"Tty"}}"#),
    (
        "console.file",
        r#"{"console":{"mode":"File","file":"a"}}"#,
        r#"{"console":{"mode":"File","file":"b"}}"#,
    ),
    (
        "console.socket",
        r#"{"console":{"mode":"Socket","socket":"a"}}"#,
        r#"{"console":{"mode":"Socket","socket":"b"}}"#,
    ),
    (
        "platform.iommufd",
        r#"{"platform":{"iommufd":false},"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0"}]}"#,
        r#"{"platform":{"iommufd":true},"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0"}]}"#,
    ),
    (
        "platform.vfio_p2p_dma",
        r#"{"platform":{"vfio_p2p_dma":true},"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0"}]}"#,
        r#"{"platform":{"vfio_p2p_dma":false},"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0"}]}"#,
    ),
    ("memory.size", "{}", r#"{"memory":{"size":1073741824}}"#),
    ("memory.hugepages", "{}", r#"{"memory":{"size":536870912,"hugepages":true}}"#),
    (
        "memory.hugepage_size",
        r#"{"memory":{"size":1073741824,"hugepages":true,"hugepage_size":2097152}}"#,
        r#"{"memory":{"size":1073741824,"hugepages":true,"hugepage_size":1073741824}}"#,
    ),
    ("memory.thp", "{}", r#"{"memory":{"size":536870912,"thp":false}}"#),
    ("memory.prefault", "{}", r#"{"memory":{"size":536870912,"prefault":true}}"#),
    (
        "memory.zones[].id",
        ZONES,
        r#"{"memory":{"size":0,"zones":[{"id":"b","size":1073741824},{"id":"a","size":2147483648}]},
            "numa":[{"guest_numa_id":0,"cpus":[0],"memory_zones":["a"]},{"guest_numa_id":1,"memory_zones":["b"]}]}"#,
    ),
    (
        "memory.zones[].size",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824}]}}"#,
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":2147483648}]}}"#,
    ),
    (
        "memory.zones[].file",
        ZONES,
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824},
            {"id":"b","size":2147483648,"file":"/dev/egm4"}]},
            "numa":[{"guest_numa_id":0,"cpus":[0],"memory_zones":["a"]},{"guest_numa_id":1,"memory_zones":["b"]}]}"#,
    ),
    (
        "memory.zones[].hugepages",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824}]}}"#,
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824,"hugepages":true}]}}"#,
    ),
    (
        "memory.zones[].hugepage_size",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824,"hugepages":true}]}}"#,
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824,"hugepages":true,"hugepage_size":1073741824}]}}"#,
    ),
    (
        "memory.zones[].host_numa_node",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824,"host_numa_node":0}]}}"#,
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824,"host_numa_node":1}]}}"#,
    ),
    (
        "memory.zones[].prefault",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824}]}}"#,
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824,"prefault":true}]}}"#,
    ),
    (
        "numa[].guest_numa_id",
        ZONES,
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824},{"id":"b","size":2147483648}]},
            "numa":[{"guest_numa_id":0,"cpus":[0],"memory_zones":["a"]},{"guest_numa_id":2,"memory_zones":["b"]}]}"#,
    ),
    (
        "numa[].cpus",
        ZONES,
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824},{"id":"b","size":2147483648}]},
            "numa":[{"guest_numa_id":0,"memory_zones":["a"]},{"guest_numa_id":1,"cpus":[0],"memory_zones":["b"]}]}"#,
    ),
    (
        "numa[].distances[].destination",
        r#"{"memory":{"size":0},"numa":[{"guest_numa_id":0,"distances":[{"destination":1,"distance":30}]}]}"#,
        r#"{"memory":{"size":0},"numa":[{"guest_numa_id":0,"distances":[{"destination":2,"distance":30}]}]}"#,
    ),
    (
        "numa[].distances[].distance",
        r#"{"memory":{"size":0},"numa":[{"guest_numa_id":0,"distances":[{"destination":1,"distance":30}]}]}"#,
        r#"{"memory":{"size":0},"numa":[{"guest_numa_id":0,"distances":[{"destination":1,"distance":40}]}]}"#,
    ),
    (
        "numa[].memory_zones",
        ZONES,
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1073741824},{"id":"b","size":2147483648}]},
            "numa":[{"guest_numa_id":0,"cpus":[0],"memory_zones":["b"]},{"guest_numa_id":1,"memory_zones":["a"]}]}"#,
    ),
    ("disks[].path", DISK, r#"{"disks":[{"path":"e"}]}"#),
    ("disks[].readonly", DISK, r#"{"disks":[{"path":"d","readonly":true}]}"#),
    ("disks[].serial", DISK, r#"{"disks":[{"path":"d","serial":"root"}]}"#),
    ("disks[].id", DISK, r#"{"disks":[{"path":"d","id":"_disk0"}]}"#),
    ("net[].tap", NET, r#"{"net":[{"tap":"u"}]}"#),
    ("net[].mac", NET, r#"{"net":[{"tap":"t","mac":"52:54:00:12:34:56"}]}"#),
    ("net[].num_queues", NET, r#"{"net":[{"tap":"t","num_queues":4}]}"#),
    ("net[].id", NET, r#"{"net":[{"tap":"t","id":"net_0"}]}"#),
    ("devices[].path", GPU, r#"{"devices":[{"path":"/sys/bus/pci/devices/0000:42:00.0/"}]}"#),
    (
        "devices[].x_nv_gpudirect_clique",
        GPU,
        r#"{"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0","x_nv_gpudirect_clique":3}]}"#,
    ),
    ("devices[].id", GPU, r#"{"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0","id":"gpu0"}]}"#),
    ("user_devices[].socket", USER, r#"{"user_devices":[{"socket":"t"}]}"#),
    ("user_devices[].id", USER, r#"{"user_devices":[{"socket":"s","id":"egm0"}]}"#),
    ("vsock.cid", VSOCK, r#"{"vsock":{"cid":4,"socket":"s"}}"#),
    ("vsock.socket", VSOCK, r#"{"vsock":{"cid":3,"socket":"t"}}"#),
    ("vsock.id", VSOCK, r#"{"vsock":{"cid":3,"socket":"s","id":"v"}}"#),
    ("rng.id", r#"{"rng":{"src":"/dev/urandom"}}"#, r#"{"rng":{"src":"/dev/urandom","id":"r"}}"#),
];

/// A field with a value that the plan or the host decides.
pub(super) const DERIVED: &[(&str, &str)] = &[
    ("cpus.max_vcpus", r#"{"cpus":{"boot_vcpus":1,"max_vcpus":32}}"#),
    ("cpus.max_phys_bits", r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1,"max_phys_bits":40}}"#),
    ("console.id", r#"{"console":{"mode":"Off","id":"c"}}"#),
    ("console.pci_segment", r#"{"console":{"mode":"Off","pci_segment":1}}"#),
    ("console.pci_device_id", r#"{"console":{"mode":"Off","pci_device_id":4}}"#),
    ("platform.num_pci_segments", r#"{"platform":{"num_pci_segments":2}}"#),
    ("pci_segments", r#"{"pci_segments":[{"pci_segment":0,"mmio64_aperture_weight":2}]}"#),
    ("pvpanic", r#"{"pvpanic":true}"#),
    ("memory.shared", r#"{"memory":{"size":536870912,"shared":true}}"#),
    ("memory.hotplug_method", r#"{"memory":{"size":536870912,"hotplug_method":"VirtioMem"}}"#),
    ("memory.hotplug_size", r#"{"memory":{"size":536870912,"hotplug_size":1073741824}}"#),
    ("memory.zones[0].shared", r#"{"memory":{"size":0,"zones":[{"id":"a","size":4096,"shared":true}]}}"#),
    (
        "memory.zones[0].hotplug_size",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":4096,"hotplug_size":1}]}}"#,
    ),
    (
        "numa[0].pci_segments",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":4096}]},
            "numa":[{"guest_numa_id":0,"cpus":[0],"memory_zones":["a"],"pci_segments":[0]}]}"#,
    ),
    ("disks[0].num_queues", r#"{"disks":[{"path":"d","num_queues":4}]}"#),
    ("disks[0].queue_size", r#"{"disks":[{"path":"d","queue_size":1024}]}"#),
    ("disks[0].sparse", r#"{"disks":[{"path":"d","sparse":false}]}"#),
    ("disks[0].lock_granularity", r#"{"disks":[{"path":"d","lock_granularity":"Full"}]}"#),
    ("disks[0].disable_io_uring", r#"{"disks":[{"path":"d","disable_io_uring":true}]}"#),
    ("disks[0].disable_aio", r#"{"disks":[{"path":"d","disable_aio":true}]}"#),
    ("disks[0].pci_segment", r#"{"disks":[{"path":"d","pci_segment":1}]}"#),
    ("net[0].queue_size", r#"{"net":[{"tap":"t","queue_size":1024}]}"#),
    ("net[0].pci_segment", r#"{"net":[{"tap":"t","pci_segment":1}]}"#),
    (
        "devices[0].pci_segment",
        r#"{"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0","pci_segment":1}]}"#,
    ),
    ("user_devices[0].pci_segment", r#"{"user_devices":[{"socket":"s","pci_segment":1}]}"#),
    ("vsock.pci_segment", r#"{"vsock":{"cid":3,"socket":"s","pci_segment":1}}"#),
    ("rng.pci_segment", r#"{"rng":{"src":"/dev/urandom","pci_segment":1}}"#),
];

/// Fields that the types give one value only, and one that is judged by a whole entry: no document of [`DERIVED`] has them.
pub(super) const DERIVED_ELSEWHERE: &[&str] = &["cpus.profile", "numa[].device_id"];

/// A field with a value that is refused.
pub(super) const REFUSED: &[(&str, &str)] = &[
    ("cpus.max_vcpus", r#"{"cpus":{"boot_vcpus":2,"max_vcpus":1}}"#),
    (
        "cpus.topology.cores_per_die",
        r#"{"cpus":{"boot_vcpus":1,"max_vcpus":8,"topology":
            {"threads_per_core":1,"cores_per_die":4,"dies_per_package":1,"packages":1}}}"#,
    ),
    (
        "cpus.topology.dies_per_package",
        r#"{"cpus":{"boot_vcpus":4,"max_vcpus":4,"topology":
            {"threads_per_core":1,"cores_per_die":2,"dies_per_package":2,"packages":1}}}"#,
    ),
    ("cpus.kvm_hyperv", r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1,"kvm_hyperv":true}}"#),
    (
        "cpus.affinity[1].vcpu",
        r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1,"affinity":
            [{"vcpu":0,"host_cpus":[1]},{"vcpu":1,"host_cpus":[1]}]}}"#,
    ),
    (
        "cpus.affinity[0].host_cpus",
        r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1,"affinity":[{"vcpu":0,"host_cpus":[8192]}]}}"#,
    ),
    ("cpus.features.amx", r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1,"features":{"amx":true}}}"#),
    ("cpus.nested", r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1,"nested":false}}"#),
    ("cpus.core_scheduling", r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1,"core_scheduling":"Vcpu"}}"#),
    ("payload.kernel", r#"{"payload":{"kernel":null}}"#),
    ("payload.cmdline", r#"{"payload":{"cmdline":"quiet console=hvc0"}}"#),
    ("payload.firmware", r#"{"payload":{"firmware":"f"}}"#),
    ("payload.igvm", r#"{"payload":{"igvm":"f"}}"#),
    ("payload.host_data", r#"{"payload":{"host_data":"00"}}"#),
    ("payload.mrconfigid", r#"{"payload":{"mrconfigid":"00"}}"#),
    ("payload.fw_cfg_config", r#"{"payload":{"fw_cfg_config":{}}}"#),
    ("serial.file", r#"{"serial":{"mode":"File"}}"#),
    ("serial.file", r#"{"serial":{"mode":"Pty","file":"f"}}"#),
    ("serial.socket", r#"{"serial":{"mode":"Socket"}}"#),
    ("serial.iommu", r#"{"serial":{"mode":"Off","iommu":true}}"#),
    ("console.mode", r#"{"serial":{"mode":"Tty"},"console":{"mode":"Pty"}}"#),
    ("console.file", r#"{"console":{"mode":"Off","file":"f"}}"#),
    ("console.socket", r#"{"console":{"mode":"Socket"}}"#),
    ("console.iommu", r#"{"console":{"mode":"Off","iommu":true}}"#),
    ("debug_console.mode", r#"{"debug_console":{"mode":"Tty"}}"#),
    ("debug_console.file", r#"{"debug_console":{"mode":"Off","file":"f"}}"#),
    ("debug_console.iobase", r#"{"debug_console":{"mode":"Off","iobase":1}}"#),
    ("platform.iommu_segments", r#"{"platform":{"iommu_segments":[0]}}"#),
    ("platform.iommu_address_width_bits", r#"{"platform":{"iommu_address_width_bits":48}}"#),
    ("platform.system_serial_number", r#"{"platform":{"serial_number":"s"}}"#),
    ("platform.system_uuid", r#"{"platform":{"uuid":"s"}}"#),
    ("platform.oem_strings", r#"{"platform":{"oem_strings":["s"]}}"#),
    ("platform.system_manufacturer", r#"{"platform":{"system_manufacturer":"s"}}"#),
    ("platform.system_product_name", r#"{"platform":{"system_product_name":"s"}}"#),
    ("platform.system_version", r#"{"platform":{"system_version":"s"}}"#),
    ("platform.system_family", r#"{"platform":{"system_family":"s"}}"#),
    ("platform.system_sku_number", r#"{"platform":{"system_sku_number":"s"}}"#),
    ("platform.chassis_asset_tag", r#"{"platform":{"chassis_asset_tag":"s"}}"#),
    ("platform.tdx", r#"{"platform":{"tdx":true}}"#),
    ("platform.sev_snp", r#"{"platform":{"sev_snp":true}}"#),
    ("platform.iommufd_fd", r#"{"platform":{"iommufd":true,"iommufd_fd":5}}"#),
    ("iommu", r#"{"iommu":true}"#),
    ("watchdog", r#"{"watchdog":true}"#),
    ("gdb", r#"{"gdb":true}"#),
    ("landlock_enable", r#"{"landlock_enable":true}"#),
    ("landlock_rules", r#"{"landlock_rules":[{"path":"/","access":"r"}]}"#),
    ("memory.size", r#"{"memory":{"size":4096,"zones":[{"id":"a","size":4096}]}}"#),
    ("memory.hugepage_size", r#"{"memory":{"size":4096,"hugepages":true,"hugepage_size":4096}}"#),
    ("memory.hotplugged_size", r#"{"memory":{"size":4096,"hotplugged_size":1}}"#),
    ("memory.mergeable", r#"{"memory":{"size":4096,"mergeable":true}}"#),
    ("memory.reserve", r#"{"memory":{"size":4096,"reserve":true}}"#),
    ("memory.zones[1].id", r#"{"memory":{"size":0,"zones":[{"id":"a","size":1},{"id":"a","size":1}]}}"#),
    (
        "memory.zones[1].id",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1},{"id":"b","size":1}]},
            "numa":[{"guest_numa_id":0,"memory_zones":["a"]}]}"#,
    ),
    ("memory.zones[0].file", r#"{"memory":{"size":0,"zones":[{"id":"a","size":1,"file":"/dev/shm/egm1"}]}}"#),
    (
        "memory.zones[1].hugepages",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1},{"id":"b","size":1,"hugepages":true}]}}"#,
    ),
    (
        "memory.zones[0].hugepage_size",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1,"hugepage_size":2097152}]}}"#,
    ),
    (
        "memory.zones[1].host_numa_node",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1,"host_numa_node":0},{"id":"b","size":1}]}}"#,
    ),
    (
        "memory.zones[0].hotplugged_size",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1,"hotplugged_size":1}]}}"#,
    ),
    ("memory.zones[0].mergeable", r#"{"memory":{"size":0,"zones":[{"id":"a","size":1,"mergeable":true}]}}"#),
    ("memory.zones[0].reserve", r#"{"memory":{"size":0,"zones":[{"id":"a","size":1,"reserve":true}]}}"#),
    ("numa[0].cpus", r#"{"memory":{"size":0},"numa":[{"guest_numa_id":0,"cpus":[8192]}]}"#),
    (
        "numa[0].distances[1].destination",
        r#"{"memory":{"size":0},"numa":[{"guest_numa_id":0,"cpus":[0],
            "distances":[{"destination":1,"distance":20},{"destination":1,"distance":30}]}]}"#,
    ),
    ("numa[0].memory_zones", r#"{"memory":{"size":0},"numa":[{"guest_numa_id":0,"memory_zones":["a"]}]}"#),
    (
        "numa[1].memory_zones",
        r#"{"memory":{"size":0,"zones":[{"id":"a","size":1}]},
            "numa":[{"guest_numa_id":0,"memory_zones":["a"]},{"guest_numa_id":1,"memory_zones":["a"]}]}"#,
    ),
    (
        "numa[0].device_id",
        r#"{"memory":{"size":0},"numa":[{"guest_numa_id":0,"cpus":[0],"device_id":"gpu0"}]}"#,
    ),
    ("disks[0].path", r#"{"disks":[{}]}"#),
    ("disks[0].image_type", r#"{"disks":[{"path":"d","image_type":"Qcow2"}]}"#),
    ("disks[0].direct", r#"{"disks":[{"path":"d","direct":true}]}"#),
    ("disks[0].serial", r#"{"disks":[{"path":"d","id":"a","serial":"b"}]}"#),
    ("disks[0].backing_files", r#"{"disks":[{"path":"d","backing_files":true}]}"#),
    ("disks[0].vhost_user", r#"{"disks":[{"path":"d","vhost_user":true}]}"#),
    ("disks[0].vhost_socket", r#"{"disks":[{"path":"d","vhost_socket":"s"}]}"#),
    ("disks[0].rate_limit_group", r#"{"disks":[{"path":"d","rate_limit_group":"g"}]}"#),
    ("disks[0].rate_limiter_config", r#"{"disks":[{"path":"d","rate_limiter_config":{}}]}"#),
    (
        "disks[0].queue_affinity",
        r#"{"disks":[{"path":"d","queue_affinity":[{"queue_index":0,"host_cpus":[0]}]}]}"#,
    ),
    ("disks[0].iommu", r#"{"disks":[{"path":"d","iommu":true}]}"#),
    ("disks[0].pci_device_id", r#"{"disks":[{"path":"d","pci_device_id":5}]}"#),
    ("rate_limit_groups", r#"{"rate_limit_groups":[{"id":"g"}]}"#),
    ("net[0].tap", r#"{"net":[{}]}"#),
    ("net[0].num_queues", r#"{"net":[{"tap":"t","num_queues":3}]}"#),
    ("net[0].ip", r#"{"net":[{"tap":"t","ip":"192.168.249.1"}]}"#),
    ("net[0].mask", r#"{"net":[{"tap":"t","mask":"255.255.255.0"}]}"#),
    ("net[0].host_mac", r#"{"net":[{"tap":"t","host_mac":"52:54:00:12:34:56"}]}"#),
    ("net[0].mtu", r#"{"net":[{"tap":"t","mtu":9000}]}"#),
    ("net[0].offload_tso", r#"{"net":[{"tap":"t","offload_tso":false}]}"#),
    ("net[0].offload_ufo", r#"{"net":[{"tap":"t","offload_ufo":false}]}"#),
    ("net[0].offload_csum", r#"{"net":[{"tap":"t","offload_csum":false}]}"#),
    ("net[0].vhost_user", r#"{"net":[{"tap":"t","vhost_user":true}]}"#),
    ("net[0].vhost_socket", r#"{"net":[{"tap":"t","vhost_socket":"s"}]}"#),
    ("net[0].vhost_mode", r#"{"net":[{"tap":"t","vhost_mode":"Server"}]}"#),
    ("net[0].fds", r#"{"net":[{"fds":[5]}]}"#),
    ("net[0].rate_limiter_config", r#"{"net":[{"tap":"t","rate_limiter_config":{}}]}"#),
    ("net[0].iommu", r#"{"net":[{"tap":"t","iommu":true}]}"#),
    ("net[0].pci_device_id", r#"{"net":[{"tap":"t","pci_device_id":5}]}"#),
    ("devices[0].path", r#"{"devices":[{"path":"/sys/bus/mdev/devices/6e2b1c4e"}]}"#),
    ("devices[0].path", r#"{"devices":[{}]}"#),
    ("devices[0].fd", r#"{"devices":[{"fd":5}]}"#),
    (
        "devices[0].x_exclude_mmap_bars",
        r#"{"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0","x_exclude_mmap_bars":[4]}]}"#,
    ),
    ("devices[0].iommu", r#"{"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0","iommu":true}]}"#),
    (
        "devices[0].pci_device_id",
        r#"{"devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0","pci_device_id":5}]}"#,
    ),
    ("user_devices[0].iommu", r#"{"user_devices":[{"socket":"s","iommu":true}]}"#),
    ("user_devices[0].pci_device_id", r#"{"user_devices":[{"socket":"s","pci_device_id":5}]}"#),
    ("vsock.iommu", r#"{"vsock":{"cid":3,"socket":"s","iommu":true}}"#),
    ("vsock.pci_device_id", r#"{"vsock":{"cid":3,"socket":"s","pci_device_id":5}}"#),
    ("rng.src", r#"{"rng":{"src":"/dev/hwrng"}}"#),
    ("rng.iommu", r#"{"rng":{"src":"/dev/urandom","iommu":true}}"#),
    ("rng.pci_device_id", r#"{"rng":{"src":"/dev/urandom","pci_device_id":5}}"#),
    ("balloon", r#"{"balloon":{"size":0,"free_page_reporting":true}}"#),
    ("fs", r#"{"fs":[{"tag":"kataShared","socket":"s"}]}"#),
    ("pmem", r#"{"pmem":[{"file":"f"}]}"#),
    ("generic_vhost_user", r#"{"generic_vhost_user":[{"socket":"s","queue_sizes":[64],"device_type":26}]}"#),
    ("vdpa", r#"{"vdpa":[{"path":"/dev/vhost-vdpa-0"}]}"#),
    ("rtc", r#"{"rtc":{}}"#),
    ("tpm", r#"{"tpm":{"socket":"s"}}"#),
    ("pvmemcontrol", r#"{"pvmemcontrol":{}}"#),
    ("ivshmem", r#"{"ivshmem":{"path":"p","size":4096}}"#),
];
