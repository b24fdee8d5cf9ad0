//! Whether a process has a GPU by VFIO: its group, its device, or a descriptor in flight that may be one.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use egm_address::PciAddress;

use super::readers::{KernelObject, UNNAMED};
use super::scan::{Process, ScanResult, Sighting};
use super::{Evidence, FileName, Hold, MAX_EVIDENCE, shared_scans};
use crate::owner::Owner;

/// A GPU that its owner has left.
#[derive(Debug)]
pub(crate) struct GpuQuestion {
    pub(crate) function: PciAddress,
    /// Its VFIO nodes: of its group, and its own.
    pub(crate) nodes: Vec<PathBuf>,
    pub(crate) owner: Owner,
    /// Owners of other claims, which may have the GPU.
    pub(crate) others: Vec<u32>,
}

/// Evidence of processes that still have the GPU; empty if there are none. This process does not count.
pub(crate) fn users_of_gpu(question: &GpuQuestion) -> Vec<Evidence> {
    let files = match names(&question.nodes) {
        // Without a node there is no group and no device that a process could have.
        Ok(files) if files.is_empty() => return Vec::new(),
        Ok(files) => files,
        Err(_) => return Evidence::of(Hold::CannotLook).to_vec(),
    };
    let found = shared_scans::find(&files);
    let found = found.as_ref().and_then(|found| found.get());
    found.map_or_else(
        || Evidence::of(Hold::CannotLook).to_vec(),
        |found| judge(question, &files, found, std::process::id()),
    )
}

/// Those of `nodes` that exist.
fn names(nodes: &[PathBuf]) -> io::Result<Vec<FileName>> {
    let names = nodes.iter().map(|node| FileName::at(node));
    names
        .filter(|name| name.as_ref().err().is_none_or(|error| error.kind() != io::ErrorKind::NotFound))
        .collect()
}

/// The verdict of process `this` on `question`, which has the nodes `files`.
fn judge(question: &GpuQuestion, files: &[FileName], found: &ScanResult, this: u32) -> Vec<Evidence> {
    let rules = Rules { question, files };
    let mut evidence = BTreeSet::new();
    for Sighting { process, what } in &found.sightings {
        // Owners of other GPUs have other nodes: an object without a name is of their GPU.
        let is_others = !what.is_named() && process.descends_from(|pid| question.others.contains(&pid));
        if process.pid == this || is_others {
            continue;
        }
        if let Some(hold) = rules.hold(process, what) {
            evidence.insert(Evidence { hold, pid: Some(process.pid), program: process.program.clone() });
        }
    }
    if found.is_partial {
        evidence.extend(Evidence::of(Hold::CannotLook));
    }
    evidence.into_iter().take(MAX_EVIDENCE).collect()
}

struct Rules<'a> {
    question: &'a GpuQuestion,
    files: &'a [FileName],
}

