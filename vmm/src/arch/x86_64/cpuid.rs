//! CPUID of the guest: the host's features as KVM offers them, with the plan's topology.
//!
//! Pure: a list of leaves in, a list of leaves out. Leaf numbers and fields: Intel SDM volume 2A, CPUID; AMD APM
//! volume 3, appendix E.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use crate::plan::VcpuPlan;

/// Field widths of an x2APIC id, smallest part first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApicWidths {
    /// Bits of the thread number.
    pub thread: u32,
    /// Bits of the core number.
    pub core: u32,
}

impl ApicWidths {
    /// The widths that hold this topology.
    pub fn of(threads: u32, cores: u32) -> Self {
        let bits = |count: u32| count.max(1).next_power_of_two().trailing_zeros();
        Self { thread: bits(threads), core: bits(cores) }
    }

    fn socket_shift(self) -> u32 {
        self.thread.saturating_add(self.core)
    }
}

/// Inputs of the leaves besides those of the host.
#[derive(Debug, Clone, Copy)]
pub struct Topology {
    threads: u32,
    cores: u32,
    /// Guest physical address bits.
    address_bits: u8,
    host: Host,
}

/// Properties of the host's processors.
#[derive(Debug, Clone, Copy)]
pub struct Host {
    /// Whether the local APIC timer takes a TSC deadline.
    pub tsc_deadline: bool,
    /// Whether its processors are emulated by QEMU.
    pub emulated: bool,
}

impl Topology {
    /// The topology of the plan's vCPUs.
    pub fn new(vcpus: &[VcpuPlan], address_bits: u8, host: Host) -> Self {
        let most = |of: fn(&VcpuPlan) -> u32| vcpus.iter().map(of).max().unwrap_or(0).saturating_add(1);
        Self { threads: most(|v| v.thread), cores: most(|v| v.core), address_bits, host }
    }

    fn per_socket(self) -> u32 {
        self.threads.saturating_mul(self.cores)
    }
}

const ECX1_X2APIC: u32 = 1 << 21;
const ECX1_TSC_DEADLINE: u32 = 1 << 24;
const ECX1_HYPERVISOR: u32 = 1 << 31;
const EDX1_HTT: u32 = 1 << 28;
/// Without them a guest on AMD's processors takes every uncorrected error for its end: McaOverflowRecov and SUCCOR.
/// KVM does not report them, and QEMU sets them too: the monitor injects the errors.
const EBX_80000007_RECOVERY: u32 = 0b11;
/// `KVM_FEATURE_PV_EOI`: the guest ends an interrupt in memory, without an exit (Linux, Documentation/virt/kvm/x86/cpuid.rst).
///
/// Not on an emulated processor. QEMU's SVM (10.0 to 11.1: `helper_vmrun` leaves the vector in `exception_index`) may raise an injected
/// interrupt again at any instruction until the next exit, masked or not. Where the end of an interrupt is an exit, that is before
/// the handler has done anything; where it is none, a timer's handler is interrupted by itself, and the guest loses its timers.
const EAX_40000001_PV_EOI: u32 = 1 << 6;
const ECX_80000001_CMP_LEGACY: u32 = 1 << 1;
const ECX_80000001_TOPOLOGY: u32 = 1 << 22;

/// Whether the host's leaves are those of an AMD processor.
pub fn is_amd(host: &[kvm_cpuid_entry2]) -> bool {
    host.iter().any(|e| e.function == 0 && e.ebx == u32::from_le_bytes(*b"Auth"))
}

/// The leaves of `vcpu`.
pub fn leaves(host: &[kvm_cpuid_entry2], topology: Topology, vcpu: &VcpuPlan) -> Vec<kvm_cpuid_entry2> {
    let amd = is_amd(host);
    let ours = |e: &&kvm_cpuid_entry2| !matches!(e.function, 0xb | 0x1f | 0x8000_0026);
    let mut out: Vec<_> = host.iter().filter(ours).map(|e| adapt(*e, topology, vcpu, amd)).collect();
    out.extend(extended_topology(0xb, topology, vcpu));
    if !amd && host.iter().any(|e| e.function == 0 && e.eax >= 0x1f) {
        out.extend(extended_topology(0x1f, topology, vcpu));
    }
    out
}

fn adapt(mut leaf: kvm_cpuid_entry2, topology: Topology, vcpu: &VcpuPlan, amd: bool) -> kvm_cpuid_entry2 {
    let widths = ApicWidths::of(topology.threads, topology.cores);
    let per_socket = topology.per_socket();
    match leaf.function {
        0 => leaf.eax = leaf.eax.max(0xb),
        1 => {
            let id = vcpu.hardware_id.min(0xff);
            leaf.ebx = leaf.ebx & 0x0000_ffff | id << 24 | per_socket.min(0xff) << 16;
            leaf.ecx |= ECX1_X2APIC | ECX1_HYPERVISOR;
            leaf.ecx = set(leaf.ecx, ECX1_TSC_DEADLINE, topology.host.tsc_deadline);
            leaf.edx = set(leaf.edx, EDX1_HTT, per_socket > 1);
        }
        4 if leaf.eax & 0x1f != 0 => {
            let shared = if leaf.eax >> 5 & 7 >= 3 { per_socket } else { topology.threads };
            let field = |count: u32, most: u32| count.saturating_sub(1).min(most);
            leaf.eax = leaf.eax & 0x3fff | field(shared, 0xfff) << 14 | field(topology.cores, 0x3f) << 26;
        }
        0x4000_0001 if topology.host.emulated => leaf.eax &= !EAX_40000001_PV_EOI,
        0x8000_0001 if amd => {
            leaf.ecx = set(leaf.ecx | ECX_80000001_TOPOLOGY, ECX_80000001_CMP_LEGACY, per_socket > 1);
        }
        0x8000_0007 if amd => leaf.ebx |= EBX_80000007_RECOVERY,
        0x8000_0008 => {
            leaf.eax = leaf.eax & !0xff | u32::from(topology.address_bits);
            if amd {
                leaf.ecx = widths.socket_shift() << 12 | per_socket.saturating_sub(1).min(0xff);
            }
        }
        0x8000_001d if leaf.eax & 0x1f != 0 => {
            let shared = if leaf.eax >> 5 & 7 >= 3 { per_socket } else { topology.threads };
            leaf.eax = leaf.eax & 0x3fff | shared.saturating_sub(1).min(0xfff) << 14;
        }
        0x8000_001e => {
            leaf.eax = vcpu.hardware_id;
            leaf.ebx = topology.threads.saturating_sub(1) << 8 | vcpu.core;
            leaf.ecx = vcpu.socket; // one node a processor
        }
        _ => {}
    }
    leaf
}

