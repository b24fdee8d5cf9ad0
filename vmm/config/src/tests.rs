//! Meanings of configurations, and messages about wrong ones.

use std::fs;
use std::path::PathBuf;

use egm_address::Gpa;
use egm_report::{Blame, Chain, Report};
use proptest::prelude::*;

use super::*;

fn repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(name)
}

/// The specification of `text`, read as the file `vm.json`.
fn read(text: impl AsRef<[u8]>) -> Result<Spec, ConfigErrors> {
    read_with(text, &Overrides::default())
}

fn read_with(text: impl AsRef<[u8]>, overrides: &Overrides) -> Result<Spec, ConfigErrors> {
    let document = source::Document::from_bytes(Path::new("vm.json"), text.as_ref().to_vec())?;
    resolve::resolve(document, overrides)
}

/// A small good machine with `members` added.
fn machine(members: &str) -> String {
    format!(r#"{{"boot":{{"kernel":"k"}},"memory":{{"size":"1GiB"}}{members}}}"#)
}

fn spec(text: &str) -> Spec {
    read(text).unwrap_or_else(|error| panic!("{}", shown(&error)))
}

/// Each of `errors`, without the line of the file.
fn shown(errors: &ConfigErrors) -> String {
    [&errors.first].into_iter().chain(&errors.others).map(one).collect::<Vec<_>>().join("\n")
}

/// `error` with its causes and its help.
fn one(error: &ConfigError) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let causes: String = causes.map(|cause| format!("\n  caused by: {cause}")).collect();
    let help = error.help().map_or_else(String::new, |help| format!("\n  help: {help}"));
    format!("error: {error}{causes}{help}")
}

/// The message about the wrong file `text`.
fn complaint(text: &str) -> String {
    let error = read(text).expect_err(text);
    shown(&error)
}

#[track_caller]
fn refused(cases: &[(&str, &str)]) {
    for (text, wanted) in cases {
        let said = complaint(text);
        assert!(said.contains(wanted), "{text}\n  said:   {said}\n  wanted: {wanted}");
    }
}

#[test]
fn every_file_in_configs_is_good() {
    let mut seen = 0;
    for entry in fs::read_dir(repository("")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.ends_with(".json") && !name.starts_with("base-") && name != "schema.json" {
            let spec = load(&path).unwrap_or_else(|error| panic!("{}", shown(&error)));
            assert!(name.starts_with(&spec.name), "{name} is named {}", spec.name);
            seen += 1;
        }
    }
    assert!(seen >= 5, "{seen} files");
}

#[test]
fn the_schema_in_configs_is_current() {
    let stored = fs::read_to_string(repository("schema.json")).unwrap();
    assert!(stored == schema(), "run: cargo run -p egm-vmm -- schema > configs/schema.json");
}

#[test]
fn the_demo_means_what_its_description_states() {
    let spec = load(&repository("demo.json")).unwrap();
    assert_eq!((spec.name.as_str(), spec.arch, spec.cpus.count), ("demo", Architecture::X86_64, 2));
    let nodes: Vec<_> = spec.memory.nodes.iter().map(|n| (n.id, n.size.get() >> 20, n.cpus.len())).collect();
    assert_eq!(nodes, [(0, 512, 2), (1, 256, 0)]);
    assert_eq!(spec.egm[0].distances, [(0, 30), (1, 40), (2, 10)].into());
    assert_eq!(spec.memory.nodes[0].distances[&2], 30, "the way back is as long");
    assert_eq!(spec.egm[0].access[0].bandwidth_mbps, 40000);
    let ids: Vec<_> = spec.devices.iter().map(|d| (d.id.as_str(), d.root_port)).collect();
    assert_eq!(ids, [("disk0", false), ("net0", true), ("vsock0", false), ("rng0", false)]);
    assert_eq!(spec.console, Console::Stdio);
    assert!(spec.boot.cmdline.starts_with("console=ttyS0"));
}

#[test]
fn what_is_left_out_has_a_default() {
    let spec = spec(&machine(""));
    assert_eq!(spec.name, "vm");
    assert_eq!((spec.cpus.count, spec.cpus.sockets, spec.cpus.cores, spec.cpus.threads), (1, 1, 1, 1));
    assert_eq!(spec.memory.nodes.len(), 1);
    assert_eq!((spec.memory.nodes[0].size, spec.memory.page_size), (spec.memory.size, PageSize::Auto));
    assert_eq!(spec.memory.nodes[0].cpus.to_string(), "0");
    assert_eq!(spec.memory.nodes[0].distances, [(0, 10)].into());
    assert_eq!((spec.console, spec.pcie.window64, spec.boot.initramfs), (Console::Stdio, None, None));
}

