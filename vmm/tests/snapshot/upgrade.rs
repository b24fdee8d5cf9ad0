//! Upgrades: another program takes a running machine over.

use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::fs::{CWD, Mode, mkfifoat};

use super::*;

impl Machines {
    /// A copy of the program under another name, changed by `change`.
    fn program(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(PROGRAM).unwrap();
        change(&mut bytes);
        fs::write(self.path(name), bytes).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// `egm-vmm serve` with the machine of vm.json, of which the guest runs.
    fn served(&self) -> Machine<'_> {
        let machine = self.start("serve");
        machine.done("create vm.json");
        machine.done("boot");
        self.wait_for(SOME);
        machine
    }
}

/// A tap of this test, removed with this value; its name changes while the machine has it.
struct Tap(String);

impl Tap {
    /// Prints why not where none can be made.
    fn new() -> Option<Self> {
        let name = format!("egmu{}", std::process::id());
        match Command::new("ip").args(["tuntap", "add", &name, "mode", "tap"]).output() {
            Ok(output) if output.status.success() => return Some(Self(name)),
            Ok(output) => println!("skipped: no tap can be made here: {}", text(&output.stderr).trim()),
            Err(error) => println!("skipped: no tap can be made here: {error}"),
        }
        None
    }

    fn rename(&mut self, name: &str) {
        let name = format!("{name}{}", std::process::id());
        let renamed = Command::new("ip").args(["link", "set", &self.0, "name", &name]).status();
        assert!(renamed.unwrap().success());
        self.0 = name;
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).status();
    }
}

impl Machine<'_> {
    /// Names of the taps that it has.
    fn taps(&self) -> Vec<String> {
        let folder = fs::read_dir(format!("/proc/{}/fdinfo", self.child.id())).unwrap();
        let name = |info: String| Some(info.lines().find_map(|line| line.strip_prefix("iff:\t"))?.to_owned());
        folder.filter_map(|entry| name(fs::read_to_string(entry.unwrap().path()).ok()?)).collect()
    }

    /// Path of the program that runs.
    fn program(&self) -> PathBuf {
        fs::read_link(format!("/proc/{}/exe", self.child.id())).unwrap()
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Waits until it has no child: the memory of the program before is freed.
    fn wait_for_children(&self) {
        let parent = format!("PPid:\t{}\n", self.child.id());
        let is_child = |status: String| status.contains(&parent);
        let processes = || fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("status"));
        while processes().any(|path| fs::read_to_string(path).is_ok_and(is_child)) {
            thread::yield_now();
        }
    }

    fn state(&self) -> Value {
        serde_json::from_slice::<Value>(&self.ctl("machine --json").stdout).unwrap()["state"].take()
    }
}

/// The power button of a machine, pressed again and again until this is dropped: no execution may die of it.
struct Pressed {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pressed {
    fn of(machine: &Machine<'_>) -> Self {
        let (is_over, process) = (Arc::<AtomicBool>::default(), Pid::from_child(&machine.child));
        let over = Arc::clone(&is_over);
        let press = move || {
            while !over.load(Ordering::Acquire) && kill_process(process, Signal::POWER).is_ok() {
                thread::yield_now();
            }
        };
        Self { is_over, thread: Some(thread::spawn(press)) }
    }
}

impl Drop for Pressed {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[test]
fn a_guest_goes_on_in_another_program_with_its_memory_and_its_files() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({
        "cpus": { "count": 2 },
        "devices": [
            { "id": "random", "type": "virtio-rng", "root_port": false },
            { "id": "disk", "type": "virtio-blk", "path": "disk" },
            { "id": "vsock", "type": "virtio-vsock", "cid": 7, "socket": "vsock" },
        ],
    }));
    let mut tap = Tap::new();
    if let Some(Tap(name)) = &tap {
        let config = fs::read_to_string(machines.path("vm.json")).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        let net = json!({ "id": "net", "type": "virtio-net", "tap": name, "vhost": false });
        config["devices"].as_array_mut().unwrap().push(net);
        fs::write(machines.path("vm.json"), config.to_string()).unwrap();
    }
    let disk = File::create(machines.path("disk")).unwrap();
    disk.set_len(1 << 20).unwrap();
    for name in ["one", "two"] {
        machines.program(name, |_| ());
    }
    let machine = machines.served();
    let pressed = Pressed::of(&machine);
    // A guest may write any format there, and an operator may grow the file.
    disk.write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
    disk.set_len(2 << 20).unwrap();
    fs::rename(machines.path("vsock"), machines.path("moved")).unwrap();
    let mut descriptors = Vec::new();
    for name in ["one", "two", "one", "two"] {
        // Kernel, disk and tap are those that are open, not those of these names.
        for file in ["payload.elf", "disk"] {
            let _ = fs::remove_file(machines.path(file));
        }
        tap.iter_mut().for_each(|tap| tap.rename(name));
        let output = machine.ctl(&format!("upgrade --program {name}"));
        let printed = text(&output.stdout);
        assert!(
            printed.contains(&format!("/{name} has the machine; its guest was paused for ")),
            "{output:?}"
        );
        assert_eq!(machine.program(), machines.path(name));
        machines.wait_for(SOME);
        drop(UnixStream::connect(machines.path("moved")).unwrap());
        assert_eq!(machine.taps(), tap.iter().map(|tap| tap.0.clone()).collect::<Vec<_>>());
        machine.wait_for_children();
        descriptors.push(machine.descriptors());
    }
    drop(pressed);
    fs::rename(machines.path("moved"), machines.path("vsock")).unwrap();
    machines.check_console();
    assert_eq!(descriptors[1..], [descriptors[1]; 3], "none is left over");
    assert_eq!(machine.events(), ["lost", "ready", "restored", "resumed"]);
    machine.done("put /api/v1/vmm.shutdown");
    let (code, messages) = machine.end();
    assert_eq!(code, Some(0), "{messages}");
    assert!(!machines.path("vsock").exists() && !machines.path("vm.sock").exists(), "they are removed");
}

