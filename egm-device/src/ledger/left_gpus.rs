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

    /// Ends those of `claims`, which their owner leaves, whose GPU no process has; the others get the evidence.
    pub(super) fn end_claims(&self, claims: &[GpuClaim]) -> Result<Vec<GpuClaim>, LedgerError> {
        if claims.is_empty() {
            return Ok(Vec::new());
        }
        let (record, _) = self.look()?;
        let found: Vec<Vec<Evidence>> = claims.iter().map(|claim| self.users(&record, claim)).collect();
        self.change(|record| {
            let mut ended = Vec::new();
            for (claim, evidence) in claims.iter().zip(&found) {
                if evidence.is_empty() {
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
        let others = record.gpus.iter().map(|other| other.owner.pid).filter(|pid| *pid != claim.owner.pid);
        users_of_gpu(&GpuQuestion {
            function: claim.function,
            nodes: nodes(&self.0.root, claim.function),
            owner: claim.owner.clone(),
            others: others.collect(),
        })
    }
}
