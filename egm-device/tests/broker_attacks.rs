//! Hostile clients of the broker: processes that keep the memory of a slice that they return.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod in_flight;
mod small_host;

mod window;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_address::ByteSize;
use egm_device::backing::BackingError;
use egm_device::broker::{BrokerLease, Client, ClientError, LedgerSource, Server, SliceRequest};
use egm_device::free::Hold;
use egm_device::ledger::record::GrantState;
use egm_device::ledger::{Identity, Ledger, Memory, Paths, Watch};
use egm_device::policy::Policy;
use egm_device::region::{Region, RegionKind, Slice};
use egm_device::retired::Retired;
use egm_device::{Backing, Mapping};
use in_flight::{receive, send};
use nix::fcntl::{FcntlArg, fcntl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use window::Window;

const PAGE: u64 = 4096;
const SECRET: &[u8; 8] = b"tenant b";
const MARK: &str = "attack: ";
static NEVER: AtomicBool = AtomicBool::new(false);

/// Set for attackers, which run the test that started them: the broker's socket and the attack.
const SOCKET: &str = "EGM_ATTACK_SOCKET";
const KEEPS: &str = "EGM_ATTACK_KEEPS";

/// A plain file in the place of `/dev/mem`.
struct PlainFile(PathBuf);

impl Memory for PlainFile {
    fn open(&self, _: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        let file = File::options().read(true).write(true).open(&self.0).unwrap();
        Ok(Box::new(Window(file, slice.offset, slice.size.get())))
    }
}

fn take(region: &str, size: u64, wait: bool) -> SliceRequest {
    SliceRequest { name: "vm".into(), regions: vec![region.into()], size, align: 0, class: None, wait }
}

/// A region of one page below a broker of this process.
struct World {
    folder: tempfile::TempDir,
    ledger: Ledger,
    region: Region,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let device = folder.path().join("memory");
        File::create(&device).unwrap().set_len(PAGE).unwrap();
        let region = Region {
            name: "r".into(),
            kind: RegionKind::Reserved { device: device.clone() },
            node: None,
            size: ByteSize::new(PAGE),
            page_size: ByteSize::new(PAGE),
            base: None,
            functions: Vec::new(),
            retired: Retired::default(),
        };
        let identity = Identity { machine: Some("host".into()), boot: "boot".into() };
        let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
        let source = LedgerSource::new(ledger.clone(), vec![region.clone()]);
        let source = source.reaching(Arc::new(PlainFile(device)));
        let socket = folder.path().join("socket");
        let mut server = Server::listen(&socket, Policy::root_only(), Arc::new(source)).unwrap();
        std::thread::spawn(move || server.run());
        Self { folder, ledger, region }
    }

    fn client(&self) -> Client {
        Client::connect(&self.folder.path().join("socket")).unwrap()
    }
}

