//! The arithmetic and the files of devices of slices; what the kernel does with them is the lab's to show.

use std::os::unix::fs::symlink;

use super::*;
use crate::backing::tests::{region, slice};
use crate::region::DaxFiles;

const PAGE: u64 = 2 << 20;

/// A region of 16 pages at 512 MiB, as below `/sys`.
fn split() -> Region {
    let device = "/dev/dax0.0".into();
    let kind = RegionKind::Devdax { device, files: DaxFiles::PerSlice };
    Region { base: Some(Address::new(512 << 20)), ..region(kind, 16 * PAGE, PAGE) }
}

fn span(page: u64, pages: u64) -> Span<Host> {
    Span::new(Address::new((512 << 20) + page * PAGE), pages * PAGE).unwrap()
}

/// The files of a device, which do not act as the kernel's.
fn plant(root: &Path, name: &str, span: Option<Span<Host>>, driver: Option<&str>) {
    let folder = root.join("sys/devices/platform/hmem.0").join(name);
    fs::create_dir_all(folder.join("mapping0")).unwrap();
    fs::write(folder.join("size"), span.map_or(0, Span::size).to_string()).unwrap();
    fs::write(folder.join("mapping"), "").unwrap();
    if let Some(span) = span {
        fs::write(folder.join("mapping0/start"), format!("{:#x}\n", span.start().get())).unwrap();
        fs::write(folder.join("mapping0/end"), format!("{:#x}\n", span.last().get())).unwrap();
    }
    if let Some(driver) = driver {
        symlink(format!("../../../../bus/dax/drivers/{driver}"), folder.join("driver")).unwrap();
    }
    let devices = root.join("sys/bus/dax/devices");
    fs::create_dir_all(&devices).unwrap();
    symlink(format!("../../../devices/platform/hmem.0/{name}"), devices.join(name)).unwrap();
}

