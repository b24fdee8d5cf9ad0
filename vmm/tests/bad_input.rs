//! Refusals of mistaken configurations and of hosts that lack something: each is an exit code, and a message that
//! names the thing, the value, the rule and the remedy.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use egm_fixtures::payload::{Entry, Ports};
use serde_json::{Value, json};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");
/// Exit codes, as `Blame` has them (vfio/report/src/report.rs).
const CONFIGURATION: i32 = 2;
const HOST: i32 = 3;

/// A folder with a kernel that powers off at once, and a configuration file `vm.json` in it.
struct Machine {
    folder: TempDir,
    config: Value,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("kernel"), egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh))
            .unwrap();
        let config =
            json!({ "memory": { "size": "64MiB" }, "boot": { "kernel": "kernel" }, "console": "null" });
        Self { folder, config }
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    fn booting(mut self, key: &str, file: &str) -> Self {
        self.config["boot"][key] = json!(file);
        self
    }

    /// Puts a file beside the configuration.
    fn file(self, name: &str, content: &[u8]) -> Self {
        fs::write(self.folder.path().join(name), content).unwrap();
        self
    }

    /// Puts a file of `size` zeros beside the configuration.
    fn zeros(self, name: &str, size: u64) -> Self {
        File::create(self.folder.path().join(name)).unwrap().set_len(size).unwrap();
        self
    }

    fn run(&self) -> Outcome {
        self.run_by(&[])
    }

    /// A copy of the program beside the configuration, for users without access to a temporary folder or to the folder
    /// that this program was built in.
    fn for_others(&self) -> PathBuf {
        fs::set_permissions(self.folder.path(), Permissions::from_mode(0o755)).unwrap();
        fs::write(self.folder.path().join("vm.json"), self.config.to_string()).unwrap();
        let program = self.folder.path().join("egm-vmm");
        fs::copy(PROGRAM, &program).unwrap();
        program
    }

    /// Runs the program as the last argument of the command `wrapper`.
    fn run_by(&self, wrapper: &[&str]) -> Outcome {
        let file = self.folder.path().join("vm.json");
        fs::write(&file, self.config.to_string()).unwrap();
        run_command(wrapper, &[PROGRAM, "run", "vm.json"], self.folder.path())
    }
}

#[derive(Debug)]
struct Outcome {
    code: Option<i32>,
    messages: String,
}

/// Runs a command that has a minute.
fn run_command(wrapper: &[&str], command: &[&str], folder: &Path) -> Outcome {
    let output = Command::new("timeout")
        .args(["--signal=KILL", "60"])
        .args(wrapper)
        .args(command)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Outcome { code: output.status.code(), messages: String::from_utf8(output.stderr).unwrap() }
}

impl Outcome {
    /// The message begins as errors do and contains all of `parts`, in that order.
    #[track_caller]
    fn refuses(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.messages);
        let mut rest = self.messages.strip_prefix("error: ").unwrap_or_else(|| panic!("{}", self.messages));
        for part in parts {
            let at = rest.find(part).unwrap_or_else(|| panic!("no {part:?} in\n{}", self.messages));
            rest = &rest[at + part.len()..];
        }
    }
}

/// Whether KVM is available, without which nothing after it is opened; prints why not.
fn kvm() -> bool {
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    opened.inspect_err(|error| println!("skipped: /dev/kvm: {error}")).is_ok()
}

/// Runs a machine that gets as far as the hypervisor.
#[track_caller]
fn refuses_with_kvm(machine: &Machine, code: i32, parts: &[&str]) {
    if kvm() {
        machine.run().refuses(code, parts);
    }
}

#[test]
fn without_a_mistake_the_machine_runs() {
    if kvm() {
        let outcome = Machine::new().run();
        assert_eq!((outcome.code, outcome.messages.as_str()), (Some(0), ""));
    }
}

/// The unprivileged machine would keep a connection with root's rights.
#[test]
fn another_user_and_a_broker_at_once() {
    let outcome = run_command(
        &[],
        &[PROGRAM, "run", "vm.json", "--user", "65534", "--broker", "none.sock"],
        Path::new("/"),
    );
    outcome.refuses(CONFIGURATION, &["'--user <NAME>' cannot be used with '--broker <SOCKET>'"]);
}

