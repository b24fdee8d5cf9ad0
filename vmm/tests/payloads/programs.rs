//! Programs of the payloads.

use egm_address::{Guest, Span};
use egm_fixtures::payload::{BSS, Code, Entry, Payload, Ports, Width, long_mode};
use egm_vmm::plan::{FunctionPlan, FunctionRole, Plan, WindowKind};

/// Neither the code, nor the stack, nor the page tables of a payload: 16 KiB for what it likes.
const SCRATCH: u32 = 0x30_0000;

/// Registers of a processor's local APIC (Intel SDM 13.4.1).
const APIC: u64 = 0xfee0_0000;

/// Ports that no guest of ours has a device at; some of them are places where a PC has one.
const UNCLAIMED_PORTS: [u16; 6] = [0x64, 0x71, 0x80, 0x2f8, 0x1230, 0xfff0];

/// Writes `value` to `port`; the guest should not live to say more.
pub(crate) fn write_port(ports: Ports, port: u16, value: u8) -> Vec<u8> {
    let mut payload = Payload::new(ports);
    payload.print("writing\n");
    payload.code.output_byte(port, value);
    payload.print("failed: the guest goes on\n");
    payload.power_off();
    payload.finish(Entry::Pvh)
}

/// An exception without an interrupt table: a triple fault. The exception is a division by zero because KVM's emulator
/// can raise that one; it has no `int3`.
pub(crate) fn triple_fault(ports: Ports) -> Vec<u8> {
    let mut payload = Payload::new(ports);
    payload.print("faulting\n");
    let nothing = payload.code.label();
    payload.code.raw_address(&[0x0f, 0x01, 0x1d], nothing); // lidt
    payload.code.mov_ecx(0);
    payload.code.raw(&[0xf7, 0xf1]); // div ecx
    payload.print("failed: the guest goes on\n");
    payload.power_off();
    payload.code.place(nothing);
    payload.code.raw(&[0; 6]);
    payload.finish(Entry::Pvh)
}

/// In each of three starts the machine is as at the first, and is changed then: processor, interrupt controllers, serial
/// port, configuration ports, and the first endpoint, a virtio device on the root bus.
pub(crate) fn same_after_resets(plan: &Plan) -> Vec<u8> {
    const SYSENTER_CS: u32 = 0x174;
    let mut payload = Payload::new(ports(plan));
    let function = first_endpoint(plan);
    let config = config_of(plan, function);
    let moved = plan.window(WindowKind::PciMemory32).unwrap().start().get();
    let planned = function.bars[0].span.start().get();
    let io_apic = plan.windows.iter().find(|w| w.label == "I/O APIC").unwrap().span.start().get();

    payload.code.mov_ecx(SYSENTER_CS);
    payload.code.raw(&[0x0f, 0x32]); // rdmsr
    payload.code.compare(Width::Long, 0);
    payload.expect_equal("a model-specific register is 0");
    payload.code.mov_eax(0x10);
    payload.code.mov_edx(0);
    payload.code.raw(&[0x0f, 0x30]); // wrmsr
    let scratch = payload.ports.serial + 7;
    for (port, width, start, value) in [(scratch, Width::Byte, 0, 0x5a), (0xcf8, Width::Long, 0, 1 << 31)] {
        payload.code.port(port);
        payload.code.input(width);
        payload.code.compare(width, start);
        payload.expect_equal(&format!("port {port:#x} reads {start:#x}"));
        payload.code.mov_eax(value);
        payload.code.output(width);
    }
    payload.code.at(io_apic);
    payload.code.mov_eax(0x1a); // the entry of line 5
    payload.code.store(Width::Long);
    // Address, value at the start, value then. A status of 0 is a virtio device that was reset.
    let high = u32::try_from(planned >> 32).unwrap();
    let low_half = u32::try_from(planned & 0xffff_fff0).unwrap();
    for (address, width, start, value) in [
        (io_apic + 0x10, Width::Long, 0x1_0000, 0x31),
        (APIC + 0x80, Width::Long, 0, 0x20),
        (APIC + 0xf0, Width::Long, 0xff, 0x1ff),
        (config + 0x04, Width::Word, 0, 6),
        (config + 0x10, Width::Long, low_half | 0xc, low(moved)),
        (config + 0x14, Width::Long, high, 0),
        (moved + 0x14, Width::Byte, 0, 3),
        (BSS.into(), Width::Long, 0, 0x1234_5678),
    ] {
        payload.code.at(address);
        payload.code.load(width);
        payload.code.compare(width, start);
        payload.expect_equal(&format!("{address:#x} reads {start:#x}"));
        payload.code.mov_eax(value);
        payload.code.store(width);
    }
    payload.reset_until(2);
    payload.ok()
}

