//! Trust domains from the command line, on a host that is a folder: GPU 0009:01:00.0 reaches all of its region egm4.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, OpenOptions, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egm_address::{InRegion, Offset, PciAddress, SpanSet};
use egm_device::backing::{BackingError, RetiredListError};
use egm_device::broker::{Client, ClientError, LedgerSource, Server, SliceRequest};
use egm_device::carve::plan::Request;
use egm_device::ledger::{Identity, Ledger, Memory, Paths, Watch};
use egm_device::owner::Owner;
use egm_device::policy::{Names, parse};
use egm_device::region::{Region, Slice, Survey};
use egm_device::retired::Retired;
use egm_device::scrub::ScrubError;
use egm_device::{Anonymous, Backing};
use rustix::process::Uid;
use rustix::thread::set_thread_uid;

const GPU: &str = "0009:01:00.0";

/// A host folder. Tests take turns: a program that another test starts has this one's locks until its exec.
struct Host(tempfile::TempDir, #[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Memory in place of `/dev/egm4`, which this host lacks.
struct Instead;

impl Memory for Instead {
    fn open(&self, _: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        Ok(Box::new(Anonymous::new("egm4", slice.size.get(), None).unwrap()))
    }
    fn retired(&self, _: &Region, _: &dyn Backing) -> Result<Retired, RetiredListError> {
        Ok(Retired::default())
    }
    fn zero(
        &self,
        _: &dyn Backing,
        _: Offset,
        _: &SpanSet<InRegion>,
        _: &Watch<'_>,
    ) -> Result<(), ScrubError> {
        Ok(())
    }
}

impl Host {
    /// With all of egm4 clean: dirty bytes are scrubbed before a claim, and the program cannot open the region.
    fn new() -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let host = Self(tempfile::tempdir().unwrap(), turn);
        for (path, text) in [
            ("proc/cmdline", "\n"),
            ("proc/iomem", "00100000-3fffffff : System RAM\n"),
            ("proc/sys/kernel/random/boot_id", "a boot\n"),
            ("etc/machine-id", "a host\n"),
            ("sys/devices/system/node/online", "0\n"),
            ("sys/devices/system/node/node0/cpulist", "0\n"),
            ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 65536 kB\n"),
            ("sys/class/egm/egm4/egm_size", "0x4000000\n"),
            ("sys/class/egm/egm4/gpu_devices", "0009:01:00.0\n"),
        ] {
            let path = host.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let region = host.egm4();
        assert_eq!(region.functions, [GPU.parse::<PciAddress>().unwrap()]);
        host.ledger().scrub(&host.memory(), &region, None, &Watch::unobserved()).unwrap();
        host
    }

    fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.0.path().join(path)
    }

    fn ledger(&self) -> Ledger {
        Ledger::open(Paths::below(self.0.path()), Identity::read(self.0.path()).unwrap()).unwrap()
    }

    fn egm4(&self) -> Region {
        Survey::of(self.0.path(), &[]).regions.into_iter().find(|region| region.name == "egm4").unwrap()
    }

    fn memory(&self) -> Arc<dyn Memory> {
        Arc::new(Instead)
    }

    /// The GPU's VFIO group, a plain file in its place, with this owner.
    fn group_of(&self, uid: u32) -> PathBuf {
        let (device, node) = (self.path("sys/bus/pci/devices").join(GPU), self.path("dev/vfio/12"));
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(node.parent().unwrap()).unwrap();
        symlink("../../../../kernel/iommu_groups/12", device.join("iommu_group")).unwrap();
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&node).unwrap();
        chown(&node, Some(uid), None).unwrap();
        node
    }

    fn command(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_egm-device"));
        command.args(words.split(' ')).arg("--root").arg(self.0.path());
        command
    }

    /// Exit code, standard output and standard error.
    fn run(&self, words: &str) -> (i32, String, String) {
        let (words, script) = words.split_once(" -- ").unwrap_or((words, ""));
        let mut command = self.command(words);
        if !script.is_empty() {
            command.args(["--", "/bin/sh", "-c", script]);
        }
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
    }
}

