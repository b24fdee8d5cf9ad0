//! Claim: time moves forward, also for a thread that is moved from vCPU to vCPU; where the guest is offered kvm-clock,
//! the kernel uses it, or the TSC, which it prefers when the TSC is invariant. An Arm guest uses its architectural counter.

use rustix::time::{ClockId, clock_gettime};

use super::Context;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sysfs;

const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0";
/// Rounds over all vCPUs.
const ROUNDS: usize = 50;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut claim = Claim::default();
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        for vcpu in &context.plan.vcpus {
            let mut set = rustix::thread::CpuSet::new();
            set.set(
                usize::try_from(vcpu.index).unwrap_or(usize::MAX).min(rustix::thread::CpuSet::MAX_CPU - 1),
            );
            rustix::thread::sched_setaffinity(None, &set)
                .map_err(Broken::system(format!("cannot move to CPU {}", vcpu.index)))?;
            let now = clock_gettime(ClockId::Monotonic);
            times.push((now.tv_sec, now.tv_nsec));
        }
    }
    forward(&mut claim, &times);
    let current = sysfs::text(format!("{SOURCE}/current_clocksource"))?;
    let available = sysfs::text(format!("{SOURCE}/available_clocksource"))?;
    Ok(judge(claim, current.trim(), available.trim()))
}

/// Times in the order in which they were read never fall, and rise in the end.
fn forward(claim: &mut Claim, times: &[(i64, i64)]) {
    if let Some(pair) = times.windows(2).find(|pair| pair[0] > pair[1]) {
        claim.untrue(format!("time went back from {:?} to {:?} (s, ns)", pair[0], pair[1]));
    }
    claim.holds(times.first() < times.last(), || "time stands still");
}

/// The clock sources that a guest must use where it is offered the first of them.
const PREFERRED: [(&str, &[&str]); 2] =
    [("kvm-clock", &["kvm-clock", "tsc"]), ("arch_sys_counter", &["arch_sys_counter"])];

fn judge(mut claim: Claim, current: &str, available: &str) -> Finding {
    let is_offered = |source: &str| available.split(' ').any(|offered| offered == source);
    let preferred = PREFERRED.iter().find(|(source, _)| is_offered(source));
    let Some((_, right)) = preferred else {
        let reason =
            format!("this guest is offered neither kvm-clock nor arch_sys_counter, only {available}");
        return if claim.is_true() { Finding::skipped(reason) } else { claim.finish() };
    };
    claim.holds(right.contains(&current), || {
        format!("the clock source is {current}, not {}", right.join(" or "))
    });
    claim.seen(format!("clock source {current}"));
    claim.finish()
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::*;

    fn outcome(current: &str, available: &str, times: &[(i64, i64)]) -> Outcome {
        let mut claim = Claim::default();
        forward(&mut claim, times);
        judge(claim, current, available).outcome
    }

    #[test]
    fn a_guest_that_is_offered_kvm_clock_uses_it_or_the_tsc() {
        let good = [(1, 999), (2, 0), (2, 0), (2, 1)];
        assert_eq!(outcome("kvm-clock", "kvm-clock tsc acpi_pm", &good), Outcome::Passed);
        assert_eq!(outcome("tsc", "tsc kvm-clock", &good), Outcome::Passed);
        assert_eq!(outcome("acpi_pm", "kvm-clock acpi_pm", &good), Outcome::Failed);
        assert_eq!(outcome("arch_sys_counter", "arch_sys_counter", &good), Outcome::Passed);
        assert_eq!(outcome("tsc", "tsc hpet acpi_pm", &good), Outcome::Skipped);
    }

    #[test]
    fn time_that_falls_or_stands_fails_whatever_the_source() {
        assert_eq!(outcome("tsc", "tsc", &[(2, 0), (1, 999), (3, 0)]), Outcome::Failed);
        assert_eq!(outcome("tsc", "tsc", &[(2, 0), (2, 0)]), Outcome::Failed);
    }
}