/// The configuration on standard input, of a working directory with its files.
#[test]
fn a_configuration_on_standard_input() {
    let machine = Machine::new().with("cpus", json!({ "count": 0 })).with("egn", json!([]));
    let path = machine.folder.path().join("vm.json");
    fs::write(&path, machine.config.to_string()).unwrap();
    for command in ["run -", "plan -", "check -", "export qemu --config -"] {
        let shell = format!("{PROGRAM} {command} < vm.json");
        let outcome = run_command(&[], &["sh", "-c", &shell], machine.folder.path());
        outcome.refuses(
            CONFIGURATION,
            &["<stdin>:1:", "cpus.count: 0 is outside", "\nerror: <stdin>:1:", "\"egn\""],
        );
    }
    fs::write(&path, Machine::new().config.to_string()).unwrap();
    let plan = Command::new("sh")
        .args(["-c", &format!("{PROGRAM} plan - --json < vm.json")])
        .current_dir(machine.folder.path())
        .output()
        .unwrap();
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!((plan["name"].as_str(), plan["boot"]["kernel"].as_str()), (Some("stdin"), Some("kernel")));
}

#[test]
fn a_configuration_that_is_not_there() {
    let outcome = run_command(&[], &[PROGRAM, "run", "none.json"], Path::new("/"));
    outcome.refuses(CONFIGURATION, &["none.json", "No such file", "help: name a configuration file"]);
}

#[test]
fn a_kernel_that_is_no_file() {
    let help = "help: set \"boot.kernel\" to a regular file";
    let booting = |kernel| Machine::new().booting("kernel", kernel).run();
    booting("none").refuses(CONFIGURATION, &["boot.kernel ", "none", "No such file", help]);
    booting(".").refuses(CONFIGURATION, &["boot.kernel ", "is a directory", help]);
    booting("/dev/zero").refuses(CONFIGURATION, &["boot.kernel /dev/zero", "not a regular file", help]);
}

#[test]
fn a_file_that_is_no_kernel() {
    let help = "help: set \"boot\".\"kernel\" to a whole 64-bit bzImage or vmlinux";
    let text = Machine::new().file("kernel", "not a kernel, but long enough. ".repeat(9).as_bytes());
    refuses_with_kvm(
        &text,
        CONFIGURATION,
        &["cannot boot", "neither a bzImage nor", "[6e, 6f, 74, 20]", help],
    );
    let empty = Machine::new().file("kernel", b"");
    refuses_with_kvm(
        &empty,
        CONFIGURATION,
        &["cannot boot", "empty or cut short", "has 0 B of at least 64 B", help],
    );
    let elf = Machine::new().file("kernel", &egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh)[..200]);
    refuses_with_kvm(&elf, CONFIGURATION, &["cannot boot", "damaged or does not fit", help]);
}

/// The header of a bzImage, with the size of the rest (Linux boot.rst).
fn bzimage_header(kernel_bytes: u32) -> Vec<u8> {
    let mut image = vec![0; 0x400];
    image[0x1f1] = 1; // setup_sects
    image[0x1f4..0x1f8].copy_from_slice(&(kernel_bytes / 16).to_le_bytes()); // syssize
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes()); // version
    image[0x211] = 1; // loadflags: loaded high
    image[0x214..0x218].copy_from_slice(&0x10_0000_u32.to_le_bytes()); // code32_start
    image[0x236] = 1; // xloadflags: 64-bit entry
    image
}

/// Debian's kernel, where the lab has fetched one.
fn stock_kernel() -> Option<PathBuf> {
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
    let folders = fs::read_dir(cache.join("egm-lab")).ok()?.flatten();
    let guest = folders.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"guest-"));
    guest.map(|entry| entry.path().join("vmlinuz")).find(|path| path.exists())
}

