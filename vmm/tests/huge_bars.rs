//! Eight functions with BARs of 256 GiB, as an HGX machine has, start: this host's KVM runs a guest that finds each at its
//! planned address and reads both ends of it. The functions are fakes; slots, windows and exits are real.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use egm_address::{BarOffset, Span};
    use egm_fixtures::payload::{Payload, Ports, Width, long_mode};
    use egm_vfio::backend::RegionIndex;
    use egm_vfio::fake::FakeFunction;
    use egm_vmm::config::{self, Device};
    use egm_vmm::facts::{self, Facts, Scope};
    use egm_vmm::machine::{self, ExitReason};
    use egm_vmm::plan::{FunctionPlan, FunctionRole, Plan, WindowKind, plan};
    use egm_vmm::reserve::{Leases, Servers};
    use egm_vmm::resources::{OpenDevice, OpenedDevice, Resources};
    use serde_json::{Value, json};

    const GIB: u64 = 1 << 30;
    const BARS: [(u8, u64); 3] = [(0, 16 << 20), (2, 256 * GIB), (4, 32 << 20)];
    const FUNCTIONS: u8 = 8;
    /// Memory that KVM may keep for 2 TiB of slots where it has no two-dimensional paging: eight bytes a page and more.
    const KVM_MEMORY: u64 = 8 * GIB;
    const ADDRESS_BITS: u8 = 43;
    const COMMAND_MEMORY: u32 = 2;

    /// The host, or why this test cannot be here.
    fn host() -> Result<Facts, String> {
        let kvm = fs::File::options().read(true).write(true).open("/dev/kvm");
        kvm.map_err(|error| format!("/dev/kvm: {error}"))?;
        let scope = Scope::Only { functions: Vec::new(), regions: false, huge_files: false, assigns: true };
        let facts = facts::of_host(&scope).map_err(|error| error.to_string())?;
        if facts.address_bits < ADDRESS_BITS {
            return Err(format!(
                "{} guest address bits, 2 TiB of BARs take {ADDRESS_BITS}",
                facts.address_bits
            ));
        }
        let available = facts.memory.available.get();
        if available < KVM_MEMORY {
            return Err(format!("{} GiB of memory available, KVM may need 8 for its slots", available / GIB));
        }
        Ok(facts)
    }

    fn function(number: u8) -> Value {
        let bar = |(index, size): &(u8, u64)| json!({ "index": index, "kind": "memory64-prefetchable", "size": size });
        json!({
            "address": format!("0000:{:02x}:00.0", 0x40 + number), "vendor": 0x10de, "device": 0x2335,
            "class": 0x03_0200, "driver": "vfio-pci", "numa_node": 0, "iommu_group": number, "msix_vectors": 0,
            "reserved": [], "bars": BARS.iter().map(bar).collect::<Vec<_>>(),
        })
    }

    /// Contents of the first and the last bytes of a function's large BAR.
    fn marks(number: u32) -> [u32; 2] {
        [0x0b0b_0000 | number, 0x0e0e_0000 | number]
    }

    fn fake(number: u32) -> FakeFunction {
        let mut space = vec![0; 0x1000];
        space[..4].copy_from_slice(&[0xde, 0x10, 0x35, 0x23]);
        space[9..12].copy_from_slice(&[0, 2, 3]);
        let mut fake = FakeFunction::default().with_region(RegionIndex::Config, 0x1000, &space, &[]).unwrap();
        for (index, size) in BARS {
            let all = Span::new(BarOffset::new(0), size).unwrap();
            fake = fake.with_region(RegionIndex::Bar(index), size, b"", &[all]).unwrap();
        }
        let [first, last] = marks(number).map(u32::to_le_bytes);
        let large = fake.memory(RegionIndex::Bar(2)).unwrap();
        large.write(0, &first).and_then(|()| large.write(256 * GIB - 4, &last)).unwrap();
        fake
    }

    fn assigned(plan: &Plan) -> impl Iterator<Item = (&FunctionPlan, &Device)> {
        plan.pci.iter().filter_map(|function| match &function.role {
            FunctionRole::Endpoint { device, .. } => Some((function, device)),
            _ => None,
        })
    }

    /// Enables the ports and functions, then looks at registers and memory.
    fn payload(plan: &Plan) -> Vec<u8> {
        let port = |owner| plan.port(owner).unwrap();
        let mut payload = Payload::new(Ports {
            serial: port("serial"),
            sleep: port("sleep"),
            reset: port("reset"),
            pvpanic: port("pvpanic"),
        });
        long_mode::enter(&mut payload.code, 4);
        // The last of four page directories; its first entries map nothing that a payload needs.
        let (directory, window) = (u64::from(long_mode::tables_end(4)) - 0x1000, 3 * GIB);
        let ecam = plan.window(WindowKind::Ecam).unwrap().start().get();
        let register = |function: &FunctionPlan, offset: u64| {
            let at = function.address;
            ecam + (u64::from(at.bus()) << 20 | u64::from(at.devfn()) << 12) + offset
        };
        for function in &plan.pci {
            payload.code.at(register(function, 4));
            payload.code.mov_eax(COMMAND_MEMORY);
            payload.code.store(Width::Word);
        }
        let mut entry = 0;
        for (number, (function, device)) in (0u32..).zip(assigned(plan)) {
            let bar = function.bars.iter().find(|bar| bar.index == 2).unwrap().span;
            let start = bar.start().get();
            let halves = [(0x18, low(start) | 0xc), (0x1c, low(start >> 32))];
            for (offset, value) in [(0, 0x2335_10de), halves[0], halves[1]] {
                payload.code.at(register(function, offset));
                payload.code.load(Width::Long);
                payload.code.compare(Width::Long, value);
                payload.expect_equal(&format!("{} has {value:#x} in register {offset:#x}", device.id));
            }
            for (address, mark) in [start, bar.end().get() - 4].into_iter().zip(marks(number)) {
                let page = address & !0x1f_ffff;
                for (offset, value) in [(0, low(page) | 0x83), (4, low(page >> 32))] {
                    payload.code.at(directory + 8 * entry + offset);
                    payload.code.mov_eax(value);
                    payload.code.store(Width::Long);
                }
                payload.code.at(window + (entry << 21) + (address - page));
                payload.code.load(Width::Long);
                payload.code.compare(Width::Long, mark);
                payload.expect_equal(&format!("{} answers at {address:#x}", device.id));
                entry += 1;
            }
        }
        payload.ok()
    }

    fn low(value: u64) -> u32 {
        u32::try_from(value & 0xffff_ffff).unwrap()
    }

    #[test]
    fn eight_functions_with_256_gib_each_start_at_their_planned_addresses() {
        let mut facts = match host() {
            Ok(facts) => facts,
            Err(reason) => return println!("skipped: {reason}"),
        };
        let folder = tempfile::tempdir().unwrap();
        let functions: Vec<Value> = (0..FUNCTIONS).map(function).collect();
        let device = |function: &Value| json!({ "type": "vfio", "function": function["address"] });
        let text = json!({
            "name": "huge", "memory": { "size": "16MiB" }, "boot": { "kernel": "payload.elf" },
            "console": { "type": "file", "path": "console.txt" }, "devices": functions.iter().map(device).collect::<Vec<_>>(),
        });
        let file = folder.path().join("huge.json");
        fs::write(&file, text.to_string()).unwrap();
        facts.functions =
            functions.into_iter().map(|function| serde_json::from_value(function).unwrap()).collect();
        let plan = plan(&config::load(&file).unwrap(), &facts).unwrap();
        fs::write(folder.path().join("payload.elf"), payload(&plan)).unwrap();

        // Opened as a machine without these functions, which no kernel has.
        let mut without = plan.clone();
        without.pci.retain(|function| !matches!(function.role, FunctionRole::Endpoint { .. }));
        without.passthrough = None;
        let mut resources =
            Resources::open(&without, &facts, &Leases::default(), Servers::default(), &|_, _| ()).unwrap();
        let fakes = (0..).zip(assigned(&plan));
        resources.devices = fakes
            .map(|(number, (_, device))| {
                let opened = OpenDevice::Assigned(Arc::new(fake(number)));
                OpenedDevice { device: device.clone(), opened }
            })
            .collect();
        let ended = machine::build(&plan, resources, &Arc::default()).unwrap().run(&|_| ());
        let console = fs::read_to_string(folder.path().join("console.txt")).unwrap();
        assert_eq!((console.as_str(), ended.counted), ("ok\n", None));
        assert_eq!(ended.reason, ExitReason::PoweredOff);
    }
}