/// Starts the second processor by INIT and SIPI (Intel SDM 11.4.4.1) as soon as possible, waits for it, and resets the machine,
/// `times` times.
pub(crate) fn second_processor_after_resets(plan: &Plan, times: u32) -> Vec<u8> {
    const TRAMPOLINE: u32 = 0x1_0000;
    const FLAG: u64 = 0xf000;
    let mut payload = Payload::new(ports(plan));
    let identifier = plan.vcpus[1].hardware_id << 24;
    for (address, value) in [
        (u64::from(TRAMPOLINE), 0xf000_06c6), // mov byte [FLAG], 1; hlt; jmp -3
        (u64::from(TRAMPOLINE) + 4, 0xfdeb_f401),
        (APIC + 0xf0, 0x1ff),
        (APIC + 0x310, identifier),
        (APIC + 0x300, 0x4500),
        (APIC + 0x310, identifier),
        (APIC + 0x300, 0x4600 | TRAMPOLINE >> 12),
    ] {
        payload.code.at(address);
        payload.code.mov_eax(value);
        payload.code.store(Width::Long);
    }
    let waits = payload.code.here();
    payload.code.at(FLAG);
    payload.code.load(Width::Byte);
    payload.code.compare(Width::Byte, 1);
    payload.code.jne(waits);
    payload.reset_until(times);
    payload.ok()
}

/// First and last byte of every piece of RAM, accesses across its edges, and holes.
///
/// It runs in 64-bit mode when the plan has RAM above 4 GiB.
pub(crate) fn memory(plan: &Plan) -> Vec<u8> {
    let mut payload = Payload::new(ports(plan));
    let end = plan.memory_end().get();
    if end > 1 << 32 {
        let gibibytes = u32::try_from((end >> 30) + 1).unwrap();
        assert!(long_mode::tables_end(gibibytes) < 0x80_0000, "payloads have 8 MiB");
        long_mode::enter(&mut payload.code, gibibytes);
    }
    for piece in &plan.memory {
        for address in [piece.span.start().get(), piece.span.last().get()] {
            byte_is_ram(&mut payload, address);
        }
        let after = piece.span.end();
        if is_hole(plan, after.get()) {
            access_across_the_end(&mut payload, after.get());
        }
    }
    let firmware = plan.window(WindowKind::Firmware).unwrap().start().get();
    payload.code.at(firmware);
    payload.code.load(Width::Long);
    payload.code.compare(Width::Long, u32::from_le_bytes(*b"RSD "));
    payload.expect_equal("the firmware window starts with the ACPI root pointer");
    let holes = [0xa_0000, 0xd_fffc, 0xf000_0000, end];
    for address in holes.into_iter().filter(|address| is_hole(plan, *address)) {
        hole_reads_ones(&mut payload, address);
    }
    payload.ok()
}

/// Whether nothing answers at `address`; pages that KVM keeps for itself are no hole.
fn is_hole(plan: &Plan, address: u64) -> bool {
    let inside = |span: Span<Guest>| span.start().get() <= address && address < span.end().get();
    let answers =
        |kind| !matches!(kind, WindowKind::Reserved | WindowKind::PciMemory32 | WindowKind::PciMemory64);
    !plan.memory.iter().any(|m| inside(m.span))
        && !plan.windows.iter().any(|w| answers(w.kind) && inside(w.span))
        && !plan.pci.iter().flat_map(|f| &f.bars).any(|b| inside(b.span))
}

