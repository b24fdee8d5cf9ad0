//! The input of cloud-hypervisor and libvirt, by their grammars: cloud-hypervisor was not run here.

use std::collections::BTreeMap;

use proptest::prelude::*;
use quick_xml::Reader;
use quick_xml::events::Event;

use super::*;

/// The keys of cloud-hypervisor's options that are lists of keys and values (its `vmm/src/config.rs`, ae44c2971).
const KEYS: &[(&str, &[&str])] = &[
    ("--cpus", &["boot", "topology", "affinity"]),
    ("--memory", &["size", "shared"]),
    (
        "--memory-zone",
        &["id", "size", "file", "shared", "hugepages", "hugepage_size", "host_numa_node", "prefault"],
    ),
    ("--numa", &["guest_numa_id", "cpus", "distances", "device_id", "memory_zones", "pci_segments"]),
    ("--platform", &["num_pci_segments", "iommufd", "vfio_p2p_dma"]),
    ("--disk", &["path", "id", "readonly", "image_type"]),
    ("--net", &["tap", "mac", "id", "num_queues"]),
    ("--vsock", &["cid", "socket", "id"]),
    ("--rng", &["src", "id"]),
    ("--device", &["path", "id", "pci_segment", "x_nv_gpudirect_clique"]),
    ("--user-device", &["socket", "id", "pci_segment"]),
    ("--serial", &["tty", "pty", "null", "file", "socket"]),
    ("--console", &["off"]),
];

/// `option_parser`'s `split_commas`: in quotes only a quote has a meaning, in brackets no comma has one.
fn split(list: &str) -> Option<BTreeMap<String, String>> {
    let (mut parts, mut depth, mut quoted) = (vec![String::new()], 0_u32, false);
    for character in list.trim().chars() {
        match character {
            '"' => quoted = !quoted,
            '[' if !quoted => depth += 1,
            ']' if !quoted => depth = depth.checked_sub(1)?,
            ',' if !quoted && depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut()?.push(character);
    }
    let pair = |part: &String| {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        (key.to_owned(), value.trim().replace('"', ""))
    };
    (depth == 0 && !quoted).then(|| parts.iter().map(pair).collect())
}

/// Option and value, once for each value.
fn options(words: &[String]) -> Vec<(&str, &str)> {
    let mut option = "";
    let mut all = Vec::new();
    for word in words.iter().skip(1) {
        if word.starts_with("--") { option = word } else { all.push((option, word.as_str())) }
    }
    all
}

/// Every option and key of `words` is one that cloud-hypervisor has.
#[track_caller]
fn only_known(words: &[String]) {
    for (option, value) in options(words) {
        let Some((_, keys)) = KEYS.iter().find(|(known, _)| *known == option) else {
            assert!(["--kernel", "--initramfs", "--cmdline"].contains(&option), "{option}");
            continue;
        };
        let split = split(value).unwrap_or_else(|| panic!("{option} {value}"));
        assert!(split.keys().all(|key| keys.contains(&key.as_str())), "{option} {value}");
    }
}

#[test]
fn the_sample_starts_cloud_hypervisor_with_options_that_it_has() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("cloud-hypervisor");
    fs::write(&program, "#!/bin/sh\nprintf '%s\\n' \"$0\" \"$@\"\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut sample = Command::new("/bin/sh");
    sample.args(["../configs/serve/cloud-hypervisor.sh", "a kernel", "an initrd"]);
    let said = sample.env("PATH", folder.path()).output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let words: Vec<String> = String::from_utf8(said.stdout).unwrap().lines().map(str::to_owned).collect();
    only_known(&words);
    assert!(options(&words).contains(&("--kernel", "a kernel")), "{words:?}");
    assert!(options(&words).iter().any(|(option, _)| *option == "--user-device"), "{words:?}");
}

#[test]
fn cloud_hypervisor_gets_only_keys_that_it_has() {
    for name in TOPOLOGIES {
        let words = words(&json("cloud-hypervisor", name, &[]));
        only_known(&words);
        let zones = options(&words).into_iter().filter(|(option, _)| *option == "--memory-zone");
        let egm = zones.filter(|(_, zone)| zone.contains(",shared=on,file=/dev/egm")).count();
        assert_eq!(egm, words.iter().filter(|word| word.contains("memory_zones=[egm")).count());
        assert!(egm >= 2, "{words:?}");
        assert!(words.iter().all(|word| !word.contains("prefault=on")));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Also QEMU's: a comma doubled, and nothing else.
    #[test]
    fn any_path_arrives_as_it_was_written(name in "[a-z,=' $%&<>;#\\[\\]é*?\\\\-]{1,20}") {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("vm.json");
        let path = format!("/d/{name}");
        let disk = serde_json::json!({
            "boot": { "kernel": &path, "cmdline": &name }, "memory": { "size": "1GiB" }, "arch": "x86_64",
            "devices": [{ "type": "virtio-blk", "path": &path }, { "type": "vfio-user", "socket": &path }],
        });
        fs::write(&config, disk.to_string()).unwrap();
        let host = file("gb200-4gpu.host.json");
        let said = |monitor| -> Value {
            serde_json::from_slice(&export(monitor, &config, &host, &["--json"]).stdout).unwrap()
        };
        let ch = words(&said("cloud-hypervisor"));
        let value = |wanted| options(&ch).into_iter().find(|(o, _)| *o == wanted).unwrap().1.to_owned();
        prop_assert_eq!(&split(&value("--disk")).unwrap()["path"], &path);
        prop_assert_eq!(&split(&value("--user-device")).unwrap()["socket"], &path);
        let qemu = words(&said("qemu"));
        let drive = qemu.iter().find_map(|word| word.split_once(",file=").map(|(_, file)| file)).unwrap();
        prop_assert_eq!(drive.replace(",,", "\0").split(',').next().unwrap().replace('\0', ","), path.clone());
        let xml = said("libvirt")["xml"].as_str().unwrap().to_owned();
        prop_assert_eq!(&element(&xml, "kernel"), &path);
        prop_assert_eq!(&element(&xml, "cmdline"), &name);
        prop_assert_eq!(&attribute(&xml, "source", "file"), &path);
    }
}

/// The text of the first element called `name`.
fn element(xml: &str, name: &str) -> String {
    let mut reader = Reader::from_str(xml);
    let (mut inside, mut text) = (false, String::new());
    loop {
        match reader.read_event().unwrap() {
            Event::Start(start) if start.name().as_ref() == name.as_bytes() => inside = true,
            Event::End(end) if inside && end.name().as_ref() == name.as_bytes() => return text,
            Event::Text(part) if inside => text.push_str(&part.decode().unwrap()),
            Event::GeneralRef(entity) if inside => {
                let entity = entity.decode().unwrap();
                text.push_str(quick_xml::escape::resolve_predefined_entity(&entity).unwrap());
            }
            Event::Eof => panic!("no {name}"),
            _ => {}
        }
    }
}

/// An attribute of the first element called `name` that has it.
fn attribute(xml: &str, name: &str, key: &str) -> String {
    let mut reader = Reader::from_str(xml);
    loop {
        match reader.read_event().unwrap() {
            Event::Empty(start) if start.name().as_ref() == name.as_bytes() => {
                if let Some(value) = start.try_get_attribute(key).unwrap() {
                    return value.normalized_value(quick_xml::XmlVersion::Implicit1_0).unwrap().into_owned();
                }
            }
            Event::Eof => panic!("no {name} with {key}"),
            _ => {}
        }
    }
}
