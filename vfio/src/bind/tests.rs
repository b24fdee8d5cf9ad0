//! Binds and undos, as sysfs sees them.

use std::os::unix::fs::symlink;

use super::*;
use crate::topology::testing::Host;

/// A host with the files that a kernel would have for writing.
fn host() -> Host {
    let host = Host::two_switches();
    for driver in ["vfio-pci", "nvme", "mlx5_core"] {
        fs::create_dir_all(host.root().join("sys/bus/pci/drivers").join(driver)).unwrap();
    }
    host
}

fn wrote(host: &Host, path: &str) -> Option<String> {
    fs::read_to_string(host.root().join(path)).ok()
}

fn put(host: &Host, path: &str, text: &str) {
    let path = host.root().join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

const DISK: &str = "0000:21:00.0";
const STATE_OF_DISK: &str = "run/egm-vmm/bind/0000:21:00.0";

#[test]
fn a_function_is_taken_by_override_and_probe_and_its_driver_written_down() {
    let host = host();
    let changes = Binder::new(host.root()).bind(&[host.disk()], Some("vfio-pci"), false).unwrap();
    let nvme = Some("nvme".to_owned());
    assert_eq!(changes, [Change { function: host.disk(), before: nvme, now: Some("vfio-pci".to_owned()) }]);
    assert_eq!(wrote(&host, "sys/bus/pci/devices/0000:21:00.0/driver_override").unwrap(), "vfio-pci");
    assert_eq!(wrote(&host, "sys/bus/pci/drivers/nvme/unbind").unwrap(), DISK);
    assert_eq!(wrote(&host, "sys/bus/pci/drivers_probe").unwrap(), DISK);
    assert_eq!(wrote(&host, STATE_OF_DISK).unwrap(), "nvme");
}

#[test]
fn one_that_has_the_driver_is_left_alone() {
    let host = host();
    Binder::new(host.root()).bind(&[host.gpu(0)], Some("vfio-pci"), false).unwrap();
    assert_eq!(wrote(&host, "sys/bus/pci/drivers_probe"), None);
    assert_eq!(wrote(&host, "run/egm-vmm/bind/0000:18:00.0"), None);
}

#[test]
fn the_first_taking_is_what_undo_goes_back_to() {
    let host = host();
    put(&host, STATE_OF_DISK, "nvme");
    let link = host.root().join("sys/bus/pci/devices/0000:21:00.0/driver");
    fs::remove_file(&link).unwrap();
    symlink("/sys/bus/pci/drivers/vfio-pci", &link).unwrap();
    let binder = Binder::new(host.root());
    binder.bind(&[host.disk()], Some("mlx5_core"), false).unwrap();
    assert_eq!(wrote(&host, STATE_OF_DISK).unwrap(), "nvme");
    let changes = binder.undo(&[host.disk()]).unwrap();
    assert_eq!(changes[0].now.as_deref(), Some("nvme"));
    assert_eq!(wrote(&host, "sys/bus/pci/drivers/vfio-pci/unbind").unwrap(), DISK);
    assert_eq!(wrote(&host, "sys/bus/pci/devices/0000:21:00.0/driver_override").unwrap(), "\n");
    assert_eq!(wrote(&host, STATE_OF_DISK), None);
    put(&host, "sys/bus/pci/drivers_probe", "");
    let again = binder.undo(&[host.gpu(0), host.disk()]).unwrap();
    assert!(again.iter().all(|change| change.before == change.now), "neither is taken: {again:?}");
    assert_eq!(wrote(&host, "sys/bus/pci/drivers_probe").unwrap(), "");
}

#[test]
fn one_without_a_driver_gets_none_back() {
    let host = host();
    fs::remove_file(host.root().join("sys/bus/pci/devices/0000:21:00.0/driver")).unwrap();
    let binder = Binder::new(host.root());
    binder.bind(&[host.disk()], Some("vfio-pci"), false).unwrap();
    assert_eq!(wrote(&host, STATE_OF_DISK).unwrap(), "");
    assert_eq!(binder.undo(&[host.disk()]).unwrap()[0].now, None);
}

#[test]
fn a_group_in_use_is_refused_and_taken_as_a_whole_on_request() {
    let host = host();
    let group = "sys/kernel/iommu_groups/11/devices";
    put(&host, &format!("{group}/0000:1c:00.0"), "");
    let link = host.root().join("sys/bus/pci/devices/0000:1c:00.0/iommu_group");
    fs::remove_file(&link).unwrap();
    symlink(host.root().join("sys/kernel/iommu_groups/11"), &link).unwrap();
    let binder = Binder::new(host.root());
    let error = binder.bind(&[host.disk()], Some("vfio-pci"), false).unwrap_err();
    assert!(error.to_string().ends_with("is in use by the host: 0000:1c:00.0 by nvme"), "{error}");
    assert_eq!(error.help().unwrap(), "take them too with --group, or: egm-vmm bind 0000:1c:00.0");
    assert_eq!(wrote(&host, "sys/bus/pci/drivers_probe"), None, "nothing has changed");
    let changes = binder.bind(&[host.disk()], Some("vfio-pci"), true).unwrap();
    assert_eq!(changes.iter().map(|c| c.function).collect::<Vec<_>>(), [host.deep(), host.disk()]);
}

#[test]
fn a_mounted_disk_keeps_its_driver_also_below_a_mapped_one() {
    let host = host();
    let disk = host.root().join("sys/devices/pci0000:15/0000:15:02.0/0000:21:00.0/nvme/nvme0/nvme0n1");
    fs::create_dir_all(&disk).unwrap();
    let mapped = host.root().join("sys/devices/virtual/block/dm-0");
    fs::create_dir_all(mapped.join("slaves")).unwrap();
    symlink(&disk, mapped.join("slaves/nvme0n1")).unwrap();
    fs::create_dir_all(host.root().join("sys/dev/block")).unwrap();
    symlink(&mapped, host.root().join("sys/dev/block/253:0")).unwrap();
    put(&host, "proc/self/mountinfo", "28 1 253:0 / / rw,noatime shared:1 - ext4 /dev/mapper/root rw\n");
    let error = Binder::new(host.root()).bind(&[host.disk()], Some("vfio-pci"), false).unwrap_err();
    assert!(matches!(&error, BindError::Needed { what: Use::Mounted(at), .. } if at == "/"), "{error}");
    put(&host, "proc/self/mountinfo", "28 1 0:25 / / rw - tmpfs tmpfs rw\n");
    Binder::new(host.root()).bind(&[host.disk()], Some("vfio-pci"), false).unwrap();
}

#[test]
fn a_disk_that_its_file_system_only_names_is_found() {
    let host = host();
    let part =
        host.root().join("sys/devices/pci0000:15/0000:15:02.0/0000:21:00.0/nvme/nvme0/nvme0n1/nvme0n1p2");
    fs::create_dir_all(&part).unwrap();
    fs::create_dir_all(host.root().join("sys/class/block")).unwrap();
    symlink(&part, host.root().join("sys/class/block/nvme0n1p2")).unwrap();
    put(&host, "proc/self/mountinfo", "28 1 0:30 / /data rw - btrfs /dev/nvme0n1p2 rw\n");
    let error = Binder::new(host.root()).bind(&[host.disk()], Some("vfio-pci"), false).unwrap_err();
    assert!(error.to_string().ends_with("a disk of it is mounted at /data"), "{error}");
}

#[test]
fn the_way_out_keeps_its_driver_also_below_a_bridge() {
    let host = host();
    let nic = host.root().join("sys/bus/pci/devices/0000:19:00.0").canonicalize().unwrap();
    let port = nic.join("net/eth0");
    fs::create_dir_all(&port).unwrap();
    symlink(&nic, port.join("device")).unwrap();
    let bridge = host.root().join("sys/devices/virtual/net/br0");
    fs::create_dir_all(&bridge).unwrap();
    symlink(&port, bridge.join("lower_eth0")).unwrap();
    fs::create_dir_all(host.root().join("sys/class/net")).unwrap();
    symlink(&bridge, host.root().join("sys/class/net/br0")).unwrap();
    let zeros = "0".repeat(32);
    let binder = Binder::new(host.root());
    let refused = || binder.bind(&[host.nic(0)], Some("vfio-pci"), false).unwrap_err().to_string();
    put(
        &host,
        "proc/net/route",
        "Iface\tDestination\tGateway\nbr0\t00000000\t0102000A\t0003\t0\t0\t0\t00000000\t0\n",
    );
    assert!(refused().ends_with("the default route leads through br0"));
    put(&host, "proc/net/route", "");
    let v6 = format!("{zeros} 00 {zeros} 00 fe80 00000400 00000001 00000000 00000003 br0\n");
    put(&host, "proc/net/ipv6_route", &v6);
    assert!(refused().ends_with("the default route leads through br0"));
    put(&host, "proc/net/ipv6_route", &v6.replace("br0", "lo"));
    binder.bind(&[host.nic(0)], Some("vfio-pci"), false).unwrap();
}

#[test]
fn bridges_unknown_drivers_and_missing_functions_are_refused() {
    let host = host();
    let binder = Binder::new(host.root());
    let bind =
        |function: &str, driver| binder.bind(&[function.parse().unwrap()], Some(driver), false).unwrap_err();
    for driver in ["vfio-pci", "nvme"] {
        assert!(matches!(bind("0000:16:00.0", driver), BindError::Group(GroupError::Bridge { .. })));
    }
    assert!(bind(DISK, "xe-vfio-pci").help().unwrap().contains("modprobe xe-vfio-pci"));
    let group = host.root().join("sys/bus/pci/devices/0000:21:00.0/iommu_group");
    fs::remove_file(group).unwrap();
    let error = bind(DISK, "xe-vfio-pci");
    assert!(matches!(error, BindError::Group(GroupError::NoGroup { .. })), "before its driver: {error}");
    assert!(matches!(bind(DISK, "../../x"), BindError::Name { .. }));
    assert!(matches!(bind("0000:ff:00.0", "vfio-pci"), BindError::Host(HostError::Missing { .. })));
}

#[test]
fn without_a_name_each_gets_what_the_kernel_has_for_it() {
    let host = host();
    for driver in ["nvgrace_gpu_vfio_pci", "xe-vfio-pci"] {
        put(&host, &format!("sys/bus/pci/drivers/{driver}/bind"), "");
    }
    let binder = Binder::new(host.root());
    let bound = |function: PciAddress| {
        let changes = binder.bind(&[function], None, false).unwrap();
        binder.undo(&[function]).unwrap();
        changes[0].now.clone().unwrap()
    };
    let modalias = "sys/bus/pci/devices/0000:21:00.0/modalias";
    put(&host, modalias, "pci:v000010DEd00002342sv000010DEsd000016EBbc03sc02i00\n");
    assert_eq!(bound(host.disk()), "vfio-pci", "no modules are known");
    put(&host, "proc/sys/kernel/osrelease", "7.3.4\n");
    let loadable = "alias vfio_pci:v000010DEd*sv*sd*bc*sc*i* xe-vfio-pci\n\
                    alias pci:v000010DEd00002342sv*sd*bc*sc*i* nouveau\n\
                    alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* ../../nvme\n";
    put(&host, "lib/modules/7.3.4/modules.alias", loadable);
    assert_eq!(bound(host.disk()), "xe-vfio-pci");
    let builtin = "vfio.license=GPL\0nvgrace_gpu_vfio_pci.alias=vfio_pci:v000010DEd00002342sv*sd*bc*sc*i*\0";
    put(&host, "lib/modules/7.3.4/modules.builtin.modinfo", builtin);
    assert_eq!(bound(host.disk()), "nvgrace_gpu_vfio_pci", "its alias leaves less open");
    assert_eq!(bound(host.nic(0)), "vfio-pci", "it is made for others");
    put(&host, "sys/bus/pci/devices/0000:18:00.0/modalias", "pci:v000010DEd00002342sv0sd0bc03sc02i00\n");
    put(&host, "sys/bus/pci/drivers_probe", "");
    assert_eq!(bound(host.gpu(0)), "vfio-pci", "a guest may have it");
    assert_eq!(wrote(&host, "sys/bus/pci/drivers_probe").unwrap(), "");
}