fn byte_is_ram(payload: &mut Payload, address: u64) {
    payload.code.at(address);
    payload.code.load(Width::Byte);
    payload.code.raw(&[0x88, 0xc1]); // mov cl, al: what is there now
    for pattern in [0x5a, 0xa5] {
        payload.code.raw(&[0xb0, pattern]); // mov al
        payload.code.store(Width::Byte);
        payload.code.raw(&[0xb0, 0]);
        payload.code.load(Width::Byte);
        payload.code.compare(Width::Byte, pattern.into());
        payload.expect_equal(&format!("the byte at {address:#x} keeps {pattern:#x}"));
    }
    payload.code.raw(&[0x88, 0xc8]); // mov al, cl
    payload.code.store(Width::Byte);
}

/// Four bytes, two in RAM and two in a hole: the former as they are, the latter all ones.
fn access_across_the_end(payload: &mut Payload, end: u64) {
    payload.code.at(end - 2);
    payload.code.mov_eax(0x1234_5678);
    payload.code.store(Width::Long);
    payload.code.load(Width::Long);
    payload.code.compare(Width::Long, 0xffff_5678);
    payload.expect_equal(&format!("an access across the end of RAM at {end:#x} has its halves"));
}

fn hole_reads_ones(payload: &mut Payload, address: u64) {
    for width in Width::ALL {
        payload.code.at(address);
        payload.code.mov_eax(0);
        payload.code.store(width);
        payload.code.load(width);
        payload.code.compare(width, u32::MAX);
        payload.expect_equal(&format!("the hole at {address:#x} reads ones as {width:?} after a write"));
    }
}

/// Ports with and without devices, string instructions, and registers behind MMIO.
pub(crate) fn decode(plan: &Plan) -> Vec<u8> {
    let ports = ports(plan);
    let mut payload = Payload::new(ports);
    for port in UNCLAIMED_PORTS {
        port_reads_ones(&mut payload, port);
    }
    for (port, value, claim) in [
        (ports.serial + 5, 0x60, "the serial line status says that everything was sent"),
        (ports.pvpanic, 3, "pvpanic knows two events"),
        (ports.sleep + 1, 0, "the sleep status is clear"),
    ] {
        payload.code.mov_eax(0);
        payload.code.port(port);
        payload.code.input(Width::Byte);
        payload.code.compare(Width::Byte, value);
        payload.expect_equal(claim);
    }
    // Neither of these asks for anything: type without enable, enable with another type, a wrong value.
    payload.code.output_byte(ports.sleep, 5 << 2);
    payload.code.output_byte(ports.sleep, 1 << 5);
    payload.code.output_byte(ports.reset, 0);
    payload.code.output_byte(ports.pvpanic, 0);
    // Wider than the register, and past the last port: any answer is good.
    for port in [ports.serial + 7, ports.sleep, ports.reset, ports.pvpanic, 0xffff] {
        payload.code.port(port);
        payload.code.input(Width::Long);
    }
    string_instructions(&mut payload);
    mmio(&mut payload, plan);
    payload.ok()
}

fn port_reads_ones(payload: &mut Payload, port: u16) {
    for width in Width::ALL {
        payload.code.mov_eax(0);
        payload.code.port(port);
        payload.code.output(width);
        payload.code.input(width);
        payload.code.compare(width, u32::MAX);
        payload.expect_equal(&format!("the unclaimed port {port:#x} reads ones as {width:?} after a write"));
    }
}

