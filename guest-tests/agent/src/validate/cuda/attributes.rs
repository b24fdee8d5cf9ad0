//! The GPU does what its attributes promise, and does not do what they deny.

use egm_vendor::cuda::{Attribute, CudaError, Kind, Memory, NUMBERS};

use super::each::on_each_gpu;
use super::gpu::Gpu;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// A little of everything: one piece of what the driver gives anyway.
const BYTES: u64 = 2 << 20;

/// Tries each attribute that can be tried.
pub(super) fn check(_: &Setting) -> Result<Finding, Broken> {
    on_each_gpu(|gpu| {
        let mut claim = Claim::default();
        let device = gpu.context.device();
        let version = device.driver().version()?;
        claim.seen(format!(
            "{} at {}, driver of CUDA {}.{}",
            device.name()?,
            device.pci_address()?,
            version / 1000,
            version % 1000 / 10
        ));
        let nodes = gpu.nodes()?;
        let near = gpu.context.attributes().get(Attribute::HOST_NUMA_ID).filter(|near| *near >= 0);
        if let Some(near) = near.filter(|near| !nodes.contains(near)) {
            claim.untrue(format!(
                "{} is {near}: no such node has memory, {nodes:?} have",
                Attribute::HOST_NUMA_ID
            ));
        }
        let node = nodes.first().copied().unwrap_or(0);
        let of = |kind| Memory::new(&gpu.context, kind, BYTES).map(drop);
        compare(gpu, &mut claim, Attribute::VMM, of(Kind::Device));
        compare(gpu, &mut claim, Attribute::HOST_NUMA, of(Kind::HostNuma(node)));
        compare(gpu, &mut claim, Attribute::HOST_NUMA_POOLS, of(Kind::Pool(node)));
        compare(gpu, &mut claim, Attribute::HOST_REGISTER, of(Kind::Registered));
        compare(gpu, &mut claim, Attribute::MANAGED, of(Kind::Managed));
        let device_memory = Memory::new(&gpu.context, Kind::Device, BYTES);
        if let Ok(memory) = device_memory {
            compare(gpu, &mut claim, Attribute::POSIX_HANDLE, memory.export().map(drop));
            compare(gpu, &mut claim, Attribute::DMA_BUF, memory.dma_buf().map(drop));
        }
        let values = NUMBERS.iter().map(|attribute| {
            let value = gpu.context.attributes().get(*attribute);
            format!("{attribute}={}", value.map_or_else(|| "?".to_owned(), |value| value.to_string()))
        });
        claim.seen(values.collect::<Vec<_>>().join(" "));
        Ok(claim.finish())
    })
}

/// Compares what an attribute promises with the result of a try.
fn compare(gpu: &Gpu, claim: &mut Claim, attribute: Attribute, tried: Result<(), CudaError>) {
    match (gpu.context.attributes().has(attribute), tried) {
        (true, Err(error)) => claim.untrue(format!("{attribute} is promised, but {error}")),
        (false, Ok(())) => claim.untrue(format!("{attribute} is denied, but it can be done")),
        (true, Ok(())) | (false, Err(_)) => {}
    }
}
