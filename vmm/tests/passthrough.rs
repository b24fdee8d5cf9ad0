//! `egm-vmm check` and `egm-vmm bind` as a person runs them.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

/// Exit code, standard output, standard error.
fn egm_vmm(arguments: &[&str]) -> (i32, String, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_egm-vmm")).args(arguments).current_dir("..").output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

const HGX: [&str; 2] = ["--facts", "configs/facts/hgx-h200.json"];

#[test]
fn a_host_that_can_give_everything_is_shown_with_its_ways() {
    let (code, out, _) = egm_vmm(&["check", "configs/hgx-h200.json", HGX[0], HGX[1]]);
    assert_eq!(code, 0, "{out}");
    for line in [
        "  kernel          not judged  recorded host\n",
        "  memory \"node1\"  ok          768 huge pages of 1 GiB; host node 1 has 960 free\n",
        "  locked memory   not judged  recorded host; the machine pins 1.5 TiB\n",
        "  GPU0  0000:18:00.0  NVIDIA 10de:2335    3D             45     0  ready\n",
        "  GPU0  vfio-pci  32 GT/s x16  flr bus  16MiB 256GiB 32MiB\n",
        "  GPU0  X      PIX R  NODE   NODE",
        "  NIC0  PIX D  X      NODE   NODE",
        "  PIX D  NIC0 to GPU0, NIC1 to GPU1, NIC2 to GPU2, NIC3 to GPU3 and 4 more: \
         ATS, and the switch port above NIC lets translated requests pass (0000:17:01.0, ",
        "  SYS    GPU0 to GPU4, GPU0 to NIC4, GPU0 to GPU5, GPU0 to NIC5 and 124 more: another NUMA node",
        "Verdict\n  machine hgx-h200 is ready as far as judged: 4 ok, 4 not judged\n  16 functions: 16 ready\n",
    ] {
        assert!(out.contains(line), "no {line:?} in\n{out}");
    }
}

/// Lines of tables of text; reasons and advice are sentences, which break on a terminal.
fn widest(out: &str) -> usize {
    let is_sentence = |line: &&str| line.contains(" to ") || line.contains(": ");
    out.lines().filter(|line| !is_sentence(line)).map(|line| line.chars().count()).max().unwrap()
}

#[test]
fn sixteen_functions_fit_120_columns_and_eight_fit_80() {
    let (_, out, _) = egm_vmm(&["check", "configs/hgx-h200.json", HGX[0], HGX[1]]);
    assert!(out.contains("\n  GPU7") && widest(&out) <= 120, "{}:\n{out}", widest(&out));
    let eight = ["18:00.0", "19:00.0", "3a:00.0", "3b:00.0", "4b:00.0", "4c:00.0", "9a:00.0", "9b:00.0"];
    let (_, out, _) = egm_vmm(&[&["check"][..], &eight[..], &HGX[..]].concat());
    assert!(out.contains("\n  GPU3") && widest(&out) <= 80, "{}:\n{out}", widest(&out));
}

#[test]
fn a_host_that_lacks_something_gets_its_name_and_ends_with_3() {
    let facts = fs::read_to_string("../configs/facts/hgx-h200.json").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("facts.json");
    let mut facts: serde_json::Value = serde_json::from_str(&facts).unwrap();
    for function in facts["functions"].as_array_mut().unwrap() {
        match function["address"].as_str().unwrap() {
            "0000:18:00.0" => function["driver"] = "nvidia".into(),
            "0000:19:00.0" => function["iommu_group"] = serde_json::Value::Null,
            _ => {}
        }
    }
    fs::write(&path, facts.to_string()).unwrap();
    let path = path.to_str().unwrap();
    let (code, out, _) = egm_vmm(&["check", "18:00.0", "19:00.0", "--facts", path]);
    assert_eq!(code, 3, "{out}");
    assert!(out.contains("cannot GPU0: host function 0000:18:00.0 is bound to nvidia"), "{out}");
    assert!(out.contains("help: egm-vmm bind 0000:18:00.0\n"), "{out}");
    assert!(out.contains("Verdict\n  2 functions: 0 ready, 2 not ready\n"), "{out}");
    assert!(out.contains("cannot NIC0: host function 0000:19:00.0 is in no IOMMU group"), "{out}");
    let (code, out, _) = egm_vmm(&["check", "18:00.0", "19:00.0", "--facts", path, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, json["rows"].as_array().unwrap().len()), (3, 2));
    assert_eq!([&json["rows"][0]["state"], &json["rows"][0]["subject"]], ["cannot", "GPU0"]);
    assert_eq!(json["rows"][0]["function"], "0000:18:00.0");
    assert_eq!(json["peers"][0]["route"], "-");
}

#[test]
fn what_is_neither_a_function_nor_a_file_is_a_mistake_of_the_command_line() {
    let (code, _, error) = egm_vmm(&["check", "18:00.0", "gpu0", HGX[0], HGX[1]]);
    assert_eq!(code, 2);
    assert!(error.starts_with("error: \"gpu0\" is not a PCI address"), "{error}");
    let (code, _, alone) = egm_vmm(&["check", "gpu0"]);
    assert_eq!((code, alone), (2, error), "alone as among functions");
    let (code, _, error) = egm_vmm(&["check", "18:20.0"]);
    assert!(code == 2 && error.contains("the device is at most 1f"), "{error}");
    let (code, _, error) = egm_vmm(&["check", "gpu0.json"]);
    assert!(code == 2 && error.contains("gpu0.json") && !error.contains("PCI address"), "{error}");
}

/// A host with one disk and the files that its kernel would have for writing.
fn tree(root: &Path) {
    let function = root.join("sys/bus/pci/devices/0000:21:00.0");
    let group = root.join("sys/kernel/iommu_groups/5");
    fs::create_dir_all(&function).unwrap();
    fs::create_dir_all(group.join("devices")).unwrap();
    for (file, text) in
        [("vendor", "0x144d"), ("device", "0xa80a"), ("class", "0x010802"), ("resource", "0x0 0x0 0x0")]
    {
        fs::write(function.join(file), text).unwrap();
    }
    fs::write(group.join("reserved_regions"), "").unwrap();
    symlink(&group, function.join("iommu_group")).unwrap();
    symlink("/sys/bus/pci/drivers/nvme", function.join("driver")).unwrap();
    for driver in ["nvme", "vfio-pci"] {
        fs::create_dir_all(root.join("sys/bus/pci/drivers").join(driver)).unwrap();
    }
}

#[test]
fn bind_states_what_a_function_had_and_has() {
    let folder = tempfile::tempdir().unwrap();
    tree(folder.path());
    let root = folder.path().to_str().unwrap();
    let (code, out, error) = egm_vmm(&["bind", "21:00.0", "--root", root]);
    assert_eq!((code, error.as_str()), (0, ""), "{out}");
    assert_eq!(out, "  function      had   has\n  0000:21:00.0  nvme  vfio-pci\n");
    let read = |path: &str| fs::read_to_string(folder.path().join(path)).unwrap();
    assert_eq!(read("sys/bus/pci/devices/0000:21:00.0/driver_override"), "vfio-pci");
    assert_eq!(read("run/egm-vmm/bind/0000:21:00.0"), "nvme");
    let (code, out, _) = egm_vmm(&["bind", "21:00.0", "--undo", "--root", root]);
    assert_eq!((code, out.contains("nvme  nvme")), (0, true), "{out}");
}

#[test]
fn a_bind_that_is_killed_while_it_records_the_driver_can_be_undone() {
    let folder = tempfile::tempdir().unwrap();
    tree(folder.path());
    let root = folder.path().to_str().unwrap();
    // The kernel kills it (SIGXFSZ) at its first write to a file.
    let killed = Command::new("sh")
        .args(["-c", "ulimit -c 0; ulimit -f 0; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_egm-vmm")])
        .args(["bind", "21:00.0", "--root", root])
        .status()
        .unwrap();
    assert_eq!(killed.signal(), Some(libc::SIGXFSZ), "{killed}");
    let (code, _, error) = egm_vmm(&["bind", "21:00.0", "--root", root]);
    assert_eq!(code, 0, "{error}");
    let (code, out, _) = egm_vmm(&["bind", "21:00.0", "--undo", "--root", root]);
    assert_eq!((code, out.contains("nvme  nvme")), (0, true), "{out}");
    let left = fs::read_dir(folder.path().join("run/egm-vmm/bind")).unwrap();
    assert_eq!(left.count(), 0, "nothing is left behind");
}

