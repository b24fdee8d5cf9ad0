//! How a machine ends: the first reason wins, and stops the event loop and every vCPU.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use vmm_sys_util::eventfd::EventFd;

use crate::error::{Blame, Remedy};
use crate::eventfd;
use crate::resources::ThreadError;
use crate::sandbox::SandboxError;

/// Why the machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest powered itself off.
    PoweredOff,
    /// The operator asked for it by this signal.
    Signal(i32),
    /// The operator asked for it by the API.
    Requested,
    /// The guest requested a reset.
    Reset,
    /// The guest requested a reset, and cannot start again in this machine for this reason.
    NotInPlace(String),
    /// The guest's kernel panicked and reported it (pvpanic).
    Panicked,
    /// The guest's kernel crashed into its crash kernel and reported it (pvpanic).
    CrashLoaded,
    /// A vCPU took a fault while handling a fault while handling a fault.
    TripleFault {
        /// Index of the vCPU.
        vcpu: u32,
    },
    /// The host's memory failed under the guest, and no report could reach the guest.
    BadMemory {
        /// Index of the vCPU.
        vcpu: u32,
        /// Address, and why no report could reach the guest.
        what: String,
    },
    /// The hypervisor could not go on with the guest.
    Hypervisor {
        /// Index of the vCPU.
        vcpu: u32,
        /// The reason, in words.
        what: String,
    },
    /// The host has no thread for a vCPU.
    NoThread {
        /// Index of the vCPU.
        vcpu: u32,
        /// The reason, in words.
        what: String,
    },
    /// A thread could not be confined in the sandbox; the guest did not run.
    Sandbox(String),
    /// A part of egm-vmm failed.
    Internal(String),
}

impl ExitReason {
    /// Name for programs.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::PoweredOff => "powered-off",
            Self::Signal(_) => "signal",
            Self::Requested => "requested",
            Self::Reset | Self::NotInPlace(_) => "reset",
            Self::Panicked => "panicked",
            Self::CrashLoaded => "crash-loaded",
            Self::TripleFault { .. } => "triple-fault",
            Self::BadMemory { .. } => "bad-memory",
            Self::Hypervisor { .. } => "hypervisor",
            Self::NoThread { .. } => "no-thread",
            Self::Sandbox(_) => "sandbox",
            Self::Internal(_) => "internal",
        }
    }

    /// `None` for a guest that ended as it should, otherwise the remedy of the failure.
    pub fn remedy(&self) -> Option<Remedy> {
        Some(match self {
            Self::PoweredOff | Self::Signal(_) | Self::Requested => return None,
            Self::Reset => Blame::Guest.help("set \"on_reset\" to \"reboot\" to start it again"),
            Self::NotInPlace(_) => Blame::Guest.help("start the machine again"),
            Self::Panicked | Self::CrashLoaded | Self::TripleFault { .. } => Blame::Guest.into(),
            Self::BadMemory { .. } => {
                Blame::Guest.help("look for the memory that fails: dmesg, egm-device ledger show")
            }
            Self::Hypervisor { .. } => Blame::Host.into(),
            Self::Sandbox(_) => Blame::Host.help(SandboxError::REFUSED_HELP),
            Self::NoThread { .. } => Blame::Host.help(ThreadError::HELP),
            Self::Internal(_) => Blame::Internal.into(),
        })
    }
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoweredOff => f.write_str("the guest powered off"),
            Self::Signal(signal) => write!(f, "stopped by signal {signal}"),
            Self::Requested => f.write_str("stopped by the API"),
            Self::Reset => f.write_str("the guest requested a reset"),
            Self::NotInPlace(why) => {
                write!(f, "the guest requested a reset, and cannot start again in place: {why}")
            }
            Self::Panicked => f.write_str("the guest's kernel panicked"),
            Self::CrashLoaded => f.write_str("the guest's kernel crashed and started its crash kernel"),
            Self::TripleFault { vcpu } => write!(f, "vCPU {vcpu} of the guest ended in a triple fault"),
            Self::BadMemory { vcpu, what } => {
                write!(f, "vCPU {vcpu} accessed bad memory of the host: {what}")
            }
            Self::Hypervisor { vcpu, what } => write!(f, "KVM cannot run vCPU {vcpu}: {what}"),
            Self::NoThread { vcpu, what } => write!(f, "cannot start the thread of vCPU {vcpu}: {what}"),
            Self::Sandbox(what) => f.write_str(what),
            Self::Internal(what) => write!(f, "internal error: {what}"),
        }
    }
}

/// Keeps the first reason. Setting it wakes the event loop and stops the vCPUs.
pub(crate) struct ExitLatch {
    reason: OnceLock<ExitReason>,
    stopping: AtomicBool,
    hurried: AtomicBool,
    wake: EventFd,
}

impl ExitLatch {
    /// An unset latch.
    ///
    /// # Errors
    /// When the eventfd cannot be made.
    pub(crate) fn new() -> std::io::Result<Arc<Self>> {
        let wake = eventfd::new()?;
        let (stopping, hurried) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Arc::new(Self { reason: OnceLock::new(), stopping, hurried, wake }))
    }

    /// Ends the machine for `reason`, unless it ends already.
    pub(crate) fn set(&self, reason: ExitReason) {
        let _ = self.reason.set(reason);
        self.stopping.store(true, Ordering::Release);
        let _ = self.wake.write(1);
    }

    /// Whether the machine ends.
    pub(crate) fn is_set(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Ends the machine for the operator's `reason`. A request after the first ends the wait for disks.
    pub(crate) fn request(&self, reason: ExitReason) {
        if self.is_set() {
            self.hurried.store(true, Ordering::Release);
        }
        self.set(reason);
    }

    /// Whether the operator requested the end once more.
    pub(crate) fn is_hurried(&self) -> bool {
        self.hurried.load(Ordering::Acquire)
    }

    pub(crate) fn reason(&self) -> Option<&ExitReason> {
        self.reason.get()
    }

    /// Readable after it is set, after each further request, and after the request of a pause or its end.
    pub(crate) fn wake(&self) -> &EventFd {
        &self.wake
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_wins() {
        let latch = ExitLatch::new().unwrap();
        assert!(!latch.is_set());
        latch.set(ExitReason::Panicked);
        latch.set(ExitReason::PoweredOff);
        assert_eq!((latch.is_set(), latch.reason()), (true, Some(&ExitReason::Panicked)));
        // The lab looks for these words.
        assert_eq!(ExitReason::Panicked.to_string(), "the guest's kernel panicked");
        assert!(latch.wake().read().is_ok());
    }

    #[test]
    fn only_power_off_and_the_operator_end_well() {
        assert_eq!(ExitReason::PoweredOff.remedy(), None);
        assert_eq!(ExitReason::Signal(15).remedy(), None);
        assert_eq!(ExitReason::Requested.remedy(), None);
        for reason in [ExitReason::Reset, ExitReason::NotInPlace(String::new()), ExitReason::Panicked] {
            assert_eq!(reason.remedy().map(|remedy| remedy.blame), Some(Blame::Guest), "{reason:?}");
        }
        assert_eq!(ExitReason::Internal(String::new()).remedy(), Some(Blame::Internal.into()));
    }

    #[test]
    fn a_sandbox_that_the_host_refuses_has_the_remedy_of_its_error() {
        let remedy = ExitReason::Sandbox(String::new()).remedy();
        assert_eq!(remedy, Some(Blame::Host.help(SandboxError::REFUSED_HELP)));
    }
}