#[test]
fn a_bzimage_that_is_cut_short() {
    let mut image = bzimage_header(0x10_0000);
    image.resize(0x1_0000, 0);
    let help = "help: set \"boot\".\"kernel\" to a whole";
    let cut = Machine::new().file("kernel", &image);
    refuses_with_kvm(&cut, CONFIGURATION, &["cut short", "has 64 KiB of at least 1025 KiB", help]);
    let Some(stock) = stock_kernel() else {
        return println!("skipped: Debian's kernel is not in the lab's cache yet: scripts/lab");
    };
    let whole = fs::read(stock).unwrap();
    let cut = Machine::new().file("kernel", &whole[..whole.len() / 2]);
    refuses_with_kvm(&cut, CONFIGURATION, &["cut short", " of at least ", help]);
}

#[test]
fn a_kernel_that_needs_more_memory_than_the_guest_has() {
    let mut image = bzimage_header(0);
    image[0x260..0x264].copy_from_slice(&0x800_0000_u32.to_le_bytes()); // init_size
    let large = Machine::new().file("kernel", &image);
    let help = "help: raise \"memory\".\"size\"\n";
    let parts = ["the kernel needs 129 MiB of memory", "has 64 MiB there", help];
    refuses_with_kvm(&large, CONFIGURATION, &parts);
    let mut image = bzimage_header(8 << 20);
    image.resize(9 << 20, 0);
    let tiny = Machine::new().file("kernel", &image).with("memory", json!({ "size": "4MiB" }));
    refuses_with_kvm(&tiny, CONFIGURATION, &["the kernel needs 10 MiB of memory", "has 4 MiB there", help]);
}

#[test]
fn an_initramfs_that_cannot_be_loaded() {
    let large = Machine::new().booting("initramfs", "initrd").zeros("initrd", 128 << 20);
    let parts = [
        "the initramfs of 128 MiB",
        "does not fit between",
        "MiB too few",
        "help: raise \"memory\".\"size\"",
    ];
    refuses_with_kvm(&large, CONFIGURATION, &parts);
    let empty = Machine::new().booting("initramfs", "initrd").zeros("initrd", 0);
    let parts = [
        "cannot boot ",
        "initrd\n",
        "initramfs is empty",
        "help: set \"boot\".\"initramfs\" to a cpio archive, or leave it out",
    ];
    refuses_with_kvm(&empty, CONFIGURATION, &parts);
    // The kernel reports a page as the size of this file of one line.
    let short = Machine::new().booting("initramfs", "/sys/kernel/mm/transparent_hugepage/enabled");
    let parts = ["cannot boot /sys/kernel/mm/", "at 4 KiB", "help: set \"boot\".\"initramfs\""];
    refuses_with_kvm(&short, CONFIGURATION, &parts);
    let missing = Machine::new().booting("initramfs", "initrd");
    missing.run().refuses(CONFIGURATION, &["boot.initramfs", "initrd", "No such file", "help: "]);
}

#[test]
fn more_memory_than_the_host_has() {
    let outcome = Machine::new().with("memory", json!({ "size": "4TiB" })).run();
    outcome.refuses(
        HOST,
        &["guest memory needs 4 TiB", "the host has", " too few\n", "help: lower \"memory.size\"\n"],
    );
}

#[test]
fn a_hugepage_pool_that_is_too_small() {
    let pool = "/sys/kernel/mm/hugepages/hugepages-1048576kB";
    if !Path::new(pool).exists() {
        return println!("skipped: no {pool}");
    }
    let free = fs::read_to_string(Path::new(pool).join("free_hugepages")).unwrap();
    if free.trim() != "0" {
        return println!("skipped: {pool} has {} free", free.trim());
    }
    let outcome = Machine::new().with("memory", json!({ "size": "1GiB", "page_size": "1G" })).run();
    let file = format!("{pool}/nr_hugepages");
    outcome.refuses(HOST, &["needs 1 free huge page of 1GiB", "has 0", "help: echo ", &file, "\"auto\""]);
}

#[test]
fn vcpus_on_processors_that_the_host_lacks() {
    let outcome = Machine::new().with("cpus", json!({ "count": 1, "affinity": "4000" })).run();
    outcome.refuses(HOST, &["vCPU 0", "host CPU 4000", "the host has CPUs 0", "help: change \"cpus\""]);
}

