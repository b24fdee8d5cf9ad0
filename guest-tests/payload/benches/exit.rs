//! Cost of an access that leaves the guest and has no handler: the minimum for any monitor.
//!
//! ```text
//! cargo bench -p egm-payload --bench exit -- --reads 20000 --rounds 5
//! ```
//! prints one line of JSON: seconds of each round. The guest is a loop of one load from an address without memory, as
//! in `egm_payload::exits`; the monitor only enters it again.
#![expect(unsafe_code, reason = "a memory slot lends this process's address space to the guest")]
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::sync::Arc;
use std::time::Instant;

use egm_payload::{Code, Width};
use egm_vfio::mapping::Mapping;
use egm_vfio::memory::HostMemory;
use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};

/// Address of the code, in the middle of memory that begins at 0.
const BASE: u32 = 0x1000;
const MEMORY: u64 = 0x10_0000;
/// Address without memory or device.
const NOWHERE: u64 = 0xd000_0000;
/// Written to when the loop is over.
const PORT: u16 = 0x3f8;

fn main() {
    let (reads, rounds) = (number("--reads", 20_000), number("--rounds", 5));
    let seconds: Vec<_> = (0..rounds).map(|_| round(reads).to_string()).collect();
    println!("[{}]", seconds.join(","));
}

/// The number after `name`; `cargo bench` adds words of its own.
fn number(name: &str, default: u32) -> u32 {
    let word = std::env::args().skip_while(|word| word != name).nth(1);
    word.map_or(default, |word| word.parse().unwrap())
}

fn round(reads: u32) -> f64 {
    let memory: Arc<dyn HostMemory> = Arc::new(Mapping::pages(MEMORY, 0).unwrap());
    memory.write(BASE.into(), &code(reads)).unwrap();
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let region = kvm_userspace_memory_region {
        memory_size: MEMORY,
        userspace_addr: memory.address().as_ptr().expose_provenance().try_into().unwrap(),
        ..Default::default()
    };
    // SAFETY: `memory` is mapped for longer than `vm` lives, and all of it is the guest's.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    let mut special = vcpu.get_sregs().unwrap();
    let flat = |selector, type_| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    special.cs = flat(0x08, 0xb);
    [special.ds, special.es, special.ss] = [flat(0x10, 3); 3];
    special.cr0 |= 1;
    vcpu.set_sregs(&special).unwrap();
    vcpu.set_regs(&kvm_regs { rip: BASE.into(), rflags: 2, ..Default::default() }).unwrap();
    let mut begun = None;
    loop {
        match vcpu.run().unwrap() {
            VcpuExit::MmioRead(NOWHERE, _) => {
                begun.get_or_insert_with(Instant::now);
            }
            VcpuExit::IoOut(PORT, _) => return begun.unwrap().elapsed().as_secs_f64(),
            other => panic!("{other:?}"),
        }
    }
}

fn code(reads: u32) -> Vec<u8> {
    let mut code = Code::new(BASE);
    code.at(NOWHERE);
    code.mov_edi(reads);
    let again = code.here();
    code.load(Width::Long);
    code.count_down(again);
    code.output_byte(PORT, 0);
    code.finish()
}
