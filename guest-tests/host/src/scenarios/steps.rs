//! The functions that run the steps of scenarios.

use super::{
    assigned, broker, confined, grace, kernel, peer, plugged, poison, ram, rdma, slices, snapshot, user, vfio,
};
use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::runner::steps::StepsOf;

/// The function of each scenario that declares steps, by name.
const STEPS: &[(&str, StepsOf)] = &[
    (ram::HUGETLB.name, crate::slices::ram_pages::run),
    (ram::GRACE_HUGETLB.name, crate::slices::ram_pages::run),
    (snapshot::SNAPSHOT.name, crate::runner::snapshot::run),
    (snapshot::UPGRADE.name, crate::runner::upgrade::run),
    (slices::MEM.name, crate::slices::owned::run),
    (slices::MEMMAP.name, crate::slices::owned::run),
    (slices::DEVDAX.name, crate::slices::owned::run),
    (slices::DEVDAX_OWNED.name, crate::slices::owned::run),
    (slices::HUGETLB.name, crate::slices::owned::run),
    (slices::DEVDAX_OWNERS.name, crate::slices::owners::run),
    (slices::FSDAX.name, crate::slices::files::run),
    (slices::MEMFD.name, crate::slices::own_memory::run),
    (slices::GUEST_MEMFD.name, crate::slices::own_memory::run),
    (slices::DEVICE.name, crate::slices::device::run),
    (slices::DEVICE_KINDS.name, crate::slices::device::kinds),
    (broker::SCENARIO.name, crate::slices::granted::run),
    (poison::FOUND.name, crate::slices::bad_page::run),
    (poison::READ.name, crate::slices::bad_page::run),
    (kernel::TESTS.name, crate::slices::kernel_tests::run),
    (vfio::NVME.name, crate::assigned::function::run),
    (vfio::REBOOT.name, crate::assigned::function::run),
    (vfio::IOMMUFD.name, crate::assigned::function::run),
    (vfio::INTX.name, crate::assigned::function::run),
    (vfio::DMA.name, crate::assigned::function::run),
    (vfio::DMA_OWN.name, crate::assigned::function::run),
    (vfio::SWITCH.name, crate::assigned::function::run),
    (vfio::HOSTILE.name, crate::assigned::function::run),
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
    (confined::GRACE_EGM.name, crate::assigned::confined::run),
    (confined::PIN.name, crate::assigned::dma_pin::run),
    (confined::PIN_IOMMUFD.name, crate::assigned::dma_pin::run),
    (plugged::HOTPLUG.name, crate::assigned::plugged::run),
    (plugged::REQUEST.name, crate::assigned::plugged::requested),
    (plugged::VIRTIO.name, crate::assigned::plugged_virtio::run),
    (plugged::SLICE.name, crate::slices::plugged::run),
    (plugged::PULLED.name, crate::assigned::plugged::pulled),
    (plugged::PULLED_IOMMUFD.name, crate::assigned::plugged::pulled),
    (user::SERVED.name, crate::assigned::vfio_user::run),
    (user::PLUGGED.name, crate::assigned::function::run),
    (peer::QEMU.name, crate::peers::steps::run_qemu),
    (peer::CLOUD_HYPERVISOR.name, crate::peers::steps::run_cloud_hypervisor),
    (rdma::CARDS.name, crate::rdma::guests::run),
    (rdma::VIRTIO.name, crate::rdma::guests::run),
    (grace::STOCK.name, crate::assigned::function::run),
    (grace::REBOOT.name, crate::assigned::function::run),
    (grace::MEDIUM_PAGES.name, crate::assigned::function::run),
    (grace::NVME.name, crate::assigned::function::run),
    (grace::INTX.name, crate::assigned::function::run),
    (grace::NODES.name, crate::assigned::function::run),
    (grace::USER.name, crate::assigned::vfio_user::run),
    (grace::EGM.name, crate::grace::egm::run),
    (grace::GPU.name, crate::grace::gpu::run),
    (grace::LARGE_PAGES.name, crate::grace::gpu::run),
    (grace::VFIO_USER_GPU.name, crate::grace::vfio_user_gpu::run),
    (grace::TRUST.name, crate::grace::trust::run),
    (grace::RDMA.name, crate::grace::rdma::run),
    (grace::AGAIN.name, crate::grace::again::run),
    (grace::POISON.name, crate::slices::bad_page::run),
    (grace::READ.name, crate::slices::bad_page::run),
];

/// The function that runs the steps of `scenario`, which declares steps.
pub(crate) fn steps_of(scenario: &Scenario) -> Result<StepsOf, LabError> {
    let name = scenario.fault.map_or(scenario.name, |fault| fault.of);
    let found = STEPS.iter().find(|(of, _)| *of == name).map(|(_, run)| *run);
    found.ok_or_else(|| LabError::Content {
        what: format!("scenario \"{name}\""),
        problem: "it declares steps, and scenarios/steps.rs lists none".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scenario::{Fault, Runs};
    use crate::scenarios::ALL;

    #[test]
    fn a_scenario_has_steps_if_and_only_if_it_declares_them() {
        for scenario in ALL {
            let is_listed = STEPS.iter().any(|(name, _)| *name == scenario.name);
            assert_eq!(scenario.runs == Runs::Steps, is_listed, "{}", scenario.name);
        }
    }

    #[test]
    fn steps_belong_to_one_scenario_each() {
        for (at, (name, _)) in STEPS.iter().enumerate() {
            assert!(ALL.iter().any(|scenario| scenario.name == *name), "{name} is no scenario");
            assert!(STEPS.iter().skip(at + 1).all(|(other, _)| other != name), "{name} is listed twice");
        }
    }

    #[test]
    fn declared_steps_that_are_not_listed_are_an_error() {
        let unlisted = Scenario { name: "unlisted", ..slices::MEM };
        let error = steps_of(&unlisted).unwrap_err();
        assert!(error.to_string().contains("\"unlisted\": it declares steps"), "{error}");
        let fault = Some(Fault { name: "some-fault", of: slices::MEM.name });
        assert!(steps_of(&Scenario { name: "slice-mem+some-fault", fault, ..slices::MEM }).is_ok());
    }
}
