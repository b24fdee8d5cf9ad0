//! The answer to one question, from the results of a scan. Pure.

use std::collections::BTreeSet;

use super::readers::{KernelObject, UNNAMED};
use super::scan::{Process, ScanResult, Sighting};
use super::{Evidence, Hold, MAX_EVIDENCE, OtherGrant, Question, Verdict};
use crate::owner::Owner;

/// The verdict of process `this` on `question`. Its last owner had VFIO `devices`.
pub(super) fn judge(
    question: &Question,
    found: &ScanResult,
    devices: &BTreeSet<String>,
    this: u32,
) -> Verdict {
    let rules = Rules { question, found, devices, this };
    let holds = found.sightings.iter().filter_map(|seen| Some((rules.hold(seen)?, seen)));
    let (mut evidence, mut bytes) = (BTreeSet::new(), Vec::new());
    for (hold, Sighting { process, what }) in holds {
        let (pid, program) = (Some(process.pid), process.program.clone());
        evidence.insert(Evidence { hold, pid, program });
        bytes.push(match what {
            KernelObject::Mapping(_, mapped) => {
                mapped.start.max(question.bytes.start)..mapped.end.min(question.bytes.end)
            }
            _ => question.bytes.clone(),
        });
    }
    // Processes that this one may not look at are left out, but for the last owner: on some hosts one is always there.
    let hidden = question.last.iter().find(|owner| found.hidden.contains(&owner.pid) && owner.is_alive());
    if found.is_partial || hidden.is_some() {
        let (pid, program) = (hidden.map(|owner| owner.pid), String::new());
        evidence.insert(Evidence { hold: Hold::CannotLook, pid, program });
        bytes.push(question.bytes.clone());
    }
    if evidence.is_empty() {
        return Verdict::Free;
    }
    Verdict::InUse { evidence: evidence.into_iter().take(MAX_EVIDENCE).collect(), bytes }
}

struct Rules<'a> {
    question: &'a Question,
    found: &'a ScanResult,
    devices: &'a BTreeSet<String>,
    this: u32,
}

