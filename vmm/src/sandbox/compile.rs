//! From the table to the kernel's form of a filter. Pure.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use super::Mode;
use super::calls;
use super::table::{Condition, MachinePart, REQUESTS, ROWS, ThreadKind};
use crate::config::Architecture;

/// The filter of threads of `kind`, in a machine with `parts`, for the process with the number `process`. A call that it does
/// not permit is reported by [`super::report`] or, with [`Mode::Log`], by the kernel.
///
/// # Errors
/// The table is wrong: a bug of ours.
pub(super) fn program(
    kind: ThreadKind,
    parts: &[MachinePart],
    process: u32,
    mode: Mode,
    arch: Architecture,
) -> Result<BpfProgram, BackendError> {
    let is_part = |wanted: &[MachinePart]| {
        wanted.iter().any(|part| *part == MachinePart::Always || parts.contains(part))
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for row in ROWS.iter().filter(|row| row.kinds.contains(&kind) && is_part(row.parts)) {
        // Arm lacks some calls.
        if let Some(number) = calls::named(row.call).and_then(|call| call.number(arch)) {
            rules.entry(number.into()).or_default().extend(conditions(row.condition, process)?);
        }
    }
    if let Some(ioctl) = calls::named("ioctl").and_then(|call| call.number(arch)) {
        let permitted =
            REQUESTS.iter().filter(|request| request.kinds.contains(&kind) && is_part(request.parts));
        let requests = one_of(1, &permitted.map(|request| request.number).collect::<Vec<_>>())?;
        // No rule would mean every request.
        if !requests.is_empty() {
            rules.insert(ioctl.into(), requests);
        }
    }
    let is_logged = mode == Mode::Log || egm_address::fault!("system-calls-not-filtered");
    let refused = if is_logged { SeccompAction::Log } else { SeccompAction::Trap };
    SeccompFilter::new(rules, refused, SeccompAction::Allow, target(arch))?.try_into()
}

/// Calls that move a mapping to other bytes of its file, without a descriptor.
const OF_OTHER_BYTES: [&str; 2] = ["remap_file_pages", "mremap"];

/// The filter that answers [`OF_OTHER_BYTES`] with `EPERM`, and permits everything else.
///
/// # Errors
/// A bug of ours.
pub(super) fn kept_mappings(arch: Architecture) -> Result<BpfProgram, BackendError> {
    /// Bit by which x86's ABI x32 numbers the same calls.
    const X32: u32 = 0x4000_0000;
    let numbers = OF_OTHER_BYTES.iter().filter_map(|name| calls::named(name)?.number(arch));
    let rules = numbers.flat_map(|number| [number, number | X32]).map(|number| (number.into(), Vec::new()));
    let refused = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    SeccompFilter::new(rules.collect(), SeccompAction::Allow, refused, target(arch))?.try_into()
}

const fn target(arch: Architecture) -> TargetArch {
    match arch {
        Architecture::X86_64 => TargetArch::x86_64,
        Architecture::Aarch64 => TargetArch::aarch64,
    }
}

/// Rules of which one must hold; without any, the call is permitted.
fn conditions(condition: Condition, process: u32) -> Result<Vec<SeccompRule>, BackendError> {
    match condition {
        Condition::Any => Ok(Vec::new()),
        Condition::OneOf(argument, values) => one_of(argument, values),
        Condition::ThisProcess(argument) => one_of(argument, &[process]),
        Condition::Without(argument, bits) => {
            rule(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(bits.into()), 0)
        }
        Condition::Anonymous => {
            let (code, own) = (libc::PROT_EXEC.cast_unsigned(), libc::MAP_ANONYMOUS.cast_unsigned());
            let masked = |argument, mask: u32, value: u32| {
                let operator = SeccompCmpOp::MaskedEq(mask.into());
                SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value.into())
            };
            Ok(vec![SeccompRule::new(vec![masked(2, code, 0)?, masked(3, own, own)?])?])
        }
        Condition::Null(argument) => rule(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0),
    }
}

fn one_of(argument: u8, values: &[u32]) -> Result<Vec<SeccompRule>, BackendError> {
    let rules = values
        .iter()
        .map(|value| rule(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, u64::from(*value)));
    Ok(rules.collect::<Result<Vec<_>, _>>()?.concat())
}