/// Leaf 0xB and its successor 0x1F: threads, cores, end.
fn extended_topology(function: u32, topology: Topology, vcpu: &VcpuPlan) -> [kvm_cpuid_entry2; 3] {
    let mut widths = ApicWidths::of(topology.threads, topology.cores);
    widths.thread = widths.thread.saturating_add(u32::from(egm_address::fault!("cpu-topology-wrong")));
    let level = |index: u32, shift: u32, count: u32, kind: u32| kvm_cpuid_entry2 {
        function,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: kind << 8 | index,
        edx: vcpu.hardware_id,
        ..Default::default()
    };
    [
        level(0, widths.thread, topology.threads, 1),
        level(1, widths.socket_shift(), topology.per_socket(), 2),
        level(2, 0, 0, 0),
    ]
}

const fn set(value: u32, bits: u32, on: bool) -> u32 {
    if on { value | bits } else { value & !bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vcpu(hardware_id: u32, socket: u32, core: u32, thread: u32) -> VcpuPlan {
        VcpuPlan { index: 0, hardware_id, socket, core, thread, node: 0, host_cpus: None }
    }

    fn host() -> Vec<kvm_cpuid_entry2> {
        let leaf = |function, eax, ebx| kvm_cpuid_entry2 { function, eax, ebx, ..Default::default() };
        let mut amd = leaf(0, 0x10, u32::from_le_bytes(*b"Auth"));
        amd.ecx = u32::from_le_bytes(*b"cAMD");
        vec![
            amd,
            leaf(1, 0xa0f11, 0x0002_0800),
            leaf(0xb, 7, 7),
            leaf(0x8000_0007, 0, 0),
            leaf(0x8000_0008, 0x3030, 0),
            leaf(0x8000_001e, 9, 9),
        ]
    }

    const HOST: Host = Host { tsc_deadline: true, emulated: false };

    fn find(leaves: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *leaves.iter().find(|e| e.function == function && e.index == index).unwrap()
    }

    #[test]
    fn the_guest_sees_the_planned_topology_and_a_hypervisor() {
        let all = [vcpu(0, 0, 0, 0), vcpu(1, 0, 0, 1), vcpu(2, 0, 1, 0), vcpu(7, 1, 1, 1)];
        let topology = Topology::new(&all, 40, HOST);
        let out = leaves(&host(), topology, &all[3]);
        let one = find(&out, 1, 0);
        assert_eq!((one.ebx >> 24, one.ebx >> 16 & 0xff), (7, 4));
        assert_eq!(
            one.ecx & (ECX1_HYPERVISOR | ECX1_X2APIC | ECX1_TSC_DEADLINE),
            1 << 31 | 1 << 21 | 1 << 24
        );
        let (threads, cores, end) = (find(&out, 0xb, 0), find(&out, 0xb, 1), find(&out, 0xb, 2));
        assert_eq!((threads.eax, threads.ebx, threads.ecx, threads.edx), (1, 2, 0x100, 7));
        assert_eq!((cores.eax, cores.ebx, cores.ecx), (2, 4, 0x201));
        assert_eq!((end.ebx, end.ecx), (0, 2));
        assert_eq!(find(&out, 0x8000_0008, 0).eax & 0xff, 40);
        assert_eq!(find(&out, 0x8000_001e, 0).ecx, 1);
    }

    #[test]
    fn a_guest_on_amd_may_recover_from_bad_memory() {
        let all = [vcpu(0, 0, 0, 0)];
        let out = leaves(&host(), Topology::new(&all, 40, HOST), &all[0]);
        assert_eq!(find(&out, 0x8000_0007, 0).ebx, 3);
    }

    #[test]
    fn a_guest_on_an_emulated_processor_exits_when_an_interrupt_ends() {
        let all = [vcpu(0, 0, 0, 0)];
        let host = [kvm_cpuid_entry2 { function: 0x4000_0001, eax: 0x41, ..Default::default() }];
        let features = |emulated| {
            let topology = Topology::new(&all, 40, Host { emulated, ..HOST });
            find(&leaves(&host, topology, &all[0]), 0x4000_0001, 0).eax
        };
        assert_eq!((features(false), features(true)), (0x41, 1));
    }

    #[test]
    fn an_uneven_topology_leaves_gaps_in_the_ids() {
        assert_eq!(ApicWidths::of(1, 3), ApicWidths { thread: 0, core: 2 });
        assert_eq!(ApicWidths::of(2, 12), ApicWidths { thread: 1, core: 4 });
    }
}