/// One exit of KVM carries many bytes of a string instruction.
fn string_instructions(payload: &mut Payload) {
    const TEXT: &str = "one string\n";
    let text = payload.code.label();
    let past = payload.code.label();
    payload.code.jmp(past);
    payload.code.place(text);
    payload.code.raw(TEXT.as_bytes());
    payload.code.place(past);
    payload.code.raw(&[0xfc]); // cld
    payload.code.raw_address(&[0xbe], text); // mov esi
    payload.code.mov_ecx(u32::try_from(TEXT.len()).unwrap());
    payload.code.port(payload.ports.serial);
    payload.code.raw(&[0xf3, 0x6e]); // rep outsb

    payload.code.mov_edi(SCRATCH);
    payload.code.mov_ecx(64);
    payload.code.port(UNCLAIMED_PORTS[5]);
    payload.code.raw(&[0xf3, 0x66, 0x6d]); // rep insw
    for (offset, value) in [(0, u32::MAX), (124, u32::MAX), (128, 0)] {
        payload.code.at(u64::from(SCRATCH) + offset);
        payload.code.load(Width::Long);
        payload.code.compare(Width::Long, value);
        payload.expect_equal("a string of 64 words from an unclaimed port is 128 bytes of ones");
    }

    payload.code.mov_edi(SCRATCH);
    payload.code.mov_ecx(4);
    payload.code.port(payload.ports.pvpanic);
    payload.code.raw(&[0xf3, 0x6c]); // rep insb
    payload.code.at(SCRATCH.into());
    payload.code.load(Width::Long);
    payload.code.compare(Width::Long, 0x0303_0303);
    payload.expect_equal("each byte of a string is read from the port");
}

fn mmio(payload: &mut Payload, plan: &Plan) {
    let io_apic = plan.windows.iter().find(|w| w.label == "I/O APIC").unwrap().span.start().get();
    payload.code.at(io_apic);
    payload.code.mov_eax(1); // select the version register
    payload.code.store(Width::Long);
    payload.code.at(io_apic + 0x10);
    payload.code.load(Width::Long);
    payload.code.compare(Width::Long, u32::MAX);
    payload.expect_different("the I/O APIC has a version");

    let ecam = plan.window(WindowKind::Ecam).unwrap();
    payload.code.at(ecam.start().get());
    payload.code.load(Width::Word);
    payload.code.compare(Width::Word, u32::MAX);
    payload.expect_different("the host bridge has a vendor");
    payload.code.raw(&[0x89, 0xc1]); // mov ecx, eax
    payload.code.mov_eax(1 << 31); // enabled, 00:00.0, register 0 (PCI Local Bus 3.0, clause 3.2.2.3.2)
    payload.code.port(0xcf8);
    payload.code.output(Width::Long);
    payload.code.port(0xcfc);
    payload.code.input(Width::Word);
    payload.code.raw(&[0x66, 0x39, 0xc8]); // cmp ax, cx
    payload.expect_equal("configuration ports and configuration space show one host bridge");
    let nobody = [ecam.start().get() + (0x1f << 15 | 7 << 12), ecam.end().get() - 0x1000];
    for address in nobody {
        hole_reads_ones(payload, address);
    }
    // Across the end of configuration space: any answer is good.
    payload.code.at(ecam.end().get() - 2);
    payload.code.load(Width::Long);
    payload.code.store(Width::Long);
}

/// `count` random accesses to configuration space, aligned or not. Of four, one goes anywhere, two to the first
/// function of a device of bus 0, one to a bus behind a root port.
pub(crate) fn config_fuzz(plan: &Plan, seed: u32, count: u32) -> Vec<u8> {
    let ecam = plan.window(WindowKind::Ecam).unwrap();
    let all = u32::try_from(ecam.size() - 1).unwrap();
    let base = low(ecam.start().get());
    let mut payload = Payload::new(ports(plan));
    payload.print("fuzzing\n");
    let targets = [(all, base), (0xf_8fff, base), (0xf_8fff, base), (0xf0_0fff & all, base)];
    random_accesses(&mut payload, &targets, seed, count, false);
    payload.code.at(ecam.start().get());
    payload.code.load(Width::Word);
    payload.code.compare(Width::Word, u32::MAX);
    payload.expect_different("the host bridge is still there");
    payload.ok()
}

