//! The readers of the installed files understand them: systemd, udev, and our own command line.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod small_host;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use egm_device::audit::Paths;
use egm_device::policy::{self, Accounts, Decision, Names, Peer, RegionRequest, Supply};
use egm_device::serve;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-device");
const INSTALLED: &str = "/usr/local/bin/egm-device";
const UNITS: [&str; 3] = ["egm-broker.service", "egm-serve@.service", "egm-serve@.socket"];

fn config(name: &str) -> String {
    fs::read_to_string(Path::new("../configs").join(name)).unwrap()
}

/// Whether `program` is installed; prints a skip where it is not.
fn is_there(program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok();
    if !there {
        println!("skipped: {program} is not installed, it did not read what is written for it");
    }
    there
}

#[track_caller]
fn good(output: Output) -> String {
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn systemd_takes_the_units_without_a_word() {
    if !is_there("systemd-analyze") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let names = UNITS.map(|name| name.replace('@', "@vm1"));
    for (unit, name) in UNITS.iter().zip(&names) {
        // The program is not installed where this runs.
        let text = config(&format!("systemd/{unit}")).replace(INSTALLED, PROGRAM);
        fs::write(folder.path().join(name), text).unwrap();
    }
    let mut systemd = Command::new("systemd-analyze");
    systemd.args(["verify", "--man=no"]).args(&names).current_dir(folder.path());
    let said =
        good(systemd.env("SYSTEMD_UNIT_PATH", format!("{}:", folder.path().display())).output().unwrap());
    assert!(!said.contains("egm-"), "{said}");
}

/// 0 is the fewest privileges of a service, 10 the most.
#[test]
fn services_keep_few_privileges_and_leave_no_core_dumps() {
    for unit in &UNITS[..2] {
        assert!(config(&format!("systemd/{unit}")).contains("\nLimitCORE=0\n"), "{unit}");
    }
    if !is_there("systemd-analyze") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for unit in &UNITS[..2] {
        let path = folder.path().join(unit.replace('@', "@vm1"));
        fs::write(&path, config(&format!("systemd/{unit}"))).unwrap();
        let mut systemd = Command::new("systemd-analyze");
        // In tenths: more than 3.0 is an error.
        good(systemd.args(["security", "--offline=yes", "--threshold=30"]).arg(path).output().unwrap());
    }
}

/// Groups and others get no memory device: past the ledger they would read and write every tenant's bytes.
#[test]
fn no_rule_gives_a_memory_device_to_a_group() {
    let rules = config("udev/70-egm.rules");
    let active = rules.lines().filter(|line| !line.starts_with('#'));
    // Rules that set an owner, a group or a mode name one subsystem each, of functions that are assigned by VFIO.
    let given =
        active.filter(|line| ["OWNER=", "GROUP=", "MODE=", "RUN"].iter().any(|key| line.contains(key)));
    let subsystems: Vec<_> = given
        .map(|line| line.split(", ").find_map(|part| part.strip_prefix("SUBSYSTEM==")).unwrap_or("any"))
        .collect();
    assert_eq!(subsystems, ["\"vfio\"", "\"vfio-dev\"", "\"misc\""], "{rules}");
    let misc = rules.lines().find(|line| line.starts_with("SUBSYSTEM==\"misc\"")).unwrap();
    assert!(misc.contains("KERNEL==\"iommu\""), "{misc}");
}

/// A GPU that reaches an EGM region reaches every tenant's bytes. The rules' checks run on functions in a folder.
#[test]
fn the_rules_give_a_group_no_function_of_nvidia() {
    let folder = tempfile::tempdir().unwrap();
    let sys = folder.path();
    for (group, function, device, vendor) in
        [("7", "0002:01:00.0", "vfio0", "0x144d"), ("12", "0009:01:00.0", "vfio3", "0x10de")]
    {
        let path = sys.join("devices/pci").join(function);
        fs::create_dir_all(path.join("vfio-dev").join(device)).unwrap();
        fs::write(path.join("vendor"), format!("{vendor}\n")).unwrap();
        let group = sys.join("kernel/iommu_groups").join(group).join("devices");
        fs::create_dir_all(&group).unwrap();
        std::os::unix::fs::symlink(&path, group.join(function)).unwrap();
    }
    let rules = config("udev/70-egm.rules");
    for (subsystem, names) in [
        ("vfio", [("7", "/devices/virtual/vfio/7"), ("12", "/devices/virtual/vfio/12")]),
        (
            "vfio-dev",
            [
                ("vfio0", "/devices/pci/0002:01:00.0/vfio-dev/vfio0"),
                ("vfio3", "/devices/pci/0009:01:00.0/vfio-dev/vfio3"),
            ],
        ),
    ] {
        let start = format!("SUBSYSTEM==\"{subsystem}\", ");
        let lines: Vec<_> = rules.lines().filter(|line| line.starts_with(&start)).collect();
        assert_eq!(lines.len(), 1, "{lines:?}");
        let (_, program) = lines[0].split_once("PROGRAM==\"/bin/sh -c '").unwrap();
        let (script, _) = program.split_once("'\"").unwrap();
        let gives = names.map(|(name, path)| {
            let script =
                script.replace("/sys", sys.to_str().unwrap()).replace("%k", name).replace("%p", path);
            Command::new("/bin/sh").args(["-c", &script]).status().unwrap().success()
        });
        assert_eq!(gives, [true, false], "{script}");
    }
}

/// With `ProtectSystem=strict` the broker writes below these folders only.
#[test]
fn the_broker_s_unit_lets_it_write_the_audit_log() {
    let unit = config("systemd/egm-broker.service");
    let values = |key: &str| values(&unit, key);
    let below =
        |folder: &str, key| values(key).into_iter().map(|name| Path::new(folder).join(name)).collect();
    let writable: [Vec<PathBuf>; 3] = [
        below("/", "ReadWritePaths"),
        below("/var/lib", "StateDirectory"),
        below("/var/log", "LogsDirectory"),
    ];
    let paths = Paths::below("/".as_ref());
    for path in [&paths.file, &paths.findings, &paths.journal, Path::new("/var/lib/egm-device/ledger.json")] {
        assert!(writable.iter().flatten().any(|folder| path.starts_with(folder)), "{}", path.display());
    }
    assert_eq!(values("LogsDirectoryMode"), ["0700"]);
}

/// The broker works with the capabilities of the unit's bounding set alone.
#[test]
fn the_broker_starts_and_serves_with_the_capabilities_of_its_unit() {
    use egm_device::broker::{Client, SliceRequest};
    if !rustix::process::geteuid().is_root() || Path::new("/etc/egm-device/policy.json").exists() {
        return println!("skipped: this test takes slices as root, where the host has no policy of its own");
    }
    let unit = config("systemd/egm-broker.service");
    let set = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let set = set.split(' ').map(|name| name.strip_prefix("CAP_").unwrap().to_lowercase());
    let bounding = set.fold("-all".to_owned(), |all, name| format!("{all},+{name}"));
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    small_host::make(root);
    let mut broker = Command::new("setpriv")
        .args([&format!("--bounding-set={bounding}"), "--no-new-privs", PROGRAM])
        .args(["broker", "--socket", "broker.sock", "--root"])
        .arg(root)
        .current_dir(root)
        .spawn()
        .unwrap();
    let socket = root.join("broker.sock");
    let client = loop {
        match Client::connect(&socket) {
            Ok(client) => break client,
            Err(_) => assert!(broker.try_wait().unwrap().is_none(), "the broker ended"),
        }
        std::thread::yield_now();
    };
    let take = SliceRequest {
        name: "vm7".into(),
        regions: vec!["local".into()],
        size: 4 << 20,
        align: 0,
        class: None,
        wait: false,
    };
    let taken = client.take(&take, |_| {});
    broker.kill().unwrap();
    broker.wait().unwrap();
    assert!(taken.is_ok(), "{taken:?}");
}

#[test]
fn our_command_line_takes_the_commands_of_the_units() {
    let mut count = 0;
    for line in UNITS.iter().flat_map(|unit| {
        let text = config(&format!("systemd/{unit}"));
        text.lines().filter_map(|line| line.strip_prefix("ExecStart=")).map(str::to_owned).collect::<Vec<_>>()
    }) {
        let words = line.strip_prefix(INSTALLED).unwrap().replace("%i", "vm1");
        // The arguments before `--help` are parsed, and refused if they are wrong; then the help ends it.
        good(Command::new(PROGRAM).args(words.split_whitespace()).arg("--help").output().unwrap());
        count += 1;
    }
    assert_eq!(count, 2);
}

/// The values of `key` in a unit.
fn values(unit: &str, key: &str) -> Vec<String> {
    let lines = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    lines.flat_map(|value| value.split(' ')).map(str::to_owned).collect()
}

/// Every client maps the slice: at first only the server's user may connect.
#[test]
fn the_socket_of_a_device_is_its_server_s_alone() {
    let unit = config("systemd/egm-serve@.socket");
    assert_eq!(values(&unit, "SocketMode"), ["0600"]);
    assert_eq!(values(&unit, "SocketUser"), values(&config("systemd/egm-serve@.service"), "User"));
}

/// A stop asks the guest, waits for it, and scrubs the slice; systemd kills a server that is late, and its slice stays dirty.
#[test]
fn a_server_has_time_to_scrub_the_largest_device_of_the_sample() {
    let unit = config("systemd/egm-serve@.service");
    let [limit] = &*values(&unit, "TimeoutStopSec") else { panic!("{unit}") };
    let limit: u64 = limit.strip_suffix("min").unwrap().parse::<u64>().unwrap() * 60;
    let sample: serde_json::Value = serde_json::from_str(&config("serve/grace.json")).unwrap();
    let size = |device: &serde_json::Value| -> u64 {
        device["size"].as_str().unwrap().strip_suffix("GiB").unwrap().parse().unwrap()
    };
    let largest = sample["devices"].as_array().unwrap().iter().map(size).max().unwrap();
    let help = good(Command::new(PROGRAM).args(["serve", "--help"]).output().unwrap());
    let (_, timeout) = help.split_once("--timeout").unwrap();
    let (_, timeout) = timeout.split_once("[default: ").unwrap();
    let timeout: u64 = timeout.split(']').next().unwrap().parse().unwrap();
    // The unit's comment counts on 1 GiB/s.
    assert!(limit >= timeout + largest, "{limit} s for {timeout} s and {largest} GiB");
}

#[test]
fn users_and_folders_are_made() {
    if !is_there("systemd-sysusers") || !is_there("systemd-tmpfiles") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("etc")).unwrap();
    let make = |program: &str, options: &[&str], file: &str| {
        let mut command = Command::new(program);
        command.arg(format!("--root={}", root.path().display())).args(options).arg("-");
        command.stdin(File::open(Path::new("../configs/systemd").join(file)).unwrap());
        good(command.output().unwrap());
    };
    make("systemd-sysusers", &[], "egm-sysusers.conf");
    make("systemd-tmpfiles", &["--create"], "egm-tmpfiles.conf");
    let group = fs::read_to_string(root.path().join("etc/group")).unwrap();
    assert!(group.lines().any(|line| line.starts_with("egm:") && line.ends_with(":egm-serve")), "{group}");
    for folder in ["run/egm-serve", "etc/egm-vmm"] {
        assert!(root.path().join(folder).is_dir(), "{folder}");
    }
}

