//! Memory attributes that a GPU reports, and the kinds of memory that they permit. Pure.

use std::collections::BTreeMap;
use std::fmt;

use cudarc::driver::sys::CUdevice_attribute as Theirs;

use crate::cuda::Kind;

/// A number of `CUdevice_attribute` and its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attribute {
    /// Value of its enumerator in `cuda.h`, which `cuDeviceGetAttribute` takes.
    pub number: i32,
    name: &'static str,
}

impl fmt::Display for Attribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = self.name.strip_prefix("CU_DEVICE_ATTRIBUTE_").unwrap_or(self.name);
        write!(f, "{short} ({})", self.number)
    }
}

macro_rules! attributes {
    ($($constant:ident $name:ident;)*) => {
        impl Attribute {
            $(
                #[doc = concat!("`", stringify!($name), "`.")]
                pub const $constant: Self = Self { number: Theirs::$name as i32, name: stringify!($name) };
            )*
        }

        /// The attributes that are looked at.
        pub const NUMBERS: &[Attribute] = &[$(Attribute::$constant),*];
    };
}

attributes! {
    WARP_SIZE CU_DEVICE_ATTRIBUTE_WARP_SIZE;
    PROCESSORS CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    L2_BYTES CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
    MAJOR CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    MINOR CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
    MANAGED CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY;
    HOST_ATOMICS CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED;
    PAGEABLE CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS;
    CONCURRENT_MANAGED CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
    HOST_REGISTER CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED;
    VMM CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    POSIX_HANDLE CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    RDMA_WITH_VMM CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    POOLS CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    RDMA CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED;
    RDMA_FLUSH CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS;
    RDMA_ORDER CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
    DMA_BUF CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
    FABRIC_HANDLE CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
    NUMA_CONFIG CU_DEVICE_ATTRIBUTE_NUMA_CONFIG;
    NUMA_ID CU_DEVICE_ATTRIBUTE_NUMA_ID;
    MULTICAST CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
    HOST_ATOMICS_IN_PART CU_DEVICE_ATTRIBUTE_ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED;
    HOST_NUMA_ID CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID;
    HOST_NUMA CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    HOST_NUMA_POOLS CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED;
    HOST_NUMA_MULTINODE CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED;
}

/// Values of attributes; those that the driver does not know are missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes(BTreeMap<i32, i32>);

impl FromIterator<(i32, i32)> for Attributes {
    fn from_iter<I: IntoIterator<Item = (i32, i32)>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl Attributes {
    /// Value of an attribute.
    #[must_use]
    pub fn get(&self, attribute: Attribute) -> Option<i32> {
        self.0.get(&attribute.number).copied()
    }

    /// Whether the driver reports the attribute and it is not 0.
    #[must_use]
    pub fn has(&self, attribute: Attribute) -> bool {
        self.get(attribute).is_some_and(|value| value != 0)
    }

    /// Linux's NUMA node of the GPU's own memory, if it has one (`CU_DEVICE_NUMA_CONFIG_NUMA_NODE`).
    #[must_use]
    pub fn own_node(&self) -> Option<i32> {
        self.get(Attribute::NUMA_ID).filter(|_| self.get(Attribute::NUMA_CONFIG) == Some(1))
    }

    /// The attribute that excludes memory of `kind` for this GPU, if any.
    #[must_use]
    pub fn denied(&self, kind: Kind) -> Option<Attribute> {
        let needed: &[Attribute] = match kind {
            Kind::Device => &[Attribute::VMM],
            Kind::HostNuma(_) => &[Attribute::VMM, Attribute::HOST_NUMA],
            Kind::Pool(_) => &[Attribute::POOLS, Attribute::HOST_NUMA_POOLS],
            Kind::Pinned => &[],
            Kind::Registered | Kind::EgmDevice(_) => &[Attribute::HOST_REGISTER],
            Kind::Managed => &[Attribute::MANAGED],
            Kind::System => &[Attribute::PAGEABLE],
        };
        needed.iter().copied().find(|attribute| !self.has(*attribute))
    }

    /// Reason why processors and this GPU must not use memory of `kind` at the same time, if any.
    #[must_use]
    pub fn denied_at_once(&self, kind: Kind) -> Option<Attribute> {
        let managed = matches!(kind, Kind::Managed) && !self.has(Attribute::CONCURRENT_MANAGED);
        managed.then_some(Attribute::CONCURRENT_MANAGED).or_else(|| self.denied(kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An H200 assigned to an x86-64 guest, driver 580.159, by number.
    fn h200() -> Attributes {
        let values = [
            (83, 1),
            (86, 0),
            (88, 0),
            (89, 1),
            (99, 1),
            (102, 1),
            (103, 1),
            (110, 1),
            (115, 1),
            (116, 1),
            (124, 1),
            (128, 1),
            (132, 0),
            (134, 0),
            (141, 1),
            (142, 1),
            (143, 0),
        ];
        values.into_iter().collect()
    }

    fn kinds() -> [Kind; 8] {
        [
            Kind::Device,
            Kind::HostNuma(0),
            Kind::Pool(0),
            Kind::Pinned,
            Kind::Registered,
            Kind::EgmDevice("0000:01:00.0".parse().unwrap()),
            Kind::Managed,
            Kind::System,
        ]
    }

    #[test]
    fn numbers_are_those_of_the_header() {
        assert_eq!((Attribute::VMM.number, Attribute::HOST_NUMA_ID.number), (102, 134));
        assert_eq!(Attribute::HOST_NUMA_POOLS.to_string(), "HOST_NUMA_MEMORY_POOLS_SUPPORTED (142)");
    }

    #[test]
    fn an_h200_behind_pci_has_every_kind_but_pageable_memory() {
        let denied = kinds().map(|kind| h200().denied(kind));
        assert_eq!(denied, [None, None, None, None, None, None, None, Some(Attribute::PAGEABLE)]);
    }

    #[test]
    fn an_old_driver_without_such_attributes_has_pinned_memory_only() {
        let old = Attributes::default();
        let left: Vec<Kind> = kinds().into_iter().filter(|kind| old.denied(*kind).is_none()).collect();
        assert_eq!(left, [Kind::Pinned]);
        assert_eq!(old.denied(Kind::HostNuma(0)), Some(Attribute::VMM));
    }

    #[test]
    fn a_gpu_has_a_node_of_its_own_only_where_it_states_so() {
        let mut grace = h200();
        grace.0.extend([(130, 0), (131, 0)]);
        assert_eq!((h200().own_node(), grace.own_node()), (None, None));
        grace.0.extend([(130, 1), (131, 6)]);
        assert_eq!(grace.own_node(), Some(6));
    }

    #[test]
    fn managed_memory_is_shared_at_once_only_where_the_gpu_faults() {
        assert_eq!(h200().denied_at_once(Kind::Managed), None);
        let mut windows = h200();
        windows.0.insert(89, 0);
        assert_eq!(windows.denied(Kind::Managed), None);
        assert_eq!(windows.denied_at_once(Kind::Managed), Some(Attribute::CONCURRENT_MANAGED));
    }
}
