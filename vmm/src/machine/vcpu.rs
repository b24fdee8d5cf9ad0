//! A vCPU's thread: run, answer the exit, run again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use egm_address::CpuSet;
use egm_device::poison::in_guest;
use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::thread::{CpuSet as Affinity, sched_setaffinity};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use super::bus::Bus;
use super::exit::{ExitLatch, ExitReason};
use super::pause::{GateTask, PauseGate};
use super::poison::MachineChecks;
use super::reset::{ResetLine, VcpuReset};
use super::start::Start;
use super::vcpu_states::VcpuStates;
use crate::arch::native::vcpu::{excuse_pause, program_counter};
use crate::kvm::internal_suberror;
use crate::plan::VcpuPlan;

/// Size of a vCPU's stack in bytes. Its deepest path is a PCI configuration write that moves a BAR.
const STACK: usize = 256 << 10;

/// State that all vCPUs share.
pub(super) struct Shared {
    pub(super) ports: Bus,
    /// Memory that is not RAM.
    pub(super) memory: Bus,
    /// How the machine ends.
    pub(super) exit: Arc<ExitLatch>,
    /// Reports of bad memory to the guest.
    pub(super) checks: Arc<MachineChecks>,
    /// Pauses and resets of the machine.
    pub(super) gate: Arc<PauseGate>,
    /// What a reset by the guest asserts.
    pub(super) reset: ResetLine,
    /// Resets vCPUs, unless a reset ends the machine.
    pub(super) vcpu_reset: Option<Arc<VcpuReset>>,
    /// States of the vCPUs for a snapshot.
    pub(super) states: VcpuStates,
}

impl Shared {
    /// Whether vCPU `index` may stay in the guest, or has left it for a pause. Checks wait while the machine is paused.
    pub(super) fn needs_nothing_of(&self, index: u32) -> bool {
        if self.gate.is_closed() { self.gate.is_out(index) } else { !self.checks.wait_for(index) }
    }

    /// Ends the machine for `reason`, or requests its reset.
    fn act_on(&self, reason: ExitReason) {
        match reason {
            ExitReason::Reset => self.reset.assert(),
            reason => self.exit.set(reason),
        }
    }
}

/// `KVM_RUN` returned without an exit: a signal came, or `immediate_exit` was set.
struct Interrupted;

/// A vCPU before its thread runs.
pub(super) struct Vcpu {
    /// Position in the plan.
    pub(super) index: u32,
    pub(super) fd: VcpuFd,
    /// Host CPUs that it may run on.
    pub(super) host_cpus: Option<CpuSet>,
}

pub(super) struct RunningVcpu {
    thread: JoinHandle<()>,
    stopped: Arc<AtomicBool>,
}

/// The signal that makes a vCPU leave the guest. Its handler does nothing; being interrupted is the point.
fn kick_signal() -> i32 {
    SIGRTMIN()
}