impl Rules<'_> {
    /// The hold by which `seen` keeps the bytes in use, if it does.
    fn hold(&self, seen: &Sighting) -> Option<Hold> {
        let (process, file) = (&seen.process, &self.question.file);
        let holds = |holds: bool, hold| holds.then_some(hold);
        match &seen.what {
            KernelObject::Mapping(..) if egm_address::fault!("mapping-overlooked") => None,
            KernelObject::Descriptor(..) if egm_address::fault!("descriptor-overlooked") => None,
            KernelObject::RingBuffers if egm_address::fault!("ring-pin-overlooked") => None,
            KernelObject::Mapping(inode, mapped) => {
                let bytes = &self.question.bytes;
                let overlaps = mapped.start < bytes.end && bytes.start < mapped.end;
                holds(*inode == file.inode && overlaps, Hold::Mapping)
            }
            KernelObject::Descriptor(inode, device) => {
                let is_roots = process.uid == 0 && file.is_dev_mem();
                let is_excused = process.pid == self.this || is_roots || self.has_another_slice(process);
                holds(file.is_opened_as(*inode, *device) && !is_excused, Hold::Descriptor)
            }
            KernelObject::Registered(path) => {
                holds(*path == file.path && !self.has_another_slice(process), Hold::Registered)
            }
            KernelObject::HiddenRing => holds(self.may_be_the_last_owners(process), Hold::CannotLook),
            KernelObject::RingBuffers => holds(self.may_be_the_last_owners(process), Hold::RingPin),
            KernelObject::Silent => holds(self.may_hide_a_mapping(process), Hold::CannotLook),
            KernelObject::InFlight if egm_address::fault!("descriptor-in-flight-overlooked") => None,
            KernelObject::InFlight => holds(self.may_be_the_last_owners(process), Hold::InFlight),
            KernelObject::Device(name) => {
                let is_excused = process.pid == self.this || self.is_of_another_grant(process);
                let is_pin = !egm_address::fault!("dma-pin-overlooked") && self.may_pin(name, process);
                holds(is_pin && !is_excused, Hold::DmaPin)
            }
        }
    }

    /// Whether the VFIO object `name` of `process` may map the bytes for DMA. The kernel does not show what it maps: a
    /// device of a last owner may, and so may every object of its user. Root is trusted with other objects.
    fn may_pin(&self, name: &str, process: &Process) -> bool {
        let is_the_users = || self.question.last.iter().any(|owner| owner.uid == process.uid);
        // The kernel keeps pages of a pool allocated as long as they are pinned.
        let is_any_users = self.question.was_lost && self.question.file.device.is_some();
        let is_users = process.uid != 0 && (is_any_users || is_the_users());
        is_users || (name != UNNAMED && self.devices.contains(name))
    }

    /// Whether a process, or one that it descends from, is the owner of another live grant.
    fn is_of_another_grant(&self, process: &Process) -> bool {
        process.descends_from(|pid| self.question.others.iter().any(|grant| grant.pid == pid))
    }

    /// Whether a process has the file for another slice: as the owner of its grant, or with a mapping of its bytes.
    fn has_another_slice(&self, process: &Process) -> bool {
        let maps_of_others = |seen: &Sighting| match &seen.what {
            KernelObject::Mapping(inode, mapped) => {
                let has_all =
                    |grant: &OtherGrant| grant.bytes.start <= mapped.start && mapped.end <= grant.bytes.end;
                seen.process.pid == process.pid
                    && *inode == self.question.file.inode
                    && self.question.others.iter().any(has_all)
            }
            _ => false,
        };
        self.is_of_another_grant(process) || self.found.sightings.iter().any(maps_of_others)
    }

    /// Whether a process that does not answer counts as one that maps the bytes. Root's do, as their mappings count.
    fn may_hide_a_mapping(&self, process: &Process) -> bool {
        let is_the_users = || self.question.last.iter().any(|owner| owner.uid == process.uid);
        process.uid == 0 || self.question.was_lost || is_the_users()
    }

    /// Whether an object in a socket or ring of `process`, which the kernel does not name, may be the memory: if the process
    /// is of the last owner's user. Root is trusted, but for the last owner itself. Where the record of the last owner was
    /// lost, any user may be it.
    fn may_be_the_last_owners(&self, process: &Process) -> bool {
        let is_users = process.uid != 0;
        let is_owners = |last: &Owner| process.pid == last.pid || (is_users && process.uid == last.uid);
        let may_be = self.question.last.iter().any(is_owners) || (self.question.was_lost && is_users);
        may_be && process.pid != self.this && !self.has_another_slice(process)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::free::tests::{EGM, question};
    use crate::free::{FileName, Inode};

    const THIS: u32 = 1;
    const TENANT: u32 = 1000;

    fn seen(pid: u32, uid: u32, what: KernelObject) -> Sighting {
        let process = Process { pid, uid, program: "p".to_owned(), parents: vec![100 + pid] };
        Sighting { process, what }
    }

    fn mapping(bytes: Range<u64>) -> KernelObject {
        KernelObject::Mapping(EGM.inode, bytes)
    }

    fn descriptor() -> KernelObject {
        KernelObject::Descriptor(EGM.inode, EGM.device)
    }

    fn last(pid: u32) -> Owner {
        Owner { name: "a".to_owned(), uid: TENANT, pid, started: 7, domain: None }
    }

    fn found(sightings: Vec<Sighting>) -> ScanResult {
        ScanResult { sightings: sightings.into_iter().collect(), ..ScanResult::default() }
    }

    /// The holds that the verdict names.
    fn holds(question: &Question, sightings: Vec<Sighting>, devices: &[&str]) -> Vec<Hold> {
        let devices = devices.iter().map(|name| (*name).to_owned()).collect();
        match judge(question, &found(sightings), &devices, THIS) {
            Verdict::Free => Vec::new(),
            Verdict::InUse { evidence, .. } => evidence.into_iter().map(|evidence| evidence.hold).collect(),
        }
    }

    #[test]
    fn a_mapping_of_any_process_counts_with_its_bytes_alone() {
        let asked = question(0x1000..0x3000);
        for pid in [THIS, 2] {
            let verdict =
                judge(&asked, &found(vec![seen(pid, 0, mapping(0x2000..0x8000))]), &BTreeSet::new(), THIS);
            let Verdict::InUse { evidence, bytes } = verdict else { panic!("{verdict:?}") };
            assert_eq!(
                (evidence[0].hold, evidence[0].pid, &bytes[0]),
                (Hold::Mapping, Some(pid), &(0x2000..0x3000))
            );
        }
        for beside in [0..0x1000, 0x3000..0x4000] {
            assert_eq!(holds(&asked, vec![seen(2, 0, mapping(beside))], &[]), []);
        }
    }

    #[test]
    fn a_descriptor_counts_but_of_this_process_and_of_those_with_another_slice() {
        let mut asked = question(0x1000..0x3000);
        let other_node = KernelObject::Descriptor(Inode(1, 2, 3), EGM.device);
        assert_eq!(holds(&asked, vec![seen(2, 0, descriptor())], &[]), [Hold::Descriptor]);
        assert_eq!(holds(&asked, vec![seen(2, 0, other_node)], &[]), [Hold::Descriptor]);
        assert_eq!(holds(&asked, vec![seen(2, 0, KernelObject::Descriptor(Inode(1, 2, 3), None))], &[]), []);
        assert_eq!(holds(&asked, vec![seen(THIS, 0, descriptor())], &[]), []);
        asked.others = vec![OtherGrant { pid: 2, bytes: 0x4000..0x6000 }];
        assert_eq!(holds(&asked, vec![seen(2, 5, descriptor())], &[]), []);
        asked.others = vec![OtherGrant { pid: 102, bytes: 0x4000..0x6000 }];
        assert_eq!(holds(&asked, vec![seen(2, 5, descriptor())], &[]), [], "a child of that owner");
        // The VMM of a server: it maps what the server has.
        let vmm = |bytes| vec![seen(3, 5, descriptor()), seen(3, 5, mapping(bytes))];
        assert_eq!(holds(&asked, vmm(0x4000..0x5000), &[]), []);
        assert_eq!(holds(&asked, vmm(0x5000..0x7000), &[]), [Hold::Descriptor]);
    }

    #[test]
    fn roots_descriptors_of_dev_mem_are_not_counted() {
        let mem = FileName { device: Some((1, 1)), ..EGM.clone() };
        let asked = Question { file: mem, ..question(0..0x1000) };
        let open = || KernelObject::Descriptor(Inode(9, 9, 9), Some((1, 1)));
        assert_eq!(holds(&asked, vec![seen(2, 0, open())], &[]), []);
        assert_eq!(holds(&asked, vec![seen(2, TENANT, open())], &[]), [Hold::Descriptor]);
    }

    #[test]
    fn a_descriptor_in_flight_counts_where_it_may_be_the_last_owners() {
        let asked = |last| Question { last, ..question(0..0x1000) };
        let flight = |pid, uid| vec![seen(pid, uid, KernelObject::InFlight)];
        let known = asked(vec![last(9)]);
        assert_eq!(holds(&known, flight(2, TENANT), &[]), [Hold::InFlight]);
        assert_eq!(holds(&known, flight(9, 0), &[]), [Hold::InFlight]);
        assert_eq!(holds(&known, flight(2, 0), &[]), []);
        assert_eq!(holds(&known, flight(2, 1001), &[]), []);
        // After boot every byte is dirty, and no process of this boot has had it.
        assert_eq!(holds(&asked(Vec::new()), flight(2, 1001), &[]), []);
        let lost = Question { was_lost: true, ..asked(Vec::new()) };
        assert_eq!(holds(&lost, flight(2, 1001), &[]), [Hold::InFlight]);
        for hidden in [KernelObject::HiddenRing, KernelObject::Silent] {
            let by = |uid| holds(&known, vec![seen(2, uid, hidden.clone())], &[]);
            assert_eq!((by(TENANT), by(1001)), (vec![Hold::CannotLook], vec![]));
        }
        assert_eq!(holds(&lost, vec![seen(2, 1001, KernelObject::Silent)], &[]), [Hold::CannotLook]);
        assert_eq!(
            holds(&known, vec![seen(2, 0, KernelObject::Silent)], &[]),
            [Hold::CannotLook],
            "a mapping of root's"
        );
        let ring = KernelObject::Registered("/dev/egm4".into());
        assert_eq!(holds(&known, vec![seen(2, 1001, ring)], &[]), [Hold::Registered]);
    }

    #[test]
    fn a_vfio_device_counts_where_the_last_owner_had_the_same() {
        let asked = Question { last: vec![last(9)], ..question(0..0x1000) };
        let device = |pid, uid, name: &str| vec![seen(pid, uid, KernelObject::Device(name.to_owned()))];
        assert_eq!(holds(&asked, device(2, 5, "240:3"), &["240:3"]), [Hold::DmaPin]);
        assert_eq!(holds(&asked, device(2, 5, "240:3"), &["240:4"]), [], "another machine's");
        assert_eq!(holds(&asked, device(9, 5, "240:3"), &["240:3"]), [Hold::DmaPin], "the owner's own");
        assert_eq!(holds(&asked, device(THIS, 5, "240:3"), &["240:3"]), []);
        for name in [UNNAMED, "240:4"] {
            assert_eq!(holds(&asked, device(2, TENANT, name), &[]), [Hold::DmaPin], "of the owner's user");
            assert_eq!(holds(&asked, device(2, 5, name), &[UNNAMED]), []);
        }
        let of_root = Question { last: vec![Owner { uid: 0, ..last(9) }], ..asked.clone() };
        assert_eq!(holds(&of_root, device(2, 0, UNNAMED), &[UNNAMED]), [], "another machine of root");
        let lost = Question { last: Vec::new(), was_lost: true, ..asked.clone() };
        assert_eq!(holds(&lost, device(2, 5, UNNAMED), &[]), [Hold::DmaPin]);
        assert_eq!(holds(&lost, device(2, 0, UNNAMED), &[]), []);
        let pool = Question { file: FileName { device: None, ..EGM.clone() }, ..lost };
        assert_eq!(holds(&pool, device(2, 5, UNNAMED), &[]), []);
        let another = Question { others: vec![OtherGrant { pid: 2, bytes: 0x4000..0x5000 }], ..asked };
        assert_eq!(holds(&another, device(2, 5, "240:3"), &["240:3"]), []);
    }

    #[test]
    fn what_cannot_be_looked_at_is_not_free() {
        let alive = Owner::this("a");
        let asked = Question { last: vec![alive.clone()], ..question(0..0x1000) };
        let cases = [
            (ScanResult { is_partial: true, ..ScanResult::default() }, false),
            (ScanResult { hidden: [alive.pid].into(), ..ScanResult::default() }, false),
            (ScanResult { hidden: [alive.pid + 1].into(), ..ScanResult::default() }, true),
        ];
        for (found, free) in cases {
            assert_eq!(judge(&asked, &found, &BTreeSet::new(), THIS) == Verdict::Free, free, "{found:?}");
        }
        let ended = Question { last: vec![Owner { started: 0, ..alive.clone() }], ..asked };
        let hidden = ScanResult { hidden: [alive.pid].into(), ..ScanResult::default() };
        assert_eq!(judge(&ended, &hidden, &BTreeSet::new(), THIS), Verdict::Free);
    }
}