#[test]
fn nodes_that_are_the_same() {
    let nodes = json!([{ "id": 0, "size": "32MiB", "cpus": "0" }, { "id": 0, "size": "32MiB" }]);
    let outcome = Machine::new().with("memory", json!({ "nodes": nodes })).run();
    outcome.refuses(CONFIGURATION, &["vm.json:1:", "memory.nodes[1].id: node 0", "choose another number"]);
    let slice = json!([{ "region": "local", "size": "2MiB", "node": 0 }]);
    let outcome = Machine::new().with("egm", slice).run();
    outcome.refuses(CONFIGURATION, &["vm.json:1:", "egm[0].node: node 0", "choose another number"]);
    let nodes =
        json!([{ "id": 0, "size": "32MiB", "cpus": "0-1" }, { "id": 1, "size": "32MiB", "cpus": "1" }]);
    let outcome =
        Machine::new().with("cpus", json!({ "count": 2 })).with("memory", json!({ "nodes": nodes })).run();
    outcome.refuses(CONFIGURATION, &["vm.json:1:", "memory.nodes[1].cpus: vCPU 1"]);
}

#[test]
fn an_egm_region_that_the_host_lacks() {
    let slice = json!([{ "region": "egm4", "size": "2MiB", "node": 1 }]);
    let outcome = Machine::new().with("egm", slice).run();
    outcome.refuses(HOST, &["slice 0", "\"egm4\"", "the host has ", "help: ", "\"egm-device regions\""]);
    for (typed, meant) in [("locla", "local"), ("memfdd", "memfd"), ("hugtlb", "hugetlb")] {
        let slice = json!([{ "region": typed, "size": "2MiB", "node": 1 }]);
        let outcome = Machine::new().with("egm", slice).run();
        outcome.refuses(HOST, &["slice 0", typed, &format!("help: did you mean \"{meant}\"? ")]);
    }
}

#[test]
fn a_slice_that_is_a_device_near_no_node() {
    let slice = json!([{ "region": "local", "size": "2MiB", "node": 4, "as": "device" }]);
    let outcome = Machine::new().with("egm", slice).run();
    outcome.refuses(CONFIGURATION, &["egm[0].node", "no node \"4\""]);
}

#[test]
fn two_devices_that_claim_one_thing() {
    let share = "they cannot share it, choose another";
    let cases = [
        ("id", json!({ "type": "virtio-rng", "id": "a" }), "id \"a\"", "choose another"),
        ("path", json!({ "type": "virtio-blk", "path": "disk" }), "disk", share),
        ("tap", json!({ "type": "virtio-net", "tap": "t0" }), "tap t0", share),
        ("type", json!({ "type": "virtio-vsock", "cid": 3 }), "virtio-vsock", "remove one"),
        ("function", json!({ "type": "vfio", "function": "0009:01:00.0" }), "0009:01:00.0", share),
        ("socket", json!({ "type": "vfio-user", "socket": "s" }), "socket ", share),
    ];
    for (key, device, value, rule) in cases {
        let outcome = Machine::new().with("devices", json!([device, device])).run();
        let parts = ["vm.json:1:", &format!("devices[1].{key}: "), value, "devices[0]", rule];
        outcome.refuses(CONFIGURATION, &parts);
    }
    let sockets = json!([
        { "type": "virtio-vsock", "cid": 3, "socket": "s" },
        { "type": "vfio-user", "socket": "s" },
    ]);
    let outcome = Machine::new().with("devices", sockets).run();
    outcome.refuses(CONFIGURATION, &["devices[1].socket: ", "devices[0].socket", share]);
}

#[test]
fn a_console_on_a_devices_path() {
    let outcome = Machine::new()
        .with("devices", json!([{ "type": "virtio-blk", "path": "disk" }]))
        .with("console", json!({ "type": "file", "path": "disk" }))
        .zeros("disk", 1 << 20)
        .run();
    outcome.refuses(CONFIGURATION, &["console.path: ", "disk", "devices[0].path", "choose another"]);
}