#[test]
fn a_paused_machine_stays_paused_and_an_upgrade_without_a_name_takes_the_new_file() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({}));
    machines.program("installed", |_| ());
    let folder = machines.path("installed");
    let mut machine = machines.served();
    machine.done(&format!("upgrade --program {}", folder.display()));
    machine.done("pause");
    // As a package manager does it.
    machines.program("new", |_| ());
    fs::rename(machines.path("new"), &folder).unwrap();
    assert!(machine.program().to_string_lossy().ends_with(" (deleted)"));
    let before = machines.console().len();
    machine.done("upgrade");
    assert_eq!((machine.program(), machine.state()), (folder, json!("paused")));
    (0..20).for_each(|_| machine.done("ping"));
    assert_eq!(machines.console().len(), before, "it waits");
    machine.done("resume");
    machines.wait_for(SOME);
    machines.check_console();
    assert!(machine.child.try_wait().unwrap().is_none());
    assert_eq!(machine.end().0, Some(0));
}

/// Replaces each `from` by `to`, of the same length.
fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    let places: Vec<_> = (0..bytes.len() - from.len()).filter(|at| bytes[*at..].starts_with(from)).collect();
    assert!(!places.is_empty());
    places.iter().for_each(|at| bytes[*at..*at + to.len()].copy_from_slice(to));
}

#[test]
fn a_program_that_cannot_take_the_machine_over_is_refused_or_gives_it_back() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({}));
    let machine = machines.served();
    symlink("/bin/true", machines.path("true")).unwrap();
    for (name, reason) in
        [("true", "it is no egm-vmm that can take a machine over"), ("missing", "No such file or directory")]
    {
        let refused = machine.refused(&format!("upgrade --program {name}"), HOST);
        assert!(refused.contains(reason), "{refused}");
    }
    // A key of the state has another name there, which it learns when it has the machine.
    machines.program("other", |bytes| replace(bytes, b"controllers", b"c0ntr0llers"));
    let refused = machine.refused("upgrade --program other", HOST);
    assert!(refused.contains("cannot upgrade the machine: cannot take the machine over"), "{refused}");
    assert_eq!(machine.program(), Path::new(PROGRAM));
    machine.wait_for_children();
    machines.wait_for(SOME);
    machines.check_console();
    machines.program("new", |_| ());
    machine.done("upgrade --program new");
    machines.wait_for(SOME);
    machines.check_console();
    assert_eq!(machine.end().0, Some(0));
    let run = machines.start("run vm.json");
    assert!(run.refused("upgrade", HOST).contains("egm-vmm run has one machine"));
}

/// A program that plans another machine is found while the guest runs.
#[test]
fn a_program_that_would_show_the_guest_another_machine_is_refused_before_the_pause() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({}));
    let machine = machines.served();
    machines.program("other", |bytes| replace(bytes, b"expanders", b"expand3rs"));
    let refused = machine.refused("upgrade --program other", HOST);
    assert!(refused.contains("the plan of this host has other \""), "{refused}");
    assert!(!machine.events().contains(&"paused".to_owned()));
    machines.wait_for(SOME);
    machines.check_console();
}

