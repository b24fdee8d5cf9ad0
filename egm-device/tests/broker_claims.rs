//! Clients that call sound memory bad, against a broker and a ledger with a file in the place of a device.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod window;

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet};
use egm_device::Backing;
use egm_device::backing::BackingError;
use egm_device::broker::{Client, LedgerSource, Server, Take};
use egm_device::ledger::{Identity, Ledger, Memory, Paths, Watch};
use egm_device::owner::Owner;
use egm_device::policy::Policy;
use egm_device::region::{DaxFiles, Region, RegionKind, Slice};
use egm_device::retired::Retired;
use egm_device::scrub::ScrubError;

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

fn page(at: u64) -> Span<InRegion> {
    Span::new(Offset::new(at), 4096).unwrap()
}

#[test]
fn no_number_of_claims_makes_the_ledger_forget_a_bad_page_or_lose_a_sound_one() {
    let (slices, size) = (54, 32 << 20);
    let folder = tempfile::tempdir().unwrap();
    let memory = folder.path().join("memory");
    File::create(&memory).unwrap().set_len(slices * size + (2 << 20)).unwrap();
    let region = Region {
        name: "dax0.0".to_owned(),
        kind: RegionKind::Devdax { device: memory.clone(), files: DaxFiles::Static },
        node: None,
        size: ByteSize::new(slices * size + (2 << 20)),
        page_size: ByteSize::new(2 << 20),
        base: None,
        functions: Vec::new(),
        retired: Retired::default(),
    };
    let identity = Identity { machine: Some("host".to_owned()), boot: "boot".to_owned() };
    let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
    let bad = SpanSet::from_iter([page(slices * size)]);
    ledger.retire(&region, &bad, &Owner::this("test"), "a memory error").unwrap();
    let source = LedgerSource::new(ledger.clone(), vec![region.clone()]).reaching(Arc::new(Sparse(memory)));
    let socket = folder.path().join("socket");
    let mut server = Server::listen(&socket, Policy::root_only(), Arc::new(source)).unwrap();
    std::thread::spawn(move || server.run());
    let take = Take {
        name: "liar".to_owned(),
        regions: vec!["dax0.0".to_owned()],
        size,
        align: 0,
        class: None,
        wait: false,
    };
    let loan = |_| Client::connect(&socket).unwrap().take(&take, |_| {}).unwrap();
    let loans: Vec<_> = (0..slices).map(loan).collect();
    for loan in loans {
        let start = loan.slice().offset;
        loan.retire(&(0..4096).map(|n| page(start + n * 8192)).collect()).unwrap();
        loan.give_back(&NEVER).unwrap();
    }
    let states = ledger.states(&region).unwrap();
    assert!(states.doubt.is_none(), "{:?}", states.doubt);
    assert!(states.retired.spans() == &bad, "{:#x} bytes are retired", states.retired.spans().size());
}
