//! The attack that the rule of trust domains prevents: a GPU's aperture on EGM reaches the slice of a neighbour.
//!
//! The GPU is the Grace lab's double (`vfio/fixtures`). Its page table entries are those of NVIDIA's driver:
//! the page's guest physical address minus the base in the guest's `_DSD`, an offset in the region without limit.

use std::fs::OpenOptions;
use std::path::Path;

use egm_device::ledger::GrantError;
use egm_fixtures::function::config::Identity;
use egm_fixtures::function::device::{Function, Setup};
use egm_fixtures::function::registers::{EGM, OWN};
use egm_vfio_wire::serve::Device;

use crate::common::{PAGE, fill, is_full_of, ledger};
use crate::trust::{UNOBSERVED, claim, gpu, other, own, reached, two_pages};

/// Guest physical address of the slice, as the guest's `_DSD` names it.
const BASE: u64 = 0x1_0000_0000;
/// Contents of the slice of the GPU's guest, and of its neighbour's.
const GUEST: u64 = 0x6775_6573_7467_7565;
const NEIGHBOUR: u64 = 0x6e65_6967_6862_6f75;
/// Registers of the double: source, destination, bytes, command, status.
const FROM: u64 = 0x10;
const TO: u64 = 0x18;
const COUNT: u64 = 0x20;
const COMMAND: u64 = 0x2c;
const STATUS: u64 = 0x30;
const DONE: u32 = 2;
/// The BAR that is the double's own memory.
const MEMORY: u32 = 2;

/// The address part of a page table entry for the page at `physical`, as the driver of a guest with `base` computes it.
fn entry(physical: u64, base: u64) -> u64 {
    EGM | (physical - base)
}

/// The double, with the aperture on the region in `folder`.
fn double(folder: &Path) -> Function {
    let region = OpenOptions::new().read(true).write(true).open(folder.join("memory")).unwrap();
    let identity = Identity { vendor: 0x10de, device: 0x2342, class: 0x03_0200 };
    let setup = Setup { identity, bar: 1 << 20, memory: 1 << 20, vectors: 1 };
    Function::grace(setup, 0).unwrap().with_egm(region).unwrap()
}

/// Copies a page by the double's engine.
fn copy(double: &mut Function, from: u64, to: u64) {
    for (register, value) in [(FROM, from), (TO, to), (COUNT, PAGE)] {
        double.write(0, register, &value.to_le_bytes());
    }
    double.write(0, COMMAND, &1_u32.to_le_bytes());
    let mut status = [0; 4];
    double.read(0, STATUS, &mut status);
    assert_eq!(u32::from_le_bytes(status), DONE);
}

/// The first word of the page that `entry` names.
fn word(double: &mut Function, entry: u64) -> u64 {
    copy(double, entry, OWN);
    let mut word = [0; 8];
    double.read(MEMORY, 0, &mut word);
    u64::from_le_bytes(word)
}

#[test]
fn a_gpu_reads_and_writes_the_slice_of_a_neighbour_of_its_trust_domain() {
    let folder = tempfile::tempdir().unwrap();
    let ((region, memory), ledger) = (reached(folder.path()), ledger(folder.path()));
    let slice = ledger.grant_from(&memory, &region, &two_pages(own(Some("a"))), &UNOBSERVED).unwrap();
    let neighbour = ledger.grant_from(&memory, &region, &two_pages(other(Some("a"))), &UNOBSERVED).unwrap();
    // The only way to have both: a domain that an operator named.
    let _gpus = claim(&ledger, &region, &memory, &own(Some("a"))).unwrap().unwrap();
    fill(&slice, GUEST);
    fill(&neighbour, NEIGHBOUR);
    let mut gpu = double(folder.path());
    let end = BASE + 2 * PAGE;
    assert_eq!(word(&mut gpu, entry(BASE, BASE)), GUEST);
    assert_eq!(word(&mut gpu, entry(end, BASE)), NEIGHBOUR, "the page behind the slice");
    assert_eq!(word(&mut gpu, entry(BASE, BASE - 2 * PAGE)), NEIGHBOUR, "by another base");
    for page in [0, PAGE] {
        copy(&mut gpu, entry(BASE, BASE), entry(end + page, BASE));
    }
    assert!(is_full_of(&neighbour, GUEST), "what the GPU wrote");
}

#[test]
fn the_same_slices_and_gpu_are_refused_to_owners_that_no_domain_joins() {
    let folder = tempfile::tempdir().unwrap();
    let ((region, memory), ledger) = (reached(folder.path()), ledger(folder.path()));
    let _slice = ledger.grant_from(&memory, &region, &two_pages(own(None)), &UNOBSERVED).unwrap();
    let neighbour = ledger.grant_from(&memory, &region, &two_pages(other(None)), &UNOBSERVED).unwrap();
    fill(&neighbour, NEIGHBOUR);
    let claimed = claim(&ledger, &region, &memory, &own(None));
    // With the GPU its owner reads what the GPU reaches.
    let read = claimed.is_ok().then(|| word(&mut double(folder.path()), entry(BASE + 2 * PAGE, BASE)));
    assert_eq!(read, None, "the GPU reads the slice of a neighbour");
    let error = claimed.unwrap_err();
    assert!(matches!(error, GrantError::Exclusive(_)), "{error}");
    let refusal = error.to_string();
    for part in [gpu().to_string(), own(None).to_string(), other(None).to_string(), region.name] {
        assert!(refusal.contains(&part), "no \"{part}\" in: {refusal}");
    }
}
