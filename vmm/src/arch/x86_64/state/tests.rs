use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_segment};
use serde_json::Value;

use super::*;
use crate::arch::x86_64::vcpu::{Controllers, create_interrupt_controller};
use crate::kvm::Vm;

const MSR_STAR: u32 = 0xc000_0081;
const MSR_FS_BASE: u32 = 0xc000_0100;
const MSR_KERNEL_GS_BASE: u32 = 0xc000_0102;
/// Registers of the local APIC, by their offset (Intel SDM 11.4.1): task priority, timer.
const TASK_PRIORITY: usize = 0x80;
const TIMER: usize = 0x320;

/// A machine with one vCPU that has the host's CPUID.
struct Machine {
    vcpu: VcpuFd,
    vm: Vm,
}

impl Machine {
    fn new(hypervisor: &Hypervisor) -> Self {
        let vm = hypervisor.create_vm(48).unwrap();
        create_interrupt_controller(&vm).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let cpuid: CpuId = hypervisor.kvm().get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        vcpu.set_cpuid2(&cpuid).unwrap();
        Self { vcpu, vm }
    }

    /// Gives registers values that no new vCPU has.
    fn mark(&self) {
        let regs = kvm_regs { rax: 0x1122_3344_5566_7788, rip: 0x1234, rflags: 0x46, ..Default::default() };
        self.vcpu.set_regs(&regs).unwrap();
        let mut sregs = self.vcpu.get_sregs().unwrap();
        sregs.ds = kvm_segment { base: 0x12_3450, selector: 0x1234, ..sregs.ds };
        sregs.cr2 = 0xdead_b000;
        self.vcpu.set_sregs(&sregs).unwrap();
        let marks =
            [(MSR_STAR, 0x23_0010 << 32), (MSR_FS_BASE, 0x7000_1000), (MSR_KERNEL_GS_BASE, 0x7000_2000)];
        msrs::write(&self.vcpu, &marks.map(|(index, value)| Msr { index, value })).unwrap();
        let mut lapic = self.vcpu.get_lapic().unwrap();
        lapic.regs[TASK_PRIORITY] = 0x30;
        lapic.regs[TIMER] = 0x41;
        self.vcpu.set_lapic(&lapic).unwrap();
        let mut debug = self.vcpu.get_debug_regs().unwrap();
        debug.db[1] = 0x4000;
        self.vcpu.set_debug_regs(&debug).unwrap();
        self.vcpu.set_mp_state(kvm_mp_state { mp_state: kvm_bindings::KVM_MP_STATE_HALTED }).unwrap();
    }
}

/// The JSON of `state` without the counter, which runs.
fn without_counter(state: &VcpuState) -> Value {
    let mut state = state.clone();
    state.msrs.retain(|msr| msr.index != MSR_TSC);
    serde_json::to_value(&state).unwrap()
}

fn counter(state: &VcpuState) -> u64 {
    state.msrs.iter().find(|msr| msr.index == MSR_TSC).unwrap().value
}

#[test]
fn another_machine_s_vcpu_gets_the_state_of_a_file() {
    let Ok(hypervisor) = Hypervisor::open() else { return println!("skipped: no KVM") };
    let interface = VcpuInterface::of(&hypervisor).unwrap();
    let (first, second) = (Machine::new(&hypervisor), Machine::new(&hypervisor));
    let untouched = VcpuState::save(&second.vcpu, &interface).unwrap();
    first.mark();
    let saved = VcpuState::save(&first.vcpu, &interface).unwrap();
    let file = serde_json::to_string(&saved).unwrap();
    let read: VcpuState = serde_json::from_str(&file).unwrap();
    assert_ne!(without_counter(&read), without_counter(&untouched));
    read.restore(&second.vcpu, &interface).unwrap();
    let again = VcpuState::save(&second.vcpu, &interface).unwrap();
    assert_eq!(without_counter(&again), without_counter(&saved));
    assert!(counter(&again) >= counter(&saved));
    assert_eq!((again.regs.rax, again.sregs.ds.base, again.activity), (0x1122_3344_5566_7788, 0x12_3450, 3));
    assert_eq!((again.lapic.regs[TASK_PRIORITY], again.lapic.regs[TIMER]), (0x30, 0x41));
    let star = again.msrs.iter().find(|msr| msr.index == MSR_STAR).unwrap();
    assert_eq!((star.value, again.debug.db[1]), (0x23_0010 << 32, 0x4000));
}

