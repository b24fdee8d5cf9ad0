//! Machine checks on their way to vCPUs.
//!
//! A vCPU that read bad memory gives itself the check, since it would read the page again before another thread acts.
//! Checks from others wait in the vCPU's box until it leaves the guest, for which the event loop interrupts it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use egm_address::{Guest, Span};
use egm_device::poison::GuestFault;
use kvm_ioctls::VcpuFd;
use vmm_sys_util::eventfd::EventFd;

use super::mapped::MappedMemory;
use crate::arch::native::machine_check::{Check, Reporter, inject, is_exception, takes_exceptions};
use crate::error::Chain;
use crate::eventfd;
use crate::kvm::KvmError;
use crate::lock::lock;
use crate::machine::exit::ExitReason;

/// Machine checks that report bad memory to the guest.
pub(in crate::machine) struct MachineChecks {
    pub(super) memory: MappedMemory,
    /// `None` where KVM has no machine checks.
    pub(super) reporter: Option<Reporter>,
    /// One for each vCPU.
    boxes: Vec<Inbox>,
    /// Wakes the event loop, which interrupts the vCPUs that have checks waiting.
    pub(super) wake: EventFd,
}

#[derive(Default)]
struct Inbox {
    /// Whether there are checks; spares a vCPU the lock on every exit.
    waiting: AtomicBool,
    checks: Mutex<Vec<Check>>,
}

impl Inbox {
    fn put(&self, check: Check) {
        lock(&self.checks).push(check);
        self.waiting.store(true, Ordering::Release);
    }

    fn take(&self) -> Vec<Check> {
        let mut checks = lock(&self.checks);
        self.waiting.store(false, Ordering::Release);
        std::mem::take(&mut *checks)
    }
}

impl MachineChecks {
    pub(super) fn new(
        memory: MappedMemory,
        reporter: Option<Reporter>,
        vcpus: usize,
    ) -> std::io::Result<Self> {
        let boxes = std::iter::repeat_with(Inbox::default).take(vcpus).collect();
        Ok(Self { memory, reporter, boxes, wake: eventfd::new()? })
    }

    /// Whether checks wait for vCPU `index`.
    pub(in crate::machine) fn wait_for(&self, index: u32) -> bool {
        self.inbox(index).is_some_and(|inbox| inbox.waiting.load(Ordering::Acquire))
    }

    /// Reports bad memory that was not read yet; returns whether the guest has machine checks for that.
    pub(super) fn found(&self, bad: Span<Guest>) -> bool {
        let (Some(reporter), Some(first)) = (self.reporter, self.boxes.first()) else { return false };
        let Some(check) = reporter.found(bad) else { return false };
        first.put(check);
        if is_exception(&check) {
            self.report_to_others(reporter, 0);
        }
        true
    }

    /// Injects a machine check into vCPU `index`, which read bad memory; or returns why its guest cannot go on.
    pub(in crate::machine) fn consumed(
        &self,
        index: u32,
        vcpu: &VcpuFd,
        fault: GuestFault,
    ) -> Option<ExitReason> {
        let end = |what| Some(ExitReason::BadMemory { vcpu: index, what });
        let Some(bad) = self.memory.of_fault(fault) else {
            return end(format!("it is at {:#x} of the VMM and not the guest's", fault.address));
        };
        let at = bad.start();
        let Some(reporter) = self.reporter else {
            return end(format!(
                "guest address {at:#x}; this host's KVM has no machine checks to report it with"
            ));
        };
        if let Err(error) = inject(vcpu, &reporter.consumed(bad)) {
            return end(format!("guest address {at:#x}; cannot report it to the guest: {}", Chain(&error)));
        }
        self.report_to_others(reporter, index);
        None
    }

    /// Injects the waiting checks into vCPU `index`, on its own thread. Leaves out an exception that it is not ready
    /// for: it handles one already, or the guest has not started it.
    pub(in crate::machine) fn deliver(&self, index: u32, vcpu: &VcpuFd) -> Option<ExitReason> {
        if !self.wait_for(index) {
            return None;
        }
        let deliver = |check: &Check| -> Result<(), KvmError> {
            if is_exception(check) && !takes_exceptions(vcpu)? {
                return Ok(());
            }
            inject(vcpu, check)
        };
        let delivered = self.inbox(index)?.take().iter().try_for_each(deliver);
        delivered.err().map(|error| ExitReason::BadMemory { vcpu: index, what: Chain(&error).to_string() })
    }

    fn report_to_others(&self, reporter: Reporter, except: u32) {
        if let Some(check) = reporter.of_others() {
            let others = (0u32..).zip(&self.boxes).filter(|(index, _)| *index != except);
            others.for_each(|(_, inbox)| inbox.put(check));
        }
        let _ = self.wake.write(1);
    }

    fn inbox(&self, index: u32) -> Option<&Inbox> {
        self.boxes.get(usize::try_from(index).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use egm_address::Gpa;

    use super::*;

    #[test]
    fn what_is_found_is_reported_to_the_first_vcpu_and_its_presence_to_the_others_where_they_need_it() {
        let bad = Span::new(Gpa::new(0x1000), 0x1000).unwrap();
        for reporter in Reporter::ALL {
            let checks = MachineChecks::new(MappedMemory::default(), Some(*reporter), 3).unwrap();
            assert_eq!(checks.found(bad), reporter.found(bad).is_some());
            let delivered: Vec<_> = checks.boxes.iter().map(Inbox::take).collect();
            let others: Vec<_> = reporter.found(bad).and_then(|_| reporter.of_others()).into_iter().collect();
            let first: Vec<_> = reporter.found(bad).into_iter().collect();
            assert_eq!(delivered, [first, others.clone(), others], "{reporter:?}");
            assert!((0..3).all(|index| !checks.wait_for(index)));
        }
    }

    #[test]
    fn without_machine_checks_no_vcpu_gets_a_report() {
        let checks = MachineChecks::new(MappedMemory::default(), None, 1).unwrap();
        assert!(!checks.found(Span::new(Gpa::new(0x1000), 0x1000).unwrap()));
        assert!(!checks.wait_for(0));
    }
}
