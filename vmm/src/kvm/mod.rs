//! The kernel's virtual machine. This is an unsafe module.
//!
//! Why it exists: the page that a vCPU shares with the kernel holds a union, and `kvm-ioctls` gives a VM's descriptor
//! as a number. What callers may rely on: nothing here changes the memory that the guest can reach; `Slots` does.
//! What they must do: drop [`Vm`] after its vCPUs: their descriptors keep the kernel's object, and with it the slots,
//! alive. `Machine` does so by the order of its fields.
#![expect(unsafe_code, reason = "a vCPU's page is a union, a VM's descriptor a number")]

mod error;
mod routes;
mod slots;
mod vfio;

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

pub(crate) use error::KvmError;
use kvm_ioctls::{Cap, IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
pub(crate) use routes::{Message, Routes};
pub(crate) use slots::{Slot, SlotTable, Slots};
pub(crate) use vfio::LevelLine;
use vmm_sys_util::eventfd::EventFd;

use crate::arch::native;

/// Capabilities that the hypervisor must offer; each with the text that an error shows when it does not.
const REQUIRED: [(Cap, &str); 6] = [
    (Cap::Irqchip, "an interrupt controller in the kernel"),
    (Cap::Irqfd, "interrupts by file descriptor"),
    (Cap::Ioeventfd, "doorbells by file descriptor"),
    (Cap::UserMemory, "guest memory from user space"),
    (Cap::IrqRouting, "MSI routes"),
    (Cap::ImmediateExit, "stopping a vCPU"),
];

/// An open `/dev/kvm` that offers what every machine here needs.
pub struct Hypervisor {
    kvm: Kvm,
}

impl Hypervisor {
    /// Opens `/dev/kvm` and checks that it can do what every machine here needs.
    ///
    /// # Errors
    /// `KvmError`; its help names what the operator can do.
    pub fn open() -> Result<Self, KvmError> {
        let kvm = Kvm::new().map_err(|error| match error.errno() {
            libc::ENOENT | libc::ENODEV | libc::ENXIO => KvmError::Missing,
            libc::EACCES | libc::EPERM => no_permission(),
            _ => KvmError::call("open /dev/kvm", error),
        })?;
        let version = kvm.get_api_version();
        if version != 12 {
            return Err(KvmError::Version { version });
        }
        match REQUIRED.into_iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
            Some((cap, what)) => Err(KvmError::Capability { cap, what }),
            None => Ok(Self { kvm }),
        }
    }

    /// Whether `cap` is offered.
    pub fn has(&self, cap: Cap) -> bool {
        self.kvm.check_extension(cap)
    }

    /// Most vCPUs of one machine.
    pub(crate) fn max_vcpus(&self) -> usize {
        self.kvm.get_max_vcpus()
    }

    /// For requests that only one architecture makes.
    pub(crate) const fn kvm(&self) -> &Kvm {
        &self.kvm
    }

    /// Makes an empty virtual machine with `address_bits` guest physical address bits.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn create_vm(&self, address_bits: u8) -> Result<Vm, KvmError> {
        let fd = loop {
            match native::vm::create(&self.kvm, address_bits) {
                Err(error) if error.errno() == libc::EINTR => {} // a signal interrupted the call: try again
                result => break result.map_err(|error| KvmError::call("KVM_CREATE_VM", error))?,
            }
        };
        let fd = Arc::new(fd);
        let slots = Arc::new(Slots::new(Arc::clone(&fd)));
        Ok(Vm { fd, slots })
    }
}

/// A virtual machine of the kernel, and the host memory in its slots. Clones are handles of one machine.
#[derive(Clone)]
pub struct Vm {
    fd: Arc<VmFd>,
    /// Dropped after `fd`, which may use the memory that the slots keep.
    slots: Arc<Slots>,
}

/// For guest_memfd, which only this machine can have: the kernel makes it from the VM's descriptor.
impl AsFd for Vm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `self.fd` keeps the descriptor open as long as the borrow lasts.
        unsafe { BorrowedFd::borrow_raw(self.fd.as_raw_fd()) }
    }
}

