//! Whether a function can be assigned to a guest: its driver, and the other members of its IOMMU group.
//!
//! A group holds the functions that the IOMMU cannot separate, so it goes to one owner as a whole. The kernel's rule
//! (`iommu_device_claim_dma_owner`): no other owner does DMA in it. The kernel trusts only drivers that promise that.

use egm_address::PciAddress;

use crate::host::{HostFunction, MISSING_REMEDY};
use crate::ids::NVIDIA;

/// A member of a group and its driver.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Member {
    pub address: PciAddress,
    pub driver: String,
    /// Whether it is a bridge, which has no other driver.
    pub bridge: bool,
}

/// Why a function cannot be assigned to a guest in the host's current state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum GroupError {
    #[error("host function {function} does not exist")]
    Missing { function: PciAddress },
    /// A bridge: the functions behind it would go with it.
    #[error("host function {function} is a bridge, which guests are not given")]
    Bridge { function: PciAddress },
    /// No IOMMU in front of it.
    #[error("host function {function} is in no IOMMU group: nothing would keep its accesses in the guest")]
    NoGroup { function: PciAddress },
    /// Another driver, or none.
    #[error("host function {function} is bound to {driver}, and not to vfio-pci or a VFIO variant driver")]
    Driver {
        function: PciAddress,
        /// Its driver, or `no driver`.
        driver: String,
    },
    /// Others in its group are in use.
    #[error(
        "IOMMU group {group} of host function {function} is in use by the host: {}",
        members.iter().map(|member| format!("{} by {}", member.address, member.driver)).collect::<Vec<_>>().join(", ")
    )]
    InUse {
        function: PciAddress,
        group: u32,
        /// The members that the host uses.
        members: Vec<Member>,
    },
}

impl GroupError {
    /// Command or change that resolves the error.
    pub fn help(&self) -> String {
        match self {
            Self::Missing { .. } => MISSING_REMEDY.to_owned(),
            Self::Bridge { .. } => "name the functions behind it".to_owned(),
            Self::NoGroup { .. } => IOMMU_REMEDY.to_owned(),
            Self::Driver { function, .. } => remedy(&[*function]),
            Self::InUse { members, .. } if members.iter().any(|member| member.bridge) => {
                "bridges stay with the host: choose a function of another group, or put it into another slot"
                    .to_owned()
            }
            Self::InUse { members, .. } => {
                remedy(&members.iter().map(|member| member.address).collect::<Vec<_>>())
            }
        }
    }
}

/// Help text for a host that does not isolate its functions.
pub const IOMMU_REMEDY: &str = "enable the IOMMU in the firmware (VT-d, AMD-Vi, SMMU), and on Intel hosts in the kernel (intel_iommu=on)";

/// Command that binds `functions` to VFIO.
pub fn remedy(functions: &[PciAddress]) -> String {
    let names: Vec<String> = functions.iter().map(ToString::to_string).collect();
    format!("egm-vmm bind {}", names.join(" "))
}

/// Whether it is a bridge of the host, host bridges included. NVIDIA's "other bridges" (class 0680) are endpoints: NVSwitches,
/// which go to guests that manage them.
pub const fn is_bridge(function: &HostFunction) -> bool {
    let is_nvswitch = function.class >> 8 == 0x0680 && function.vendor == NVIDIA;
    function.class >> 16 == 0x06 && !is_nvswitch
}

/// Whether a driver of this name is VFIO's: `vfio-pci`, or a variant of it (`mlx5_vfio_pci`, `nvgrace_gpu_vfio_pci`).
pub fn is_vfio_driver(driver: &str) -> bool {
    driver.replace('_', "-").ends_with("vfio-pci")
}

/// Whether the kernel releases a group with this member: a VFIO driver, no driver, or one that does no DMA of its own.
fn is_harmless(function: &HostFunction) -> bool {
    function
        .driver
        .as_deref()
        .is_none_or(|name| is_vfio_driver(name) || matches!(name, "pci-stub" | "pcieport"))
}

/// The other members of a function's group.
pub fn members<'a>(
    functions: &'a [HostFunction],
    function: &'a HostFunction,
) -> impl Iterator<Item = &'a HostFunction> {
    let group = function.iommu_group;
    let others = functions.iter().filter(move |other| other.address != function.address);
    others.filter(move |other| group.is_some() && other.iommu_group == group)
}