extern "C" fn kicked(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Prepares this process for [`RunningVcpu::stop`]; once, before the first vCPU.
///
/// # Errors
/// [`ExitReason::Internal`] when the signal handler cannot be set.
pub(super) fn prepare_kicks() -> Result<(), ExitReason> {
    register_signal_handler(kick_signal(), kicked)
        .map_err(|error| ExitReason::Internal(format!("cannot catch the signal that stops vCPUs: {error}")))
}

impl Vcpu {
    /// All vCPUs of a machine, in the order of the plan.
    pub(super) fn all(fds: Vec<VcpuFd>, planned: &[VcpuPlan]) -> Vec<Self> {
        let vcpu = |(fd, plan): (VcpuFd, &VcpuPlan)| {
            let VcpuPlan { index, host_cpus, .. } = plan;
            Self { index: *index, fd, host_cpus: host_cpus.clone() }
        };
        fds.into_iter().zip(planned).map(vcpu).collect()
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// [`ExitReason::NoThread`].
    pub(super) fn start(mut self, shared: Arc<Shared>, start: Arc<Start>) -> Result<RunningVcpu, ExitReason> {
        let vcpu = self.index;
        let stopped = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stopped);
        let name = format!("vcpu{vcpu}");
        let body = move || {
            pin(self.host_cpus.as_ref());
            let runs = start.enter().unwrap_or_else(|reason| {
                shared.exit.set(reason);
                false
            });
            drop(start);
            while runs && !shared.exit.is_set() {
                if shared.gate.is_closed() {
                    self.wait_at_gate(&shared);
                    continue;
                }
                let ended = shared.checks.deliver(vcpu, &self.fd);
                if let Some(reason) = ended.or_else(|| self.run_once(&shared).unwrap_or(None)) {
                    shared.act_on(reason);
                }
            }
            flag.store(true, Ordering::Release);
        };
        let thread = thread::Builder::new().name(name).stack_size(STACK).spawn(body);
        let thread = thread.map_err(|error| ExitReason::NoThread { vcpu, what: error.to_string() })?;
        Ok(RunningVcpu { thread, stopped })
    }

    /// Waits while the machine is paused or reset, and saves or resets this vCPU with it.
    fn wait_at_gate(&mut self, shared: &Shared) {
        let (vcpu, ends) = (self.index, || shared.exit.is_set());
        self.complete_access(shared);
        let mut is_reset = false;
        loop {
            match shared.gate.wait(vcpu, ends) {
                GateTask::Run => break,
                GateTask::Save => {
                    shared.states.save(vcpu, &self.fd);
                    shared.gate.saved(vcpu);
                }
                GateTask::Reset if ends() => break,
                GateTask::Reset => {
                    let reset = shared.vcpu_reset.as_ref();
                    let restored = reset.map_or(Ok(()), |reset| reset.restore(vcpu, &self.fd));
                    restored.unwrap_or_else(|reason| shared.act_on(reason));
                    shared.gate.restored(vcpu);
                    is_reset = true;
                }
            }
        }
        if !is_reset && !ends() {
            excuse_pause(&self.fd);
        }
    }

    /// Completes the access that the last exit was about, without a further instruction: KVM writes its result at the next
    /// entry, which may be after a reset (KVM api.rst, `immediate_exit`).
    fn complete_access(&mut self, shared: &Shared) {
        self.fd.set_kvm_immediate_exit(1);
        // An access of several parts has an exit for each.
        while let Ok(reason) = self.run_once(shared) {
            if let Some(reason) = reason {
                shared.act_on(reason);
                break;
            }
        }
        self.fd.set_kvm_immediate_exit(0);
    }

    /// Runs the guest until its next exit, and answers that; returns a reason if the machine ends.
    ///
    /// # Errors
    /// [`Interrupted`].
    fn run_once(&mut self, shared: &Shared) -> Result<Option<ExitReason>, Interrupted> {
        let vcpu = self.index;
        let hypervisor = |what: String| Some(ExitReason::Hypervisor { vcpu, what });
        let (exit, fault) = in_guest(|| crate::kvm::run(&mut self.fd));
        let mut reason = None;
        match exit {
            Ok((VcpuExit::IoIn(port, data), size)) => {
                data.chunks_mut(size).for_each(|element| shared.ports.read(port.into(), element));
            }
            Ok((VcpuExit::IoOut(port, data), size)) => {
                data.chunks(size).for_each(|element| shared.ports.write(port.into(), element));
            }
            Ok((VcpuExit::MmioRead(address, data), _)) => shared.memory.read(address, data),
            Ok((VcpuExit::MmioWrite(address, data), _)) => shared.memory.write(address, data),
            Ok((VcpuExit::Shutdown, _)) => reason = Some(ExitReason::TripleFault { vcpu }),
            Ok((VcpuExit::SystemEvent(event, _), _)) => {
                reason = asked(event).or_else(|| hypervisor(format!("unknown system event {event}")));
            }
            Ok((VcpuExit::FailEntry(code, _), _)) => {
                reason = hypervisor(format!("entry failed with {code:#x}"));
            }
            Ok((VcpuExit::InternalError, _)) => {
                let what = internal_error(&mut self.fd);
                reason = hypervisor(what);
            }
            // The kernel answers these itself; seeing one costs a turn of the loop.
            Ok((VcpuExit::Hlt | VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::SetTpr, _)) => {}
            Ok((other, _)) => reason = hypervisor(format!("unexpected exit {other:?}")),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                return fault
                    .map_or(Err(Interrupted), |fault| Ok(shared.checks.consumed(vcpu, &self.fd, fault)));
            }
            // Arm: the processor describes simple accesses only, and KVM has no decoder for the others.
            Err(error) if error.errno() == libc::ENOSYS => {
                let at = program_counter(&self.fd).unwrap_or(0);
                reason =
                    hypervisor(format!("no decoder for the access to a device at guest address {at:#x}"));
            }
            Err(error) => reason = hypervisor(format!("KVM_RUN: {error}")),
        }
        Ok(reason.or_else(|| shared.checks.consumed(vcpu, &self.fd, fault?)))
    }
}

