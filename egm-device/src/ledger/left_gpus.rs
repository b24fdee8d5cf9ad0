//! GPUs of owners that have ended: a process that inherited the VFIO group or device still has the GPU.
#![forbid(unsafe_code)]

use super::openers::nodes;
use super::record::{GpuClaim, Record};
use super::{Ledger, LedgerError};
use crate::free::{Evidence, GpuQuestion, users_of_gpu};
use crate::region::Region;

impl Ledger {
    /// Ends claims on GPUs of `region` that have neither a lock nor a live owner, where no process has the GPU.
    pub(super) fn review_gpus(&self, region: &Region) -> Result<(), LedgerError> {
        if region.functions.is_empty() {
            return Ok(());
        }
        self.review_claims(|claim| region.functions.contains(&claim.function)).map(drop)
    }

    /// [`Ledger::review_gpus`] for all claims of which `is_meant` is true; returns those that ended.
    pub(super) fn review_claims(
        &self,
        is_meant: impl Fn(&GpuClaim) -> bool,
    ) -> Result<Vec<GpuClaim>, LedgerError> {
        let (record, _) = self.look()?;
        let mut left = Vec::new();
        for claim in record.gpus.iter().filter(|claim| is_meant(claim)) {
            if self.is_left(claim)? {
                left.push(claim.clone());
            }
        }
        self.end_claims(&left)
    }

    /// Ends those of `claims`, left by their owners, with a GPU that no process has; the others get the evidence.
    pub(super) fn end_claims(&self, claims: &[GpuClaim]) -> Result<Vec<GpuClaim>, LedgerError> {
        if claims.is_empty() {
            return Ok(Vec::new());
        }
        let (record, _) = self.look()?;
        let found: Vec<Vec<Evidence>> = claims.iter().map(|claim| self.users(&record, claim)).collect();
        self.change(|record| {
            let mut ended = Vec::new();
            for (claim, evidence) in claims.iter().zip(&found) {
                if evidence.is_empty() || egm_address::fault!("gpu-of-a-child-overlooked") {
                    ended.extend(record.gpus.extract_if(.., |other| other.is_same(claim)));
                } else {
                    let same = record.gpus.iter_mut().filter(|other| other.is_same(claim));
                    same.for_each(|other| other.evidence.clone_from(evidence));
                }
            }
            Ok(ended)
        })
    }

    /// Processes that have the GPU of `claim`, apart from this one and from owners of other claims.
    fn users(&self, record: &Record, claim: &GpuClaim) -> Vec<Evidence> {
        users_of_gpu(&GpuQuestion {
            function: claim.function,
            nodes: nodes(&self.0.root, claim.function),
            owner: claim.owner.clone(),
            others: other_owners(&record.gpus, claim),
        })
    }
}

/// Process numbers of the live owners of other claims. A dead one's number may belong to a child that keeps the GPU.
fn other_owners(claims: &[GpuClaim], claim: &GpuClaim) -> Vec<u32> {
    let others = claims.iter().map(|other| &other.owner).filter(|owner| owner.pid != claim.owner.pid);
    others.filter(|owner| owner.is_alive()).map(|owner| owner.pid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::Owner;

    #[test]
    fn a_process_with_the_number_of_a_dead_owner_is_no_owner() {
        let claim = |owner| GpuClaim {
            function: "0009:01:00.0".parse().unwrap(),
            region: "egm4".to_owned(),
            owner,
            since: 0,
            lock: 0,
            evidence: Vec::new(),
        };
        let live = Owner::this("vm1");
        let dead = Owner { started: live.started + 1, ..live.clone() };
        let asked = claim(Owner { pid: u32::MAX, ..live.clone() });
        assert_eq!(other_owners(&[claim(live.clone())], &asked), [live.pid]);
        assert!(other_owners(&[claim(dead)], &asked).is_empty());
        assert!(other_owners(std::slice::from_ref(&asked), &asked).is_empty());
    }
}