#[test]
fn a_reset_returns_a_vcpu_to_its_first_state_with_a_new_counter() {
    let Ok(hypervisor) = Hypervisor::open() else { return println!("skipped: no KVM") };
    let interface = VcpuInterface::of(&hypervisor).unwrap();
    let machine = Machine::new(&hypervisor);
    let saved = VcpuState::save(&machine.vcpu, &interface).unwrap();
    let initial = saved.clone().into_initial();
    assert_eq!((counter(&initial), initial.tsc_khz), (0, None));
    assert!(!initial.msrs.iter().any(|msr| is_bank(msr.index)));
    machine.mark();
    initial.reset(&machine.vcpu, &interface).unwrap();
    let again = VcpuState::save(&machine.vcpu, &interface).unwrap();
    assert_eq!(without_counter(&again), without_counter(&saved));
}

#[test]
fn another_machine_s_controllers_and_clock_get_the_state_of_a_file() {
    let Ok(hypervisor) = Hypervisor::open() else { return println!("skipped: no KVM") };
    let (first, second) = (Machine::new(&hypervisor), Machine::new(&hypervisor));
    let mut file = serde_json::to_value(ControllersState::save(&first.vm, &Controllers).unwrap()).unwrap();
    // Entry 5 of the I/O APIC: vector 0x51, level, masked. The entries follow the identifier and 24 bytes of registers.
    let entry = 8 + 24 + 5 * 8;
    file["chips"]["ioapic"][entry] = 0x51.into();
    file["chips"]["ioapic"][entry + 1] = 0x80.into();
    file["clock_ns"] = 3_600_000_000_000_u64.into();
    let read: ControllersState = serde_json::from_value(file.clone()).unwrap();
    read.restore(&second.vm, &Controllers).unwrap();
    let again = serde_json::to_value(ControllersState::save(&second.vm, &Controllers).unwrap()).unwrap();
    assert_eq!(again["chips"], file["chips"]);
    let passed = again["clock_ns"].as_u64().unwrap() - 3_600_000_000_000;
    assert!(passed < 60_000_000_000, "{passed} ns");

    let chips = &mut file["chips"];
    chips["pic_master"] = chips["pic_slave"].clone();
    let swapped: ControllersState = serde_json::from_value(file).unwrap();
    let error = swapped.restore(&second.vm, &Controllers).unwrap_err();
    assert_eq!(error.to_string(), "KVM_SET_IRQCHIP failed");
}

#[test]
fn a_register_that_kvm_lacks_must_be_zero() {
    let Ok(hypervisor) = Hypervisor::open() else { return println!("skipped: no KVM") };
    let machine = Machine::new(&hypervisor);
    let unknown = |value| [Msr { index: 0xdead_0000, value }, Msr { index: MSR_STAR, value: 7 << 32 }];
    let error = msrs::write(&machine.vcpu, &unknown(1)).unwrap_err();
    assert_eq!(error.to_string(), "KVM_SET_MSRS refused the saved value of register 0xdead0000");
    msrs::write(&machine.vcpu, &unknown(0)).unwrap();
    let star = msrs::read(&machine.vcpu, &[0xdead_0000, MSR_STAR]).unwrap();
    assert_eq!(star, [Msr { index: MSR_STAR, value: 7 << 32 }]); // the next one was written
}

#[test]
fn values_that_no_save_wrote_are_errors() {
    let Ok(hypervisor) = Hypervisor::open() else { return println!("skipped: no KVM") };
    let interface = VcpuInterface::of(&hypervisor).unwrap();
    let machine = Machine::new(&hypervisor);
    let saved = VcpuState::save(&machine.vcpu, &interface).unwrap();
    let file = serde_json::to_value(&saved).unwrap();
    for (name, length) in [("regs", 143), ("lapic", 1025), ("xcrs", 0), ("nested", 127)] {
        let mut wrong = file.clone();
        wrong[name] = vec![0; length].into();
        let error = serde_json::from_value::<VcpuState>(wrong).unwrap_err().to_string();
        assert!(error.contains(&format!("invalid length {length}")), "{name}: {error}");
    }
    let mut wrong = file;
    wrong["cpuid"] = Value::Null;
    assert!(serde_json::from_value::<VcpuState>(wrong).is_err());

    let refused = |state: VcpuState| state.restore(&machine.vcpu, &interface).unwrap_err().to_string();
    for words in [0, 1023, 1 << 20] {
        assert_eq!(refused(VcpuState { xsave: vec![0; words], ..saved.clone() }), "KVM_SET_XSAVE failed");
    }
    assert_eq!(refused(VcpuState { activity: 77, ..saved.clone() }), "KVM_SET_MP_STATE failed");
    let sregs = kvm_sregs { cr0: u64::MAX, ..saved.sregs };
    assert_eq!(refused(VcpuState { sregs, ..saved }), "KVM_SET_SREGS failed");
}
