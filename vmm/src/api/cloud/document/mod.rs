//! The documents of vm.create and of requests that change a machine: every field of v54, and two more that kata-containers
//! sends.
//!
//! Types and defaults are cloud-hypervisor's, so that an omitted field means the same.

mod devices;
mod machine;
mod memory;

pub(crate) use devices::{
    DeviceConfig, DiskConfig, NetConfig, RemovedDevice, Resize, UserDeviceConfig, VsockConfig,
};
pub(super) use machine::*;
pub(crate) use machine::{ConsoleOutputMode, VmConfig};
pub(super) use memory::*;

/// Declares objects of the document. An unknown field is an error; one without a default is required unless it is an
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

/// Declares objects that describe a PCI device, each with fields for its id and address: serde's `flatten` does not work
/// with `deny_unknown_fields`.
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
