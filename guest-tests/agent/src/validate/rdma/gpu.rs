//! GPU memory, and memory that CUDA gave, registered for an RDMA device in each of the ways that there are.

use std::os::fd::AsRawFd;
use std::path::Path;

use egm_vendor::cuda::{Attribute, CudaError, Kind, Memory};
use egm_vendor::verbs::{Access, Mlx5, Registered, VerbsError};

use super::super::Setting;
use super::super::cuda::each::on_gpu;
use super::super::cuda::gpu::Gpu;
use super::data::GUARD;
use super::loopback::{self, Loopback};
use super::site::Site;
use super::trial::{LARGEST, tried};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::{library, sysfs};

/// Modules by which the kernel resolves addresses of GPU memory.
const PEERMEM: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// `rdma.gpu_dmabuf`: GPU memory that is registered as a dma-buf.
pub(super) fn dmabuf(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    if let Some(finding) = takes_none(site)? {
        return Ok(finding);
    }
    on_device_memory(setting, |gpu, memory| {
        let descriptor = match memory.dma_buf() {
            Ok(descriptor) => descriptor,
            Err(error) => return Ok(not_exported(gpu, &error)),
        };
        loopback::with(site, setting.seed, |wire| {
            let size = usize::try_from(memory.bytes()).unwrap_or(usize::MAX);
            let number = descriptor.as_raw_fd();
            match wire.domain.register_dmabuf(number, 0, size, memory.address(), Access::ALL) {
                Ok(region) => tried(wire, setting, gpu, &memory, &region, true),
                Err(error) => Ok(Finding::failed(format!(
                    "{} takes dma-bufs, but not one of GPU memory: {error}; see the kernel's log of both drivers",
                    site.name
                ))),
            }
        })
    })
}

/// `rdma.gpu_peermem`: GPU memory that is registered by its address.
pub(super) fn peermem(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    let loaded = PEERMEM.into_iter().find(|name| Path::new("/sys/module").join(name).exists());
    on_device_memory(setting, |gpu, memory| {
        loopback::with(site, setting.seed, |wire| match wire.domain.register_cuda(memory, Access::ALL) {
            Ok(region) => by_address(wire, setting, gpu, &region),
            Err(error) => Ok(refused(loaded, &site.name, &error)),
        })
    })
}

/// The finding if GPU memory was not registered by its address, `loaded` being the module for that.
fn refused(loaded: Option<&str>, device: &str, error: &VerbsError) -> Finding {
    match loaded {
        Some(name) => Finding::failed(format!(
            "{name} is loaded, but {device} does not take GPU memory by its address: {error}; the module does nothing where it was not built against the same ib_core (MOFED)"
        )),
        None => Finding::skipped(format!(
            "neither {} is loaded, and {device} does not take GPU memory without ({error}); dma-buf is the newer way",
            PEERMEM.join(" nor ")
        )),
    }
}

/// `rdma.cuda_host_numa`: what extended GPU memory is to a program of CUDA's.
pub(super) fn host_numa(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    on_gpu(|gpu| {
        if let Some(attribute) = gpu.context.attributes().denied(Kind::HostNuma(0)) {
            return Ok(Finding::skipped(format!("this GPU reports 0 for {attribute}")));
        }
        let mut claim = Claim::default();
        for node in gpu.nodes()? {
            let bytes = bytes(setting);
            let memory = Memory::new(&gpu.context, Kind::HostNuma(node), bytes)?;
            let finding = loopback::with(site, setting.seed, |wire| {
                match wire.domain.register_cuda(memory, Access::ALL) {
                    Ok(region) => by_address(wire, setting, gpu, &region),
                    Err(error) => Ok(Finding::failed(error.to_string())),
                }
            })?;
            let said = format!("node {node}: {}", finding.reason);
            if finding.outcome == egm_guest::findings::Outcome::Passed {
                claim.seen(said)
            } else {
                claim.untrue(said)
            }
        }
        Ok(claim.finish())
    })
}

