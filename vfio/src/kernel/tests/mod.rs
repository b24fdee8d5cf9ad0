//! Functions of iommufd over a double of the kernel.

mod double;

use std::fs::File;
use std::sync::{Arc, Mutex};

use egm_address::{Address, PciAddress, Span};
use vfio_bindings::bindings::vfio;

use super::cdev::Cdev;
use super::device::Hold;
use super::{Iommufd, KernelFunction, OpenError, Track};
use crate::backend::{Backend, InterruptKind, Interrupts, RegionIndex};
use crate::memory::HostBacking;
use double::{ATTACH, BIND, DETACH, Double, FEATURE, GET_INFO, lock};

const READ_WRITE: u32 = vfio::VFIO_REGION_INFO_FLAG_READ | vfio::VFIO_REGION_INFO_FLAG_WRITE;
const MAPPED: u32 = READ_WRITE | vfio::VFIO_REGION_INFO_FLAG_MMAP;
/// Requests for a dma-buf: the probe for the feature, and the export.
const PROBE: &str = "feature 0x5000b";
const EXPORT: &str = "feature 0x1000b";

/// A drive as vfio-pci presents it: BAR 0 with a hole for MSI-X, neither ROM nor VGA; INTx, 33 vectors of MSI-X and a
/// request interrupt.
fn drive() -> Double {
    let none: double::Region = Ok((0, 0, &[]));
    let bar: double::Region = Ok((MAPPED, 0x4000, &[(0, 0x2000), (0x3000, 0x1000)]));
    let config: double::Region = Ok((READ_WRITE, 0x1000, &[]));
    let eventfd = vfio::VFIO_IRQ_INFO_EVENTFD;
    Double {
        flags: vfio::VFIO_DEVICE_FLAGS_PCI | vfio::VFIO_DEVICE_FLAGS_RESET,
        regions: vec![bar, none, none, none, none, none, none, config, Err(libc::EINVAL)],
        interrupts: vec![
            Ok((eventfd | vfio::VFIO_IRQ_INFO_NORESIZE, 1)),
            Ok((eventfd | vfio::VFIO_IRQ_INFO_NORESIZE, 0)),
            Ok((eventfd, 33)),
            Err(libc::EINVAL),
            Ok((eventfd, 1)),
        ],
        ..Double::default()
    }
}

/// A function and an address space of the double, and what was requested of both.
struct Bench {
    name: String,
    file: Option<File>,
    function: Arc<Mutex<Double>>,
    iommufd: Option<Arc<Iommufd>>,
    iommu: Arc<Mutex<Double>>,
}

impl Bench {
    fn new(name: &str, double: Double) -> Self {
        let (file, function) = double::file(name, double);
        let (iommu_file, iommu) = double::file(&format!("{name}-iommu"), Double::default());
        let log = Arc::clone(&function);
        let track: Track = Arc::new(move |_, added| {
            lock(&log).log.push(if added { "added to KVM" } else { "removed from KVM" }.to_owned());
            Ok(())
        });
        let iommufd = Some(Iommufd::of(iommu_file, Some(track)).unwrap());
        Self { name: name.to_owned(), file: Some(file), function, iommufd, iommu }
    }

    fn open(&mut self) -> Result<KernelFunction, OpenError> {
        let address: PciAddress = "0000:41:00.0".parse().unwrap();
        let cdev = Cdev::attach(self.file.take().unwrap(), address, self.iommufd.as_ref().unwrap())?;
        KernelFunction::described(address, Hold::Attached(cdev))
    }

    fn refused(&mut self) -> String {
        chain(&self.open().map(drop).unwrap_err())
    }

    /// What was requested of the function since the last call.
    fn log(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.function).log)
    }

    /// Whether nothing is left open, of the function and, once it is dropped, of the address space.
    fn is_closed(&mut self) -> bool {
        self.iommufd = None;
        double::open(&self.name) == 0
            && double::open(&format!("{}-iommu", self.name)) == 0
            && lock(&self.iommu).log == ["allocate", "destroy 7"]
    }
}