fn host() -> (tempfile::TempDir, DaxRegion) {
    let root = tempfile::tempdir().unwrap();
    plant(root.path(), "dax0.0", None, None);
    for folder in ["sys/devices/platform/hmem.0/dax_region", "sys/bus/dax/drivers/device_dax"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    for file in ["dax_region/create", "dax_region/delete"] {
        fs::write(root.path().join("sys/devices/platform/hmem.0").join(file), "").unwrap();
    }
    fs::write(root.path().join("sys/bus/dax/drivers/device_dax/unbind"), "").unwrap();
    let of = DaxRegion::of(&split(), root.path()).unwrap();
    (root, of)
}

fn names(children: &[DaxDevice]) -> Vec<&str> {
    children.iter().map(|child| child.name.as_str()).collect()
}

#[test]
fn a_slice_of_a_region_has_host_addresses_and_a_device_has_bytes_of_its_region() {
    let whole = split();
    assert_eq!(span_of(&whole, &slice(3 * PAGE, 2 * PAGE)), Some(span(3, 2)));
    assert_eq!(
        offset_of(&whole, span(3, 2)).map(|of| (of.start().get(), of.size())),
        Some((3 * PAGE, 2 * PAGE))
    );
    assert_eq!(offset_of(&whole, span(15, 4)).map(Span::size), Some(PAGE));
    assert_eq!(offset_of(&whole, span(16, 1)), None);
    let nowhere = Region { base: None, ..whole };
    assert_eq!(span_of(&nowhere, &slice(0, PAGE)), None);
    let high = Region { base: Some(Address::new(u64::MAX)), ..nowhere };
    assert_eq!(span_of(&high, &slice(PAGE, PAGE)), None);
}

#[test]
fn devices_that_were_left_over_are_found_by_their_span() {
    let (root, of) = host();
    plant(root.path(), "dax0.1", Some(span(0, 2)), Some(DRIVER));
    plant(root.path(), "dax0.2", Some(span(2, 2)), None);
    plant(root.path(), "dax0.3", None, None);
    plant(root.path(), "dax00.4", Some(span(0, 16)), Some(DRIVER));
    let mut all = of.children().unwrap();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(names(&all), ["dax0.1", "dax0.2", "dax0.3"]);
    assert_eq!(names(&of.overlapping(span(1, 1)).unwrap()), ["dax0.1"]);
    assert_eq!(of.overlapping(span(1, 2)).unwrap().len(), 2);
    assert!(of.overlapping(span(4, 12)).unwrap().is_empty());
    assert!(DaxRegion::is_bound(&all[0]) && !DaxRegion::is_bound(&all[1]));
}

#[test]
fn a_removed_device_is_unbound_emptied_and_deleted() {
    let (root, of) = host();
    plant(root.path(), "dax0.1", Some(span(0, 2)), Some(DRIVER));
    of.remove(&of.children().unwrap()[0]).unwrap();
    let text = |path: &str| fs::read_to_string(root.path().join(path)).unwrap();
    assert_eq!(text("sys/bus/dax/drivers/device_dax/unbind"), "dax0.1");
    assert_eq!(text("sys/devices/platform/hmem.0/dax_region/delete"), "dax0.1");
    assert!(text("sys/bus/dax/devices/dax0.1/size").starts_with('0'));
}

#[test]
fn memory_that_the_kernel_or_a_file_system_uses_is_never_taken_away() {
    let (root, of) = host();
    for (name, driver) in [("dax0.1", "kmem"), ("dax0.2", "fsdev_dax")] {
        plant(root.path(), name, Some(span(0, 2)), Some(driver));
    }
    for child in of.children().unwrap() {
        let error = of.remove(&child).unwrap_err();
        assert!(error.to_string().starts_with("cannot unbind "), "{error}");
    }
    assert_eq!(fs::read(root.path().join("sys/devices/platform/hmem.0/dax_region/delete")).unwrap(), b"");
}

#[test]
fn a_device_of_several_spans_or_of_nonsense_is_refused_by_name() {
    let (root, of) = host();
    plant(root.path(), "dax0.1", Some(span(0, 2)), Some(DRIVER));
    let size = root.path().join("sys/bus/dax/devices/dax0.1/size");
    for text in [(3 * PAGE).to_string(), "many".to_owned()] {
        fs::write(&size, text).unwrap();
        let error = of.overlapping(span(8, 1)).unwrap_err().to_string();
        assert!(error.starts_with("cannot understand ") && error.contains("dax0.1"), "{error}");
    }
}

#[test]
fn a_region_needs_a_first_device() {
    let kind = RegionKind::Devdax { device: "/dev/dax0.1".into(), files: DaxFiles::PerSlice };
    let error = DaxRegion::of(&region(kind, PAGE, PAGE), Path::new("/")).unwrap_err();
    assert!(error.to_string().contains("dax0.1"), "{error}");
}

#[test]
fn a_device_that_another_process_deletes_is_no_failure_and_one_of_its_name_stays() {
    let (root, of) = host();
    plant(root.path(), "dax0.1", Some(span(3, 2)), None);
    let device = |name: &str| format!("../../../devices/platform/hmem.0/{name}");
    symlink(device("dax0.2"), root.path().join("sys/bus/dax/devices/dax0.2")).unwrap();
    let children = of.children().unwrap();
    assert_eq!(names(&children), ["dax0.1"]);
    let folder = root.path().join("sys/devices/platform/hmem.0");
    let mapping = folder.join("dax0.1/mapping0/end");
    fs::write(folder.join("dax0.1/size"), PAGE.to_string()).unwrap();
    fs::write(mapping, format!("{:#x}\n", span(3, 1).last().get())).unwrap();
    of.remove(&children[0]).unwrap();
    assert_eq!(fs::read_to_string(folder.join("dax_region/delete")).unwrap(), "");
    of.remove(&of.children().unwrap()[0]).unwrap();
    assert_eq!(fs::read_to_string(folder.join("dax_region/delete")).unwrap(), "dax0.1");
}
