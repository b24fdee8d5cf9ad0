//! The functions that run the steps of scenarios.

use super::{confined, grace, kernel, passed, peer, plugged, ram, rdma, slices, user};
use crate::scenario::Scenario;
use crate::steps::StepsOf;

/// Scenarios that are more than boots of one machine, by name.
const STEPS: &[(&str, StepsOf)] = &[
    (ram::HUGETLB.name, crate::ram_pages::run),
    (slices::DEVDAX_OWNERS.name, crate::slice_owners::run),
    (slices::FSDAX.name, crate::slice_files::run),
    (slices::DEVICE_KINDS.name, crate::slice_device::kinds),
    (kernel::TESTS.name, crate::kernel_tests::run),
    (passed::NET.name, crate::passed_net::run),
    (passed::SWITCHED.name, crate::passed_net::run),
    (passed::MOVES.name, crate::passed_moves::run),
    (passed::PAIR.name, crate::passed_pair::run),
    (passed::FAULT.name, crate::passed_fault::run),
    (passed::ERROR.name, crate::passed_error::run),
    (passed::REFUSED.name, crate::passed_refused::run),
    (passed::RESET.name, crate::passed_reset::run),
    (passed::DMA_KINDS.name, crate::passed_dma::run),
    (passed::DMA_IOMMUFD.name, crate::passed_dma::run),
    (passed::ROUNDS.name, crate::passed_rounds::run),
    (confined::MEM.name, crate::confined::run),
    (confined::PIN.name, crate::dma_pin::run),
    (plugged::HOTPLUG.name, crate::plugged::run),
    (plugged::REQUEST.name, crate::plugged::requested),
    (user::SERVED.name, crate::passed_user::run),
    (user::PLUGGED.name, crate::passed::run),
    (peer::QEMU.name, crate::peer::run_qemu),
    (peer::CLOUD_HYPERVISOR.name, crate::peer::run_cloud_hypervisor),
    (rdma::CARDS.name, crate::rdma::run),
    (rdma::VIRTIO.name, crate::rdma::run),
    (ram::GRACE_HUGETLB.name, crate::ram_pages::run),
    (grace::EGM.name, crate::grace::run_egm),
    (grace::USER.name, crate::passed_user::run),
    (grace::GPU.name, crate::grace::run_gpu),
    (grace::OUTSIDE.name, crate::grace::run_outside),
    (grace::TRUST.name, crate::grace::run_trust),
    (confined::GRACE_EGM.name, crate::confined::run),
    (grace::RDMA.name, crate::grace::run_rdma),
    (grace::AGAIN.name, crate::grace::run_again),
    (grace::LARGE_PAGES.name, crate::grace::run_gpu),
    (plugged::PULLED.name, crate::plugged::pulled),
    (plugged::PULLED_IOMMUFD.name, crate::plugged::pulled),
];

/// The function that runs the steps of `scenario`, if it has one of its own.
pub(crate) fn steps_of(scenario: &Scenario) -> Option<StepsOf> {
    let name = scenario.fault.map_or(scenario.name, |fault| fault.of);
    STEPS.iter().find(|(of, _)| *of == name).map(|(_, run)| *run)
}