#[test]
fn a_dry_run_judges_program_and_machine_and_changes_nothing() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({}));
    let machine = machines.served();
    machines.program("new", |_| ());
    let output = machine.ctl("upgrade --program new --dry-run");
    assert_eq!(text(&output.stdout), "the program can have the machine\n", "{output:?}");
    machines.program("other", |bytes| replace(bytes, b"expanders", b"expand3rs"));
    let refused = machine.refused("upgrade --program other --dry-run", HOST);
    assert!(refused.contains("the plan of this host has other \""), "{refused}");
    assert!(!machine.events().contains(&"paused".to_owned()));
    let last = machine.ctl("get /egm/v1/upgrade");
    assert!(text(&last.stderr).contains("this program has had no upgrade"), "{last:?}");
    machine.done("upgrade --program new");
    assert_eq!(machine.program(), machines.path("new"));
    machines.wait_for(SOME);
    machines.check_console();
}

/// An upgrade is answered before its execution.
#[test]
fn a_request_that_succeeds_during_an_upgrade_has_its_effect() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({}));
    machines.program("new", |_| ());
    let machine = machines.served();
    let connect = || UnixStream::connect(machines.path("vm.sock")).unwrap();
    let put = |stream: &mut UnixStream, path: &str, body: &str| {
        write!(stream, "PUT {path} HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let is_done = |stream: &mut UnixStream| {
        let mut start = [0; "HTTP/1.1 204".len()];
        stream.read_exact(&mut start).is_ok() && start == *b"HTTP/1.1 204"
    };
    for _ in 0..5 {
        machine.done("pause");
        let (mut upgrade, mut resume) = (connect(), connect());
        let body = json!({ "program": machines.path("new") }).to_string();
        put(&mut upgrade, "/egm/v1/upgrade", &body).unwrap();
        assert!(is_done(&mut upgrade));
        let is_resumed = put(&mut resume, "/api/v1/vm.resume", "").is_ok() && is_done(&mut resume);
        // The execution can end the connection of this request, too.
        while !machine.ctl("get /egm/v1/upgrade").status.success() {
            thread::yield_now();
        }
        let state = if is_resumed { "running" } else { "paused" };
        assert_eq!(machine.state(), json!(state));
        if !is_resumed {
            machine.done("resume");
        }
        machines.wait_for(SOME);
    }
    machines.check_console();
}

#[test]
fn a_node_of_ordinary_memory_goes_on_too_and_no_page_is_counted_again() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({
        "memory": { "size": "16MiB", "page_size": "4K", "prefault": true },
        "egm": [{ "region": "local", "size": "6MiB", "node": 1 }],
    }));
    let machine = machines.served();
    machine.done("upgrade");
    machines.wait_for(SOME);
    machines.check_console();
    let (code, messages) = machine.end();
    assert_eq!((code, messages.matches("present in huge pages").count()), (Some(0), 1), "{messages}");
}

/// The reader of a pipe leaves when no writer is left.
#[test]
fn a_pipe_that_the_console_writes_to_stays_open() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({ "console": { "type": "file", "path": "pipe" } }));
    let pipe = machines.path("pipe");
    mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
    let copy = format!("cat {} > {}", pipe.display(), machines.path("console").display());
    let mut reader = Command::new("sh").args(["-c", &copy]).spawn().unwrap();
    let machine = machines.served();
    for _ in 0..2 {
        machine.done("upgrade");
        machines.wait_for(SOME);
        assert!(reader.try_wait().unwrap().is_none(), "it has a writer");
    }
    assert_eq!(machine.end().0, Some(0));
    assert!(reader.wait().unwrap().success());
    machines.check_console();
}

#[test]
fn an_upgrade_is_over_when_its_machine_ends_first() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({}));
    let machine = machines.served();
    let script = "#!/bin/sh\n: >begun\nwhile ! test -e go; do :; done\n";
    fs::write(machines.path("slow"), script).unwrap();
    fs::set_permissions(machines.path("slow"), fs::Permissions::from_mode(0o755)).unwrap();
    let mut upgrade = machines.command("ctl --api vm.sock upgrade --program slow").spawn().unwrap();
    while !machines.path("begun").exists() {
        thread::yield_now();
    }
    machine.done("put /api/v1/vm.shutdown");
    fs::write(machines.path("go"), "").unwrap();
    assert!(!upgrade.wait().unwrap().success());
    machine.done("boot");
    machines.wait_for(SOME);
    machine.done("upgrade");
    machines.wait_for(SOME);
    assert_eq!(machine.end().0, Some(0));
}
