//! Device trees, as `dtc` reads them.

use egm_vmm::firmware::tree::{Chosen, full, stub};

use super::*;

fn chosen() -> Chosen<'static> {
    Chosen {
        command_line: "console=ttyAMA0 quiet",
        initrd: Some(span(0x1_2345_6000, 0x1000)),
        kaslr_seed: 0x0123_4567_89ab_cdef,
        rng_seed: [7; 64],
    }
}

/// The tree as text, of which `dtc` has no complaint; `None` without `dtc`.
fn text(tree: &[u8]) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tree.dtb");
    std::fs::write(&file, tree).unwrap();
    let Ok(output) = Command::new("dtc").args(["-I", "dtb", "-O", "dts"]).arg(&file).output() else {
        println!("skipped: dtc is missing; install device-tree-compiler");
        return None;
    };
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && complaints.is_empty(), "{complaints}");
    let text = String::from_utf8(output.stdout).unwrap();
    Some(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[test]
fn a_stub_has_the_way_to_efi_and_no_other_node() {
    let image = build(&arm::sample_plan()).unwrap();
    let efi = image.efi.unwrap();
    let Some(text) = text(&stub(&image, &chosen()).unwrap()) else { return };
    assert_eq!(text.matches(" {").count(), 2, "the root and /chosen: {text}");
    let cells = |address: u64| format!("<{:#04x} {:#04x}>", address >> 32, address & 0xffff_ffff);
    for part in [
        "bootargs = \"console=ttyAMA0 quiet\";".to_owned(),
        "linux,initrd-start = <0x01 0x23456000>;".to_owned(),
        "linux,initrd-end = <0x01 0x23457000>;".to_owned(),
        "kaslr-seed = <0x1234567 0x89abcdef>;".to_owned(),
        format!("linux,uefi-system-table = {};", cells(efi.system_table.get())),
        format!("linux,uefi-mmap-start = {};", cells(efi.memory_map.start().get())),
        format!("linux,uefi-mmap-size = <{:#04x}>;", efi.memory_map.size()),
        "linux,uefi-mmap-desc-size = <0x30>;".to_owned(),
        "linux,uefi-mmap-desc-ver = <0x01>;".to_owned(),
        "linux,uefi-secure-boot = <0x02>;".to_owned(),
    ] {
        assert!(text.contains(&part), "{part} is not in {text}");
    }
    assert!(text.contains("rng-seed = <0x7070707 "), "{text}");
}

#[test]
fn tables_of_an_x86_guest_have_no_tree() {
    let image = build(&sample_plan()).unwrap();
    assert_eq!(stub(&image, &chosen()), Err(FirmwareError::NoEfi));
}

#[test]
fn a_command_line_that_a_tree_cannot_hold_is_an_error() {
    let image = build(&arm::sample_plan()).unwrap();
    let wrong = Chosen { command_line: "a\0b", ..chosen() };
    assert!(matches!(stub(&image, &wrong), Err(FirmwareError::Tree(_))));
}

#[test]
fn a_full_tree_describes_the_machine_of_every_arm_configuration() {
    for plan in reviewed_plans().into_iter().filter(|plan| plan.arch == Architecture::Aarch64) {
        let Some(text) = text(&full(&plan, &chosen()).unwrap()) else { return };
        assert_eq!(text.matches("device_type = \"cpu\"").count(), plan.vcpus.len(), "{}", plan.name);
        assert_eq!(text.matches("device_type = \"pci\"").count(), 1 + plan.expanders.len(), "{}", plan.name);
        assert!(!text.contains("linux,uefi"), "{}", plan.name);
    }
}

#[test]
fn a_full_tree_has_memory_by_node_interrupts_and_windows() {
    let mut plan = arm::sample_plan();
    add_pin(&mut plan, 42);
    let Some(text) = text(&full(&plan, &chosen()).unwrap()) else { return };
    for part in [
        "memory@40000000 { device_type = \"memory\"; numa-node-id = <0x00>; reg = <0x00 0x40000000 0x00 0x200000>; }",
        "memory@110010000 { device_type = \"memory\"; numa-node-id = <0x05>; reg = <0x01 0x10010000 0x00 0x2fff0000>; }",
        "cpu@100 { compatible = \"arm,armv8\"; device_type = \"cpu\"; reg = <0x100>; enable-method = \"psci\"; numa-node-id = <0x01>; }",
        "interrupts = <0x01 0x0d 0x04 0x01 0x0e 0x04 0x01 0x0b 0x04 0x01 0x0a 0x04>",
        "distance-matrix = <0x00 0x00 0x0a 0x00 0x01 0x15 0x00 0x05 0x50 0x01 0x00 0x16",
        "serial@b000000 { compatible = \"arm,pl011\\0arm,primecell\"; reg = <0x00 0xb000000 0x00 0x1000>; interrupts = <0x00 0x01 0x04>;",
        "stdout-path = \"/serial@b000000\"",
        "reg = <0x02 0x00 0x00 0x10000000>; bus-range = <0x00 0xff>;",
        "ranges = <0x2000000 0x00 0x10000000 0x00 0x10000000 0x00 0x30000000 \
         0x43000000 0x100 0x00 0x100 0x00 0x100 0x00>",
        // Pin A of place 2 is line 42: shared interrupt 10.
        "interrupt-map = <0x1000 0x00 0x00 0x01 0x01 0x00 0x00 0x00 0x0a 0x04>",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}
