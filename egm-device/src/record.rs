//! The record of a host: one file, which `egm-vmm facts` writes and both programs read.
//!
//! This program uses the host's memory and ignores the rest. Another version is refused: to read it with defaults would
//! plan for a host that has less than the recorded one.

use std::io;
use std::path::{Path, PathBuf};

use egm_address::{ByteSize, CpuSet};
use egm_report::json::{self, JsonError};
use egm_report::{Blame, Remedy, Report};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::bounded;
use crate::huge_page::HugePage;
use crate::region::{HostFacts, MemoryMap, Node, Pool, Region, RegionKind, Survey};

/// Version of the record.
pub const RECORD_VERSION: u32 = 3;

/// Largest record in bytes: that of a host with ten thousand functions.
const MAX_RECORD: u64 = 16 << 20;

/// Why a record is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum RecordError {
    #[error("cannot read facts from {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}:{}:{}: cannot read facts: not a record of a host", path.display(), source.line, source.column)]
    Json { path: PathBuf, source: Box<JsonError> },
    #[error("cannot read facts from {}: they have version {version}, and this program reads {RECORD_VERSION}", path.display())]
    Version { path: PathBuf, version: u32 },
    #[error("cannot read facts from {}: it is output of \"egm-device regions --json\"", path.display())]
    Regions { path: PathBuf },
}

impl Report for RecordError {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help("record them on their host: egm-vmm facts > facts.json")
    }

    fn excerpt(&self) -> Option<String> {
        match self {
            Self::Json { source, .. } => Some(source.excerpt.clone()),
            _ => None,
        }
    }
}

/// The keys of a record that `T` has.
///
/// # Errors
/// [`RecordError`] when `path` is not a regular file with a record of this version.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T, RecordError> {
    // The version is read first: a record of another version need not have the same keys.
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let text = bounded::file(path, MAX_RECORD)
        .map_err(|source| RecordError::Read { path: path.to_owned(), source })?;
    let json = |source| RecordError::Json { path: path.to_owned(), source };
    let Version { version } = json::from_slice(&text).map_err(|source| match is_regions_output(&text) {
        true => RecordError::Regions { path: path.to_owned() },
        false => json(source),
    })?;
    if version != RECORD_VERSION {
        return Err(RecordError::Version { path: path.to_owned(), version });
    }
    json::from_slice(&text).map_err(json)
}

/// The memory of the host that `path` is a record of, and its regions.
///
/// # Errors
/// As [`read`].
pub fn survey(path: &Path) -> Result<Survey, RecordError> {
    Ok(read::<RecordedHost>(path)?.into())
}

/// Whether `text` is output of `egm-device regions --json`, which has no version.
fn is_regions_output(text: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Output {
        #[serde(rename = "host")]
        _host: IgnoredAny,
        #[serde(rename = "regions")]
        _regions: IgnoredAny,
    }
    serde_json::from_slice::<Output>(text).is_ok()
}

/// The part of a record that this program uses.
#[derive(Debug, Deserialize)]
struct RecordedHost {
    arch: String,
    product: String,
    command_line: String,
    memory_map: MemoryMap,
    nodes: Vec<RecordedNode>,
    regions: Vec<RecordedRegion>,
}

#[derive(Debug, Deserialize)]
struct RecordedNode {
    id: u32,
    cpus: CpuSet,
    memory: RecordedMemory,
    pools: Vec<Pool>,
}

#[derive(Debug, Deserialize)]
struct RecordedMemory {
    total: ByteSize,
}

#[derive(Debug, Deserialize)]
struct RecordedRegion {
    region: Region,
}

impl From<RecordedHost> for Survey {
    fn from(record: RecordedHost) -> Self {
        let RecordedHost { arch, product, command_line, memory_map, nodes, regions } = record;
        let MemoryMap { iomem, firmware, affinity } = memory_map;
        let node = |RecordedNode { id, cpus, memory, mut pools }| {
            // Arithmetic divides by the size of a page, which no kernel reports as 0.
            pools.retain(|pool| HugePage::of(pool.page_size.get()).is_some());
            Node { id, cpus, total: memory.total, pools }
        };
        let nodes = nodes.into_iter().map(node).collect();
        let regions: Vec<Region> = regions.into_iter().map(|recorded| recorded.region).collect();
        let guest_memfd = regions.iter().any(|region| region.kind == RegionKind::GuestMemfd);
        let host = HostFacts { arch, product, command_line, iomem, firmware, affinity, nodes, guest_memfd };
        Self { host, regions, refused: Vec::new() }
    }
}
