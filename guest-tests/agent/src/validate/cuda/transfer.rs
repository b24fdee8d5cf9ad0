//! One transfer between a GPU and memory of the host, in each direction and by each engine, and that it moved right bytes.

use std::fmt;

use egm_vendor::cuda::{Memory, Shape, sum};

use super::gpu::{Gpu, note};
use crate::error::Broken;
use crate::finding::Claim;

/// Direction of a transfer between host and GPU, and its means: the first two are copies, the others kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TransferKind {
    CopyToGpu,
    CopyFromGpu,
    Read,
    Write,
}

impl TransferKind {
    pub(super) const ALL: [Self; 4] = [Self::CopyToGpu, Self::CopyFromGpu, Self::Read, Self::Write];

    const fn to_host(self) -> bool {
        matches!(self, Self::CopyFromGpu | Self::Write)
    }
}

impl fmt::Display for TransferKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CopyToGpu => "copy engine to GPU",
            Self::CopyFromGpu => "copy engine from GPU",
            Self::Read => "SM read",
            Self::Write => "SM write",
        })
    }
}

/// A GPU with memory of its own and of the host.
pub(super) struct Transfer<'m> {
    pub(super) gpu: &'m Gpu,
    pub(super) host: &'m Memory,
    pub(super) device: &'m Memory,
    /// Memory for the sums that [`egm_vendor::cuda::Kernels::read`] writes.
    pub(super) sums: &'m Memory,
    /// Bytes of one transfer.
    pub(super) bytes: u64,
}

impl Transfer<'_> {
    /// Writes the pattern of `seed` to the source and another one to the target.
    pub(super) fn prepare(&self, way: TransferKind, seed: u64) -> Result<(), Broken> {
        let (host, device) = if way.to_host() { (!seed, seed) } else { (seed, !seed) };
        self.gpu.fill(self.host, self.bytes, host)?;
        self.gpu.fill(self.device, self.bytes, device)
    }

    /// Launches one transfer on the GPU's stream, without waiting for its end.
    pub(super) fn launch(&self, way: TransferKind, seed: u64) -> Result<(), Broken> {
        let (stream, kernels, shape) = (&self.gpu.stream, &self.gpu.kernels, Shape::whole(&self.gpu.context));
        let (host, device) = (self.host.part(0, self.bytes)?, self.device.part(0, self.bytes)?);
        match way {
            TransferKind::CopyToGpu => stream.copy(device, host)?,
            TransferKind::CopyFromGpu => stream.copy(host, device)?,
            TransferKind::Read => kernels.read(stream, host, self.sums.whole())?,
            TransferKind::Write => kernels.write(stream, shape, host, seed)?,
        }
        Ok(())
    }

    /// Compares what the last transfer wrote, or the sum of what it read, with the pattern; `at` names it in the claim.
    pub(super) fn verify(
        &self,
        way: TransferKind,
        seed: u64,
        at: &str,
        claim: &mut Claim,
    ) -> Result<(), Broken> {
        if way == TransferKind::Read {
            let (read, right) = (self.gpu.total(self.sums)?, sum(seed, self.bytes / 8));
            claim.holds(read == right, || {
                format!("{at}: the sum of the words is {read:#x} instead of {right:#x}")
            });
            return Ok(());
        }
        let target = if way.to_host() { self.host } else { self.device };
        note(claim, at, self.gpu.compare(target, self.bytes, seed)?, seed);
        Ok(())
    }
}
