//! Clients that call sound memory bad, against a broker and a ledger with a file in the place of a device.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod window;

use std::fs::{File, Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet};
use egm_device::Backing;
use egm_device::backing::BackingError;
use egm_device::broker::{BrokerLease, Client, LedgerSource, Server, SliceRequest};
use egm_device::ledger::{Identity, Ledger, Memory, Paths, Watch};
use egm_device::owner::Owner;
use egm_device::policy::{Names, parse};
use egm_device::region::{DaxFiles, Region, RegionKind, Slice};
use egm_device::retired::Retired;
use egm_device::scrub::ScrubError;

use rustix::net::{RecvFlags, SendFlags};
use rustix::process::Uid;
use rustix::thread::set_thread_uid;
use window::Window;

static NEVER: AtomicBool = AtomicBool::new(false);

/// A sparse file, which needs no scrub.
struct Sparse(PathBuf);

impl Memory for Sparse {
    fn open(&self, _: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        let file = File::options().read(true).write(true).open(&self.0).unwrap();
        Ok(Box::new(Window(file, slice.offset, slice.size.get())))
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

/// Bytes of each slice.
const SIZE: u64 = 64 << 20;

fn page(at: u64) -> Span<InRegion> {
    Span::new(Offset::new(at), 4096).unwrap()
}

/// A broker of a region in `folder` of `slices` of [`SIZE`] and one page more: its socket, ledger and region.
fn broker(folder: &Path, slices: u64) -> (PathBuf, Ledger, Region) {
    let memory = folder.join("memory");
    let size = slices * SIZE + (2 << 20);
    File::create(&memory).unwrap().set_len(size).unwrap();
    let region = Region {
        name: "dax0.0".to_owned(),
        kind: RegionKind::Devdax { device: memory.clone(), files: DaxFiles::Static },
        node: None,
        size: ByteSize::new(size),
        page_size: ByteSize::new(2 << 20),
        base: None,
        functions: Vec::new(),
        retired: Retired::default(),
    };
    let identity = Identity { machine: Some("host".to_owned()), boot: "boot".to_owned() };
    let ledger = Ledger::open(Paths::below(folder), identity).unwrap();
    let source = LedgerSource::new(ledger.clone(), vec![region.clone()]).reaching(Arc::new(Sparse(memory)));
    let socket = folder.join("socket");
    let group = rustix::process::getgid().as_raw();
    let rule =
        serde_json::json!({ "name": "all", "group": group, "regions": ["devdax"], "whole_device": true });
    let policy = serde_json::json!({ "rules": [rule] }).to_string();
    let policy = parse(&policy, &Names::default()).unwrap();
    let mut server = Server::listen(&socket, policy, Arc::new(source)).unwrap();
    std::thread::spawn(move || server.run());
    (socket, ledger, region)
}

fn take(socket: &Path) -> BrokerLease {
    let take = SliceRequest {
        name: "liar".to_owned(),
        regions: vec!["dax0.0".to_owned()],
        size: SIZE,
        align: 0,
        class: None,
        wait: false,
    };
    Client::connect(socket).unwrap().take(&take, |_| {}).unwrap()
}

/// The most claims that one user may have, one page each and no two adjacent.
fn most_claims(lease: &BrokerLease) -> SpanSet<InRegion> {
    (0..4096).map(|n| page(lease.slice().offset + n * 8192)).collect()
}

/// The same as user `uid`, as the kernel reports it to the broker.
fn take_as(uid: u32, socket: &Path) -> BrokerLease {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            set_thread_uid(Uid::from_raw(uid)).unwrap(); // of this thread alone
            take(socket)
        });
        thread.join().unwrap()
    })
}

/// Claims `spans` of `lease`'s slice; the broker has read the claim when this returns. A claim has no answer, so a
/// question that has one follows it on the connection.
fn claim(lease: &BrokerLease, spans: &SpanSet<InRegion>) {
    lease.retire(spans).unwrap();
    rustix::net::send(lease.connection(), b"\"free\"", SendFlags::NOSIGNAL).unwrap();
    let mut answer = [0; 4096];
    let (_, length) = rustix::net::recv(lease.connection(), &mut answer, RecvFlags::empty()).unwrap();
    assert!(answer[..length].starts_with(b"{\"free\":"), "{}", String::from_utf8_lossy(&answer[..length]));
}

