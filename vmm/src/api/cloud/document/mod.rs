//! The documents: what vm.create, vm.add-device and vm.remove-device take, with every field of v54 and none besides, but
//! for two that kata-containers sends.
//!
//! Types and defaults are cloud-hypervisor's, so that what is left out means the same.

mod devices;
mod machine;
mod memory;

pub(super) use devices::*;
pub(crate) use devices::{DeviceConfig, RemovedDevice};
pub(crate) use machine::VmConfig;
pub(super) use machine::*;
pub(super) use memory::*;

/// Declares objects of the document. All fields are known, and those without a default are required unless they are an
/// `Option`.
macro_rules! object_types {
    ($($(#[$attribute:meta])* $name:ident { $($(#[$of_field:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $name {
            $($(#[$of_field])* pub(crate) $field: $type,)*
        }
    )*};
}

/// Declares objects that describe a PCI device: with its id and address, which serde cannot flatten where unknown fields
/// are mistakes.
macro_rules! device_types {
    ($($(#[$attribute:meta])* $name:ident { $($(#[$of_field:meta])* $field:ident: $type:ty,)* })*) => {
        object_types! {$(
            $(#[$attribute])*
            $name {
                $($(#[$of_field])* $field: $type,)*
                id: Option<String>,
                #[serde(default)]
                iommu: bool,
                #[serde(default)]
                pci_segment: u16,
                pci_device_id: Option<u8>,
            }
        )*}
    };
}

pub(super) use device_types;
pub(super) use object_types;

pub(super) const fn yes() -> bool {
    true
}
