//! The ways to a GPU's memory, and the GPU's own side of it.

use egm_cuda::{Attribute, Context, CudaError, Driver, Kernels, Kind, Memory, Shape, Stream};
use egm_gdr::{DmaBuf, Gdr, GdrError, LIBRARY, Window};

use crate::error::Broken;
use crate::finding::Finding;
use crate::library;

impl From<GdrError> for Broken {
    fn from(error: GdrError) -> Self {
        Self::Other(error.to_string())
    }
}

/// A way to a GPU's memory.
#[derive(Clone, Copy)]
pub(super) struct Way {
    /// For series of figures.
    pub(super) name: &'static str,
    by: By,
}

#[derive(Clone, Copy)]
enum By {
    DmaBuf,
    Library,
}

/// A dma-buf of the driver's, mapped.
pub(super) const DMA_BUF: Way = Way { name: "dma-buf", by: By::DmaBuf };
/// GDRCopy.
pub(super) const GDRAPI: Way = Way { name: "gdrapi", by: By::Library };

impl Way {
    /// Maps `memory` and has `what` use it; waived with the reason when this machine has no such way.
    pub(super) fn with(
        self,
        memory: &Memory,
        what: impl FnOnce(&dyn Window) -> Result<Finding, Broken>,
    ) -> Result<Finding, Broken> {
        let bytes = usize::try_from(memory.bytes()).unwrap_or(usize::MAX);
        match self.by {
            By::DmaBuf => match memory.dma_buf() {
                Ok(descriptor) => match DmaBuf::map(&descriptor, bytes) {
                    Ok(window) => what(&window),
                    Err(error @ GdrError::NotMappable(_)) => Ok(Finding::waived(error.to_string())),
                    Err(error) => Err(error.into()),
                },
                Err(error) => Ok(Finding::waived(format!("no dma-buf of GPU memory: {error}"))),
            },
            By::Library => {
                let loaded = match library::open(&[LIBRARY]) {
                    Ok(loaded) => loaded,
                    Err(finding) => return Ok(finding),
                };
                match Gdr::open(loaded) {
                    Ok(gdr) => match gdr.map(memory.address(), bytes) {
                        Ok(window) => what(&window),
                        // What it says of its own mapping is untrue.
                        Err(error @ GdrError::Pinned { .. }) => Ok(Finding::failed(error.to_string())),
                        Err(error) => Err(error.into()),
                    },
                    Err(error @ (GdrError::NoDriver(_) | GdrError::Symbol { .. })) => {
                        Ok(Finding::waived(error.to_string()))
                    }
                    Err(error) => Err(error.into()),
                }
            }
        }
    }
}

/// The first GPU, with our kernels.
pub(super) struct Gpu {
    pub(super) context: Context,
    kernels: Kernels,
    stream: Stream,
}

impl Gpu {
    /// The driver's first GPU, or why there is none.
    pub(super) fn first() -> Result<Self, Finding> {
        if let Some(finding) = library::unloadable("libcuda.so.1") {
            return Err(finding);
        }
        let broken = |error: CudaError| match error {
            CudaError::NoLibrary | CudaError::NoFunction(_) => Finding::waived(error.to_string()),
            error => Finding::error(error.to_string()),
        };
        let devices = Driver::open().and_then(Driver::devices).map_err(broken)?;
        let Some(device) = devices.first() else { return Err(Finding::waived("no GPU on this machine")) };
        let context = Context::new(*device).map_err(broken)?;
        if !context.attributes().has(Attribute::VMM) {
            return Err(Finding::waived(format!("this GPU has no {}", Attribute::VMM)));
        }
        let kernels = Kernels::new(&context).map_err(broken)?;
        let stream = Stream::new(&context).map_err(broken)?;
        Ok(Self { context, kernels, stream })
    }

    /// Writes the pattern of `seed`, and waits.
    pub(super) fn fill(&self, memory: &Memory, seed: u64) -> Result<(), Broken> {
        self.kernels.fill(&self.stream, Shape::whole(&self.context), memory.whole(), seed)?;
        Ok(self.stream.synchronize()?)
    }

    /// How many words are not the pattern of `seed`, by a kernel.
    pub(super) fn differing(&self, memory: &Memory, seed: u64) -> Result<u64, Broken> {
        let wrong = Memory::new(&self.context, Kind::Pinned, 64)?;
        let words = wrong.words()?;
        (0..words.count()).for_each(|index| words.write(index, 0));
        let shape = Shape::whole(&self.context);
        self.kernels.check(&self.stream, shape, memory.whole(), seed, wrong.whole())?;
        self.stream.synchronize()?;
        Ok(words.read(0))
    }

    /// All bytes, by a copy engine.
    pub(super) fn bytes_of(&self, memory: &Memory) -> Result<Vec<u8>, Broken> {
        let staging = Memory::new(&self.context, Kind::Pinned, memory.bytes())?;
        let words = staging.words()?;
        words.fill(!0);
        self.stream.copy(staging.part(0, memory.bytes())?, memory.whole())?;
        self.stream.synchronize()?;
        Ok((0..memory.bytes() / 8).flat_map(|index| words.read(index).to_ne_bytes()).collect())
    }
}