/// All bytes of a slice, as one claim.
fn all_of(lease: &BrokerLease) -> SpanSet<InRegion> {
    SpanSet::from_iter([Span::new(Offset::new(lease.slice().offset), SIZE).unwrap()])
}

/// The reasons of claims that were refused, in order.
fn refused_claims(folder: &Path) -> Vec<String> {
    let log = std::fs::read_to_string(egm_device::audit::Paths::below(folder).file).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let refused = lines.filter(|line| line["event"] == "claim-refused");
    let reasons = refused.map(|line| line["reason"].as_str().unwrap().to_owned());
    reasons.filter(|reason| reason.contains("has more claims")).collect()
}

#[test]
fn one_user_claims_256_mib_at_most_whatever_the_number_of_slices() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, ..) = broker(folder.path(), 5);
    let leases: Vec<_> = (0..5).map(|_| take(&socket)).collect();
    for lease in &leases {
        claim(lease, &all_of(lease));
    }
    leases.into_iter().for_each(|lease| lease.return_slice(&NEVER).unwrap());
    let refused = refused_claims(folder.path());
    assert!(matches!(&*refused, [one] if one.ends_with("than 4096 spans or 256 MiB")), "{refused:?}");
}

#[test]
fn users_claim_16384_spans_and_1_gib_of_a_region_at_most_together() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    // Four slices a user and all their bytes, or one slice a user and as many claims as one user may have.
    for (slices, claims) in [(4, all_of as fn(&BrokerLease) -> SpanSet<InRegion>), (1, most_claims)] {
        let folder = tempfile::tempdir().unwrap();
        set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        let (socket, ..) = broker(folder.path(), 4 * slices + 1);
        let users = (4001..=4004).flat_map(|uid| std::iter::repeat_n(uid, usize::try_from(slices).unwrap()));
        let leases: Vec<_> = users.map(|uid| take_as(uid, &socket)).collect();
        for lease in &leases {
            claim(lease, &claims(lease));
        }
        let last = take_as(4005, &socket);
        claim(&last, &SpanSet::from_iter([page(last.slice().offset)]));
        last.return_slice(&NEVER).unwrap();
        let refused = refused_claims(folder.path());
        let reason = "region dax0.0 has more claims that are not checked yet than 16384 spans or 1 GiB";
        assert_eq!(refused, [reason], "{slices} slices a user");
    }
}

#[test]
fn a_claim_beyond_the_limit_of_its_user_is_refused_and_logged() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, ledger, region) = broker(folder.path(), 1);
    let lease = take(&socket);
    let most = most_claims(&lease);
    lease.retire(&most).unwrap();
    let more = page(lease.slice().offset + SIZE - 4096);
    lease.retire(&SpanSet::from_iter([more])).unwrap();
    lease.return_slice(&NEVER).unwrap();
    let log = std::fs::read_to_string(egm_device::audit::Paths::below(folder.path()).file).unwrap();
    let refused: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|line: &serde_json::Value| line["event"] == "claim-refused")
        .collect();
    let [beyond, sound] = &*refused else { panic!("{refused:?}") };
    let why = |line: &serde_json::Value| line["reason"].as_str().unwrap().to_owned();
    assert!(why(beyond).contains("has more claims that are not checked yet than 4096 spans"), "{beyond}");
    assert_eq!(beyond["span"]["offset"], more.start().get());
    assert!(why(sound).contains("it can be read"), "{sound}");
    assert_eq!(sound["bytes"], most.size());
    assert!(ledger.states(&region).unwrap().retired.spans().is_empty());
}

#[test]
fn no_number_of_claims_makes_the_ledger_forget_a_bad_page_or_lose_a_sound_one() {
    let slices = 54;
    let folder = tempfile::tempdir().unwrap();
    let (socket, ledger, region) = broker(folder.path(), slices);
    let bad = SpanSet::from_iter([page(slices * SIZE)]);
    ledger.retire(&region, &bad, &Owner::this("test"), "a memory error").unwrap();
    let leases: Vec<_> = (0..slices).map(|_| take(&socket)).collect();
    for lease in leases {
        lease.retire(&most_claims(&lease)).unwrap();
        lease.return_slice(&NEVER).unwrap();
    }
    let states = ledger.states(&region).unwrap();
    assert!(states.doubt.is_none(), "{:?}", states.doubt);
    assert!(states.retired.spans() == &bad, "{:#x} bytes are retired", states.retired.spans().size());
}
