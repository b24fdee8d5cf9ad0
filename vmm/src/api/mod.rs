//! APIs that other programs drive a machine by: `cloud` has the documents of cloud-hypervisor's.

pub(crate) mod cloud;