#[test]
fn null_means_the_default() {
    assert_eq!(
        spec(&machine(r#","cpus":null,"egm":null,"console":null,"pcie":{"window64":null}"#)),
        spec(&machine(""))
    );
}

#[test]
fn cores_are_what_the_count_leaves_and_the_count_is_what_the_topology_makes() {
    let cpus = spec(&machine(r#","cpus":{"count":16,"topology":{"sockets":2,"threads":2}}"#)).cpus;
    assert_eq!((cpus.count, cpus.sockets, cpus.cores, cpus.threads), (16, 2, 4, 2));
    assert_eq!(spec(&machine(r#","cpus":{"topology":{"sockets":2,"cores":3}}"#)).cpus.count, 6);
}

#[test]
fn one_affinity_list_is_for_all_vcpus() {
    let affinity = |text: &str| {
        let cpus = spec(&machine(&format!(r#","cpus":{{"count":2,"affinity":{text}}}"#))).cpus;
        cpus.affinity.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(affinity(r#""4-6""#), ["4-6", "4-6"]);
    assert_eq!(affinity(r#"["0","1"]"#), ["0", "1"]);
}

#[test]
fn a_console_is_a_name_or_an_object() {
    for (text, console) in [
        (r#""pty""#, Console::Pty),
        (r#"{"type":"null"}"#, Console::Null),
        (r#"{"type":"file","path":"/log"}"#, Console::File { path: "/log".into() }),
        (r#"{"type":"socket","path":"/sock"}"#, Console::Socket { path: "/sock".into() }),
    ] {
        assert_eq!(spec(&machine(&format!(r#","console":{text}"#))).console, console);
    }
}

#[test]
fn ids_count_around_those_that_are_written() {
    let rng = |id: &str| format!(r#"{{"type":"virtio-rng"{id}}}"#);
    let list = [rng(""), rng(r#","id":"rng0""#), rng("")].join(",");
    let devices = spec(&machine(&format!(r#","devices":[{list}]"#))).devices;
    assert_eq!(devices.iter().map(|d| d.id.as_str()).collect::<Vec<_>>(), ["rng1", "rng0", "rng2"]);
}

#[test]
fn a_hardware_address_is_the_same_in_every_run_and_differs_between_machines() {
    let mac = |name: &str| {
        let text = format!(r#","name":"{name}","devices":[{{"type":"virtio-net","tap":"t"}}]"#);
        match &spec(&machine(&text)).devices[0].kind {
            DeviceKind::VirtioNet { mac, .. } => *mac,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(mac("a"), mac("a"));
    assert_ne!(mac("a"), mac("b"));
    assert_eq!(mac("a")[0] & 3, 2, "locally administered, unicast");
}

#[test]
fn an_unknown_key_is_answered_with_its_place_and_the_nearest_right_one() {
    let text = "{\n  \"boot\": { \"kernel\": \"k\" },\n    \"memroy\": { \"size\": \"1GiB\" }\n}";
    assert_eq!(
        complaint(text),
        "error: vm.json:3:5: unknown key \"memroy\"\n  help: did you mean \"memory\"? keys here are: arch, boot, \
         console, cpus, description, devices, egm, extends, memory, name, on_reset, pcie"
    );
    assert_eq!(
        complaint(&machine(r#","devices":[{"type":"virtio-rng","path":"x"}]"#)),
        "error: vm.json:1:81: unknown key \"path\"\n  help: keys here are: id, root_port, type"
    );
}

#[test]
fn a_document_of_another_monitor_is_answered_with_the_commands_that_take_it() {
    let error = complaint(&machine(r#","payload":{"kernel":"k"}"#));
    assert!(
        error.contains("unknown key \"payload\"\n  help: this is a document of cloud-hypervisor's API"),
        "{error}"
    );
}

#[test]
fn an_unknown_name_is_answered_with_the_nearest_right_one() {
    assert_eq!(
        complaint(&machine(r#","devices":[{"type":"virtio-blok","path":"x"}]"#)),
        "error: vm.json:1:61: devices[0].type: unknown name \"virtio-blok\"\n  help: did you mean \"virtio-blk\"? \
         names here are: vfio, vfio-user, virtio-blk, virtio-net, virtio-rng, virtio-vsock"
    );
    refused(&[
        (
            &machine(r#","console":"stdoi""#),
            "console: unknown name \"stdoi\"\n  help: did you mean \"stdio\"?",
        ),
        (&machine(r#","arch":"arm""#), "arch: unknown name \"arm\"\n  help: names here are: aarch64, x86_64"),
        (&machine(r#","console":"file""#), "console: key \"path\" is missing"),
        (&machine(r#","console":{}"#), "key \"type\" is missing\n  help: types here are: stdio, file"),
        (&machine(r#","console":7"#), "console: found 7, expected a name, or an object with a \"type\""),
        (&machine(r#","console":{"type":"pty","path":"x"}"#), "unknown key \"path\""),
    ]);
}

/// Wrong values of several kinds, each found where it is, and nothing that only follows from them.
#[test]
fn all_mistakes_of_a_file_are_shown_at_once_with_their_lines() {
    let text = r#"{
  "cpus": { "count": 0 },
  "memory": { "size": "1GB" },
  "boot": { "kernel": "vmlinuz", "cmdlin": "quiet" },
  "devices": [
    { "type": "virtio-net", "tap": "tap0", "mac": "01:00:00:00:00:00" },
    { "type": "virtio-vsock", "cid": 1 }
  ]
}
"#;
    let wanted = r#"error: vm.json:2:13: cpus.count: 0 is outside 1 to 254: write a number in that range
  2 |   "cpus": { "count": 0 },
    |             ^^^^^^^
error: vm.json:3:15: memory.size: size "1GB" has unknown unit "GB": use KiB, MiB, GiB or TiB (powers of 1024), or no unit for bytes
  3 |   "memory": { "size": "1GB" },
    |               ^^^^^^
error: vm.json:4:34: unknown key "cmdlin"
  4 |   "boot": { "kernel": "vmlinuz", "cmdlin": "quiet" },
    |                                  ^^^^^^^^
  help: did you mean "cmdline"? keys here are: cmdline, initramfs, kernel, tables
error: vm.json:6:44: devices[0].mac: 01:00:00:00:00:00 is a multicast address or all zero: make the first byte even, for instance 52
  6 |     { "type": "virtio-net", "tap": "tap0", "mac": "01:00:00:00:00:00" },
    |                                            ^^^^^
error: vm.json:7:31: devices[1].cid: 1 is outside 3 to 4294967294: write a number in that range
  7 |     { "type": "virtio-vsock", "cid": 1 }
    |                               ^^^^^"#;
    assert_eq!(Chain(&read(text).unwrap_err()).to_string(), wanted);
}

/// The column of the place is in characters, that of the mark in columns of a terminal.
#[test]
fn the_mark_is_under_the_mistake_behind_tabs_and_wide_characters() {
    let text = "{\n\t\"description\": \"名前\", \"cpus\": { \"count\": 0 },\n\
                \t\"memory\": { \"size\": \"1GiB\" }, \"boot\": { \"kernel\": \"k\" }\n}";
    let shown = Chain(&read(text).unwrap_err()).to_string();
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines[0].starts_with("error: vm.json:2:33: cpus.count"), "{shown}");
    let (before, _) = lines[1].split_once("\"count\"").unwrap();
    let columns = before.chars().count() + "名前".chars().count();
    assert_eq!(lines[2].find('^'), Some(columns), "{shown}");
}

/// `text` has these mistakes, in this order; each is a place and the begin of its message.
#[track_caller]
fn mistakes(text: &str, wanted: &[&str]) {
    let errors = read(text).expect_err(text);
    let said: Vec<String> =
        [&errors.first].into_iter().chain(&errors.others).map(ToString::to_string).collect();
    let pairs = said.iter().zip(wanted);
    let good = said.len() == wanted.len()
        && pairs.into_iter().all(|(said, wanted)| said.starts_with(&format!("vm.json:{wanted}")));
    assert!(good, "{text}\n  said:   {said:#?}\n  wanted: {wanted:#?}");
}

#[test]
fn what_only_follows_from_a_mistake_is_not_shown() {
    mistakes(
        r#"{"memory":{"szie":"1G"},"boot":{"kernal":"k"}}"#,
        &["1:12: unknown key", "1:33: unknown key"],
    );
    mistakes(r#"{"memroy":{"size":"1G"},"boot":{"kernel":"k"}}"#, &["1:2: unknown key"]);
    let device = |device: &str| machine(&format!(r#","devices":[{device}]"#));
    mistakes(&device(r#"{"type":"vfio","function":7}"#), &["1:75: devices[0].function: found 7"]);
    mistakes(&device(r#"{"type":"vfoi","function":"01:00.0"}"#), &["1:61: devices[0].type: unknown name"]);
    // A node is left out, and with it the sum of the nodes, and the processors in them.
    let nodes = r#"{"size":"2G","nodes":[{"id":0,"size":"1G","cpus":0},{"id":1,"size":"1G"}]}"#;
    mistakes(
        &format!(r#"{{"boot":{{"kernel":"k"}},"memory":{nodes}}}"#),
        &["1:75: memory.nodes[0].cpus: found 0, expected"],
    );
    // A wrong number of processors hides the errors about those of the nodes.
    let nodes = r#"{"nodes":[{"id":0,"size":"1G","cpus":"0-3"}]}"#;
    mistakes(
        &format!(r#"{{"boot":{{"kernel":"k"}},"cpus":{{"count":999}},"memory":{nodes}}}"#),
        &["1:32: cpus.count: 999 is outside"],
    );
}

/// A wrong number of processors does not hide distances and access figures that are outside their ranges.
#[test]
fn distances_and_access_figures_are_checked_beside_other_mistakes() {
    let memory = r#"{"nodes":[{"id":0,"size":"1G","cpus":"0","distances":{"0":11}}]}"#;
    let slice = r#"{"region":"local","size":"2M","node":1,"distances":{"0":5,"1":10},"access":[{"from":0,"latency_ns":0,"bandwidth_mbps":1}]}"#;
    mistakes(
        &format!(r#"{{"boot":{{"kernel":"k"}},"cpus":{{"count":0}},"memory":{memory},"egm":[{slice}]}}"#),
        &[
            "1:32: cpus.count: 0 is outside 1 to 254",
            "1:106: memory.nodes[0].distances.0: the distance of a node to itself is 10, not 11",
            "1:176: egm[0].distances.0: 5 is outside 11 to 254",
            "1:210: egm[0].access[0].latency_ns: 0 is outside 1 to 65534",
        ],
    );
    mistakes(
        r#"{"boot":{"kernel":"k"},"memory":{"size":"3"},"egm":[{"region":"local","size":"2M","node":1,"distances":{"0":5}}]}"#,
        &["1:34: memory.size: ", "1:105: egm[0].distances.0: 5 is outside"],
    );
}

#[test]
fn entries_of_a_list_keep_their_numbers_beside_one_that_is_wrong() {
    let list = r#"[{"type":"virtio-blk"},{"type":"virtio-rng","id":"a b"},{"type":"virtio-net","tap":"t","queue_pairs":0}]"#;
    mistakes(
        &machine(&format!(r#","devices":{list}"#)),
        &[
            "1:60: devices[0]: key \"path\" is missing",
            "1:103: devices[1].id: ",
            "1:146: devices[2].queue_pairs: 0 is",
        ],
    );
    mistakes(
        &machine(
            r#","egm":[{"region":"a b","size":"1G","node":1},{"region":"egm4","size":"1M","node":999}]"#,
        ),
        &["1:57: egm[0].region: ", "1:111: egm[1].size: ", "1:123: egm[1].node: "],
    );
}

#[test]
fn twenty_mistakes_are_shown_at_most() {
    let keys: Vec<String> = (0..99).map(|number| format!(r#""x{number}":1"#)).collect();
    let errors = read(format!("{{{}}}", keys.join(","))).unwrap_err();
    assert!(matches!(*errors.others.last().unwrap().rule, Rule::More { shown: 20 }), "{}", shown(&errors));
    assert_eq!(errors.others.len(), 20);
}

#[test]
fn mistakes_of_the_file_come_before_those_of_the_file_that_it_extends() {
    let folder = folder(&[
        ("top.json", r#"{"extends":"low.json","boot":{"kernel":"k"},"a":1,"a":2}"#),
        ("low.json", r#"{"memory":{"size":"1G"},"b":1}"#),
    ]);
    let said = shown(&load(&folder.path().join("top.json")).unwrap_err());
    let places =
        ["top.json:1:45: unknown key", "top.json:1:51: key \"a\" is written twice", "low.json:1:25: unknown"];
    let at: Vec<_> =
        places.iter().map(|place| said.find(place).unwrap_or_else(|| panic!("{place}: {said}"))).collect();
    assert!(at.is_sorted(), "{said}");
}

#[test]
fn text_that_is_not_a_configuration_is_refused_at_its_place() {
    refused(&[
        ("", "vm.json:1:1: not JSON: the file is empty"),
        (
            "{\n  \"name\": \"a\",\n}",
            "vm.json:2:14: not JSON: a comma after the last entry\n  help: remove the comma",
        ),
        ("{} x", "vm.json:1:4: not JSON: more text after the end"),
        (
            "{\n  \"name\": \"a\" // mine\n}",
            "vm.json:2:15: comments are not JSON\n  help: remove it, or write",
        ),
        ("/* mine */ {}", "vm.json:1:1: comments are not JSON"),
        (
            "\u{feff}{}",
            "vm.json:1:1: the file begins with a byte order mark, which JSON does not allow\n  help: save",
        ),
        ("7", "vm.json:1:1: found 7, expected an object"),
        ("{\"name\":\"\\ud800\"}", "not JSON: an incomplete \\u escape in a text"),
        ("{\n \"name\": \"a\",\n \"name\": \"b\"}", "vm.json:3:2: key \"name\" is written twice: remove one"),
        ("{\"cpus\":{\"count\":1,\"co\\u0075nt\":2}}", "vm.json:1:20: key \"count\" is written twice"),
        ("{\"name\":1}", "name: found 1, expected a string"),
        ("{\"cpus\":[4]}", "cpus: found an array, expected an object"),
        ("{\"cpus\":{\"count\":-1}}", "cpus.count: found -1, expected a number from 0 to 4294967295"),
        ("{\"cpus\":{\"count\":1.5}}", "cpus.count: found 1.5, expected a number from 0 to 4294967295"),
        ("{\"cpus\":{\"count\":5000000000}}", "cpus.count: found 5000000000, expected a number from"),
        ("{\"memory\":{\"size\":\"1GB\"}}", "memory.size: size \"1GB\" has unknown unit \"GB\""),
        (
            "{\"memory\":{\"nodes\":[{\"id\":0,\"cpus\":\"3-1\"}]}}",
            "memory.nodes[0].cpus: range 3-1 in CPU list",
        ),
        (
            "{\"devices\":[{\"type\":\"vfio\",\"function\":\"x\"}]}",
            "devices[0].function: \"x\" is not a PCI address",
        ),
        ("{\"devices\":[{\"type\":\"vfio\"}]}", "vm.json:1:13: devices[0]: key \"function\" is missing"),
    ]);
    let rule = |text: &[u8]| *read(text).unwrap_err().first.rule;
    assert!(matches!(rule(&[0xff]), Rule::NotText));
    let deep = "[".repeat(100) + &"]".repeat(100);
    assert!(matches!(rule(deep.as_bytes()), Rule::TooDeep { .. }));
    assert!(matches!(rule("[".repeat(500_000).as_bytes()), Rule::Syntax { .. }));
    assert!(matches!(rule((" ".repeat(1 << 20) + "{}").as_bytes()), Rule::FileTooLarge { .. }));
}

/// Messages show text of a file; its author must not be able to fill a terminal, or to command it.
#[test]
fn a_message_quotes_little_of_a_file_and_nothing_that_a_terminal_obeys() {
    let places = [
        r#"{"@":1}"#,
        r#"{"name":1,"@":1,"@":2}"#,
        r#"{"name":"@"}"#,
        r#"{"arch":"@"}"#,
        r#"{"extends":"@"}"#,
        r#"{"cpus":"@"}"#,
        r#"{"cpus":{"count":"@"}}"#,
        r#"{"cpus":{"affinity":"@"}}"#,
        r#"{"memory":{"size":"@"}}"#,
        r#"{"memory":{"size":"1GiB","@":1}}"#,
        r#"{"memory":{"nodes":[{"id":0,"size":"1GiB","distances":{"@":10}}]}}"#,
        r#"{"boot":{"kernel":"@"},"memory":{"size":"1GiB"}}"#,
        r#"{"boot":{"kernel":"k","cmdline":"@"},"memory":{"size":"1GiB"}}"#,
    ];
    let devices = [
        r#"{"type":"@"}"#,
        r#"{"type":"vfio","function":"@"}"#,
        r#"{"type":"vfio","function":"01:00.0","bars":{"@":"host"}}"#,
        r#"{"type":"vfio","function":"01:00.0","bars":{"0":"@"}}"#,
        r#"{"type":"virtio-rng","id":"@"}"#,
        r#"{"type":"virtio-blk","path":"@"}"#,
        r#"{"type":"virtio-net","tap":"@"}"#,
        r#"{"type":"virtio-net","tap":"t","mac":"@"}"#,
        r#"{"type":"vfio-user","socket":"@"}"#,
    ];
    let of_device = |device: &&str| machine(&format!(r#","devices":[{device}]"#));
    for place in places.iter().map(ToString::to_string).chain(devices.iter().map(of_device)) {
        for text in ["x ".repeat(450_000), "x".repeat(900_000), "\\u001b[2J".repeat(100)] {
            let errors = read(place.replace('@', &text)).expect_err(&place);
            for error in [&errors.first].into_iter().chain(&errors.others) {
                assert!(one(error).chars().count() < 600, "{place}: {}", one(error));
            }
            let said = Chain(&errors).to_string();
            assert!(said.chars().all(|c| c == '\n' || !c.is_control()), "{place}: {said:?}");
        }
    }
}

/// To open a pipe waits for its writer.
#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let [pipe, path] = ["pipe", "vm.json"].map(|name| folder.path().join(name));
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    fs::write(&path, r#"{"extends": "pipe"}"#).unwrap();
    let refused = |path: &Path| shown(&load(path).unwrap_err());
    let wanted = format!(
        "{}:1:2: extends: cannot read {}\n  caused by: not a regular file",
        path.display(),
        pipe.display()
    );
    assert!(refused(&path).contains(&wanted), "{}", refused(&path));
    assert!(refused(&pipe).contains("caused by: not a regular file"));
    assert!(refused(folder.path()).contains("caused by: is a directory"));
}

#[test]
fn a_machine_needs_a_name_memory_and_a_kernel() {
    refused(&[
        ("{}", "vm.json:1:1: key \"memory\" is missing"),
        (
            r#"{"memory":{"size":"1G"}}"#,
            "boot: no kernel is named: set \"boot\": { \"kernel\": \"FILE\" } (egm-vmm run also takes --kernel",
        ),
        (r#"{"memory":{}}"#, "memory: key \"size\" is missing"),
        (&machine(r#","name":"a b""#), "name: \"a b\" is not a name: write 1 to 64 of A-Z a-z 0-9 . _ -"),
        (&machine(r#","name":"""#), "name: \"\" is not a name"),
    ]);
}

#[test]
fn processors_keep_their_rules() {
    let cpus = |text: &str| machine(&format!(r#","cpus":{text}"#));
    refused(&[
        (&cpus(r#"{"count":0}"#), "cpus.count: 0 is outside 1 to 254"),
        (&cpus(r#"{"count":255}"#), "cpus.count: 255 is outside 1 to 254"),
        (&cpus(r#"{"topology":{"sockets":0}}"#), "cpus.topology.sockets: 0 is outside 1 to 254"),
        (&cpus(r#"{"topology":{"sockets":20,"cores":20}}"#), "cpus.topology: 400 is outside 1 to 254"),
        (
            &cpus(r#"{"count":4,"topology":{"sockets":2,"cores":3,"threads":1}}"#),
            "cpus.topology: 2 sockets x 3 cores x 1 thread are 6 vCPUs, not 4: change one of them",
        ),
        (
            &cpus(r#"{"count":3,"topology":{"sockets":2}}"#),
            "2 sockets x 1 core x 1 thread are 2 vCPUs, not 3",
        ),
        (&cpus(r#"{"count":2,"affinity":["0"]}"#), "cpus.affinity: 1 CPU list for 2 vCPUs"),
        (&cpus(r#"{"affinity":""}"#), "cpus.affinity: the list is empty"),
        (&cpus(r#"{"affinity":["x"]}"#), "cpus.affinity[0]: \"x\" in CPU list"),
        (
            &cpus(r#"{"affinity":7}"#),
            "cpus.affinity: found 7, expected a CPU list such as \"0-3,8\", or an array of them",
        ),
        (&cpus(r#"{"affinity":"9999"}"#), "cpus.affinity: CPU 9999 in CPU list \"9999\" is not below 8192"),
    ]);
}

#[test]
fn memory_keeps_its_rules() {
    let memory = |text: &str| format!(r#"{{"boot":{{"kernel":"k"}},"cpus":{{"count":2}},"memory":{text}}}"#);
    let nodes = |size: &str, nodes: &str| memory(&format!(r#"{{"size":"{size}","nodes":[{nodes}]}}"#));
    refused(&[
        (&memory(r#"{"size":0}"#), "memory.size: the size is 0"),
        (
            &memory(r#"{"size":"5000"}"#),
            "memory.size: 5000 is not a multiple of 4KiB: round it, for instance to 8KiB",
        ),
        (
            &memory(r#"{"size":"3MiB","page_size":"2M"}"#),
            "3MiB is not a multiple of 2MiB: round it, for instance to 4MiB",
        ),
        (&memory(r#"{"size":"8192TiB"}"#), "memory.size: 8192TiB is more than 4096TiB of address space"),
        (
            &memory(r#"{"size":"1G","page_size":"64K"}"#),
            "memory.page_size: unknown name \"64K\"\n  help: did you mean \"4K\"?",
        ),
        (&memory(r#"{"nodes":[]}"#), "memory.nodes: there is no node 0"),
        (
            &nodes("1GiB", r#"{"id":0,"size":"512MiB","cpus":"0-1"},{"id":1,"size":"256MiB"}"#),
            "memory.size: the nodes add up to 768MiB, 256MiB less than the size, 1GiB: change either",
        ),
        (&nodes("1GiB", r#"{"id":0,"size":"2GiB","cpus":"0-1"}"#), "2GiB, 1GiB more than the size, 1GiB"),
        (&nodes("0", r#"{"id":0,"size":"1GiB","cpus":"0-1"}"#), "memory.size: the size is 0"),
        (
            &nodes("2GiB", r#"{"id":0,"size":"1GiB","cpus":"0-1"},{"id":0,"size":"1GiB"}"#),
            "memory.nodes[1].id: node 0 exists already, in memory.nodes[0]: choose another number",
        ),
        (&nodes("1GiB", r#"{"id":256,"size":"1GiB"}"#), "memory.nodes[0].id: 256 is outside 0 to 255"),
        (&nodes("1GiB", r#"{"id":3}"#), "memory.nodes[0]: node 3 has neither memory nor vCPUs"),
        (&nodes("1GiB", r#"{"id":1,"size":"1GiB","cpus":"0-1"}"#), "memory.nodes: there is no node 0"),
        (
            &nodes("1GiB", r#"{"id":0,"size":"1GiB","cpus":"0"}"#),
            "memory.nodes: vCPU 1 is in no node: add it to",
        ),
        (
            &nodes("1GiB", r#"{"id":0,"size":"1GiB","cpus":"0-2"}"#),
            "memory.nodes[0].cpus: there is no vCPU 2: the last of 2 is 1",
        ),
        (
            &nodes("1GiB", r#"{"id":0,"size":"1GiB","cpus":"0-1"},{"id":1,"cpus":"1"}"#),
            "memory.nodes[1].cpus: vCPU 1 is in node 0 already: each vCPU is in one node",
        ),
        (
            &nodes("1GiB", r#"{"id":0,"size":"1GiB","cpus":"1"},{"id":1,"cpus":"0"}"#),
            "memory.nodes: vCPU 0 is in node 1: it belongs to node 0",
        ),
        (
            &nodes("1GiB", r#"{"id":0,"size":"1GiB","cpus":"0-1","host_nodes":""}"#),
            "nodes[0].host_nodes: the list is empty",
        ),
    ]);
}

#[test]
fn egm_slices_keep_their_rules() {
    let egm = |text: &str| machine(&format!(r#","egm":[{{"region":"local",{text}}}]"#));
    refused(&[
        (&egm(r#""size":"1MiB","node":1"#), "egm[0].size: 1MiB is not a multiple of 2MiB"),
        (
            &egm(r#""size":"1GiB","node":0"#),
            "egm[0].node: node 0 has ordinary memory, and a slice is all memory of its node",
        ),
        (
            &egm(r#""size":"1GiB","node":1},{"region":"local","size":"1GiB","node":1"#),
            "egm[1].node: node 1 exists already, in egm[0]",
        ),
        (
            &egm(r#""size":"1GiB","node":0,"as":"device","distances":{}"#),
            "egm[0].distances: the slice is a device",
        ),
        (&egm(r#""size":"1GiB","node":0,"as":"devcie""#), "did you mean \"device\"?"),
        (&egm(r#""size":"1GiB","node":4,"as":"device""#), "egm[0].node: there is no node \"4\""),
        (
            &machine(
                r#","egm":[{"region":"local","size":"1GiB","node":0,"as":"device"}],
                "devices":[{"type":"virtio-rng","id":"egm0"}]"#,
            ),
            "egm[0]: id \"egm0\" is that of devices[0] already",
        ),
        (
            &machine(r#","egm":[{"region":"egm4","size":"1GiB","node":1,"page_size":"1G"}]"#),
            "egm[0].page_size: only a \"local\" slice chooses this",
        ),
    ]);
    let near = spec(&egm(r#""size":"1GiB","node":0,"as":"device""#));
    assert_eq!((near.egm[0].form, near.egm[0].node), (EgmForm::Device, 0));
    let [device] = near.devices.as_slice() else { panic!("{:?}", near.devices) };
    assert_eq!((device.id.as_str(), &device.kind), ("egm0", &DeviceKind::Egm { slice: 0, node: 0 }));
}

#[test]
fn a_slice_names_one_region_or_1_to_16_different_ones() {
    let egm = |region: &str, more: &str| {
        machine(&format!(r#","egm":[{{"region":{region},"size":"1GiB","node":1{more}}}]"#))
    };
    let names = |count: u32| {
        let names: Vec<_> = (0..count).map(|index| format!("\"egm{index}\"")).collect();
        format!("[{}]", names.join(","))
    };
    let regions = |region: &str| spec(&egm(region, "")).egm[0].regions.clone();
    assert_eq!(regions(r#""egm7""#), ["egm7"]);
    assert_eq!(regions(r#"["egm7"]"#), ["egm7"]);
    assert_eq!(regions(r#"["egm4","local"]"#), ["egm4", "local"], "the most wanted first");
    assert_eq!(regions(&names(16)).len(), 16);
    let list = "egm[0].region: a list of regions has 1 to 16 different ones";
    refused(&[
        (&egm("[]", ""), list),
        (&egm(&names(17), ""), list),
        (&egm(r#"["egm4","egm5","egm4"]"#, ""), list),
        (&egm(r#""a b""#, ""), "egm[0].region: \"a b\" is not a name"),
        (&egm(r#"["egm4","a b"]"#, ""), "egm[0].region[1]: \"a b\" is not a name"),
    ]);
    // Pages and host nodes are a choice only where one of the regions is ordinary memory.
    for member in [r#","page_size":"2M""#, r#","host_nodes":"0""#] {
        for region in [r#""local""#, r#""memfd""#, r#""hugetlb""#, r#"["egm4","hugetlb"]"#] {
            assert!(read(egm(region, member)).is_ok(), "{region} {member}");
        }
        for region in [r#""egm4""#, r#"["egm4","guest-memfd"]"#] {
            assert!(complaint(&egm(region, member)).contains("only a \"local\" slice chooses this"));
        }
    }
}

#[test]
fn a_node_of_a_slice_is_one_of_256() {
    let egm = |node: u32| machine(&format!(r#","egm":[{{"region":"egm4","size":"2MiB","node":{node}}}]"#));
    assert_eq!(spec(&egm(255)).egm[0].node, 255);
    refused(&[(&egm(256), "egm[0].node: 256 is outside 0 to 255")]);
}

#[test]
fn only_slices_that_are_memory_of_no_other_node_have_nodes_of_their_own() {
    let slice =
        |node: u32, form: &str| format!(r#"{{"region":"egm4","size":"1GiB","node":{node},"as":"{form}"}}"#);
    let egm = [slice(1, "memory"), slice(2, "memory"), slice(0, "device"), slice(3, "memory")].join(",");
    let nodes = r#"{"id":0,"size":"1GiB","cpus":"0"},{"id":2,"cpus":"1"}"#;
    let text = format!(
        r#"{{"boot":{{"kernel":"k"}},"cpus":{{"count":2}},"memory":{{"nodes":[{nodes}]}},"egm":[{egm}]}}"#
    );
    let own: Vec<_> = spec(&text).nodes_of_slices().map(|slice| slice.node).collect();
    assert_eq!(own, [1, 3]);
}

#[test]
fn pages_of_a_pool_are_those_that_configurations_name() {
    for size in [PageSize::Auto, PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
        let pool = PageSize::of_pool(size.bytes());
        assert_eq!(pool, size.is_hugetlb().then_some(size), "{size:?}");
    }
    assert_eq!([0, 64 << 10, 32 << 20, 16 << 30].map(PageSize::of_pool), [None; 4]);
}

#[test]
fn a_slice_may_be_the_memory_of_a_node_with_processors() {
    let with = |nodes: &str, egm: &str| {
        format!(r#"{{"boot":{{"kernel":"k"}},"memory":{{"nodes":[{nodes}]}},"egm":[{egm}]}}"#)
    };
    let nodes = r#"{"id":0,"cpus":"0","distances":{"1":40},"access":[{"from":0,"latency_ns":90,"bandwidth_mbps":7}]},{"id":1,"size":"1GiB"}"#;
    let slice = r#"{"region":"local","size":"2GiB","node":0}"#;
    let both = spec(&with(nodes, slice));
    assert_eq!(both.memory.size.get(), 1 << 30, "EGM is not counted");
    assert_eq!(both.slice_of(0).map(|(index, slice)| (index, slice.size.get())), Some((0, 2 << 30)));
    assert_eq!((both.slice_of(1), both.nodes_of_slices().count()), (None, 0));
    assert_eq!(both.memory.nodes[0].distances, [(0, 10), (1, 40)].into());
    assert_eq!(both.egm[0].access, both.memory.nodes[0].access);
    let only = spec(&with(r#"{"id":0,"cpus":"0"}"#, slice));
    assert_eq!(only.memory.size.get(), 0);
    let slice = |more: &str| format!(r#"{{"region":"local","size":"2GiB",{more}}}"#);
    let bare = r#"{"id":0,"cpus":"0"}"#;
    refused(&[
        (&with(bare, ""), "memory.size: the size is 0"),
        (&with(bare, &slice(r#""node":1"#)), "memory.size: the size is 0"),
        (&with(bare, &slice(r#""node":0,"as":"device""#)), "memory.size: the size is 0"),
        (&with(bare, &slice(r#""node":0,"distances":{}"#)), "egm[0].distances: node 0 is described in"),
        (&with(bare, &slice(r#""node":0,"access":[]"#)), "egm[0].access: node 0 is described in"),
        (
            &with(r#"{"id":0,"cpus":"0","host_nodes":"0"}"#, &slice(r#""node":0"#)),
            "egm[0].node: node 0 has ordinary memory",
        ),
        (
            &with(bare, &format!("{0},{0}", slice(r#""node":0"#))),
            "egm[1].node: node 0 exists already, in egm[0]",
        ),
    ]);
}

#[test]
fn distances_and_access_figures_keep_their_rules() {
    let node1 = |text: &str| {
        format!(
            r#"{{"boot":{{"kernel":"k"}},"memory":{{"nodes":[{{"id":0,"size":"1GiB","cpus":"0"}},
               {{"id":1,"size":"1GiB",{text}}}]}}}}"#
        )
    };
    let access = |figures: &str| node1(&format!(r#""access":[{figures}]"#));
    refused(&[
        (&node1(r#""distances":{"0":9}"#), "memory.nodes[1].distances.0: 9 is outside 11 to 254"),
        (&node1(r#""distances":{"0":255}"#), "memory.nodes[1].distances.0: 255 is outside 11 to 254"),
        (
            &node1(r#""distances":{"0":256}"#),
            "memory.nodes[1].distances.0: found 256, expected a number from 0 to 255",
        ),
        (&node1(r#""distances":{"1":20}"#), "distances.1: the distance of a node to itself is 10, not 20"),
        (
            &node1(r#""distances":{"2":20}"#),
            "memory.nodes[1].distances.2: there is no node \"2\": nodes are [0, 1]",
        ),
        (&node1(r#""distances":{"x":20}"#), "there is no node \"x\""),
        (
            &access(r#"{"from":1,"latency_ns":1,"bandwidth_mbps":1}"#),
            "nodes[1].access[0].from: node 1 has no vCPUs",
        ),
        (
            &access(r#"{"from":7,"latency_ns":1,"bandwidth_mbps":1}"#),
            "access[0].from: there is no node \"7\"",
        ),
        (
            &access(r#"{"from":0,"latency_ns":0,"bandwidth_mbps":1}"#),
            "access[0].latency_ns: 0 is outside 1 to 65534",
        ),
        (
            &access(r#"{"from":0,"latency_ns":1,"bandwidth_mbps":65534001}"#),
            "65534001 is outside 1 to 65534000",
        ),
        (&access(r#"{"from":0,"latency_ns":1}"#), "access[0]: key \"bandwidth_mbps\" is missing"),
        (
            &access(
                r#"{"from":0,"latency_ns":1,"bandwidth_mbps":1},{"from":0,"latency_ns":1,"bandwidth_mbps":1}"#,
            ),
            "access[1].from: memory as seen from node 0 is described twice",
        ),
    ]);
    let spec = spec(&node1(r#""distances":{"0":31}"#));
    assert_eq!(spec.memory.nodes[0].distances, [(0, 10), (1, 31)].into());
}

#[test]
fn devices_keep_their_rules() {
    let devices = |text: &str| machine(&format!(r#","devices":[{text}]"#));
    let net = |text: &str| devices(&format!(r#"{{"type":"virtio-net","tap":"t",{text}}}"#));
    let long = "x".repeat(108);
    refused(&[
        (
            &devices(r#"{"type":"virtio-rng","id":"a"},{"type":"virtio-rng","id":"a"}"#),
            "devices[1].id: id \"a\" is that of devices[0] already",
        ),
        (&devices(r#"{"type":"virtio-rng","id":"a/b"}"#), "devices[0].id: \"a/b\" is not a name"),
        (
            &devices(r#"{"type":"virtio-net","tap":"sixteen-bytes-xx"}"#),
            "devices[0].tap: \"sixteen-bytes-xx\" cannot name a network interface",
        ),
        (&devices(r#"{"type":"virtio-net","tap":"a/b"}"#), "devices[0].tap: \"a/b\" cannot name"),
        (&devices(r#"{"type":"virtio-net","tap":[1]}"#), "devices[0].tap: 1 is outside 3 to 2147483647"),
        (&devices(r#"{"type":"virtio-net","tap":[]}"#), "devices[0].tap: the list is empty"),
        (&devices(r#"{"type":"virtio-net","tap":{}}"#), "devices[0].tap: found an object"),
        (
            &devices(r#"{"type":"virtio-net","tap":[3,4],"queue_pairs":1}"#),
            "devices[0].queue_pairs: 2 descriptors for 1 queue pair: name one for each",
        ),
        (
            &devices(r#"{"type":"virtio-net","tap":[3]},{"type":"virtio-net","tap":[4,3]}"#),
            "devices[1].tap: descriptor 3 belongs to devices[0].tap already",
        ),
        (&net(r#""mac":"01:00:5e:00:00:01""#), "devices[0].mac: 01:00:5e:00:00:01 is a multicast address"),
        (
            &net(r#""mac":"00:00:00:00:00:00""#),
            "devices[0].mac: 00:00:00:00:00:00 is a multicast address or all zero",
        ),
        (&net(r#""mac":"52:54:00:00:01""#), "devices[0].mac: \"52:54:00:00:01\" is not a hardware address"),
        (&net(r#""queue_pairs":17"#), "devices[0].queue_pairs: 17 is outside 1 to 16"),
        (&devices(r#"{"type":"virtio-vsock","cid":2}"#), "devices[0].cid: 2 is outside 3 to 4294967294"),
        (
            &devices(r#"{"type":"virtio-vsock","cid":3},{"type":"virtio-vsock","cid":4}"#),
            "devices[1].type: a guest has one virtio-vsock, which devices[0].type names already",
        ),
        (
            &devices(r#"{"type":"virtio-blk","path":"d"},{"type":"virtio-blk","path":"d"}"#),
            "devices[1].path: disk d belongs to devices[0].path already",
        ),
        (
            &devices(r#"{"type":"vfio","function":"1:0.0"},{"type":"vfio","function":"0000:01:00.0"}"#),
            "function 0000:01:00.0 belongs to devices[0].function already",
        ),
        (
            &devices(
                r#"{"type":"virtio-net","tap":"a","mac":"52:54:00:12:34:AB"},
                   {"type":"virtio-net","tap":"b","mac":"52:54:00:12:34:ab"}"#,
            ),
            "devices[1].mac: hardware address 52:54:00:12:34:ab belongs to devices[0].mac already",
        ),
        (&devices(r#"{"type":"virtio-blk","path":""}"#), "devices[0].path: the path is empty"),
        (
            &devices(&format!(r#"{{"type":"vfio-user","socket":"{long}"}}"#)),
            "devices[0].socket: socket path of 108 bytes: the kernel takes 107",
        ),
        (
            &machine(&format!(r#","console":{{"type":"socket","path":"{long}"}}"#)),
            "console.path: socket path of 108 bytes",
        ),
        (&machine(r#","pcie":{"window64":"100"}"#), "pcie.window64: 100 is not a multiple of 1MiB"),
        (&machine(r#","pcie":{"spare":{"ports":31}}"#), "pcie.spare.ports: 31 is outside 1 to 30"),
        (&machine(r#","pcie":{"spare":{}}"#), "pcie.spare: key \"ports\" is missing"),
        (
            &machine(r#","pcie":{"spare":{"ports":1,"window64":"3GiB"}}"#),
            "pcie.spare.window64: 3GiB is not a power of two: write for instance 4GiB",
        ),
        (&machine(r#","pcie":{"topology":"mirrored"}"#), "pcie.topology: unknown name \"mirrored\""),
    ]);
}

#[test]
fn host_functions_keep_their_rules() {
    let devices = |text: &str| machine(&format!(r#","devices":[{text}]"#));
    let vfio = |text: &str| devices(&format!(r#"{{"type":"vfio","function":"1:0.0",{text}}}"#));
    refused(&[
        (&vfio(r#""backend":"vfio""#), "devices[0].backend: unknown name \"vfio\""),
        (&vfio(r#""clique":16"#), "devices[0].clique: 16 is outside 0 to 15"),
        (&vfio(r#""clique":"on""#), "devices[0].clique: unknown name \"on\""),
        (
            &vfio(r#""clique":[]"#),
            "devices[0].clique: found an array, expected \"auto\", \"off\" or a number",
        ),
        (&vfio(r#""bars":"hots""#), "devices[0].bars: unknown name \"hots\""),
        (
            &vfio(r#""bars":7"#),
            "devices[0].bars: found 7, expected \"guest\", \"host\", or an object such as",
        ),
        (&vfio(r#""bars":{"6":"host"}"#), "devices[0].bars.6: \"6\" is not the number of a BAR"),
        (&vfio(r#""bars":{"2":"12"}"#), "devices[0].bars.2: \"12\" is not a place for a BAR"),
        (&vfio(r#""bars":{"2":2}"#), "devices[0].bars.2: found 2, expected a string"),
    ]);
    let wishes =
        vfio(r#""backend":"iommufd","clique":3,"bars":{"2":"host","4":"0x200000000000"},"p2p":false"#);
    let at = BarPlacement::At(Gpa::new(0x2000_0000_0000));
    assert_eq!(
        spec(&wishes).devices[0].kind,
        DeviceKind::Vfio {
            function: "1:0.0".parse().unwrap(),
            backend: VfioBackend::Iommufd,
            clique: Clique::Number(3),
            bars: BarPlacements::Each(vec![
                FixedBar { index: 2, place: BarPlacement::Host },
                FixedBar { index: 4, place: at }
            ]),
            p2p: false,
        }
    );
    assert!(spec(&devices(r#"{"type":"vfio","function":"0009:01:00.0"}"#)).devices[0].root_port);
    assert!(
        !spec(&devices(r#"{"type":"vfio","function":"0009:01:00.0","root_port":false}"#)).devices[0]
            .root_port
    );
}

#[test]
fn a_virtio_device_is_no_function_of_the_host_a_server_or_a_slice() {
    let assigned = |members: &str| spec(&machine(members)).devices[0].kind.is_assigned();
    let device = |device: &str| assigned(&format!(r#","devices":[{device}]"#));
    assert!(device(r#"{"type":"vfio","function":"01:00.0"}"#));
    assert!(device(r#"{"type":"vfio-user","socket":"s"}"#));
    assert!(assigned(r#","egm":[{"region":"local","size":"1GiB","node":0,"as":"device"}]"#));
    for virtio in [
        r#"{"type":"virtio-rng"}"#,
        r#"{"type":"virtio-blk","path":"d"}"#,
        r#"{"type":"virtio-net","tap":"t"}"#,
        r#"{"type":"virtio-vsock","cid":3}"#,
    ] {
        assert!(!device(virtio), "{virtio}");
    }
}

#[test]
fn lists_are_bounded() {
    let many = |entry: &str| [entry; 256].join(",");
    refused(&[
        (
            &machine(&format!(r#","devices":[{}]"#, many(r#"{"type":"virtio-rng"}"#))),
            "devices: 256 entries: 255 at most",
        ),
        (
            &machine(&format!(r#","egm":[{}]"#, many(r#"{"region":"r","size":"2M","node":1}"#))),
            "egm: 256 entries: 255 at most",
        ),
    ]);
}

#[test]
fn what_a_plan_shows_holds_no_control_characters() {
    let control = "contains the control character '\\u{1b}': remove it";
    let device = |device: &str| machine(&format!(r#","devices":[{device}]"#));
    let cases = [
        (machine(r#","description":"\u001b[31m""#), "description: "),
        (r#"{"memory":{"size":"1G"},"boot":{"kernel":"\u001bc"}}"#.to_owned(), "boot.kernel: "),
        (device(r#"{"type":"virtio-blk","path":"\u001bc"}"#), "devices[0].path: "),
        (device(r#"{"type":"vfio-user","socket":"\u001bc"}"#), "devices[0].socket: "),
        (machine(r#","console":{"type":"file","path":"\u001bc"}"#), "console.path: "),
        (r#"{"extends":"\u001bc/base.json"}"#.to_owned(), "extends: "),
    ];
    for (text, key) in &cases {
        refused(&[(text, &format!("{key}{control}"))]);
    }
    refused(&[(&device(r#"{"type":"virtio-net","tap":"\u001bc"}"#), "without space, control character")]);
}

#[test]
fn the_kernel_command_line_keeps_its_rules() {
    let boot = |cmdline: &str| {
        format!(r#"{{"memory":{{"size":"1G"}},"boot":{{"kernel":"k","cmdline":"{cmdline}"}}}}"#)
    };
    refused(&[
        (
            &boot(&"x".repeat(2048)),
            "boot.cmdline: the kernel command line has 2048 bytes: Linux reads 2047 at most",
        ),
        (&boot(r"a\u0000b"), "boot.cmdline: contains the control character '\\0'"),
        (&boot(r"a\nb"), "contains the control character '\\n'"),
    ]);
    assert_eq!(spec(&boot(&"x".repeat(2047))).boot.cmdline.len(), 2047);
    let tree = |arch: &str| {
        let boot = r#"{"kernel":"k","tables":"device-tree"}"#;
        format!(r#"{{"arch":"{arch}","memory":{{"size":"1G"}},"boot":{boot}}}"#)
    };
    assert_eq!(spec(&tree("aarch64")).boot.tables, BootTables::DeviceTree);
    let x86 = tree("x86_64");
    refused(&[(&x86, "boot.tables: kernels for x86_64 are not started with a device tree")]);
}

#[test]
fn the_command_line_takes_precedence() {
    let overrides = Overrides {
        kernel: Some("other".into()),
        initramfs: Some("rd".into()),
        append: Some("quiet".to_owned()),
        ..Overrides::default()
    };
    let text = r#"{"memory":{"size":"1G"},"boot":{"kernel":"k","cmdline":"a=b"}}"#;
    let boot = read_with(text, &overrides).unwrap().boot;
    assert_eq!((boot.kernel, boot.initramfs), ("other".into(), Some("rd".into())));
    assert_eq!(boot.cmdline, "a=b quiet");
    let boot = read_with(r#"{"memory":{"size":"1G"}}"#, &overrides).unwrap().boot;
    assert_eq!(boot.cmdline, "quiet");
}

#[test]
fn on_reset_of_the_file_wins_over_the_programs_default() {
    let machine = |rest: &str| format!(r#"{{"memory":{{"size":"1G"}},"boot":{{"kernel":"k"}}{rest}}}"#);
    let (silent, exits, reboots) =
        (machine(""), machine(r#","on_reset":"exit""#), machine(r#","on_reset":"reboot""#));
    let serve = Overrides { default_on_reset: OnReset::Reboot, ..Overrides::default() };
    let read = |text: &str, overrides| read_with(text, overrides).unwrap().on_reset;
    let run = Overrides::default();
    assert_eq!(
        [&silent, &exits, &reboots].map(|text| read(text, &run)),
        [OnReset::Exit, OnReset::Exit, OnReset::Reboot]
    );
    assert_eq!([&silent, &exits].map(|text| read(text, &serve)), [OnReset::Reboot, OnReset::Exit]);
    refused(&[(&machine(r#","on_reset":"restart""#), "on_reset: unknown name \"restart\"")]);
}

/// A folder with `files`, each a name and a text.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

#[test]
fn objects_merge_and_everything_else_replaces() {
    let folder = folder(&[
        ("top.json", r#"{"extends":"low.json","boot":{"cmdline":"b"},"devices":[]}"#),
        (
            "low.json",
            r#"{"memory":{"size":"1G"},"boot":{"kernel":"/k","cmdline":"a"},"devices":[{"type":"virtio-rng"}]}"#,
        ),
    ]);
    let spec = load(&folder.path().join("top.json")).unwrap();
    assert_eq!((spec.boot.kernel, spec.boot.cmdline), (PathBuf::from("/k"), "b".to_owned()));
    assert_eq!((spec.devices.len(), spec.name.as_str()), (0, "top"));
}

#[test]
fn a_path_is_relative_to_the_file_that_wrote_it() {
    let folder = folder(&[
        ("top.json", r#"{"extends":"base/low.json","boot":{"initramfs":"rd"}}"#),
        ("base/low.json", r#"{"memory":{"size":"1G"},"boot":{"kernel":"k"}}"#),
    ]);
    let boot = load(&folder.path().join("top.json")).unwrap().boot;
    assert_eq!(boot.kernel, folder.path().join("base/k"));
    assert_eq!(boot.initramfs, Some(folder.path().join("rd")));
}

#[test]
fn an_error_points_into_the_file_that_wrote_the_value() {
    let folder = folder(&[
        ("top.json", r#"{"extends":"low.json","boot":{"kernel":"k"}}"#),
        ("low.json", "{\n  \"memory\": {\n    \"size\": \"1001\"\n  }\n}"),
    ]);
    let error = load(&folder.path().join("top.json")).unwrap_err().first;
    assert_eq!(error.key, "memory.size");
    assert_eq!(error.place, Some(FilePosition { file: folder.path().join("low.json"), line: 3, column: 5 }));
}

#[test]
fn files_that_extend_each_other_for_ever_are_refused_with_their_chain() {
    let folder = folder(&[("a.json", r#"{"extends":"b.json"}"#), ("b.json", r#"{"extends":"a.json"}"#)]);
    let error = load(&folder.path().join("a.json")).unwrap_err().to_string();
    assert!(error.contains("b.json:1:2: extends: files extend each other in a circle: "), "{error}");
    assert!(error.ends_with("a.json"), "{error}");

    let chain: Vec<_> =
        (0..9).map(|n| (format!("{n}.json"), format!(r#"{{"extends":"{}.json"}}"#, n + 1))).collect();
    let chain: Vec<_> = chain.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let error = load(&self::folder(&chain).path().join("0.json")).unwrap_err().first;
    assert!(matches!(*error.rule, Rule::ExtendsDepth { limit: 8, .. }), "{error}");
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = load(Path::new("/nonexistent/vm.json")).unwrap_err();
    let said = shown(&error);
    assert!(said.starts_with("error: cannot read /nonexistent/vm.json\n  caused by: No such file"), "{said}");
    assert!(said.contains("help: name a configuration file that exists and that you may read"), "{said}");
    refused(&[
        (r#"{"extends":"nowhere.json"}"#, "vm.json:1:2: extends: cannot read nowhere.json"),
        (r#"{"extends":7}"#, "extends: found 7, expected a string"),
    ]);
}

/// FNV-1a of "machine/id"; guests keep the names of their interfaces from one release to the next.
#[test]
fn a_hardware_address_never_changes_with_a_release() {
    let text = machine(r#","name":"a","devices":[{"type":"virtio-net","tap":"t"}]"#);
    let DeviceKind::VirtioNet { mac, .. } = &spec(&text).devices[0].kind else { panic!("no network card") };
    assert_eq!(*mac, [22, 50, 109, 249, 198, 205]);
}

#[test]
fn a_hardware_address_has_six_parts_of_two_digits() {
    let net =
        |mac: &str| machine(&format!(r#","devices":[{{"type":"virtio-net","tap":"t","mac":"{mac}"}}]"#));
    assert!(read(net("02:00:00:00:00:01")).is_ok());
    for mac in ["2:00:00:00:00:01", "002:00:00:00:00:01", "+2:00:00:00:00:01", "02:00:00:00:01"] {
        assert!(read(net(mac)).is_err(), "{mac}");
    }
}

#[test]
fn limits_are_themselves_allowed() {
    let socket =
        |length: usize| format!(r#","console":{{"type":"socket","path":"/{}"}}"#, "x".repeat(length - 1));
    assert!(read(machine(&socket(107))).is_ok());
    assert!(read(machine(&socket(108))).is_err());
    let devices = [r#"{"type":"virtio-rng"}"#; 255].join(",");
    assert_eq!(spec(&machine(&format!(r#","devices":[{devices}]"#))).devices.len(), 255);
}

#[test]
fn the_largest_memory_and_file_are_themselves_allowed() {
    let memory = |size: &str| format!(r#"{{"boot":{{"kernel":"k"}},"memory":{{"size":"{size}"}}}}"#);
    assert_eq!(spec(&memory("4096TiB")).memory.size.get(), 1 << 52);
    assert!(read(memory("4503599627374592")).is_err(), "one page more");
    let small = machine("");
    let padded = |length: usize| small.clone() + &" ".repeat(length - small.len());
    assert!(read(padded(1 << 20)).is_ok());
    assert!(matches!(*read(padded((1 << 20) + 1)).unwrap_err().first.rule, Rule::FileTooLarge { .. }));
}

/// Two slips, or one in three characters of a longer name.
#[test]
fn a_longer_name_may_have_more_slips() {
    let near = |wrong: &str| nearest(wrong, ["description", "egm"].into_iter());
    assert_eq!(near("dscrptin"), Some("description"), "three letters left out");
    assert_eq!(near("dscrptn"), None, "four");
    assert_eq!([near("em"), near("emm2"), near("x")], [Some("egm"), Some("egm"), None]);
}

#[test]
fn names_of_cliques_and_of_places_for_bars_choose_what_they_name() {
    let function = |member: &str| {
        let text = format!(r#","devices":[{{"type":"vfio","function":"01:00.0",{member}}}]"#);
        format!("{:?}", spec(&machine(&text)).devices[0].kind)
    };
    for (member, wanted) in [
        (r#""clique":"auto""#, "clique: Auto"),
        (r#""clique":"off""#, "clique: Off"),
        (r#""clique":15"#, "clique: Number(15)"),
        (r#""bars":"guest""#, "bars: Guest"),
        (r#""bars":"host""#, "bars: Host"),
    ] {
        let kind = function(member);
        assert!(kind.contains(wanted), "{member}: {kind}");
    }
}

#[test]
fn a_console_shares_no_path_with_a_disk_or_a_socket() {
    let disk = r#","devices":[{"type":"virtio-blk","path":"/d"}],"console":{"type":"file","path":"/d"}"#;
    let peer = r#","devices":[{"type":"vfio-user","socket":"/s"}],"console":{"type":"socket","path":"/s"}"#;
    refused(&[(&machine(disk), "devices[0].path"), (&machine(peer), "devices[0].socket")]);
}

#[test]
fn a_value_of_the_wrong_type_is_answered_in_the_words_of_json() {
    let pairs = r#","devices":[{"type":"virtio-net","tap":"t","queue_pairs":"two"}]"#;
    let distances = r#","egm":[{"region":"r","size":"2M","node":1,"distances":7}]"#;
    refused(&[
        (&machine(pairs), "expected a number from 0 to 65535"),
        (&machine(r#","devices":7"#), "expected an array"),
        (&machine(distances), "expected an object"),
    ]);
}

#[test]
fn only_other_tables_than_acpi_are_written() {
    let boot = |tables: &str| {
        let text =
            format!(r#"{{"arch":"aarch64","boot":{{"kernel":"k"{tables}}},"memory":{{"size":"1GiB"}}}}"#);
        serde_json::to_value(spec(&text).boot).unwrap()
    };
    assert_eq!(boot("").get("tables"), None);
    assert_eq!(boot(r#","tables":"acpi""#).get("tables"), None);
    assert_eq!(boot(r#","tables":"device-tree""#)["tables"], "device-tree");
}

/// Text that is nearly a configuration: ours with one character replaced, added or taken away.
fn nearly_the_demo() -> impl Strategy<Value = String> {
    let text = fs::read_to_string(repository("demo.json")).unwrap();
    let text = text.replace("base-x86_64.json", repository("base-x86_64.json").to_str().unwrap());
    (0..text.len(), any::<char>(), prop_oneof!["[\\[\\]{},:\"0-9a-z]", Just(String::new())], any::<bool>())
        .prop_map(move |(at, any, near, replace)| {
            let at = (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            let rest = text[at..].chars().skip(usize::from(replace)).collect::<String>();
            let new = if any.is_control() { any.to_string() } else { near };
            format!("{}{new}{rest}", &text[..at])
        })
}

proptest! {
    #[test]
    fn any_bytes_are_a_machine_or_an_error(bytes: Vec<u8>) {
        if let Err(error) = read(bytes) {
            prop_assert!(!shown(&error).is_empty());
        }
    }

    #[test]
    fn any_text_of_json_characters_is_a_machine_or_an_error(text in "[\\[\\]{},:\"0-9a-z\\\\ -]{0,60}") {
        if let Err(error) = read(text) {
            prop_assert!(!shown(&error).is_empty());
        }
    }

    #[test]
    fn a_slip_of_the_pen_is_a_machine_or_an_error_with_a_place(text in nearly_the_demo()) {
        if let Err(error) = read(text) {
            prop_assert!(error.first.place.is_some(), "{}", error);
        }
    }
}

#[test]
fn a_message_repeats_neither_control_characters_nor_long_names() {
    let said = |members: &str| {
        let error = read(machine(members)).unwrap_err();
        assert_eq!(error.blame(), Blame::Configuration);
        Chain(&error).to_string()
    };
    let key = said(r#","memory\u001b[31m":1"#);
    assert!(key.contains("unknown key \"memory\\u{1b}[31m\"\n  1 | "), "{key}");
    assert!(key.contains("\n  help: keys here are: arch") && !key.contains('\u{1b}'), "{key}");
    let size = said(r#","pcie":{"window64":"\u001b[31m"}"#);
    assert!(size.contains("size \"\\u{1b}[31m\" does not start") && !size.contains('\u{1b}'), "{size}");
    let name = said(&format!(r#","name":"{}""#, "é".repeat(9999)));
    assert!(name.chars().count() < 3000, "{}", name.len());
}
