//! A function as sysfs shows it, in a folder, for tests.

use std::fs;
use std::path::Path;

use crate::Facts;
use crate::capability::MAGIC;

/// Offset of the vendor capability.
const VENDOR: usize = 0xa0;

/// Configuration space with the capability behind another one.
pub(crate) fn config(facts: &Facts) -> Vec<u8> {
    let mut config = vec![0; 256];
    config[0x34] = 0x40;
    config[0x40..0x42].copy_from_slice(&[0x01, 0xa0]);
    let pxm = facts.pxm.unwrap_or(u32::MAX).to_le_bytes();
    let page = u8::try_from(facts.page.trailing_zeros()).unwrap();
    let words = [&[0x09, 0, 32, 1][..], b"EGMD", &[2, 0, page, 0], &pxm];
    let longs = [facts.size.to_le_bytes(), facts.base.to_le_bytes()];
    let bytes: Vec<u8> = words.concat().into_iter().chain(longs.concat()).collect();
    config[VENDOR..VENDOR + bytes.len()].copy_from_slice(&bytes);
    config
}

/// BAR 0 with `retired` spans.
pub(crate) fn registers(facts: &Facts, retired: &[(u64, u64)]) -> Vec<u8> {
    let mut bar = vec![0; 0x4000];
    let mut put = |at: usize, bytes: &[u8]| bar[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC.to_le_bytes());
    put(4, &[1]);
    let spans = u32::try_from(retired.len()).unwrap();
    for (at, value) in [(0x08, facts.size), (0x10, facts.base), (0x18, facts.page)] {
        put(at, &value.to_le_bytes());
    }
    put(0x20, &facts.pxm.unwrap_or(u32::MAX).to_le_bytes());
    put(0x28, &spans.to_le_bytes());
    for (at, (start, size)) in (0x1000..).step_by(16).zip(retired) {
        put(at, &start.to_le_bytes());
        put(at + 8, &size.to_le_bytes());
    }
    bar
}

/// A function below `root`, with BAR 2 at `start`, a power of two of `bar` bytes.
pub(crate) fn function(root: &Path, address: &str, facts: &Facts, start: u64, bar: u64) {
    let folder = root.join(address);
    fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).unwrap();
    let end = start + bar - 1;
    let none = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
    let text =
        format!("0xf0000000 0xf0003fff 0x40200\n{none}{start:#x} {end:#x} 0x14220c\n{none}{none}{none}");
    write("resource", text.as_bytes());
    write("config", &config(facts));
    write("class", b"0x050000\n");
    write("numa_node", b"1\n");
    write("enable", b"1\n");
    write("resource0", &registers(facts, &[]));
    let memory = fs::File::create(folder.join("resource2_wc")).unwrap();
    memory.set_len(bar).unwrap();
}