#[test]
fn the_samples_of_devices_have_their_sockets_where_the_units_have_them() {
    let unit = config("systemd/egm-serve@.socket");
    let pattern = unit.lines().find_map(|line| line.strip_prefix("ListenStream=")).unwrap();
    for sample in ["grace.json", "hugetlb.json"] {
        let devices = serve::load(&Path::new("../configs/serve").join(sample), None).unwrap();
        for device in devices {
            let socket = pattern.replace("%i", &device.name);
            assert_eq!(device.socket.as_deref(), Some(Path::new(&socket)), "{sample}");
        }
    }
}

/// The units start a server of the sample as a user that the sample of a policy names; else the first client finds none.
#[test]
fn the_sample_policy_grants_the_sample_of_devices_to_the_user_of_the_units() {
    const GIB: u64 = 1 << 30;
    let [user] = &*values(&config("systemd/egm-serve@.service"), "User") else { panic!("no user") };
    let names = Names::new(&format!("{user}:x:990:991::/:/bin/sh"), "egm:x:991:");
    let policy = policy::parse(&config("policy/sample.json"), &names).unwrap();
    let server = Peer { uid: 990, gids: vec![] };
    for device in serve::load("../configs/serve/hugetlb.json".as_ref(), None).unwrap() {
        let pool = Supply {
            region: "hugetlb-2m-node0".into(),
            kind: device.region,
            page_size: 2 << 20,
            usable: 512 * GIB,
            free: 512 * GIB,
            largest: 512 * GIB,
            shares_file: false,
        };
        let request = RegionRequest { size: device.size.get(), class: None };
        let decision =
            policy.decide(&server, request, &pool, &Accounts::default(), std::slice::from_ref(&pool));
        assert!(matches!(decision, Decision::Allowed(_)), "{decision:?}");
    }
}

#[test]
fn udev_takes_the_rules() {
    if !is_there("udevadm") {
        return;
    }
    let mut udevadm = Command::new("udevadm");
    let output =
        udevadm.args(["verify", "--resolve-names=never", "../configs/udev/70-egm.rules"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("Unknown command verb") {
        println!("skipped: udevadm is older than \"verify\" (systemd 254), it did not read the rules");
        return;
    }
    good(output);
}