/// Checks that the function at `address` can be assigned to a guest now.
///
/// # Errors
/// The first [`GroupError`] of: missing function, bridge, no group, its driver, the other members' drivers.
pub fn usable(functions: &[HostFunction], address: PciAddress) -> Result<(), GroupError> {
    let function = super::find(functions, address).ok_or(GroupError::Missing { function: address })?;
    if is_bridge(function) {
        return Err(GroupError::Bridge { function: address });
    }
    let group = function.iommu_group.ok_or(GroupError::NoGroup { function: address })?;
    if !function.driver.as_deref().is_some_and(is_vfio_driver) {
        let driver = function.driver.clone().unwrap_or_else(|| "no driver".to_owned());
        return Err(GroupError::Driver { function: address, driver });
    }
    let busy: Vec<Member> = members(functions, function)
        .filter(|other| !is_harmless(other))
        .map(|other| Member {
            address: other.address,
            driver: other.driver.clone().unwrap_or_default(),
            bridge: is_bridge(other),
        })
        .collect();
    if busy.is_empty() { Ok(()) } else { Err(GroupError::InUse { function: address, group, members: busy }) }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;

    #[test]
    fn a_bound_function_alone_in_its_group_is_usable() {
        let host = Host::two_switches();
        assert_eq!(usable(&host.functions(), host.gpu(0)), Ok(()));
    }

    #[test]
    fn the_user_of_a_group_is_named_with_the_command_that_takes_it() {
        let host = Host::two_switches();
        let mut all = host.functions();
        let disk = host.disk();
        for function in &mut all {
            if [host.gpu(0), disk].contains(&function.address) || function.class >> 8 == 0x0604 {
                function.iommu_group = Some(90);
            }
        }
        let error = usable(&all, host.gpu(0)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "IOMMU group 90 of host function 0000:18:00.0 is in use by the host: 0000:21:00.0 by nvme"
        );
        assert_eq!(error.help(), "egm-vmm bind 0000:21:00.0");
        all.iter_mut().find(|f| f.address == disk).unwrap().driver = Some("pci-stub".to_owned());
        assert_eq!(usable(&all, host.gpu(0)), Ok(()));
    }

    #[test]
    fn no_bridge_is_advised_to_be_bound_and_an_nvswitch_is_none() {
        let host = Host::two_switches();
        let mut all = host.functions();
        let disk = host.disk();
        for function in &mut all {
            if [host.gpu(0), disk].contains(&function.address) {
                function.iommu_group = Some(90);
            }
        }
        let neighbour = all.iter_mut().find(|f| f.address == disk).unwrap();
        (neighbour.class, neighbour.driver) = (0x06_0100, Some("lpc_ich".to_owned()));
        let error = usable(&all, host.gpu(0)).unwrap_err();
        assert!(error.to_string().ends_with("0000:21:00.0 by lpc_ich"), "{error}");
        assert!(error.help().contains("another group") && !error.help().contains("bind"), "{}", error.help());
        let neighbour = all.iter_mut().find(|f| f.address == disk).unwrap();
        (neighbour.class, neighbour.driver) = (0x06_8000, Some("vfio-pci".to_owned()));
        assert!(matches!(usable(&all, disk), Err(GroupError::Bridge { .. })), "a chipset function");
        all.iter_mut().find(|f| f.address == disk).unwrap().vendor = NVIDIA;
        assert_eq!((usable(&all, disk), usable(&all, host.gpu(0))), (Ok(()), Ok(())));
    }

    #[test]
    fn each_thing_that_is_missing_has_its_own_error() {
        let host = Host::two_switches();
        let mut all = host.functions();
        let error = usable(&all, host.disk()).unwrap_err();
        assert!(matches!(&error, GroupError::Driver { driver, .. } if driver == "nvme"), "{error}");
        assert_eq!(error.help(), "egm-vmm bind 0000:21:00.0");
        let gpu = host.gpu(0);
        all.iter_mut().find(|f| f.address == gpu).unwrap().iommu_group = None;
        assert_eq!(usable(&all, gpu), Err(GroupError::NoGroup { function: gpu }));
        let port = all.iter().find(|f| f.class >> 8 == 0x0604).unwrap().address;
        assert_eq!(usable(&all, port), Err(GroupError::Bridge { function: port }));
        let nowhere = "0000:ff:00.0".parse().unwrap();
        assert!(matches!(usable(&all, nowhere), Err(GroupError::Missing { .. })));
    }

    #[test]
    fn variant_drivers_are_vfio_s_and_others_are_not() {
        for name in ["vfio-pci", "mlx5_vfio_pci", "nvgrace_gpu_vfio_pci"] {
            assert!(is_vfio_driver(name), "{name}");
        }
        for name in ["nvidia", "pci-stub", "vfio", "uio_pci_generic"] {
            assert!(!is_vfio_driver(name), "{name}");
        }
    }
}
