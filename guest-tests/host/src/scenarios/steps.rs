//! The functions that run the steps of scenarios.

use super::{assigned, confined, grace, kernel, peer, plugged, ram, rdma, slices, user};
use crate::engine::scenario::Scenario;
use crate::runner::steps::StepsOf;

/// Scenarios that are more than boots of one machine, by name.
const STEPS: &[(&str, StepsOf)] = &[
    (ram::HUGETLB.name, crate::slices::ram_pages::run),
    (slices::DEVDAX_OWNERS.name, crate::slices::owners::run),
    (slices::FSDAX.name, crate::slices::files::run),
    (slices::DEVICE_KINDS.name, crate::slices::device::kinds),
    (kernel::TESTS.name, crate::slices::kernel_tests::run),
    (assigned::NET.name, crate::assigned::network::run),
    (assigned::SWITCHED.name, crate::assigned::network::run),
    (assigned::MOVES.name, crate::assigned::misuse::run),
    (assigned::PAIR.name, crate::assigned::pair::run),
    (assigned::FAULT.name, crate::assigned::iommu_fault::run),
    (assigned::ERROR.name, crate::assigned::aer::run),
    (assigned::REFUSED.name, crate::assigned::refused::run),
    (assigned::RESET.name, crate::assigned::reset::run),
    (assigned::DMA_KINDS.name, crate::assigned::dma::run),
    (assigned::DMA_IOMMUFD.name, crate::assigned::dma::run),
    (assigned::ROUNDS.name, crate::assigned::rounds::run),
    (confined::MEM.name, crate::assigned::confined::run),
    (confined::PIN.name, crate::assigned::dma_pin::run),
    (plugged::HOTPLUG.name, crate::assigned::plugged::run),
    (plugged::REQUEST.name, crate::assigned::plugged::requested),
    (user::SERVED.name, crate::assigned::vfio_user::run),
    (user::PLUGGED.name, crate::assigned::function::run),
    (peer::QEMU.name, crate::peers::steps::run_qemu),
    (peer::CLOUD_HYPERVISOR.name, crate::peers::steps::run_cloud_hypervisor),
    (rdma::CARDS.name, crate::rdma::guests::run),
    (rdma::VIRTIO.name, crate::rdma::guests::run),
    (ram::GRACE_HUGETLB.name, crate::slices::ram_pages::run),
    (grace::EGM.name, crate::grace::egm::run),
    (grace::USER.name, crate::assigned::vfio_user::run),
    (grace::GPU.name, crate::grace::gpu::run),
    (grace::OUTSIDE.name, crate::grace::outside::run),
    (grace::TRUST.name, crate::grace::trust::run),
    (confined::GRACE_EGM.name, crate::assigned::confined::run),
    (grace::RDMA.name, crate::grace::rdma::run),
    (grace::AGAIN.name, crate::grace::again::run),
    (grace::LARGE_PAGES.name, crate::grace::gpu::run),
    (plugged::PULLED.name, crate::assigned::plugged::pulled),
    (plugged::PULLED_IOMMUFD.name, crate::assigned::plugged::pulled),
];

/// The function that runs the steps of `scenario`, if it has one of its own.
pub(crate) fn steps_of(scenario: &Scenario) -> Option<StepsOf> {
    let name = scenario.fault.map_or(scenario.name, |fault| fault.of);
    STEPS.iter().find(|(of, _)| *of == name).map(|(_, run)| *run)
}