/// Moves the first BAR of every device on the root bus below 4 GiB, then makes `count` random accesses to these BARs
/// and as many to I/O ports from 0x800 on, below which are the ports that end the guest.
pub(crate) fn device_fuzz(plan: &Plan, seed: u32, count: u32) -> Vec<u8> {
    let mut place = plan.window(WindowKind::PciMemory32).unwrap().start().get();
    let mut payload = Payload::new(ports(plan));
    payload.print("fuzzing\n");
    let mut targets = Vec::new();
    let endpoint =
        |f: &&FunctionPlan| matches!(f.role, FunctionRole::Endpoint { .. }) && f.address.bus() == 0;
    for function in plan.pci.iter().filter(endpoint) {
        let size = function.bars[0].span.size();
        place = place.next_multiple_of(size);
        let config = config_of(plan, function);
        for (register, value) in [(0x10, low(place)), (0x14, 0), (0x04, 6)] {
            payload.code.at(config + register);
            payload.code.mov_eax(value);
            payload.code.store(Width::Long);
        }
        payload.code.at(place);
        payload.code.load(Width::Long);
        payload.code.compare(Width::Long, u32::MAX);
        payload.expect_different(&format!("{} answers where its BAR was moved to", function.address));
        targets.push((low(size - 1), low(place)));
        place += size;
    }
    random_accesses(&mut payload, &targets, seed, count, true);
    payload.ok()
}

/// Action of a guest on the disk that it has in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Nothing,
    Reset,
    /// It resets its machine, of which the disk is a part.
    ResetMachine,
    /// It requests a flush, which has to fail.
    FlushInVain,
}

/// Takes the first endpoint, a disk on the root bus, into use, does `act`, then waits for its end.
pub(crate) fn disk_in_use(plan: &Plan, act: Act) -> Vec<u8> {
    let mut payload = Payload::new(ports(plan));
    let function = first_endpoint(plan);
    let config = config_of(plan, function);
    let bar = plan.window(WindowKind::PciMemory32).unwrap().start().get();
    let mut write = |at: u64, width, value| {
        payload.code.at(at);
        payload.code.mov_eax(value);
        payload.code.store(width);
    };
    for (register, value) in [(0x10, low(bar)), (0x14, 0), (0x04, 6)] {
        write(config + register, Width::Long, value);
    }
    // virtio 1.3, clauses 3.1.1 and 4.1.4.3: status, FLUSH and VERSION_1, one queue somewhere in memory.
    write(bar + 0x14, Width::Byte, 3);
    for (half, bit) in [(0, 9), (1, 0)] {
        write(bar + 0x08, Width::Long, half);
        write(bar + 0x0c, Width::Long, 1 << bit);
    }
    write(bar + 0x14, Width::Byte, 11);
    for (register, offset) in [(0x20, 0), (0x28, 0x1000), (0x30, 0x2000)] {
        write(bar + register, Width::Long, SCRATCH + offset);
    }
    write(bar + 0x1c, Width::Word, 1);
    write(bar + 0x14, Width::Byte, 15);
    if act == Act::Reset {
        write(bar + 0x14, Width::Byte, 0);
    }
    payload.code.load(Width::Byte);
    payload.code.compare(Width::Byte, 15); // the reset lasts as long as its flush
    payload.expect_equal("the disk is in use");
    if act == Act::FlushInVain {
        flush_in_vain(&mut payload, bar);
    }
    payload.print("in use\n");
    if act == Act::ResetMachine {
        payload.code.output_byte(payload.ports.reset, 1);
    }
    payload.code.halt();
    payload.finish(Entry::Pvh)
}

