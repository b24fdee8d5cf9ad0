//! PCI functions of the host. Today: what sysfs says of them, for a plan. To give one to a guest comes later.

pub mod host;