/// A policy that is refused must not look like one without rules.
#[test]
fn a_policy_that_is_not_used_is_named_with_its_mistake() {
    let host = Host::new();
    let policy = host.path("etc/egm-device/policy.json");
    fs::create_dir_all(policy.parent().unwrap()).unwrap();
    let shown = |text: &str| {
        fs::write(&policy, text).unwrap();
        fs::set_permissions(&policy, Permissions::from_mode(0o644)).unwrap();
        let (code, _, error) = host.run("ledger show");
        assert_eq!(code, 0, "{error}");
        error
    };
    let error = shown(r#"{"rules": [{"name": "a", "user": 1, "regions": []}]}"#);
    assert!(error.contains("because the policy is not used: "), "{error}");
    if rustix::process::geteuid().is_root() {
        for part in ["\"regions\" is empty", "\n  1 | ", "help: name regions or kinds there"] {
            assert!(error.contains(part), "{error}");
        }
        let error = shown(r#"{"rules": [{"name": "a", "user": 1}]}"#);
        assert!(!error.contains("policy"), "{error}");
    }
    fs::remove_file(&policy).unwrap();
    let (_, _, error) = host.run("ledger show");
    assert!(!error.contains("policy"), "{error}");
}

/// A `carve grant` that has the GPU and waits for the end of its standard input.
fn holder(host: &Host, words: &str) -> Child {
    let words = format!("carve grant --region local --size 2MiB --name vm1 --gpu {GPU}{words}");
    let mut command = host.command(&words);
    let mut child = command
        .args(["--", "/bin/sh", "-c", "echo ready; read end; true"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    child
}

const SLICE: &str = "carve grant --region egm4 --size 2MiB --name vm2";

#[test]
fn a_gpu_without_a_slice_makes_its_region_exclusive_until_its_process_is_killed() {
    let host = Host::new();
    let mut child = holder(&host, "");
    let (code, _, error) = host.run(&format!("{SLICE} -- true"));
    assert_eq!(code, 3, "{error}");
    for part in [
        "cannot give a slice of region egm4 to vm2 (process ",
        "the region is exclusive to vm1 (process ",
        "which has GPU 0009:01:00.0",
        "help: take another region, or end the other owner; owners that trust each other have one \"trust_domain\"",
    ] {
        assert!(error.contains(part), "{error}");
    }
    for command in ["ledger show", "regions"] {
        let (_, shown, error) = host.run(command);
        let sentence =
            format!("Region egm4 is exclusive to vm1 (process {}, user 0) (GPU {GPU}).", child.id());
        assert!(shown.contains(&sentence), "{shown}{error}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // The command inherited the claim, and ends with its input.
    let free = || host.ledger().states(&host.egm4()).unwrap().gpus.is_empty();
    drop(child);
    while !free() {
        std::thread::yield_now();
    }
    let (_, _, error) = host.run(&format!("{SLICE} -- true"));
    assert!(!error.contains("exclusive"), "{error}");
}

/// A mistyped address would leave the region shared with the owner of the real GPU.
#[test]
fn a_gpu_that_the_host_lacks_is_refused_and_one_that_reaches_no_region_is_noted() {
    let host = Host::new();
    let take = "carve grant --region local --size 2MiB --gpu 0000:02:00.0 -- true";
    let (code, _, error) = host.run(take);
    assert_eq!(code, 3, "{error}");
    for part in ["cannot claim GPU 0000:02:00.0: this host has no such PCI function", "help: lspci -D"] {
        assert!(error.contains(part), "{error}");
    }
    fs::create_dir_all(host.path("sys/bus/pci/devices/0000:02:00.0")).unwrap();
    let (code, _, error) = host.run(take);
    assert!(code == 0 && error.contains("GPU 0000:02:00.0 reaches no region"), "{code} {error}");
}

#[test]
fn owners_of_one_trust_domain_share_the_region_of_a_gpu() {
    let host = Host::new();
    let mut child = holder(&host, " --trust-domain a");
    for (domain, refused) in [("", true), (" --trust-domain b", true), (" --trust-domain a", false)] {
        // A permitted request goes on to the memory, which a copy of a host lacks.
        let (code, _, error) = host.run(&format!("{SLICE}{domain} -- true"));
        assert_eq!(error.contains("the region is exclusive to vm1 (process "), refused, "{error}");
        assert!(code == 3 || !refused && error.contains("cannot open region \"egm4\""), "{code} {error}");
    }
    let (_, shown, _) = host.run("ledger show");
    let sentence = format!(
        "Region egm4 is exclusive to trust domain \"a\" (GPU {GPU} of vm1 (process {}, user 0)).",
        child.id()
    );
    assert!(shown.contains(&sentence), "{shown}");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert!(host.ledger().states(&host.egm4()).unwrap().gpus.is_empty());
}

/// The rule of a user, not its request, decides which domain its slices are in.
#[test]
fn a_broker_gives_a_slice_of_an_exclusive_region_to_users_of_its_domain_alone() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    let host = Host::new();
    fs::set_permissions(host.path(""), Permissions::from_mode(0o755)).unwrap();
    let policy = r#"{"rules": [
        {"name": "a", "user": 4001, "regions": ["egm"], "whole_device": true, "trust_domain": "a"},
        {"name": "b", "user": 4002, "regions": ["egm"], "whole_device": true, "trust_domain": "b"},
        {"name": "none", "user": 4003, "regions": ["egm"], "whole_device": true}
    ]}"#;
    let policy = parse(policy, &Names::default()).unwrap();
    let source = LedgerSource::new(host.ledger(), vec![host.egm4()]).reaching(host.memory());
    let socket = host.path("broker.sock");
    let mut server = Server::listen(&socket, policy, Arc::new(source)).unwrap();
    std::thread::spawn(move || server.run());
    let take = |uid| {
        let take = SliceRequest {
            name: "vm2".to_owned(),
            regions: vec!["egm4".to_owned()],
            size: 2 << 20,
            align: 0,
            class: None,
            wait: false,
        };
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                set_thread_uid(Uid::from_raw(uid)).unwrap(); // of this thread alone
                Client::connect(&socket).unwrap().take(&take, |_| {})
            });
            thread.join().unwrap()
        })
    };
    let mut child = holder(&host, " --trust-domain a");
    for uid in [4002, 4003] {
        assert!(matches!(take(uid), Err(ClientError::Refused { .. })), "user {uid} has a slice");
        let log = fs::read_to_string(egm_device::audit::Paths::below(&host.path("")).file).unwrap();
        let last = log.lines().last().unwrap();
        assert!(last.contains("refusal") && last.contains("the region is exclusive to vm1"), "{last}");
    }
    let lease = take(4001).unwrap();
    assert_eq!(lease.slice().size.get(), 2 << 20);
    drop(lease);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_gpu_is_refused_while_another_owner_has_a_slice_of_its_region() {
    let host = Host::new();
    let request = Request::new(2 << 20, Owner::this("vm2"));
    let lease =
        host.ledger().grant_from(&host.memory(), &host.egm4(), &request, &Watch::unobserved()).unwrap();
    let take = format!("carve grant --region local --size 2MiB --name vm1 --gpu {GPU} -- true");
    let (code, _, error) = host.run(&take);
    assert_eq!(code, 3, "{error}");
    assert!(
        error.contains("cannot give GPU 0009:01:00.0, which reaches all of region egm4, to vm1 (process "),
        "{error}"
    );
    drop(lease);
    host.ledger().scrub(&host.memory(), &host.egm4(), None, &Watch::unobserved()).unwrap();
    let (code, _, error) = host.run(&take);
    assert_eq!(code, 0, "{error}");
}