fn rule(
    argument: u8,
    length: SeccompCmpArgLen,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<Vec<SeccompRule>, BackendError> {
    let condition = SeccompCondition::new(argument, length, operator, value)?;
    Ok(vec![SeccompRule::new(vec![condition])?])
}

#[cfg(test)]
mod tests {
    use super::super::table::{ALL_PARTS, KINDS};
    use super::*;

    /// Instructions that the kernel takes at most (`BPF_MAXINSNS`).
    const MOST: usize = 4096;

    /// What a filter answers to a call: `SECCOMP_RET_ALLOW`, `SECCOMP_RET_TRAP`, …
    fn answer(program: &BpfProgram, arch: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(arch.to_le_bytes());
        data.extend([0; 8]); // the instruction's address
        arguments.iter().for_each(|argument| data.extend(argument.to_le_bytes()));
        let (mut accumulator, mut at) = (0_u32, 0_usize);
        loop {
            let instruction = &program[at];
            at += 1;
            let constant = instruction.k;
            let jump = |holds: bool| usize::from(if holds { instruction.jt } else { instruction.jf });
            match instruction.code {
                0x20 => {
                    let from = usize::try_from(constant).unwrap();
                    accumulator = u32::from_le_bytes(data[from..from + 4].try_into().unwrap());
                }
                0x54 => accumulator &= constant,
                0x05 => at += usize::try_from(constant).unwrap(),
                0x15 => at += jump(accumulator == constant),
                0x25 => at += jump(accumulator > constant),
                0x35 => at += jump(accumulator >= constant),
                0x06 => return constant,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    const ALLOW: u32 = 0x7fff_0000;
    const TRAP: u32 = 0x0003_0000;
    const LOG: u32 = 0x7ffc_0000;
    const KILL: u32 = 0x8000_0000;
    const OURS: u32 = 4711;

    /// A filter, and the architecture of the calls that it judges.
    struct Judge(BpfProgram, Architecture);

    impl Judge {
        fn of(kind: ThreadKind, parts: &[MachinePart], arch: Architecture) -> Self {
            Self(program(kind, parts, OURS, Mode::Strict, arch).unwrap(), arch)
        }

        fn call(&self, name: &str, arguments: [u64; 6]) -> u32 {
            let (arch, number) = match self.1 {
                Architecture::X86_64 => (0xc000_003e, calls::named(name).unwrap().number(self.1)),
                Architecture::Aarch64 => (0xc000_00b7, calls::named(name).unwrap().number(self.1)),
            };
            answer(&self.0, arch, number.unwrap(), arguments)
        }
    }

    const ARCHITECTURES: [Architecture; 2] = [Architecture::X86_64, Architecture::Aarch64];

    #[test]
    fn each_filter_compiles_for_both_architectures_and_fits_the_kernel() {
        for (arch, kind) in ARCHITECTURES.iter().flat_map(|arch| KINDS.iter().map(move |kind| (*arch, *kind)))
        {
            let all = program(kind, ALL_PARTS, OURS, Mode::Strict, arch).unwrap();
            let few = program(kind, &[], OURS, Mode::Strict, arch).unwrap();
            assert!(few.len() <= all.len() && all.len() <= MOST, "{kind:?}: {} {}", few.len(), all.len());
        }
    }

    #[test]
    fn arguments_decide_where_the_table_has_them() {
        for judge in ARCHITECTURES.map(|arch| Judge::of(ThreadKind::Vcpu, &[], arch)) {
            let (read, write, execute) = (1, 2, 4);
            for (name, arguments, expected) in [
                ("mmap", [0, 4096, read | write, 0x22, u64::MAX, 0], ALLOW),
                ("mmap", [0, 4096, read | execute, 0x22, u64::MAX, 0], TRAP),
                // Shared memory of descriptor 5.
                ("mmap", [0, 4096, read | write, 0x01, 5, 0], TRAP),
                ("mprotect", [0, 4096, read | execute, 0, 0, 0], TRAP),
                ("mprotect", [0, 4096, read | write, 0, 0, 0], ALLOW),
                ("tgkill", [OURS.into(), 1, 34, 0, 0, 0], ALLOW),
                ("tgkill", [1, 1, 34, 0, 0, 0], TRAP),
                ("sendto", [3, 0, 1, 0, 0, 0], ALLOW),
                ("sendto", [3, 0, 1, 0, 1 << 32, 16], TRAP),
                ("prctl", [16, 0, 0, 0, 0, 0], ALLOW),
                ("prctl", [4, 1, 0, 0, 0, 0], TRAP),
                ("rt_sigaction", [7, 0, 0, 8, 0, 0], ALLOW),
                ("rt_sigaction", [31, 0, 0, 8, 0, 0], TRAP),
                ("ioctl", [5, 0xae80, 0, 0, 0, 0], ALLOW),
                ("ioctl", [5, 0xae01, 0, 0, 0, 0], TRAP),
                // The kernel looks at 32 bits of the number.
                ("ioctl", [5, 0x1_0000_ae80, 0, 0, 0, 0], ALLOW),
            ] {
                assert_eq!(judge.call(name, arguments), expected, "{name} {arguments:x?}");
            }
        }
    }

    #[test]
    fn what_the_table_lacks_is_refused_to_every_thread_on_both_architectures() {
        let permitted: Vec<_> = ROWS.iter().map(|row| row.call).chain(["ioctl"]).collect();
        for arch in ARCHITECTURES {
            for kind in KINDS {
                let judge = Judge::of(*kind, ALL_PARTS, arch);
                let others = calls::CALLS.iter().filter(|call| !permitted.contains(&call.name));
                for call in others.filter(|call| call.number(arch).is_some()) {
                    assert_eq!(judge.call(call.name, [0; 6]), TRAP, "{kind:?} {}", call.name);
                }
                // Another architecture's numbers mean other calls; x32's have a bit that none of ours has.
                assert_eq!(answer(&judge.0, 0x4000_0003, 1, [0; 6]), KILL);
                if arch == Architecture::X86_64 {
                    assert_eq!(answer(&judge.0, 0xc000_003e, 0x4000_0000, [0; 6]), TRAP);
                }
            }
        }
    }

    #[test]
    fn a_call_for_a_part_is_refused_in_a_machine_without_it() {
        for arch in ARCHITECTURES {
            let (without, with) = (
                Judge::of(ThreadKind::EventLoop, &[MachinePart::Disk], arch),
                Judge::of(ThreadKind::EventLoop, &[MachinePart::Vsock], arch),
            );
            let unix = [1, 1, 0, 0, 0, 0];
            assert_eq!((without.call("socket", unix), with.call("socket", unix)), (TRAP, ALLOW));
            assert_eq!(with.call("socket", [2, 1, 0, 0, 0, 0]), TRAP, "an Internet socket");
            assert_eq!(
                (without.call("io_uring_enter", unix), with.call("io_uring_enter", unix)),
                (ALLOW, TRAP)
            );
        }
    }

    #[test]
    fn the_api_s_thread_serves_clients_and_the_event_loop_removes_its_socket() {
        const PEER_USER: u64 = 17;
        const PEER_PROCESS: u64 = 77;
        for arch in ARCHITECTURES {
            let of = |kind, parts: &[MachinePart]| Judge::of(kind, parts, arch);
            let api = of(ThreadKind::Api, &[MachinePart::ControlApi]);
            for (name, arguments, expected) in [
                ("accept4", [3, 0, 0, 0x8_0000, 0, 0], ALLOW),
                ("getsockopt", [4, 1, PEER_USER, 1, 1, 0], ALLOW),
                ("getsockopt", [4, 1, PEER_PROCESS, 1, 1, 0], TRAP),
                ("recvmsg", [4, 1, 0, 0, 0, 0], ALLOW),
                ("recvfrom", [4, 1, 1, 0, 0, 0], TRAP),
                ("shutdown", [4, 1, 0, 0, 0, 0], ALLOW),
                ("shutdown", [4, 0, 0, 0, 0, 0], TRAP),
                ("unlinkat", [3, 1, 0, 0, 0, 0], TRAP),
                // The power button, and a vCPU.
                ("ioctl", [5, 0x4008_ae61, 0, 0, 0, 0], ALLOW),
                ("ioctl", [5, 0xae80, 0, 0, 0, 0], TRAP),
            ] {
                assert_eq!(api.call(name, arguments), expected, "{name} {arguments:x?}");
            }
            assert_eq!(of(ThreadKind::Api, &[]).call("accept4", [0; 6]), TRAP);
            let (without, with) =
                (of(ThreadKind::EventLoop, &[]), of(ThreadKind::EventLoop, &[MachinePart::ControlApi]));
            assert_eq!((without.call("unlinkat", [0; 6]), with.call("unlinkat", [0; 6])), (TRAP, ALLOW));
            assert_eq!(with.call("accept4", [0; 6]), TRAP);
        }
    }

    #[test]
    fn a_mapping_stays_one_of_the_same_bytes() {
        const EPERM: u32 = 0x0005_0001;
        for (arch, audit) in ARCHITECTURES.into_iter().zip([0xc000_003e, 0xc000_00b7]) {
            let filter = kept_mappings(arch).unwrap();
            let number = |name| calls::named(name).unwrap().number(arch).unwrap();
            for name in OF_OTHER_BYTES {
                assert_eq!(answer(&filter, audit, number(name), [0; 6]), EPERM, "{name}");
                assert_eq!(answer(&filter, audit, number(name) | 0x4000_0000, [0; 6]), EPERM, "{name}");
            }
            assert_eq!(answer(&filter, audit, number("mmap"), [0; 6]), ALLOW);
        }
    }

    #[test]
    fn a_filter_that_only_logs_refuses_nothing() {
        let program = program(ThreadKind::Console, &[], OURS, Mode::Log, Architecture::X86_64).unwrap();
        assert_eq!(answer(&program, 0xc000_003e, 257, [0; 6]), LOG);
        assert_eq!(answer(&program, 0xc000_003e, 0, [0; 6]), ALLOW);
    }
}