#[test]
fn a_disk_by_two_names() {
    let devices = json!([{ "type": "virtio-blk", "path": "disk" }, { "type": "virtio-blk", "path": "link" }]);
    let machine = Machine::new().with("devices", devices).zeros("disk", 1 << 20);
    symlink("disk", machine.folder.path().join("link")).unwrap();
    let parts = ["device \"blk1\"", "link is in use", "help: give each its own disk"];
    refuses_with_kvm(&machine, CONFIGURATION, &parts);
}

#[test]
fn a_file_that_is_no_disk() {
    let disk = |path: &str, read_only: bool| {
        let device = json!({ "type": "virtio-blk", "path": path, "read_only": read_only });
        Machine::new().with("devices", json!([device]))
    };
    for read_only in [false, true] {
        let missing = disk("none", read_only);
        let parts = ["device \"blk0\"", "none", "No such file", "help: set \"path\""];
        refuses_with_kvm(&missing, CONFIGURATION, &parts);
        let parts =
            ["device \"blk0\"", "regular file or a block device", "help: set \"path\" to a raw disk image"];
        refuses_with_kvm(&disk(".", read_only), CONFIGURATION, &parts);
        let pipe = disk("pipe", read_only);
        let made = Command::new("mkfifo").arg(pipe.folder.path().join("pipe")).status().unwrap();
        assert!(made.success());
        refuses_with_kvm(&pipe, CONFIGURATION, &parts);
        let image = disk("disk.qcow2", read_only).file("disk.qcow2", &[&b"QFI\xfb"[..], &[0; 1020]].concat());
        let parts = ["device \"blk0\"", "qcow2 image", "qemu-img convert -O raw"];
        refuses_with_kvm(&image, CONFIGURATION, &parts);
        let small = disk("small", read_only).zeros("small", 511);
        let parts = ["device \"blk0\"", "the disk has 511 B", "needs 512 B", "help: make it larger"];
        refuses_with_kvm(&small, CONFIGURATION, &parts);
    }
}

#[test]
fn a_tap_that_does_not_exist() {
    let net = Machine::new().with("devices", json!([{ "type": "virtio-net", "tap": "egm-none0" }]));
    let parts = ["device \"net0\"", "tap egm-none0 does not exist", "help: ip tuntap add egm-none0 mode tap"];
    refuses_with_kvm(&net, HOST, &parts);
}

#[test]
fn a_console_in_a_folder_that_does_not_exist() {
    for kind in ["file", "socket"] {
        let console = Machine::new().with("console", json!({ "type": kind, "path": "none/console" }));
        let parts = [&format!("console {kind} "), "none/console", "help: set \"console\".\"path\""];
        refuses_with_kvm(&console, CONFIGURATION, &parts);
    }
}

#[test]
fn a_vfio_user_server_that_is_not_there_or_does_not_behave() {
    let machine = |socket: &str| {
        let device = json!({ "type": "vfio-user", "socket": socket });
        Machine::new().with("devices", json!([device]))
    };
    let outcome = machine("none.sock").run();
    outcome.refuses(HOST, &["device \"user0\"", "none.sock", "No such file", "help: start the server first"]);
    let outcome = machine("file").zeros("file", 1).run();
    outcome.refuses(CONFIGURATION, &["device \"user0\"", "file is not a socket", "help: set \"socket\""]);
    // A server that hangs up during the handshake.
    let rude = machine("rude.sock");
    let listener = UnixListener::bind(rude.folder.path().join("rude.sock")).unwrap();
    let server = std::thread::spawn(move || drop(listener.accept().unwrap()));
    rude.run()
        .refuses(HOST, &["device \"user0\"", "rude.sock", "does not describe its device", "help: read"]);
    server.join().unwrap();
}

#[test]
fn a_host_function_that_does_not_exist() {
    let device = json!({ "type": "vfio", "function": "0009:01:00.0" });
    let outcome = Machine::new().with("devices", json!([device])).run();
    outcome
        .refuses(HOST, &["device \"vfio0\"", "0009:01:00.0 does not exist", "help: \"egm-vmm check\" lists"]);
}

