//! KVM's VFIO device, which holds VFIO's files: with them KVM keeps caches coherent where a device's DMA does not
//! snoop, and a function's driver can find the VM that it is in (`Documentation/virt/kvm/devices/vfio.rst`).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use kvm_bindings::{
    KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_DEV_VFIO_FILE_DEL, kvm_create_device, kvm_device_attr,
    kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::{KvmError, Vm, into_io};
use crate::passthrough::InterruptLine;

impl Vm {
    /// Returns a function that adds a VFIO file that this machine uses to KVM (`true`), or removes it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn vfio_files(
        &self,
    ) -> Result<impl Fn(BorrowedFd<'_>, bool) -> io::Result<()> + Send + Sync + 'static, KvmError> {
        let mut wanted = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, ..Default::default() };
        let device = self
            .fd
            .create_device(&mut wanted)
            .map_err(|error| KvmError::call("KVM_CREATE_DEVICE for VFIO", error))?;
        Ok(move |file: BorrowedFd<'_>, added: bool| {
            let descriptor = file.as_raw_fd();
            let attribute = kvm_device_attr {
                group: KVM_DEV_VFIO_FILE,
                attr: u64::from(if added { KVM_DEV_VFIO_FILE_ADD } else { KVM_DEV_VFIO_FILE_DEL }),
                // The kernel reads the number during the call.
                addr: u64::try_from((&raw const descriptor).expose_provenance()).map_err(io::Error::other)?,
                flags: 0,
            };
            device.set_device_attr(&attribute).map_err(into_io)
        })
    }

    /// Interrupt line `gsi`, level triggered, for a device that must be notified when the guest has served it.
    pub(crate) fn level_line(&self, gsi: u32) -> LevelLine {
        LevelLine { fd: Arc::clone(&self.fd), gsi }
    }
}

/// A line that KVM lowers when the guest ends the interrupt; KVM then signals the resample eventfd.
#[derive(Clone)]
pub(crate) struct LevelLine {
    fd: Arc<VmFd>,
    gsi: u32,
}

impl InterruptLine for LevelLine {
    fn connect(&self, trigger: &EventFd, resample: &EventFd) -> io::Result<()> {
        self.fd.register_irqfd_with_resample(trigger, resample, self.gsi).map_err(into_io)
    }

    fn disconnect(&self, trigger: &EventFd) {
        // Fails only for a pair that is not connected.
        let _ = self.fd.unregister_irqfd(trigger, self.gsi);
    }
}
