//! A broker on a thread, and under it a region with a file that opens once.

use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet};
use egm_device::Backing;
use egm_device::broker::{
    Client, GrantFailure, GrantedSlice, IdleScrub, Server, SliceRequest, Source, StillUsed,
};
use egm_device::carve::plan::{Request, place};
use egm_device::policy::{Policy, Supply};
use egm_device::region::{Region, RegionKind, Slice};
use egm_device::retired::Retired;
use tempfile::TempDir;

pub(crate) const G: u64 = 1 << 30;

pub(crate) fn take(region: &str, size: u64) -> SliceRequest {
    SliceRequest { name: "vm".into(), regions: vec![region.into()], size, align: 0, class: None, wait: true }
}

/// A broker of this process.
pub(crate) struct Broker {
    pub(crate) folder: TempDir,
    pub(crate) path: PathBuf,
    pub(crate) source: Arc<OpensOnce>,
}

impl Broker {
    /// It runs until the test ends.
    pub(crate) fn start(policy: Policy, size: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let path = folder.path().join("socket");
        let source = OpensOnce::new(size);
        let mut server = Server::listen(&path, policy, source.clone()).unwrap();
        std::thread::spawn(move || server.run());
        Self { folder, path, source }
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.path).unwrap()
    }
}

/// A region like an EGM device on a kernel that lets it be opened once: memory, and a count of opens.
pub(crate) struct OpensOnce {
    region: Region,
    file: File,
    opened: AtomicUsize,
    tidying: AtomicBool,
    /// While a test holds it, the source answers no query.
    pub(crate) ledger: Mutex<()>,
    state: Arc<Mutex<WorldState>>,
}

#[derive(Default)]
struct WorldState {
    busy: Vec<Span<InRegion>>,
    scrubbed: Vec<Span<InRegion>>,
    bad: Vec<Span<InRegion>>,
}

impl OpensOnce {
    pub(crate) fn new(size: u64) -> Arc<Self> {
        let region = Region {
            name: "egm4".into(),
            kind: RegionKind::Egm { device: "/dev/egm4".into() },
            node: None,
            size: ByteSize::new(size),
            page_size: ByteSize::new(2 << 20),
            base: None,
            functions: Vec::new(),
            retired: Retired::default(),
        };
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        let kept = Self {
            region,
            file,
            opened: AtomicUsize::new(0),
            tidying: AtomicBool::new(false),
            ledger: Mutex::default(),
            state: Arc::default(),
        };
        kept.open_again().unwrap();
        Arc::new(kept)
    }

    /// open(2) of the device.
    pub(crate) fn open_again(&self) -> io::Result<File> {
        match self.opened.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => self.file.try_clone(),
            Err(_) => Err(io::Error::from_raw_os_error(libc::EBUSY)),
        }
    }

    pub(crate) fn opened(&self) -> usize {
        self.opened.load(Ordering::SeqCst)
    }

    pub(crate) fn is_tidying(&self) -> bool {
        self.tidying.load(Ordering::SeqCst)
    }

    pub(crate) fn was_scrubbed(&self, offset: u64, size: u64) -> bool {
        let span = Span::new(Offset::new(offset), size).unwrap();
        self.state.lock().unwrap().scrubbed.contains(&span)
    }

    /// Bad pages that clients have reported to the source.
    pub(crate) fn bad(&self) -> Vec<Span<InRegion>> {
        self.state.lock().unwrap().bad.clone()
    }

    fn busy(&self) -> SpanSet<InRegion> {
        self.state.lock().unwrap().busy.iter().copied().collect()
    }
}

impl Source for OpensOnce {
    fn supplies(&self) -> Vec<Supply> {
        let _only = self.ledger.lock().unwrap();
        let whole = SpanSet::from_iter([Span::new(Offset::new(0), self.region.size.get()).unwrap()]);
        let free = whole.minus(&self.busy());
        vec![Supply {
            region: self.region.name.clone(),
            kind: self.region.kind.word().into(),
            page_size: self.region.page_size.get(),
            usable: self.region.size.get(),
            free: free.size(),
            largest: free.iter().map(|span| span.size()).max().unwrap_or(0),
            shares_file: self.region.kind.shares_file(),
        }]
    }

    fn grant(
        &self,
        _: &str,
        request: &Request,
        _: &AtomicBool,
    ) -> Result<Box<dyn GrantedSlice>, GrantFailure> {
        if self.is_tidying() {
            return Err(GrantFailure::Failed("granted during a scrub of idle memory".into()));
        }
        let mut state = self.state.lock().unwrap();
        let busy = state.busy.iter().copied().collect();
        let slice =
            place(&self.region, &busy, &SpanSet::default(), request).map_err(|_| GrantFailure::Short)?;
        let span = Span::new(Offset::new(slice.offset), slice.size.get()).unwrap();
        state.busy.push(span);
        let file = self.file.try_clone().map_err(|error| GrantFailure::Failed(error.to_string()))?;
        Ok(Box::new(Part { region: self.region.clone(), slice, span, file, state: self.state.clone() }))
    }

    /// There is always more to do.
    fn scrub_idle(&self, scrub: &IdleScrub) {
        if !scrub.enter(&self.region.name) {
            return;
        }
        self.tidying.store(true, Ordering::SeqCst);
        while !scrub.stopped().load(Ordering::SeqCst) {
            std::thread::park_timeout(std::time::Duration::from_millis(1));
        }
        self.tidying.store(false, Ordering::SeqCst);
        scrub.exit();
    }
}

struct Part {
    region: Region,
    slice: Slice,
    span: Span<InRegion>,
    file: File,
    state: Arc<Mutex<WorldState>>,
}

impl GrantedSlice for Part {
    fn region(&self) -> &Region {
        &self.region
    }
    fn slice(&self) -> &Slice {
        &self.slice
    }
    fn backing(&self) -> &dyn Backing {
        self
    }
    fn hand_out(&self) -> io::Result<File> {
        self.file.try_clone()
    }
    fn return_slice(self: Box<Self>, bad: &SpanSet<InRegion>) -> Result<(), StillUsed> {
        let mut state = self.state.lock().unwrap();
        state.bad.extend(bad.iter());
        state.busy.retain(|span| *span != self.span);
        state.scrubbed.push(self.span);
        Ok(())
    }
}

impl Backing for Part {
    fn file(&self) -> &File {
        &self.file
    }
    fn offset(&self) -> u64 {
        self.slice.offset
    }
    fn size(&self) -> u64 {
        self.slice.size.get()
    }
    fn page_size(&self) -> u64 {
        self.region.page_size.get()
    }
    fn is_invisible(&self) -> bool {
        true
    }
    fn outlives_power(&self) -> bool {
        false
    }
}
