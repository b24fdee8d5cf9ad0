//! The schema of configurations beside the program that reads them.

use std::path::Path;

use egm_fixtures::schema::accepts;
use serde_json::Value;

use crate::boot::Overrides;
use crate::resolve::resolve;
use crate::source::Document;

fn schema() -> Value {
    serde_json::from_str(&crate::schema()).unwrap()
}

/// Whether the program takes `text`.
fn is_read(text: &str) -> bool {
    let document = Document::from_bytes(Path::new("vm.json"), text.as_bytes().to_vec());
    document.is_ok_and(|document| resolve(document, &Overrides::default()).is_ok())
}

/// A machine with the member `member`.
fn machine(member: &str) -> String {
    let (memory, boot) = (r#""memory":{"size":"1GiB"}"#, r#""boot":{"kernel":"k"}"#);
    let key = member.split_once(':').unwrap().0;
    let others = [memory, boot].into_iter().filter(|other| !other.starts_with(key));
    format!("{{{}}}", others.chain([member]).collect::<Vec<_>>().join(","))
}

/// A machine with one device.
fn device(members: &str) -> String {
    machine(&format!(r#""devices":[{{{members}}}]"#))
}

/// A machine with one slice, of node 1.
fn slice(members: &str) -> String {
    let has = |key: &str| members.contains(&format!("\"{key}\":"));
    let usual = [("region", "\"local\""), ("size", "\"1GiB\""), ("node", "1")];
    let usual =
        usual.into_iter().filter(|(key, _)| !has(key)).map(|(key, value)| format!("\"{key}\":{value}"));
    let members: Vec<String> = usual.chain([members.to_owned()]).collect();
    machine(&format!(r#""egm":[{{{}}}]"#, members.join(",")))
}

fn net(member: &str) -> String {
    device(&format!(r#""type":"virtio-net","tap":"t",{member}"#))
}

fn vfio(member: &str) -> String {
    device(&format!(r#""type":"vfio","function":"01:00.0",{member}"#))
}

/// A machine with `count` devices.
fn rng(count: usize) -> String {
    machine(&format!(r#""devices":[{}]"#, vec![r#"{"type":"virtio-rng"}"#; count].join(",")))
}

/// A machine with a console at a socket with a path of `length` bytes.
fn console(length: usize) -> String {
    machine(&format!(r#""console":{{"type":"socket","path":"{}"}}"#, "s".repeat(length)))
}

fn cmdline(text: &str) -> String {
    machine(&format!(r#""boot":{{"kernel":"k","cmdline":"{text}"}}"#))
}

/// A machine with one node.
fn node(member: &str) -> String {
    machine(&format!(r#""memory":{{"nodes":[{{"id":0,"cpus":"0",{member}}}]}}"#))
}

/// A machine with a slice of one of `count` regions.
fn regions(count: usize) -> String {
    let names: Vec<String> = (0..count).map(|index| format!("\"egm{index}\"")).collect();
    slice(&format!(r#""region":[{}]"#, names.join(",")))
}

/// Each pair is a value at a limit, or of the right form, and one beyond: the program and the schema agree on both.
#[track_caller]
fn agree(pairs: &[(String, String)]) {
    let schema = schema();
    let described = |text: &str| accepts(&schema, &serde_json::from_str(text).unwrap());
    for (good, bad) in pairs {
        assert!(is_read(good), "{good} is refused");
        assert!(described(good), "{good} is not described");
        assert!(!is_read(bad), "{bad} is read");
        assert!(!described(bad), "{bad} is described");
    }
}

#[test]
fn what_the_program_refuses_of_a_machine_for_its_range_or_form_the_schema_refuses_too() {
    agree(&[
        (machine(r#""name":"a.b_c-9""#), machine(r#""name":"a b""#)),
        (
            machine(&format!(r#""name":"{}""#, "a".repeat(64))),
            machine(&format!(r#""name":"{}""#, "a".repeat(65))),
        ),
        (machine(r#""arch":"aarch64""#), machine(r#""arch":"arm""#)),
        (machine(r#""cpus":{"count":254}"#), machine(r#""cpus":{"count":255}"#)),
        (machine(r#""cpus":{"count":1}"#), machine(r#""cpus":{"count":0}"#)),
        (machine(r#""cpus":{"topology":{"cores":254}}"#), machine(r#""cpus":{"topology":{"cores":255}}"#)),
        (machine(r#""cpus":{"topology":{"threads":1}}"#), machine(r#""cpus":{"topology":{"threads":0}}"#)),
        (machine(r#""cpus":{"affinity":"0-3,8"}"#), machine(r#""cpus":{"affinity":""}"#)),
        (cmdline(&"x".repeat(2047)), cmdline(&"x".repeat(2048))),
        (cmdline("a b"), cmdline("a\\u001bb")),
        (machine(r#""boot":{"kernel":"k"}"#), machine(r#""boot":{"kernel":""}"#)),
        (machine(r#""pcie":{"window64":"1GiB"}"#), machine(r#""pcie":{"window64":0}"#)),
        (machine(r#""pcie":{"spare":{"ports":30}}"#), machine(r#""pcie":{"spare":{"ports":31}}"#)),
        (machine(r#""pcie":{"spare":{"ports":1}}"#), machine(r#""pcie":{"spare":{"ports":0}}"#)),
    ]);
}

#[test]
fn what_the_program_refuses_of_memory_for_its_range_or_form_the_schema_refuses_too() {
    agree(&[
        (machine(r#""memory":{"size":"1 GiB"}"#), machine(r#""memory":{"size":"1GB"}"#)),
        (machine(r#""memory":{"size":4503599627370496}"#), machine(r#""memory":{"size":4503599627374592}"#)),
        (
            machine(r#""memory":{"size":"2M","page_size":"2M"}"#),
            machine(r#""memory":{"size":"2M","page_size":"64K"}"#),
        ),
        (node(r#""size":"1G""#), machine(r#""memory":{"nodes":[]}"#)),
        (node(r#""size":"1G","host_nodes":"0""#), node(r#""size":"1G","host_nodes":"""#)),
        (node(r#""size":"1G","distances":{"0":10}"#), node(r#""size":"1G","distances":{"0":9}"#)),
        (node(r#""size":"1G","distances":{}"#), node(r#""size":"1G","distances":{"x":20}"#)),
        (
            node(r#""size":"1G","access":[{"from":0,"latency_ns":65534,"bandwidth_mbps":65534000}]"#),
            node(r#""size":"1G","access":[{"from":0,"latency_ns":65535,"bandwidth_mbps":65534000}]"#),
        ),
        (
            node(r#""size":"1G","access":[{"from":0,"latency_ns":1,"bandwidth_mbps":1}]"#),
            node(r#""size":"1G","access":[{"from":0,"latency_ns":1,"bandwidth_mbps":65534001}]"#),
        ),
        (slice(r#""node":255"#), slice(r#""node":256"#)),
        (slice(r#""size":2097152"#), slice(r#""size":0"#)),
        (regions(16), regions(17)),
        (regions(1), regions(0)),
        (slice(r#""region":["egm4","egm5"]"#), slice(r#""region":["egm4","egm4"]"#)),
        (slice(r#""region":"egm4""#), slice(r#""region":"egm 4""#)),
        (slice(r#""as":"memory""#), slice(r#""as":"devcie""#)),
    ]);
}

#[test]
fn what_the_program_refuses_of_devices_for_its_range_or_form_the_schema_refuses_too() {
    agree(&[
        (rng(255), rng(256)),
        (device(r#""type":"virtio-rng","id":"a""#), device(r#""type":"virtio-rng","id":"a/b""#)),
        (device(r#""type":"virtio-blk","path":"d""#), device(r#""type":"virtio-blk","path":"""#)),
        (device(r#""type":"virtio-net","tap":"t""#), device(r#""type":"virtio-net","tap":"t:0""#)),
        (device(r#""type":"virtio-net","tap":[3,4]"#), device(r#""type":"virtio-net","tap":[2]"#)),
        (device(r#""type":"virtio-net","tap":[2147483647]"#), device(r#""type":"virtio-net","tap":[]"#)),
        (
            device(r#""type":"virtio-net","tap":"fifteen-letters""#),
            device(r#""type":"virtio-net","tap":"sixteen--letters""#),
        ),
        (net(r#""mac":"52:54:00:12:34:5a""#), net(r#""mac":"53:54:00:12:34:5a""#)),
        (net(r#""mac":"02:00:00:00:00:01""#), net(r#""mac":"2:0:0:0:0:1""#)),
        (net(r#""queue_pairs":16"#), net(r#""queue_pairs":17"#)),
        (net(r#""queue_pairs":1"#), net(r#""queue_pairs":0"#)),
        (device(r#""type":"virtio-vsock","cid":3"#), device(r#""type":"virtio-vsock","cid":2"#)),
        (
            device(r#""type":"virtio-vsock","cid":4294967294"#),
            device(r#""type":"virtio-vsock","cid":4294967295"#),
        ),
        (vfio(r#""clique":15"#), vfio(r#""clique":16"#)),
        (vfio(r#""bars":{"5":"host"}"#), vfio(r#""bars":{"6":"host"}"#)),
        (vfio(r#""bars":{"0":"0x1000"}"#), vfio(r#""bars":{"0":"1000"}"#)),
        (vfio(r#""backend":"iommufd""#), vfio(r#""backend":"vfio""#)),
        (console(107), console(108)),
    ]);
}

#[test]
fn every_file_in_configs_is_what_the_schema_describes() {
    let (schema, mut seen) = (schema(), 0);
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "json") && !path.ends_with("schema.json") {
            let config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            assert!(accepts(&schema, &config), "{}", path.display());
            seen += 1;
        }
    }
    assert!(seen >= 5, "{seen} files");
}