/// `rdma.data_direct`: GPU memory that the card reaches past the processor.
pub(super) fn data_direct(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    let mlx5 = match library::open(&[Mlx5::NAME]) {
        Ok(library) => library,
        Err(skipped) => return Ok(skipped),
    };
    let mlx5 = match Mlx5::new(mlx5) {
        Ok(mlx5) => mlx5,
        Err(error) => {
            return Ok(Finding::skipped(format!("{error}, for Data Direct: rdma-core of MLX5_1.25")));
        }
    };
    let function = match mlx5.data_direct(site.context) {
        Ok(path) => path.rsplit('/').next().unwrap_or_default().to_owned(),
        Err(error) if matches!(error.number(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
            return Ok(Finding::skipped(format!(
                "{} is no device of mlx5; a ConnectX-8 has Data Direct",
                site.name
            )));
        }
        Err(error) if error.number() == Some(libc::ENODEV) => {
            return Ok(Finding::skipped(no_function(&error)));
        }
        Err(error) => return Ok(Finding::failed(error.to_string())),
    };
    on_device_memory(setting, |gpu, memory| {
        let descriptor = match memory.dma_buf_over_pcie() {
            Ok(descriptor) => descriptor,
            Err(error) => return Ok(not_exported(gpu, &error)),
        };
        loopback::with(site, setting.seed, |wire| {
            let size = usize::try_from(memory.bytes()).unwrap_or(usize::MAX);
            let (number, name) = (descriptor.as_raw_fd(), memory.address());
            match wire.domain.register_data_direct(&mlx5, number, size, name, Access::ALL) {
                Ok(region) => tried(wire, setting, gpu, &memory, &region, true),
                Err(error) => Ok(Finding::failed(format!(
                    "{function} is there, but takes no GPU memory: {error}; its IOMMU group must be the GPU's, and BAR 1 of the GPU where the host has it"
                ))),
            }
        })
    })
}

/// Reason why there is no way past the processor.
fn no_function(error: &VerbsError) -> String {
    const FUNCTION: (u64, u64) = (0x15b3, 0x2100);
    let of = |function: &String| {
        let file = |name: &str| sysfs::number(format!("/sys/bus/pci/devices/{function}/{name}")).ok();
        Some((file("vendor")?, file("device")?))
    };
    let functions = sysfs::names("/sys/bus/pci/devices");
    match functions.iter().find(|name| of(name) == Some(FUNCTION)) {
        None => {
            "no function 15b3:2100 is in this guest: pass it beside the ConnectX-8, with its VPD".to_owned()
        }
        Some(name) => format!(
            "{name} is here, but the driver does not pair it with this card ({error}): is its VPD readable?"
        ),
    }
}

/// Reason why no dma-buf can be tried with this device, if so.
fn takes_none(site: &Site<'_>) -> Result<Option<Finding>, Broken> {
    Ok(match site.context.domain()?.takes_dmabuf() {
        Ok(true) => None,
        Ok(false) => {
            Some(Finding::skipped(format!("the driver of {} takes no dma-buf: mlx5 does", site.name)))
        }
        Err(error) => {
            Some(Finding::failed(format!("{} does not say whether it takes dma-bufs: {error}", site.name)))
        }
    })
}

/// The finding if the driver of the GPU gave no dma-buf.
fn not_exported(gpu: &Gpu, error: &CudaError) -> Finding {
    if gpu.context.attributes().has(Attribute::DMA_BUF) {
        Finding::failed(format!(
            "this GPU reports that its memory can be a dma-buf, but exports none: {error}"
        ))
    } else {
        Finding::skipped(format!("this GPU reports 0 for {}", Attribute::DMA_BUF))
    }
}

/// Bytes of memory that is tried.
pub(in crate::validate) fn bytes(setting: &Setting) -> u64 {
    let most = usize::try_from(setting.most).unwrap_or(LARGEST);
    (most.clamp(1 << 17, LARGEST) + 2 * GUARD).next_multiple_of(8) as u64
}

/// Does `work` with memory of the first GPU.
fn on_device_memory(
    setting: &Setting,
    work: impl FnOnce(&Gpu, Memory) -> Result<Finding, Broken>,
) -> Result<Finding, Broken> {
    on_gpu(|gpu| {
        if let Some(attribute) = gpu.context.attributes().denied(Kind::Device) {
            return Ok(Finding::skipped(format!("this GPU reports 0 for {attribute}")));
        }
        let memory = Memory::new(&gpu.context, Kind::Device, bytes(setting))?;
        work(gpu, memory)
    })
}

fn by_address(
    wire: &Loopback<'_>,
    setting: &Setting,
    gpu: &Gpu,
    region: &Registered<'_, Memory>,
) -> Result<Finding, Broken> {
    let memory =
        region.cuda().ok_or_else(|| Broken::Other("a registration without its memory".to_owned()))?;
    tried(wire, setting, gpu, memory, region, true)
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::*;

    #[test]
    fn a_refusal_is_a_fault_only_where_the_module_is_loaded() {
        let error = VerbsError::NoCall { call: "ibv_reg_mr" };
        let loaded = refused(Some("nvidia_peermem"), "mlx5_0", &error);
        assert!(loaded.outcome == Outcome::Failed && loaded.reason.contains("nvidia_peermem is loaded"));
        let without = refused(None, "rxe0", &error);
        assert!(
            without.outcome == Outcome::Skipped && without.reason.contains("nvidia_peermem nor nv_peer_mem")
        );
    }
}