/// A request to flush (virtio 1.3, clauses 2.7 and 5.2.6) on the queue of [`disk_in_use`].
fn flush_in_vain(payload: &mut Payload, bar: u64) {
    let (table, available, used, header) = (SCRATCH, SCRATCH + 0x1000, SCRATCH + 0x2000, SCRATCH + 0x3000);
    let status = header + 16;
    for (address, value) in [
        (header, 4),
        (status, 0xee),
        (table, header),
        (table + 8, 16),
        (table + 12, 1 | 1 << 16), // there is a next one, number 1
        (table + 16, status),
        (table + 24, 1),
        (table + 28, 2),      // for the device to write
        (available, 1 << 16), // one chain, which begins with descriptor 0
    ] {
        payload.code.at(address.into());
        payload.code.mov_eax(value);
        payload.code.store(Width::Long);
    }
    payload.code.at(bar + 0x3000);
    payload.code.mov_eax(0);
    payload.code.store(Width::Word);
    let answered = payload.code.here();
    payload.code.at((used + 2).into());
    payload.code.load(Width::Word);
    payload.code.compare(Width::Word, 1);
    payload.code.jne(answered);
    payload.code.at(status.into());
    payload.code.load(Width::Byte);
    payload.code.compare(Width::Byte, 1); // VIRTIO_BLK_S_IOERR
    payload.expect_equal("a flush that storage refuses is an error");
}

/// Random reads and writes of 1, 2 and 4 bytes. A target is a mask, of which random bits are taken, and a base, to
/// which they are added; it must not be in the payload's memory. Only in 32-bit mode.
fn random_accesses(payload: &mut Payload, targets: &[(u32, u32)], seed: u32, count: u32, ports_too: bool) {
    assert!(seed != 0 && count != 0 && !targets.is_empty());
    let code = &mut payload.code;
    let (table, past) = (code.label(), code.label());
    code.jmp(past);
    code.place(table);
    for (mask, base) in targets.iter().cycle().take(4) {
        code.dword(*mask).dword(*base);
    }
    code.place(past);
    code.mov_esi(seed);
    code.mov_edi(count);
    let again = code.here();
    code.random();
    code.raw(&[0x89, 0xf2, 0x83, 0xe2, 0x03]); // mov edx, esi; and edx, 3
    code.random();
    code.raw(&[0x89, 0xf3]); // mov ebx, esi
    code.raw_address(&[0x23, 0x1c, 0xd5], table); // and ebx, [table + 8 * edx]
    code.raw_address(&[0x8d, 0x0c, 0xd5], table); // lea ecx, [table + 8 * edx]
    code.raw(&[0x03, 0x59, 0x04]); // add ebx, [ecx + 4]
    random_operation(code, Code::load, Code::store);
    if ports_too {
        code.random();
        code.raw(&[0x89, 0xf2, 0x81, 0xca]).dword(0x800); // mov edx, esi; or edx, 0x800
        random_operation(code, Code::input, Code::output);
    }
    code.count_down(again);
}

/// One of eight operations, chosen by a random number; the next one is the value.
fn random_operation(code: &mut Code, read: fn(&mut Code, Width), write: fn(&mut Code, Width)) {
    code.random();
    code.raw(&[0x89, 0xf1, 0xc1, 0xe9, 29]); // mov ecx, esi; shr ecx
    code.random();
    code.raw(&[0x89, 0xf0]); // mov eax, esi
    let done = code.label();
    for operation in 0..8 {
        let other = code.label();
        code.raw(&[0x83, 0xf9, operation]); // cmp ecx
        code.jne(other);
        let access = if operation < 4 { write } else { read };
        access(code, Width::ALL[usize::from(operation % 3)]);
        code.jmp(done);
        code.place(other);
    }
    code.place(done);
}

fn first_endpoint(plan: &Plan) -> &FunctionPlan {
    plan.pci.iter().find(|f| matches!(f.role, FunctionRole::Endpoint { .. })).unwrap()
}

/// Guest address of the configuration space of `function`, which is on bus 0.
fn config_of(plan: &Plan, function: &FunctionPlan) -> u64 {
    let ecam = plan.window(WindowKind::Ecam).unwrap().start().get();
    ecam + (u64::from(function.address.devfn()) << 12)
}

fn low(address: u64) -> u32 {
    u32::try_from(address).expect("below 4 GiB")
}

fn ports(plan: &Plan) -> Ports {
    let port = |owner| plan.port(owner).unwrap();
    Ports { serial: port("serial"), sleep: port("sleep"), reset: port("reset"), pvpanic: port("pvpanic") }
}