struct Attacker {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Attacker {
    fn start(world: &World, test: &str, keeps: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(SOCKET, world.folder.path().join("socket"))
            .env(KEEPS, keeps)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    fn line(&mut self) -> String {
        let mut lines = self.output.by_ref().lines().map(Result::unwrap);
        lines.find_map(|line| Some(line.split_once(MARK)?.1.to_owned())).unwrap()
    }

    /// The first bytes of the memory that it kept.
    fn look(&mut self) -> String {
        self.input.write_all(b"look\n").unwrap();
        self.line()
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Access that an attacker keeps after the return of its slice.
enum RemainingAccess {
    Mapping(Mapping),
    Descriptor(File),
    InFlight(OwnedFd, OwnedFd),
}

impl RemainingAccess {
    fn of(lease: &BrokerLease, how: &str) -> Self {
        let file = lease.file().try_clone().unwrap();
        match how {
            "mapping" => {
                Self::Mapping(Mapping::new(&Window(file, lease.offset(), PAGE), 0, PAGE, 0).unwrap())
            }
            "descriptor" => Self::Descriptor(file),
            _ => {
                let flags = SocketFlags::CLOEXEC;
                let (near, far) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
                send(&near, &file);
                Self::InFlight(near, far)
            }
        }
    }

    fn read(self) -> String {
        let file = match &self {
            Self::Descriptor(file) => file.try_clone().unwrap(),
            Self::InFlight(_near, far) => receive(far).unwrap().into(),
            Self::Mapping(_mapping) => {
                // The kernel opens the mapped file.
                let mut maps =
                    fs::read_dir("/proc/self/map_files").unwrap().map(|entry| entry.unwrap().path());
                let is_memory = |path: &PathBuf| fs::read_link(path).unwrap().ends_with("memory");
                File::open(maps.find(is_memory).unwrap()).unwrap()
            }
        };
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Takes a slice, unlocks all that it can, keeps the memory, returns the slice, and reads the memory on request.
fn attack(socket: &Path, keeps: &str) -> ! {
    let lease = Client::connect(socket).unwrap().take(&take("r", PAGE, false), |_| ()).unwrap();
    lease.file().write_all_at(b"tenant a", lease.offset()).unwrap();
    let everything = libc::flock {
        l_type: libc::F_UNLCK.try_into().unwrap(),
        l_whence: libc::SEEK_SET.try_into().unwrap(),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(lease.file(), FcntlArg::F_OFD_SETLK(&everything)).unwrap();
    let kept = RemainingAccess::of(&lease, keeps);
    let answer = match lease.return_slice(&NEVER) {
        Ok(()) => "returned".to_owned(),
        Err(error) => error.to_string(),
    };
    println!("{MARK}{answer}");
    std::io::stdin().lines().next().unwrap().unwrap();
    println!("{MARK}{}", kept.read());
    std::process::exit(0)
}

/// A tenant keeps its memory and returns it; it must not read the next tenant's secret.
fn the_next_tenant_is_safe_from_one_that_keeps(keeps: &str, test: &str) {
    if let Some(socket) = std::env::var_os(SOCKET) {
        attack(Path::new(&socket), &std::env::var(KEEPS).unwrap());
    }
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: the broker of this test serves root");
    }
    let world = World::new();
    let mut attacker = Attacker::start(&world, test, keeps);
    let answer = attacker.line();
    match world.client().take(&take("r", PAGE, false), |_| ()) {
        Ok(lease) => {
            lease.file().write_all_at(SECRET, lease.offset()).unwrap();
            panic!("tenant b has the slice ({answer}), and tenant a reads {:?}", attacker.look());
        }
        Err(refused) => assert!(matches!(refused, ClientError::Refused { .. }), "{refused}"),
    }
    assert!(answer.contains("in use by"), "{answer}");
    let held = world.ledger.states(&world.region).unwrap().held;
    let evidence = held[0].evidence.iter().map(|evidence| (evidence.hold, evidence.pid)).collect::<Vec<_>>();
    let hold = match keeps {
        "mapping" => Hold::Mapping,
        "descriptor" => Hold::Descriptor,
        _ => Hold::InFlight,
    };
    assert_eq!((held[0].usage, evidence), (GrantState::Quarantined, vec![(hold, Some(attacker.child.id()))]));
    assert_eq!(attacker.look(), "tenant a");
    drop(attacker);
    // The broker repeats its check on its own.
    let lease = world.client().take(&take("r", PAGE, true), |_| ()).unwrap();
    let mut bytes = [1; 8];
    lease.file().read_exact_at(&mut bytes, lease.offset()).unwrap();
    assert_eq!(bytes, [0; 8]);
    drop(lease);
    assert_eq!(world.ledger.states(&world.region).unwrap().held.len(), 1);
}

#[test]
fn a_tenant_that_unlocks_and_keeps_its_mapping_reads_nothing_of_the_next() {
    let test = "a_tenant_that_unlocks_and_keeps_its_mapping_reads_nothing_of_the_next";
    the_next_tenant_is_safe_from_one_that_keeps("mapping", test);
}

#[test]
fn a_tenant_that_unlocks_and_keeps_a_descriptor_reads_nothing_of_the_next() {
    let test = "a_tenant_that_unlocks_and_keeps_a_descriptor_reads_nothing_of_the_next";
    the_next_tenant_is_safe_from_one_that_keeps("descriptor", test);
}

#[test]
fn a_tenant_that_unlocks_and_leaves_a_descriptor_in_flight_reads_nothing_of_the_next() {
    let test = "a_tenant_that_unlocks_and_leaves_a_descriptor_in_flight_reads_nothing_of_the_next";
    the_next_tenant_is_safe_from_one_that_keeps("in flight", test);
}

/// `egm-device broker`, ended with the test.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const QUOTA: u64 = 4 << 20;
const QUOTA_TEST: &str = "memory_that_is_passed_on_stays_on_the_account_of_its_client";

/// Takes a slice of the pool and passes it on through standard input, a socket.
fn pass_on(socket: &Path) -> ! {
    if let Ok(lease) = Client::connect(socket).unwrap().take(&take("local", QUOTA, false), |_| ()) {
        let memory = lease.backing().unwrap();
        memory.file().write_all_at(&[1; 4096], 0).unwrap();
        send(&std::io::stdin(), lease.file());
        drop(memory);
        // Its return counts for nothing as long as others have the memory.
        let _ = lease.return_slice(&NEVER);
    }
    std::process::exit(0)
}

/// The memory that clients of `broker` got and passed on, until one gets none.
fn hoard(broker: &Path) -> Vec<OwnedFd> {
    let mut hoard = Vec::new();
    while hoard.len() < 8 {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let client = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", QUOTA_TEST, "--nocapture"])
            .env(SOCKET, broker)
            .stdin(far)
            .stdout(Stdio::null())
            .status();
        assert!(client.unwrap().success());
        match receive(&near) {
            Some(memory) => hoard.push(memory),
            None => break,
        }
    }
    hoard
}

#[test]
fn memory_that_is_passed_on_stays_on_the_account_of_its_client() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        pass_on(Path::new(&socket));
    }
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: the policy of this test is root's");
    }
    let folder = tempfile::tempdir().unwrap();
    small_host::make(folder.path());
    let (policy, socket) = (folder.path().join("policy.json"), folder.path().join("socket"));
    fs::write(&policy, r#"{"rules": [{"name": "r", "user": 0, "regions": ["memfd"], "quota": "4MiB"}]}"#)
        .unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_egm-device"));
    program.arg("broker").arg("--root").arg(folder.path());
    let program = program.arg("--policy").arg(&policy).arg("--socket").arg(&socket);
    let mut broker = Program(program.spawn().unwrap());
    while Client::connect(&socket).is_err() {
        assert!(broker.0.try_wait().unwrap().is_none(), "the broker ended");
        std::thread::yield_now();
    }
    let mut hoard = hoard(&socket);
    assert_eq!(hoard.len(), 1, "slices of 4 MiB, with a quota of 4 MiB");
    // A descriptor that opens nothing keeps the memory, too.
    let memory = hoard.pop().unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory));
    let name = File::options().read(true).custom_flags(libc::O_PATH).open(path).unwrap();
    drop(memory);
    assert!(self::hoard(&socket).is_empty());
    drop(name);
    // The broker repeats its check on its own.
    let lease = Client::connect(&socket).unwrap().take(&take("local", QUOTA, true), |_| ()).unwrap();
    assert!(lease.return_slice(&NEVER).is_ok());
}