#[test]
fn a_function_that_does_not_exist_is_reported_alike_by_every_command() {
    let folder = tempfile::tempdir().unwrap();
    tree(folder.path());
    let root = folder.path().to_str().unwrap();
    let config = folder.path().join("vm.json");
    let text = r#"{"boot": {"kernel": "/k"}, "memory": {"size": "1GiB"}, "devices": [{"type": "vfio", "function": "22:00.0"}]}"#;
    fs::write(&config, text).unwrap();
    let config = config.to_str().unwrap();
    for arguments in [
        vec!["bind", "22:00.0", "--root", root],
        vec!["bind", "22:00.0", "--undo", "--root", root],
        vec!["check", "22:00.0", HGX[0], HGX[1]],
        vec!["check", config, HGX[0], HGX[1]],
        vec!["plan", config, HGX[0], HGX[1]],
    ] {
        let (code, out, error) = egm_vmm(&arguments);
        let said = out + &error;
        assert!(said.contains("host function 0000:22:00.0 does not exist\n"), "{arguments:?}: {said}");
        assert!(
            said.contains("help: \"egm-vmm check\" lists the functions of this host"),
            "{arguments:?}: {said}"
        );
        assert_eq!(code, 3, "{arguments:?}: {said}");
    }
}

#[test]
fn a_bridge_is_not_advised_to_be_bound_and_not_bound() {
    let folder = tempfile::tempdir().unwrap();
    tree(folder.path());
    fs::write(folder.path().join("sys/bus/pci/devices/0000:21:00.0/class"), "0x060400").unwrap();
    let root = folder.path().to_str().unwrap();
    let refusal = "is a bridge, which guests are not given\n";
    let (code, _, error) = egm_vmm(&["bind", "21:00.0", "--root", root]);
    assert!(code == 2 && error.contains(refusal), "{error}");
    let (code, out, _) = egm_vmm(&["check", "15:01.0", HGX[0], HGX[1]]);
    assert!(code == 3 && out.contains(refusal) && !out.contains("egm-vmm bind"), "{out}");
}