#[test]
fn a_guest_of_another_architecture() {
    let other = if std::env::consts::ARCH == "aarch64" { "x86_64" } else { "aarch64" };
    // Whether its files are here does not matter, and nothing is taken for it.
    let slice = json!([{ "region": "hugetlb", "size": "2MiB", "node": 1 }]);
    for machine in [Machine::new(), Machine::new().booting("kernel", "none").with("egm", slice)] {
        let outcome = machine.with("arch", json!(other)).run();
        outcome.refuses(
            HOST,
            &[&format!("is for {other}"), std::env::consts::ARCH, "help: run it on such a host"],
        );
    }
}

/// An open of a pipe without a writer would never return.
#[test]
fn facts_that_never_end_or_are_no_regular_file() {
    let machine = Machine::new().zeros("large.json", (16 << 20) + 1);
    let folder = machine.folder.path();
    fs::write(folder.join("vm.json"), machine.config.to_string()).unwrap();
    assert!(Command::new("mkfifo").arg(folder.join("pipe")).status().unwrap().success());
    let help = "help: record them on their host: egm-vmm facts";
    for (facts, reason) in [
        ("/dev/zero", "it is not a regular file"),
        ("pipe", "it is not a regular file"),
        ("/", "directory"),
        ("large.json", "it is larger than 16 MiB"),
    ] {
        for command in ["plan", "check"] {
            let words = [PROGRAM, command, "--facts", facts, "vm.json"];
            let outcome = run_command(&["prlimit", "--as=1073741824"], &words, folder);
            outcome.refuses(CONFIGURATION, &[&format!("cannot read facts from {facts}"), reason, help]);
        }
    }
}

#[test]
fn facts_that_are_not_there_or_no_record() {
    let machine = Machine::new().file("other.json", b"{\"host\": {}, \"regions\": []}");
    fs::write(machine.folder.path().join("vm.json"), machine.config.to_string()).unwrap();
    let plan =
        |facts| run_command(&[], &[PROGRAM, "plan", "vm.json", "--facts", facts], machine.folder.path());
    let help = "help: record them on their host: egm-vmm facts > facts.json";
    plan("none").refuses(CONFIGURATION, &["cannot read facts from none", "No such file", help]);
    let other = "cannot read facts from other.json: it is output of \"egm-device regions --json\"";
    plan("other.json").refuses(CONFIGURATION, &[other, help]);
    let machine = machine.file("other.json", b"{\n  \"version\": \"2\"\n}");
    let plan = [PROGRAM, "plan", "vm.json", "--facts", "other.json"];
    let parts = [
        "other.json:2:14: cannot read facts: not a record of a host",
        "  2 |   \"version\": \"2\"",
        "found \"2\", expected a number",
        help,
    ];
    run_command(&[], &plan, machine.folder.path()).refuses(CONFIGURATION, &parts);
}

/// Requested output that was not written must fail the command: a script relies on it.
#[test]
fn a_full_disk_for_what_is_printed() {
    let machine = Machine::new();
    fs::write(machine.folder.path().join("vm.json"), machine.config.to_string()).unwrap();
    for arguments in ["schema", "facts", "plan vm.json", "man", "completions bash"] {
        let full = format!("{PROGRAM} {arguments} > /dev/full");
        let outcome = run_command(&[], &["sh", "-c", &full], machine.folder.path());
        outcome.refuses(HOST, &["cannot write to standard output", "No space left", "help: "]);
    }
    let enough = format!("{PROGRAM} schema | head -n 1");
    assert_eq!(run_command(&[], &["bash", "-o", "pipefail", "-c", &enough], Path::new("/")).code, Some(0));
}

#[test]
fn a_console_pipe_without_a_reader() {
    let machine = Machine::new().with("console", json!({ "type": "file", "path": "pipe" }));
    let made = Command::new("mkfifo").arg(machine.folder.path().join("pipe")).status().unwrap();
    assert!(made.success());
    refuses_with_kvm(
        &machine,
        CONFIGURATION,
        &["console file ", "pipe", "help: start the reader of this pipe"],
    );
}

