//! Extended registers of a vCPU (KVM api.rst, `KVM_GET_XSAVE2`). This is an unsafe module.
//!
//! Why it exists: KVM copies as many bytes as the processor's features need, whatever the size of the area that it is given.
//! What callers may rely on: the areas here have the size that KVM reported. It grows only by `arch_prctl`, which this program
//! does not call.
#![expect(unsafe_code, reason = "the size of an area that KVM copies is known only while the program runs")]

use kvm_bindings::{Xsave, kvm_xsave, kvm_xsave2};
use kvm_ioctls::{Cap, VcpuFd};

use super::{failed, malformed};
use crate::kvm::{Hypervisor, KvmError};

/// Words of the area that every KVM has.
const REGION: usize = size_of::<kvm_xsave>() / WORD;
const WORD: usize = size_of::<u32>();

/// Size of the area of this host's KVM.
#[derive(Debug, Clone, Copy)]
pub(super) struct XsaveSize {
    /// 32-bit words behind the region; `None` before Linux 5.17, which has no other area.
    extra: Option<usize>,
}

impl XsaveSize {
    pub(super) fn of(hypervisor: &Hypervisor) -> Self {
        let bytes = hypervisor.kvm().check_extension_int(Cap::Xsave2);
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0);
        Self { extra: bytes.map(|bytes| bytes.div_ceil(WORD).saturating_sub(REGION)) }
    }

    pub(super) fn read(self, fd: &VcpuFd) -> Result<Vec<u32>, KvmError> {
        let Some(extra) = self.extra else {
            return fd.get_xsave().map(|area| area.region.to_vec()).map_err(failed("KVM_GET_XSAVE"));
        };
        let mut area = Xsave::new(extra).map_err(|_| malformed("KVM_GET_XSAVE2"))?;
        // SAFETY: the area has the size that KVM reported, and no feature is enabled after that.
        unsafe { fd.get_xsave2(&mut area) }.map_err(failed("KVM_GET_XSAVE2"))?;
        let region = &area.as_fam_struct_ref().xsave.region;
        Ok(region.iter().chain(area.as_slice()).copied().collect())
    }

    /// Writes `words`, which may be fewer than here: XSAVE's header reports the features that they have.
    pub(super) fn write(self, fd: &VcpuFd, words: &[u32]) -> Result<(), KvmError> {
        let wrong = || malformed("KVM_SET_XSAVE");
        let (region, rest) = words.split_first_chunk::<REGION>().ok_or_else(wrong)?;
        let len = self.extra.unwrap_or_default();
        let xsave = kvm_xsave { region: *region, ..Default::default() };
        let mut area = Xsave::from_header(kvm_xsave2 { len, xsave }).map_err(|_| wrong())?;
        area.as_mut_slice().get_mut(..rest.len()).ok_or_else(wrong)?.copy_from_slice(rest);
        // SAFETY: the area has the size that KVM reported, and no feature is enabled after that.
        unsafe { fd.set_xsave2(&area) }.map_err(failed("KVM_SET_XSAVE"))
    }
}