/// An error with its reason.
fn chain(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

fn span<S>(start: u64, size: u64) -> Span<S> {
    Span::new(Address::new(start), size).unwrap()
}

#[test]
fn a_function_is_described_as_the_kernel_reports_it() {
    let function = Bench::new("described", drive()).open().unwrap();
    let bar = function.region(RegionIndex::Bar(0));
    assert_eq!((bar.size, bar.readable, bar.writable, bar.msix_mappable), (0x4000, true, true, false));
    assert_eq!(bar.mappable, [span(0, 0x2000), span(0x3000, 0x1000)]);
    let config = function.region(RegionIndex::Config);
    assert_eq!((config.size, config.mappable.is_empty()), (0x1000, true));
    assert_eq!(function.region(RegionIndex::Rom).size, 0);
    assert!(function.can_reset());
    let interrupts = |kind| function.interrupts(kind);
    assert_eq!(interrupts(InterruptKind::Intx), Interrupts { count: 1, dynamic: false });
    assert_eq!(interrupts(InterruptKind::Msi).count, 0);
    assert_eq!(interrupts(InterruptKind::Msix), Interrupts { count: 33, dynamic: true });
    assert_eq!(interrupts(InterruptKind::Error), Interrupts::default());
    assert_eq!(interrupts(InterruptKind::Request).count, 1);
}

#[test]
fn registers_are_those_of_the_function_s_file() {
    let function = Bench::new("registers", drive()).open().unwrap();
    let mut command = [0; 2];
    function.read(RegionIndex::Config, 4, &mut command).unwrap();
    assert_eq!(command, [0x06, 0x04]);
    function.write(RegionIndex::Bar(0), 0x3ffe, &[1, 2]).unwrap();
    function.read(RegionIndex::Bar(0), 0x3ffe, &mut command).unwrap();
    assert_eq!(command, [1, 2]);
    assert!(function.write(RegionIndex::Bar(0), 0x3fff, &[1, 2]).is_err());
}

#[test]
fn kvm_has_a_function_from_before_it_is_bound_until_it_leaves_without_dma() {
    let mut bench = Bench::new("kvm", drive());
    let function = bench.open().unwrap();
    assert_eq!(bench.log(), ["added to KVM", "bind", "attach to 7"]);
    drop(function);
    let left = bench.log();
    // The crate's `Drop` detaches once more.
    assert_eq!(left, ["removed from KVM", "detach with command 0x402", "detach with command 0x402"]);
    assert!(bench.is_closed());
}

#[test]
fn a_function_that_is_refused_is_withdrawn_from_kvm_and_closed() {
    for (request, what) in [
        (BIND, "cannot give 0000:41:00.0 to iommufd"),
        (ATTACH, "cannot give 0000:41:00.0 to iommufd"),
        (GET_INFO, "cannot identify 0000:41:00.0"),
    ] {
        let mut bench = Bench::new(&format!("refused-{request:x}"), drive());
        lock(&bench.function).refuses.insert(request, libc::EIO);
        let reason = std::io::Error::from_raw_os_error(libc::EIO);
        assert_eq!(bench.refused(), format!("{what}: {reason}"));
        let log = bench.log();
        assert_eq!(
            (log.first().unwrap().as_str(), log.last().unwrap().as_str()),
            ("added to KVM", "removed from KVM")
        );
        assert!(bench.is_closed(), "{request:#x}");
    }
}

/// The crate's `Drop` would end the process here.
#[test]
fn a_function_that_was_pulled_out_and_cannot_be_detached_is_closed_all_the_same() {
    let mut bench = Bench::new("pulled", drive());
    let function = bench.open().unwrap();
    lock(&bench.function).refuses.insert(DETACH, libc::EIO);
    drop(function);
    assert_eq!(bench.log()[3..], ["removed from KVM", "detach with command 0x402"]);
    assert_eq!(double::open("pulled"), 0);
}

/// The crate leaves such a region out, and BAR 3 would be configuration space.
#[test]
fn a_function_with_a_region_that_the_kernel_does_not_describe_is_refused() {
    for missing in 0..7 {
        let mut double = drive();
        // A region of the driver's own would take the place of configuration space.
        double.regions.push(Ok((READ_WRITE, 0x1000, &[])));
        double.regions[missing] = Err(libc::ENOMEM);
        let mut bench = Bench::new(&format!("region-{missing}"), double);
        let error = bench.refused();
        assert!(error.starts_with("cannot read the regions of 0000:41:00.0: "), "{error}");
        assert_eq!(bench.log().last().unwrap(), "detach with command 0x402");
        assert!(bench.is_closed());
    }
}

#[test]
fn a_function_without_an_answer_about_its_vectors_is_refused() {
    for missing in 0..3 {
        let mut double = drive();
        double.interrupts[missing] = Err(libc::EIO);
        let mut bench = Bench::new(&format!("interrupt-{missing}"), double);
        let error = bench.refused();
        assert!(error.starts_with("cannot read the interrupts of 0000:41:00.0: "), "{error}");
        assert!(bench.is_closed());
    }
}

#[test]
fn what_is_no_pci_function_is_refused() {
    for flags in [vfio::VFIO_DEVICE_FLAGS_PLATFORM, vfio::VFIO_DEVICE_FLAGS_CCW] {
        let mut bench = Bench::new(&format!("kind-{flags}"), Double { flags, ..drive() });
        let error = bench.refused();
        assert!(error.ends_with("it is not a PCI function"), "{error}");
        assert!(bench.is_closed());
    }
}

#[test]
fn a_mapped_bar_has_a_dma_buf_where_the_kernel_exports_it() {
    let is_exported = |refused: Option<i32>, name: &str| {
        let mut bench = Bench::new(name, drive());
        lock(&bench.function).refuses.extend(refused.map(|number| (FEATURE, number)));
        let function = bench.open().unwrap();
        let mapping = function.map(RegionIndex::Bar(0), span(0x3000, 0x1000), 0).unwrap();
        let exported = matches!(mapping.backing(), HostBacking::Bar { dma_buf: Some(_) });
        (exported, bench.log()[3..].to_vec())
    };
    assert_eq!(is_exported(None, "exported"), (true, vec![PROBE.to_owned(), EXPORT.to_owned()]));
    assert_eq!(is_exported(Some(libc::ENOTTY), "not-exported"), (false, vec![PROBE.to_owned()]));
}