/// From enough to open what the plan names to enough for the machine too.
#[test]
fn too_few_descriptors() {
    if !kvm() {
        return;
    }
    let machine = Machine::new().with("console", json!("stdio"));
    let enough = (12..64).find(|limit| {
        let outcome = machine.run_by(&["prlimit", &format!("--nofile={limit}")]);
        if outcome.code != Some(0) {
            outcome.refuses(HOST, &["os error 24"]);
        }
        outcome.code == Some(0)
    });
    assert!(enough.is_some());
}

/// The limit is a user's, and root has none.
#[test]
fn no_thread_for_a_vcpu() {
    if !kvm() {
        return;
    }
    if !rustix::process::getuid().is_root() {
        return println!("skipped: only root can become somebody else");
    }
    let machine = Machine::new();
    let program = machine.for_others();
    // Whatever the mode of /dev/kvm is, this unprivileged user may open it.
    let open = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"];
    let other = ["setpriv", "--reuid=61616", "--regid=61616", "--clear-groups"];
    let unprivileged = [&other[..], &open, &["prlimit", "--nproc=1"]].concat();
    let outcome =
        run_command(&unprivileged, &[program.to_str().unwrap(), "run", "vm.json"], machine.folder.path());
    outcome.refuses(HOST, &["cannot start the thread of vCPU 0", "os error 11", "help: ", "ulimit -u"]);
}

/// Recorded facts have no such memory.
#[test]
fn memory_of_the_machine_itself_on_a_host_without() {
    let slice = json!([{ "region": "guest-memfd", "size": "2MiB", "node": 1 }]);
    let machine = Machine::new().with("egm", slice);
    fs::write(machine.folder.path().join("vm.json"), machine.config.to_string()).unwrap();
    let parts = [
        "slice 0 has no place",
        "KVM_CAP_GUEST_MEMFD_FLAGS, Linux 6.18",
        "help: give \"region\" a list that ends in \"local\"",
    ];
    for facts in ["x86-server", "grace"] {
        let facts = fs::canonicalize(format!("../configs/facts/{facts}.json")).unwrap();
        let mut recorded: Value = serde_json::from_str(&fs::read_to_string(facts).unwrap()).unwrap();
        recorded["arch"] = json!(std::env::consts::ARCH);
        fs::write(machine.folder.path().join("facts.json"), recorded.to_string()).unwrap();
        let plan = [PROGRAM, "plan", "--facts", "facts.json", "vm.json"];
        run_command(&[], &plan, machine.folder.path()).refuses(HOST, &parts);
    }
}

/// In a mount namespace with an empty /dev.
#[test]
fn a_host_without_kvm() {
    let namespace = ["unshare", "--map-root-user", "--mount"];
    if !Command::new(namespace[0]).args(&namespace[1..]).arg("true").status().is_ok_and(|s| s.success()) {
        return println!("skipped: this host lets us make no mount namespace");
    }
    let hide = ["sh", "-c", "mount -t tmpfs none /dev && exec \"$@\"", "sh"];
    let outcome = Machine::new().run_by(&[&namespace[..], &hide[..]].concat());
    outcome.refuses(HOST, &["cannot use KVM", "/dev/kvm does not exist", "help: load kvm_amd or kvm_intel"]);
}

#[test]
fn a_user_without_access_to_kvm() {
    let root = rustix::process::getuid().is_root();
    match fs::metadata("/dev/kvm") {
        Err(error) => return println!("skipped: /dev/kvm: {error}"),
        Ok(_) if !root => return println!("skipped: only root can become somebody else"),
        Ok(device) if device.mode() & 0o006 != 0 => return println!("skipped: /dev/kvm is everybody's"),
        Ok(_) => {}
    }
    let machine = Machine::new();
    let program = machine.for_others();
    let groups = fs::metadata("/dev/kvm").unwrap().mode() & 0o060 == 0o060;
    let unprivileged = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let outcome =
        run_command(&unprivileged, &[program.to_str().unwrap(), "run", "vm.json"], machine.folder.path());
    let parts = match groups {
        true => ["it belongs to group \"", "help: add yourself", "sudo usermod -aG "],
        false => ["only its owner", "help: run it as root", "chmod 660 /dev/kvm"],
    };
    outcome.refuses(HOST, &[&["/dev/kvm: permission denied: "], &parts[..]].concat());
}