/// The users of a GPU do not use the ledger, so every request of a slice is checked against them.
#[test]
fn a_region_is_refused_to_every_taker_while_another_user_may_open_its_gpu() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root gives a file to another user");
    }
    let host = Host::new();
    let node = host.group_of(1000);
    fs::create_dir_all(host.path("etc/egm-device")).unwrap();
    let policy = r#"{"rules": [{"name": "a", "user": 1000, "trust_domain": "a"}]}"#;
    fs::write(host.path("etc/egm-device/policy.json"), policy).unwrap();
    fs::write(
        host.path("serve.json"),
        r#"{"devices": [{"name": "vm2", "region": "egm4", "size": "2MiB", "socket": "vm2.sock"}]}"#,
    )
    .unwrap();
    let serve = format!("serve --config {}", host.path("serve.json").display());
    let gpu = format!("carve grant --region local --size 2MiB --name vm2 --gpu {GPU} -- true");
    let user = format!("user 1000 (may open {})", node.display());
    for taker in [&format!("{SLICE} -- true"), &format!("{SLICE} --trust-domain b -- true"), &gpu, &serve] {
        let (code, _, error) = host.run(taker);
        let refusal = format!("the region is exclusive to {user} of trust domain \"a\", which has GPU {GPU}");
        assert!(code == 3 && error.contains(&refusal), "{taker}: {code} {error}");
    }
    let (_, shown, _) = host.run("ledger show");
    assert!(shown.contains(&format!("exclusive to trust domain \"a\" (GPU {GPU} of {user})")), "{shown}");
    let (_, _, error) = host.run(&format!("{SLICE} --trust-domain a -- true"));
    assert!(error.contains("cannot open region \"egm4\""), "{error}");
    chown(&node, Some(0), None).unwrap();
    let (_, _, error) = host.run(&format!("{SLICE} -- true"));
    assert!(error.contains("cannot open region \"egm4\""), "{error}");
}

#[test]
fn a_claim_lasts_while_a_child_of_its_owner_keeps_the_gpu() {
    let host = Host::new();
    let (node, end) = (host.group_of(0), host.path("end"));
    rustix::fs::mknodat(rustix::fs::CWD, &end, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .unwrap();
    let child = format!("exec 9> {} > /dev/null 2>&1; cat >&9 < {} & true", node.display(), end.display());
    let take = format!("carve grant --region local --size 2MiB --name vm1 --gpu {GPU} -- {child}");
    let (code, _, error) = host.run(&take);
    assert_eq!(code, 0, "{error}");
    let (code, _, error) = host.run(&format!("{SLICE} -- true"));
    assert_eq!(code, 3, "{error}");
    for part in [
        "exclusive to vm1 (process ",
        "its GPU is in use: a VFIO group, device or iommufd of the last owner in process",
    ] {
        assert!(error.contains(part), "{error}");
    }
    let (_, shown, _) = host.run("ledger repair");
    assert!(!shown.contains(GPU), "{shown}");
    drop(OpenOptions::new().write(true).open(&end).unwrap());
    while host.run(&format!("{SLICE} -- true")).2.contains("exclusive") {
        std::thread::yield_now();
    }
    assert!(host.ledger().states(&host.egm4()).unwrap().gpus.is_empty());
}
