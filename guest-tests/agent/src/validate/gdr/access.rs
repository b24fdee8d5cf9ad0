//! The ways to a GPU's memory, and the GPU's own side of it.

use egm_vendor::cuda::{Kind, Memory};
use egm_vendor::gdr::{DmaBuf, Gdr, GdrError, LIBRARY, Window};

use crate::error::Broken;
use crate::finding::Finding;
use crate::library;
use crate::validate::cuda::gpu::Gpu;

impl From<GdrError> for Broken {
    fn from(error: GdrError) -> Self {
        Self::Other(error.to_string())
    }
}

/// A way to a GPU's memory.
#[derive(Clone, Copy)]
pub(super) struct AccessMethod {
    /// For series of figures.
    pub(super) name: &'static str,
    by: By,
}

#[derive(Clone, Copy)]
enum By {
    DmaBuf,
    Library,
}

/// Device file of GDRCopy's module.
const MODULE: &str = "/dev/gdrdrv";

/// A dma-buf of the driver's, mapped.
pub(super) const DMA_BUF: AccessMethod = AccessMethod { name: "dma-buf", by: By::DmaBuf };
pub(super) const GDRAPI: AccessMethod = AccessMethod { name: "gdrapi", by: By::Library };

impl AccessMethod {
    /// Maps `memory` and has `what` use it; skipped with the reason when this machine has no such way.
    pub(super) fn with(
        self,
        memory: &Memory,
        what: impl FnOnce(&dyn Window) -> Result<Finding, Broken>,
    ) -> Result<Finding, Broken> {
        let bytes = usize::try_from(memory.bytes()).unwrap_or(usize::MAX);
        match self.by {
            By::DmaBuf => match mapped_dma_buf(memory, bytes) {
                Ok(Ok(window)) => what(&window),
                Ok(Err(skipped)) => Ok(skipped),
                Err(broken) => Err(broken),
            },
            By::Library => {
                let loaded = match library::open(&[LIBRARY]) {
                    Ok(loaded) => loaded,
                    Err(finding) => {
                        let has =
                            if std::path::Path::new(MODULE).exists() { "is there" } else { "is missing" };
                        return Ok(Finding::skipped(format!(
                            "{}; its module's {MODULE} {has}",
                            finding.reason
                        )));
                    }
                };
                match Gdr::open(loaded) {
                    Ok(gdr) => match gdr.map(memory.address(), bytes) {
                        Ok(window) => what(&window),
                        // Its report about its own mapping is untrue.
                        Err(error @ GdrError::Pinned { .. }) => Ok(Finding::failed(error.to_string())),
                        Err(error) => Err(error.into()),
                    },
                    Err(error @ (GdrError::NoDriver(_) | GdrError::Symbol { .. })) => {
                        Ok(Finding::skipped(error.to_string()))
                    }
                    Err(error) => Err(error.into()),
                }
            }
        }
    }
}

/// `CUDA_ERROR_INVALID_VALUE`: the answer of drivers before CUDA 12.8 to unknown flags.
const INVALID_VALUE: u32 = 1;

/// GPU memory as a dma-buf, mapped; or why the platform has no such thing, with all that was tried. What is no such
/// answer is an error.
fn mapped_dma_buf(memory: &Memory, bytes: usize) -> Result<Result<DmaBuf, Finding>, Broken> {
    let plain = match memory.dma_buf() {
        Ok(descriptor) => DmaBuf::map(&descriptor, bytes),
        Err(error) if error.is_unsupported() => {
            return Ok(Err(Finding::skipped(format!("no dma-buf of GPU memory: {error}"))));
        }
        Err(error) => return Err(error.into()),
    };
    let refused = match plain {
        Ok(window) => return Ok(Ok(window)),
        Err(error @ GdrError::NotMappable(_)) => error,
        Err(error) => return Err(error.into()),
    };
    // Where processors reach the GPU by another way than PCI Express, the plain one may be of that.
    let second = match memory.dma_buf_over_pcie() {
        Ok(descriptor) => match DmaBuf::map(&descriptor, bytes) {
            Ok(window) => return Ok(Ok(window)),
            Err(error @ GdrError::NotMappable(_)) => error.to_string(),
            Err(error) => return Err(error.into()),
        },
        Err(error) if error.is_unsupported() || error.code() == Some(INVALID_VALUE) => error.to_string(),
        Err(error) => return Err(error.into()),
    };
    Ok(Err(Finding::skipped(format!("{refused}; asked for one behind PCI Express: {second}"))))
}

/// Writes the pattern, all over the memory, and waits.
pub(super) fn fill(gpu: &Gpu, memory: &Memory, seed: u64) -> Result<(), Broken> {
    gpu.fill(memory, memory.bytes(), seed)
}

/// The first `bytes` bytes, a multiple of 8, by a copy engine.
pub(super) fn bytes_of(gpu: &Gpu, memory: &Memory, bytes: u64) -> Result<Vec<u8>, Broken> {
    let staging = Memory::new(&gpu.context, Kind::Pinned, bytes)?;
    let words = staging.words()?;
    words.fill(!0);
    gpu.stream.copy(staging.part(0, bytes)?, memory.part(0, bytes)?)?;
    gpu.stream.synchronize()?;
    Ok((0..bytes / 8).flat_map(|index| words.read(index).to_ne_bytes()).collect())
}