#[test]
fn a_driver_that_the_host_lacks_is_named_with_its_module() {
    let folder = tempfile::tempdir().unwrap();
    tree(folder.path());
    let root = folder.path().to_str().unwrap();
    let (code, _, error) = egm_vmm(&["bind", "21:00.0", "--driver", "mlx5_vfio_pci", "--root", root]);
    assert_eq!(
        (code, error.lines().last()),
        (
            3,
            Some(
                "  help: look why the module is not loaded: modprobe mlx5_vfio_pci; or take another one: --driver vfio-pci"
            )
        ),
        "{error}"
    );
}

/// GPU 0009:01:00.0 reaches all of region egm4, in which another owner has a slice.
#[test]
fn check_refuses_a_gpu_that_reaches_another_trust_domains_slice() {
    let mut facts: serde_json::Value =
        serde_json::from_str(&fs::read_to_string("../configs/facts/grace.json").unwrap()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut check = |trust: serde_json::Value, words: &[&str]| {
        let span = serde_json::json!({ "start": "0x0", "size": 1 << 28 });
        facts["regions"][0]["held"] = serde_json::json!([{ "span": span, "owner": "vm9", "trust": trust }]);
        fs::write(file.path(), facts.to_string()).unwrap();
        let facts = file.path().to_str().unwrap();
        egm_vmm(&[&["check", "configs/grace-1gpu-egm.json", "--facts", facts], words].concat())
    };
    let domain = || serde_json::json!({ "domain": "a" });
    for (trust, words) in [
        ("alone".into(), &[][..]),
        (domain(), &[]),
        ("alone".into(), &["--trust-domain", "a"]),
        (domain(), &["--trust-domain", "b"]),
    ] {
        let (code, out, error) = check(trust, words);
        assert_eq!(code, 3, "{error}");
        assert!(out.contains("cannot give GPU 0009:01:00.0, which reaches all of region egm4"), "{out}");
        assert!(out.contains("--trust-domain"), "{out}");
    }
    let (code, out, error) = check(domain(), &["--trust-domain", "a"]);
    assert!(code != 2 && !out.contains("cannot give"), "{code} {out} {error}");
}