/// The request of a guest's firmware call, on Arm PSCI (KVM api.rst §5, `KVM_EXIT_SYSTEM_EVENT`).
fn asked(event: u32) -> Option<ExitReason> {
    match event {
        KVM_SYSTEM_EVENT_SHUTDOWN if egm_address::fault!("psci-off-as-reset") => Some(ExitReason::Reset),
        KVM_SYSTEM_EVENT_SHUTDOWN => Some(ExitReason::PoweredOff),
        KVM_SYSTEM_EVENT_RESET => Some(ExitReason::Reset),
        KVM_SYSTEM_EVENT_CRASH => Some(ExitReason::Panicked),
        _ => None,
    }
}

/// Names of KVM_INTERNAL_ERROR_*'s suberrors.
const SUBERRORS: [(u32, &str); 4] = [
    (
        1,
        "it cannot emulate the guest's instruction; kvm_pvm and old hosts emulate only simple code: scripts/demo and egm-lab run guests in an emulated host",
    ),
    (2, "two exceptions arrived at once"),
    (3, "an exit came while an event was being delivered"),
    (4, "the exit reason is unknown to it"),
];

fn internal_error(fd: &mut VcpuFd) -> String {
    let at = program_counter(fd).unwrap_or(0);
    let suberror = internal_suberror(fd.get_kvm_run());
    let name =
        SUBERRORS.iter().find(|(number, _)| *number == suberror).map_or("no name for it", |(_, name)| name);
    format!("internal error {suberror} at guest address {at:#x}: {name}")
}

fn pin(host_cpus: Option<&CpuSet>) {
    if let Some(cpus) = host_cpus {
        let mut affinity = Affinity::new();
        for cpu in
            cpus.iter().filter_map(|cpu| usize::try_from(cpu).ok()).filter(|cpu| *cpu < Affinity::MAX_CPU)
        {
            affinity.set(cpu);
        }
        if let Err(error) = sched_setaffinity(None, &affinity) {
            tracing::warn!("vCPU thread stays unpinned: host CPUs {cpus}: {error}");
        }
    }
}

impl RunningVcpu {
    /// Waits until the vCPU has left the guest for good; the exit latch is set already.
    pub(super) fn stop(self) {
        self.interrupt_until(|| false);
        let _ = self.thread.join();
    }

    /// Makes the vCPU leave the guest until `done`, or for good.
    ///
    /// A signal that comes just before the thread enters the guest is lost, so it is sent until the thread shows that it
    /// is out: no flag shared with a signal handler, and no unsafe code.
    pub(super) fn interrupt_until(&self, done: impl Fn() -> bool) {
        while !done() && !self.stopped.load(Ordering::Acquire) && !self.thread.is_finished() {
            let _ = self.thread.kill(kick_signal());
            thread::park_timeout(Duration::from_micros(200));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_requests_of_its_firmware_ends_the_machine_as_the_kernel_reports_it() {
        assert_eq!(asked(KVM_SYSTEM_EVENT_SHUTDOWN), Some(ExitReason::PoweredOff));
        assert_eq!(asked(KVM_SYSTEM_EVENT_RESET), Some(ExitReason::Reset));
        assert_eq!(asked(KVM_SYSTEM_EVENT_CRASH), Some(ExitReason::Panicked));
        assert_eq!(asked(0), None);
    }
}
