//! Real QEMU and libvirt's schema read the output for them, where this host has them.
//!
//! QEMU runs without KVM and stops before the guest's first instruction: options are parsed, memory, nodes and devices
//! are made. Host functions and EGM devices are replaced by devices of any host.

use std::io::Write;
use std::process::Stdio;

use super::*;

/// Commands for QEMU's monitor.
const QUESTIONS: &str = r#"{"execute":"qmp_capabilities"}
{"execute":"human-monitor-command","arguments":{"command-line":"info numa"}}
{"execute":"query-block"}
{"execute":"qom-list","arguments":{"path":"/objects"}}
{"execute":"quit"}
"#;
const SCHEMA: &str = "/usr/share/libvirt/schemas/domain.rng";

fn exists(program: &str, version: &str) -> bool {
    Command::new(program).arg(version).output().is_ok_and(|output| output.status.success())
}

/// Words for a QEMU on any host: no KVM, files in `folder` for EGM devices, network cards for host functions.
fn anywhere(words: Vec<String>, folder: &Path) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for word in words {
        let previous = out.last().map_or("", String::as_str);
        out.push(match previous {
            "-cpu" => "max".to_owned(),
            "-serial" if word == "stdio" => "null".to_owned(),
            "-bios" => firmware(folder),
            "-machine" => word.replace("accel=kvm", "accel=tcg"),
            "-object" => object(&word, folder),
            "-netdev" => word.split(",ifname").next().unwrap().replace("tap,", "user,"),
            "-device" => device(&word),
            _ => word,
        });
    }
    // Options that would need a kernel, the host's vhost, or a server.
    for drop in ["-kernel", "-initrd", "-append", "vhost-vsock-pci", "vfio-user-pci"] {
        while let Some(at) = out.iter().position(|word| word == drop || word.contains(&format!("{drop}\""))) {
            let first = if out[at].starts_with('-') { at } else { at - 1 };
            out.drain(first..first + 2);
        }
        if let Some(at) = out.iter().position(|word| word.starts_with(&format!("{drop},"))) {
            out.drain(at - 1..=at);
        }
    }
    out.extend(["-S", "-qmp", "stdio"].map(str::to_owned));
    out
}

fn firmware(folder: &Path) -> String {
    let path = folder.join("firmware");
    fs::write(&path, [0; 4096]).unwrap();
    path.to_str().unwrap().to_owned()
}

/// An EGM device becomes a sparse file; memory of other host nodes than this host's, memory of any.
fn object(word: &str, folder: &Path) -> String {
    let keys = word.split(',').filter(|key| !key.starts_with("host-nodes=") && *key != "policy=bind");
    let mut keys: Vec<String> = keys.map(str::to_owned).collect();
    let value = |name: &str| word.split(',').find_map(|key| key.strip_prefix(name)).map(str::to_owned);
    if let Some(device) = value("mem-path=") {
        let path = folder.join(Path::new(&device).file_name().unwrap());
        fs::File::create(&path).unwrap().set_len(value("size=").unwrap().parse().unwrap()).unwrap();
        for key in keys.iter_mut().filter(|key| key.starts_with("mem-path=")) {
            *key = format!("mem-path={}", path.display());
        }
    }
    keys.join(",")
}

fn device(word: &str) -> String {
    let Some(rest) = word.strip_prefix("vfio-pci,") else { return word.to_owned() };
    let ours = rest.split(',').filter(|key| key.starts_with("id=") || key.starts_with("bus="));
    format!("e1000e,romfile=,{}", ours.collect::<Vec<_>>().join(","))
}

/// QEMU's answers, one a line; it has to start and to end well.
fn answers(words: &[String]) -> Vec<Value> {
    let mut qemu = Command::new(&words[0]);
    qemu.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut qemu = qemu.spawn().unwrap();
    // A QEMU that refuses its arguments closes this; its messages are shown below.
    let _ = qemu.stdin.take().unwrap().write_all(QUESTIONS.as_bytes());
    let output = qemu.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{words:?}");
    let lines = String::from_utf8(output.stdout).unwrap();
    let answers = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    answers.filter_map(|mut line| line.get_mut("return").map(Value::take)).collect()
}

/// Sends QEMU the questions, or prints why it cannot.
fn ask(words: Vec<String>) -> Option<Vec<Value>> {
    if !exists(&words[0], "--version") {
        println!("skipped: {} is not installed, nobody read what is written for it", words[0]);
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    Some(answers(&anywhere(words, folder.path())))
}

#[test]
fn qemu_makes_the_nodes_and_initiators_of_the_published_topologies() {
    // Processors, EGM and eight initiators a GPU; MiB of EGM on the first such node.
    for (name, cpus, nodes, egm) in [("gb200-4gpu", 2, 36, 457_728), ("gh200-4socket", 4, 40, 56_896)] {
        let Some(answers) = ask(words(&json("qemu", name, &[]))) else { return };
        let numa = answers[1].as_str().unwrap();
        assert!(numa.starts_with(&format!("{nodes} nodes")), "{numa}");
        assert!(numa.contains(&format!("node {cpus} size: {egm} MB")), "{numa}");
        let objects = answers[3].as_array().unwrap();
        let initiators = objects.iter().filter(|o| o["type"] == "child<acpi-generic-initiator>");
        assert_eq!(initiators.count(), 32);
    }
}

#[test]
fn qemu_opens_a_disk_by_the_name_that_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let config = awkward(folder.path());
    let disk = folder.path().join("a,b 'c' &\"d\".raw");
    for path in [&disk, &folder.path().join("read [only], too.raw")] {
        fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
    }
    let output = export("qemu", &config, &file("x86.host.json"), &["--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Some(answers) = ask(words(&serde_json::from_slice(&output.stdout).unwrap())) else { return };
    let block = &answers[2][0]["inserted"];
    assert_eq!(block["file"].as_str(), disk.to_str(), "{block}");
    assert!(answers[1].as_str().unwrap().starts_with("3 nodes"), "{}", answers[1]);
    assert!(folder.path().join("console, log.txt").exists());
}

#[test]
fn libvirts_schema_has_every_element() {
    if !Path::new(SCHEMA).exists() || !exists("xmllint", "--version") {
        println!("skipped: libvirt's schemas (libvirt-common) or xmllint are missing, no domain was checked");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let config = awkward(folder.path());
    let machines = TOPOLOGIES.map(|name| (file(&format!("{name}.json")), file(&format!("{name}.host.json"))));
    for (config, host) in machines.into_iter().chain([(config, file("x86.host.json"))]) {
        let domain = export("libvirt", &config, &host, &[]);
        assert!(domain.status.success(), "{}", String::from_utf8_lossy(&domain.stderr));
        let path = folder.path().join("domain.xml");
        fs::write(&path, domain.stdout).unwrap();
        let mut xmllint = Command::new("xmllint");
        let output = xmllint.args(["--noout", "--relaxng", SCHEMA]).arg(&path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