impl Vm {
    /// For requests that only one architecture makes.
    pub(crate) fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// Puts memory into guest address space. RAM comes before interrupt controllers: see `SlotTable::add`.
    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// Makes the vCPU that the kernel calls `id`: x86's x2APIC id, Arm's position.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn create_vcpu(&self, id: u32) -> Result<VcpuFd, KvmError> {
        self.fd.create_vcpu(u64::from(id)).map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))
    }

    /// A write to `trigger` raises interrupt line `gsi` once.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn connect_line(&self, gsi: u32, trigger: &EventFd) -> Result<(), KvmError> {
        self.fd.register_irqfd(trigger, gsi).map_err(|error| KvmError::call("KVM_IRQFD", error))
    }

    /// Interrupt line `gsi`, for a device that raises and lowers it.
    pub fn line(&self, gsi: u32) -> WiredLine {
        WiredLine { fd: Arc::clone(&self.fd), gsi }
    }

    /// The interrupts of this machine, once it has interrupt controllers.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn routes(&self) -> Result<Arc<Routes>, KvmError> {
        Routes::new(Arc::clone(&self.fd))
    }

    /// Puts doorbells into guest address space.
    pub fn doorbells(&self) -> Doorbells {
        Doorbells { fd: Arc::clone(&self.fd) }
    }
}

/// An interrupt line as a wire has it: it interrupts as long as it is high.
pub struct WiredLine {
    fd: Arc<VmFd>,
    gsi: u32,
}

impl WiredLine {
    /// Raises or lowers it.
    ///
    /// # Errors
    /// The kernel's, for a number that no controller has.
    pub fn set(&self, high: bool) -> std::io::Result<()> {
        self.fd.set_irq_line(native::interrupts::wire(self.gsi), high).map_err(into_io)
    }
}

/// Guest writes that become eventfd writes without leaving the kernel.
pub struct Doorbells {
    fd: Arc<VmFd>,
}

impl crate::virtio::Doorbell for Doorbells {
    fn attach(&self, gpa: u64, fd: &EventFd) -> std::io::Result<()> {
        self.fd.register_ioevent(fd, &IoEventAddress::Mmio(gpa), NoDatamatch).map_err(into_io)
    }
    fn detach(&self, gpa: u64, fd: &EventFd) -> std::io::Result<()> {
        self.fd.unregister_ioevent(fd, &IoEventAddress::Mmio(gpa), NoDatamatch).map_err(into_io)
    }
}

/// The suberror of a `KVM_EXIT_INTERNAL_ERROR` that just happened (KVM api.rst §5, `internal.suberror`).
pub(crate) fn internal_suberror(run: &kvm_bindings::kvm_run) -> u32 {
    // SAFETY: every member of the union is plain numbers, so reading any of them is defined.
    unsafe { run.__bindgen_anon_1.internal }.suberror
}

/// Runs the guest until it leaves. With a port access come the bytes of one element: a string instruction has many, and
/// each is an access of its own (Intel SDM, INS and OUTS).
///
/// # Errors
/// Those of KVM_RUN.
pub(crate) fn run(vcpu: &mut VcpuFd) -> Result<(VcpuExit<'_>, usize), kvm_ioctls::Error> {
    let whole: *mut VcpuFd = vcpu;
    // SAFETY: `whole` is `vcpu`, which the caller cannot use as long as the exit lives. This function reads the structure
    // once more below, and only for exits that borrow nothing of it.
    let exit = unsafe { &mut *whole }.run()?;
    let size = match exit {
        VcpuExit::IoIn(..) | VcpuExit::IoOut(..) => {
            // A reference made after KVM_RUN: one from before ended when `run` made its own.
            let page = vcpu.get_kvm_run();
            // SAFETY: the exit borrows the data of the access, which KVM puts on the page behind this structure
            // (KVM_PIO_PAGE_OFFSET). Every bit pattern is a number.
            usize::from(unsafe { page.__bindgen_anon_1.io }.size)
        }
        _ => 1,
    };
    Ok((exit, size.max(1)))
}

fn into_io(error: kvm_ioctls::Error) -> std::io::Error {
    std::io::Error::from_raw_os_error(error.errno())
}

/// Why this user may not open `/dev/kvm`, by its group and mode.
fn no_permission() -> KvmError {
    let device = fs::metadata("/dev/kvm").map(|device| (device.gid(), device.mode()));
    KvmError::denied(device.ok(), &fs::read_to_string("/etc/group").unwrap_or_default())
}