impl Rules<'_> {
    /// The hold on the GPU by `process`, which has `what`.
    fn hold(&self, process: &Process, what: &KernelObject) -> Option<Hold> {
        let owner = &self.question.owner;
        let descends = process.descends_from(|pid| pid == owner.pid);
        // Root is trusted, but for the owner itself and its children.
        let may_be_owners = descends || (process.uid == owner.uid && process.uid != 0);
        let (has_it, hold) = match what {
            KernelObject::Descriptor(inode, device) => {
                (self.files.iter().any(|file| file.is_opened_as(*inode, *device)), Hold::DmaPin)
            }
            KernelObject::Registered(path) => {
                (self.files.iter().any(|file| file.path == *path), Hold::DmaPin)
            }
            KernelObject::Device(name) if name == UNNAMED => (may_be_owners, Hold::DmaPin),
            KernelObject::Device(name) => {
                let last = Path::new(name).file_name().and_then(|name| name.to_str());
                (last == Some(&*self.question.function.to_string()), Hold::DmaPin)
            }
            KernelObject::InFlight => (may_be_owners, Hold::InFlight),
            KernelObject::HiddenRing => (may_be_owners, Hold::CannotLook),
            KernelObject::Silent => (may_be_owners || process.uid == 0, Hold::CannotLook),
            KernelObject::RingBuffers => (false, Hold::RingPin),
            KernelObject::Mapping(..) => (false, Hold::Mapping),
        };
        has_it.then_some(hold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::free::Inode;

    const OWNER: u32 = 1000;

    #[test]
    fn a_node_that_cannot_be_examined_is_no_missing_node() {
        let owner = Owner::this("vm1");
        let function = "0009:01:00.0".parse().unwrap();
        let of =
            |nodes| users_of_gpu(&GpuQuestion { function, nodes, owner: owner.clone(), others: Vec::new() });
        assert_eq!(of(vec!["/dev/vfio/absent".into()]), Vec::new());
        assert_eq!(of(vec!["/dev/null/12".into()]), Evidence::of(Hold::CannotLook));
    }

    #[test]
    fn a_gpu_is_had_by_its_nodes_its_device_and_what_may_hide_one() {
        let file = |inode, number| FileName {
            inode: Inode(0, 5, inode),
            device: Some((511, number)),
            path: format!("/dev/vfio/{number}").into(),
        };
        let files = [file(71, 12), file(72, 3)];
        let owner = Owner { name: "vm".to_owned(), uid: OWNER, pid: 9, started: 7, domain: None };
        let function = "0009:01:00.0".parse().unwrap();
        let question = GpuQuestion { function, nodes: Vec::new(), owner, others: vec![50] };
        let device = |name: &str| KernelObject::Device(name.to_owned());
        let its = "/sys/devices/pci0009:00/0009:00:00.0/0009:01:00.0";
        let node = || KernelObject::Descriptor(Inode(0, 5, 71), Some((511, 12)));
        let table = [
            (2, 7, node(), Some(Hold::DmaPin)),
            (2, 7, KernelObject::Descriptor(Inode(0, 9, 1), Some((511, 3))), Some(Hold::DmaPin)),
            (2, 7, KernelObject::Descriptor(Inode(0, 5, 73), Some((511, 4))), None),
            (1, 7, node(), None),
            (50, 7, node(), Some(Hold::DmaPin)),
            (50, OWNER, device(UNNAMED), None),
            (2, 7, device(its), Some(Hold::DmaPin)),
            (2, OWNER, device("/sys/devices/pci0018:00/0018:01:00.0"), None),
            (2, OWNER, device(UNNAMED), Some(Hold::DmaPin)),
            (2, 7, device(UNNAMED), None),
            (2, 7, KernelObject::Registered("/dev/vfio/12".into()), Some(Hold::DmaPin)),
            (2, OWNER, KernelObject::InFlight, Some(Hold::InFlight)),
            (9, 0, KernelObject::InFlight, Some(Hold::InFlight)),
            (2, 7, KernelObject::InFlight, None),
            (2, OWNER, KernelObject::Silent, Some(Hold::CannotLook)),
            (2, 7, KernelObject::Silent, None),
            (2, 0, KernelObject::Silent, Some(Hold::CannotLook)),
        ];
        for (pid, uid, what, hold) in table {
            let process = Process { pid, uid, program: "p".to_owned(), parents: Vec::new() };
            let seen = Sighting { process, what: what.clone() };
            let found = ScanResult { sightings: [seen].into(), ..ScanResult::default() };
            let evidence = judge(&question, &files, &found, 1);
            assert_eq!(evidence.first().map(|evidence| evidence.hold), hold, "{pid} {uid} {what:?}");
        }
        let partial = ScanResult { is_partial: true, ..ScanResult::default() };
        assert_eq!(judge(&question, &files, &partial, 1), Evidence::of(Hold::CannotLook));
    }
}
